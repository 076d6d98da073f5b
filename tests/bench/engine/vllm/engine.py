"""One vLLM engine as a process of its own, which runs passes when it is told to.

    python3 tests/bench/engine/vllm/engine.py '{"layers": 4,
        "extra": {"target": "unix:/run/mla-server/mla.sock", "model_id": "four"}}'

A model of DeepSeek-V3's attention shape with random weights, eager, bf16, dense layers, on the
first GPU that is visible. "extra": of the connector. "graphs": true: not eager, the work between
two layers' attention is a CUDA graph; the environment then says VLLM_USE_BREAKABLE_CUDAGRAPH=1,
which vLLM reads when it is imported. The program reads commands from its input, a
line of JSON each, and answers each on its output by a line of JSON:

    {"requests": 32, "rows": 1024}     ends all requests and computes the prompts of others, so many
                                       for either mode
    {"passes": 5, "mode": "server"}    decode passes; milliseconds of each
    {"passes": 5, "mode": "server", "parts": true}
                                       the same with the time that the worker's thread spends in
                                       parts of the adapter, medians in microseconds
    {"passes": 5, "mode": "server", "modules": true}
                                       the same with the time of the model's modules, and of what
                                       else a pass does: see module_times.py
    {"seconds": 3.0, "mode": "server"} decode passes for so long; passes and seconds

In the mode "zeros" nothing is sent, and a layer's outputs are whatever their memory holds: a pass
costs all but the attention, in the same process and so on the same core. Each mode has requests of
its own, of which the scheduler sees those of the mode alone. The first pass of each command is not
counted, because the runner takes the other requests into its batch then.

The log goes to the error output, and every minute that a command takes adds the stacks of all
threads to it. The process ends with its input.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any, Callable, Dict, Iterator, List

os.environ.update({
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "OMP_NUM_THREADS": "4",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "WARNING"})

# pylint: disable=wrong-import-position
import torch
import transformers
from vllm import LLM, SamplingParams

import modules

MOST_ROWS = 8192   # of a request
PASS_ROWS = 2048   # of a pass with prompts, whose tensors fit the memory that is asked for
VOCABULARY = 1024
STACKS_S = 60.0    # after which the log gets the stacks of a command's threads
GRAPHS = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 32]}
MODES = ("server", "zeros")


def model(folder: str, layers: int) -> None:
    """Writes the model's configuration. Engines make random weights."""
    config = transformers.DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=2048, intermediate_size=4096, moe_intermediate_size=256,
        num_hidden_layers=layers, num_attention_heads=128, num_key_value_heads=128,
        n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1,
        first_k_dense_replace=layers, q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=None,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=False)
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(folder)


