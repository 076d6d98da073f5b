"""Draws rows of deploy/grafana/dashboard.json from a real server: docs/pictures/dashboard.png.

Starts a server, has workers of three tenants compute on it, and lets Prometheus scrape it. Each
panel's own expressions are then asked of Prometheus, and drawn as plain charts at the place of the
panel.
Grafana itself is not among the distribution's packages, so colors and fonts are not Grafana's;
panels, titles, legends, units and values are those that it would show.
`./dev picture dashboard` runs it.
"""

import argparse
import contextlib
import html
import json
import math
import pathlib
import re
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request

from mla_client.testing import ServerProcess
from parts import browser, load

HERE = pathlib.Path(__file__).resolve().parent
DASHBOARD = HERE.parents[1] / "deploy/grafana/dashboard.json"
ROWS = ("Now", "Traffic", "Latency", "KV cache")
COLUMN, LINE = 40, 20  # pixels of a step of Grafana's grid of 24 columns
SECONDS, STEP_S, RATE = 90, 1, "15s"
LEFT_OUT_S = 30  # at the beginning, when pools fill and rates have few samples
COLORS = ("#2f6fde", "#d9822b", "#3a9d5d", "#c0395b", "#7b5bc4", "#2aa5a0", "#8c6d31", "#666666")
STYLE = """
body { margin: 0; font: 12px sans-serif; background: #f4f5f7; color: #222; }
div { position: absolute; box-sizing: border-box; overflow: hidden; }
.panel { background: #fff; border: 1px solid #d8dbe0; border-radius: 3px; padding: 5px 7px; }
b { font-size: 11px; white-space: nowrap; }
.row { font-size: 15px; font-weight: bold; }
.value { font-size: 26px; color: #2f6fde; text-align: center; width: 100%; left: 0; top: 40px; }
.legend { font-size: 10px; bottom: 3px; left: 7px; right: 7px; line-height: 13px; }
svg { position: absolute; left: 7px; top: 24px; } text { font-size: 10px; fill: #666; }
"""
SCALES = {"s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
          "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
          "percentunit": ((1e-2, "%"),)}
RATES = {"ops": " ops/s", "reqps": " req/s", "Bps": "B/s"}


def in_unit(value, unit):
    """A value as Grafana's units show it, with three digits."""
    if unit in SCALES:
        scale, name = next((pair for pair in SCALES[unit] if abs(value) >= pair[0]),
                           SCALES[unit][-1])
        return f"{value / scale:.3g} {name}"
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}{RATES.get(unit, '').strip()}"
    return f"{value:.3g}{RATES.get(unit, '')}"


def legend_of(target, labels):
    """The name of a series: the target's legend with the labels of the series."""
    text = target.get("legendFormat", "")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), text)


def chart(series, unit, width, height):
    """An SVG of the series, each a name and points of (time, value), with the largest value."""
    points = [point for _, line in series for point in line]
    if not points:
        return '<svg width="100%" height="30"><text x="4" y="20">No data</text></svg>'
    begin, end = min(at for at, _ in points), max(at for at, _ in points)
    top = max(value for _, value in points) or 1.0
    lines = [f'<text x="0" y="9">{html.escape(in_unit(top, unit))}</text>',
             f'<line x1="0" x2="{width}" y1="{height}" y2="{height}" stroke="#ccc"/>']
    for index, (_, line) in enumerate(series):
        path = " ".join(f"{(at - begin) / max(end - begin, 1) * width:.0f},"
                        f"{height - value / top * (height - 14):.0f}" for at, value in line)
        lines.append(f'<polyline fill="none" stroke="{COLORS[index % len(COLORS)]}" '
                     f'stroke-width="1.3" points="{path}"/>')
    return f'<svg width="{width}" height="{height + 1}">{"".join(lines)}</svg>'


