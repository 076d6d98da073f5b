"""Checks on a real GPU that chained calls give the outputs of awaited ones, and end with a server.

    MLA_CLIENT_LIBRARY=libmla_client.so.0 \\
    python3 tests/integration/device_memory/check_chained_on_gpu.py
        --server .bazel/bin/server/mla-server [--kills 12] [--jobs 1] [--workers]
        [--server-arg=ARG ...]

Outputs of chained passes, in host and in device memory, given call by call and as a graph, are
compared bit by bit with the outputs of calls that a thread awaits. A server cuts requests by the
time that launches took, so the first passes may have other cuts, and a busy GPU others again: next
to other work outputs may differ by a rounding. Then servers are killed at the points of a worker's
pass in turn. Within a second the worker must get an error and its GPU's stream back, and each pass
that succeeded must have the right outputs. Several kills at a time share the GPU in turns, and take
longer. With --workers, workers are killed and stopped at these points while another one's passes
must stay right and quick. Run it without MPS, because under MPS a death ends the others' contexts
too. The last line gives the result.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any, Callable, List

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "client" / "python"))

# pylint: disable=wrong-import-position
import mla_client
import torch
from mla_client import Profile, bf16, errors
from mla_client.pytorch import GraphSender, Sender
from mla_client.testing import ServerProcess

HEADS, LAYERS, ROWS = 128, 8, 300
LONGEST_END_S = 1.0
SETTLED, MOST_SETTLING = 4, 50  # passes with equal outputs, and how often they are waited for
ROUNDING = 2.0 ** -7  # of the largest output
LONGEST_PASS_S = 2.0  # of a worker next to one that was stopped
# Points of a chained pass in the worker's program; its GPU is behind them.
POINTS = ("before", "begun", *[f"layer {layer}" for layer in range(LAYERS)], "ended", "finished")
FAILED: List[str] = []


def expect(holds: bool, what: str) -> None:
    """Records a failure."""
    if not holds:
        FAILED.append(what)
        print(f"FAILED: {what}", flush=True)


@functools.lru_cache(maxsize=1)
def values() -> Any:
    """Weights of a layer, and rows."""
    generator = torch.Generator().manual_seed(1)
    return [bf16.to_bf16((torch.randn(shape, generator=generator) / 23).numpy())
            for shape in ((HEADS, 128, 512), (HEADS, 512, 128), (ROWS, 576))]


class Worker:
    """A client, its model and sequences of some rows."""

    def __init__(self, target: str, batch: int, device: bool) -> None:
        self.client = mla_client.Client.connect(
            target, transport="ring", shared_bytes=64 << 20, pinned=True, timeout_s=20.0,
            device_bytes=64 << 20 if device else 0)
        geometry = mla_client.Geometry(HEADS, 512, 64, 128, 128)
        self.model = self.client.register_model(
            mla_client.ModelSpec("check", geometry, LAYERS, 0.0721687))
        w_uk, w_uv, rows = values()
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

    def a_pass(self, chained: bool, reached: Callable[[str], None] = lambda point: None
               ) -> torch.Tensor:
        """Returns the outputs of all layers and drops the rows. `reached` is told each point."""
        found = torch.zeros((LAYERS, len(self.sequences), HEADS, 128), device="cuda",
                            dtype=torch.bfloat16)
        reached("before")
        step = self.client.step([(sequence, 1) for sequence in self.sequences]).begin(chained)
        reached("begun")
        for layer in range(LAYERS):
            if chained:
                kv = self.kv[layer]
                parts = (kv[:, :512], kv[:, 512:]) if layer % 2 else kv
                if not self.sender.attend_chained(step, layer, self.q[layer], parts, found[layer]):
                    raise SystemExit("calls can not be chained here")
            else:
                found[layer] = self.sender.attend(step, layer, self.q[layer], self.kv[layer])
            reached(f"layer {layer}")
        step.end_ahead([0] * len(self.sequences))
        reached("ended")
        step.finish()
        reached("finished")
        return found

    def settled(self) -> torch.Tensor:
        """The outputs of awaited passes once the server's cuts stay as they are."""
        before = self.a_pass(False)
        for _ in range(MOST_SETTLING):
            for _ in range(SETTLED):
                found = self.a_pass(False)
                if not torch.equal(found, before):
                    break
            else:
                return found
            before = found
        return before

    def close(self) -> None:
        """Ends it."""
        self.sender.release()
        for sequence in self.sequences:
            sequence.release()
        self.client.close()


