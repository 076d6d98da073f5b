#!/bin/sh
# ./dev bench NAME runs NAME_benchmark from the root of the repository. ENGINE_PYTHON: an
# interpreter that has vLLM for CPUs; without it the one of the tests, which is made if it is not
# there.
MLA_CLIENT_LIBRARY="${MLA_CLIENT_LIBRARY-$PWD/.bazel/bin/client/c/libmla_client.so}"
export MLA_CLIENT_LIBRARY
if [ -z "${ENGINE_PYTHON:-}" ]; then
  folder="$(python3 tests/engines/environments.py vllm-0.32 | tail -n 1)" || exit 1
  ENGINE_PYTHON="$folder/bin/python"
fi
exec "$ENGINE_PYTHON" tests/bench/engine/engine_thread.py --server .bazel/bin/server/mla-server \
  --gpu .bazel/bin/tests/fake_hip/libfake_hip.so "$@"
