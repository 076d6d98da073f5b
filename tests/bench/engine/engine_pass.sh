#!/bin/sh
# ./dev bench NAME runs NAME_benchmark from the root of the repository. ENGINE_PYTHON: an
# interpreter that has PyTorch for the GPU. The server is what was built last: ./dev build hip.
MLA_CLIENT_LIBRARY="${MLA_CLIENT_LIBRARY-$PWD/.bazel/bin/client/c/libmla_client.so}"
export MLA_CLIENT_LIBRARY
exec "${ENGINE_PYTHON:-python3}" tests/bench/engine/engine_pass.py \
  --server .bazel/bin/server/mla-server "$@"
