"""Checks on a real GPU that attention gives equal outputs for tensors in device and host memory.

    python3 tests/integration/device_memory/check_on_gpu.py --server .bazel/bin/server/mla-server
        [--device 0] [--server-arg=ARG ...]

Starts a server and workers, which are processes that use PyTorch. Outputs must be equal with either
memory, up to a rounding where the host's queries are streamed, also when the worker's kernels are
late, and where the calls lie in a CUDA graph (with MLA_CLIENT_LIBRARY). If the kernels never end,
the answer must still come in time. Workers are killed or stopped at 12 points while another one
continues, and their device memory must return. The last line gives the result.

Under MPS (CUDA_MPS_PIPE_DIRECTORY) no worker is killed while its kernels run, because this would
end the contexts of all MPS clients, including the server's.
"""

from __future__ import annotations

import argparse
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any, List

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "client" / "python"))

# pylint: disable=wrong-import-position
import mla_client
import numpy as np
import torch
from mla_client import DType, Profile
from mla_client.pytorch import GraphSender
from mla_client.testing import ServerProcess

HEADS, LAYERS, SCALE = 16, 2, 0.0721687
REGION_MIB, DEVICE_MIB = 64, 64
STREAMED_BYTES = 2 << 20  # of queries
ROUNDING = 2.0 ** -7      # of the largest output, where cuts differ
WAIT_MS = 1000  # how long the server waits for a worker's GPU
POINTS = ("connected", "mapped", "opened", "begun", "written", "gpu_hangs", "published", "answered",
          "second_layer", "before_end", "after_end", "closed")
STARTED = time.monotonic()
FAILED: List[str] = []


def say(text: str) -> None:
    """A line of progress."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


def expect(holds: bool, what: str) -> None:
    """Records a failure."""
    if not holds:
        FAILED.append(what)
        say(f"FAILED: {what}")


def connect(target: str, device: int) -> mla_client.Client:
    """A client with device memory."""
    return mla_client.Client.connect(target, shared_bytes=REGION_MIB << 20,
                                     device_bytes=DEVICE_MIB << 20, device=device,
                                     transport="ring")


def spec(name: str) -> mla_client.ModelSpec:
    """A model with dimensions that GPU kernels support."""
    geometry = mla_client.Geometry(num_heads=HEADS, kv_lora_rank=512, rope_dim=64, nope_dim=128,
                                   v_dim=128)
    return mla_client.ModelSpec(name, geometry, layers=LAYERS, softmax_scale=SCALE)


def register(client: mla_client.Client, name: str) -> Any:
    """A model with weights."""
    model = client.register_model(spec(name))
    rng = np.random.default_rng(1)
    for layer in range(LAYERS):
        model.upload_weights(layer, rng.standard_normal((HEADS, 128, 512)) / 23,
                             rng.standard_normal((HEADS, 512, 128)) / 23)
    return model


class Values:
    """The tensors of a step, bf16 on the GPU."""

    def __init__(self, rows: int, profile: Profile, device: int, seed: int) -> None:
        generator = torch.Generator(device=f"cuda:{device}").manual_seed(seed)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=f"cuda:{device}",
                               dtype=torch.float32).to(torch.bfloat16)
        q_dim = 576 if profile == Profile.ABSORBED else 192
        self.q = [made(rows, HEADS, q_dim) for _ in range(LAYERS)]
        self.kv = [made(rows, 576) for _ in range(LAYERS)]


def bits(tensor: torch.Tensor) -> np.ndarray:
    """bf16 in the form that the host's clients take."""
    return tensor.cpu().view(torch.uint16).numpy()


def host_step(client: Any, model: Any, rows: Any, profile: Profile,
              values: Values) -> List[np.ndarray]:
    """Outputs of a step whose tensors lie in the ring's own region, which is large enough that
    calls are not split."""
    outputs = []
    with client.buffers(model, sum(n for _, n in rows), profile, o_dtype=DType.BF16) as buffers, \
            client.step(rows) as step:
        for layer in range(LAYERS):
            buffers.q[:] = bits(values.q[layer])
            buffers.kv[:] = bits(values.kv[layer])
            step.attend(layer, buffers.q, buffers.kv, profile, out=buffers)
            outputs.append(as_floats(np.array(buffers.o)))
    return outputs


