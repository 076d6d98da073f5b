"""A model of a node whose GPUs have a NIC of 400 Gb/s each: tokens a second of one GPU of the
server by batch, for each profile and transport, computed of measured terms
(docs/benchmarks/node.md).

    node_model_benchmark [--json FILE] [--plot FILE.svg] [--terms FILE]

prints the tables of the page.

A layer takes, with one batch at a time,

    worker + message + launch + bus in + kernels + bus out

where a message goes there and back. With batches in turns, so many that nothing waits for another
thing, it takes as long as the busiest of message, bus in, kernels and bus out; RDMA's message is
then its longer direction. Attention alone is counted: the worker's experts and norms take their
time on the worker's own GPUs.
"""

from __future__ import annotations

import argparse
import bisect
import json
import pathlib
from typing import Any, Dict, List, Optional, Sequence, Tuple

ROOT = pathlib.Path(__file__).resolve().parents[3]
TERMS = ROOT / "docs/benchmarks/node_terms.json"
PROFILES = ("ABSORBED", "EXPANDED", "PROJECTED")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LINES_GBPS = (1.25, 3.125, 12.5, 25.0, 50.0)  # 10, 25, 100, 200 and 400 Gb/s
MEGA = 1e6  # microseconds a second
COLOURS = {"ABSORBED": "#8c8c8c", "EXPANDED": "#4c72b0", "PROJECTED": "#c44e52"}


def between(points: Dict[str, float], x: float) -> float:
    """The value at x, on straight lines between measured points; outside them the nearest one's,
    and above the last one in proportion."""
    found = sorted((float(key), value) for key, value in points.items())
    keys = [key for key, _ in found]
    if x <= keys[0]:
        return found[0][1]
    if x >= keys[-1]:
        return found[-1][1] * x / keys[-1]
    at = bisect.bisect_right(keys, x)
    (low, before), (high, after) = found[at - 1], found[at]
    return before + (after - before) * (x - low) / (high - low)


class Node:
    """The model with one set of terms."""

    def __init__(self, terms: Dict[str, Any], line_gbps: float = 0.0) -> None:
        """`line_gbps`: of RDMA in the place of the terms' own."""
        self._terms = terms
        self._line = line_gbps
        self.transports: List[str] = list(terms["transports"])

    def parts(self, profile: str, transport: str, batch: int) -> Dict[str, float]:
        """What a layer consists of, in microseconds."""
        terms = self._terms
        size = {way: terms["bytes"][profile][way] * batch for way in ("in", "out")}
        worker = terms["worker_us"]
        return {
            "worker": worker[profile] / worker["ranks"],
            "message": self._message(transport, size["in"], size["out"]),
            "launch": terms["launch_us"]["value"],
            "bus in": _micros(size["in"], terms["bus"]["in_gbps"]),
            "kernels": between(terms["kernels_us"][profile], batch),
            "bus out": _micros(size["out"], terms["bus"]["out_gbps"])}

    def layer_us(self, profile: str, transport: str, batch: int, in_turns: bool = False) -> float:
        """Microseconds of a layer."""
        parts = self.parts(profile, transport, batch)
        if not in_turns:
            return sum(parts.values())
        if "message_us" not in self._terms["transports"][transport]:
            size = self._terms["bytes"][profile]
            parts["message"] = _micros(max(size["in"], size["out"]) * batch, self._rate(transport))
        return max(parts[name] for name in ("message", "bus in", "kernels", "bus out"))

    def tokens_a_second(self, profile: str, transport: str, batch: int,
                        in_turns: bool = False) -> float:
        """Of one GPU of the server, whose layers take turns."""
        layer = self.layer_us(profile, transport, batch, in_turns)
        return batch / (self._terms["layers"] * layer) * MEGA

    def pays_from(self, transport: str, in_turns: bool = False) -> Optional[int]:
        """The batch from which PROJECTED has more tokens a second than EXPANDED, up to the largest
        measured one; None: at none."""
        last = 0
        for batch in range(1, BATCHES[-1] + 1):
            projected, expanded = (self.layer_us(profile, transport, batch, in_turns)
                                   for profile in ("PROJECTED", "EXPANDED"))
            if projected >= expanded:
                last = batch
        return last + 1 if last < BATCHES[-1] else None

    def _message(self, transport: str, size_in: float, size_out: float) -> float:
        one = self._terms["transports"][transport]
        if "message_us" in one:
            return between(one["message_us"], size_in + size_out)
        line = self._rate(transport)
        return float(one["fixed_us"]) + _micros(size_in, line) + _micros(size_out, line)

    def _rate(self, transport: str) -> float:
        return self._line or float(self._terms["transports"][transport]["line_gbps"])


