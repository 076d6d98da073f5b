#include "server/operations/status_source.h"

#include <algorithm>
#include <ctime>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/version/version.h"
#include "mla/v1/admin.pb.h"
#include "scheduler/tenant_table.h"
#include "server/control/admin_service.h"

namespace mla::server {
namespace {

using scheduler::Resource;

constexpr int64_t kDaySeconds = 86400;
// Columns of the page's table of tenants; Admin.GetQuota has the other resources.
constexpr std::pair<Resource, const char*> kTenantColumns[] = {
    {Resource::kKvBytes, "KV cache"},        {Resource::kWeightBytes, "weights"},
    {Resource::kSequences, "sequences"},     {Resource::kOpenSteps, "open steps"},
    {Resource::kQueuedRequests, "requests"}, {Resource::kStagedBytes, "staged"},
    {Resource::kStreams, "streams"}};

template <typename T>
uint64_t Count(T value) {
  return static_cast<uint64_t>(std::max<T>(value, 0));
}

StatusMeter CountMeter(const char* name, int64_t used, int64_t bound, std::string note = "") {
  return {name, Count(used), Count(bound), false, std::move(note)};
}

std::string ShapeText(const kernels::Geometry& g) {
  std::string text =
      absl::StrCat(g.num_heads, " heads, latent ", g.kv_lora_rank, " + ", g.rope_dim);
  if (g.v_dim > 0) absl::StrAppend(&text, ", keys ", g.nope_dim, ", values ", g.v_dim);
  return text;
}

}  // namespace

void StatusSource::Note() {
  const StatusTotals totals = Totals(options_.stats());
  const MutexLock lock(mutex_);
  rates_.Note(RateWindow::Clock::now(), totals);
}

StatusTotals StatusSource::Totals(const scheduler::EngineStats& stats) const {
  const WireCounters& wire = options_.metrics->wire();
  StatusTotals totals;
  totals.rows_decode = stats.rows_decode;
  totals.rows_extend = stats.rows_extend;
  totals.rows_prefill = stats.rows_prefill;
  totals.launches = stats.launches;
  totals.plan_hits = stats.plan_hits;
  totals.plan_misses = stats.plan_misses;
  totals.requests = stats.requests_total;
  totals.failed = stats.requests_failed;
  totals.received_bytes = wire.received_bytes + wire.shared_received_bytes;
  totals.sent_bytes = wire.sent_bytes + wire.shared_sent_bytes;
  Distribution attend = options_.metrics->AttendTimes();
  totals.bounds = std::move(attend.bounds);
  totals.latency = std::move(attend.counts);
  totals.queue = options_.metrics->QueueTimes().counts;
  return totals;
}

StatusPage StatusSource::Page() {
  const ServerState::Snapshot now = options_.state->Get();
  const scheduler::EngineStats stats = options_.stats();
  const kernels::BackendInfo& info = options_.engine->backend_info();
  const auto time = RateWindow::Clock::now();
  StatusPage page;
  page.state = now.lost ? "device lost" : now.healthy ? PhaseName(now.phase) : "unhealthy";
  page.good = now.serving();
  page.message = now.healthy ? now.message : now.why_unhealthy;
  if (options_.tls != nullptr) {
    const ReloadStats tls = options_.tls->status();
    if (!tls.why.empty()) page.message = "The TLS files on disk are not in use: " + tls.why;
    if (options_.tls->CertificateExpired()) {
      page.good = false;
      page.message = "The server's certificate has expired.";
    }
  }
  page.version = base::FullVersion();
  page.backend = absl::StrCat(info.name, info.device.empty() ? "" : " on ", info.device);
  page.uptime_seconds = std::chrono::duration_cast<std::chrono::seconds>(time - start_).count();
  const StatusTotals totals = Totals(stats);
  {
    const MutexLock lock(mutex_);
    rates_.Note(time, totals);
    page.tiles = rates_.Tiles(time, totals, &page.window);
  }
  AddMeters(stats, &page);
  AddTenants(&page);
  AddModels(&page);
  AddSections(stats, now, &page);
  page.links = {{"/metrics", "metrics"},
                {"/readyz?verbose", "readiness"},
                {"/livez", "liveness"},
                {"/statusz?json", "this page as JSON"}};
  return page;
}

void StatusSource::AddMeters(const scheduler::EngineStats& stats, StatusPage* page) const {
  const scheduler::Limits& limits = options_.engine->limits();
  const Config& config = *options_.config;
  const WireCounters& wire = options_.metrics->wire();
  page->meters = {
      {"KV page pool", Count(stats.kv_bytes_used), Count(stats.kv_bytes_total), true,
       absl::StrCat(stats.page_groups_used, " page groups in use, ", stats.page_groups_shared,
                    " of them shared by forks; ", stats.page_groups_free,
                    " free in slabs of their model")},
      CountMeter("Sequences", stats.sequences, limits.max_sequences),
      CountMeter("Open steps", stats.open_steps, limits.max_open_steps),
      CountMeter("Requests", int64_t{stats.requests_waiting} + stats.requests_running,
                 limits.queue_requests, absl::StrCat(stats.requests_running, " in a launch")),
      CountMeter("Models", stats.models, limits.max_models),
      CountMeter("Streams", wire.streams.load(), config.wire.max_streams),
      {"Staging memory", options_.staging->used_bytes(), options_.staging->total_bytes(), true, ""},
      CountMeter("Shared regions", wire.shared_regions.load(), config.shm.regions_max,
                 absl::StrCat(wire.rings.load(), " with a ring")),
  };
}

void StatusSource::AddTenants(StatusPage* page) const {
  // Tenants with the most bytes in the pool come first. Calls are counted by name only for the
  // first 64 tenants.
  std::vector<scheduler::TenantUsage> usages = options_.engine->tenants()->Usages();
  // The server's self-test uses a tenant of its own, which is not shown.
  std::erase_if(usages, [](const auto& usage) { return usage.name.front() == ' '; });
  std::stable_sort(usages.begin(), usages.end(), [](const auto& a, const auto& b) {
    return a.used[Resource::kKvBytes] > b.used[Resource::kKvBytes];
  });
  std::map<std::string, TenantTotals> calls;
  for (TenantTotals& tenant : options_.metrics->Tenants()) calls[tenant.name] = std::move(tenant);
  for (const scheduler::TenantUsage& usage : usages) {
    if (page->tenants.size() == kMaxTenantRows) {
      page->tenants_left_out = usages.size() - kMaxTenantRows;
      break;
    }
    StatusTenant tenant;
    tenant.name = usage.name;
    for (const auto& [resource, title] : kTenantColumns) {
      const int64_t bound = usage.bound[resource];
      tenant.meters.push_back({title, Count(usage.used[resource]),
                               bound == scheduler::kUnbounded ? 0 : Count(bound),
                               scheduler::RowOf(resource).bytes, ""});
    }
    const auto found = calls.find(usage.name);
    const TenantTotals totals = found == calls.end() ? TenantTotals() : found->second;
    tenant.meters.push_back({"calls", totals.ok, 0, false, ""});
    tenant.meters.push_back({"refused", totals.failed, 0, false, ""});
    page->tenants.push_back(std::move(tenant));
  }
}

void StatusSource::AddModels(StatusPage* page) const {
  for (const auto& [tenant, spec] : options_.engine->AllModels()) {
    page->models.push_back(
        {tenant, spec->id, ShapeText(spec->geometry), Count(spec->layers), Count(spec->page_size)});
  }
}

void StatusSource::AddSections(const scheduler::EngineStats& stats,
                               const ServerState::Snapshot& now, StatusPage* page) const {
  const kernels::BackendInfo& info = options_.engine->backend_info();
  page->sections.push_back({"server",
                            {{"version", std::string(base::kVersion)},
                             {"revision", std::string(base::Revision())},
                             {"boot id", absl::StrFormat("%016x", options_.boot_id)},
                             {"state", std::string(PhaseName(now.phase))},
                             {"healthy", now.healthy},
                             {"device lost", now.lost},
                             {"why unhealthy", now.why_unhealthy},
                             {"message", now.message}}});
  page->sections.push_back({"backend",
                            {{"name", info.name},
                             {"device", info.device},
                             {"arch", info.arch},
                             {"units", static_cast<uint64_t>(info.units)},
                             {"supports", info.supported}}});
  StatusSection tried{"backends tried", {}};
  for (const kernels::BackendCandidate& candidate : options_.candidates) {
    tried.rows.push_back(
        {candidate.name, candidate.chosen ? std::string("chosen") : candidate.reason});
    if (candidate.unused_hardware.empty()) continue;
    tried.rows.push_back({"not used, though this machine has it", candidate.unused_hardware});
  }
  page->sections.push_back(std::move(tried));
  if (!info.notes.empty()) {
    StatusSection notes{"notes on the backend", {}};
    for (const kernels::BackendNote& note : info.notes)
      notes.rows.push_back({note.name, note.text});
    page->sections.push_back(std::move(notes));
  }
  if (options_.tls != nullptr) {
    const ReloadStats tls = options_.tls->status();
    const int64_t remaining =
        options_.tls->current()->cert_expires - static_cast<int64_t>(std::time(nullptr));
    page->sections.push_back({"tls",
                              {{"certificate days left", Count(remaining / kDaySeconds)},
                               {"reloads", tls.reloads},
                               {"refused reloads", tls.refused},
                               {"why refused", tls.why}}});
  }
  v1::GetStatsReply reply;
  FillStats({stats, options_.metrics->wire(), options_.metrics->checkpoints(),
             options_.metrics->hand_overs()},
            &reply);
  StatusSection counters{"stats", {}};
  const auto* descriptor = v1::GetStatsReply::descriptor();
  const auto* reflection = v1::GetStatsReply::GetReflection();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const auto* field = descriptor->field(i);
    if (field->name() == "boot_id") continue;
    const uint64_t value = field->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_UINT32
                               ? reflection->GetUInt32(reply, field)
                               : reflection->GetUInt64(reply, field);
    counters.rows.push_back({field->name(), value});
  }
  page->sections.push_back(std::move(counters));
}

}  // namespace mla::server
