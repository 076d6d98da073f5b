"""Error of a language model from a server's number formats; ./dev bench quality runs it.

    quality_benchmark [--json FILE] [--windows N] [--backend NAME] [--q-dtype NAMES]
                      [--kv-format NAMES] [--fp8-compute off|on] [--server PROGRAM]

The demo's trained model runs teacher-forced over N windows (default 8) of held-out text, 1024
bytes each, once with attention in float32 in this process and once for each mode through a server
(by default on the CPU backend). All windows run at the same time, as sequences of one step. A mode
is the number format of the queries (q_dtype) and of cached rows (kv_format), a profile, and the
number of rows in a step: 1 (decode) or 128 (prefill). All modes of the server are compared unless
the options name some. With --fp8-compute only models of 8-bit rows run, with bf16 products (off) or
8-bit products (on); without it the server chooses. Figures over all positions, against float32:

    mean_dlogit     mean |difference| of all logits
    kl              mean Kullback-Leibler divergence of the next byte's distribution, in nats
    top1            share of positions at which the most likely byte is the same
    bits_per_byte   of the text; float32_bits_per_byte is the value with float32
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "client/demo"), str(ROOT / "client/python")]

# pylint: disable=wrong-import-position
import corpus
import mla_client
import numpy as np
import trained
from attention import StepAttention, register
from mla_client.gen import tensor_pb2
from mla_client.testing import ServerProcess

SERVER = ROOT / ".bazel/bin/server/mla-server"
STEP_ROWS = (1, 128)
# The clients compute between two layers, and a busy machine can make this slow.
LEASE_MS = 60_000


def remote_logits(model, registered, service, windows, profile, dtype, step_rows):
    """Logits [windows, bytes, vocab] with attention by a service; each step brings step_rows rows
    of every window."""
    count, length = windows.shape
    sequences = [registered.open_sequence(lease_ms=LEASE_MS) for _ in windows]
    parts = []
    for begin in range(0, length, step_rows):
        tokens = windows[:, begin:begin + step_rows]
        rows = tokens.shape[1]
        positions = np.tile(np.arange(begin, begin + rows), count)
        with service.step([(sequence, rows) for sequence in sequences], lease_ms=LEASE_MS) as step:
            attention = StepAttention(model, step, profile, dtype)
            logits = model.forward(tokens.reshape(-1), positions, attention)
        parts.append(logits.reshape(count, rows, -1))
    for sequence in sequences:
        sequence.release()
    return np.concatenate(parts, axis=1)


def compare(windows, local, remote):
    """The figures of one mode from logits [windows, bytes, vocab]."""
    right, seen = trained.log_softmax(local), trained.log_softmax(remote)
    return {
        "mean_dlogit": float(np.abs(remote - local).mean()),
        "kl": float((np.exp(right) * (right - seen)).sum(axis=-1).mean()),
        "top1": float((local.argmax(axis=-1) == remote.argmax(axis=-1)).mean()),
        "bits_per_byte": trained.bits_per_byte(remote, windows),
        "float32_bits_per_byte": trained.bits_per_byte(local, windows),
    }


def formats(info):
    """Names of the formats of rows that the server offers."""
    return [tensor_pb2.KvFormat.Name(number).removeprefix("KV_FORMAT_").lower()
            for number in info.kv_formats]


def modes(info):
    """Modes of each format: (q_dtype, profile, step_rows)."""
    dtypes = [mla_client.DType(number) for number in info.wire_dtypes]
    if "fp8_wire" in info.capabilities:
        dtypes.append(mla_client.DType.F8_E4M3)
    return [(dtype, profile, rows) for dtype in dtypes
            for profile in (mla_client.Profile.ABSORBED, mla_client.Profile.EXPANDED)
            for rows in STEP_ROWS]


def measure(client, model, windows, wanted=lambda kv_format, q_dtype: True, fp8_compute=""):
    """Yields a row for each mode whose names are wanted."""
    local = trained.logits_of(model, windows)
    info = client.server_info()
    for kv_format in formats(info):
        chosen = [mode for mode in modes(info) if wanted(kv_format, mode[0].name.lower())]
        if not chosen or (fp8_compute and kv_format == "bf16"):
            continue
        registered = register(client, model, f"quality-{kv_format}", kv_format,
                              fp8_compute=fp8_compute)
        for dtype, profile, step_rows in chosen:
            remote = remote_logits(model, registered, client, windows, profile, dtype, step_rows)
            figures = compare(windows, local, remote)
            yield {"bench": "quality", "kv_format": kv_format, "q_dtype": dtype.name.lower(),
                   "fp8_compute": fp8_compute or "auto",
                   "profile": profile.name.lower(), "step_rows": step_rows,
                   "positions": windows.size,
                   **{name: float(f"{value:.6g}") for name, value in figures.items()}}


def is_in(name, names):
    """Returns true if the comma-separated names contain this one, or if they are None."""
    return names is None or name in names.split(",")


def show(row):
    """One line of the table."""
    print(f"{row['kv_format']:<12}{row['q_dtype']:<9}{row['profile']:<10}{row['step_rows']:>5}"
          f"{row['mean_dlogit']:>13.6f}{row['kl']:>12.3e}{row['top1']:>9.5f}"
          f"{row['bits_per_byte']:>9.5f}{row['float32_bits_per_byte']:>9.5f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--windows", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--backend", default="cpu", help="default: %(default)s")
    parser.add_argument("--q-dtype", help="comma-separated names; default: all")
    parser.add_argument("--kv-format", help="comma-separated names; default: all")
    parser.add_argument("--fp8-compute", choices=("off", "on"), default="",
                        help="default: the server's choice")
    parser.add_argument("--server", type=pathlib.Path, default=SERVER)
    args = parser.parse_args()
    np.seterr(over="ignore")  # exp of large negative gates goes to zero, as it should
    all_windows = corpus.held_out_windows()
    if not 0 < args.windows <= len(all_windows):
        parser.error(f"--windows: got {args.windows}, must be 1 to {len(all_windows)}")
    # Spread over the novels.
    chosen = np.arange(args.windows) * len(all_windows) // args.windows
    print(f"{'kv_format':<12}{'q_dtype':<9}{'profile':<10}{'rows':>5}{'mean|dlogit|':>13}{'KL':>12}"
          f"{'top-1':>9}{'bits/B':>9}{'float32':>9}")
    rows = []
    with ServerProcess(str(args.server), [f"--backend={args.backend}"]) as server, \
            mla_client.Client.connect(server.target, transport="inline") as client:
        for row in measure(client, trained.load(), all_windows[chosen].astype(np.int64),
                           lambda kv_format, q_dtype: (is_in(kv_format, args.kv_format)
                                                       and is_in(q_dtype, args.q_dtype)),
                           args.fp8_compute):
            show(row)
            rows.append(row)
    if not rows:
        parser.error("the server offers none of the named modes")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
