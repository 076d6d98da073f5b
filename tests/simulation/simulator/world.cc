#include "tests/simulation/simulator/world.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "scheduler/kvcache/tiers/tier_file.h"

namespace mla::simulation {
namespace {

constexpr const char* kNames[] = {
    "register",    "unregister", "weights", "open",        "fork",         "truncate",
    "release",     "renew",      "get",     "open_stream", "close_stream", "begin",
    "join",        "attend",     "query",   "ranks",       "repeat",       "fill",
    "refusable",   "malformed",  "end",     "abort",       "launch",       "time",
    "fault",       "drain",      "quota",   "evict",       "branch",       "resend",
    "tenant_call", "flood",      "match",   "copy",        "damage",       "hint",
};
static_assert(std::size(kNames) == static_cast<size_t>(Op::kCount));

constexpr int64_t kMilli = 1'000'000;

// Path for a file of the slowest tier; unique, because simulators run in several threads and
// processes.
std::string NewTierPath() {
  static std::atomic<int> made{0};
  const char* const folder = std::getenv("TEST_TMPDIR");
  return absl::StrCat(folder != nullptr ? folder : "/tmp", "/mla-sim-tier-", getpid(), "-",
                      made.fetch_add(1));
}

}  // namespace

const char* Name(Op op) { return op == Op::kCount ? "start" : kNames[static_cast<size_t>(op)]; }

int64_t SimulatorCounts::total() const {
  return std::accumulate(operations.begin(), operations.end(), int64_t{0});
}

void SimulatorCounts::Add(const SimulatorCounts& other) {
  for (size_t i = 0; i < operations.size(); ++i) operations[i] += other.operations[i];
  answers_checked += other.answers_checked;
  lists_checked += other.lists_checked;
  resent += other.resent;
  refusals += other.refusals;
  commits += other.commits;
  aborts += other.aborts;
  expired += other.expired;
  launches += other.launches;
  one_slot_launches += other.one_slot_launches;
  most_passed_over = std::max(most_passed_over, other.most_passed_over);
  commands += other.commands;
  faults += other.faults;
  scrubs += other.scrubs;
  copies += other.copies;
  slices_fused += other.slices_fused;
  pages_found += other.pages_found;
  pages_of_equals += other.pages_of_equals;
  pages_evicted += other.pages_evicted;
  pages_demoted += other.pages_demoted;
  pages_restored += other.pages_restored;
  pages_damaged += other.pages_damaged;
  pages_from_file += other.pages_from_file;
  pages_pinned += other.pages_pinned;
  rows_imported += other.rows_imported;
  windows_checked += other.windows_checked;
  late_checked += other.late_checked;
  sequences_moved += other.sequences_moved;
}

std::string World::TenantName(int tenant) const { return absl::StrCat("tenant-", tenant); }

void World::DrawShapes() {
  const int count = 1 + static_cast<int>(Pick(3));
  for (int i = 0; i < count; ++i) {
    Shape shape;
    shape.heads = 1 + static_cast<int>(Pick(4));
    shape.lora = 3 + static_cast<int>(Pick(4));
    shape.rope = static_cast<int>(Pick(3));
    if (Chance(75)) {
      shape.nope = 2 + static_cast<int>(Pick(3));
      shape.v = 2 + static_cast<int>(Pick(3));
    }
    shape.layers = 1 + static_cast<int>(Pick(4));
    constexpr int kPages[] = {1, 2, 3, 4, 8, 16};
    shape.page = kPages[Pick(std::size(kPages))];
    shape.scale = 0.25 * static_cast<double>(1 + Pick(4));
    shape.digest = static_cast<int>(Pick(3));
    shapes.push_back(shape);
  }
  // In every fourth seed, page groups may be larger than a slab, whatever was drawn.
  if (seed % 4 == 0) {
    shapes.back().layers = 4;
    shapes.back().page = 64;
  }
}

void World::DrawConfig() {
  const auto draw = [this](int low, int high) {
    return low + static_cast<int>(Pick(static_cast<uint64_t>(high - low + 1)));
  };
  tenants = draw(1, kMostTenants);
  DrawShapes();
  OracleLimits& limits = oracle_limits;
  limits.pool_bytes = (64 + 8 * draw(0, 4)) * 1024;
  limits.max_sequences = draw(5, 16);
  limits.max_sequence_rows = draw(24, 72);
  limits.max_pages = draw(12, 40);
  limits.max_models = draw(2, 5);
  limits.max_step_rows = draw(8, 24);
  limits.max_step_sequences = draw(1, 3);
  limits.max_open_steps = draw(2, 7);
  limits.max_participants = draw(1, 4);
  limits.weights_bytes = 1 << 16;
  limits.sequence_lease_ns = draw(100, 400) * kMilli;
  limits.step_lease_ns = draw(20, 100) * kMilli;
  limits.max_lease_ns = 2000 * kMilli;
  queue_requests = draw(8, 48);
  launch_rows = draw(4, 16);
  launch_packed_rows = draw(4, 40);
  launch_requests = draw(4, 12);
  prefill_rows = draw(1, launch_rows);
  decode_rows = draw(1, std::min(3, launch_rows));
  slice_wait_us = Chance(25) ? 0 : 200;
  kv_wait_ms = draw(5, 30);
  queue_ms = draw(500, 3000);
  tier_groups = Chance(50) ? draw(2, 40) : 0;
  file_groups = tier_groups > 0 && Chance(40) ? draw(4, 60) : 0;
  if (file_groups > 0) {
    tier_path = NewTierPath();
    tier_groups = draw(2, 10);  // few, so that the file gets some
  }
  tier_low_percent = draw(20, 90);
  tier_high_percent = draw(tier_low_percent, 100);
  fault_percent = Chance(60) ? draw(5, 60) : 0;
  drains = Chance(15);
  loses_device = fault_percent > 0 && Chance(10);
  has_quotas = Chance(50);
  leases_models = Chance(40);
  floods = tenants < kMostTenants && fault_percent == 0 && Chance(50);
  light = floods ? tenants + 1 : 0;
  most_tenants = Tenants() + draw(1, 4);
  if (floods) {  // steps that live long enough, and launches that take a part of launch_ms
    launch_ms = draw(1, 3);
    queue_ms = limits.max_lease_ns / kMilli;
    limits.step_lease_ns = draw(500, 1500) * kMilli;
    limits.sequence_lease_ns = 4 * limits.sequence_lease_ns;
  }
  FakeDeviceOptions& device = device_options;
  device.seed = Pick(~uint64_t{0});
  device.unified = Chance(25);
  device.runs_at_submit = Chance(50);
  device.runs_after_failure = Chance(50);
  device.latency_us = draw(floods ? 1 : 0, 3) * 400;
  if (floods && device.unified) device.runs_at_submit = false;
  device.expanded_min_rows = Chance(20) ? launch_rows + 1 : draw(1, 4);
  device.traits.units = draw(1, 4);
  device.traits.tile_rows = draw(4, 12);
  device.traits.kv_granularity = draw(1, 4);
  device.traits.item_overhead_rows = draw(0, 6);
  device.traits.fixed_split_rows = Chance(20) ? device.traits.kv_granularity * draw(1, 3) : 0;
  device.traits.min_charged_rows = Chance(50) ? draw(1, device.traits.tile_rows) : 0;
}

scheduler::Limits World::EngineLimits() const {
  scheduler::Limits limits;
  limits.kv_cache_bytes = oracle_limits.pool_bytes;
  limits.default_page_size = 4;
  limits.max_sequences = oracle_limits.max_sequences;
  limits.max_sequence_rows = oracle_limits.max_sequence_rows;
  limits.max_pages_per_sequence = oracle_limits.max_pages;
  limits.max_models = oracle_limits.max_models;
  limits.model_yield_ms = 0;  // the oracle does not know when models were last used
  limits.max_tenants = most_tenants;
  limits.max_layers = 4;
  limits.max_heads = 4;
  limits.max_row_dim = 8;
  limits.max_v_dim = 4;
  limits.max_top_k = kMostListed;
  limits.weights_bytes = oracle_limits.weights_bytes;
  limits.max_step_rows = oracle_limits.max_step_rows;
  limits.max_step_sequences = oracle_limits.max_step_sequences;
  limits.max_open_steps = oracle_limits.max_open_steps;
  limits.max_participants = oracle_limits.max_participants;
  limits.queue_requests = queue_requests;
  limits.launch_rows = launch_rows;
  limits.launch_ms = launch_ms;
  limits.launch_packed_rows = launch_packed_rows;
  limits.launch_requests = launch_requests;
  limits.prefill_rows = prefill_rows;
  limits.decode_rows = decode_rows;
  limits.sequence_lease_ms = oracle_limits.sequence_lease_ns / kMilli;
  limits.max_lease_ms = oracle_limits.max_lease_ns / kMilli;
  limits.step_lease_ms = oracle_limits.step_lease_ns / kMilli;
  limits.slice_wait_us = slice_wait_us;
  limits.kv_wait_ms = kv_wait_ms;
  // At most two seconds; the longest lease is the bound.
  limits.host_tier_bytes = tier_groups * kvcache::kTierBlock;
  limits.file_tier_bytes = file_groups * kvcache::kTierBlock;
  limits.tier_file_hits = tier_low_percent % 2;
  limits.tier_low_percent = tier_low_percent;
  limits.tier_high_percent = tier_high_percent;
  limits.queue_ms = std::min<int64_t>(queue_ms, limits.max_lease_ms);
  return limits;
}

void World::Fail(const std::string& what) {
  if (violation.empty()) violation = absl::StrCat(Name(op), ": ", what);
}

void World::Trace(uint64_t a, uint64_t b, uint64_t c) {
  trace[traced++ % trace.size()] = {op, Now() / 1000, a, b, c};
  Hash(static_cast<uint64_t>(op));
  Hash(a);
  Hash(b);
  Hash(c);
}

std::string World::Tail() const {
  std::string text;
  const size_t first = traced > trace.size() ? traced - trace.size() : 0;
  for (size_t i = first; i < traced; ++i) {
    const TraceEntry& entry = trace[i % trace.size()];
    absl::StrAppend(&text, "  ", entry.at_us, " us ", Name(entry.op), " ", entry.a, " ", entry.b,
                    " ", entry.c, "\n");
  }
  return text;
}

int World::AnyModel(int tenant) {
  std::vector<int> open;
  for (size_t i = 0; i < oracle->models.size(); ++i) {
    const OracleModel& model = oracle->models[i];
    if (model.open && model.tenant == tenant) open.push_back(static_cast<int>(i));
  }
  return open.empty() ? -1 : open[Pick(open.size())];
}

OracleSequence* World::AnySequence(int tenant, bool free) {
  std::vector<OracleSequence*> candidates;
  for (auto& [id, sequence] : oracle->sequences) {
    if (tenant != 0 && sequence.tenant != tenant) continue;
    // Clients do not know the forks that hold rows of an export.
    if (!sequence.of_export && (!free || !sequence.busy())) candidates.push_back(&sequence);
  }
  return candidates.empty() ? nullptr : candidates[Pick(candidates.size())];
}

bool World::Foretold(const char* call, const absl::Status& status, const Reasons& expect) {
  Hash(static_cast<uint64_t>(status.code()));
  if (status.ok() && expect.none()) return true;
  if (status.ok() || !expect.Has(DetailOf(status).reason)) {
    Fail(absl::StrCat(call, ": foretold ", expect.Join(), ", got ", status.ToString()));
  }
  ++counts.refusals;
  return false;
}

std::string World::NewRequestId() {
  if (Chance(50)) return "";
  return absl::StrCat("request-", next_key++);
}

const Stream* World::AnyStream(int tenant) {
  std::vector<const Stream*> own;
  for (const Stream& stream : streams) {
    if (stream.tenant == tenant) own.push_back(&stream);
  }
  return own[Pick(own.size())];
}

}  // namespace mla::simulation
