#!/usr/bin/env bash
# Compiles ggml_times against a ggml library that is already here: its public headers, and the
# shared libraries that its own build made. Where a library is made of several, as ggml's core and
# its CPU backend are, all are named.
#
#   build_ggml_times.sh INCLUDE_DIR OUT LIBRARY...
set -euo pipefail
[[ $# -ge 3 ]] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here="$(cd "$(dirname "$0")" && pwd)"
include="$1" out="$2"
shift 2
libraries=()
for library in "$@"; do
  path="$(readlink -f "$library")"
  libraries+=("$path" "-Wl,-rpath,$(dirname "$path")")
done
"${CXX:-g++}" -std=c++20 -O2 -Wall -Wextra -isystem "$include" "$here/ggml_times.cc" -o "$out" \
  "${libraries[@]}"