def draw_panel(panel, place, answers):
    """HTML of a panel at `place` (left, top, width, height). `answers` are the series of each
    target, by its expression."""
    left, top, width, height = place
    unit = panel["fieldConfig"]["defaults"].get("unit", "none")
    series = [(legend_of(target, labels), points) for target in panel["targets"]
              for labels, points in answers[target["expr"]]]
    if panel["type"] == "stat":
        latest = in_unit(series[0][1][-1][1], unit) if series else "No data"
        body = f'<div class="value">{html.escape(latest)}</div>'
    else:
        names = " &nbsp; ".join(
            f'<span style="color: {COLORS[index % len(COLORS)]}">&#9473; {html.escape(name)}</span>'
            for index, (name, _) in enumerate(series[:len(COLORS)]))
        body = (chart(series, unit, width - 16, height - 62) +
                f'<div class="legend">{names}</div>')
    return (f'<div class="panel" style="left: {left}px; top: {top}px; width: {width - 4}px; '
            f'height: {height - 4}px"><b>{html.escape(panel["title"])}</b>{body}</div>')


def panels_of(dashboard, rows):
    """The panels of the rows: (row's title, its panels), as in the dashboard's order."""
    grouped, wanted = [], False
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            wanted = panel["title"] in rows
            if wanted:
                grouped.append((panel, []))
        elif wanted:
            grouped[-1][1].append(panel)
    return grouped


def draw(dashboard, rows, answers):
    """HTML of the rows, and its height in pixels."""
    parts, top = [], 0
    for row, panels in panels_of(dashboard, rows):
        parts.append(f'<div class="row" style="left: 8px; top: {top + 4}px">'
                     f'{html.escape(row["title"])}</div>')
        top += LINE
        base = row["gridPos"]["y"] + 1
        bottom = top
        for panel in panels:
            grid = panel["gridPos"]
            place = (4 + grid["x"] * COLUMN, top + (grid["y"] - base) * LINE,
                     grid["w"] * COLUMN, grid["h"] * LINE)
            parts.append(draw_panel(panel, place, answers))
            bottom = max(bottom, place[1] + place[3])
        top = bottom
    return (f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{''.join(parts)}", top + 4)


def ask(address, expression, begin, end):
    """The series of a panel's expression: (labels, [(time, value)]), without values that are not
    numbers."""
    query = (expression.replace("$__rate_interval", RATE).replace("$job", ".*")
             .replace("$instance", ".*"))
    words = urllib.parse.urlencode({"query": query, "start": begin, "end": end, "step": STEP_S})
    with urllib.request.urlopen(f"{address}/api/v1/query_range?{words}") as reply:
        found = json.load(reply)["data"]["result"]
    series = [(one["metric"], [(at, float(value)) for at, value in one["values"]
                               if math.isfinite(float(value))]) for one in found]
    return [(labels, points) for labels, points in series if points]


@contextlib.contextmanager
def scraping(program, folder, ops_port):
    """A Prometheus that scrapes the server every second; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    config = folder / "prometheus.yml"
    config.write_text("global: {scrape_interval: 1s}\nscrape_configs: [{job_name: mla-server, "
                      f"static_configs: [{{targets: ['127.0.0.1:{ops_port}']}}]}}]\n",
                      encoding="utf-8")
    process = subprocess.Popen(
        [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
         f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True, help="path of mla-server")
    parser.add_argument("--prometheus", required=True, help="path of prometheus")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "dashboard.png")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="load that is scraped")
    args = parser.parse_args()
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = {target["expr"] for _, panels in panels_of(dashboard, ROWS)
                   for panel in panels for target in panel["targets"]}
    with tempfile.TemporaryDirectory() as name, ServerProcess(
            args.server, ["--ops-listen=127.0.0.1:0", "--log-level=info", "--backend=cpu",
                          "--kv-cache-bytes=64MiB"]) as server:
        folder = pathlib.Path(name)
        ops_port = re.search(r"ops_port=([0-9]+)", server.log())[1]
        with scraping(args.prometheus, folder, ops_port) as address:
            begin = time.time()
            with load.load(server.target) as ended:
                ended.wait(args.seconds)
                answers = {expression: ask(address, expression, begin + LEFT_OUT_S, time.time())
                           for expression in expressions}
        text, height = draw(dashboard, ROWS, answers)
        page = folder / "dashboard.html"
        page.write_text(text, encoding="utf-8")
        browser.shoot(f"file://{page}", args.out, 24 * COLUMN + 4, height)


if __name__ == "__main__":
    main()
