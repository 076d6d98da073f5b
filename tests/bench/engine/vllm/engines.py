"""The benchmarks' side of engine.py: engines as processes, and the server that they share."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import select
import subprocess
import sys
import time
from typing import IO, Any, Dict, Iterable, List, Optional

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[3]
sys.path.insert(0, str(ROOT / "client" / "python"))

# pylint: disable=wrong-import-position
from mla_client.testing import ServerProcess

MEMORIES = {"device": 256 << 20, "host": 0}  # bytes of tensors in the server's GPU memory
SHARED_BYTES = 256 << 20
ANSWER_S = 400.0
# Rows and weights of six engines of up to 61 layers with 32 requests each, and their regions.
SERVER = ("--backend=cuda", "--kv-cache-bytes=40GiB", "--limits-weights-bytes=8GiB",
          "--limits-max-models=16",
          "--shm-device-bytes=4GiB", "--shm-total-bytes=12GiB", "--shm-region-bytes=1GiB",
          "--tenants-region-bytes=12GiB", "--shm-tenant-regions=40", "--log-level=warning")


class EngineProcess:
    """An engine that starts while the caller goes on. Belongs to one thread."""

    def __init__(self, name: str, layers: int, target: str, memory: str,
                 log: Optional[pathlib.Path], gpu: int = 0, graphs: bool = False) -> None:
        """`memory`: of MEMORIES. `gpu`: of the engine. `graphs`: the work between two layers'
        attention is a graph."""
        self.name = name
        extra = {"target": target, "model_id": name, "shared_bytes": SHARED_BYTES,
                 "device_bytes": MEMORIES[memory]}
        options = {"layers": layers, "extra": extra, "graphs": graphs}
        # All GPUs stay visible, because the server's memory may be another one's.
        order = ",".join(map(str, [gpu, *[other for other in gpus() if other != gpu]]))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": order, "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "client" / "python"), os.environ.get("PYTHONPATH", "")]),
                       "VLLM_USE_BREAKABLE_CUDAGRAPH": str(int(graphs))}
        self._log: Optional[IO[bytes]] = None
        if log is not None:
            self._log = open(log / f"{name}.log", "wb")  # pylint: disable=consider-using-with
        self._process = subprocess.Popen(  # pylint: disable=consider-using-with
            [sys.executable, str(HERE / "engine.py"), json.dumps(options)], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log)
        self.pid = self._process.pid
        self._waits = True  # for the answer to a command, or to the start

    def tell(self, **command: Any) -> None:
        """Sends a command, whose answer `read` returns."""
        assert self._process.stdin is not None and not self._waits
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        self._waits = True

    def read(self) -> Dict[str, Any]:
        """The next answer. RuntimeError if the engine has ended, or stays away."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError(f"engine {self.name} has not answered; its log says why")
        self._waits = False
        found: Dict[str, Any] = json.loads(line)
        return found

    def ask(self, **command: Any) -> Dict[str, Any]:
        """Sends a command and returns its answer."""
        self.tell(**command)
        return self.read()

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._log is not None:
            self._log.close()


def gpus() -> List[int]:
    """Numbers of the GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if named:
        return [int(number) for number in named.split(",")]
    listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, check=True, text=True)
    return list(range(len(listed.stdout.splitlines())))


def ask_all(engines: Iterable[EngineProcess], **command: Any) -> List[Dict[str, Any]]:
    """The answers of engines that do the same at the same time."""
    told = list(engines)
    for engine in told:
        engine.tell(**command)
    return [engine.read() for engine in told]


def arguments_of(description: Optional[str]) -> argparse.ArgumentParser:
    """The arguments that both benchmarks have."""
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--server-arg", action="append", default=[])
    parser.add_argument("--server-gpu", type=int, default=0)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--logs", type=pathlib.Path, help="a folder for the engines' logs")
    parser.add_argument("--json", type=pathlib.Path)
    return parser


def server_of(flags: argparse.Namespace) -> ServerProcess:
    """The server of a benchmark."""
    return ServerProcess(flags.server, [*SERVER, f"--gpu-device={flags.server_gpu}",
                                        *flags.server_arg])


def started(engines: List[EngineProcess]) -> None:
    """Returns once all have started."""
    begin = time.monotonic()
    for engine in engines:
        engine.read()
    print(f"{len(engines)} engines started in {time.monotonic() - begin:.0f} s", flush=True)
