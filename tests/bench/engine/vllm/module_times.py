"""What an engine's thread does longer in a pass with attention on a server: vLLM's own modules,
the call to the server, or the rest of the pass.

    MLA_CLIENT_LIBRARY=libmla_ring.so python3 tests/bench/engine/vllm/module_times.py
        --server mla-server [--layers 20] [--batch 1,32] [--memory device] [--context 1024]
        [--turns 7] [--pin] [--json FILE] [--logs FOLDER]

One engine takes passes with attention and passes without it ("zeros") in turn. A row for each part:
microseconds a layer in passes of either kind, without the parts in it, and how many more they are
with attention. The modules of a layer have their own names ("q_b_proj"), "attend" is the adapter's
call without that of the C library in it, "library" is that one, "rest" is what is outside of the
model: its figures are of a layer, too, so that the sum of the differences is what a layer adds. The
last line of a batch has the call's share of a watched pass, too, which stays as it is when the
processor's speed is another one.

--pin: a second round in which the engine's thread has a core to itself, and all other threads of
the engine and of the server have the others. Cores that share a core's units are left free. If a
layer adds less then, threads had been in one another's way.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
from typing import Any, Dict, List, Set

from engines import EngineProcess, arguments_of, server_of, started

PASSES = 6     # in a row
BURSTS = 2     # of passes of a kind in a turn
WARM_UPS = 8
MODES = ("zeros", "server")


def numbers(text: str) -> List[int]:
    """Numbers with commas between them."""
    return [int(one) for one in text.split(",")]


def siblings(core: int) -> Set[int]:
    """The processors that share a core with one, itself among them."""
    path = pathlib.Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return {core}
    found: Set[int] = set()
    for part in text.split(","):
        ends = numbers(part.replace("-", ","))
        found.update(range(ends[0], ends[-1] + 1))
    return found


def place(engine: int, server: int, pinned: bool) -> None:
    """Gives the first thread of the process `engine` a core of its own, and all other threads of
    both processes the other cores; not `pinned`: each thread has all of them."""
    processors = os.sched_getaffinity(0)
    own = siblings(max(processors)) & processors if pinned else set()
    if pinned:
        print(f"processors {sorted(processors)}; the engine's thread has the core of {sorted(own)}",
              flush=True)
    for process in (engine, server):
        for thread in map(int, os.listdir(f"/proc/{process}/task")):
            try:
                os.sched_setaffinity(thread, {max(own)} if own and thread == engine
                                     else processors - own)
            except ProcessLookupError:
                pass  # it has ended


def measure(engine: EngineProcess, flags: argparse.Namespace, batch: int, pinned: bool
            ) -> List[Dict[str, Any]]:
    """The rows of one batch."""
    found: Dict[str, Dict[str, List[float]]] = {mode: {} for mode in MODES}
    passes: Dict[str, List[float]] = {mode: [] for mode in MODES}
    for _ in range(flags.turns * BURSTS):
        for mode in MODES:
            passes[mode] += engine.ask(passes=PASSES, mode=mode)["ms"]
            for name, us in engine.ask(passes=PASSES, mode=mode, modules=True)["us"].items():
                found[mode].setdefault(name, []).append(us / flags.layers)
    middle = {mode: {name: statistics.median(us) for name, us in found[mode].items()}
              for mode in MODES}
    differences = {name: us - middle["zeros"].get(name, 0.0)
                   for name, us in middle["server"].items()}
    like = {"batch": batch, "memory": flags.memory, "layers": flags.layers, "pinned": pinned}
    rows = [{**like, "part": name, "server_us": round(middle["server"][name], 1),
             "more_us": round(more, 1)}
            for name, more in sorted(differences.items(), key=lambda one: -one[1])]
    rows.append({**like, "part": "all", "server_us": round(sum(middle["server"].values()), 1),
                 "more_us": round(sum(differences.values()), 1),
                 **{f"{mode}_pass_ms": round(statistics.median(passes[mode]), 3)
                    for mode in MODES}})
    for row in rows:
        print(json.dumps(row), flush=True)
    call = differences.get("attend", 0.0) + differences.get("library", 0.0)
    plain = [statistics.median(passes[mode]) * 1e3 for mode in MODES]
    print(f"batch {batch}, {flags.memory} memory{', pinned' if pinned else ''}: a layer adds "
          f"{(plain[1] - plain[0]) / flags.layers:.1f} us of a pass of {plain[1] / 1e3:.2f} ms, "
          f"{differences.get('attend', 0.0):.1f} us of them in Python's call and "
          f"{differences.get('library', 0.0):.1f} in the library's; watched "
          f"{sum(differences.values()):.1f}, of which the call is "
          f"{100 * call / sum(middle['server'].values()):.1f} % of a pass", flush=True)
    return rows


def main() -> int:
    """Starts everything."""
    parser = arguments_of(__doc__)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--memory", default="device")
    parser.add_argument("--pin", action="store_true")
    flags = parser.parse_args()
    rows: List[Dict[str, Any]] = []
    with server_of(flags) as server:
        engine = EngineProcess(flags.memory, flags.layers, server.target, flags.memory, flags.logs)
        try:
            started([engine])
            for batch in numbers(flags.batch):
                engine.ask(requests=batch, rows=flags.context)
                for pinned in (False, True) if flags.pin else (False,):
                    place(engine.pid, server.pid, pinned)
                    engine.ask(passes=WARM_UPS, mode="server")
                    rows += measure(engine, flags, batch, pinned)
        finally:
            engine.close()
            print(server.log()[-2000:], file=sys.stderr)
    if flags.json:
        flags.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
