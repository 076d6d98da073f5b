"""Time that attention on a server adds to a pass of an engine. The layers of a model run eagerly in
PyTorch, one token at a time, and are compared with the same layers around an attention call that
only returns its output buffer.

    MLA_CLIENT_LIBRARY=libmla_client.so.0 python3 tests/bench/engine/engine_pass.py
        --server .bazel/bin/server/mla-server [--server-arg=ARG ...] [--layers 61] [--batch 1,32]
        [--context 1024] [--ways host,device,host-chained,device-chained,device-graph] [--turns 7]
        [--bare] [--json FILE] [--profile FOLDER]

Each way is a transport of tensors, with calls that a thread awaits at each layer, with chained
calls, or with chained calls in a CUDA graph of the whole pass, which is compared with such a graph
without attention. `us_a_layer` is the added time of one layer: the median over turns, which
alternate with turns without attention. `pass_ms` is one pass with its sampling (argmax, copied to
the host). `thread_us` is the time of the worker's thread in a call. The program fails if two ways
give different tokens. With --profile it writes one pass of each way as a trace, which
pass_picture.py draws.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Optional

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "client" / "python"))

# pylint: disable=wrong-import-position
import mla_client
import torch
from mla_client import Profile, bf16
from mla_client.pytorch import GraphSender, Sender
from mla_client.testing import ServerProcess

HEADS, NOPE, ROPE, LORA, V, HIDDEN = 128, 128, 64, 512, 128, 2048
WAYS = ("host", "device", "host-chained", "device-chained", "host-graph", "device-graph")
PASSES = 10  # in a turn
PREFILL_ROWS = 2048
CLIENT = "engine-pass"
PROFILED: List[str] = []  # what is, just now
NOTHING: Any = contextlib.nullcontext()


class Model:
    """Layers of random weights: projections before and after attention, and a norm."""

    def __init__(self, layers: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(3)

        def made(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            return values / shape[-1] ** 0.5
        self.layers = layers
        self.q, self.kv = made(HEADS * (NOPE + ROPE), HIDDEN), made(LORA + ROPE, HIDDEN)
        self.o, self.up = made(HIDDEN, HEADS * V), made(HIDDEN, HIDDEN)
        self.head, self.embedding = made(1024, HIDDEN), made(1024, HIDDEN) * HIDDEN ** 0.5
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def run(self, tokens: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Returns the next tokens."""
        x = self.embedding[tokens]
        for layer in range(self.layers):
            h = torch.nn.functional.rms_norm(x, (HIDDEN,), self.norm)
            q = torch.nn.functional.linear(h, self.q).view(-1, HEADS, NOPE + ROPE)
            kv = torch.nn.functional.linear(h, self.kv)
            o = attend(layer, q, kv)
            x = x + torch.nn.functional.linear(o.reshape(len(x), -1), self.o)
            h = torch.nn.functional.rms_norm(x, (HIDDEN,), self.norm)
            x = x + torch.nn.functional.silu(torch.nn.functional.linear(h, self.up))
        return torch.nn.functional.linear(x, self.head).argmax(-1)