class Engine:
    """The engine, and its requests in either mode."""

    def __init__(self, folder: str, layers: int, extra: Dict[str, Any], graphs: bool) -> None:
        # pylint: disable=import-outside-toplevel
        from mla_client.vllm.runtime import Runtime

        model(folder, layers)
        self._llm = LLM(
            model=folder, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True,
            attention_backend="CUSTOM", enforce_eager=not graphs, max_model_len=MOST_ROWS,
            max_num_seqs=64, max_num_batched_tokens=PASS_ROWS, block_size=16,
            enable_prefix_caching=False, async_scheduling=False,
            gpu_memory_utilization=0.1,  # that must be free at the start
            # No compiled operation of vLLM's is needed so.
            ir_op_priority={"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
            compilation_config={"mode": 0, "custom_ops": ["none"], **(GRAPHS if graphs else {})},
            kv_transfer_config={
                "kv_connector": "MlaServerConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"prefix_cache": False, **extra}})
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._runtime: Any = Runtime
        self._real = Runtime.attend, Runtime.finish
        self._running: Dict[str, Any] = {mode: [] for mode in MODES}  # requests
        self._mode = ""
        self._names = 0

    def answer(self, command: Dict[str, Any]) -> Dict[str, Any]:
        """Does what a command says."""
        if "requests" in command:
            self._end_all()
            for mode in MODES:
                self._enter(mode)
                self._ask(command["requests"], command["rows"])
            return {}
        self._enter(command["mode"])
        self._pass()
        if "seconds" in command:
            begin, passes = time.perf_counter(), 0
            while time.perf_counter() - begin < command["seconds"]:
                self._pass()
                passes += 1
            return {"passes": passes, "seconds": time.perf_counter() - begin}
        if command.get("modules"):
            watch = modules.watched(self._engine)
        elif command.get("parts"):
            watch = measured()
        else:
            return {"ms": [self._pass() for _ in range(command["passes"])]}
        with watch as parts:
            times = [self._pass() for _ in range(command["passes"])]
        return {"ms": times, "us": {name: round(statistics.median(values) * 1e6, 1)
                                    for name, values in parts.items() if values}}

    def _enter(self, mode: str) -> None:
        """From here on passes are of this mode, and have its requests alone."""
        if mode not in MODES:
            raise SystemExit(f"mode: got {mode!r}, must be one of {MODES}")
        if self._mode:
            self._running[self._mode] = self._scheduler.running
        self._scheduler.running, self._mode = self._running[mode], mode

        def nothing(*_: Any, **__: Any) -> None:
            return
        attend, finish = self._real if mode == "server" else (nothing, nothing)
        self._runtime.attend, self._runtime.finish = attend, finish

    def _pass(self) -> float:
        """Milliseconds of a pass, its samples included."""
        begin = time.perf_counter()
        for output in self._engine.step():
            if output.finished:
                raise SystemExit(f"request {output.request_id} has ended: "
                                 f"{output.outputs[0].finish_reason}")
        return (time.perf_counter() - begin) * 1e3

    def _end_all(self) -> None:
        for mode in MODES if self._mode else ():
            self._enter(mode)
            names = [request.request_id for request in self._scheduler.running]
            self._engine.abort_request(names, internal=True)
            self._engine.step()  # tells the worker

    def _ask(self, count: int, rows: int) -> None:
        """Requests with their first tokens."""
        generator = torch.Generator().manual_seed(5)
        params = SamplingParams(temperature=0, max_tokens=MOST_ROWS - rows, ignore_eos=True,
                                detokenize=False)
        waited = set()
        for _ in range(count):
            self._names += 1
            waited.add(str(self._names))
            prompt = torch.randint(1, VOCABULARY - 1, (rows,), generator=generator).tolist()
            self._engine.add_request(str(self._names), {"prompt_token_ids": prompt}, params)
        while waited:
            waited -= {output.request_id.split("-")[0] for output in self._engine.step()}

    def close(self) -> None:
        """Ends it."""
        self._engine.engine_core.shutdown()


@contextlib.contextmanager
def measured() -> Iterator[Dict[str, List[float]]]:
    """Seconds of the calls of each part of the adapter. A pass begins in its first layer."""
    # pylint: disable=import-outside-toplevel
    from mla_client import native
    from mla_client.serving import Passes, Worker
    from mla_client.vllm.connector import MlaServerConnector
    from mla_client.vllm.runtime import Runtime

    parts: Dict[str, List[float]] = {}
    before = []
    for kind, name, part in ((MlaServerConnector, "build_connector_meta", "plan"),
                             (Worker, "begin", "begin"), (Runtime, "attend", "attend"),
                             (Worker, "end", "end"), (Passes, "lost", "lost"),
                             (native.library(), "mla_chain_wait", "waits")):
        before.append((kind, name, getattr(kind, name)))
        setattr(kind, name, timed(getattr(kind, name), parts.setdefault(part, [])))
    try:
        yield parts
    finally:
        for kind, name, function in before:
            setattr(kind, name, function)


def timed(function: Callable[..., Any], seconds: List[float]) -> Callable[..., Any]:
    """The function, which notes how long it takes."""
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        found = function(*args, **kwargs)
        seconds.append(time.perf_counter() - begin)
        return found
    return call


def main() -> None:
    """Answers commands."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever else is printed
    options = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(str(pathlib.Path(folder) / f"layers{options['layers']}"),
                        options["layers"], options["extra"], options.get("graphs", False))
        answers.write("{}\n")  # it has started
        for line in sys.stdin:
            faulthandler.dump_traceback_later(STACKS_S, repeat=True)
            answers.write(json.dumps(engine.answer(json.loads(line))) + "\n")
            faulthandler.cancel_dump_traceback_later()
        engine.close()


if __name__ == "__main__":
    main()
