"""Checks vLLM with attention on a server against the library, on GPUs.

    MLA_CLIENT_LIBRARY=libmla_ring.so python3 tests/vllm/check_on_gpu.py --server mla-server
        [--cases plain,q_lora,device,projected,projected-device,piecewise,breakable,tp2,
         tp2-device] [--server-gpu 0] [--logs FOLDER]

Each case is an engine in processes of its own with a small model, bf16, and eager unless said;
"tp2" has two tensor-parallel ranks on two GPUs, "device" tensors in the server's GPU memory,
"projected" queries and outputs that the server projects. In "piecewise" and "breakable" the work
between two layers' attention is a CUDA graph, which vLLM makes by compiling the model, or by
interrupting one capture. Log-probabilities and tokens must be the library's, up to twice what the
dtype alone changes. The two ranks' must also be those of one rank. Needs none of vLLM's compiled
operations. The last line gives the result.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "engines"))

# pylint: disable=wrong-import-position
import compare

ENDS_S = 150  # a case
DEVICE = {"device_bytes": 64 << 20}
PROJECTED = {"projected": True}
GRAPHS = {"custom_ops": ["none"], "cudagraph_mode": "PIECEWISE",
          "cudagraph_capture_sizes": [1, 2, 4, 8]}
# name: (model, more arguments of LLM, more options of the connector)
CASES = {
    "plain": ("deepseek_v2", {}, {}),
    "q_lora": ("deepseek_v3", {}, {}),
    "device": ("deepseek_v2", {}, DEVICE),
    "projected": ("deepseek_v3", {}, PROJECTED),
    "projected-device": ("deepseek_v3", {}, {**DEVICE, **PROJECTED}),
    "piecewise": ("deepseek_v2", {"enforce_eager": False, "compilation_config": {
        **GRAPHS, "mode": 3, "backend": "eager"}}, DEVICE),
    "breakable": ("deepseek_v2", {"enforce_eager": False, "compilation_config": {
        **GRAPHS, "mode": 0}}, DEVICE),
    # vLLM's own exchange of ranks is one of its compiled parts; NCCL's is not.
    "tp2": ("deepseek_v2", {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}, {}),
    "tp2-device": ("deepseek_v2", {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
                   DEVICE),
}
LLM = {"dtype": "bfloat16", "async_scheduling": False, "block_size": 16,
       "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}}
ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cuda", "VLLM_USE_V2_MODEL_RUNNER": "0",
               "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
               "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
MORE_ENVIRONMENT = {"piecewise": {"VLLM_DISABLE_COMPILE_CACHE": "1"},
                    "breakable": {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}}
SERVER = ["--backend=cuda", "--kv-cache-bytes=2GiB", "--limits-weights-bytes=2GiB",
          "--shm-device-bytes=1GiB", "--shm-total-bytes=2GiB"]


def run(name, folder, flags):
    """The rows of a case, and its counts."""
    kind, llm, extra = CASES[name]
    given, out = folder / f"{name}.json", folder / f"{name}.out.json"
    given.write_text(json.dumps({
        "model": str(folder / kind), "llm": {**LLM, **llm},
        "env": {**ENVIRONMENT, **MORE_ENVIRONMENT.get(name, {})},
        "extra": {"prefix_cache": False, **extra},
        "server": [[*SERVER, f"--gpu-device={flags.server_gpu}"]],
        "rounds": [{"logprobs": True}, {"logprobs": True}]}))
    with open((flags.logs or folder) / f"{name}.log", "wb") as log:
        subprocess.run([sys.executable, str(HERE / "engine.py"), str(given), str(out)],
                       stdout=log, stderr=log, timeout=ENDS_S, check=True,
                       env={**os.environ, "SERVER_UNDER_TEST": flags.server})
    found = json.loads(out.read_text())
    return found["rounds"], found["counts"]


def check(name, folder, flags, before):
    """True if a case is right."""
    rounds, counts = run(name, folder, flags)
    want, bf16 = (json.loads((folder / CASES[name][0] / f"{file}.json").read_text())
                  for file in ("reference", "reference_bf16"))
    good = not counts.get("failed") and (name not in MORE_ENVIRONMENT or counts["replays"] > 0)
    for rows in rounds:
        found = compare.compare(want, rows, bf16)
        good = good and found.ok
        print(f"{name}: {found}", flush=True)
    one = before.get(name.replace("tp2-", "").replace("tp2", "plain"))
    if one is not None:
        found = compare.compare(one, rounds[-1], bf16)
        good = good and found.ok
        print(f"{name}, with one rank: {found}", flush=True)
    before[name] = rounds[-1]
    print(f"{name}: {counts}", flush=True)
    return good


def main():
    """Runs the cases."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--server-gpu", type=int, default=0)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--logs", type=pathlib.Path)
    flags = parser.parse_args()
    failed, before = [], {}
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        names = flags.cases.split(",")
        for kind in sorted({CASES[name][0] for name in names}):
            subprocess.run([sys.executable, str(ROOT / "tests/engines/models.py"), kind,
                            str(folder / kind)], check=True, stdout=subprocess.DEVNULL)
        for name in names:
            try:
                good = check(name, folder, flags, before)
            except (subprocess.SubprocessError, OSError, ValueError) as error:
                print(f"{name}: {error}", flush=True)
                good = False
            if not good:
                failed.append(name)
    print(f"check: FAILED: {', '.join(failed)}" if failed else "check: ok", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
