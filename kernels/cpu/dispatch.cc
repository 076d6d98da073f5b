#include "kernels/cpu/dispatch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mla::kernels::cpu {
namespace {

// Lists all levels, the best first.
const KernelSet* const kLevels[] = {&kAmxKernels, &kAvx512Bf16Kernels, &kAvx512Kernels,
                                    &kAvx2Kernels, &kPortableKernels};

#if defined(__x86_64__)
// CPUID leaf 7, read here because the compiler's own checks do not know AMX.
struct Leaf7 {
  uint32_t edx = 0, eax1 = 0;
};

Leaf7 ReadLeaf7() {
  Leaf7 leaf;
  uint32_t eax = 0, ebx = 0, ecx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &leaf.edx) == 0) return leaf;
  __get_cpuid_count(7, 1, &leaf.eax1, &ebx, &ecx, &eax);
  return leaf;
}

// Linux saves tile state only for processes that requested it.
bool RequestTileState() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXfeatureTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
}

bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool HasAvx512Bf16() { return HasAvx512() && (ReadLeaf7().eax1 & (1u << 5)) != 0; }

bool HasAmx() {
  constexpr uint32_t kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  const uint32_t edx = ReadLeaf7().edx;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0 || !HasAvx512Bf16()) return false;
  if (!__builtin_cpu_supports("avx512vbmi")) return false;
  static const bool granted = RequestTileState();
  return granted;
}

bool Usable(const KernelSet* level) {
  if (level == &kAmxKernels) return HasAmx();
  if (level == &kAvx512Bf16Kernels) return HasAvx512Bf16();
  if (level == &kAvx512Kernels) return HasAvx512();
  if (level == &kAvx2Kernels) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
  return true;
}
#else
bool Usable(const KernelSet* level) { return level == &kPortableKernels; }
#endif

}  // namespace

std::vector<const KernelSet*> UsableLevels() {
  std::vector<const KernelSet*> usable;
  for (const KernelSet* level : kLevels) {
    if (Usable(level)) usable.push_back(level);
  }
  return usable;
}

absl::StatusOr<const KernelSet*> SelectLevel(const std::string& highest, bool exact) {
  const std::vector<const KernelSet*> usable = UsableLevels();
  if (highest.empty()) return usable.front();
  bool below = false;
  std::string names;
  for (const KernelSet* level : kLevels) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", level->name);
    const bool is_highest = highest == level->name;
    below = below || is_highest;
    if (!below) continue;
    if (Usable(level)) return level;
    if (exact && is_highest) {
      return absl::FailedPreconditionError(absl::StrCat("cpu_isa: this machine can not run ",
                                                        highest, "; its best level is ",
                                                        usable.front()->name));
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("cpu_isa: got ", highest, ", want one of ", names));
}

}  // namespace mla::kernels::cpu
