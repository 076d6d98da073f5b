#!/usr/bin/env python3
"""Times cpu_decode and cpu_prefill and other libraries' MLA attention in turns, on this machine.

    time_peers.py --out FILE --ours FOLDER --peer "NAME=COMMAND" [--peer ...]
                  [--threads 1,2] [--rounds 3] [--repeats 5] [--shapes SHAPE,SHAPE]
                  [--seconds 600]

FOLDER has cpu_decode_benchmark and cpu_prefill_benchmark. COMMAND is ggml_times, as
build_ggml_times.sh makes it, with its --path, --kv and --rope-first. In a round each shape is timed
on each number of threads by ours and, straight after, by each peer, so that what changes on the
machine changes for all of them. No turn begins after --seconds.

FILE gets a row {"peer", "shape", "threads", "us", "round"} a line; "ours" is a peer, too. The table
is of medians over rounds: our time, each peer's, the best peer's divided by ours, and the least and
greatest of that quotient in single rounds.
"""

import argparse
import itertools
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

SHAPES = [
    "heads=128 q=1 ctx=1024", "heads=128 q=1 ctx=4096", "heads=128 q=1 ctx=16384",
    "heads=128 q=1 batch=16 ctx=4096", "heads=16 q=1 ctx=1024", "heads=16 q=1 ctx=4096",
    "heads=16 q=1 ctx=16384", "heads=16 q=1 batch=16 ctx=4096",
    "heads=16 q=512 kv=4096 with up-projection",
]
OURS = "ours"
WHOLE = " with up-projection"  # the row of a prefill that is a whole launch


def time_ours(folder: pathlib.Path, shape: str, threads: int, repeats: int) -> float:
    name = "cpu_prefill_benchmark" if shape.endswith(WHOLE) else "cpu_decode_benchmark"
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([folder / name, f"--json={file.name}", f"--threads={threads}",
                        f"--repeats={repeats}", f"--only={shape.removesuffix(WHOLE)}"],
                       check=True, stdout=subprocess.DEVNULL)
        rows = json.loads(pathlib.Path(file.name).read_text())
    # --only takes every shape whose name contains the text.
    return next(row["us"] for row in rows if row["shape"] == shape)


def time_peer(name: str, command: str, shape: str, threads: int) -> float:
    result = subprocess.run(
        [*shlex.split(command), f"--peer={name}", f"--threads={threads}", f"--only={shape}"],
        check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(result.stdout)["us"])


Times = dict[tuple[str, int, str], list[float]]


def print_table(times: Times, peers: list[str]) -> None:
    print("| shape | threads | ours, us | " + " | ".join(peers) + " | best / ours | rounds |")
    print("|---" * (len(peers) + 5) + "|")
    for shape, count, name in times:
        if name != OURS:
            continue
        ours = times[shape, count, OURS]
        medians = {peer: statistics.median(times[shape, count, peer]) for peer in peers}
        best = min(medians, key=lambda peer: medians[peer])
        ratio = medians[best] / statistics.median(ours)
        rounds = [peer / own for peer, own in zip(times[shape, count, best], ours)]
        cells = [shape, str(count), f"{statistics.median(ours):.0f}",
                 *(f"{medians[peer]:.0f}" for peer in peers), f"{ratio:.2f}",
                 f"{min(rounds):.2f} to {max(rounds):.2f}"]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--ours", type=pathlib.Path, required=True)
    parser.add_argument("--peer", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    flags = parser.parse_args()
    peers = dict(peer.split("=", 1) for peer in flags.peer)
    shapes = flags.shapes.split(",")
    threads = [int(count) for count in flags.threads.split(",")]
    times: Times = {}
    end = time.monotonic() + flags.seconds
    with flags.out.open("a") as out:
        for turn, shape, count in itertools.product(range(flags.rounds), shapes, threads):
            if time.monotonic() > end:
                print(f"time is up in round {turn + 1}", file=sys.stderr)
                break
            for name in [OURS, *peers]:
                us = (time_ours(flags.ours, shape, count, flags.repeats) if name == OURS
                      else time_peer(name, peers[name], shape, count))
                times.setdefault((shape, count, name), []).append(us)
                out.write(json.dumps({"peer": name, "shape": shape, "threads": count,
                                      "us": round(us, 1), "round": turn}) + "\n")
            out.flush()
    print_table(times, list(peers))


if __name__ == "__main__":
    main()
