#include "tests/simulation/ahead/ahead_simulator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/splitmix.h"
#include "kernels/reference/reference_backend.h"

namespace mla::simulation {
namespace {

using scheduler::HandedBack;
using scheduler::testing::FaultPoint;
using scheduler::testing::FaultyBackend;
using scheduler::testing::MakeRow;
using scheduler::testing::TestRequest;

constexpr int kClients = 3;
constexpr int kMostRows = 3;          // rows of a step
constexpr int kLongest = 60;          // rows of a sequence
constexpr int64_t kHour = 3'600'000;  // ms
constexpr double kTolerance = 2e-5;
constexpr float kNoOutput = 12345.0f;
constexpr kernels::Bf16 kNoRow = 0x7f00;  // a bf16 number that no row has

void Spoil(std::vector<kernels::Bf16>* values) {
  std::fill(values->begin(), values->end(), kNoRow);
}

}  // namespace

void AheadCounts::Add(const AheadCounts& other) {
  operations += other.operations;
  answers += other.answers;
  ahead += other.ahead;
  together += other.together;
  late += other.late;
  busy += other.busy;
  commits += other.commits;
  aborts += other.aborts;
  faults += other.faults;
  ends += other.ends;
}

uint64_t AheadSimulator::Pick(uint64_t below) { return (random_ = SplitMix(random_)) % below; }

scheduler::testing::HarnessOptions AheadSimulator::Options(
    std::unique_ptr<kernels::AttentionBackend> backend) {
  scheduler::testing::HarnessOptions options{scheduler::testing::TinyLimits(),
                                             scheduler::testing::TinyModel(), std::move(backend)};
  options.limits.ahead_us = 200;
  // Timeouts are not tested here, so they are long.
  options.limits.sequence_lease_ms = options.limits.step_lease_ms = kHour;
  options.limits.kv_wait_ms = options.limits.queue_ms = kHour;
  return options;
}

AheadSimulator::AheadSimulator(uint64_t seed) : random_(SplitMix(seed)) {
  auto device = std::make_unique<FaultyBackend>(std::make_unique<kernels::ReferenceBackend>());
  device->SetWaitsForWords();
  device->SetComputesAtEnd();
  device->SetTileRows(1);  // slices that are fused do not go ahead
  device->OnGate([this](std::span<const kernels::WordValue> words) { CheckGate(words); });
  device_ = device.get();
  harness_ = std::make_unique<scheduler::testing::EngineHarness>(Options(std::move(device)));
  for (int i = 0; i < kClients; ++i) {
    clients_.push_back(std::make_unique<Client>());
    clients_.back()->stream = harness_->core().steps().OpenStream(harness_->tenant());
    Open(clients_.back().get());
  }
  clients_.push_back(std::make_unique<Client>());
  Client* const second = clients_.back().get();
  second->stream = harness_->core().steps().OpenStream(harness_->tenant());
  second->leader = clients_.front().get();
  second->leader->peer = second;
}

void AheadSimulator::Fail(const std::string& what) {
  if (violation_.empty()) violation_ = absl::StrCat("ahead: ", what);
}

// ---------------------------------------------------------------------------------- Operations

void AheadSimulator::Open(Client* client) {
  client->sequence = harness_->Open().id;
  client->text.assign(static_cast<size_t>(harness_->model().layers), {});
}

bool AheadSimulator::Begin(Client* client) {
  if (client->step != 0 || client->leader != nullptr) return false;
  if (client->text[0].size() + kMostRows > kLongest) {
    std::vector<scheduler::SequenceId> absent;
    const scheduler::SequenceId ids[] = {client->sequence};
    harness_->core().sequences().Release(harness_->tenant(), ids, &absent);
    Open(client);
  }
  const scheduler::SequenceInfo now = harness_->Get(client->sequence);
  if (now.length != static_cast<int64_t>(client->text[0].size()))
    Fail("a length is not as foretold");
  client->total = 1 + static_cast<int>(Pick(kMostRows));
  client->step = ++last_step_;
  client->chained = Chance(75);
  client->may_fail = device_->armed();
  client->wants_end = false;
  client->calls.clear();
  client->taken = 0;
  for (Client* rank : {client, client->peer}) {
    if (rank == nullptr) continue;
    const auto begun = harness_->Begin(rank->stream, client->step,
                                       {{now.id, now.epoch, now.length, client->total}},
                                       client->peer != nullptr ? 2 : 1);
    if (!begun->status.ok()) Fail(absl::StrCat("BeginStep: ", begun->status.ToString()));
    rank->step = client->step;
    rank->chained = client->chained;
  }
  return true;
}

// Publishes the next rows of the layer that is incomplete.
bool AheadSimulator::Publish(Client* client) {
  if (client->step == 0 || client->wants_end || client->leader != nullptr) return false;
  int layer = 0, first = 0;
  if (!client->calls.empty()) {
    const Call& last = *client->calls.back();
    layer = last.layer;
    first = last.first + last.count;
    if (first == client->total) ++layer, first = 0;
  }
  if (layer == harness_->model().layers) return false;
  const int count = 1 + static_cast<int>(Pick(static_cast<uint64_t>(client->total - first)));
  PublishCall(client, layer, first, count);
  if (client->peer != nullptr) PublishCall(client->peer, layer, first, count);
  return true;
}

void AheadSimulator::PublishCall(Client* client, int layer, int first, int count) {
  auto call = std::make_unique<Call>();
  const auto dim = static_cast<int>(harness_->model().geometry.kv_row_dim());
  for (int i = 0; client->leader == nullptr && i < count; ++i) {
    call->rows.push_back(MakeRow(++key_, dim));
  }
  call->layer = layer;
  call->first = first;
  call->count = count;
  call->q_key = ++key_ << 20;
  call->number = ++client->number;
  const bool shared = client->peer != nullptr || client->leader != nullptr;
  const int all = harness_->model().geometry.num_heads;
  call->request = harness_->Unsent(client->stream, client->step, layer, first, count, call->rows,
                                   client->leader != nullptr ? all / 2 : 0, shared ? all / 2 : all,
                                   call->q_key);
  TestRequest& request = *call->request;
  call->kv = request.kv_rows;
  call->queries = request.queries;
  call->there = !client->chained;
  if (client->chained) {
    Spoil(&request.kv_rows);
    Spoil(&request.queries);
    request.attend.done = {&client->done, call->number};
  }
  std::fill(request.output.begin(), request.output.end(), kNoOutput);
  client->calls.push_back(std::move(call));
}

// The client's stream makes a call's tensors once it has the outputs of the previous call, its own
// and the other rank's.
bool AheadSimulator::Ready(Client* client) {
  const auto next = std::find_if(client->calls.begin(), client->calls.end(),
                                 [](const auto& call) { return !call->there; });
  if (next == client->calls.end()) return false;
  Call& call = **next;
  const bool first = next == client->calls.begin();
  for (const Client* rank : {client, client->peer, client->leader}) {
    if (first || rank == nullptr) continue;
    if (static_cast<int32_t>(rank->done - (call.number - 1)) < 0) return false;
  }
  std::copy(call.kv.begin(), call.kv.end(), call.request->kv_rows.begin());
  std::copy(call.queries.begin(), call.queries.end(), call.request->queries.begin());
  call.there = true;
  client->ready = call.number;
  return true;
}

bool AheadSimulator::End(Client* client) {
  if (client->step == 0 || client->wants_end || client->calls.empty()) return false;
  if (client->leader != nullptr) return false;
  const Call& last = *client->calls.back();
  const bool whole =
      last.layer + 1 == harness_->model().layers && last.first + last.count == client->total;
  if (!whole) return false;
  client->wants_end = true;
  return true;
}

bool AheadSimulator::Abort(Client* client) {
  if (client->step == 0 || client->end != nullptr || client->leader != nullptr) return false;
  client->may_fail = true;
  const auto aborted = harness_->Abort(client->stream, client->step);
  if (aborted->answers != 1) Fail("an AbortStep was not answered");
  ++counts_.aborts;
  return true;
}

bool AheadSimulator::Evict(Client* client) {
  if (client->leader != nullptr) return false;
  client->may_fail = true;
  std::vector<scheduler::SequenceId> absent;
  harness_->core().sequences().Evict({harness_->tenant(), {client->sequence}, ""}, &absent);
  // Earlier replies belong to the released sequence.
  for (Client* rank : {client, client->peer}) {
    while (rank != nullptr && violation_.empty() && CollectAny(rank)) {
    }
  }
  if (client->end != nullptr) Forget(client);
  Open(client);
  return true;
}

bool AheadSimulator::Close(Client* client) {
  if (client->leader != nullptr) return false;
  client->may_fail = client->may_fail || client->peer != nullptr;
  harness_->core().steps().CloseStream(client->stream);
  for (Client* rank : {client, client->peer}) {
    if (rank == nullptr) continue;
    for (const auto& call : rank->calls) {
      if (call->in_engine && call->request->answers == call->answers) {
        Fail("a call was not answered when its ring ended");
      }
    }
    while (violation_.empty() && rank != client && CollectAny(rank)) {
    }
  }
  if (client->end != nullptr && client->end->answers != 1) Fail("an EndStep was not answered");
  client->may_fail = client->may_fail || client->end == nullptr || !client->end->status.ok();
  while (violation_.empty() && CollectAny(client)) {
  }
  // The step may have been committed already.
  const auto length = static_cast<size_t>(harness_->Get(client->sequence).length);
  if (length != client->text[0].size()) CheckEnd(client);
  Forget(client);
  client->stream = harness_->core().steps().OpenStream(harness_->tenant());
  ++counts_.ends;
  return true;
}

bool AheadSimulator::Fault() {
  constexpr FaultPoint kPoints[] = {FaultPoint::kSubmit, FaultPoint::kWait};
  device_->FailAt(kPoints[Pick(2)]);
  for (const auto& client : clients_) client->may_fail = true;
  ++counts_.faults;
  return true;
}

bool AheadSimulator::Operate() {
  Client* const client = clients_[Pick(clients_.size())].get();
  scheduler::EngineCore& core = harness_->core();
  const uint64_t what = Pick(100);
  if (what < 10) return Begin(client);
  if (what < 34) return Publish(client);
  if (what < 54) return Ready(client);
  if (what < 56) {
    device_->EndGates();
    return true;
  }
  if (what < 68) return core.launches().Start();
  if (what < 78) return core.launches().Complete(/*wait=*/false);
  if (what < 84) return core.launches().Complete(/*wait=*/true);
  if (what < 90) return End(client);
  if (what < 96) {
    harness_->AdvanceMicros(static_cast<int64_t>(Pick(20'000)));
    return true;
  }
  if (what < 97) return Abort(client);
  if (what < 98) return Evict(client);
  if (what < 99) return Close(client);
  return Fault();
}

// ------------------------------------------------------------------------------------ The ring

bool AheadSimulator::AnyAhead(const Client& client) const {
  return std::any_of(client.calls.begin(), client.calls.end(),
                     [](const auto& call) { return call->ahead; });
}

bool AheadSimulator::AllAnswered(const Client& client) {
  return std::all_of(client.calls.begin(), client.calls.end(),
                     [](const auto& call) { return call->answered; });
}

void AheadSimulator::HandOver(Client* client, Call* call, bool ahead) {
  call->request->attend.ready = {};
  if (ahead) call->request->attend.ready = {&client->ready, call->number};
  call->ahead = ahead;
  call->in_engine = true;
  harness_->Submit(call->request.get());
}

// Collects a call that the engine has answered or handed back.
bool AheadSimulator::Collect(Client* client, Call* call) {
  if (!call->in_engine || call->request->answers == call->answers) return false;
  if (++call->answers != call->request->answers) Fail("a call was answered twice");
  call->in_engine = false;
  const TestRequest& request = *call->request;
  if (request.handed_back == HandedBack::kNo) {
    call->ahead = false;
    call->answered = true;
    if (client->chained && static_cast<int32_t>(client->done - call->number) < 0) {
      client->done = call->number;
    }
    CheckAnswer(client, *call);
    return true;
  }
  ++(request.handed_back == HandedBack::kLate ? counts_.late : counts_.busy);
  if (!call->ahead) Fail("a call was handed back that waited for nothing");
  if (static_cast<int32_t>(client->done - call->number) >= 0) Fail("done is stored too early");
  if (std::count(request.output.begin(), request.output.end(), kNoOutput) !=
      static_cast<int64_t>(request.output.size())) {
    Fail("a call was handed back with outputs");
  }
  call->ahead = false;
  if (client->held != call) HandOver(client, call, false);
  return true;
}

bool AheadSimulator::CollectAny(Client* client) {
  return std::any_of(client->calls.begin(), client->calls.end(),
                     [&](const auto& call) { return Collect(client, call.get()); });
}

bool AheadSimulator::Advance(Client* client) {
  if (CollectAny(client)) return true;
  if (Call* const held = client->held; held != nullptr) {
    if (held->there) {
      client->held = nullptr;
      if (!held->ahead && !held->in_engine) HandOver(client, held, false);
      return true;
    }
    if (std::exchange(held->offered, true) || Chance(15)) return false;
    HandOver(client, held, true);
    return true;
  }
  if (client->taken < client->calls.size()) {
    client->held = client->calls[client->taken++].get();
    return true;
  }
  if (client->end != nullptr && client->end->answers > 0) {
    CheckEnd(client);
    Forget(client);
    return true;
  }
  if (!client->wants_end || client->end != nullptr || AnyAhead(*client)) return false;
  // The leader of several ranks ends the step when all have their outputs.
  if (client->peer != nullptr && !(AllAnswered(*client) && AllAnswered(*client->peer))) {
    return false;
  }
  client->end = harness_->End(client->stream, client->step);
  return true;
}

void AheadSimulator::Pump(Client* client) {
  while (violation_.empty() && Advance(client)) {
  }
  // A step that is gone has no result: the client abandons it once its calls are answered.
  const bool all = AllAnswered(*client) && (client->peer == nullptr || AllAnswered(*client->peer));
  if (client->leader != nullptr) return;
  if (client->step != 0 && client->end == nullptr && client->may_fail && all) {
    if (harness_->Get(client->sequence).open_step == 0) Forget(client);
  }
}

// -------------------------------------------------------------------------------------- Checks

void AheadSimulator::CheckAnswer(Client* client, const Call& call) {
  const TestRequest& request = *call.request;
  hash_ = (hash_ ^ static_cast<uint64_t>(request.status.code())) * 0x100000001b3u;
  if (!request.status.ok()) {
    const Client& step = client->leader != nullptr ? *client->leader : *client;
    if (!step.may_fail) Fail(absl::StrCat("a call failed: ", request.status.ToString()));
    return;
  }
  const Client& writer = client->leader != nullptr ? *client->leader : *client;
  const Rows& before = writer.text[static_cast<size_t>(call.layer)];
  std::vector<const scheduler::testing::Row*> rows;
  for (const auto& row : before) rows.push_back(&row);
  for (const auto& other : writer.calls) {
    if (other->layer != call.layer || other->first > call.first) continue;
    for (const auto& row : other->rows) rows.push_back(&row);
  }
  std::vector<int> visible;
  for (int i = 0; i < call.count; ++i) {
    visible.push_back(static_cast<int>(before.size()) + call.first + i + 1);
  }
  if (!(harness_->Error(request, rows, visible, call.q_key) < kTolerance)) {
    Fail(absl::StrCat("an answer of layer ", call.layer, " is wrong"));
  }
  ++counts_.answers;
}

void AheadSimulator::CheckEnd(Client* client) {
  if (client->end == nullptr || !client->end->status.ok()) {
    if (!client->may_fail) {
      Fail(absl::StrCat("a step did not end: ",
                        client->end == nullptr ? "" : client->end->status.ToString()));
    }
    return;
  }
  for (const auto& call : client->calls) {
    auto& text = client->text[static_cast<size_t>(call->layer)];
    text.insert(text.end(), call->rows.begin(), call->rows.end());
    if (!call->answered) Fail("a step ended before a call of it was answered");
  }
  ++counts_.commits;
}

void AheadSimulator::Forget(Client* client) {
  if (client->peer != nullptr) Forget(client->peer);
  client->calls.clear();
  client->held = nullptr;
  client->taken = 0;
  client->end.reset();
  client->wants_end = false;
  client->step = 0;
  client->ready = client->done = client->number;  // values that a client sets when it begins a
                                                  // chain
}

void AheadSimulator::CheckGate(std::span<const kernels::WordValue> words) {
  const auto owner = [this](const kernels::WordValue& word) -> const Client* {
    for (const auto& client : clients_) {
      if (word.word == &client->ready) return client.get();
    }
    return nullptr;
  };
  const Client* const first = owner(words.front());
  for (const kernels::WordValue& word : words.subspan(1)) {
    const Client* const other = owner(word);
    const bool ranks = first->peer == other || first->leader == other;
    if (!ranks || words.size() != 2) return Fail("a launch waits for two clients");
    ++counts_.together;
  }
}

void AheadSimulator::CheckBooks() {
  const std::string fault = harness_->core().cache().CheckInvariants();
  if (!fault.empty()) Fail(fault);
}

bool AheadSimulator::StopServer() {
  scheduler::EngineCore& core = harness_->core();
  for (const auto& client : clients_) client->may_fail = true;
  core.steps().AbortAll("the server ends");
  for (const auto& client : clients_) Close(client.get());
  return true;
}

void AheadSimulator::Finish() {
  scheduler::EngineCore& core = harness_->core();
  if (Chance(30)) StopServer();
  constexpr int kRounds = 1000;
  const auto busy = [this] {
    return std::any_of(clients_.begin(), clients_.end(),
                       [](const auto& client) { return client->step != 0; });
  };
  for (int round = 0; round < kRounds && violation_.empty() && busy(); ++round) {
    for (const auto& client : clients_) {
      while (Publish(client.get())) {
      }
      Ready(client.get());
      End(client.get());
      Pump(client.get());
    }
    core.launches().Start();
    core.launches().Complete(/*wait=*/true);
    harness_->AdvanceMicros(1000);
  }
  if (!violation_.empty()) return;
  if (busy()) return Fail("a step does not end");
  if (core.answers().owned() != 0) Fail("the engine holds requests");
  for (const auto& client : clients_) Evict(client.get());
  CheckBooks();
}

std::string AheadSimulator::Run(int operations) {
  for (int i = 0; i < operations && violation_.empty(); ++i) {
    counts_.operations += Operate();
    for (const auto& client : clients_) Pump(client.get());
    if (i % 16 == 0) CheckBooks();
  }
  if (violation_.empty()) Finish();
  counts_.ahead += static_cast<int64_t>(harness_->core().Stats().launches_ahead);
  return violation_;
}

}  // namespace mla::simulation
