// Declares the arguments of the kernels in gate.h, shared by host and device. Addresses are device
// addresses; words lie in pinned host memory.
#ifndef MLA_KERNELS_HIP_ARGS_GATE_ARGS_H_
#define MLA_KERNELS_HIP_ARGS_GATE_ARGS_H_

#include <cstdint>
#include <type_traits>

namespace mla::kernels::hip {

inline constexpr char kGateKernel[] = "mla_gate";
inline constexpr char kSignalKernel[] = "mla_signal";
inline constexpr uint32_t kGateThreads = 64;
inline constexpr uint32_t kSignalThreads = 256;
// The kernel at a launch's end stores at most this number of signals. The host stores signals of
// launches with more requests.
inline constexpr int32_t kMostSignals = 8;
// A gate waits for at most this number of words.
inline constexpr int32_t kMostGateWords = 8;
// Longest wait of a gate. It is short because driver calls of other threads wait for the gate.
inline constexpr int64_t kMostGateNs = 2'000'000'000;

// The result that a gate stores.
struct GateOutcome {
  uint64_t waited_ns;
  uint64_t ended;  // on the device's clock; in a report, the time that the kernels after the gate
                   // took
  uint32_t late;   // 1: the time ran out before the word was reached
  uint32_t padding;
};

// Waits until each of `count` words is its `value` or a later one.
struct GateArgs {
  struct Word {
    const uint32_t* word;
    uint32_t value;
    uint32_t padding;
  };
  uint64_t limit_ns;
  GateOutcome* outcome;  // in device memory, because writes to host memory would delay the kernel's
                         // end
  int32_t count;
  uint32_t padding;
  Word words[kMostGateWords];
};

struct SignalArgs {
  struct Word {
    uint32_t* word;
    uint32_t* nearby;  // in device memory, stored first; or null
    uint32_t value;
    uint32_t padding;
  };
  const GateOutcome* outcome;  // outcome of the launch's gate, or null
  GateOutcome* report;         // in pinned memory, where the outcome is copied; or null
  // `copied` bytes (or 0) are copied to pinned memory after the words, which do not wait for the
  // copy.
  uint8_t* to;
  const uint8_t* from;
  int64_t copied;
  int32_t count;
  uint32_t padding;
  Word words[kMostSignals];
};

static_assert(std::is_trivially_copyable_v<GateArgs> && sizeof(GateArgs) == 152);
static_assert(std::is_trivially_copyable_v<SignalArgs> && sizeof(SignalArgs) == 240);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_ARGS_GATE_ARGS_H_
