"""Draws one decode step through the Python client and a server: docs/pictures/trace.svg.

Starts a server that writes its spans to a file, runs a step with a parent span of its own, and
draws the client's and the server's spans under each other. `./dev picture trace` runs it.
"""

import argparse
import contextlib
import json
import pathlib
import secrets
import tempfile
import time

import matplotlib
import mla_client
import numpy as np
from mla_client.base import tracing
from mla_client.testing import ServerProcess

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402  pylint: disable=wrong-import-position

HERE = pathlib.Path(__file__).resolve().parent
LAYERS, HEADS, CONTEXT = 2, 16, 1024
GEOMETRY = mla_client.Geometry(num_heads=HEADS, kv_lora_rank=512, rope_dim=64)
COLORS = {"client": "#4c72b0", "step": "#8c8c8c", "attend": "#8c8c8c", "kernel": "#c44e52",
          "plan": "#dd8452", "queue": "#ccb974"}
WAIT_S = 10


class Clock:
    """Spans of this process, in the form of the server's lines."""

    def __init__(self):
        self.spans = []

    @contextlib.contextmanager
    def span(self, name):
        """Records the span of a block."""
        begin = time.time_ns()
        yield
        self.spans.append({"name": name, "start_unix_ns": begin, "end_unix_ns": time.time_ns(),
                           "client": True})


def decode(client, clock):
    """One recorded step after a prompt that is not recorded."""
    model = client.register_model(mla_client.ModelSpec(
        model_id="picture", geometry=GEOMETRY, layers=LAYERS, softmax_scale=0.1))
    sequence = model.open_sequence()
    rng = np.random.default_rng(1)

    def step(rows, timed):
        q = mla_client.to_bf16(rng.standard_normal((rows, HEADS, GEOMETRY.row_dim)))
        kv = mla_client.to_bf16(rng.standard_normal((rows, GEOMETRY.row_dim)))
        with timed("client: step"), client.step([(sequence, rows)]) as begun:
            for layer in range(LAYERS):
                with timed(f"client: attend, layer {layer}"):
                    begun.attend(layer, q, kv, mla_client.Profile.ABSORBED)

    step(CONTEXT, Clock().span)
    step(1, Clock().span)  # everything is warm afterwards
    header = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    tracing.set_source(lambda: header)
    step(1, clock.span)
    tracing.set_source(None)


def read(path):
    """The server's spans once the step has ended."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        spans = [json.loads(line) for line in path.read_text().splitlines()]
        if any(span["name"] == "step" for span in spans):
            return spans
        time.sleep(0.1)
    raise SystemExit("the server wrote no step")


def draw(spans, path):
    """One bar a span, by their beginnings."""
    spans = sorted(spans, key=lambda span: (span["start_unix_ns"], -span["end_unix_ns"]))
    start = spans[0]["start_unix_ns"]
    figure, axes = plt.subplots(figsize=(10, 0.28 * len(spans) + 0.8))
    for row, span in enumerate(spans):
        begin = (span["start_unix_ns"] - start) / 1e3
        width = (span["end_unix_ns"] - span["start_unix_ns"]) / 1e3
        kind = "client" if span.get("client") else span["name"]
        axes.barh(row, width, left=begin, height=0.7, color=COLORS.get(kind, "#55a868"))
        name = span["name"] + (f", layer {span['mla.layer']}" if "mla.layer" in span else "")
        axes.text(begin + width, row, f" {name}: {width:.0f} us", va="center", fontsize=7)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlim(right=axes.get_xlim()[1] * 1.25)
    axes.set_xlabel("microseconds since the client began")
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True, help="path of mla-server")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "trace.svg")
    args = parser.parse_args()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        lines = pathlib.Path(folder) / "spans.jsonl"
        with ServerProcess(args.server, [f"--tracing-file={lines}", "--backend=cpu",
                                         "--kv-cache-bytes=64MiB"]) as server:
            with mla_client.Client.connect(server.target) as client:
                decode(client, clock)
            spans = read(lines)
    draw(clock.spans + spans, args.out)


if __name__ == "__main__":
    main()
