#!/bin/sh
# ./dev bench NAME runs NAME_benchmark from the root of the repository.
exec /usr/bin/python3 tests/bench/fleet/probes.py "$@"
