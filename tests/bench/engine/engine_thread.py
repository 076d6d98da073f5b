"""Time that the thread of an engine spends in the adapter of vLLM, without a GPU.

    MLA_CLIENT_LIBRARY=libmla_client.so python3 tests/bench/engine/engine_thread.py
        --server .bazel/bin/server/mla-server --gpu .bazel/bin/tests/fake_hip/libfake_hip.so
        [--layers 61] [--batch 1,32] [--passes 40] [--where loop,cold,vllm] [--json FILE]

The interpreter has vLLM for CPUs (tests/engines/environments.py makes one). Calls are chained as on
a GPU: tensors are those of the host, and the GPU's streams are those of a fake runtime, whose
thread copies. So the calls, their replies and the outputs are real, and the time in the library is
not that of a driver: `python_us` is without it.

    loop    the layers of passes one after another, and nothing else
    cold    the same with 4 MiB of memory and a model's small operations between two calls
    vllm    vLLM's own passes, eager, of a model with small matrices

For each a row: `python_us`, in a call of the backend's `forward_mha`, outside of the library's
functions; `calls`, `c_calls` and `opcodes`, what the interpreter executes for such a call, which no
other load of the machine changes; `connector_us`, the parts of the connector in a pass, and their
sum; the waits for replies are left out. Times are medians of the fastest quarter, because other
programs only make them longer.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any, Callable, Dict, Iterator, List, Tuple

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / path) for path in (
    "client/python", "client/python/tests", "tests/vllm", "tests/vllm/standin",
    "tests/vllm/chained")]

# pylint: disable=wrong-import-position
import engine as harness

os.environ.update({**harness.SETTINGS, "MLA_TEST_OWN": "0", "MLA_TEST_ASYNC": "0"})

import torch
import transformers
from fake_gpu import FakeGpu
from mla_client import native
from mla_client.serving import Admission, Given, Link, Planner
from mla_client.testing import ServerProcess

HEADS, NOPE, ROPE, LORA, V, HIDDEN = 4, 16, 64, 512, 16, 64
BLOCK, PROMPT, WARM_UPS = 16, 32, 10
COLD_BYTES = 4 << 20
Parts = Dict[str, List[float]]


class Watch:
    """Times and counts of the adapter's functions, which it stands in for."""

    def __init__(self, gpu: FakeGpu) -> None:
        # pylint: disable=import-outside-toplevel
        from mla_client.serving import Passes
        from mla_client.vllm.connector import MlaServerConnector
        from mla_client.vllm.runtime import Runtime

        self.calls: List[Tuple[float, float]] = []  # seconds in all, and those in the library
        self.counts: List[Dict[str, int]] = []
        self.counting = False
        self.parts: Parts = {}  # seconds of each pass
        self._library_s = 0.0
        self._pass: Dict[str, float] = collections.defaultdict(float)  # the one under way
        gpu.install(self._layer)
        lib: Any = native.library()
        lib.mla_chain_attend = self._in_library(lib.mla_chain_attend)
        for name in ("mla_chain_wait", "mla_request_wait"):
            setattr(lib, name, self._part("waits", getattr(lib, name)))
        for kind, names in ((MlaServerConnector, ("build_connector_meta", "wait_for_save",
                                                  "get_block_ids_with_load_errors",
                                                  "update_connector_output")),
                            (Runtime, ("_begin", "bind")), (Passes, ("settle",))):
            for name in names:
                setattr(kind, name, self._part(name.strip("_"), getattr(kind, name)))

    def clear(self) -> None:
        """Forgets what was seen."""
        self.calls.clear()
        self.counts.clear()
        self.parts.clear()
        self._pass.clear()

    def end_pass(self) -> None:
        """Notes the parts of a pass. Waits for replies are no time of the thread's own."""
        self._pass["settle"] -= self._pass.pop("waits", 0.0)
        for name, seconds in self._pass.items():
            self.parts.setdefault(name, []).append(seconds)
        self._pass.clear()

    def _layer(self, forward: Callable[..., None], *args: Any, **others: Any) -> None:
        self._library_s = 0.0
        if self.counting:
            with counted() as found:
                forward(*args, **others)
            self.counts.append(found)
        else:
            begin = time.perf_counter()
            forward(*args, **others)
            self.calls.append((time.perf_counter() - begin, self._library_s))

    def _in_library(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            begin = time.perf_counter()
            code = function(*args)
            self._library_s += time.perf_counter() - begin
            return code
        return call

    def _part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **others: Any) -> Any:
            begin = time.perf_counter()
            found = function(*args, **others)
            self._pass[name] += time.perf_counter() - begin
            return found
        return call


