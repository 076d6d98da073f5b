#include "tests/simulation/simulator/fairness.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/simulation/simulator/checks.h"
#include "tests/simulation/simulator/control.h"
#include "tests/simulation/simulator/steps.h"
#include "tests/simulation/simulator/transport.h"

namespace mla::simulation {
namespace {

constexpr int kVictims = 4;
constexpr int kMostRounds = 1500;
constexpr int kDraws = 12;
// Extend and prefill go before decode once they have waited for this many launches of launch_ms.
constexpr int64_t kAgedLaunches = 8;
constexpr int64_t kMilli = 1'000'000;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

// Bounds of the cost in KV bytes of a launch of `rows` query rows. Rows that tiles stream are
// counted in whole tiles, or by their packed rows.
int64_t Fairness::LeastCost(const Shape& shape, int rows, int heads, int cached) const {
  const int64_t tile = w_.device_options.traits.tile_rows;
  return std::max<int64_t>(1, int64_t{rows} * heads * (cached + 1) * shape.row_dim() * 2 / tile);
}

int64_t Fairness::MostCost(const Shape& shape, int rows, int heads, int cached) const {
  const int64_t tile = w_.device_options.traits.tile_rows;
  const int64_t projections =
      shape.lora * (shape.nope + shape.v) / std::max(1, shape.nope + shape.rope + shape.v);
  const int64_t charged = int64_t{rows} * heads + tile;
  // Up-projected rows are counted as well as streamed rows.
  return 1 + DivideUp(charged * (cached + rows) * (1 + projections) * shape.row_dim() * 4, tile);
}

// Page work of a step that begins: each of its pages may be zeroed or copied.
void Fairness::NotePages(const OracleStep& step) {
  const int64_t bytes = w_.oracle->models[step.model].shape.group_bytes();
  for (const OracleMember& member : step.members) {
    const auto groups =
        static_cast<int64_t>(w_.oracle->sequences.at(member.sequence).groups.size());
    most_served_[step.tenant] += bytes * groups;
  }
}

// Part of the request has gone into the launch that is being prepared.
void Fairness::NoteTaken(SimRequest* request, int64_t offset, int64_t bytes) {
  request->running = true;
  request->passed_over = 0;
  const OracleStep* step = w_.oracle->StepOf(request->step_key);
  if (step == nullptr) return;
  if (offset < static_cast<int64_t>(request->kv_bytes)) {
    most_served_[request->owner] += bytes;
    return;
  }
  const auto q = static_cast<int64_t>(Room(request->kv_bytes));
  if (offset < q || offset >= q + static_cast<int64_t>(request->q_bytes)) return;
  const scheduler::AttendArgs& args = request->attend;
  const auto rows =
      static_cast<int>(bytes * args.row_count / static_cast<int64_t>(request->q_bytes));
  const Shape& shape = w_.oracle->models[step->model].shape;
  int least = w_.oracle_limits.max_sequence_rows;
  int last_row = 0;
  for (const OracleMember& member : step->members) {
    least = std::min(least, member.start);
    last_row = std::max(last_row, member.start + member.rows);
  }
  least_served_[request->owner] += LeastCost(shape, rows, args.num_heads, least);
  most_served_[request->owner] += MostCost(shape, rows, args.num_heads, last_row);
}

void Fairness::OnSubmitted(uint64_t serial) {
  const bool takes =
      std::any_of(w_.requests.begin(), w_.requests.end(),
                  [serial](const auto& request) { return request->launch == serial; });
  if (!takes) return;  // only page work
  for (const auto& request : w_.requests) {
    if (request->launch == serial || request->running) continue;
    if (w_.Now() >= request->counts_from) ++request->passed_over;
  }
}

// From now on launches that pass the request over count, unless they are allowed to.
void Fairness::WaitsFrom(SimRequest* request) const {
  request->counts_from = w_.Now() + w_.slice_wait_us * 1000;
  if (request->bulk) request->counts_from += kAgedLaunches * w_.launch_ms * kMilli;
}

// Draws a step of the tenant (or of another one), a layer and stored rows, for a request without KV
// rows.
bool Fairness::DrawStored(int tenant, bool of_tenant, AttendSpec* spec, uint64_t* key) {
  std::vector<std::pair<uint64_t, int>> stored;
  for (const auto& [step_key, step] : w_.oracle->steps) {
    if ((step.tenant == tenant) != of_tenant || step.ending || step.aborting) continue;
    for (size_t layer = 0; layer < step.layers.size(); ++layer) {
      if (step.layers[layer].empty() || step.broken[layer]) continue;
      stored.emplace_back(step_key, static_cast<int>(layer));
    }
  }
  if (stored.empty()) return false;
  const auto [step_key, layer] = stored[w_.Pick(stored.size())];
  const OracleStep& step = w_.oracle->steps.at(step_key);
  *key = step_key;
  *spec = w_.steps->DrawAttend(step);
  spec->stream = step.streams[0];
  spec->layer = layer;
  spec->form = Form::kAbsorbed;
  spec->kv = false;
  spec->timeout_us = 0;
  const auto rows = static_cast<int>(step.layers[static_cast<size_t>(layer)].size());
  spec->row = static_cast<int>(w_.Pick(static_cast<uint64_t>(rows)));
  spec->rows = 1 + static_cast<int>(w_.Pick(static_cast<uint64_t>(rows - spec->row)));
  spec->head = 0;
  spec->heads = w_.oracle->models[step.model].shape.heads;
  return true;
}

// Returns true if rows of the request count as extend or prefill, which wait while decode runs.
bool Fairness::IsBulk(const OracleStep& step, const AttendSpec& spec) const {
  for (const OracleMember& member : step.members) {
    const int first = std::max(spec.row, member.offset);
    const int rows = std::min(spec.row + spec.rows, member.offset + member.rows) - first;
    if (rows > 0 && (member.start + first - member.offset == 0 || rows > w_.decode_rows))
      return true;
  }
  return false;
}

// Draws tenants whose queues are kept full: all with decode, or all with extend and prefill.
bool Fairness::DrawFlood(bool bulk, std::vector<FloodQueue>* flood) {
  for (int i = 0; i < kDraws && flood->size() < 3; ++i) {
    FloodQueue queue;
    if (!DrawStored(w_.light, /*of_tenant=*/false, &queue.spec, &queue.step)) return false;
    queue.depth = 1 + static_cast<int>(w_.Pick(w_.Chance(70) ? 4 : 16));
    const OracleStep& step = w_.oracle->steps.at(queue.step);
    if (!bulk) queue.spec.rows = 1;
    if (IsBulk(step, queue.spec) != bulk) continue;
    queue.tenant = step.tenant;
    const Shape& shape = w_.oracle->models[step.model].shape;
    int least = w_.oracle_limits.max_sequence_rows;
    for (const OracleMember& member : step.members) least = std::min(least, member.start);
    queue.least_cost = LeastCost(shape, 1, queue.spec.heads, least);
    flood->push_back(queue);
  }
  return !flood->empty();
}

// Fills the flood's queues and runs one round of the engine. Returns false if it cannot go on.
bool Fairness::FloodRound(const std::vector<FloodQueue>& flood) {
  for (size_t i = 0; i < flood.size(); ++i) {
    int waiting = 0;
    for (const auto& request : w_.requests) waiting += request->flood == static_cast<int>(i) + 1;
    for (; waiting < flood[i].depth && !w_.failed(); ++waiting) {
      OracleStep* step = w_.oracle->StepOf(flood[i].step);
      if (step == nullptr) return false;
      w_.flood = static_cast<int>(i) + 1;
      w_.transport->SendAttend(step, flood[i].spec);
      w_.flood = 0;
    }
  }
  const int64_t done_at = w_.device->NextDone();
  if (done_at > w_.Now()) w_.clock.Advance(done_at - w_.Now());
  w_.transport->Poll();
  return !w_.failed();
}

// Runs until each tenant of the flood has been served more than the light one ever was. From then
// on the light tenant has neither credit nor debt.
bool Fairness::WarmUp(const std::vector<FloodQueue>& flood) {
  least_served_.fill(0);
  for (int round = 0; round < kMostRounds; ++round) {
    const bool even = std::all_of(flood.begin(), flood.end(), [&](const FloodQueue& queue) {
      return least_served_[queue.tenant] > most_served_[w_.light];
    });
    if (even) break;
    if (!FloodRound(flood)) return false;
    if (round + 1 == kMostRounds) return false;
  }
  most_served_.fill(0);
  return true;
}

// Launches that may pass over a request of the light tenant. Each other tenant begins one, and the
// launches with which it catches up with the light tenant's service since the flood began. In every
// second launch the other kind may go first: decode, or requests that have waited long.
int64_t Fairness::MostPassedOver(const std::vector<FloodQueue>& flood) const {
  std::map<int, int64_t> least_cost;
  for (const FloodQueue& queue : flood) {
    const auto [at, added] = least_cost.emplace(queue.tenant, queue.least_cost);
    if (!added) at->second = std::min(at->second, queue.least_cost);
  }
  int64_t launches = 1;
  for (const auto& [tenant, cost] : least_cost) {
    launches += 1 + DivideUp(most_served_[w_.light], cost);
  }
  return 2 * launches;
}

// Prepares steps of a tenant with stored rows.
void Fairness::Prepare(int tenant) {
  for (int i = 0; i < 4 && w_.AnySequence(tenant, /*free=*/true) == nullptr; ++i)
    w_.control->Open(tenant);
  for (int i = 0; i < 2 && !w_.failed(); ++i) {
    OracleBegin begin = w_.steps->DrawBegin(tenant);
    begin.participants = 1;
    begin.lease_ns = 0;
    if (begin.sequences.empty()) return;
    w_.transport->SendBegin(begin, /*joins=*/false);
    w_.steps->SendRows(begin.id, tenant);
  }
}

bool Fairness::Flood() {
  if (!w_.floods || w_.oracle->draining || w_.oracle->unhealthy) return false;
  w_.device->Arm(DeviceFault::kNone);
  w_.checks->Settle();
  if (!w_.requests.empty()) {
    w_.clock.Advance(w_.kv_wait_ms * kMilli);
    w_.checks->Settle();
  }
  if (w_.failed() || !w_.requests.empty()) return false;
  for (int tenant = 1; tenant <= w_.Tenants() && !w_.failed(); ++tenant) Prepare(tenant);
  w_.checks->Settle();
  std::vector<FloodQueue> flood;
  const bool bulk = w_.Chance(50);
  const bool drawn = DrawFlood(bulk, &flood) || DrawFlood(!bulk, &flood);
  if (w_.failed() || !w_.requests.empty() || !drawn || !WarmUp(flood)) {
    w_.checks->ReleaseAll(w_.light);
    return false;
  }
  int64_t victims = 0;
  for (int i = 0; i < kVictims && !w_.failed(); ++i) {
    AttendSpec spec;
    uint64_t key = 0;
    if (!DrawStored(w_.light, /*of_tenant=*/true, &spec, &key)) break;
    if (w_.Chance(70)) spec.rows = 1;
    if (w_.Chance(50)) {  // usually of the same key then
      spec.f32 = flood[0].spec.f32;
      spec.f32_out = flood[0].spec.f32_out;
    }
    SendVictim(key, spec, flood);
    ++victims;
  }
  w_.checks->Settle();
  w_.checks->ReleaseAll(w_.light);
  w_.Trace(flood.size(), static_cast<uint64_t>(victims));
  return victims > 0;
}

void Fairness::SendVictim(uint64_t key, const AttendSpec& spec,
                          const std::vector<FloodQueue>& flood) {
  FloodRound(flood);
  const int64_t limit = MostPassedOver(flood);
  OracleStep* step = w_.oracle->StepOf(key);
  if (step == nullptr || w_.failed()) return;
  w_.flood = -1;
  w_.transport->SendAttend(step, spec);
  w_.flood = 0;
  for (int round = 0; round < kMostRounds; ++round) {
    const auto victim = std::find_if(w_.requests.begin(), w_.requests.end(),
                                     [](const auto& request) { return request->flood < 0; });
    if (victim == w_.requests.end()) return;
    w_.counts.most_passed_over = std::max(w_.counts.most_passed_over, (*victim)->passed_over);
    if ((*victim)->passed_over > limit) {
      w_.Fail(absl::StrCat("a request that can run was passed over by ", (*victim)->passed_over,
                           " launches, at most ", limit, " are due"));
      return;
    }
    if (!FloodRound(flood)) return;
  }
}

}  // namespace mla::simulation
