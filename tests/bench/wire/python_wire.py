"""Cost of the wire for a model worker in Python, by path; ./dev bench python_wire runs it.

Runs whole steps of 61 layers at DeepSeek-V3's dimensions (128 heads), with one new row for each of
`batch` sequences and one request under way at a time. The server's kernel computes nothing.

Paths: grpc_stream is a bare gRPC stream of the same sizes without server logic. inline, shm and
ring are the client's transports with tensors in ordinary bf16 arrays, which the client copies in
and out. shm_in_place, ring_in_place and ring_spin use tensors in `Client.buffers`; in ring_spin
both sides spin instead of sleeping. ring_float32 uses float32 arrays, so the client also converts
between the formats.

p50_us and p99_us are the time of one `Step.attend`, from the call to its result. token_ms is the
time of a whole step with its begin and end. `x bare` is the ratio to grpc_stream.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import queue
import struct
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, Tuple

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "client/python"))

# pylint: disable=wrong-import-position
import grpc
import mla_client
import numpy as np
from mla_client import Profile

LAYERS = 61
SPEC = mla_client.ModelSpec("v3", mla_client.Geometry(128, 512, 64, 128, 128), LAYERS, 0.1)
SHAPES = [(profile, batch) for profile in (Profile.EXPANDED, Profile.ABSORBED)
          for batch in (1, 32, 128)]
SHARED_BYTES = 128 << 20
LONGEST_SPIN_US = 1_000_000
# Path: transport, spin, where the tensors lie.
PATHS = {
    "inline": ("inline", 0, "arrays"),
    "shm": ("shm", 0, "arrays"),
    "shm_in_place": ("shm", 0, "buffers"),
    "ring": ("ring", 0, "arrays"),
    "ring_in_place": ("ring", 0, "buffers"),
    "ring_spin": ("ring", LONGEST_SPIN_US, "buffers"),
    "ring_float32": ("ring", 0, "float32"),
}
Call = Callable[[int], Any]


class Bare:
    """A gRPC stream. The first eight bytes of each message give the size of the reply."""

    def __init__(self, target: str, sent: int, received: int):
        self._channel = grpc.insecure_channel(target, options=[
            ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)])
        self._outbox: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
        self._replies = self._channel.stream_stream(
            "/bench.Bare/Stream", request_serializer=bytes, response_deserializer=bytes)(
                iter(self._outbox.get, None))
        self._message = struct.pack("<Q", received) + bytes(sent - 8)

    def attend(self, layer: int) -> None:
        """One message each way."""
        self._outbox.put(self._message)
        next(self._replies)

    def close(self) -> None:
        """Ends the stream."""
        self._outbox.put(None)
        self._channel.close()


def plain_buffers(profile: Profile, rows: int) -> mla_client.Buffers:
    """Buffers in ordinary memory, which is not shared."""
    geometry = SPEC.geometry
    heads = geometry.num_heads
    return mla_client.Buffers(
        np.zeros((rows, geometry.row_dim), np.uint16),
        np.zeros((rows, heads, geometry.q_dim(profile)), np.uint16),
        np.zeros((rows, heads, geometry.o_dim(profile)), np.uint16), None, mla_client.DType.BF16)


def caller(client: mla_client.Client, model: mla_client.Model, profile: Profile, rows: int,
           where: str) -> Callable[[mla_client.Step], Call]:
    """Returns a function that attends one layer of a step, with tensors where the path expects
    them."""
    buffers = plain_buffers(profile, rows)
    if where == "buffers":
        buffers = client.buffers(model, rows, profile)
        if buffers.place is None:
            raise RuntimeError("the tensors do not fit into the shared memory")
    q, kv, out = buffers.q, buffers.kv, buffers
    if where == "float32":
        q, kv, out = q.astype(np.float32), kv.astype(np.float32), None
    return lambda step: lambda layer: step.attend(layer, q, kv, profile, out=out)


def run(seconds: float, begin: Callable[[], Any]) -> Tuple[List[float], List[float]]:
    """Runs whole steps for that long. Returns microseconds of the attends and milliseconds of the
    steps."""
    attends, steps = [], []
    end = time.perf_counter() + seconds
    while not steps or time.perf_counter() < end:
        start = time.perf_counter()
        with begin() as attend:
            for layer in range(LAYERS):
                before = time.perf_counter()
                attend(layer)
                attends.append((time.perf_counter() - before) * 1e6)
        steps.append((time.perf_counter() - start) * 1e3)
    return sorted(attends), sorted(steps)


def summary(path: str, profile: Profile, rows: int, attends: List[float],
            steps: List[float]) -> Dict[str, Any]:
    """One row of the report."""
    return {"bench": "python_wire", "path": path, "shape": f"{profile.name}-{rows}",
            "p50_us": round(attends[len(attends) // 2], 1),
            "p99_us": round(attends[len(attends) * 99 // 100], 1),
            "token_ms": round(steps[len(steps) // 2], 3)}


def measure_bare(target: str, profile: Profile, rows: int, seconds: float) -> Dict[str, Any]:
    """The row of bare gRPC."""
    buffers = plain_buffers(profile, rows)
    bare = Bare(target, buffers.q.nbytes + buffers.kv.nbytes, buffers.o.nbytes)
    try:
        def begin() -> Any:
            return contextlib.nullcontext(bare.attend)

        run(0.2 * seconds, begin)
        return summary("grpc_stream", profile, rows, *run(seconds, begin))
    finally:
        bare.close()


def measure(target: str, path: str, profile: Profile, rows: int, seconds: float) -> Dict[str, Any]:
    """The row of one of the client's paths."""
    transport, spin_us, where = PATHS[path]
    with mla_client.Client.connect(target, transport=transport, spin_us=spin_us,
                                   message_bytes=0 if transport != "inline" else 64 << 20,
                                   shared_bytes=SHARED_BYTES) as client:
        # The server has the model from its start and offers no service to register it.
        model = mla_client.Model(client, SPEC, 0)
        sequences = [model.open_sequence() for _ in range(rows)]
        attend = caller(client, model, profile, rows, where)

        @contextlib.contextmanager
        def begin() -> Iterator[Call]:
            with client.step([(sequence, 1) for sequence in sequences]) as step:
                yield attend(step)

        run(0.2 * seconds, begin)
        row = summary(path, profile, rows, *run(seconds, begin))
        client._release([sequence.id for sequence in sequences])
        return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--seconds", type=float, default=0.4, help="for one row")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--paths", default=",".join(PATHS), help="default: %(default)s")
    args = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, grpcio {grpc.__version__}, numpy {np.__version__}")
    print(f"{'path':<15}{'shape':<14}{'p50 us':>10}{'p99 us':>10}{'x bare':>8}{'ms/token':>10}")
    rows = []
    for profile, batch in SHAPES:
        bare = measure_bare(args.target, profile, batch, args.seconds)
        for row in (bare, *(measure(args.target, path, profile, batch, args.seconds)
                            for path in args.paths.split(","))):
            rows.append(row)
            print(f"{row['path']:<15}{row['shape']:<14}{row['p50_us']:>10.1f}"
                  f"{row['p99_us']:>10.1f}{row['p50_us'] / bare['p50_us']:>8.3f}"
                  f"{row['token_ms']:>10.2f}", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