def device_step(client: Any, model: Any, rows: Any, profile: Profile, values: Values,
                late_cycles: int = 0) -> List[np.ndarray]:
    """Outputs of the same step from device memory, with kernels that may be late."""
    count = sum(n for _, n in rows)
    outputs = []
    with client.buffers(model, count, profile, device="cuda") as buffers:
        q, kv, o = (torch.from_dlpack(t) for t in (buffers.q, buffers.kv, buffers.o))
        buffers.stream = torch.cuda.current_stream().cuda_stream
        with client.step(rows) as step:
            for layer in range(LAYERS):
                q.fill_(float("nan"))
                kv.fill_(float("nan"))
                if late_cycles:
                    torch.cuda._sleep(late_cycles)  # pylint: disable=protected-access
                q.copy_(values.q[layer])
                kv.copy_(values.kv[layer])
                step.attend(layer, buffers.q, buffers.kv, profile, out=buffers)
                outputs.append(o.clone())  # on the stream, without waiting for it
    return [as_floats(bits(output)) for output in outputs]


def as_floats(patterns: np.ndarray) -> np.ndarray:
    """bf16 patterns as float32."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def check_results(client: Any, model: Any, device: int) -> None:
    """Decode, several sequences and prompts, in both profiles."""
    for profile in (Profile.ABSORBED, Profile.EXPANDED):
        for batch, rows in ((1, 1), (1, 7), (8, 1), (32, 1), (1, 200)):
            pairs = [[client_sequence(model) for _ in range(batch)] for _ in range(2)]
            worst = 0.0
            for turn in range(3):  # with the rows that the earlier steps have left
                values = Values(batch * rows, profile, device, 100 * batch + turn)
                host = host_step(client, model, [(s, rows) for s in pairs[0]], profile, values)
                found = device_step(client, model, [(s, rows) for s in pairs[1]], profile, values,
                                    late_cycles=30_000_000 if turn == 2 else 0)
                for expected, got in zip(host, found):
                    difference = np.abs(expected.reshape(-1) - got.reshape(-1)).max()
                    worst = max(worst, float("inf") if np.isnan(got).any() else float(difference))
            say(f"{profile.name} batch {batch}, {rows} rows: greatest difference {worst:g}")
            # Queries in host memory come piece by piece, if there are many, and their plan has
            # other cuts.
            streamed = values.q[0].nbytes >= STREAMED_BYTES
            most = max(float(np.abs(one).max()) for one in host) * ROUNDING if streamed else 0.0
            expect(worst <= most, f"{profile.name} {batch} x {rows}")
            for sequence in pairs[0] + pairs[1]:
                sequence.release()


def client_sequence(model: Any) -> Any:
    """A new sequence."""
    return model.open_sequence()


def check_graph(client: Any, model: Any, device: int) -> None:
    """A graph with the calls of all layers, launched again and again."""
    if not client._own_stream().chains:  # pylint: disable=protected-access
        say("graphs: not tried, since MLA_CLIENT_LIBRARY names no library")
        return
    for batch in (1, 5, 32):
        pairs = [[client_sequence(model) for _ in range(batch)] for _ in range(2)]
        sender = GraphSender(client, model, batch)
        own = Values(batch, Profile.EXPANDED, device, 1)
        outputs = [torch.zeros((batch, HEADS, 128), device=f"cuda:{device}", dtype=torch.bfloat16)
                   for _ in range(LAYERS)]
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for layer in range(LAYERS):
                sender.capture(layer, own.q[layer] * 1, own.kv[layer] * 1, outputs[layer])
        graph.instantiate()
        worst = 0.0
        for turn in range(100):
            values = Values(batch, Profile.EXPANDED, device, 7000 + turn)
            host = host_step(client, model, [(s, 1) for s in pairs[0]], Profile.EXPANDED, values)
            for mine, given in zip(own.q + own.kv, values.q + values.kv):
                mine.copy_(given)
            step = client.step([(s, 1) for s in pairs[1]]).begin(ahead=True)
            sender.send(step, graph)
            graph.replay()
            step.end_ahead()
            found = [bits(output) for output in outputs]
            step.finish()
            for expected, got in zip(host, found):
                difference = np.abs(expected.reshape(-1) - as_floats(got).reshape(-1)).max()
                worst = max(worst, float("inf") if np.isnan(difference) else float(difference))
        say(f"a graph of {LAYERS} layers, batch {batch}, 100 launches: greatest difference "
            f"{worst:g}")
        expect(worst == 0.0, f"graph of batch {batch}")
        sender.release()
        for sequence in pairs[0] + pairs[1]:
            sequence.release()


def check_late(client: Any, model: Any, device: int) -> None:
    """If a worker's GPU work does not end, only the worker's own request fails."""
    values = Values(1, Profile.ABSORBED, device, 5)
    started = time.monotonic()
    reason = "none"
    try:
        with model.open_sequence() as sequence:
            device_step(client, model, [(sequence, 1)], Profile.ABSORBED, values,
                        late_cycles=6_000_000_000)
    except mla_client.errors.MlaError as error:
        reason = f"{type(error).__name__} {error.detail.reason if error.detail else ''}"
    took = time.monotonic() - started
    say(f"a kernel of seconds before a request: {reason} after {took:.2f} s")
    expect("device_not_ready" in reason and took < 5, "late kernels")
    torch.cuda.synchronize()


def worker(target: str, device: int, point: str) -> None:
    """Runs up to `point` and stays there."""
    def reached(name: str) -> None:
        if name == point:
            print(f"at {point}", flush=True)
            while True:
                signal.pause()
    torch.cuda.set_device(device)
    values = Values(1, Profile.ABSORBED, device, 7)
    torch.cuda.synchronize()
    sys.stdin.readline()  # until it is this worker's turn
    client = connect(target, device)
    reached("connected")
    model = client.register_model(spec("dying"))
    buffers = client.buffers(model, 1, Profile.ABSORBED, device="cuda")
    q, kv = torch.from_dlpack(buffers.q), torch.from_dlpack(buffers.kv)
    buffers.stream = torch.cuda.current_stream().cuda_stream
    reached("mapped")
    sequence = model.open_sequence()
    reached("opened")
    step = client.step([(sequence, 1)]).begin()
    reached("begun")
    for layer in range(LAYERS):
        if point == "gpu_hangs":
            torch.cuda._sleep(200_000_000_000)  # pylint: disable=protected-access
        q.copy_(values.q[layer])
        kv.copy_(values.kv[layer])
        reached("written")
        future = step.attend_async(layer, buffers.q, buffers.kv, Profile.ABSORBED, out=buffers)
        reached("gpu_hangs")
        reached("published" if layer == 0 else "second_layer")
        future.result()
        reached("answered")
    reached("before_end")
    step.end()
    reached("after_end")
    client.close()
    reached("closed")


class Dying:
    """Workers that are ended at a point, while another one continues."""

    def __init__(self, server: ServerProcess, client: Any, model: Any, device: int) -> None:
        self.target, self.client, self.model, self.device = server.target, client, model, device
        self.sequence = model.open_sequence()
        self.turn = 0

    def start(self, point: str) -> subprocess.Popen:
        """Starts a worker that will run to `point`. Starting takes seconds, so many start at once.
        """
        return subprocess.Popen([sys.executable, __file__, "--worker", point, "--target",
                                 self.target, "--device", str(self.device)],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @staticmethod
    def go(process: subprocess.Popen, point: str) -> None:
        """Returns when the worker has reached its point."""
        assert process.stdin and process.stdout
        process.stdin.write("go\n")
        process.stdin.flush()
        line = process.stdout.readline()
        expect(line.strip() == f"at {point}", f"worker at {point}: {line!r}")

    def serves(self, what: str) -> None:
        """The other worker's step is right and does not wait."""
        started = time.monotonic()
        self.turn += 1
        values = Values(1, Profile.ABSORBED, self.device, 1000 + self.turn)
        with self.model.open_sequence() as alone:
            host = host_step(self.client, self.model, [(alone, 1)], Profile.ABSORBED, values)
        with self.model.open_sequence() as alone:
            found = device_step(self.client, self.model, [(alone, 1)], Profile.ABSORBED, values)
        same = all(np.array_equal(a.reshape(b.shape), b) for a, b in zip(host, found))
        took = time.monotonic() - started
        expect(same, f"{what}: another worker's results")
        expect(took < 2, f"{what}: another worker waited {took:.2f} s")

    def memory_returns(self) -> bool:
        """Checks that a client can get the device memory of the dead one. The server has memory for
        two clients at a time."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with connect(self.target, self.device) as client:
                model = client.register_model(spec("dying"))
                try:
                    client.buffers(model, 1, Profile.ABSORBED, device="cuda").release()
                    return True
                except mla_client.errors.MlaError:
                    time.sleep(0.05)
        return False

    def run(self, points: List[str]) -> None:
        """Kills workers at each point, then stops workers at each."""
        if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
            points = [point for point in points if point != "gpu_hangs"]
        for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            started = [(point, self.start(point)) for point in points]
            for point, process in started:
                what = f"{name} at {point}"
                self.go(process, point)
                self.serves(what)
                process.send_signal(number)
                self.serves(what)
                if number == signal.SIGSTOP:
                    time.sleep(1.3 * WAIT_MS / 1000)
                    self.serves(what)
                    process.kill()
                process.wait()
                expect(self.memory_returns(), f"{what}: memory returns")
                self.serves(f"{what}, afterwards")
                say(f"{what}: done")


def run(args: argparse.Namespace) -> None:
    """All checks on one server."""
    torch.cuda.set_device(args.device)
    torch.zeros(1, device=f"cuda:{args.device}")
    arguments = ["--backend=cuda", "--kv-cache-bytes=1GiB", "--shm-spin-us=200",
                 "--shm-total-bytes=1GiB", f"--shm-device-bytes={2 * DEVICE_MIB}MiB",
                 f"--shm-device-wait-ms={WAIT_MS}",
                 *args.server_arg]
    with ServerProcess(args.server, arguments) as server:
        try:
            with connect(server.target, args.device) as client:
                backend = client.server_info().backend
                say(f"backend {backend.name} on {backend.device}, transport {client.transport}")
                model = register(client, "checked")
                check_results(client, model, args.device)
                check_graph(client, model, args.device)
                check_late(client, model, args.device)
                Dying(server, client, model, args.device).run(args.points)
        finally:
            lines = [line for line in server.log().splitlines() if '"info"' not in line]
            say("the server's log ends:\n" + "\n".join(lines[-args.log_lines:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="path of the mla-server binary")
    parser.add_argument("--server-arg", action="append", default=[],
                        help="passed on to the server; may be repeated")
    parser.add_argument("--device", type=int, default=0, help="the workers' GPU")
    parser.add_argument("--points", nargs="*", default=list(POINTS), choices=POINTS)
    parser.add_argument("--log-lines", type=int, default=8, help="of the server's log, at the end")
    parser.add_argument("--worker", choices=POINTS, help="be one of the workers")
    parser.add_argument("--target", help="of a worker")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if args.worker:
        worker(args.target, args.device, args.worker)
        return 0
    if not args.server:
        parser.error("--server is missing")
    try:
        run(args)
    except Exception as error:  # pylint: disable=broad-except
        expect(False, f"{type(error).__name__}: {error}")
    say("check: " + (f"FAILED: {'; '.join(FAILED)}" if FAILED else "ok"))
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
