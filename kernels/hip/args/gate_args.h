// Arguments of the kernels in gate.h, shared by host and device. Addresses are device addresses;
// those of words lie in pinned host memory.
#ifndef MLA_KERNELS_HIP_ARGS_GATE_ARGS_H_
#define MLA_KERNELS_HIP_ARGS_GATE_ARGS_H_

#include <cstdint>
#include <type_traits>

namespace mla::kernels::hip {

inline constexpr char kGateKernel[] = "mla_gate";
inline constexpr char kSignalKernel[] = "mla_signal";
inline constexpr uint32_t kGateThreads = 64;
inline constexpr uint32_t kSignalThreads = 256;
// Of a launch; those of more requests are left to the host.
inline constexpr int32_t kMostSignals = 8;
// Longest that a gate may wait: driver calls of other threads wait for it.
inline constexpr int64_t kMostGateNs = 2'000'000'000;

// What a gate leaves.
struct GateOutcome {
  uint64_t waited_ns;
  uint64_t ended;  // by the device's clock; in a report for how long the kernels behind it took
  uint32_t late;   // 1: the word had not come by then
  uint32_t padding;
};

// Waits until `word` is `value` or comes after it.
struct GateArgs {
  const uint32_t* word;
  uint32_t value;
  uint32_t padding;
  uint64_t limit_ns;
  GateOutcome* outcome;  // in device memory: the host's would take the kernel's end longer
};

struct SignalArgs {
  struct Word {
    uint32_t* word;
    uint32_t* nearby;  // in device memory, stored first; or null
    uint32_t value;
    uint32_t padding;
  };
  const GateOutcome* outcome;  // of the launch's gate; null: there is none
  GateOutcome* report;         // in pinned memory, where the outcome is copied; or null
  // Copied to pinned memory behind the words, which do not wait for it: `copied` bytes, or 0.
  uint8_t* to;
  const uint8_t* from;
  int64_t copied;
  int32_t count;
  uint32_t padding;
  Word words[kMostSignals];
};

static_assert(std::is_trivially_copyable_v<GateArgs> && sizeof(GateArgs) == 32);
static_assert(std::is_trivially_copyable_v<SignalArgs> && sizeof(SignalArgs) == 240);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_ARGS_GATE_ARGS_H_
