"""Whether chained passes on a real GPU are those of awaited calls, and end with their server.

    MLA_CLIENT_LIBRARY=libmla_client.so.0 python3 PATH/check_chained_on_gpu.py
        --server .bazel/bin/server/mla-server [--kills 12] [--server-arg=ARG ...]

Outputs of chained passes, in host and in device memory, are compared bit by bit with those of calls
that a thread awaits. Then servers are killed while a worker's passes are under way: the worker must
have an error, and its GPU's stream back, within a second; no pass that succeeded may have other
outputs. Without MPS: there the death of a server takes the worker's context along. The last line
says how it went.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import threading
import time
from typing import Any, List

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "client" / "python"))

# pylint: disable=wrong-import-position
import mla_client
import torch
from mla_client import Profile, bf16, errors
from mla_client.pytorch import Sender
from mla_client.testing import ServerProcess

HEADS, LAYERS, ROWS = 128, 8, 300
LONGEST_END_S = 1.0
FAILED: List[str] = []


def expect(holds: bool, what: str) -> None:
    """Notes what does not hold."""
    if not holds:
        FAILED.append(what)
        print(f"FAILED: {what}", flush=True)


class Worker:
    """A client, its model and sequences of some rows."""

    def __init__(self, target: str, batch: int, device: bool) -> None:
        self.client = mla_client.Client.connect(
            target, transport="ring", shared_bytes=64 << 20, pinned=True, timeout_s=20.0,
            device_bytes=64 << 20 if device else 0)
        geometry = mla_client.Geometry(HEADS, 512, 64, 128, 128)
        self.model = self.client.register_model(
            mla_client.ModelSpec("check", geometry, LAYERS, 0.0721687))
        generator = torch.Generator().manual_seed(1)

        def made(*shape: int) -> Any:
            return bf16.to_bf16((torch.randn(shape, generator=generator) / 23).numpy())
        w_uk, w_uv = made(HEADS, 128, 512), made(HEADS, 512, 128)
        rows = made(ROWS, 576)
        for layer in range(LAYERS):
            self.model.upload_weights(layer, w_uk, w_uv)
        self.sequences = [self.model.open_sequence() for _ in range(batch)]
        for sequence in self.sequences:
            with self.client.step([(sequence, ROWS)]) as step:
                for layer in range(LAYERS):
                    step.attend(layer, None, rows, Profile.APPEND_ONLY)
        on_gpu = torch.Generator(device="cuda").manual_seed(2)
        self.q, self.kv = (torch.randn(shape, generator=on_gpu, device="cuda").to(torch.bfloat16)
                           for shape in ((LAYERS, batch, HEADS, 192), (LAYERS, batch, 576)))
        self.sender = Sender()

    def a_pass(self, chained: bool) -> torch.Tensor:
        """The outputs of all layers; its rows are dropped."""
        found = torch.zeros((LAYERS, len(self.sequences), HEADS, 128), device="cuda",
                            dtype=torch.bfloat16)
        step = self.client.step([(sequence, 1) for sequence in self.sequences]).begin()
        for layer in range(LAYERS):
            if chained:
                kv = self.kv[layer]
                parts = (kv[:, :512], kv[:, 512:]) if layer % 2 else kv
                if not self.sender.attend_chained(step, layer, self.q[layer], parts, found[layer]):
                    raise SystemExit("calls can not be chained here")
            else:
                found[layer] = self.sender.attend(step, layer, self.q[layer], self.kv[layer])
        step.end([0] * len(self.sequences))
        return found

    def close(self) -> None:
        """Ends it."""
        self.sender.release()
        for sequence in self.sequences:
            sequence.release()
        self.client.close()


def same_bits(target: str) -> None:
    """Chained and awaited, in either memory."""
    for batch in (1, 5, 32):
        for device in (False, True):
            worker = Worker(target, batch, device)
            awaited = worker.a_pass(False)
            expect(bool(awaited.isfinite().all()) and bool(awaited.any()), "outputs")
            for turn in range(20):
                chained = worker.a_pass(True)
                expect(torch.equal(chained, awaited),
                       f"batch {batch}, device {device}, turn {turn}: other bits")
            worker.close()
            print(f"same bits: batch {batch}, {'device' if device else 'host'} memory", flush=True)


def a_kill(binary: str, arguments: List[str], number: int) -> float:
    """Seconds from the server's death to the worker's error."""
    server = ServerProcess(binary, arguments).start()
    worker = Worker(server.target, 4, number % 2 == 1)
    wanted = worker.a_pass(False)
    killed: List[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        server.kill()
    timer = threading.Timer(0.05 + 0.013 * number, kill)
    timer.start()
    try:
        while True:
            found = worker.a_pass(True)
            expect(torch.equal(found, wanted), f"kill {number}: a pass with other bits succeeded")
    except errors.MlaError:
        torch.cuda.synchronize()
        ended = time.monotonic()
    timer.join()
    worker.sender.forget()
    worker.client.close()
    server.stop()
    return ended - killed[0]


def main() -> int:
    """The checks."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--server-arg", action="append", default=[])
    parser.add_argument("--kills", type=int, default=12)
    flags = parser.parse_args()
    arguments = ["--backend=cuda", "--kv-cache-bytes=2GiB", "--limits-weights-bytes=2GiB",
                 "--shm-device-bytes=512MiB", "--shm-total-bytes=2GiB", "--log-level=warning",
                 *flags.server_arg]
    with ServerProcess(flags.server, arguments) as server:
        same_bits(server.target)
    times = [a_kill(flags.server, arguments, number) for number in range(flags.kills)]
    if times:
        print("seconds from a kill to the error: " + " ".join(f"{one:.2f}" for one in times))
        expect(max(times) <= LONGEST_END_S, f"a worker ended {max(times):.2f} s after its server")
    print("FAILED" if FAILED else "all is well", flush=True)
    return bool(FAILED)


if __name__ == "__main__":
    sys.exit(main())
