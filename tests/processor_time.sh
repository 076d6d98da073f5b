#!/usr/bin/env bash
# Runs a test and prints the processor time that it and its processes took, user and system, as the
# last line of its log. Bazel calls it (--run_under); tests/count_results.py reads the line.
"$@"
status=$?
# No pipe is used, because `times` would then report the pipe's own shell.
times >"$TEST_TMPDIR/times"
tail -1 "$TEST_TMPDIR/times" | tr 'ms' '  ' |
  awk '{ printf "\nprocessor time: %.1f s\n", $1 * 60 + $2 + $3 * 60 + $4 }'
exit "$status"
