"""Compares a benchmark of this tree with the same benchmark at another commit.

    ./dev bench NAME --against COMMIT [--pairs N] [--bound B] [--json FILE] [-- ARGUMENT...]
    compare.py NAME --old PROGRAM --new PROGRAM [--text] ...      (programs that are built already)

Both are built with the same options, COMMIT in a worktree of its own below build/against, with one
disk cache for both. Then N pairs (at least 9) run, and the order within a pair alternates, so that
disturbances and drift of the machine affect both equally. ARGUMENTs go to both programs.

A ratio compares the two runs of one pair and is oriented so that more is better: old / new where
less is better (times), new / old where more is better (rates), (old + 1) / (new + 1) for counts,
which may be zero. A row's figure is the median of its ratios. Its interval is made of order
statistics: it holds the true median with a probability of 95 % or more, whatever the distribution.

The last line is the verdict. A row whose median is below the bound (0.97) and whose interval ends
below it is `slower`; one whose interval reaches above the bound is `unclear`: run more pairs. The
exit status is 0 when there is neither. Metrics that are too noisy to judge by (tails, rates of
touched memory) are printed and marked `info`.

--text: rows are the lines `LABEL: NUMBER us` of a program that writes no JSON.
"""

import argparse
import dataclasses
import enum
import json
import math
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEAST_PAIRS = 9  # with fewer pairs, the interval is the whole range
CONFIDENCE = 0.95
BOUND = 0.97


class Better(enum.Enum):
    """Which way a metric improves."""
    LESS = "less"
    MORE = "more"
    COUNT = "count"  # less, and may be zero


@dataclasses.dataclass(frozen=True)
class Metric:
    better: Better
    judged: bool  # part of the verdict


METRICS = {
    "us": Metric(Better.LESS, True),
    "launch_us": Metric(Better.LESS, False),
    "device_launch_us": Metric(Better.LESS, False),
    "p50_us": Metric(Better.LESS, True),
    "p99_us": Metric(Better.LESS, False),
    "token_ms": Metric(Better.LESS, True),
    "gbps": Metric(Better.MORE, False),
    "gbps_wide": Metric(Better.MORE, False),
    "copied_bytes": Metric(Better.COUNT, True),
    "launch_bytes": Metric(Better.COUNT, True),
    "given_up_bytes": Metric(Better.COUNT, True),
    "allocations": Metric(Better.COUNT, True),
    "imbalance": Metric(Better.LESS, True),
    "light_p50_us": Metric(Better.LESS, True),
    "light_p99_us": Metric(Better.LESS, False),
    "light_failures": Metric(Better.COUNT, True),
    "longest_launch_ms": Metric(Better.LESS, False),
    "up_projection_us": Metric(Better.LESS, True),
    "attention_us": Metric(Better.LESS, True),
    "attend_us": Metric(Better.LESS, False),
    "kernel_us": Metric(Better.LESS, False),
    "round_trip_us": Metric(Better.LESS, False),
    "bytes_a_token": Metric(Better.LESS, True),
    "steps": Metric(Better.COUNT, True),
    "copies": Metric(Better.COUNT, True),
    "sleeps": Metric(Better.COUNT, True),
    "logits_us": Metric(Better.LESS, True),
    "choice_us": Metric(Better.LESS, True),
    "key_gbps": Metric(Better.MORE, False),
    "gb_per_s": Metric(Better.MORE, False),
    "processor_s_a_gb": Metric(Better.LESS, True),
    "client_polling_us": Metric(Better.LESS, False),
    "overhead_us": Metric(Better.LESS, False),
    "probe_us": Metric(Better.LESS, False),
    "probes_us": Metric(Better.LESS, False),
    "expanded_us": Metric(Better.LESS, True),
    "projected_us": Metric(Better.LESS, True),
    "queries_us": Metric(Better.LESS, True),
    "absorb_us": Metric(Better.LESS, False),
    "project_us": Metric(Better.LESS, False),
    "hiddens_us": Metric(Better.LESS, True),
    "more_us": Metric(Better.LESS, False),
    "token_bytes": Metric(Better.COUNT, False),
    "tokens_a_second": Metric(Better.MORE, False),
    "tokens_a_second_in_turns": Metric(Better.MORE, False),
    "launch_polling_us": Metric(Better.LESS, False),
    "rows_per_s": Metric(Better.MORE, True),
    "layer_us": Metric(Better.LESS, False),
}
# Figures that name a row, references that are measured together with the product, and figures that
# follow from other metrics.
ROW_NUMBERS = {
    "threads", "heads", "batch", "context", "rows", "query_rows", "ragged", "groups",
    "layers", "top_k", "nope", "v", "streams"}