def graph_has(worker: Worker, wanted: torch.Tensor) -> bool:
    """True if launches of a graph with all layers have these outputs."""
    sender = GraphSender(worker.client, worker.model, len(worker.sequences))
    found = torch.zeros_like(wanted)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            sender.capture(layer, worker.q[layer], worker.kv[layer], found[layer])
    graph.instantiate()
    good = True
    for _ in range(20):
        found.zero_()
        step = worker.client.step([(sequence, 1) for sequence in worker.sequences]).begin(True)
        sender.send(step, graph)
        graph.replay()
        step.end_ahead([0] * len(worker.sequences))
        step.finish()
        good = good and torch.equal(found, wanted)
    sender.release()
    return good


def same_bits(target: str) -> None:
    """Chained, in a graph and awaited, in either memory."""
    for batch in (1, 5, 32):
        for device in (False, True):
            worker = Worker(target, batch, device)
            awaited = worker.settled()
            expect(bool(awaited.isfinite().all()) and bool(awaited.any()), "outputs")
            for turn in range(20):
                chained = worker.a_pass(True)
                expect(torch.equal(chained, awaited),
                       f"batch {batch}, device {device}, turn {turn}: other bits")
            expect(graph_has(worker, awaited), f"batch {batch}, device {device}: other in a graph")
            worker.close()
            print(f"same bits: batch {batch}, {'device' if device else 'host'} memory", flush=True)


