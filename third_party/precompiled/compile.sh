#!/usr/bin/env bash
# compile.sh UNUSED DECLARED COMMAND...: runs a compiler. DECLARED is a file that names one file a
# line, which the source may read. The files among them that it did not read are written to UNUSED,
# for Bazel. A file of the tree that it read and that is not declared is an error: Bazel would not
# compile the source again after a change of it.
set -euo pipefail
unused="$1" declared="$2"
shift 2
"$@" -MD -MF "$unused.d"
sorted() { LC_ALL=C sort -u "$@"; }
# The first name is the object's. A compiled header is made with -iquote /proc/self/cwd/., so names
# of the tree that it reads begin with /proc/self/cwd/./, and those that a header compiled before it
# keeps with /proc/self/cwd/ alone. Libraries lie in other folders of the machine.
tr -s ' \\\n' '\n' <"$unused.d" | sed '1d; s|^/proc/self/cwd/\./||; s|^\./||' >"$unused.read"
undeclared="$(sed '/^\//d' "$unused.read" | sorted | LC_ALL=C comm -23 - <(sorted "$declared"))"
if [[ -n "$undeclared" ]]; then
  echo "read, and not in deps: $undeclared" >&2
  exit 1
fi
sed 's|^/proc/self/cwd/||' "$unused.read" | sorted | LC_ALL=C comm -13 - <(sorted "$declared") \
  >"$unused"
rm "$unused.d" "$unused.read"
