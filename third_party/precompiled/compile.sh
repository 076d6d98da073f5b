#!/usr/bin/env bash
# compile.sh UNUSED HEADERS COMMAND...: runs a compiler. HEADERS is a file that names one header a
# line; those that the compiler did not read are written to UNUSED, for Bazel.
set -euo pipefail
unused="$1" headers="$2"
shift 2
"$@" -MD -MF "$unused"
tr -s ' \\\n' '\n' <"$unused" | sed 's|^/proc/self/cwd/||; s|^\./||' | LC_ALL=C sort -u |
  LC_ALL=C comm -13 - <(LC_ALL=C sort -u "$headers") >"$unused.list"
mv "$unused.list" "$unused"
