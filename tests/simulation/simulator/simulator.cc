#include "tests/simulation/simulator/simulator.h"

#include <iterator>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"

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
}  // namespace

Simulator::Simulator(uint64_t seed)
    : w_(seed),
      checks_(&w_),
      control_(&w_),
      copies_(&w_),
      fairness_(&w_),
      operators_(&w_),
      prefixes_(&w_),
      repeats_(&w_),
      steps_(&w_),
      transport_(&w_) {
  w_.checks = &checks_;
  w_.control = &control_;
  w_.copies = &copies_;
  w_.fairness = &fairness_;
  w_.operators = &operators_;
  w_.prefixes = &prefixes_;
  w_.repeats = &repeats_;
  w_.steps = &steps_;
  w_.transport = &transport_;
  w_.simulator = this;
  w_.DrawConfig();
  auto device = std::make_unique<FakeDevice>(w_.device_options, &w_.clock, &transport_);
  w_.device = device.get();
  scheduler::EngineOptions options;
  options.limits = w_.EngineLimits();
  options.tier_threads = 0;
  options.tier_path = w_.tier_path;
  options.dedicated_thread = false;
  uint64_t next_id = SplitMix(seed);
  options.prefix_secret.emplace();
  options.ids = [next_id]() mutable { return SplitMix(++next_id); };
  std::map<int, OracleQuota> quotas;
  for (int tenant = 1; tenant <= w_.tenants && w_.has_quotas; ++tenant) {
    quotas[tenant] = w_.operators->DrawQuota();
    options.tenants.quotas[w_.TenantName(tenant)] = w_.operators->QuotaOf(quotas[tenant]);
  }
  w_.calls =
      std::make_unique<TenantCalls>(w_.most_tenants, [this](uint64_t n) { return w_.Pick(n); });
  w_.calls->AddTo(&options.tenants);
  auto engine = scheduler::Engine::Create(options, std::move(device), &w_.clock);
  if (!engine.ok()) {
    w_.Fail(absl::StrCat("the engine does not start: ", engine.status().ToString()));
    return;
  }
  w_.engine = *std::move(engine);
  w_.oracle = std::make_unique<Oracle>(w_.oracle_limits);
  w_.oracle->quotas = quotas;
  w_.calls->Start(w_.engine->tenants().get());
  w_.rows.emplace_back();
  for (int tenant = 1; tenant <= w_.Tenants(); ++tenant) {
    const auto row = w_.engine->tenants()->Enter(w_.TenantName(tenant));
    if (!row.ok()) w_.Fail(row.status().ToString());
    w_.rows.push_back(row.ok() ? *row : scheduler::TenantRef());
    if (row.ok()) w_.calls->Keep(w_.TenantName(tenant), *row, &w_.violation);
    for (int i = 0; i < 2; ++i) {
      w_.streams.push_back({w_.engine->OpenStream(w_.TenantName(tenant)), tenant});
    }
  }
}

Simulator::~Simulator() {
  // The engine's end answers the requests of an unfinished run.
  w_.rows.clear();
  w_.calls.reset();
  w_.engine.reset();
}

