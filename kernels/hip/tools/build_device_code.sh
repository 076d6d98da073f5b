#!/usr/bin/env bash
# Compiles device code for every architecture whose compiler is there and packs the images into one
# object file. Runs from the workspace root; needs no GPU and no ROCm.
#
#   build_device_code.sh OUT_DIR [--source FILE] [--symbols PREFIX] [--require ARCH,...]
#
# Writes OUT_DIR/{gfx950.co,gfx942.co,sm_90.cubin,kernel_images.o}, and for the report the compilers'
# resource usage (usage.txt) and the assembly (gfx950.s, gfx942.s). Images lie between the symbols
# PREFIX_ARCH_begin and PREFIX_ARCH_end. A missing compiler leaves an empty image and a line on
# stderr, unless --require names the architecture. HIP_CLANG and NVCC override the compilers;
# ROCM_PATH selects ROCm's own clang.
set -euo pipefail

out="$1"
shift
source=kernels/hip/device/device_code.hip
symbols=mla_image
required=""
while [[ $# -gt 0 ]]; do
  case "$1" in
    --source) source="$2" ;;
    --symbols) symbols="$2" ;;
    --require) required=",$2," ;;
    *)
      echo "build_device_code: no option $1" >&2
      exit 2
      ;;
  esac
  shift 2
done
mkdir -p "$out"

find_tool() {
  local tool
  for tool in "$@"; do
    if [[ -n "$tool" ]] && command -v "$tool" >/dev/null; then
      command -v "$tool"
      return 0
    fi
  done
  return 1
}
clang="$(find_tool "${HIP_CLANG:-}" "${ROCM_PATH:+$ROCM_PATH/llvm/bin/clang}" clang-22 || true)"
nvcc="$(find_tool "${NVCC:-}" nvcc /usr/local/cuda/bin/nvcc || true)"

missing() {
  if [[ "$required" == *",$1,"* ]]; then
    echo "build_device_code: no compiler for $1" >&2
    exit 1
  fi
  echo "build_device_code: no compiler for $1, image left empty" >&2
}

# ROCm 6.2, the oldest that is supported, loads code objects up to version 5; clang's default is 6.
code_object=5

# Each writes what the compiler says to OUT_DIR/usage.ARCH.
compile_amd() {
  local arch="$1" log="$out/usage.$1" linker=()
  : >"$out/$arch.co"
  : >"$out/$arch.s"
  : >"$log"
  if [[ -z "$clang" ]]; then missing "$arch"; return; fi
  [[ "$clang" == *clang-22 ]] && linker=(-fuse-ld=lld-22)
  echo "arch $arch" >>"$log"
  "$clang" -x hip --cuda-device-only -nogpuinc -nogpulib "--offload-arch=$arch" -std=c++20 -O3 -I. \
    "-mcode-object-version=$code_object" -Wall -Wno-unused-command-line-argument \
    -Rpass-analysis=kernel-resource-usage -S "$source" -o "$out/$arch.s" 2>>"$log" &&
    "$clang" --target=amdgcn-amd-amdhsa "-mcpu=$arch" -nogpulib "${linker[@]}" -x assembler \
      "$out/$arch.s" -o "$out/$arch.co" 2>>"$log" || { cat "$log" >&2; exit 1; }
}
compile_nvidia() {
  local log="$out/usage.sm_90"
  : >"$out/sm_90.cubin"
  : >"$log"
  if [[ -z "$nvcc" ]]; then missing sm_90; return; fi
  echo "arch sm_90" >>"$log"
  "$nvcc" -x cu -std=c++20 -O3 -ptx -gencode=arch=compute_90a,code=compute_90a \
    --expt-relaxed-constexpr -I. "$source" -o "$out/sm_90.ptx" \
    2>>"$log" || { cat "$log" >&2; exit 1; }
  # nvcc turns a use of host memory or of a host function into a trap, without a word.
  if grep -nw trap "$out/sm_90.ptx" >&2; then
    echo "build_device_code: sm_90: device code uses host memory or a host function" >&2
    exit 1
  fi
  "$nvcc" -O3 -cubin -gencode=arch=compute_90a,code=sm_90a -Xptxas -v "$out/sm_90.ptx" \
    -o "$out/sm_90.cubin" 2>>"$log" || { cat "$log" >&2; exit 1; }
  rm "$out/sm_90.ptx"
}

# Side by side: one compiler takes minutes of one core.
compile_amd gfx950 &
compilers=($!)
compile_amd gfx942 &
compilers+=($!)
compile_nvidia &
compilers+=($!)
for compiler in "${compilers[@]}"; do wait "$compiler"; done
cat "$out"/usage.{gfx950,gfx942,sm_90} >"$out/usage.txt"
rm "$out"/usage.{gfx950,gfx942,sm_90}

{
  echo '.section .rodata.mla_images,"a",@progbits'
  for pair in gfx950:gfx950.co gfx942:gfx942.co sm_90:sm_90.cubin; do
    name="${symbols}_${pair%%:*}"
    echo ".balign 4096"
    echo ".global ${name}_begin, ${name}_end"
    echo "${name}_begin: .incbin \"$out/${pair##*:}\""
    echo "${name}_end:"
    echo ".byte 0"
  done
  echo '.section .note.GNU-stack,"",@progbits'
} >"$out/kernel_images.s"
"${AS:-as}" "$out/kernel_images.s" -o "$out/kernel_images.o"
