#include "kernels/hip/launch/gate_work.h"

#include "absl/strings/str_cat.h"
#include "kernels/hip/args/gate_args.h"

namespace mla::kernels::hip {

static_assert(kMostGateWords == LaunchGate::kMostWords);

absl::Status GateWork::AddGate(LaunchRecording& recording, const Launch& launch) {
  const LaunchGate& gate = launch.gate;
  if (gate.ready.word == nullptr) return absl::OkStatus();
  if (gate.others.size() >= size_t{kMostGateWords}) {
    return absl::InvalidArgumentError(
        absl::StrCat("gate: words: got ", gate.others.size() + 1, ", limit ", kMostGateWords));
  }
  if (gate.limit_ns < 0 || gate.limit_ns > kMostGateNs) {
    return absl::InvalidArgumentError(
        absl::StrCat("gate: limit_ns: got ", gate.limit_ns, ", want 0 to ", kMostGateNs));
  }
  GateArgs args = {};
  bool near = AddWord(recording, gate.ready, &args);
  for (const WordValue& other : gate.others) near |= AddWord(recording, other, &args);
  if (static_cast<size_t>(args.count) != 1 + gate.others.size()) {
    return absl::InvalidArgumentError("gate: its word is not in pinned memory");
  }
  args.limit_ns = static_cast<uint64_t>(gate.limit_ns);
  args.outcome = recording.gate_outcome();
  for (const HostOutput& out : launch.outputs) {
    if (!out.shared || out.in_place()) continue;
    return absl::InvalidArgumentError("gate: an output is copied to shared memory, late or not");
  }
  absl::Status s = recording.AddKernel(device_.kernels.gate, {.threads = kGateThreads}, args);
  recording.NoteGate(/*far=*/!near);
  return s;
}

// Adds no word that the device does not reach. Returns true if the word lies in device memory.
bool GateWork::AddWord(LaunchRecording& recording, const WordValue& ready, GateArgs* args) const {
  if (!device_.runtime->kernels_reach_host() || !recording.Reaches(ready.word, sizeof(uint32_t))) {
    return false;
  }
  const bool near = ready.nearby != nullptr && recording.Reaches(ready.nearby, sizeof(uint32_t));
  args->words[args->count++] = {near ? ready.nearby : ready.word, ready.value, 0};
  return near;
}

absl::Status GateWork::AddTimedSignals(LaunchRecording& recording,
                                       std::span<const WordValue> signals) {
  if (recording.outputs_in_place()) return AddSignals(recording, signals);
  return recording.gated() ? AddSignals(recording, {}) : absl::OkStatus();
}

absl::Status GateWork::AddSignalsBehindMoves(LaunchRecording& recording,
                                             std::span<const WordValue> signals) {
  return recording.output_moves().empty() ? absl::OkStatus() : AddSignals(recording, signals);
}

absl::Status GateWork::AddSignals(LaunchRecording& recording, std::span<const WordValue> signals) {
  SignalArgs args = {};
  if (recording.gated()) args.outcome = recording.gate_outcome();
  if (recording.gated()) args.report = recording.gate_report();
  const bool few = device_.runtime->kernels_reach_host() && signals.size() <= size_t{kMostSignals};
  for (const WordValue& signal : signals) {
    if (!few || !recording.Reaches(signal.word, sizeof(uint32_t))) break;
    if (signal.nearby != nullptr && !recording.Reaches(signal.nearby, sizeof(uint32_t))) break;
    args.words[args.count++] = {signal.word, signal.nearby, signal.value, 0};
  }
  if (!signals.empty()) recording.NoteSignals(static_cast<size_t>(args.count) == signals.size());
  if (const auto& copy = recording.signal_copy(); copy.bytes > 0) {
    args.to = reinterpret_cast<uint8_t*>(copy.to);
    args.from = reinterpret_cast<const uint8_t*>(copy.from);
    args.copied = copy.bytes;
  }
  if (args.count == 0 && args.copied == 0 && !recording.gated()) return absl::OkStatus();
  return recording.AddKernel(device_.kernels.signal,
                             {.threads = kSignalThreads, .overlap_predecessor = true}, args);
}

}  // namespace mla::kernels::hip
