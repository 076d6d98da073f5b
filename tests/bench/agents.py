"""Measures what the prefix cache saves agents; ./dev bench agents runs it.

    agents_benchmark [--json FILE] [--plot FILE] [--context ROWS] [--server PROGRAM]
                     [--mlactl PROGRAM] [--target TARGET]

Starts a server on the CPU backend, or takes the one at TARGET, and runs both scenes of
`mlactl bench --scene` (client/mlactl/agents/README.md) with a model of 4 heads and 4 layers:

    agent-turn   a turn of ROWS rows (16,384), 96 % of them cached and none of them, in turn
    agents       8 conversations of 43 turns up to 4,096 rows, with branches, 2 workers

speedup: time to the first output without the cache over that with it, medians of one run.
Exit 1 when it is below 8, when a turn of agent-turn found other rows than it should, or when
agents found less than 80 % of their rows.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVER = ROOT / ".bazel/bin/server/mla-server"
MLACTL = ROOT / ".bazel/bin/client/mlactl/mlactl"
LEAST_SPEEDUP, LEAST_HITS = 8.0, 0.8
SHARE = 0.96
BLOCK_ROWS = 64
START_S = 60
MODEL = ["--heads=4", "--layers=4"]
AGENTS = ["--context=4096", "--concurrency=2", "--branching=0.5"]


def start(program, folder):
    """A server on a unix socket in the folder, and its target."""
    target = f"unix:{folder}/mla.sock"
    log = open(f"{folder}/log", "wb")  # pylint: disable=consider-using-with
    server = subprocess.Popen(  # pylint: disable=consider-using-with
        [program, "--listen=127.0.0.1:0", f"--unix-path={folder}/mla.sock", "--ops-listen=",
         "--backend=cpu", "--kv-cache-bytes=1GiB"], stdout=log, stderr=log)
    return server, target


def await_health(args, target):
    """Returns once it takes new work."""
    deadline = time.monotonic() + START_S
    while subprocess.run([args.mlactl, f"--target={target}", "health"], check=False,
                         capture_output=True).returncode != 0:
        if time.monotonic() > deadline:
            raise RuntimeError("the server did not start")
        time.sleep(0.1)


def scene(args, target, name, options, folder):
    """The report of a scene."""
    path = f"{folder}/{name}.json"
    command = [args.mlactl, f"--target={target}", "bench", f"--scene={name}", "--quiet", *MODEL,
               *options, "--json", path]
    if args.plot and name == "agents":
        command.append(f"--plot={args.plot}")
    subprocess.run(command, check=True)
    return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))


def faults(turn, agents, context):
    """The faults of a run: a figure out of its bounds, or wrong rows."""
    found = []
    if turn["speedup"] < LEAST_SPEEDUP:
        found.append(f"speedup {turn['speedup']:.2f}, at least {LEAST_SPEEDUP}")
    # The first turn caches the rows; each second turn then finds them.
    cached = -(-int(context * SHARE) // BLOCK_ROWS) * BLOCK_ROWS
    want = [0] + [cached if number % 2 else 0 for number in range(len(turn["turns"]) - 1)]
    got = [one["found_rows"] for one in turn["turns"]]
    if got != want:
        found.append(f"rows found {got}, should be {want}")
    if agents["hit_rate"] < LEAST_HITS:
        found.append(f"hit rate {agents['hit_rate']:.3f}, at least {LEAST_HITS}")
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--server", default=str(SERVER))
    parser.add_argument("--mlactl", default=str(MLACTL))
    parser.add_argument("--target")
    args = parser.parse_args()
    server = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            target = args.target
            if target is None:
                server, target = start(args.server, folder)
            await_health(args, target)
            turn = scene(args, target, "agent-turn", [f"--context={args.context}"], folder)
            agents = scene(args, target, "agents", AGENTS, folder)
        finally:
            if server is not None:
                server.kill()
                server.wait()
    rows = [{"bench": "agents", "shape": report["scene"], **{
        key: value for key, value in report.items() if key != "turns"}}
            for report in (turn, agents)]
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    found = faults(turn, agents, args.context)
    for fault in found:
        print(f"agents: {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