NOT_COMPARED = {
    "bare_us", "gemm_only_us", "ratio", "onednn_scaling", "gflops", "over_us", "p99_ratio",
    "speedup", "of_dense", "of_peak", "least_us", "touch_us", "tflops",
    "light_alone_p50_us", "light_alone_p99_us", "light_begin_p99_us", "light_attends", "launch_ms",
    "of_bound", "flood_requests", "flood_refusals", "clients_cores", "server_cores", "held",
    "merged_tiles", "whole_group_bytes", "groups_apart", "step_us", "one_us", "one_p99_us",
    "floor_us", "read_us", "operations_us", "of_one", "peer", "peer_us", "of_peer", "runs", "error",
    "messages"}
NOT_NAMES = {"bench", "first_failure", "peer"}  # texts that do not name a row
# These values do not name a row either, because older programs leave them out.
DEFAULTS = {("kv", "bf16"), ("compute", "bf16"), ("nope", 128), ("v", 128)}


class CompareError(Exception):
    """A message for the user instead of a comparison."""


# --------------------------------------------------------------------------------- Statistics

def interval_rank(count, confidence=CONFIDENCE):
    """Returns (rank, coverage). The interval from the rank-th smallest to the rank-th largest of
    `count` values is the narrowest that contains the distribution's median with at least the given
    probability. Rank 1 is the whole range."""
    coverage, rank, below = 0.0, 0, 0.0
    while rank < (count + 1) // 2:
        # The median is outside if fewer than rank + 1 values lie on one side of it.
        below += math.comb(count, rank) / 2**count
        if rank > 0 and 1 - 2 * below < confidence:
            break
        coverage, rank = 1 - 2 * below, rank + 1
    return rank, coverage


def ratio(better, old, new):
    """Returns how much better the new figure is (1: equal), or None if no ratio exists."""
    if better is Better.COUNT:
        return (old + 1) / (new + 1)
    if old <= 0 or new <= 0:
        return 1.0 if old == new else None
    return new / old if better is Better.MORE else old / new


@dataclasses.dataclass(frozen=True)
class Judged:
    """One metric of one row over all pairs."""
    row: str
    metric: str
    better: str
    old: float  # medians
    new: float
    ratio: float
    low: float
    high: float
    verdict: str  # "ok", "slower", "unclear", "info"


def judge(row, metric, pairs, bound):
    """Makes a row from the (old, new) figures of each pair."""
    kind = METRICS[metric]
    ratios = sorted(ratio(kind.better, old, new) for old, new in pairs)
    rank, _ = interval_rank(len(ratios))
    median, low, high = statistics.median(ratios), ratios[rank - 1], ratios[-rank]
    if not kind.judged:
        verdict = "info"
    elif median >= bound:
        verdict = "ok"
    else:
        verdict = "slower" if high < bound else "unclear"
    return Judged(row, metric, kind.better.value, statistics.median(old for old, _ in pairs),
                  statistics.median(new for _, new in pairs), median, low, high, verdict)


# --------------------------------------------------------------------------------------- Rows

def rows_of(report):
    """{row: {metric: figure}} of a benchmark's JSON rows."""
    rows = {}
    for entry in report:
        names, figures = [], {}
        for key, value in entry.items():
            if isinstance(value, str):
                if key not in NOT_NAMES and (key, value) not in DEFAULTS:
                    names.append(value)
            elif key in ROW_NUMBERS:
                if (key, value) not in DEFAULTS:
                    names.append(f"{key} {value}")
            elif key in METRICS:
                figures[key] = float(value)
            elif key not in NOT_COMPARED:
                raise CompareError(f"metric {key}: compare.py does not know which way it improves; "
                                   "add it to METRICS or NOT_COMPARED")
        name, again = ", ".join(names), 1
        while (name if again == 1 else f"{name} #{again}") in rows:
            again += 1
        rows[name if again == 1 else f"{name} #{again}"] = figures
    return rows


def rows_of_text(text):
    """The same of lines `LABEL: NUMBER us`."""
    found = re.findall(r"^(.+?): (\d+(?:\.\d+)?) us\b", text, re.M)
    return rows_of([{"shape": label, "us": float(number)} for label, number in found])