bool Simulator::Do(Op op) {
  // In the order of Op.
  static constexpr bool (*kActs[])(Simulator&) = {
      [](Simulator& s) { return s.control_.RegisterAny(); },
      [](Simulator& s) { return s.control_.Unregister(); },
      [](Simulator& s) { return s.control_.LoadWeights(); },
      [](Simulator& s) { return s.control_.OpenAny(); },
      [](Simulator& s) { return s.control_.Fork(); },
      [](Simulator& s) { return s.control_.Truncate(); },
      [](Simulator& s) { return s.control_.Release(); },
      [](Simulator& s) { return s.control_.Renew(); },
      [](Simulator& s) { return s.control_.Get(); },
      [](Simulator& s) { return s.control_.OpenStream(); },
      [](Simulator& s) { return s.control_.CloseStream(); },
      [](Simulator& s) { return s.steps_.Begin(); },
      [](Simulator& s) { return s.steps_.Join(); },
      [](Simulator& s) { return s.steps_.Attend(); },
      [](Simulator& s) { return s.steps_.Query(); },
      [](Simulator& s) { return s.steps_.Ranks(); },
      [](Simulator& s) { return s.steps_.Repeat(); },
      [](Simulator& s) { return s.steps_.FillStep(); },
      [](Simulator& s) { return s.steps_.Refusable(); },
      [](Simulator& s) { return s.steps_.Malformed(); },
      [](Simulator& s) { return s.steps_.End(); },
      [](Simulator& s) { return s.steps_.Abort(); },
      [](Simulator& s) { return s.checks_.Launch(); },
      [](Simulator& s) { return s.control_.Time(); },
      [](Simulator& s) { return s.control_.ArmFault(); },
      [](Simulator& s) { return s.operators_.Drain(); },
      [](Simulator& s) { return s.operators_.SetQuota(); },
      [](Simulator& s) { return s.operators_.Evict(); },
      [](Simulator& s) { return s.steps_.Branch(); },
      [](Simulator& s) { return s.repeats_.Resend(); },
      [](Simulator& s) { return s.operators_.CallAsTenant(); },
      [](Simulator& s) { return s.fairness_.Flood(); },
      [](Simulator& s) { return s.prefixes_.Match(); },
      [](Simulator& s) { return s.copies_.Copy(); },
      [](Simulator& s) { return s.prefixes_.Damage(); },
      [](Simulator& s) { return s.prefixes_.Hint(); },
  };
  static_assert(std::size(kActs) == static_cast<size_t>(Op::kCount));
  return kActs[static_cast<size_t>(op)](*this);
}

Op Simulator::DrawOp() {
  int total = 0;
  for (const Weighted& one : kMix) total += one.weight;
  int drawn = static_cast<int>(w_.Pick(static_cast<uint64_t>(total)));
  const Weighted* one = kMix;
  while (drawn >= one->weight) drawn -= (one++)->weight;
  return one->op;
}

void Simulator::Operate(Op op) {
  w_.op = op;
  // Weights of tenants would change their shares.
  if (op == Op::kTenantCall && w_.floods) return;
  // The timer gives up calls that wait too long, before a call has any other effect.
  if (w_.late && !w_.requests.empty()) w_.transport->Poll();
  if (Do(op)) ++w_.counts.operations[static_cast<size_t>(op)];
  if (!w_.failed() && !w_.undrained && !w_.late) w_.checks->CheckBooks();
}

std::string Simulator::Run(int operations) {
  for (int i = 0; i < operations && !w_.failed(); ++i) {
    const Op op = DrawOp();
    // Operations that end a run early are drawn towards its end.
    const bool late = i > operations * 9 / 10;
    if (op == Op::kDrain && !(w_.drains && late) && !w_.oracle->draining) continue;
    Operate(op);
    if (w_.loses_device && late && !w_.failed() && !w_.device->lost())
      w_.device->Arm(DeviceFault::kLost);
  }
  if (!w_.failed()) w_.checks->Finish();
  if (w_.engine != nullptr) {
    const scheduler::EngineStats stats = w_.engine->Stats();
    w_.counts.scrubs = static_cast<int64_t>(stats.page_groups_scrubbed);
    w_.counts.copies = static_cast<int64_t>(stats.copies_on_write);
    w_.counts.slices_fused = static_cast<int64_t>(stats.slices_fused);
    w_.counts.pages_demoted = static_cast<int64_t>(stats.prefix.demoted);
    w_.counts.pages_restored = static_cast<int64_t>(stats.prefix.restored);
    w_.counts.pages_damaged =
        static_cast<int64_t>(stats.tiers.host.damaged + stats.tiers.file.damaged);
    w_.counts.pages_from_file = static_cast<int64_t>(stats.tiers.file.groups_out);
    w_.counts.launches = w_.device->launches();
    if (w_.device_options.unified) w_.counts.one_slot_launches = w_.device->launches();
    w_.counts.commands = w_.device->parts();
    w_.counts.faults = w_.device->faults();
    w_.counts.expired = w_.oracle->expired();
  }
  return w_.violation;
}

}  // namespace mla::simulation
