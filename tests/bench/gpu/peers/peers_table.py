"""Prints the table of docs/benchmarks/gpu/decode.md that compares decode with the peers.

    peers_table.py [--date YYYY-MM-DD --commit COMMIT]

Reads docs/benchmarks/gpu/peers.jsonl, a row a shape and round of a run:

    {"date", "commit", "round", "kv", "heads", "batch", "context", "us", "launch_us",
     "device_launch_us", "peer", "peer_us", "of_peer"}

Times are in us. `peer` is the fastest one of that round, `of_peer` its time divided by ours. The
table has medians of the rounds of one run, the newest unless another is named, and the peer that
was the fastest most often.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import statistics
from typing import Any, Dict, List, Optional, Sequence, Tuple

ROOT = pathlib.Path(__file__).resolve().parents[4]
ROWS = ROOT / "docs/benchmarks/gpu/peers.jsonl"
LATENT, ROPE = 512, 64
ROW_BYTES = (LATENT + ROPE) * 2
FLOP_A_ROW_AND_HEAD = 2 * (LATENT + ROPE + LATENT)  # scores, then values
MET = 0.995  # a ratio that is printed as 1.00
PEERS = (("flashmla", "FlashMLA"), ("flashinfer", "FlashInfer"),
         ("flashattention3", "FlashAttention-3"))  # how names begin: there are forms of each


def dense_rows() -> List[Dict[str, Any]]:
    """The rows of dense attention over bf16, one query row a request."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows
            if row["kv"] == "bf16" and "top_k" not in row and "query_rows" not in row]


def newest(rows: Sequence[Dict[str, Any]]) -> Tuple[str, Optional[str]]:
    """Date and commit of the newest run. Rows are appended, so the last one of a day is."""
    date = max(row["date"] for row in rows)
    return date, [row.get("commit") for row in rows if row["date"] == date][-1]


def name_of(rows: Sequence[Dict[str, Any]]) -> str:
    """The peer that was the fastest most often."""
    key = collections.Counter(row["peer"] for row in rows).most_common(1)[0][0]
    return next(name for begin, name in PEERS if key.startswith(begin))


def table(date: str, commit: Optional[str]) -> List[str]:
    """The lines of the table: the head, then a line a shape."""
    groups: Dict[Tuple[int, int, int], List[Dict[str, Any]]] = collections.defaultdict(list)
    for row in dense_rows():
        if (row["date"], row.get("commit")) == (date, commit):
            groups[row["heads"], row["batch"], row["context"]].append(row)
    lines = ["| heads | batch | context | kernels, us | TB/s | TFLOPS | launch, host | "
             "launch, device | best peer, us | speed of the peer's |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for (heads, batch, context), rows in sorted(groups.items()):
        us, host, device, peer, ratio = (
            statistics.median(row[key] for row in rows)
            for key in ("us", "launch_us", "device_launch_us", "peer_us", "of_peer"))
        kv_rows = batch * context
        lines.append(
            f"| {heads} | {batch} | {context} | {us:.1f} | {kv_rows * ROW_BYTES / us * 1e-6:.2f} "
            f"| {kv_rows * heads * FLOP_A_ROW_AND_HEAD / us * 1e-6:.0f} | {host:.1f} "
            f"| {device:.1f} | {peer:.1f} {name_of(rows)} | {ratio:.2f} |")
    return lines


def reached(lines: Sequence[str]) -> int:
    """How many rows of a table reach 1.00."""
    return sum(float(line.split("|")[-2]) >= MET for line in lines[2:])


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date")
    parser.add_argument("--commit")
    args = parser.parse_args(arguments)
    run = (args.date, args.commit) if args.date else newest(dense_rows())
    lines = table(*run)
    if len(lines) == 2:
        raise SystemExit(f"peers_table: {ROWS.name} has no rows of {run[0]}, commit {run[1]}")
    print("\n".join(lines))
    print(f"{reached(lines)} of {len(lines) - 2} rows reach 1.00")


if __name__ == "__main__":
    main()
