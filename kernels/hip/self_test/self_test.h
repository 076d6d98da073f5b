// Known-answer test of every kernel, run on the device before the backend is offered: a wrong
// driver, a miscompiled code object or a broken device is found here and not in an answer.
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
  // The parts that are to run, of SelfTestParts(); empty: all. For tools: what a device is offered
  // for has passed all.
  std::vector<std::string> parts;
  std::chrono::milliseconds most{300'000};  // for all of them together
  // Called when a part begins, with how long the test has taken so far.
  std::function<void(std::string_view part, std::chrono::milliseconds so_far)> on_part;
  // For tests; empty: the steady clock.
  std::function<std::chrono::steady_clock::time_point()> now;
};

// The names, in the order in which the parts run.
std::span<const std::string_view> SelfTestParts();

// One test of a device, in up to four calls of the functions below: what they share is the time.
class SelfTestRun {
 public:
  explicit SelfTestRun(SelfTestOptions options);

  // Runs `part` where it is asked for; an error names it.
  absl::Status Do(std::string_view name, const std::function<absl::Status()>& part);
  // DEADLINE_EXCEEDED once the time is up; asked between launches, each of which the watchdog ends.
  absl::Status CheckTime() const;

 private:
  std::chrono::milliseconds SoFar() const;

  const SelfTestOptions options_;
  const std::chrono::steady_clock::time_point start_;
  std::vector<std::string> passed_;
};

// What the test asks of Configure; some tens of megabytes.
BackendLimits SelfTestLimits(const AttentionBackend& backend);

// Moves pages, with digests and without; then appends, absorbs, attends with a split plan, combines
// and projects small batches and attends to them in the expanded form, and compares with the same
// sums taken on the host, within what conformance allows: with a tile for the smallest attention
// kernel and with one for more; over few keys, and over so many, in pages of three rows, that every
// loop turns around more than once; three items and more a unit, one without any key; 130 query
// rows in the expanded form; and with a NaN in a row that only the last query row sees. Beside them
// it projects latent outputs that nearly cancel, of values that bf16 does not hold: a kernel that
// rounds them once more is found. Then come windows with entries and sinks, the choice of the
// indexer, and the expanded form at nope_dim 192 and v_dim 256, where the backend has them.
// REQUIRES: memory as SelfTestLimits. INTERNAL names the first value that is wrong.
absl::Status SelfTest(AttentionBackend& backend, SelfTestRun& run);

// The same of the expanded form with products of 8 bits, within what its roundings allow: of
// queries, keys, probabilities and values.
absl::Status SelfTestPrefill(AttentionBackend& backend, SelfTestRun& run);

// Launches whose tensors kernels bring and take away, and such as wait for words of the host's
// memory and set them, where the backend has just been told that kernels reach it.
absl::Status SelfTestHostMemory(AttentionBackend& backend, SelfTestRun& run);

// One sequence of kernels again and again, as the layers of a step are launched: other arguments,
// other inputs and another place in the pool each time, at least kLeastReplays times as a graph of
// `runtime`. UNAVAILABLE: graphs were launched less often. INTERNAL: an answer is wrong.
inline constexpr int kLeastReplays = 4;
absl::Status SelfTestReplays(AttentionBackend& backend, GpuRuntime& runtime, SelfTestRun& run);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SELF_TEST_SELF_TEST_H_
