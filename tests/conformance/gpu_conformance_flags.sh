#!/bin/sh
# The program that is the first argument, on the fake runtime: that --compute fp8 alone runs rows of
# 8 bits, and that flags which ask for what no GPU runs end the program with status 1.
set -eu
printf 'fake image for gfx950\0' > "$TEST_TMPDIR/image"

run() {
  "$program" --library tests/fake_hip/libfake_hip.so --image "$TEST_TMPDIR/image" --self-test 0 \
    --threads 1 --shapes 2 --large 0 --prefill 0 --edges 0 --wide 0 --spread 0 --heads 64 \
    --page-sizes 16 --max-flop 1e7 --typical-flop 1e6 "$@" > "$TEST_TMPDIR/out"
}

program=$1
run --compute fp8 || { cat "$TEST_TMPDIR/out"; exit 1; }
grep ' 2 shapes, [1-9][0-9]* comparisons' "$TEST_TMPDIR/out"
status=0
run --kv fp8_page || status=$?
[ $status -eq 1 ] || { echo "--kv fp8_page: status $status"; exit 1; }
grep ' 0 shapes, 0 comparisons' "$TEST_TMPDIR/out"