class Bare:
    """Attention alone, on the same tensors each time."""

    def __init__(self, model: Model, batch: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(4)
        self.layers = model.layers
        self.q, self.kv = (torch.randn((batch, *rest), generator=generator, device="cuda",
                                       dtype=torch.bfloat16)
                           for rest in ((HEADS, NOPE + ROPE), (LORA + ROPE,)))

    def run(self, _: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Some of the last outputs."""
        for layer in range(self.layers):
            found = attend(layer, self.q, self.kv)
        return found[:, 0, 0]


class Owner:
    """A client that registers the model, and fills the sequences that all ways use."""

    def __init__(self, target: str, layers: int, batch: int, context: int) -> None:
        self.client = mla_client.Client.connect(target, client_id=CLIENT, shared_bytes=64 << 20)
        geometry = mla_client.Geometry(HEADS, LORA, ROPE, NOPE, V)
        self.spec = mla_client.ModelSpec("pass", geometry, layers, (NOPE + ROPE) ** -0.5)
        self.model = self.client.register_model(self.spec)
        generator = torch.Generator().manual_seed(1)

        def made(*shape: int) -> Any:
            return bf16.to_bf16((torch.randn(shape, generator=generator) / 23).numpy())
        w_uk, w_uv = made(HEADS, NOPE, LORA), made(HEADS, LORA, V)
        rows = bf16.to_bf16(torch.randn((batch, context, LORA + ROPE),
                                        generator=generator).numpy())
        for layer in range(layers):
            self.model.upload_weights(layer, w_uk, w_uv)
        self.sequences = [self.model.open_sequence() for _ in range(batch)]
        for sequence, own in zip(self.sequences, rows):
            for begin in range(0, context, PREFILL_ROWS):
                part = own[begin:begin + PREFILL_ROWS]
                with self.client.step([(sequence, len(part))]) as step:
                    for layer in range(layers):
                        step.attend(layer, None, part, Profile.APPEND_ONLY)

    def close(self) -> None:
        """Gives everything back."""
        for sequence in self.sequences:
            sequence.release()
        self.client.close()


class Worker:
    """A client of one way."""

    def __init__(self, target: str, way: str, owner: Owner, batch: int) -> None:
        memory, _, chained = way.partition("-")
        arguments: Dict[str, Any] = {"device_bytes": 256 << 20} if memory == "device" else {}
        if chained:
            arguments["pinned"] = True
        self.client = mla_client.Client.connect(target, client_id=CLIENT, transport="ring",
                                                shared_bytes=256 << 20, **arguments)
        self.chained, self.graph = bool(chained), chained == "graph"
        self.model = self.client.register_model(owner.spec)
        self.sequences = [self.model.adopt_sequence(one.id) for one in owner.sequences[:batch]]
        self.sender = Sender()
        self.captured: Any = None  # sender, graph, tokens and what it finds
        self.spent: List[float] = []  # seconds of each call in the calling thread
        self.output = torch.empty((0, HEADS, V), device="cuda", dtype=torch.bfloat16)
        self.step: Any = None  # that has not been finished

    def a_pass(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Runs one pass. Its rows are committed and dropped again, so all passes are alike."""
        self.settle()
        step = self.client.step([(sequence, 1) for sequence in self.sequences])
        step.begin(ahead=self.chained)
        found = self.launched(step, model, tokens) if self.graph else self.eager(
            step, model, tokens)
        if self.chained:
            step.end_ahead([0] * len(self.sequences))
            self.step = step
        else:
            step.end([0] * len(self.sequences))
        return found

    def settle(self) -> None:
        """Learns whether the pass before was good, as an engine does once it has its tokens."""
        step, self.step = self.step, None
        if step is not None:
            step.finish()

    def eager(self, step: Any, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        """A pass whose layers are given to the stream one by one."""
        def attend(layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            begin = time.perf_counter()
            with torch.profiler.record_function("attention") if PROFILED else NOTHING:
                found = one(layer, q, kv)
            self.spent.append(time.perf_counter() - begin)
            return found

        def one(layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            if not self.chained:
                return self.sender.attend(step, layer, q, kv)
            # Engines also keep an output tensor for each of their shapes.
            if len(self.output) != len(q):
                self.output = q.new_empty((len(q), HEADS, V))
            if not self.sender.attend_chained(step, layer, q, kv, self.output):
                raise SystemExit("calls can not be chained here")
            return self.output
        return model.run(tokens, attend)

    def launched(self, step: Any, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        """A pass that is one launch of a graph."""
        if self.captured is None:
            sender = GraphSender(self.client, self.model, len(self.sequences))
            output = torch.empty((len(self.sequences), HEADS, V), device="cuda",
                                 dtype=torch.bfloat16)

            def attend(layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
                sender.capture(layer, q, kv, output)
                return output
            self.captured = sender, *captured(model, tokens, attend)
        sender, graph, own, found = self.captured
        begin = time.perf_counter()
        sender.send(step, graph)
        self.spent.append((time.perf_counter() - begin) / model.layers)
        own.copy_(tokens)
        graph.replay()
        return found

    def close(self) -> None:
        """Ends it."""
        self.settle()
        if self.captured is not None:
            self.captured[0].release()
        self.sender.release()
        for sequence in self.sequences:
            sequence.hand_over()
        self.client.close()


def captured(model: Any, tokens: torch.Tensor, attend: Callable[..., torch.Tensor]) -> Any:
    """A graph of a pass, its tokens, and what it finds. Libraries have their memory already."""
    graph, own = torch.cuda.CUDAGraph(keep_graph=True), tokens.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = model.run(own, attend)
    graph.instantiate()
    return graph, own, found


def timed(run: Callable[[], torch.Tensor]) -> float:
    """Milliseconds of a pass."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(PASSES):
        run().cpu()
    return (time.perf_counter() - begin) / PASSES * 1e3


def profile(folder: Optional[str], name: str, run: Callable[[], torch.Tensor]) -> None:
    """Writes a trace of one pass."""
    if folder is None:
        return
    PROFILED.append(name)
    run().cpu()
    with torch.profiler.profile() as seen:
        run().cpu()
    PROFILED.clear()
    seen.export_chrome_trace(os.path.join(folder, f"{name}.json"))


def main() -> None:
    """One server for all."""
    arguments = argparse.ArgumentParser(description=__doc__,
                                        formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--server", required=True)
    arguments.add_argument("--server-arg", action="append", default=[])
    arguments.add_argument("--layers", type=int, default=61)
    arguments.add_argument("--batch", default="1,32")
    arguments.add_argument("--context", type=int, default=1024)
    arguments.add_argument("--ways", default=",".join(WAYS))
    arguments.add_argument("--turns", type=int, default=7)
    arguments.add_argument("--bare", action="store_true", help="attention alone")
    arguments.add_argument("--json")
    arguments.add_argument("--profile")
    flags = arguments.parse_args()
    whole = Model(flags.layers)
    found: List[Dict[str, Any]] = []
    with ServerProcess(flags.server, ["--backend=cuda", "--kv-cache-bytes=8GiB",
                                      "--limits-weights-bytes=8GiB",
                                      "--shm-device-bytes=1GiB", "--shm-total-bytes=4GiB",
                                      "--shm-region-bytes=512MiB", "--tenants-region-bytes=3GiB",
                                      "--log-level=warning",
                                      *flags.server_arg]).start() as server:
        batches = [int(number) for number in flags.batch.split(",")]
        owner = Owner(server.target, flags.layers, max(batches), flags.context)
        for batch in batches:
            tokens = torch.arange(batch, device="cuda") % 1024
            zeros = torch.zeros((batch, HEADS, V), device="cuda", dtype=torch.bfloat16)
            model: Any = Bare(whole, batch) if flags.bare else whole
            eager: Callable[[], torch.Tensor] = lambda: model.run(tokens, lambda *_: zeros)
            eager()
            graph, _, of_zeros = captured(model, tokens, lambda *_: zeros)

            def launched() -> torch.Tensor:
                graph.replay()
                return of_zeros
            results = {}
            for way in flags.ways.split(","):
                worker = Worker(server.target, way, owner, batch)
                run: Callable[[], torch.Tensor] = lambda: worker.a_pass(model, tokens)
                without = launched if worker.graph else eager
                run(), without()
                pairs = [(timed(run), timed(without)) for _ in range(flags.turns)]
                results[way] = run().cpu().clone()  # the server's cuts have settled
                profile(flags.profile, f"{way}_{batch}", run)
                worker.close()
                passes = statistics.median(one for one, _ in pairs)
                added = statistics.median(one - other for one, other in pairs)
                row = {"way": way, "batch": batch, "context": flags.context,
                       "layers": flags.layers, "pass_ms": round(passes, 2),
                       "zeros_ms": round(statistics.median(other for _, other in pairs), 2),
                       "us_a_layer": round(added / flags.layers * 1e3, 1),
                       "thread_us": round(statistics.median(worker.spent) * 1e6, 1)}
                found.append(row)
                print(json.dumps(row), flush=True)
            first = next(iter(results.values()))
            for way, tokens_of in results.items():
                if not torch.equal(tokens_of, first):
                    raise SystemExit(f"{way}: other tokens than {next(iter(results))}")
        owner.close()
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
