"""Tokens a second of data-parallel engines that share a server, against each of them alone.

    MLA_CLIENT_LIBRARY=libmla_ring.so python3 tests/bench/engine/vllm/data_parallel.py
        --server mla-server [--engines 2] [--layers 20] [--batch 1,32] [--memory device]
        [--context 1024] [--turns 7] [--seconds 2] [--server-gpu 0] [--engine-gpus 0,0]
        [--json FILE] [--logs FOLDER]

Each engine has its own requests, as the ranks of a data-parallel group of dense layers do. A turn
gives each engine some seconds alone, then all of them the same seconds together, so that changes of
the host's speed cancel. `of_one` is the sum of their rates over the mean rate of one alone, the
median of the turns. The same without attention ("zeros") says what the host and the engines' GPU
allow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any, Dict, List

from engines import MEMORIES, EngineProcess, arguments_of, ask_all, server_of, started

WARM_UPS = 8


def rate(answer: Dict[str, Any], batch: int) -> float:
    """Tokens a second."""
    return float(answer["passes"] * batch / answer["seconds"])


def a_mode(engines: List[EngineProcess], mode: str, batch: int, flags: argparse.Namespace
           ) -> Dict[str, Any]:
    """One row."""
    ask_all(engines, passes=WARM_UPS, mode=mode)
    alone: List[float] = []
    together: List[float] = []
    ratios: List[float] = []
    for _ in range(flags.turns):
        singles = [rate(engine.ask(seconds=flags.seconds, mode=mode), batch)
                   for engine in engines]
        both = sum(rate(answer, batch)
                   for answer in ask_all(engines, seconds=flags.seconds, mode=mode))
        alone += singles
        together.append(both)
        ratios.append(both / statistics.mean(singles))
    return {"engines": len(engines), "layers": flags.layers, "memory": flags.memory,
            "mode": mode, "batch": batch,
            "context": flags.context, "alone_tokens_s": round(statistics.median(alone), 1),
            "together_tokens_s": round(statistics.median(together), 1),
            "of_one": round(statistics.median(ratios), 3),
            "of_one_of_turns": [round(min(ratios), 3), round(max(ratios), 3)]}


def main() -> int:
    """Starts everything."""
    parser = arguments_of(__doc__)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--engine-gpus", default="")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--memory", default="device", choices=MEMORIES)
    parser.add_argument("--seconds", type=float, default=2.0)
    flags = parser.parse_args()
    gpus = [int(one) for one in flags.engine_gpus.split(",")] if flags.engine_gpus else [0]
    rows: List[Dict[str, Any]] = []
    with server_of(flags) as server:
        engines = [EngineProcess(f"{flags.memory}-{number}", flags.layers, server.target,
                                 flags.memory, flags.logs, gpus[number % len(gpus)])
                   for number in range(flags.engines)]
        try:
            started(engines)
            for batch in (int(one) for one in flags.batch.split(",")):
                ask_all(engines, requests=batch, rows=flags.context)
                for mode in ("server", "zeros"):
                    rows.append(a_mode(engines, mode, batch, flags))
                    print(json.dumps(rows[-1]), flush=True)
        finally:
            for engine in engines:
                engine.close()
        print(server.log()[-2000:], file=sys.stderr)
    if flags.json:
        flags.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