def compare(old_runs, new_runs, bound):
    """Returns (judged rows, rows that only one side has) from the rows of each run, pair by pair.
    """
    shared = [name for name in new_runs[0]
              if all(name in run for run in [*old_runs, *new_runs])]
    everywhere = {name for run in [*old_runs, *new_runs] for name in run}
    judged = []
    for name in shared:
        for metric in new_runs[0][name]:
            if not all(metric in run[name] for run in [*old_runs, *new_runs]):
                continue
            pairs = [(old[name][metric], new[name][metric])
                     for old, new in zip(old_runs, new_runs)]
            if all(ratio(METRICS[metric].better, *pair) is not None for pair in pairs):
                judged.append(judge(name, metric, pairs, bound))
    return judged, sorted(everywhere - set(shared))


# ----------------------------------------------------------------------------------- Programs

@dataclasses.dataclass(frozen=True)
class Program:
    """A built benchmark: the program to start, its folder, and its name in the report."""
    path: pathlib.Path
    folder: pathlib.Path
    name: str

    def run(self, arguments, text):
        """One run's rows."""
        with tempfile.TemporaryDirectory(prefix="mla-compare-") as scratch:
            report = pathlib.Path(scratch) / "rows.json"
            command = [str(self.path), *([] if text else [f"--json={report}"]), *arguments]
            result = subprocess.run(command, cwd=self.folder, stdin=subprocess.DEVNULL,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                    errors="replace", check=False)
            if result.returncode != 0:
                raise CompareError(f"{self.name} ended with {result.returncode}:\n"
                                   f"{result.stdout[-2000:]}")
            try:
                rows = (rows_of_text(result.stdout) if text
                        else rows_of(json.loads(report.read_text(encoding="utf-8"))))
            except (OSError, ValueError) as error:
                raise CompareError(f"{self.name} wrote no rows: {error}") from error
            if not rows:
                raise CompareError(f"{self.name} printed no rows")
            return rows


