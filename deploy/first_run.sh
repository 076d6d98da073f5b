#!/usr/bin/env bash
# The first run on an AMD GPU (MI300X, MI325X, MI350X, MI355X): it examines the machine, tests
# single instructions, every kernel and the server, measures, and packs the results into one archive
# that can be sent back. It changes nothing on the machine and needs no root.
#
#   ./dev build hip
#   deploy/first_run.sh [ARCHIVE.tar.gz]
#
# The archive names the machine's devices, drivers, kernel and user groups, and holds the programs'
# output: no tensors, no environment, no host name. FIRST_RUN_PROGRAMS names another folder of
# programs than .bazel/bin, FIRST_RUN_SECONDS the longest time of a step (1800). Exit status: 0 when
# every step passed, 1 when one failed; the archive is there in either case.
# docs/kernels/rocm.md says what each step is for.
set -uo pipefail

programs="${FIRST_RUN_PROGRAMS:-.bazel/bin}"
mlactl="$programs/client/mlactl/mlactl"
conformance="$programs/tests/conformance/gpu_conformance"
bench="$programs/tests/bench/gpu"
seconds="${FIRST_RUN_SECONDS:-1800}"
# Time for a server to end, several times that of its drain.
end_seconds=$((seconds < 120 ? seconds : 120))
archive="$(realpath -m "${1:-first_run.tar.gz}")"
work="$(mktemp -d)"
out="$work/first_run"
mkdir "$out"
trap 'rm -rf "$work"' EXIT
failed=0

# note NAME STATUS SECONDS: a line of summary.txt.
note() {
  local verdict=passed
  [[ $2 -eq 0 ]] || { verdict=FAILED failed=1; }
  printf '%-28s %-8s status %-4d %5d s\n' "$1" "$verdict" "$2" "$3" | tee -a "$out/summary.txt"
}
# step NAME COMMAND...: its output in NAME.log, its result in summary.txt. A failure is a result.
step() {
  local name="$1" begin="$SECONDS" status=0
  shift
  echo "first run: $name"
  { printf '%q ' "$@"; echo; } >"$out/$name.log"
  timeout --kill-after=10 "$seconds" "$@" >>"$out/$name.log" 2>&1 </dev/null || status=$?
  [[ $status -eq 124 ]] && echo "not done within $seconds s" >>"$out/$name.log"
  note "$name" "$status" "$((SECONDS - begin))"
}
# look NAME COMMAND...: the same for facts that a machine may lack: a failure is not a result.
look() {
  local name="$1"
  shift
  { printf '%q ' "$@"; echo; timeout 60 "$@"; } >"$out/$name.log" 2>&1 </dev/null || true
}

machine() {
  uname -srm
  grep -h PRETTY_NAME /etc/os-release
  cat /opt/rocm/.info/version "${ROCM_PATH:-/opt/rocm}/.info/version" 2>/dev/null
  cat /sys/module/amdgpu/version 2>/dev/null
  ls -ln /dev/kfd /dev/dri
  id -u
  id -G
  ulimit -a
  grep -m1 'model name' /proc/cpuinfo
  nproc
  free -g
  ls -l "${ROCM_PATH:-/opt/rocm}"/lib/libamdhip64.so*
  ldd "${ROCM_PATH:-/opt/rocm}"/lib/libamdhip64.so "${ROCM_PATH:-/opt/rocm}"/lib/libhsa-runtime64.so
  for node in /sys/class/kfd/kfd/topology/nodes/*; do
    echo "$node"
    grep -E 'gfx_target_version|simd_count|num_xcc|lds_size|max_waves|capability' "$node/properties"
  done
}

# serve NAME FLAG...: a server on the GPU, its log, and a short load over shared memory and without.
serve() {
  local name="$1" socket="$work/mla.sock" server status=0 begin
  shift
  "$programs/server/mla-server" --backend=hip --listen= --unix-path="$socket" \
    --ops-listen= --log-level=debug --kv-cache-bytes=4GiB "$@" >"$out/$name-server.log" 2>&1 &
  server=$!
  for ((i = 0; i < seconds; ++i)); do
    "$mlactl" --target="unix:$socket" health >/dev/null 2>&1 && break
    kill -0 "$server" 2>/dev/null || break
    sleep 1
  done
  step "$name-info" "$mlactl" --target="unix:$socket" info
  step "$name-attend" "$mlactl" --target="unix:$socket" attend
  look "$name-memory-before" rocm-smi --showmeminfo vram
  step "$name-bench" "$mlactl" --target="unix:$socket" bench --preset=deepseek-v3 --layers=8 \
    --batch=1,16 --context=4096 --duration=60
  step "$name-bench-inline" "$mlactl" --target="unix:$socket" bench --preset=deepseek-v3 \
    --layers=8 --batch=1,16 --context=4096 --duration=10 --transport=inline
  look "$name-memory-after" rocm-smi --showmeminfo vram
  # A call of the driver that never returns would keep the process for ever.
  begin="$SECONDS"
  kill -TERM "$server" 2>/dev/null
  for ((i = 0; i < end_seconds; ++i)); do
    kill -0 "$server" 2>/dev/null || break
    sleep 1
  done
  kill -KILL "$server" 2>/dev/null
  wait "$server" || status=$?
  echo "the server ended with status $status" >>"$out/$name-server.log"
  note "$name-end" "$status" "$((SECONDS - begin))"
}

machine >"$out/machine.log" 2>&1
look rocminfo rocminfo
look rocm-smi rocm-smi --showdriverversion --showproductname --showcomputepartition
look kernel-log bash -c 'dmesg | grep -iE "amdgpu|kfd" | tail -n 300'
git rev-parse HEAD >"$out/commit.txt" 2>/dev/null

step instructions "$programs/tests/tile/tile_conformance"
step self-test "$programs/server/mla-server" --check-config --backend=hip --kv-cache-bytes=4GiB
step conformance-small "$conformance" --threads 1 --edges 100 --shapes 50 \
  --large 0 --prefill 4 --max-flop 1e9 --progress 1
step conformance "$conformance" --threads 4 --edges 143 --shapes 400
step conformance-8-bits "$conformance" --threads 4 --compute fp8 \
  --kv fp8_tensor,fp8_row
step conformance-lists "$conformance" --threads 4 --attention v32
step conformance-windows "$conformance" --threads 4 --attention v4
serve server
serve server-with-graphs --gpu-graphs=on
step bench-decode "$bench/gpu_bench" --json "$out/bench-decode.json"
step bench-decode-8-bits "$bench/gpu_bench" --kv fp8_tensor --compute fp8
step bench-prefill "$bench/gpu_prefill" --json "$out/bench-prefill.json"
step bench-prefill-8-bits "$bench/gpu_prefill" --dtype fp8
look kernel-log-after bash -c 'dmesg | grep -iE "amdgpu|kfd" | tail -n 300'

sed -i "s/$(uname -n)/HOST/g" "$out"/* 2>/dev/null
tar -C "$work" -czf "$archive" first_run || exit 1
cat "$out/summary.txt"
echo "first run: $archive"
exit "$failed"
