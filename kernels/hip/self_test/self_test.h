// Known-answer test of every kernel, run on the device before the backend is offered. It finds a
// wrong driver, a miscompiled code object or a broken device before any answer depends on it.
#ifndef MLA_KERNELS_HIP_SELF_TEST_SELF_TEST_H_
#define MLA_KERNELS_HIP_SELF_TEST_SELF_TEST_H_

#include <chrono>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/runtime/gpu_runtime.h"

namespace mla::kernels::hip {

struct SelfTestOptions {
  // The parts to run, from SelfTestParts(); empty: all. Only tools set it; a backend is offered
  // only after all parts have passed.
  std::vector<std::string> parts;
  std::chrono::milliseconds most{300'000};  // for all parts together
  // Called when a part begins, with the time that the test has taken so far.
  std::function<void(std::string_view part, std::chrono::milliseconds so_far)> on_part;
  // Clock for tests; empty: the steady clock.
  std::function<std::chrono::steady_clock::time_point()> now;
};

// Returns the names of the parts, in the order in which they run.
std::span<const std::string_view> SelfTestParts();

// Runs one test of a device, in up to four calls of the functions below, which share its time
// limit.
class SelfTestRun {
 public:
  explicit SelfTestRun(SelfTestOptions options);

  // Runs `part` if it is selected. Errors name it.
  absl::Status Do(std::string_view name, const std::function<absl::Status()>& part);
  // DEADLINE_EXCEEDED once the time is up. Called between launches; the watchdog ends each launch.
  absl::Status CheckTime() const;

 private:
  std::chrono::milliseconds SoFar() const;

  const SelfTestOptions options_;
  const std::chrono::steady_clock::time_point start_;
  std::vector<std::string> passed_;
};

// Returns limits for Configure during the test; some tens of megabytes.
BackendLimits SelfTestLimits(const AttentionBackend& backend);

// Moves pages, with digests and without. Then it appends, absorbs, attends with a split plan,
// combines and projects small batches, and attends to them in the expanded form. Results are
// compared with sums computed on the host, within the bounds of conformance.
//
// Shapes include
// - a tile for the smallest attention kernel and one for a larger kernel;
// - few keys, and enough keys in pages of three rows that every loop runs more than once;
// - three or more items a unit, one without any key;
// - 130 query rows in the expanded form;
// - a NaN in a row that only the last query row sees.
//
// It also projects latent outputs that nearly cancel, of values that bf16 does not hold, so that a
// kernel that rounds them once too often is found. Products of whole rows follow, of few fp32 rows
// and of many bf16 rows. Windows with entries and sinks, the choice of
// the indexer, and the expanded form at nope_dim 192 and v_dim 256 follow, if the backend has them.
//
// REQUIRES: memory as SelfTestLimits. INTERNAL names the first wrong value.
absl::Status SelfTest(AttentionBackend& backend, SelfTestRun& run);

// Does what SelfTest does, for the expanded form with 8-bit products. Bounds allow for the rounding
// of queries, keys, probabilities and values.
absl::Status SelfTestPrefill(AttentionBackend& backend, SelfTestRun& run);

// Launches whose tensors kernels copy in and out, and launches that wait for words of host memory
// and set them. Run once the backend knows that kernels reach host memory.
absl::Status SelfTestHostMemory(AttentionBackend& backend, SelfTestRun& run);

// Launches the same sequence of kernels many times, like the layers of a step, with different
// arguments, inputs and pool places each time. At least kLeastReplays of the launches must be a
// graph of `runtime`. UNAVAILABLE if fewer were. INTERNAL if a result is wrong.
inline constexpr int kLeastReplays = 4;
absl::Status SelfTestReplays(AttentionBackend& backend, GpuRuntime& runtime, SelfTestRun& run);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SELF_TEST_SELF_TEST_H_
