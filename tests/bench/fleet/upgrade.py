"""A rolling upgrade of a fleet, with one eighth of its memory free, under load.

    upgrade_benchmark [--json FILE] [--servers N] [--workers N] [--sequences 14|28]
                      [--server PROGRAM] [--new PROGRAM]

N servers (8) on the CPU backend with mutual TLS, etcd, and an announcer next to each. Each server
has N sequences (28), which take seven eighths of its memory. Workers, which are processes of their
own, take steps on eight sequences at a time; upgrade_worker.py looks at the outputs. One server
after the other hands its sequences over to the others by the fleet's drain, ends, and another
process (PROGRAM of --new, if given) takes its place.

Prints sequences that were lost, rows that were computed again, and the stall of a moved sequence:
the time of the call that found it moved. Goals: 0, 0, and p99 <= 2 s + the bytes of a sequence /
the rate of the drains. Exits 1 for a sequence that was lost, a row that was computed again, or a
wrong output.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

from processes import HERE, ROOT, SERVER, Fleet, quantile

# pylint: disable=wrong-import-position
import peers
import upgrade_worker
from mla_client import Client, Tls
from mla_client.cluster.operations.drain import drain

FULL = 7                 # eighths of a server's memory that its sequences take
# By the number of a server's sequences, so many more take the room that slabs leave over.
SPARE = {14: 2, 28: 1}
MOST_GOAL_S = 2.0
END_S = 300.0


def flags_of(authority, each):
    """A server's: its sequences take FULL eighths of its memory, which is one tenant's."""
    files = authority.files("server")
    pool = f"{upgrade_worker.bytes_of_sequence() * (each * 8 // FULL + SPARE[each])}"
    return lambda number: [
        f"--tls-cert={files['cert']}", f"--tls-key={files['key']}", f"--client-ca={files['ca']}",
        "--server-operators=blue,localhost", "--backend-threads=1", f"--kv-cache-bytes={pool}",
        f"--tenants-kv-bytes={pool}", f"--tenants-kv-slab-bytes={pool}"]


class Workers:
    """Processes that take steps until they are told to end."""

    def __init__(self, fleet, authority, count, each):
        """`count` workers, with `each` sequences of a server together."""
        files = authority.files("red")
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "client/python")}
        self.processes = [subprocess.Popen(  # pylint: disable=consider-using-with
            [sys.executable, str(HERE / "upgrade_worker.py"), fleet.etcd.target, files["ca"],
             files["cert"], files["key"], str(number), str(each // count)],
            env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE) for number in range(count)]
        for one in self.processes:
            if one.stdout.readline() != "begun\n":
                raise RuntimeError("a worker did not begin")

    def finish(self):
        """The figures of each."""
        figures = []
        for one in self.processes:
            out, _ = one.communicate("end\n", timeout=END_S)
            if one.returncode != 0:
                raise RuntimeError("a worker failed")
            figures.append(json.loads(out.splitlines()[-1]))
        return figures

    def close(self):
        for one in self.processes:
            if one.poll() is None:
                one.kill()
                one.wait()


def upgrade(fleet, member, files, program):
    """As an operator does it; returns sequences that moved, and seconds of the drain."""
    registry = fleet.etcd.registry()
    said = []
    began = time.monotonic()
    left = drain(registry, lambda address: Client.connect(
        address, tls=Tls(**files), timeout_s=120.0, transport="inline"), member.address,
                 say=said.append)
    seconds = time.monotonic() - began
    registry.close()
    if left:
        print(f"{member.address}: {left} sequences are left: {said}", flush=True)
    moved = sum(int(line.split(": ")[1].split()[0]) for line in said if "have moved" in line)
    member.replace(program)
    fleet.wait()
    return moved, seconds


def report(args, figures, moved, seconds):
    """Prints the figures; returns the JSON row, and whether all is well."""
    total = {name: sum(one[name] for one in figures)
             for name in ("lost", "rows_again", "wrong", "steps", "moves", "outputs")}
    stalls = [stall for one in figures for stall in one["stalls"]]
    rate = moved * upgrade_worker.bytes_of_sequence() / seconds
    bound = MOST_GOAL_S + upgrade_worker.bytes_of_sequence() / rate
    p50, p99 = quantile(stalls, 0.5), quantile(stalls, 0.99)
    print(f"{args.servers} servers, {args.sequences} sequences of {upgrade_worker.ROWS} rows each "
          f"({upgrade_worker.bytes_of_sequence() / 1e6:.2f} MB), {args.workers} workers: "
          f"{total['lost']} sequences lost, {total['rows_again']} rows computed again, "
          f"{total['wrong']} of {total['outputs']} outputs wrong, {total['steps']} steps")
    print(f"{moved} sequences moved by drains of {seconds:.1f} s together, {rate / 1e6:.0f} MB/s; "
          f"stall of a moved sequence: p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, longest "
          f"{max(stalls) * 1e3:.0f} ms ({len(stalls)} seen); goal {bound * 1e3:.0f} ms: "
          f"{'met' if p99 <= bound else 'missed'}")
    row = {"bench": "upgrade", "shape": f"{args.servers} servers",
           "moved": moved,
           **{name: total[name] for name in ("lost", "rows_again", "wrong", "outputs")},
           "stall_p50_ms": p50 * 1e3, "stall_p99_ms": p99 * 1e3, "gb_per_s": rate / 1e9}
    return row, total["lost"] + total["rows_again"] + total["wrong"] == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=28, choices=SPARE, help="of a server")
    parser.add_argument("--server", default=str(SERVER))
    parser.add_argument("--new", default="")
    args = parser.parse_args()
    if args.workers < 1 or args.sequences % args.workers:
        parser.error(f"--workers: got {args.workers}, must divide {args.sequences}")
    authority = peers.Authority()
    moved, seconds, workers = 0, 0.0, None
    try:
        for name in ("red", "blue"):
            authority.make(name)
        with Fleet(args.server, args.servers, flags_of(authority, args.sequences),
                   host="localhost") as fleet:
            try:
                workers = Workers(fleet, authority, args.workers, args.sequences)
                for member in fleet.members:
                    some, took = upgrade(fleet, member, authority.files("blue"),
                                         args.new or args.server)
                    moved, seconds = moved + some, seconds + took
                figures = workers.finish()
            finally:
                if workers is not None:
                    workers.close()
    finally:
        authority.close()
    row, well = report(args, figures, moved, seconds)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps([row], indent=1) + "\n", encoding="utf-8")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
