#!/usr/bin/python3
"""Draws a report of `mlactl bench --json` with matplotlib; `mlactl bench --plot FILE` calls it.

    mlactl-plot REPORT FILE     FILE ends in .svg, .png or .pdf; "-" reads standard input
    mlactl-plot --check FILE    says whether FILE can be drawn here, and draws nothing

Reports are those of decode steps ("format": "mlactl-bench") and of scenes ("mlactl-agents"). A
failure is a line on standard error and exit status 1.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import os
import pathlib
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

ENDINGS = (".pdf", ".png", ".svg")
# Turns by the share of their rows that was found in the cache, as mlactl groups them.
HIT_CLASSES = (("96 % or more", 0.955), ("80 to 96 %", 0.8), ("less than 80 %", 1e-9),
               ("none", 0.0))


class Failure(Exception):
    """Says what is wrong with the arguments, the report or this machine."""


@dataclasses.dataclass
class Line:
    """One line of a chart. The n-th lines of all charts have the same colour and dashes."""
    name: str
    points: List[Tuple[float, float]]  # x, y


@dataclasses.dataclass
class Chart:
    """Lines over one pair of axes. `percentiles`: x is a quantile 0..1, placed by its number of
    nines, so that 0.9, 0.99 and 0.999 are equally far apart. `log_y`: y is logarithmic."""
    title: str
    x_label: str
    y_label: str
    lines: List[Line]
    percentiles: bool = False
    log_y: bool = False


def nines(quantile: float) -> float:
    """The number of nines of a quantile below 1: 1 for 0.9, 2 for 0.99."""
    return -math.log10(1.0 - quantile)


def last_nine(chart: Chart) -> int:
    """Where the axis of a chart of percentiles ends. A quantile of 1 is drawn there."""
    below = [nines(x) for line in chart.lines for x, _ in line.points if x < 1]
    return max(1, math.ceil(max(below, default=1.0) - 1e-9))


def bench_charts(report: Dict[str, Any]) -> Tuple[str, List[Chart]]:
    """Title and charts of a report of decode steps: a line a run in each chart."""
    curve = Chart("Step latency by percentile", "percentile", "latency, us", [], percentiles=True,
                  log_y=True)
    rate = Chart("Throughput over time", "seconds", "steps/s", [])
    tail = Chart("Step latency over time, p99", "seconds", "latency, us", [], log_y=True)
    for run in report["runs"]:
        name, series = run["name"], run["series"]
        curve.lines.append(Line(name, [(at, us) for at, us in run["step_curve"]]))
        rate.lines.append(Line(name, [(one["at_s"], one["steps_per_s"]) for one in series]))
        tail.lines.append(Line(name, [(one["at_s"], one["p99_us"]) for one in series
                                      if one["p99_us"] > 0]))
    model = report["model"]
    title = f"mlactl bench: {model['num_heads']} heads, {model['layers']} layers"
    return title, [curve, rate, tail]


def hit_class(turn: Dict[str, Any]) -> str:
    """The name of the turn's class."""
    share = turn["found_rows"] / turn["input_rows"] if turn["input_rows"] else 0.0
    return next(name for name, least in HIT_CLASSES if share >= least)


def quantile_curve(values: Sequence[float]) -> List[Tuple[float, float]]:
    """Each value with the share of values that are not larger."""
    return [((i + 1) / len(values), value) for i, value in enumerate(sorted(values))]


