#!/bin/sh
# Runs the conformance suite (the first argument) with two threads on the waiting driver. Backends
# are created and destroyed while launches of others run. On sm_90 half of the cases are streamed.
set -eu
for arch in sm_90 gfx950; do
  printf 'fake image for %s\0' "$arch" > "$TEST_TMPDIR/image"
  FAKE_GPU_ARCH=$arch FAKE_GPU_GIB=64 "$1" --library tests/fake_hip/waits/libwaiting_driver.so \
    --image "$TEST_TMPDIR/image" --self-test 0 --threads 2 --edges 24 --shapes 0 --large 0 \
    --prefill 0 --wide 0 --spread 0 --heads 20,32,40 --page-sizes 3,64 --dims 128,128 \
    --max-flop 2e7 > "$TEST_TMPDIR/out" || { cat "$TEST_TMPDIR/out"; exit 1; }
  grep ' [1-9][0-9]* shapes, [1-9][0-9]* comparisons' "$TEST_TMPDIR/out"
done