def right(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """True if outputs are equal up to the rounding of other cuts. Stale ones are far from that."""
    most = ROUNDING * wanted.float().abs().amax(dim=(1, 2, 3), keepdim=True)
    return bool(((found.float() - wanted.float()).abs() <= most).all())


def a_kill(server: ServerProcess, worker: Worker, number: int) -> float:
    """Seconds from the server's death to the worker's error."""
    worker.a_pass(False)
    wanted = worker.a_pass(False)
    expect(right(worker.a_pass(True), wanted), f"kill {number}: other outputs before it")
    killed: List[float] = []
    point, passes = POINTS[number % len(POINTS)], 2 + number % 3

    def reached(name: str) -> None:
        nonlocal passes
        passes -= name == "before"
        if passes <= 0 and name == point and not killed:
            killed.append(time.monotonic())
            # Without a wait for its end: the driver takes a second for several at a time.
            os.kill(server.pid, signal.SIGKILL)
    try:
        while not killed or time.monotonic() < killed[0] + 5 * LONGEST_END_S:
            found = worker.a_pass(True, reached)
            expect(right(found, wanted), f"kill {number}: a pass with other outputs succeeded")
        expect(False, f"kill {number}: passes go on without a server")
    except errors.MlaError:
        pass
    torch.cuda.synchronize()
    return time.monotonic() - killed[0]


def kills(flags: argparse.Namespace, arguments: List[str]) -> None:
    """Kills number `--first`, `--first` + `--jobs` and so on; all of them by `--jobs` processes."""
    if flags.first is None and flags.jobs > 1:
        command = [sys.executable, __file__, *sys.argv[1:], "--first"]
        shares = [subprocess.Popen([*command, str(place)]) for place in range(flags.jobs)]
        expect(not any([share.wait() for share in shares]), "a share of the kills")
        return
    begin = time.monotonic()
    times: List[float] = []
    with concurrent.futures.ThreadPoolExecutor(1) as starting:
        def launched() -> concurrent.futures.Future[ServerProcess]:
            return starting.submit(ServerProcess(flags.server, arguments).start)
        coming = launched()
        for number in range(flags.first or 0, flags.kills, flags.jobs):
            if time.monotonic() - begin > flags.seconds:
                break
            server = coming.result()
            worker = Worker(server.target, (1, 4, 32)[number // 2 % 3], number % 2 == 1)
            times.append(a_kill(server, worker, number))
            coming = launched()  # while this one is cleared away
            worker.sender.forget()
            worker.client.close()
            server.stop()
        coming.result().stop()
    if times:
        slow = [f"{one:.2f}" for one in times if one > LONGEST_END_S]
        print(f"{len(times)} kills, seconds to the error: " +
              " ".join(f"{one:.2f}" for one in times), flush=True)
        expect(not slow, f"{len(slow)} workers ended later than {LONGEST_END_S:.0f} s after their "
                         f"servers: {' '.join(slow)}")


def dying(target: str, point: str) -> None:
    """A worker that stays at a point of its third pass."""
    torch.zeros(1, device="cuda")
    worker = Worker(target, 4, POINTS.index(point) % 2 == 1)
    for _ in range(2):
        worker.a_pass(True)
    print("ready", flush=True)
    sys.stdin.readline()

    def reached(name: str) -> None:
        if name == point:
            print("there", flush=True)
            signal.pause()
    worker.a_pass(True, reached)


def workers_end(target: str) -> None:
    """Another worker's passes next to workers that are killed or stopped."""
    others = [(point, number, subprocess.Popen(
        [sys.executable, __file__, "--server", "-", "--dies-at", point, "--target", target],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
              for number in (signal.SIGKILL, signal.SIGSTOP) for point in POINTS]
    worker = Worker(target, 4, True)
    wanted = worker.settled()
    longest = 0.0
    for point, number, process in others:
        assert process.stdin and process.stdout
        what = f"a worker with signal {int(number)} at {point!r}"
        expect(process.stdout.readline().strip() == "ready", f"{what}: it is not ready")
        process.stdin.write("go\n")
        process.stdin.flush()
        expect(process.stdout.readline().strip() == "there", f"{what}: it is not there")
        process.send_signal(number)
        for _ in range(5):
            begin = time.monotonic()
            found = worker.a_pass(True)
            torch.cuda.synchronize()
            longest = max(longest, time.monotonic() - begin)
            expect(right(found, wanted), f"{what}: another worker's outputs")
    for _, _, process in others:
        process.kill()
        process.wait()
    worker.close()
    print(f"{len(others)} workers killed or stopped: another one's longest pass took "
          f"{longest * 1e3:.1f} ms", flush=True)
    expect(longest <= LONGEST_PASS_S, "another worker waited")


def main() -> int:
    """The checks."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--server-arg", action="append", default=[])
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=1, help="kills at a time")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no kill begins later")
    parser.add_argument("--workers", action="store_true", help="kill and stop workers, too")
    parser.add_argument("--first", type=int, help="be one of the jobs")
    parser.add_argument("--dies-at", choices=POINTS, help="be one of the workers")
    parser.add_argument("--target", help="of a worker")
    flags = parser.parse_args()
    if flags.dies_at:
        dying(flags.target, flags.dies_at)
        return 0
    arguments = ["--backend=cuda", "--kv-cache-bytes=2GiB", "--limits-weights-bytes=2GiB",
                 "--shm-device-bytes=2GiB", "--shm-total-bytes=4GiB", "--tenants-region-bytes=6GiB",
                 "--shm-tenant-regions=40", "--log-level=warning", *flags.server_arg]
    if flags.first is None:
        with ServerProcess(flags.server, arguments) as server:
            same_bits(server.target)
            if flags.workers:
                workers_end(server.target)
    kills(flags, arguments)
    if flags.first is None:
        print("FAILED" if FAILED else "all is well", flush=True)
    return bool(FAILED)


if __name__ == "__main__":
    sys.exit(main())
