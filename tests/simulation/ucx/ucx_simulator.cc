#include "tests/simulation/ucx/ucx_simulator.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "proto/wire/ucx/ucx_link.h"
#include "tests/fake_ucx/fake_ucx.h"

namespace mla::simulation {
namespace {

using fake_ucx::RingPair;

constexpr size_t kWorkers = 3;
constexpr int kMostRounds = 200'000;
// Points at which an end may be stopped, as of fake_ucx::StopAt.
constexpr const char* kPoints[] = {"message", "deliver", "pull",     "received",
                                   "sent",    "put",     "put_done", "flush"};

absl::Status Ended() { return absl::UnavailableError("the ring has ended"); }

}  // namespace

void UcxCounts::Add(const UcxCounts& other) {
  submitted += other.submitted;
  answered += other.answered;
  puts += other.puts;
  refusals += other.refusals;
  killed += other.killed;
  stopped += other.stopped;
  cut_off += other.cut_off;
}

UcxSimulator::UcxSimulator(uint64_t seed) : state_(seed), workers_(kWorkers) {
  fake_ucx::Reset({.reorder = Pick(3)});
}

UcxSimulator::~UcxSimulator() = default;

std::string UcxSimulator::Open(Worker* worker) {
  *worker = Worker{std::make_unique<RingPair>()};
  const uint64_t kind = Pick(4);
  const bool puts = kind < 2;
  std::optional<wire::UcxSecret> secret;
  if (kind == 3) secret.emplace().fill(static_cast<uint8_t>(Pick(256)));
  const absl::Status opened = worker->pair->Start(puts, puts, {}, secret);
  return opened.ok() ? "" : absl::StrCat("cannot open a ring: ", opened.message());
}

void UcxSimulator::Move(Worker* worker) {
  for (uint64_t rounds = 1 + Pick(8); rounds > 0; --rounds) {
    worker->pair->Step();
    // A ring that has ended shows when it is ended here.
    worker->pair->Take().IgnoreError();
  }
}

void UcxSimulator::Submit(Worker* worker) {
  const uint64_t bytes = Pick(4) == 0 ? Pick(RingPair::kSlotBytes + 1) : Pick(4096);
  ++(worker->pair->Submit(bytes) ? counts_.submitted : counts_.refusals);
}

// The relay has gone, by itself or because the call has ended.
std::string UcxSimulator::EndByRelay(Worker* worker) {
  worker->pair->EndRelay();
  worker->pair->memory()->SetEnded(Ended());
  absl::Status ended;
  for (int i = 0; i < kMostRounds && ended.ok(); ++i) ended = worker->pair->Take();
  if (ended.ok()) return "a client does not see the end of its ring";
  return "";
}

std::string UcxSimulator::EndByClient(Worker* worker) {
  worker->pair->EndClient();
  for (uint64_t rounds = Pick(20); rounds > 0; --rounds) worker->pair->Step();
  worker->pair->EndRelay();
  return "";
}

std::string UcxSimulator::End(Worker* worker) {
  std::string fault = !worker->cut && Pick(2) == 0 ? EndByClient(worker) : EndByRelay(worker);
  if (fault.empty()) fault = worker->pair->fault();
  counts_.answered += static_cast<int64_t>(worker->pair->taken());
  return fault.empty() ? Open(worker) : fault;
}

// One end stops at a point, the others work, and then it goes on or is killed.
std::string UcxSimulator::StopForAWhile(Worker* worker) {
  RingPair& pair = *worker->pair;
  const bool client = Pick(2) == 0;
  fake_ucx::StopAt(kPoints[Pick(std::size(kPoints))],
                   client ? pair.memory()->address() : pair.relay()->address());
  for (uint64_t i = Pick(30); i > 0 && !fake_ucx::Stopped(); --i) {
    if (Pick(4) == 0) Submit(worker);
    if (!fake_ucx::Stopped()) pair.Step();
    if (!fake_ucx::Stopped()) pair.Take().IgnoreError();
  }
  if (!fake_ucx::Stopped()) {
    fake_ucx::StopAt("", "");
    fake_ucx::Continue();  // its own thread may have come there just now
    return "";
  }
  ++counts_.stopped;
  for (Worker& other : workers_) {
    if (&other != worker) Move(&other);
  }
  if (Pick(2) == 0) {
    fake_ucx::Continue();
    return "";
  }
  ++counts_.killed;
  std::string fault;
  if (client) {
    pair.EndClient();
    for (uint64_t rounds = Pick(20); rounds > 0; --rounds) pair.Step();
    pair.EndRelay();
  } else {
    fault = EndByRelay(worker);
  }
  if (fault.empty()) fault = pair.fault();
  counts_.answered += static_cast<int64_t>(pair.taken());
  return fault.empty() ? Open(worker) : fault;
}

std::string UcxSimulator::Do(Worker* worker) {
  switch (Pick(40)) {
    case 0:
      ++counts_.killed;
      return End(worker);
    case 1:
      if (worker->cut) return "";
      return StopForAWhile(worker);
    case 2:
      ++counts_.cut_off;
      worker->cut = true;
      fake_ucx::Cut(worker->pair->memory()->address());
      fake_ucx::Cut(worker->pair->relay()->address());
      return "";
    case 3:
      fake_ucx::SetStalled(Pick(2) == 0);
      return "";
    case 4:
      worker->pair->computes = Pick(3) > 0;
      return "";
    default:
      if (Pick(2) == 0) Submit(worker);
      Move(worker);
      return worker->pair->fault();
  }
}

// All that is under way comes to its end.
std::string UcxSimulator::Finish() {
  fake_ucx::SetStalled(false);
  for (Worker& worker : workers_) {
    RingPair& pair = *worker.pair;
    pair.computes = true;
    if (worker.cut) {
      if (std::string fault = EndByRelay(&worker); !fault.empty()) return fault;
    } else if (!pair.Run(2, 1000)) {
      return absl::StrCat("a ring that lives does not answer: ", pair.fault(),
                          pair.relay()->status().ToString());
    }
    counts_.answered += static_cast<int64_t>(pair.taken());
    if (!pair.fault().empty()) return pair.fault();
  }
  counts_.puts = static_cast<int64_t>(fake_ucx::counts().puts);
  workers_.clear();
  const fake_ucx::Counts left = fake_ucx::counts();
  if (left.live_requests + left.registered + left.live_keys > 0) {
    return absl::StrCat("left over: ", left.live_requests, " requests, ", left.registered,
                        " memory, ", left.live_keys, " keys");
  }
  return left.refused_puts == 0 ? "" : "a put outside its memory";
}

std::string UcxSimulator::Run(int operations) {
  for (Worker& worker : workers_) {
    if (std::string fault = Open(&worker); !fault.empty()) return fault;
  }
  for (int i = 0; i < operations; ++i) {
    const std::string fault = Do(&workers_[Pick(workers_.size())]);
    if (!fault.empty()) return absl::StrCat("operation ", i, ": ", fault);
  }
  return Finish();
}

}  // namespace mla::simulation
