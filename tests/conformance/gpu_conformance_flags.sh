#!/bin/sh
# Runs the program in the first argument on the fake runtime. --compute fp8 alone must run rows of 8
# bits, and flags that request something no GPU supports must end the program with status 1.
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

for refused in "--self-test-parts bf16,none" "--graphs maybe"; do
  status=0
  # shellcheck disable=SC2086
  "$program" --library tests/fake_hip/libfake_hip.so $refused 2> "$TEST_TMPDIR/err" || status=$?
  [ $status -eq 2 ] || { echo "$refused: status $status"; exit 1; }
done
run --self-test 1 --self-test-parts pages,one_row --progress 1
grep 'self-test: pages, after' "$TEST_TMPDIR/out"
grep 'self-test: one_row, after' "$TEST_TMPDIR/out"
grep 'graphs: off: ' "$TEST_TMPDIR/out"
if grep 'self-test: bf16' "$TEST_TMPDIR/out"; then exit 1; fi
