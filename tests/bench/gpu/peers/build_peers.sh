#!/usr/bin/env bash
# Builds the shared libraries that time_peers.py loads, from sources that are already here: FlashMLA
# (https://github.com/deepseek-ai/FlashMLA), FlashAttention
# (https://github.com/Dao-AILab/flash-attention), FlashInfer
# (https://github.com/flashinfer-ai/flashinfer) and CUTLASS's headers, of the version that FlashMLA
# names. FlashInfer of 2026-08 wants a header of CUDA 13.1 in fastdiv.cuh; its commit 93e1a2634 has
# that file without. Needs nvcc of CUDA 13 and no GPU. Objects that are there are not compiled again.
#
#   build_peers.sh FLASH_MLA FLASH_ATTENTION FLASH_INFER CUTLASS/include OUT_DIR [JOBS]
set -euo pipefail
[[ $# -eq 5 || $# -eq 6 ]] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here="$(cd "$(dirname "$0")" && pwd)"
mla="$(cd "$1" && pwd)/csrc" attention="$(cd "$2" && pwd)/hopper"
infer="$(cd "$3" && pwd)/include" cutlass="$(cd "$4" && pwd)"
mkdir -p "$5"
out="$(cd "$5" && pwd)" jobs="${6:-$(nproc)}"
nvcc="${NVCC:-nvcc}"
cuda="$(dirname "$(dirname "$(readlink -f "$(command -v "$nvcc")")")")"

# shellcheck disable=SC2054  # a comma is part of the flag
common=(-O3 -std=c++20 -DNDEBUG -D_USE_MATH_DEFINES -gencode arch=compute_90a,code=sm_90a
  --expt-relaxed-constexpr --expt-extended-lambda --use_fast_math -Xcompiler -fPIC,-w -w
  -isystem "$cuda/include/cccl" -I"$cutlass")
of_mla=(-U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ -U__CUDA_NO_HALF2_OPERATORS__
  -U__CUDA_NO_BFLOAT16_CONVERSIONS__ -DFLASH_MLA_DISABLE_FP16
  -Xptxas --register-usage-level=10 -I"$mla" -I"$mla/kerutils/include" -I"$mla/sm90")
of_attention=(-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED -DCUTLASS_ENABLE_GDC_FOR_SM90
  -DFLASHATTENTION_DISABLE_SM8x -I"$attention")

# A line a command, so that as many run at a time as are asked for.
commands="$out/commands"
: >"$commands"
compile() {  # NAME FLAGS...
  [[ -e "$out/$1.o" ]] && return
  printf '%q ' "$nvcc" "${common[@]}" "${@:2}" -c -o "$out/$1.o" >>"$commands"
  printf '\n' >>"$commands"
}
sparse="$mla/sm90/decode/sparse_fp8/instantiations"
compile mla_dense "${of_mla[@]}" "$mla/sm90/decode/dense/instantiations/bf16.cu"
compile mla_v32_128 "${of_mla[@]}" "$sparse/v32_persistent_h128.cu"
compile mla_v32_64 "${of_mla[@]}" "$sparse/v32_persistent_h64.cu"
compile mla_v4_128 "${of_mla[@]}" "$sparse/model1_persistent_h128.cu"
compile mla_prefill "${of_mla[@]}" "$mla/sm90/prefill/sparse/instantiations/phase1_k576.cu"
compile mla_combine "${of_mla[@]}" "$mla/smxx/decode/combine/combine.cu"
compile mla_plan "${of_mla[@]}" \
  "$mla/smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.cu"
compile mla_c "${of_mla[@]}" "$here/flash_mla_c.cu"
kernel() {  # NAME SPLIT BY_ROWS
  compile "fa3_$1" "${of_attention[@]}" -DPEER_NAME="$1" -DPEER_SPLIT="$2" -DPEER_BY_ROWS="$3" \
    "$here/flash_attention_kernel.cu"
}
kernel SplitByPages true false
kernel SplitByRows true true
kernel WholeByPages false false
kernel WholeByRows false true
compile fa3_combine "${of_attention[@]}" -DPEER_COMBINE "$here/flash_attention_kernel.cu"
compile fa3_plan "${of_attention[@]}" "$attention/flash_prepare_scheduler.cu"
compile fa3_c "${of_attention[@]}" "$here/flash_attention_c.cu"
compile infer_c -I"$infer" "$here/flash_infer_c.cu"

# A peer that does not compile leaves the others theirs.
xargs -d '\n' -P "$jobs" -I{} bash -c '{}' <"$commands" || true
link() {  # LIBRARY PREFIX OBJECTS
  local objects=("$out/$2"_*.o)
  [[ ${#objects[@]} -eq "$3" ]] || { echo "build_peers: $1: some source failed" >&2; return; }
  "$nvcc" -shared -gencode arch=compute_90a,code=sm_90a -o "$out/$1" "${objects[@]}" -lcuda
}
link libflash_mla_c.so mla 8
link libflash_attention_c.so fa3 7
link libflash_infer_c.so infer 1