def _micros(size: float, gbps: float) -> float:
    return size / gbps / 1e3


def rows_of(node: Node) -> List[Dict[str, Any]]:
    """A row a profile, transport and batch."""
    return [{"bench": "node_model", "profile": profile, "transport": transport, "batch": batch,
             "tokens_a_second": round(node.tokens_a_second(profile, transport, batch), 1),
             "tokens_a_second_in_turns": round(
                 node.tokens_a_second(profile, transport, batch, True), 1)}
            for transport in node.transports for profile in PROFILES for batch in BATCHES]


def tables(terms: Dict[str, Any]) -> str:
    """The tables of the page."""
    node, lines = Node(terms), []
    for in_turns, title in ((False, "One batch at a time"), (True, "Batches in turns")):
        lines += [f"{title}, tokens a second of a GPU:", "",
                  "| transport | profile | " + " | ".join(map(str, BATCHES)) + " |",
                  "|---|---|" + "---|" * len(BATCHES)]
        for transport in node.transports:
            for profile in PROFILES:
                figures = " | ".join(
                    f"{node.tokens_a_second(profile, transport, batch, in_turns):,.0f}"
                    for batch in BATCHES)
                lines.append(f"| {transport} | {profile} | {figures} |")
        lines.append("")
    lines += ["PROJECTED is faster than EXPANDED from this batch on:", "",
              "| link | one batch at a time | batches in turns |", "|---|---|---|"]
    links: List[Tuple[str, Node, str]] = [(name, node, name) for name in node.transports
                                          if name != "RDMA"]
    links += [(f"RDMA at {8 * line:g} Gb/s", Node(terms, line), "RDMA") for line in LINES_GBPS]
    for name, one, transport in links:
        found = (one.pays_from(transport, in_turns) for in_turns in (False, True))
        lines.append(f"| {name} | " + " | ".join(
            "at none up to 128" if batch is None else str(batch) for batch in found) + " |")
    return "\n".join(lines)


def plot(terms: Dict[str, Any], path: pathlib.Path) -> None:
    """Draws all curves: a column a transport, above one batch at a time, below batches in turns."""
    # pylint: disable=import-outside-toplevel
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot: needs matplotlib (Debian's python3-matplotlib)") from error
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # Text stays text, and the same curves are the same bytes.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "node", "font.size": 9})
    node = Node(terms)
    figure, axes = plt.subplots(2, len(node.transports), figsize=(13, 6.4), sharex=True,
                                sharey="row")
    for column, transport in enumerate(node.transports):
        measured = terms["transports"][transport]["measured"]
        for row, in_turns in enumerate((False, True)):
            axis = axes[row][column]
            for profile in PROFILES:
                axis.plot(BATCHES, [node.tokens_a_second(profile, transport, batch, in_turns)
                                    for batch in BATCHES], color=COLOURS[profile], label=profile,
                          marker="o", markersize=3)
            axis.set_xscale("log", base=2)
            axis.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            if row == 0:
                axis.set_title(transport + ("" if measured else ", assumed"))
        axes[1][column].set_xlabel("batch of a step")
    axes[0][0].set_ylabel("tokens/s a GPU, one batch at a time")
    axes[1][0].set_ylabel("tokens/s a GPU, batches in turns")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    parser.add_argument("--terms", type=pathlib.Path, default=TERMS)
    args = parser.parse_args(arguments)
    terms = json.loads(args.terms.read_text(encoding="utf-8"))
    print(tables(terms))
    if args.json is not None:
        args.json.write_text(json.dumps(rows_of(Node(terms)), indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        plot(terms, args.plot)


if __name__ == "__main__":
    main()
