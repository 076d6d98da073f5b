"""Latency of a light tenant while others flood the server; ./dev bench fairness runs it.

    fairness_benchmark [--json FILE] [--scenes A,B] [--seconds S] [--server PROGRAM] [--check]

Each scene starts its own server on the CPU backend with half of the cores, and a light tenant that
uses gRPC on the loopback interface. The light tenant runs 40 decode steps a second, each of one row
at context 512 and four layers, and renews its leases every tenth step. It is measured alone, and
again for S seconds (default 5) while the flooding tenants of the scene run:

    decode flood     4 tenants x 3 streams x 4 sequences at context 4,096
    prefill flood    4 tenants, chunks of 128 rows at context 8,000
    fp32 against bf16  the light tenant in fp32, 3 tenants with bf16 chunks of 100 rows at 8,000
    bf16 against fp32  the reverse
    slow readers     3 tenants x 2 streams that send 40 layers of 400 rows, in messages of 100
                     rows or 4, and read no answer
    upload flood     2 tenants, 40 uploads each that are begun and send nothing, and one that goes
                     on
    begin flood      2 tenants, 150 steps each that stay open, and forks that are begun, copied
                     and dropped
    prefix flood     2 tenants x 8 hints and opens at a time, each with 163,840 tokens

Each tenant is a process. Each flooding stream has one request under way. Requests cost the server
far more than their sender, so clients take little CPU time; it is printed (`clients`, in cores).

light_p50_us and light_p99_us are the time of one attend of the light tenant, from the call to its
result. light_failures counts its failed attends, begins, ends and renewals. longest_launch_ms is
the longest launch since the server started, from GetStats.

The bound is the promise of fair scheduling: a request waits for at most one running launch. So
p50 <= 2 x alone + one launch, p99 <= 2 x alone + three launches, and nothing fails. The prefix
flood launches nothing, so its bound is p50 <= 2 x alone. `ratio` is light_p50_us over its bound,
and p99_ratio is light_p99_us over its bound. One launch is limits.launch_ms, or 10 ms if the server
does not report it.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client/python"))

# pylint: disable=wrong-import-position
import mla_client

TENANTS = ROOT / "tests/bench/fairness_tenants.py"
SERVER = ROOT / ".bazel/bin/server/mla-server"
DEFAULT_LAUNCH_MS = 10.0
START_S, ANSWER_S = 30.0, 60.0
ALONE_S, SETTLE_S = 2.0, 0.5


@dataclasses.dataclass(frozen=True)
class Scene:
    """The flooding tenants of a scene, and how they flood."""
    name: str
    role: str
    tenants: int
    task: dict
    light: dict = dataclasses.field(default_factory=dict)
    launches: int = 1  # under way, for which a request of the light tenant waits


SCENES = [
    Scene("decode flood", "decode", 4, {"threads": 3, "sequences": 4, "context": 4096}),
    Scene("prefill flood", "prefill", 4, {"rows": 128, "context": 8000}),
    Scene("fp32 against bf16", "prefill", 3, {"rows": 100, "context": 8000}, {"dtype": "F32"}),
    Scene("bf16 against fp32", "prefill", 3, {"rows": 100, "context": 8000, "dtype": "F32"}),
    Scene("slow readers", "slow_reader", 3, {"rows": 400, "threads": 2}),
    Scene("upload flood", "upload", 2, {"threads": 41}),
    Scene("begin flood", "begin", 2, {"held": 150}),
    Scene("prefix flood", "prefix", 2, {"threads": 8, "tokens": 163_840}, launches=0),
]


def bounds(alone_p50_us, alone_p99_us, launch_ms, launches=1):
    """(p50, p99) that fair scheduling promises, in microseconds."""
    return 2 * alone_p50_us + launches * launch_ms * 1e3, 2 * alone_p99_us + 3 * launch_ms * 1e3


def row_of(scene, alone, light, floods, launch_ms, longest_us, seconds, server_cpu_s):
    """The report of a scene from the figures of its tenants."""
    p50_bound, p99_bound = bounds(alone["p50_us"], alone["p99_us"], launch_ms, scene.launches)
    clients_s = light["cpu_s"] + sum(flood["cpu_s"] for flood in floods)
    # A tenant without a measurement counts as the worst result: every request failed or none was
    # answered.
    measured = light["attends"] > 0
    return {
        "bench": "fairness", "scene": scene.name,
        "light_p50_us": round(light["p50_us"], 1), "light_p99_us": round(light["p99_us"], 1),
        "light_alone_p50_us": round(alone["p50_us"], 1),
        "light_alone_p99_us": round(alone["p99_us"], 1),
        "light_begin_p99_us": round(light["begin_p99_us"], 1),
        "light_attends": light["attends"],
        "light_failures": light["failures"], "first_failure": light["first_failure"],
        "longest_launch_ms": round(longest_us / 1e3, 2), "launch_ms": launch_ms,
        "ratio": round(light["p50_us"] / p50_bound, 4) if measured else None,
        "p99_ratio": round(light["p99_us"] / p99_bound, 4) if measured else None,
        "flood_requests": sum(flood["requests"] for flood in floods),
        "flood_refusals": sum(flood["refusals"] for flood in floods),
        "clients_cores": round(clients_s / seconds, 2),
        "server_cores": round(server_cpu_s / seconds, 2),
        "held": bool(measured and light["p50_us"] <= p50_bound and light["p99_us"] <= p99_bound
                     and light["failures"] == 0 and longest_us <= 2e3 * launch_ms),
    }


class Server:
    """A server process on a loopback port of the system's choice."""

    def __init__(self, program, scratch):
        self.log = pathlib.Path(scratch) / "server.log"
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith("MLA_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(program), "--listen=127.0.0.1:0", "--unix-path=", "--ops-listen=",
                 "--backend=cpu", f"--backend-threads={threads}", "--kv-cache-bytes=1GiB",
                 "--log-level=info"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def target(self):
        """Its address, once it serves."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            text = self.log.read_text(errors="replace")
            port = re.search(r'tcp_port="?(\d+)', text)
            if port and "state=serving" in text:
                return f"127.0.0.1:{port[1]}"
            time.sleep(0.02)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text(errors='replace')}")

    def cpu_s(self):
        """CPU time of the process until now, in seconds."""
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")")[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        """Ends the process without waiting for open requests."""
        self.process.kill()
        self.process.wait()


class Tenant:
    """A tenant's process (fairness_tenants.py)."""

    def __init__(self, role, task):
        self.role = role
        self.process = subprocess.Popen([sys.executable, str(TENANTS), role, json.dumps(task)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the tenant {self.role} ended")
        return line.strip()

    def say(self, words):
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def ask(self, words):
        self.say(words)
        return json.loads(self.answer())

    def stop(self):
        self.process.kill()
        self.process.wait()


def launch_ms_of(target):
    """The server's limit on one launch, in milliseconds."""
    with mla_client.Client.connect(target, transport="inline") as client:
        return float(getattr(client.server_info().limits, "launch_ms", 0)) or DEFAULT_LAUNCH_MS


def longest_launch_us(target):
    """Longest of all launches until now. A reply gives the time of a request's launches together,
    so it cannot serve for this."""
    with mla_client.Client.connect(target, transport="inline") as client:
        return client.stats().longest_launch_us


def play(scene, args, scratch):
    """Runs one scene from start to end."""
    server, tenants = Server(args.server, scratch), []
    try:
        target = server.target()
        launch_ms = launch_ms_of(target)
        light = Tenant("light", {"target": target, "tenant": "light", **scene.light})
        tenants.append(light)
        light.answer()
        alone = light.ask(f"measure {min(ALONE_S, args.seconds)}")
        floods = [Tenant(scene.role, {"target": target, "tenant": f"flood{index}", **scene.task})
                  for index in range(scene.tenants)]
        tenants += floods
        for flood in floods:
            flood.answer()
        for flood in floods:
            flood.ask("start")
        time.sleep(SETTLE_S)
        before, cpu_before = time.monotonic(), server.cpu_s()
        figures = light.ask(f"measure {args.seconds}")
        seconds, cpu = time.monotonic() - before, server.cpu_s() - cpu_before
        for flood in floods:
            flood.say("stop")
        results = [json.loads(flood.answer()) for flood in floods]
        return row_of(scene, alone, figures, results, launch_ms, longest_launch_us(target),
                      seconds, cpu)
    finally:
        for tenant in tenants:
            tenant.stop()
        server.stop()


def show(row):
    """One line of the table."""
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    tail = "-" if row["p99_ratio"] is None else f"{row['p99_ratio']:.2f}"
    print(f"{row['scene']:<17}{row['light_alone_p50_us']:>10.0f}{row['light_p50_us']:>10.0f}"
          f"{ratio:>7}{row['light_p99_us']:>11.0f}{tail:>7}{row['light_failures']:>9}"
          f"{row['longest_launch_ms']:>11.1f}{row['clients_cores']:>9.2f}"
          f"{row['server_cores']:>8.2f}  {'held' if row['held'] else 'MISSED'}", flush=True)
    if row["first_failure"]:
        print(f"    first failure: {row['first_failure']}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--scenes", default=",".join(scene.name for scene in SCENES),
                        help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each scene's flood")
    parser.add_argument("--server", type=pathlib.Path, default=SERVER)
    parser.add_argument("--check", action="store_true", help="exit 1 when a bound is missed")
    args = parser.parse_args()
    wanted = args.scenes.split(",")
    unknown = set(wanted) - {scene.name for scene in SCENES}
    if unknown or not 0 < args.seconds <= 10:
        parser.error(f"--scenes: no {', '.join(unknown)}" if unknown
                     else f"--seconds: got {args.seconds}, must be above 0 and at most 10")
    print(f"{'scene':<17}{'alone us':>10}{'p50 us':>10}{'ratio':>7}{'p99 us':>11}{'ratio':>7}"
          f"{'failures':>9}{'launch ms':>11}{'clients':>9}{'server':>8}")
    rows = []
    for scene in SCENES:
        if scene.name in wanted:
            with tempfile.TemporaryDirectory(prefix="mla-fairness-") as scratch:
                rows.append(play(scene, args, scratch))
            show(rows[-1])
    held = sum(row["held"] for row in rows)
    print(f"fairness: {held} of {len(rows)} scenes within their bounds")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if args.check and held < len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
