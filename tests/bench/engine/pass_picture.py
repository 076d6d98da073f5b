"""A picture of passes: what the worker's thread and its GPU do, from traces of engine_pass.py.

    python3 tests/bench/engine/pass_picture.py OUT.svg TITLE=TRACE.json [TITLE=TRACE.json ...]

Each trace has a band, all of one scale: above the thread, with its calls of attention in another
colour; below the kernels and copies of the worker's GPU. The server's kernels are those of another
process: the GPU's gaps in attention are theirs.
"""

from __future__ import annotations

import html
import json
import pathlib
import sys
from typing import Any, Dict, List, Tuple

WIDTH, LEFT, BAR, BAND, TOP = 1200, 130, 22, 100, 30
COLOURS = {"attention": "#c0504d", "thread": "#9db4d3", "gpu": "#4f7942", "copy": "#d99a2b"}
Span = Tuple[float, float, str]  # begin and end in microseconds, kind
BEFORE_US = 200  # of what comes before the first call of attention


def spans_of(trace: Dict[str, Any]) -> Tuple[List[Span], List[Span]]:
    """Returns the spans of the thread and of the GPU, from shortly before the first attend on."""
    thread: List[Span] = []
    gpu: List[Span] = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        kind, begin = event.get("cat", ""), float(event["ts"])
        end = begin + float(event["dur"])
        if kind == "user_annotation" and event["name"] == "attention":
            thread.append((begin, end, "attention"))
        elif kind == "cpu_op":
            thread.append((begin, end, "thread"))
        elif kind == "kernel":
            gpu.append((begin, end, "gpu"))
        elif kind in ("gpu_memcpy", "gpu_memset"):
            gpu.append((begin, end, "copy"))
    if not thread or not gpu:
        raise SystemExit("the trace has no thread, or no kernels")
    first = min(begin for begin, _, kind in thread if kind == "attention") - BEFORE_US

    def later(spans: List[Span]) -> List[Span]:
        return [(max(begin - first, 0.0), end - first, kind) for begin, end, kind in sorted(spans)
                if end > first]
    return later(thread), later(gpu)


def picture(named: List[Tuple[str, Dict[str, Any]]]) -> str:
    """The SVG."""
    bands = [(title, *spans_of(trace)) for title, trace in named]
    longest = max(end for _, thread, gpu in bands for _, end, _ in thread + gpu)
    scale = (WIDTH - LEFT - 10) / longest
    height = TOP + BAND * len(bands) + 30
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
           'font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{height}" fill="white"/>']
    for number, (title, thread, gpu) in enumerate(bands):
        y = TOP + BAND * number
        end = max(last for _, last, _ in thread + gpu)
        out.append(f'<text x="{LEFT}" y="{y - 6}">{html.escape(title)}: {end / 1e3:.2f} ms</text>')
        for name, spans, at in (("thread", thread, y), ("worker's GPU", gpu, y + BAR + 6)):
            out.append(f'<text x="4" y="{at + 15}">{name}</text>')
            # Calls of attention over what they consist of.
            for begin, last, kind in sorted(spans, key=lambda one: one[2] == "attention"):
                out.append(f'<rect x="{LEFT + begin * scale:.1f}" y="{at}" height="{BAR}" '
                           f'width="{max((last - begin) * scale, 0.3):.1f}" '
                           f'fill="{COLOURS[kind]}"/>')
    y = height - 12
    for place, (kind, text) in enumerate((("attention", "a call of attention"),
                                          ("thread", "other work of the thread"),
                                          ("gpu", "a kernel"), ("copy", "a copy"))):
        x = LEFT + 200 * place
        out.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind]}"/>'
                   f'<text x="{x + 18}" y="{y}">{text}</text>')
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    """Reads traces, writes the picture."""
    out, *given = sys.argv[1:]
    named = []
    for one in given:
        title, _, path = one.partition("=")
        named.append((title, json.loads(pathlib.Path(path).read_text(encoding="utf-8"))))
    pathlib.Path(out).write_text(picture(named), encoding="utf-8")


if __name__ == "__main__":
    main()
