// One of FlashAttention-3's kernels for MLA decode: -DPEER_NAME=..., -DPEER_SPLIT=true|false and
// -DPEER_BY_ROWS=true|false, or -DPEER_COMBINE for the kernel that merges parts. Each is compiled
// by itself, at the same time as the others.
#ifdef PEER_COMBINE
#include "flash_fwd_combine_launch_template.h"

void CombineParts(Flash_fwd_params& p, cudaStream_t stream) {
  run_mha_fwd_combine_<cutlass::bfloat16_t, float, 128>(p, stream, true);
}
#else
#include "flash_fwd_launch_template.h"

void PEER_NAME(Flash_fwd_params& p, cudaStream_t stream) {
  using Bf16 = cutlass::bfloat16_t;
  constexpr bool kCausal = false, kLocal = false, kSoftcap = false, kVarlen = true;
  constexpr bool kAppends = false, kQv = true, kPacked = true, kValuesByColumn = false;
  run_flash_fwd<90, 64, 512, 1, Bf16, Bf16, kCausal, kLocal, kSoftcap, kVarlen, PEER_BY_ROWS,
                kAppends, kQv, kPacked, PEER_SPLIT, kValuesByColumn>(p, stream);
}
#endif
