#!/usr/bin/env bash
# Packs what the benchmarks and checks of vLLM need on a machine that has GPUs and Python 3.12 with
# PyTorch 2.11, and reaches no registry:
#
#   bazel build --config=hip //server:mla-server //client/c:libmla_ring.so [//... more programs]
#   [VLLM=0.32.0] tests/bench/engine/vllm/pack.sh OUT.tar.xz [PROGRAM...]
#
# OUT holds bin/ (mla-server, and the programs, with their libraries in lib/), tree/ (the client and
# the Python programs, in the folders of this repository) and site/ (vLLM, 0.25.1 unless VLLM says
# another release, and the packages that it imports). 0.32.0 asks for PyTorch 2.13, but 2.11 has all
# that these programs need. No compiled part of vLLM is taken: with attention on a server, eager,
# with dense layers and unquantised weights none is called, and stand_ins/ has the names that are
# looked up. So all is small enough to be carried. On the other machine:
#
#   tar xf OUT.tar.xz && export PYTHONPATH=$PWD/site MLA_CLIENT_LIBRARY=$PWD/lib/libmla_ring.so
#   python3 tree/tests/bench/engine/vllm/layer_times.py --server bin/mla-server
set -euo pipefail

root="$(cd "$(dirname "$0")/../../../.." && pwd)"
here="$root/tests/bench/engine/vllm"
[[ $# -ge 1 ]] || { sed -n '2,6p' "$0" >&2; exit 2; }
out="$(realpath -m "$1")"
shift
vllm="${VLLM:-0.25.1}"
programs=("$root/.bazel/bin/server/mla-server")
for program in "$@"; do programs+=("$(realpath "$program")"); done
# Packages that vLLM imports when it is imported or an engine is made, next to those of PyTorch.
readonly PACKAGES=(
  cachetools cbor2 msgspec 'openai>=2' httpx2 httpcore2 truststore anyio idna typing-extensions
  jiter distro sniffio openai-harmony 'llguidance<1.8' lm-format-enforcer==0.11.3 interegular
  outlines-core==0.2.14 diskcache==5.6.3 lark==1.2.2 'xgrammar<1' apache-tvm-ffi
  compressed-tensors==0.17.0 loguru depyf==0.20.0 astor dill ijson jsonschema
  jsonschema-specifications referencing rpds-py nvtx opentelemetry-api opentelemetry-sdk
  opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai
  oss-harmony prometheus-fastapi-instrumentator partial-json-parser pybase64 pydantic==2.12.5
  pydantic-core==2.41.5 annotated-types typing-inspection 'fastapi>=0.133,<0.137'
  'starlette>=1.0.1' pyzmq blake3 python-multipart uvicorn setproctitle python-json-logger uvloop
)
for_there() {  # pip arguments: as pip, for the other machine's Python
  local platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64) number
  for number in 12 17 24 27 28 31 34 38; do
    platforms+=(--platform "manylinux_2_${number}_x86_64")
  done
  python3 -m pip "$@" --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp "${platforms[@]}"
}

work="${PACK_FOLDER:-$(mktemp -d)}"
mkdir -p "$work"
cd "$work"
rm -rf bin lib tree  # of a run before, whose libraries its programs would find
mkdir -p site bin lib wheel tree
if [[ ! -d site/vllm ]]; then
  for_there download -d wheel "vllm==$vllm"
  unzip -q -o wheel/vllm-"$vllm"*.whl -d site -x '*.so' vllm/vllm-rs \
    'vllm/third_party/deep_gemm/*' 'vllm/third_party/triton_kernels/*' '*/cutlass/include/*'
  touch site/vllm/vllm_flash_attn/_vllm_fa{2,3}_C.py
  for_there install --no-compile --target packages "${PACKAGES[@]}"
  cp -r packages/. site/
fi
cp "$here/stand_ins/_C_stable_libtorch.py" site/vllm/
# The entry point of a package that is installed.
mkdir -p site/mla_client-0.dist-info
printf 'Metadata-Version: 2.1\nName: mla-client\nVersion: 0\n' >site/mla_client-0.dist-info/METADATA
printf '[vllm.general_plugins]\nmla_server = mla_client.vllm.plugin:register\n' \
  >site/mla_client-0.dist-info/entry_points.txt

/usr/bin/python3 "$root/client/python/generate_stubs.py" --quiet
(cd "$root" && tar cf - --exclude=__pycache__ client/python/mla_client \
  client/python/tests/server_binary.py tests/engines tests/vllm tests/bench/engine \
  tests/bench/fleet tests/integration/device_memory) | tar xf - -C tree

# A program finds its libraries whatever the environment's are; Python's stay as they are.
for program in "${programs[@]}"; do
  name="$(basename "$program")"
  strip -o "bin/$name.program" "$program"
  # shellcheck disable=SC2016
  printf '#!/bin/sh\nhere=$(dirname "$(readlink -f "$0")")\n%s exec "$here/%s.program" "$@"\n' \
    'LD_LIBRARY_PATH=$here/../lib' "$name" >"bin/$name"
  chmod 755 "bin/$name"
done
strip --strip-unneeded -o lib/libmla_ring.so "$root/.bazel/bin/client/c/libmla_ring.so"
ldd bin/*.program lib/libmla_ring.so | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -vE '/(libc|libm|libdl|libpthread|librt|libstdc\+\+|libgcc_s)\.so' |
  xargs -I{} cp -L {} lib/
tar cf - bin lib site tree | xz -T0 -6 >"$out"
du -h "$out"
