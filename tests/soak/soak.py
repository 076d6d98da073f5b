"""Ten workers of four tenants against one server, with every verb and every fault.

    ./dev soak [--minutes M] [--seed N]

The server has a pool of 64 MiB with a host tier, a file tier and checkpoints on disk, and computes
on the CPU. Workers (worker.py) use gRPC, shared memory and the ring. They compare each output and
each row with an oracle in float64, and log each operation. At random this program kills and stops
workers, changes bounds of tenants, evicts sequences, and kills the server, which then starts again.

Ends with status 1 at the first wrong answer, when a process ends by itself, or when a verb never
succeeded. The logs stay in the folder that is printed.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import mla_client
from mla_client import testing

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TENANTS = ("red", "green", "blue", "grey")
TRANSPORTS = ("inline", "shm", "ring")
WORKERS = 10
POOL_BYTES = 64 << 20
FAULT_PAUSE_S = (0.5, 4.0)  # pause between faults
STOP_S = (0.2, 6.0)         # time for which a worker is stopped: up to one and a half leases
SERVER_KILL_PERCENT = 3     # share of all faults
BEGIN_S = 600.0             # time for workers to begin
FINISH_S = 300.0            # time for workers to compare their rows; they hang if it is over
# A server that starts or drains on a busy machine takes longer than users would wait.
testing.START_TIMEOUT_S = testing.STOP_TIMEOUT_S = FINISH_S
# After the run, each of these has succeeded at least once.
VERBS = ("step", "open_sequence", "fork", "truncate", "match", "release", "copy_rows", "save",
         "restore", "hint", "check_rows")


class Soak:
    """Owns the server and the workers."""

    def __init__(self, folder, seed, server, workers=WORKERS):
        self._folder = folder
        self._places = workers
        self._random = random.Random(seed)
        self._next_seed = seed * 1000
        self._workers = {}  # place: (process, log)
        self._retired = []  # logs of workers that this program has killed
        self._stopped = {}  # place: time at which it continues
        self._plant = False
        self._serving = False
        self.faults = {}
        (folder / "checkpoints").mkdir()
        self._server = testing.ServerProcess(server, [
            f"--kv-cache-bytes={POOL_BYTES}", "--backend=cpu", "--log-level=warning",
            "--tiers-host-bytes=16MiB", f"--tiers-file-path={folder}/tier",
            "--tiers-file-bytes=64MiB", f"--checkpoint-path={folder}/checkpoints",
            "--checkpoint-bytes=1GiB", "--limits-max-models=64"])

    def start(self, plant=False):
        """Starts everything. If `plant` is true, the first worker sometimes sends a wrong row."""
        self._plant = plant
        self._server.start()
        self._serving = True
        for place in range(self._places):
            self._start_worker(place)

    def _start_worker(self, place):
        self._next_seed += 1
        log = self._folder / f"worker_{place}_{self._next_seed}.jsonl"
        arguments = [sys.executable, str(HERE / "worker.py"), "--target", self._server.target,
                     "--tenant", TENANTS[place % len(TENANTS)],
                     "--transport", TRANSPORTS[place % len(TRANSPORTS)],
                     "--seed", str(self._next_seed), "--log", str(log)]
        if self._plant and place == 0:
            arguments.append("--plant")
        environment = dict(os.environ, PYTHONPATH=str(ROOT / "client" / "python"),
                           OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
        self._workers[place] = (subprocess.Popen(arguments, env=environment), log)

    def run(self, seconds):
        """Injects random faults for this time, once every worker has begun a step. Returns the
        error, or ""."""
        last = time.monotonic() + BEGIN_S
        while not all(self._has_begun(log) for _, log in self._workers.values()):
            time.sleep(0.1)
            ended = self._ended()
            if ended or time.monotonic() > last:
                return ended or f"workers did not begin within {BEGIN_S:.0f} s"
        end = time.monotonic() + seconds
        next_fault = time.monotonic() + self._random.uniform(*FAULT_PAUSE_S)
        while time.monotonic() < end:
            time.sleep(0.1)
            self._continue_stopped(time.monotonic())
            ended = self._ended()
            if ended:
                return ended
            if time.monotonic() >= next_fault:
                self._fault()
                next_fault = time.monotonic() + self._random.uniform(*FAULT_PAUSE_S)
        return ""

    @staticmethod
    def _has_begun(log):
        return log.exists() and '"op": "step"' in log.read_text(encoding="ascii")

    def _ended(self):
        for place, (process, log) in self._workers.items():
            if process.poll() is not None:
                return f"worker {place} ended with status {process.returncode}: {log}"
        if not pathlib.Path(f"/proc/{self._server.pid}").exists():
            return "the server ended: " + self._server.log()[-2000:]
        return ""

    def _continue_stopped(self, now):
        for place, until in list(self._stopped.items()):
            if now >= until:
                self._workers[place][0].send_signal(signal.SIGCONT)
                del self._stopped[place]

    def _fault(self):
        if self._random.uniform(0, 100) < SERVER_KILL_PERCENT:
            name = "server_kill"
            self._server.kill()
            self._server.start()
        else:
            fault = self._random.choice((self._kill, self._stop, self._change_bounds, self._evict))
            name = fault.__name__.strip("_")
            fault()
        self.faults[name] = self.faults.get(name, 0) + 1

    def _kill(self):
        place = self._random.randrange(1 if self._plant else 0, self._places)
        process, log = self._workers[place]
        process.kill()
        process.wait()
        self._stopped.pop(place, None)
        self._retired.append(log)
        self._start_worker(place)

    def _stop(self):
        place = self._random.randrange(self._places)
        if place not in self._stopped:
            self._workers[place][0].send_signal(signal.SIGSTOP)
            self._stopped[place] = time.monotonic() + self._random.uniform(*STOP_S)

    def _operator(self):
        return mla_client.Client.connect(self._server.target, timeout_s=10.0, transport="inline",
                                         shared_bytes=0)

    def _change_bounds(self):
        tenant = self._random.choice(TENANTS)
        with self._operator() as operator:
            operator.set_quota(tenant, {"kv_bytes": self._random.choice((4, 16, 64)) << 20,
                                        "sequences": self._random.choice((4, 16, 64))},
                               weight=self._random.choice((1, 4)))

    def _evict(self):
        with self._operator() as operator:
            operator.evict_sequences(self._random.choice(TENANTS), everything=True)

    def finish(self):
        """Lets the workers compare their rows, and stops everything. Returns (error, counts of
        operations)."""
        self._continue_stopped(float("inf"))
        failed = ""
        with self._operator() as operator:  # an export counts as a sequence
            for tenant in TENANTS:
                operator.set_quota(tenant, {}, reset=True)
        for process, _ in self._workers.values():
            process.terminate()
        for place, (process, log) in self._workers.items():
            try:
                if process.wait(FINISH_S) != 0 and log.exists():
                    failed = failed or f"worker {place}: status {process.returncode}: {log}"
            except subprocess.TimeoutExpired:
                failed = failed or f"worker {place} did not end: {log}"
                process.kill()
        status = self._server.stop()
        self._serving = False
        if status != 0:
            failed = failed or f"the server ended with status {status}"
        return failed, self._counts()

    def _counts(self):
        counts = {}
        for log in (log for _, log in self._workers.values() if log.exists()):
            for line in log.read_text(encoding="ascii").splitlines():
                entry = json.loads(line)
                for name, count in entry.get("counts", {}).items():
                    counts[name] = counts.get(name, 0) + count
        return counts

    def kill_all(self):
        """Ends every process that still runs: workers, and the server after a failure."""
        for process, _ in self._workers.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        if self._serving:
            self._server.kill()


def soak(seconds, seed, server, plant=False, workers=WORKERS):
    """Runs a soak; returns (error or "", counts, faults, folder)."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mla-soak-"))
    run = Soak(folder, seed, server, workers)
    try:
        run.start(plant)
        failed = run.run(seconds)
        ended, counts = ("", {}) if failed else run.finish()
        return failed or ended, counts, run.faults, folder
    finally:
        run.kill_all()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default=str(ROOT / ".bazel/bin/server/mla-server"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    # SIGTERM ends the processes of the soak, too; by default it would end this program alone.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    failed, counts, faults, folder = soak(arguments.minutes * 60, arguments.seed, arguments.server)
    for name, count in sorted({**counts, **faults}.items()):
        print(f"{count:8d} {name}")
    missing = [verb for verb in VERBS if not counts.get(verb)]
    if not failed and missing:
        failed = "never tried with success: " + ", ".join(missing)
    print(f"soak: {failed or 'no wrong answer'}; logs in {folder}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