def scene_charts(report: Dict[str, Any]) -> Tuple[str, List[Chart]]:
    """Title and charts of a report of a scene: by the turn's number in its conversation, without
    branches, and by percentile."""
    numbers: Dict[int, int] = collections.defaultdict(int)  # by conversation
    by_number: Dict[int, List[Dict[str, Any]]] = collections.defaultdict(list)
    by_class: Dict[str, List[float]] = collections.defaultdict(list)
    for turn in report["turns"]:
        by_class[hit_class(turn)].append(turn["first_ms"])
        if not turn["branch"]:
            numbers[turn["conversation"]] += 1
            by_number[numbers[turn["conversation"]]].append(turn)
    found = Line("found", [])
    median, longest = Line("p50", []), Line("max", [])
    for number, turns in sorted(by_number.items()):
        asked = sum(turn["input_rows"] for turn in turns)
        hits = sum(turn["found_rows"] for turn in turns)
        found.points.append((number, 100 * hits / max(asked, 1)))
        times = sorted(turn["first_ms"] for turn in turns)
        median.points.append((number, times[(len(times) - 1) // 2]))
        longest.points.append((number, times[-1]))
    model = report["model"]
    title = (f"mlactl bench --scene={report['scene']}: {model['num_heads']} heads, "
             f"{model['layers']} layers, {100 * report['hit_rate']:.1f} % of the rows found")
    return title, [
        Chart("Rows found in the cache, by turn of the conversation", "turn",
              "share of the input, %", [found]),
        Chart("Time to the first output, by turn of the conversation", "turn", "ms",
              [median, longest], log_y=True),
        Chart("Time to the first output by percentile", "percentile", "ms",
              [Line(f"found {name}", quantile_curve(by_class[name]))
               for name, _ in HIT_CLASSES if by_class[name]], percentiles=True, log_y=True),
    ]


CHARTS = {"mlactl-bench": bench_charts, "mlactl-agents": scene_charts}


def charts_of(text: str) -> Tuple[str, List[Chart]]:
    """Title and charts of a report."""
    try:
        report = json.loads(text)
        kind, version = report["format"], report["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise Failure("the report is not one of mlactl bench --json") from error
    if kind not in CHARTS or version != 1:
        raise Failure(f"the report's format is {kind!r} of version {version!r}, must be one of "
                      f"{', '.join(CHARTS)} of version 1")
    try:
        return CHARTS[kind](report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Failure(f"the report lacks {error}") from error


def load_matplotlib() -> Any:
    """The module matplotlib.pyplot, which draws into files."""
    try:
        # pylint: disable=import-outside-toplevel
        import matplotlib
        matplotlib.use("agg")
        import matplotlib.pyplot
    except ImportError as error:
        raise Failure("needs matplotlib (Debian's python3-matplotlib), which is not here; "
                      "mlactl bench --json FILE keeps the report for another machine") from error
    # Text stays text, and the same report is the same bytes.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "mlactl", "font.size": 9,
                                "text.parse_math": False})
    return matplotlib.pyplot


def draw(title: str, charts: Sequence[Chart], path: str) -> None:
    """Draws the charts one above the other."""
    pyplot = load_matplotlib()
    longest = max(len(chart.lines) for chart in charts)
    figure, axes = pyplot.subplots(len(charts), 1, squeeze=False,
                                   figsize=(10, len(charts) * (3.6 + 0.2 * longest)))
    figure.suptitle(title)
    for chart, (axis,) in zip(charts, axes):
        end = last_nine(chart)
        for number, line in enumerate(chart.lines):
            points = line.points
            if chart.percentiles:
                points = [(nines(x) if x < 1 else end, y) for x, y in points]
            axis.plot([x for x, _ in points], [y for _, y in points], label=line.name,
                      color=f"C{number % 10}", linestyle=("-", "--", ":", "-.")[number // 10 % 4],
                      marker="." if len(points) == 1 else None)
        axis.set_title(chart.title)
        axis.set_xlabel(chart.x_label)
        axis.set_ylabel(chart.y_label)
        if chart.percentiles:
            axis.set_xticks(range(end + 1), [f"{100 * (1 - 10.0 ** -nine):.10g} %"
                                             for nine in range(end + 1)])
            axis.set_xlim(0, end)
        if chart.log_y and any(y > 0 for line in chart.lines for _, y in line.points):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
        else:
            axis.set_ylim(bottom=0)
        if not chart.percentiles:
            axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        if chart.lines:
            axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.15))
    figure.tight_layout()
    try:
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from error


def check(path: str) -> None:
    """Raises Failure if a picture cannot be drawn to `path`."""
    if not path.endswith(ENDINGS):
        raise Failure(f"{path}: must end in {', '.join(ENDINGS)}")
    folder = pathlib.Path(path).parent
    if not folder.is_dir():
        raise Failure(f"{path}: there is no folder {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise Failure(f"{path}: may not be written")
    load_matplotlib()


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Draws, or checks."""
    parser = argparse.ArgumentParser(prog="mlactl-plot", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("report", nargs="?", metavar="REPORT")
    parser.add_argument("file", metavar="FILE")
    args = parser.parse_args(arguments)
    if args.check != (args.report is None):
        parser.error("takes --check FILE, or REPORT FILE")
    try:
        check(args.file)
        if not args.check:
            report = sys.stdin.read() if args.report == "-" else (
                pathlib.Path(args.report).read_text(encoding="utf-8"))
            draw(*charts_of(report), args.file)
    except Failure as failure:
        print(f"mlactl-plot: {failure}", file=sys.stderr)
        return 1
    except (OSError, UnicodeDecodeError) as error:
        print(f"mlactl-plot: {args.report}: {getattr(error, 'strerror', None) or error}",
              file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
