// The self-test's launches that wait for words and set them, on devices that reach host memory.
// Internal to self_test.cc.
#ifndef MLA_KERNELS_HIP_SELF_TEST_GATE_H_
#define MLA_KERNELS_HIP_SELF_TEST_GATE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/self_test/data.h"

namespace mla::kernels::hip::self_test {

inline absl::Status CheckGate(AttentionBackend& backend) {
  if (!backend.Info().waits_for_words) return absl::OkStatus();
  constexpr int64_t kLimitNs = 100'000;
  constexpr uint32_t kBefore = 0xffffffffu, kAwaited = 1, kUnset = 7, kSet = 9;
  MLA_ASSIGN_OR_RETURN(const auto memory, backend.AllocateHost(128));
  auto* const words = reinterpret_cast<uint32_t*>(memory->bytes().data());
  const WordValue ready{words, kAwaited}, other{words + 8, kAwaited}, done{words + 16, kSet};
  Launch launch;
  launch.gate = {ready, kLimitNs, {&other, 1}};
  launch.signals = {&done, 1};
  for (const uint32_t* const missing : {ready.word, other.word, static_cast<uint32_t*>(nullptr)}) {
    const bool late = missing != nullptr;
    for (const WordValue& word : {ready, other}) {
      *word.word = word.word == missing ? kBefore : kAwaited;
    }
    *done.word = kUnset;
    absl::Status s = backend.Submit(0, launch);
    if (s.ok()) s = backend.Wait(0).status();
    if (!s.ok()) return s;
    if (backend.WasLate(0) == late && *done.word == (late ? kUnset : kSet)) continue;
    return absl::InternalError(absl::StrCat("a launch that waits for a word that ",
                                            late ? "does not come" : "is there", ": late ",
                                            backend.WasLate(0), ", signal ", *done.word));
  }
  return absl::OkStatus();
}

}  // namespace mla::kernels::hip::self_test

#endif  // MLA_KERNELS_HIP_SELF_TEST_GATE_H_
