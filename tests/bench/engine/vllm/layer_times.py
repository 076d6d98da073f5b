"""Time that attention on a server adds to a layer of vLLM, by engines of different depths.

    MLA_CLIENT_LIBRARY=libmla_ring.so python3 tests/bench/engine/vllm/layer_times.py
        --server mla-server [--layers 4,20,61] [--batch 1,32] [--memory device,host]
        [--context 1024] [--turns 7] [--bursts 5] [--seconds 300] [--server-gpu 0] [--json FILE]
        [--logs FOLDER] [--graphs]

For each number of layers and each place of tensors there is an engine, which takes a few passes
with attention and a few without ("zeros") in turn. A host's processor may change its speed for
seconds at a time, and cores differ: both kinds of passes are in one process, those without
attention come before and after those with attention, and the difference is to their mean. A
turn's figure is the median of its differences.

    us_a_layer   [(more layers) - (fewest layers)] / (difference of layers), the median of the turns
    added_ms     what attention adds to a pass in all, the connector's part included
    thread_us    the worker's thread in a call of attention
    connector_us the thread in the plan, begin and end of a pass, and in the replies to them;
                 "waits" for these are a part of "lost" and not of the sum

Each turn has a line of its own before them, with what it added. The last lines give the medians
for each batch and memory as text.

--graphs: engines are not eager, the work between two layers' attention is a CUDA graph.

Under MPS worker and server run at the same time on one GPU. --server-gpu 1: the server has a GPU of
its own. --seconds: no turn of a batch begins later.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any, Dict, Iterator, List, Tuple

from engines import MEMORIES, EngineProcess, arguments_of, ask_all, server_of, started

PASSES = 4             # in a row
WARM_UPS = 8           # passes; a server learns the time of its launches from them
PARTS_PASSES = 20      # by which parts of the adapter are timed
CONNECTOR = ("plan", "begin", "end", "lost", "waits")  # the waits are a part of "lost"
Key = Tuple[str, int]  # memory and layers


def numbers(text: str) -> List[int]:
    """Numbers with commas between them."""
    return [int(one) for one in text.split(",")]


def a_turn(engine: EngineProcess, bursts: int) -> Tuple[float, float]:
    """Milliseconds that attention adds to a pass, and those of the pass."""
    found: List[Tuple[float, float]] = []

    def burst(mode: str) -> float:
        return statistics.median(engine.ask(passes=PASSES, mode=mode)["ms"])
    before = burst("zeros")
    for _ in range(bursts):
        with_server, after = burst("server"), burst("zeros")
        found.append((with_server - (before + after) / 2, with_server))
        before = after
    return (statistics.median(one for one, _ in found), statistics.median(one for _, one in found))


def a_batch(engines: Dict[Key, EngineProcess], batch: int, flags: argparse.Namespace
            ) -> List[Dict[str, Any]]:
    """The rows of one batch."""
    depths, memories = numbers(flags.layers), flags.memory.split(",")
    # The context is as asked for in the middle of the measurement.
    passes = flags.turns * flags.bursts * (PASSES + 1) + WARM_UPS + PARTS_PASSES
    begin = time.monotonic()
    ask_all(engines.values(), requests=batch, rows=max(flags.context - passes // 2, 1))
    print(f"batch {batch}: prompts took {time.monotonic() - begin:.0f} s", flush=True)
    ask_all(engines.values(), passes=WARM_UPS, mode="server")
    begin = time.monotonic()
    turns: Dict[Key, List[Tuple[float, float]]] = {}
    for turn in range(flags.turns):
        if time.monotonic() - begin > flags.seconds:
            break
        for memory in memories:
            for depth in depths:
                turns.setdefault((memory, depth), []).append(
                    a_turn(engines[memory, depth], flags.bursts))
        print(json.dumps({"batch": batch, "turn": turn, "seconds": round(
            time.monotonic() - begin, 1), "added_ms": {
                f"{memory}, {depth} layers": round(found[-1][0], 2)
                for (memory, depth), found in turns.items()}}), flush=True)
    rows = []
    for memory in memories:
        least = [added for added, _ in turns[memory, depths[0]]]
        for depth in depths:
            parts = engines[memory, depth].ask(passes=PARTS_PASSES, mode="server",
                                                parts=True)["us"]
            row = {"memory": memory, "batch": batch, "context": flags.context, "layers": depth,
                   "turns": len(least), "thread_us": parts["attend"],
                   "connector_us": {part: parts[part] for part in CONNECTOR if part in parts},
                   **summary("added_ms", [added for added, _ in turns[memory, depth]], 2),
                   "pass_ms": round(statistics.median(one for _, one in turns[memory, depth]), 2)}
            if depth != depths[0]:
                row.update(summary("us_a_layer", [
                    (more - few) / (depth - depths[0]) * 1e3
                    for few, (more, _) in zip(least, turns[memory, depth])], 1))
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def summary(name: str, values: List[float], digits: int) -> Dict[str, Any]:
    """The median of the turns, and the least and the greatest one."""
    return {name: round(statistics.median(values), digits),
            f"{name}_of_turns": [round(min(values), digits), round(max(values), digits)]}


def texts(rows: List[Dict[str, Any]]) -> Iterator[str]:
    """A line for each batch and memory: what a layer adds, from the fewest layers to each other
    number of them, and what the deepest model has."""
    for batch, memory in dict.fromkeys((row["batch"], row["memory"]) for row in rows):
        some = [row for row in rows if (row["batch"], row["memory"]) == (batch, memory)]
        layers = [f"{few['us_a_layer']} us ({some[0]['layers']} to {few['layers']})"
                  for few in some if "us_a_layer" in few]
        deep, parts = some[-1], some[-1]["connector_us"]
        connector = sum(parts.values()) - 2 * parts.get("waits", 0.0)
        yield (f"batch {batch}, {memory} memory, {deep['turns']} turns: a layer adds "
               f"{', '.join(layers) or '?'}; {deep['layers']} layers {deep['added_ms']} ms beyond "
               f"zeros; connector {connector / 1e3:.2f} ms a pass {parts}; thread "
               f"{deep['thread_us']} us in a call")


def main() -> int:
    """Starts everything."""
    parser = arguments_of(__doc__)
    parser.add_argument("--layers", default="4,20,61")
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--memory", default=",".join(MEMORIES))
    parser.add_argument("--bursts", type=int, default=5, help="of passes of a kind in a turn")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--graphs", action="store_true")
    flags = parser.parse_args()
    rows: List[Dict[str, Any]] = []
    with server_of(flags) as server:
        engines = {(memory, layers): EngineProcess(f"{memory}{layers}", layers, server.target,
                                                   memory, flags.logs, graphs=flags.graphs)
                   for layers in numbers(flags.layers)
                   for memory in flags.memory.split(",")}
        try:
            started(list(engines.values()))
            for batch in numbers(flags.batch):
                rows += a_batch(engines, batch, flags)
                print(*texts(rows), sep="\n", flush=True)
        finally:
            for engine in engines.values():
                engine.close()
            print(server.log()[-2000:], file=sys.stderr)
    if flags.json:
        flags.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
