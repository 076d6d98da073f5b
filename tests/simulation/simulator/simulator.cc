#include "tests/simulation/simulator/simulator.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/splitmix.h"
#include "scheduler/kvcache/tiers/tier_file.h"
#include "tests/simulation/oracle/patterns.h"

namespace mla::simulation {
namespace {

struct Weighted {
  Op op;
  int weight;
};
constexpr Weighted kMix[] = {
    {Op::kRegister, 2}, {Op::kUnregister, 1}, {Op::kWeights, 3},     {Op::kOpen, 12},
    {Op::kFork, 12},    {Op::kTruncate, 6},   {Op::kRelease, 6},     {Op::kRenew, 6},
    {Op::kGet, 3},      {Op::kOpenStream, 3}, {Op::kCloseStream, 2}, {Op::kBegin, 45},
    {Op::kJoin, 6},     {Op::kAttend, 90},    {Op::kQuery, 30},      {Op::kRanks, 45},
    {Op::kRepeat, 12},  {Op::kFill, 45},      {Op::kRefusable, 8},   {Op::kMalformed, 6},
    {Op::kEnd, 40},     {Op::kAbort, 4},      {Op::kLaunch, 120},    {Op::kTime, 24},
    {Op::kFault, 3},    {Op::kDrain, 1},      {Op::kQuota, 3},       {Op::kEvict, 2},
    {Op::kBranch, 12},  {Op::kResend, 8},     {Op::kTenantCall, 12}, {Op::kFlood, 3},
    {Op::kMatch, 14},   {Op::kCopy, 8},       {Op::kDamage, 4},      {Op::kHint, 12},
};
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

Simulator::Simulator(uint64_t seed) : seed_(seed), random_(SplitMix(seed)), clock_(1'000'000'000) {
  DrawConfig();
  auto device = std::make_unique<FakeDevice>(device_options_, &clock_, this);
  device_ = device.get();
  scheduler::EngineOptions options;
  options.limits = EngineLimits();
  options.tier_threads = 0;
  options.tier_path = tier_path_;
  options.dedicated_thread = false;
  uint64_t next_id = SplitMix(seed);
  options.prefix_secret.emplace();
  options.ids = [next_id]() mutable { return SplitMix(++next_id); };
  std::map<int, OracleQuota> quotas;
  for (int tenant = 1; tenant <= tenants_ && has_quotas_; ++tenant) {
    quotas[tenant] = DrawQuota();
    options.tenants.quotas[TenantName(tenant)] = QuotaOf(quotas[tenant]);
  }
  calls_ = std::make_unique<TenantCalls>(most_tenants_, [this](uint64_t n) { return Pick(n); });
  calls_->AddTo(&options.tenants);
  auto engine = scheduler::Engine::Create(options, std::move(device), &clock_);
  if (!engine.ok()) {
    Fail(absl::StrCat("the engine does not start: ", engine.status().ToString()));
    return;
  }
  engine_ = *std::move(engine);
  oracle_ = std::make_unique<Oracle>(oracle_limits_);
  oracle_->quotas = quotas;
  calls_->Start(engine_->tenants().get());
  rows_.emplace_back();
  for (int tenant = 1; tenant <= Tenants(); ++tenant) {
    const auto row = engine_->tenants()->Enter(TenantName(tenant));
    if (!row.ok()) Fail(row.status().ToString());
    rows_.push_back(row.ok() ? *row : scheduler::TenantRef());
    if (row.ok()) calls_->Keep(TenantName(tenant), *row, &violation_);
    for (int i = 0; i < 2; ++i) {
      streams_.push_back({engine_->OpenStream(TenantName(tenant)), tenant});
    }
  }
}

Simulator::~Simulator() {
  // The engine's end answers the requests of an unfinished run.
  rows_.clear();
  calls_.reset();
  engine_.reset();
}

std::string Simulator::TenantName(int tenant) const { return absl::StrCat("tenant-", tenant); }

void Simulator::DrawShapes() {
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
    shapes_.push_back(shape);
  }
  // In every fourth seed, page groups may be larger than a slab, whatever was drawn.
  if (seed_ % 4 == 0) {
    shapes_.back().layers = 4;
    shapes_.back().page = 64;
  }
}

void Simulator::DrawConfig() {
  const auto draw = [this](int low, int high) {
    return low + static_cast<int>(Pick(static_cast<uint64_t>(high - low + 1)));
  };
  tenants_ = draw(1, kMostTenants);
  DrawShapes();
  OracleLimits& limits = oracle_limits_;
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
  queue_requests_ = draw(8, 48);
  launch_rows_ = draw(4, 16);
  launch_packed_rows_ = draw(4, 40);
  launch_requests_ = draw(4, 12);
  prefill_rows_ = draw(1, launch_rows_);
  decode_rows_ = draw(1, std::min(3, launch_rows_));
  slice_wait_us_ = Chance(25) ? 0 : 200;
  kv_wait_ms_ = draw(5, 30);
  queue_ms_ = draw(500, 3000);
  tier_groups_ = Chance(50) ? draw(2, 40) : 0;
  file_groups_ = tier_groups_ > 0 && Chance(40) ? draw(4, 60) : 0;
  if (file_groups_ > 0) {
    tier_path_ = NewTierPath();
    tier_groups_ = draw(2, 10);  // few, so that the file gets some
  }
  tier_low_percent_ = draw(20, 90);
  tier_high_percent_ = draw(tier_low_percent_, 100);
  fault_percent_ = Chance(60) ? draw(5, 60) : 0;
  drains_ = Chance(15);
  loses_device_ = fault_percent_ > 0 && Chance(10);
  has_quotas_ = Chance(50);
  leases_models_ = Chance(40);
  floods_ = tenants_ < kMostTenants && fault_percent_ == 0 && Chance(50);
  light_ = floods_ ? tenants_ + 1 : 0;
  most_tenants_ = Tenants() + draw(1, 4);
  if (floods_) {  // steps that live long enough, and launches that take a part of launch_ms
    launch_ms_ = draw(1, 3);
    queue_ms_ = limits.max_lease_ns / kMilli;
    limits.step_lease_ns = draw(500, 1500) * kMilli;
    limits.sequence_lease_ns = 4 * limits.sequence_lease_ns;
  }
  FakeDeviceOptions& device = device_options_;
  device.seed = Pick(~uint64_t{0});
  device.unified = Chance(25);
  device.runs_at_submit = Chance(50);
  device.runs_after_failure = Chance(50);
  device.latency_us = draw(floods_ ? 1 : 0, 3) * 400;
  if (floods_ && device.unified) device.runs_at_submit = false;
  device.expanded_min_rows = Chance(20) ? launch_rows_ + 1 : draw(1, 4);
  device.traits.units = draw(1, 4);
  device.traits.tile_rows = draw(4, 12);
  device.traits.kv_granularity = draw(1, 4);
  device.traits.item_overhead_rows = draw(0, 6);
  device.traits.fixed_split_rows = Chance(20) ? device.traits.kv_granularity * draw(1, 3) : 0;
  device.traits.min_charged_rows = Chance(50) ? draw(1, device.traits.tile_rows) : 0;
}

scheduler::Limits Simulator::EngineLimits() const {
  scheduler::Limits limits;
  limits.kv_cache_bytes = oracle_limits_.pool_bytes;
  limits.default_page_size = 4;
  limits.max_sequences = oracle_limits_.max_sequences;
  limits.max_sequence_rows = oracle_limits_.max_sequence_rows;
  limits.max_pages_per_sequence = oracle_limits_.max_pages;
  limits.max_models = oracle_limits_.max_models;
  limits.model_yield_ms = 0;  // the oracle does not know when models were last used
  limits.max_tenants = most_tenants_;
  limits.max_layers = 4;
  limits.max_heads = 4;
  limits.max_row_dim = 8;
  limits.max_v_dim = 4;
  limits.max_top_k = kMostListed;
  limits.weights_bytes = oracle_limits_.weights_bytes;
  limits.max_step_rows = oracle_limits_.max_step_rows;
  limits.max_step_sequences = oracle_limits_.max_step_sequences;
  limits.max_open_steps = oracle_limits_.max_open_steps;
  limits.max_participants = oracle_limits_.max_participants;
  limits.queue_requests = queue_requests_;
  limits.launch_rows = launch_rows_;
  limits.launch_ms = launch_ms_;
  limits.launch_packed_rows = launch_packed_rows_;
  limits.launch_requests = launch_requests_;
  limits.prefill_rows = prefill_rows_;
  limits.decode_rows = decode_rows_;
  limits.sequence_lease_ms = oracle_limits_.sequence_lease_ns / kMilli;
  limits.max_lease_ms = oracle_limits_.max_lease_ns / kMilli;
  limits.step_lease_ms = oracle_limits_.step_lease_ns / kMilli;
  limits.slice_wait_us = slice_wait_us_;
  limits.kv_wait_ms = kv_wait_ms_;
  // At most two seconds; the longest lease is the bound.
  limits.host_tier_bytes = tier_groups_ * kvcache::kTierBlock;
  limits.file_tier_bytes = file_groups_ * kvcache::kTierBlock;
  limits.tier_file_hits = tier_low_percent_ % 2;
  limits.tier_low_percent = tier_low_percent_;
  limits.tier_high_percent = tier_high_percent_;
  limits.queue_ms = std::min<int64_t>(queue_ms_, limits.max_lease_ms);
  return limits;
}

void Simulator::Fail(const std::string& what) {
  if (violation_.empty()) violation_ = absl::StrCat(Name(op_), ": ", what);
}

void Simulator::Trace(uint64_t a, uint64_t b, uint64_t c) {
  trace_[traced_++ % trace_.size()] = {op_, Now() / 1000, a, b, c};
  Hash(static_cast<uint64_t>(op_));
  Hash(a);
  Hash(b);
  Hash(c);
}

std::string Simulator::Tail() const {
  std::string text;
  const size_t first = traced_ > trace_.size() ? traced_ - trace_.size() : 0;
  for (size_t i = first; i < traced_; ++i) {
    const TraceEntry& entry = trace_[i % trace_.size()];
    absl::StrAppend(&text, "  ", entry.at_us, " us ", Name(entry.op), " ", entry.a, " ", entry.b,
                    " ", entry.c, "\n");
  }
  return text;
}

bool Simulator::Do(Op op) {
  using S = Simulator;
  // In the order of Op.
  static constexpr bool (S::*kMethods[])() = {
      &S::RegisterAny,  &S::Unregister, &S::LoadWeights, &S::OpenAny,   &S::Fork,
      &S::Truncate,     &S::Release,    &S::Renew,       &S::Get,       &S::OpenStream,
      &S::CloseStream,  &S::Begin,      &S::Join,        &S::Attend,    &S::Query,
      &S::Ranks,        &S::Repeat,     &S::FillStep,    &S::Refusable, &S::Malformed,
      &S::End,          &S::Abort,      &S::Launch,      &S::Time,      &S::ArmFault,
      &S::Drain,        &S::SetQuota,   &S::Evict,       &S::Branch,    &S::Resend,
      &S::CallAsTenant, &S::Flood,      &S::Match,       &S::Copy,      &S::Damage,
      &S::Hint,
  };
  static_assert(std::size(kMethods) == static_cast<size_t>(Op::kCount));
  return (this->*kMethods[static_cast<size_t>(op)])();
}

Op Simulator::DrawOp() {
  int total = 0;
  for (const Weighted& one : kMix) total += one.weight;
  int drawn = static_cast<int>(Pick(static_cast<uint64_t>(total)));
  const Weighted* one = kMix;
  while (drawn >= one->weight) drawn -= (one++)->weight;
  return one->op;
}

void Simulator::Operate(Op op) {
  op_ = op;
  // Weights of tenants would change their shares.
  if (op == Op::kTenantCall && floods_) return;
  // The timer gives up calls that wait too long, before a call has any other effect.
  if (late_ && !requests_.empty()) Poll();
  if (Do(op)) ++counts_.operations[static_cast<size_t>(op)];
  if (!failed() && !undrained_ && !late_) CheckBooks();
}

std::string Simulator::Run(int operations) {
  for (int i = 0; i < operations && !failed(); ++i) {
    const Op op = DrawOp();
    // Operations that end a run early are drawn towards its end.
    const bool late = i > operations * 9 / 10;
    if (op == Op::kDrain && !(drains_ && late) && !oracle_->draining) continue;
    Operate(op);
    if (loses_device_ && late && !failed() && !device_->lost()) device_->Arm(DeviceFault::kLost);
  }
  if (!failed()) Finish();
  if (engine_ != nullptr) {
    const scheduler::EngineStats stats = engine_->Stats();
    counts_.scrubs = static_cast<int64_t>(stats.page_groups_scrubbed);
    counts_.copies = static_cast<int64_t>(stats.copies_on_write);
    counts_.slices_fused = static_cast<int64_t>(stats.slices_fused);
    counts_.pages_demoted = static_cast<int64_t>(stats.prefix.demoted);
    counts_.pages_restored = static_cast<int64_t>(stats.prefix.restored);
    counts_.pages_damaged =
        static_cast<int64_t>(stats.tiers.host.damaged + stats.tiers.file.damaged);
    counts_.pages_from_file = static_cast<int64_t>(stats.tiers.file.groups_out);
    counts_.launches = device_->launches();
    if (device_options_.unified) counts_.one_slot_launches = device_->launches();
    counts_.commands = device_->parts();
    counts_.faults = device_->faults();
    counts_.expired = oracle_->expired();
  }
  return violation_;
}

}  // namespace mla::simulation