def output_of(*command, cwd):
    """Returns a command's output. Raises CompareError if it fails."""
    result = subprocess.run([str(part) for part in command], cwd=cwd, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise CompareError(f"{command[0]} {command[1]} in {cwd}: {result.stderr.strip()[-2000:]}")
    return result.stdout.strip()


def worktree_of(commit):
    """Returns (folder, full hash) of a tree at that commit, which is made once."""
    full = output_of("git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}", cwd=ROOT)
    folder = ROOT / "build/against" / full[:12]
    if not (folder / "WORKSPACE").exists():
        shutil.rmtree(folder, ignore_errors=True)
        output_of("git", "worktree", "prune", cwd=ROOT)
        output_of("git", "worktree", "add", "--detach", "--force", folder, full, cwd=ROOT)
    if (ROOT / ".bazelrc.user").exists():
        shutil.copy(ROOT / ".bazelrc.user", folder)
    return folder, full


def build(name, folder, side, scratch):
    """Builds NAME_benchmark in a tree; `side` is old or new."""
    print(f"compare: building {side} in {folder}", file=sys.stderr, flush=True)
    targets = output_of("bazel", "query", "--noshow_progress",
                        f"attr(name, '^{name}_benchmark$', //...)", cwd=folder).split()
    if len(targets) != 1:
        raise CompareError(f"no benchmark '{name}' in {folder}" if not targets
                           else f"'{name}' is several: {' '.join(targets)}")
    user = ROOT / ".bazelrc.user"
    shared = [] if user.exists() and "--disk_cache" in user.read_text() else [
        f"--disk_cache={ROOT / 'build/against/cache'}"]
    subprocess.run(["bazel", "build", "--config=opt", *shared, targets[0]], cwd=folder, check=True,
                   stdin=subprocess.DEVNULL)
    stubs = folder / "client/python/generate_stubs.py"
    if stubs.exists():
        output_of(sys.executable, stubs, "--quiet", cwd=folder)
    # Copies the program, because a build during the measurement must not change it.
    outputs = output_of("bazel", "info", "--config=opt", "bazel-bin", cwd=folder)
    copy = scratch / f"{side}_{name}"
    shutil.copy(pathlib.Path(outputs) / targets[0][2:].replace(":", "/"), copy)
    if folder != ROOT:
        output_of("bazel", "shutdown", cwd=folder)  # one more JVM would disturb the measurement
    return Program(copy, folder, side)


# ------------------------------------------------------------------------------------- Report

def show(judged, lonely, pairs, bound, name):
    """Prints the table and the verdict. Returns true if no row is slower or unclear."""
    width = max([len(entry.row) for entry in judged] + [3])
    print(f"{'row':<{width}} {'metric':<13} {'better':<6} {'old':>11} {'new':>11} {'ratio':>7} "
          f"{'interval':>17}  verdict")
    for entry in judged:
        print(f"{entry.row:<{width}} {entry.metric:<13} {entry.better:<6} {entry.old:>11.2f} "
              f"{entry.new:>11.2f} {entry.ratio:>7.3f} [{entry.low:>7.3f},{entry.high:>7.3f}]  "
              f"{entry.verdict}")
    for row in lonely:
        print(f"{row}: in one of the two only, not compared")
    rank, coverage = interval_rank(pairs)
    print(f"ratios above 1 are better; intervals: order statistics {rank} and {pairs + 1 - rank} "
          f"of {pairs}, {coverage:.1%}")
    counts = {verdict: sum(entry.verdict == verdict for entry in judged)
              for verdict in ("ok", "slower", "unclear")}
    worst = min((entry for entry in judged if entry.verdict != "info"), key=lambda e: e.ratio)
    slower = counts["slower"] + counts["unclear"] > 0
    verdict = ("SLOWER" if counts["slower"] else "UNCLEAR") if slower else "NOT SLOWER"
    print(f"{name}: {verdict}: {counts['ok']} ok, {counts['slower']} slower, "
          f"{counts['unclear']} unclear at {bound:g}; worst {worst.ratio:.3f} "
          f"[{worst.low:.3f}, {worst.high:.3f}] ({worst.row}, {worst.metric})")
    return not slower


def measure(old, new, args):
    """Runs all pairs and returns the rows of each side's runs."""
    runs = {old.name: [], new.name: []}
    for pair in range(args.pairs):
        order = (old, new) if pair % 2 == 0 else (new, old)
        begin = time.monotonic()
        for program in order:
            runs[program.name].append(program.run(args.arguments, args.text))
        print(f"compare: pair {pair + 1} of {args.pairs}, {time.monotonic() - begin:.1f} s",
              file=sys.stderr, flush=True)
    return runs[old.name], runs[new.name]


def parse(argv):
    """Parses the command line. Arguments after `--` are for the programs."""
    own, arguments = argv, []
    if "--" in argv:
        own, arguments = argv[:argv.index("--")], argv[argv.index("--") + 1:]
    parser = argparse.ArgumentParser(prog="bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--old", type=pathlib.Path, metavar="PROGRAM")
    parser.add_argument("--new", type=pathlib.Path, metavar="PROGRAM")
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS, metavar="N")
    parser.add_argument("--bound", type=float, default=BOUND, metavar="B")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--text", action="store_true")
    args = parser.parse_args(own)
    args.arguments = arguments
    if args.pairs < LEAST_PAIRS:
        parser.error(f"--pairs: got {args.pairs}, must be at least {LEAST_PAIRS}")
    if not 0 < args.bound <= 1:
        parser.error(f"--bound: got {args.bound}, must be above 0 and at most 1")
    if (args.against is None) == (args.old is None) or (args.old is None) != (args.new is None):
        parser.error("either --against, or --old and --new")
    return args


def programs(args, scratch):
    """Returns both programs, and builds them first if needed."""
    if args.against is None:
        return tuple(Program(path.resolve(), ROOT, side)
                     for side, path in (("old", args.old), ("new", args.new))), ("old", "new")
    folder, full = worktree_of(args.against)
    head = output_of("git", "rev-parse", "HEAD", cwd=ROOT)
    if output_of("git", "status", "--porcelain", "--untracked-files=no", cwd=ROOT):
        head += " and changes"
    return (build(args.name, folder, "old", scratch),
            build(args.name, ROOT, "new", scratch)), (full, head)


def main(argv):
    args = parse(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="mla-compare-") as scratch:
            (old, new), commits = programs(args, pathlib.Path(scratch))
            print(f"old: {commits[0]}\nnew: {commits[1]}", flush=True)
            old_runs, new_runs = measure(old, new, args)
        judged, lonely = compare(old_runs, new_runs, args.bound)
        if not any(entry.verdict != "info" for entry in judged):
            raise CompareError("no row and metric that both have can be judged")
    except (CompareError, subprocess.CalledProcessError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    well = show(judged, lonely, args.pairs, args.bound, args.name)
    if args.json:
        rows = [{"bench": args.name, **dataclasses.asdict(entry), "pairs": args.pairs,
                 "old_commit": commits[0], "new_commit": commits[1]} for entry in judged]
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
