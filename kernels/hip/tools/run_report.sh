#!/usr/bin/env bash
# run_report.sh REPORT USAGE: the report over the folder that holds USAGE.
set -euo pipefail
exec /usr/bin/python3 "$1" --build "$(dirname "$2")"
