#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/hip/self_test/self_test.h"

namespace mla::kernels::hip {
namespace {

std::chrono::steady_clock::time_point Now(const SelfTestOptions& options) {
  return options.now ? options.now() : std::chrono::steady_clock::now();
}

}  // namespace

std::span<const std::string_view> SelfTestParts() {
  static constexpr std::string_view kParts[] = {
      "pages", "digests", "bf16",      "fp8_tensor", "fp8_row", "pieces",      "windows", "indexer",
      "words", "one_row", "projected", "wide_heads", "prefill", "host_memory", "replays"};
  return kParts;
}

SelfTestRun::SelfTestRun(SelfTestOptions options)
    : options_(std::move(options)), start_(Now(options_)) {}

std::chrono::milliseconds SelfTestRun::SoFar() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Now(options_) - start_);
}

absl::Status SelfTestRun::Do(std::string_view name, const std::function<absl::Status()>& part) {
  const auto& asked = options_.parts;
  if (!asked.empty() && std::find(asked.begin(), asked.end(), name) == asked.end()) {
    return absl::OkStatus();
  }
  if (options_.on_part) options_.on_part(name, SoFar());
  absl::Status s = CheckTime();
  if (s.ok()) s = part();
  if (s.ok()) {
    passed_.emplace_back(name);
    return s;
  }
  return absl::Status(s.code(), absl::StrCat(s.message(), " (part ", std::string(name), ")"));
}

absl::Status SelfTestRun::CheckTime() const {
  if (SoFar() < options_.most) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat("not done within ", options_.most.count(), " ms (gpu.self_test_ms), after ",
                   passed_.empty() ? "no part" : absl::StrJoin(passed_, ", ")));
}

}  // namespace mla::kernels::hip