@contextlib.contextmanager
def counted() -> Iterator[Dict[str, int]]:
    """Counts of the calls and the bytecode of what runs inside."""
    found = {"calls": 0, "c_calls": 0, "opcodes": 0}

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            found[event + "s"] += 1

    def trace(frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        found["opcodes"] += event == "opcode"
        return trace
    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(None)
        sys.setprofile(None)


def fastest(seconds: List[float]) -> float:
    """Microseconds: the median of the fastest quarter."""
    chosen = sorted(seconds)[:max(1, len(seconds) // 4)]
    return round(statistics.median(chosen) * 1e6, 1)


# Parts of a pass next to its layers. The begin is a part of the first layer's call.
CONNECTOR = ("build_connector_meta", "bind", "begin", "wait_for_save",
             "get_block_ids_with_load_errors", "update_connector_output", "settle")


def row_of(watch: Watch, where: str, batch: int, layers: int) -> Dict[str, Any]:
    """What was seen in passes of so many layers. The first layer, which begins the pass, is apart.
    """
    rest = [call for place, call in enumerate(watch.calls) if place % layers]
    counts = [one for place, one in enumerate(watch.counts) if place % layers]
    parts = {name: fastest(watch.parts[name]) for name in CONNECTOR if watch.parts.get(name)}
    return {"where": where, "batch": batch, "layers": layers,
            "python_us": fastest([whole - library for whole, library in rest]),
            "library_us": fastest([library for _, library in rest]),
            **{name: int(statistics.median(one[name] for one in counts)) for name in counts[0]},
            "connector_us": round(sum(parts.values()), 1), "parts_us": parts}


# --- The adapter alone

class Alone:
    """Passes of the adapter's worker, planned as the connector plans them. Requests have a prompt
    of one row."""

    def __init__(self, target: str, layers: int, batch: int, cold: bool) -> None:
        # pylint: disable=import-outside-toplevel
        from mla_client.vllm import backend, checks
        from mla_client.vllm.runtime import runtime
        from test_backend import config, projection

        shape: Any = dict(kv_lora_rank=LORA, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
                          v_head_dim=V)
        given = config(target)
        given.model_config.hf_text_config.num_hidden_layers = layers
        given.model_config.dtype = torch.bfloat16
        backend.get_current_vllm_config = lambda: given
        self._backend, self._runtime, self._batch = backend, runtime, batch
        torch.set_default_dtype(torch.bfloat16)
        self._layers = [backend.Impl(HEADS, LORA + ROPE, 1.0, 1, None, None, "auto", None,
                                     "decoder", None, kv_b_proj=projection(layer), **shape)
                        for layer in range(layers)]
        runtime.start()
        self._link = Link(checks.options_of(given))
        self._planner = Planner(Admission(self._link, "s", False), BLOCK)
        self._tensors = [(torch.randn(batch, HEADS, NOPE + ROPE), torch.randn(batch, LORA),
                          torch.randn(batch, 1, ROPE), torch.empty(batch, HEADS * V))
                         for _ in range(layers)]
        self._rows = 0
        self._between = Between() if cold else None

    def a_pass(self) -> None:
        """One row of each request."""
        begins, block = self._rows == 0, self._rows // BLOCK
        new = (lambda place: (block * self._batch + place,)) if self._rows % BLOCK == 0 else (
            lambda place: ())
        plan = self._planner.plan([Given(str(place), self._rows, 1, new(place), begins)
                                   for place in range(self._batch)], ())
        self._runtime.bind(plan)
        slots = torch.tensor([(block * self._batch + place) * BLOCK + self._rows % BLOCK
                              for place in range(self._batch)])
        metadata = self._backend.Metadata(
            self._batch, self._batch, self._batch, slots, [1] * self._batch, BLOCK, None, None,
            1, 0, None)
        for layer, (q, kv, rope, output) in zip(self._layers, self._tensors):
            if self._between is not None:
                self._between.run()
            layer.forward_mha(q, kv, rope, None, metadata, None, output)
        self._runtime.finish()
        if self._runtime.lost_blocks():
            raise SystemExit(f"a pass has failed: {self._runtime.worker.passes.last_error}")
        self._rows += 1

    def close(self) -> None:
        """Gives everything back."""
        self._runtime.close()
        self._link.close()
        torch.set_default_dtype(torch.float32)


class Between:
    """Other work, as of an engine: memory that it walks through, and small operations."""

    def __init__(self) -> None:
        self._memory = torch.zeros(COLD_BYTES // 4, dtype=torch.int32)
        self._weights = [torch.randn(HIDDEN, HIDDEN) for _ in range(4)]

    def run(self) -> None:
        """Does it."""
        self._memory.add_(1)
        x = torch.randn(1, HIDDEN)
        for weight in self._weights:
            x = torch.nn.functional.silu(torch.nn.functional.linear(x, weight))
            x = torch.nn.functional.rms_norm(x, (HIDDEN,)).contiguous().view(-1, HIDDEN)
        json.loads(json.dumps({str(place): x.shape[0] for place in range(40)}))


# --- Inside vLLM

class Inside:
    """vLLM's passes."""

    def __init__(self, target: str, layers: int, batch: int, folder: str) -> None:
        # pylint: disable=import-outside-toplevel
        import mla_client.vllm.runtime as adapter
        from vllm import LLM, SamplingParams

        write_model(folder, layers)
        extra = {"target": target, "model_id": "thread", "prefix_cache": False}
        self._llm = LLM(model=folder, **{
            **harness.OPTIONS, "dtype": "bfloat16", "load_format": "dummy", "max_num_seqs": batch,
            "max_num_batched_tokens": 2048, "block_size": BLOCK, "attention_backend": "CUSTOM",
            "kv_transfer_config": {"kv_connector": "MlaServerConnector", "kv_role": "kv_both",
                                   "kv_connector_extra_config": extra}})
        engine = self._llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, detokenize=False)
        for number in range(batch):
            engine.add_request(str(number), {"prompt_token_ids": [1 + number] * PROMPT}, params)
        self.a_pass = engine.step
        self._runtime = adapter.runtime

    def close(self) -> None:
        """Ends the engine. No pass may have failed."""
        failed = self._runtime.counts().get("failed", 0)
        self._llm.llm_engine.engine_core.shutdown()
        if failed:
            raise SystemExit(f"{failed} passes have failed")


def write_model(folder: str, layers: int) -> None:
    """A configuration with matrices so small that they cost little more than their calls."""
    config = transformers.DeepseekV3Config(
        vocab_size=256, hidden_size=HIDDEN, intermediate_size=HIDDEN, moe_intermediate_size=32,
        num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1,
        first_k_dense_replace=layers, q_lora_rank=HIDDEN, kv_lora_rank=LORA, qk_rope_head_dim=ROPE,
        qk_nope_head_dim=NOPE, v_head_dim=V, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=None,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=False)
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(folder)


def run(passes: Any, watch: Watch, count: int) -> None:
    """So many passes whose times are noted, and two whose bytecode is counted."""
    for _ in range(WARM_UPS):
        passes.a_pass()
    watch.clear()
    for _ in range(count):
        passes.a_pass()
        watch.end_pass()
    watch.counting = True
    for _ in range(2):
        passes.a_pass()
    watch.counting = False


def main() -> None:
    """Each place and batch by itself."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--gpu", required=True, help="the fake runtime's library")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--where", default="loop,cold,vllm")
    parser.add_argument("--json")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    gpu = FakeGpu(pathlib.Path(flags.gpu).resolve())
    rows: List[Dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ServerProcess(
            flags.server, ["--kv-cache-bytes=2GiB", "--log-level=warning"]) as server:
        harness.entry_points(folder)
        plugin(pathlib.Path(folder))
        watch = Watch(gpu)
        for where in flags.where.split(","):
            for batch in map(int, flags.batch.split(",")):
                passes: Any = (Inside(server.target, flags.layers, batch, f"{folder}/model")
                               if where == "vllm" else
                               Alone(server.target, flags.layers, batch, where == "cold"))
                run(passes, watch, flags.passes)
                rows.append(row_of(watch, where, batch, flags.layers))
                passes.close()
                watch.clear()
                print(json.dumps(rows[-1]), flush=True)
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def plugin(folder: pathlib.Path) -> None:
    """Makes the adapter known to vLLM."""
    info = folder / "mla_client-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mla-client\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nmla_server = mla_client.vllm.plugin:register\n")


if __name__ == "__main__":
    main()
