"""The comparison of two commits' benchmarks is right: statistics, pairing, verdict, exit status."""

import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests/bench/compare.py"
sys.path.insert(0, str(SCRIPT.parent))

import compare  # pylint: disable=wrong-import-position

INPUTS = ("tests/bench",)

# Prints one row whose figure comes from a list, one per run, and notes that it ran.
PROGRAM = """#!{python} -SE
import json, pathlib, sys
state = pathlib.Path({state!r})
ran = state.read_text().split() if state.exists() else []
state.write_text(" ".join(ran + [{side!r}]))
figures = {figures!r}
us = figures[ran.count({side!r}) % len(figures)]
arguments = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
rows = [{{"bench": "fake", "shape": "a", "threads": 2, "us": us, "gflops": 5.0 / us,
         "p99_us": 3 * us}}]
{more}
if "--json" in arguments:
    pathlib.Path(arguments["--json"]).write_text(json.dumps(rows))
print("h=16 b=1: %.1f us (least 0.5) " % us, "words " + " ".join(sys.argv[1:]))
sys.exit({status})
"""


class StatisticsTest(unittest.TestCase):
    def test_ranks_are_those_of_the_tables(self):
        """Values of the sign test at 95 %: n, rank, coverage."""
        for count, rank, coverage in ((6, 1, 0.96875), (8, 1, 0.9921875), (9, 2, 0.9609375),
                                      (10, 2, 0.978515625), (12, 3, 0.9614), (20, 6, 0.9586),
                                      (25, 8, 0.9567)):
            got = compare.interval_rank(count)
            self.assertEqual(got[0], rank, count)
            self.assertAlmostEqual(got[1], coverage, 4)

    def test_intervals_hold_the_median_as_often_as_they_say(self):
        """10,000 samples of a skewed distribution whose median is ln 2."""
        source = random.Random(1)
        rank, coverage = compare.interval_rank(9)
        held = 0
        for _ in range(10_000):
            values = sorted(source.expovariate(1.0) for _ in range(9))
            held += values[rank - 1] <= 0.6931471805599453 <= values[-rank]
        self.assertAlmostEqual(held / 10_000, coverage, delta=0.01)

    def test_ratios_above_one_are_better(self):
        less, more, count = (compare.Better.LESS, compare.Better.MORE, compare.Better.COUNT)
        self.assertEqual(compare.ratio(less, 10.0, 5.0), 2.0)
        self.assertEqual(compare.ratio(more, 10.0, 5.0), 0.5)
        self.assertEqual(compare.ratio(count, 0, 0), 1.0)
        self.assertEqual(compare.ratio(count, 0, 1), 0.5)
        self.assertEqual(compare.ratio(count, 1, 0), 2.0)
        self.assertEqual(compare.ratio(less, 0.0, 0.0), 1.0)
        self.assertIsNone(compare.ratio(less, 0.0, 1.0))

    def verdict(self, ratios, metric="us"):
        return compare.judge("row", metric, [(1.0, 1 / ratio) for ratio in ratios], 0.97)

    def test_verdicts(self):
        same = self.verdict([0.98, 0.99, 1.0, 1.0, 1.0, 1.01, 1.02, 0.97, 1.03])
        self.assertEqual((same.verdict, same.ratio), ("ok", 1.0))
        self.assertAlmostEqual(same.low, 0.98)
        self.assertAlmostEqual(same.high, 1.02)
        self.assertEqual(self.verdict([0.9] * 9).verdict, "slower")
        self.assertEqual(self.verdict([0.9] * 8 + [1.2]).verdict, "slower")
        self.assertEqual(self.verdict([0.9] * 7 + [1.2] * 2).verdict, "unclear")
        self.assertEqual(self.verdict([0.975] * 5 + [0.5] * 4).verdict, "ok")
        self.assertEqual(self.verdict([0.5] * 9, "p99_us").verdict, "info")


class RowsTest(unittest.TestCase):
    def test_names_and_repeats(self):
        rows = compare.rows_of([
            {"bench": "b", "path": "ring", "shape": "X-1", "threads": 4, "us": 1, "ratio": 9},
            {"bench": "b", "path": "ring", "shape": "X-1", "threads": 4, "us": 2}])
        self.assertEqual(rows, {"ring, X-1, threads 4": {"us": 1.0},
                                "ring, X-1, threads 4 #2": {"us": 2.0}})

    def test_the_default_format_does_not_name_a_row(self):
        older = compare.rows_of([{"bench": "b", "shape": "X", "us": 1}])
        newer = compare.rows_of([{"bench": "b", "shape": "X", "kv": "bf16", "us": 1},
                                 {"bench": "b", "shape": "X", "kv": "fp8_row", "us": 1}])
        self.assertEqual(set(newer) - set(older), {"X, fp8_row"})

    def test_default_dims_do_not_name_a_row(self):
        older = compare.rows_of([{"bench": "b", "shape": "X", "us": 1}])
        newer = compare.rows_of([{"bench": "b", "shape": "X", "nope": 128, "v": 128, "us": 1},
                                 {"bench": "b", "shape": "X", "nope": 192, "v": 256, "us": 1}])
        self.assertEqual(set(newer) - set(older), {"X, nope 192, v 256"})

    def test_an_unknown_metric_is_refused(self):
        with self.assertRaisesRegex(compare.CompareError, "metric speed"):
            compare.rows_of([{"shape": "a", "speed": 1.0}])

    def test_every_metric_of_the_benchmarks_is_known(self):
        known = set(compare.METRICS) | compare.ROW_NUMBERS | compare.NOT_COMPARED
        names = set()
        for path in (ROOT / "tests/bench").rglob("*.cc"):
            # A number follows: "name": << or "name": %
            names |= set(re.findall(r'\\?"(\w+)\\?": (?:" <<|\)" <<|%)', path.read_text()))
        self.assertGreater(len(names), 12)
        self.assertEqual(names - known - {"bench", "path", "shape"}, set())

    def test_text_rows(self):
        self.assertEqual(compare.rows_of_text("words\nh=16 b=1: 12.5 us (least 3.0)\nx: 4 us\n"),
                         {"h=16 b=1": {"us": 12.5}, "x": {"us": 4.0}})


class ProgramsTest(unittest.TestCase):
    """Runs the script with programs whose figures are known."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.state = self.folder / "ran"

    def program(self, side, figures, more="", status=0):
        path = self.folder / side
        path.write_text(PROGRAM.format(python=sys.executable, state=str(self.state), side=side,
                                       figures=figures, more=more, status=status))
        path.chmod(0o755)
        return path

    def compare(self, *arguments):
        return subprocess.run(
            [sys.executable, str(SCRIPT), "fake", f"--old={self.folder}/old",
             f"--new={self.folder}/new", *arguments], capture_output=True, text=True,
            stdin=subprocess.DEVNULL, check=False)

    def test_pairs_alternate_and_change_places(self):
        self.program("old", [10.0])
        self.program("new", [10.0])
        result = self.compare("--pairs=9")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.state.read_text(), "old new new old " * 4 + "old new")

    def test_drift_that_hits_both_alike_is_no_difference(self):
        """Figures double from pair to pair, so medians of each side alone would show nothing."""
        drift = [2.0**i for i in range(9)]
        self.program("old", drift)
        self.program("new", [1.01 * figure for figure in drift])
        result = self.compare("--json", str(self.folder / "out.json"))
        self.assertEqual(result.returncode, 0, result.stderr)
        rows = {row["metric"]: row for row in json.loads((self.folder / "out.json").read_text())}
        self.assertEqual(set(rows), {"us", "p99_us"})
        self.assertAlmostEqual(rows["us"]["ratio"], 1 / 1.01)
        self.assertAlmostEqual(rows["us"]["low"], rows["us"]["high"])
        self.assertEqual((rows["us"]["verdict"], rows["p99_us"]["verdict"]), ("ok", "info"))
        self.assertEqual((rows["us"]["row"], rows["us"]["pairs"], rows["us"]["better"]),
                         ("a, threads 2", 9, "less"))
        self.assertRegex(result.stdout.splitlines()[-1], r"^fake: NOT SLOWER: 1 ok, 0 slower, 0 ")

    def test_a_slower_program_fails(self):
        self.program("old", [10.0, 10.1, 9.9])
        self.program("new", [11.0, 11.1, 10.9])
        result = self.compare()
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertRegex(result.stdout.splitlines()[-1], "^fake: SLOWER: 0 ok, 1 slower, 0 ")

    def test_noise_is_not_a_verdict(self):
        self.program("old", [10.0])
        self.program("new", [12.0, 8.0, 12.0])
        result = self.compare()
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertRegex(result.stdout.splitlines()[-1], "^fake: UNCLEAR: 0 ok, 0 slower, 1 ")

    def test_rows_of_one_side_only(self):
        self.program("old", [10.0], "rows.append({'bench': 'fake', 'shape': 'gone', 'us': 1})")
        self.program("new", [10.0], "rows.append({'bench': 'fake', 'shape': 'made', 'us': 1})")
        result = self.compare()
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("gone: in one of the two only", result.stdout)
        self.assertIn("made: in one of the two only", result.stdout)

    def test_arguments_and_text(self):
        self.program("old", [10.0])
        self.program("new", [5.0])
        result = self.compare("--text", "--", "--shapes", "b")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stdout, r"h=16 b=1 +us +less +10\.00 +5\.00 +2\.000")

    def test_a_program_that_fails_is_no_comparison(self):
        self.program("old", [10.0])
        self.program("new", [10.0], status=3)
        result = self.compare()
        self.assertEqual(result.returncode, 2)
        self.assertIn("new ended with 3", result.stderr)
        self.program("new", [10.0], "rows = []")
        self.assertIn("printed no rows", self.compare().stderr)

    def test_wrong_use(self):
        for arguments, words in ((["--pairs=8"], "at least 9"), (["--bound=1.5"], "at most 1"),
                                 (["--against=HEAD"], "either --against")):
            result = self.compare(*arguments)
            self.assertEqual(result.returncode, 2)
            self.assertIn(words, result.stderr)


class BuildTest(unittest.TestCase):
    """Runs --against with a fake bazel in a repository of two commits. The older dev script has no
    --against."""

    BAZEL = """#!{python} -SE
import pathlib, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(pathlib.Path.cwd().name + " " + " ".join(words) + "\\n")
if words[0] == "query":
    print("//bench:fake_benchmark")
elif words[0] == "info":
    print(pathlib.Path.cwd() / "out")
elif words[0] == "build":
    target = pathlib.Path("out/bench/fake_benchmark")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(pathlib.Path("fake.py").read_bytes())
    target.chmod(0o755)
"""

    def git(self, *arguments):
        return subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments],
                              cwd=self.root, check=True, capture_output=True, text=True).stdout

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        folder = pathlib.Path(scratch.name)
        self.root, self.log = folder / "repository", folder / "log"
        (self.root / "tests/bench").mkdir(parents=True)
        (folder / "bin").mkdir()
        bazel = folder / "bin/bazel"
        bazel.write_text(self.BAZEL.format(python=sys.executable, log=str(self.log)))
        bazel.chmod(0o755)
        self.path = f"{bazel.parent}:/usr/bin:/bin"
        (self.root / "WORKSPACE").write_text("")
        (self.root / ".gitignore").write_text("/build/\n/out/\n")
        self.commit(20.0)
        self.old = self.git("rev-parse", "HEAD").strip()
        (self.root / "tests/bench/compare.py").write_text(SCRIPT.read_text())
        self.commit(10.0)

    def commit(self, us):
        (self.root / "fake.py").write_text(PROGRAM.format(
            python=sys.executable, state="/dev/null", side="x", figures=[us], more="", status=0))
        if not (self.root / ".git").exists():
            self.git("init", "--quiet")
        self.git("add", "-A")
        self.git("commit", "--quiet", "-m", "change")

    def bench(self, *arguments):
        return subprocess.run(
            [sys.executable, str(self.root / "tests/bench/compare.py"), "fake", *arguments],
            capture_output=True, text=True, stdin=subprocess.DEVNULL, env={"PATH": self.path},
            check=False)

    def test_both_commits_are_built_and_run(self):
        for _ in range(2):  # the second time the worktree is there
            result = self.bench(f"--against={self.old[:10]}")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(f"old: {self.old}\n", result.stdout)
            self.assertRegex(result.stdout, r"a, threads 2 +us +less +20\.00 +10\.00 +2\.000")
        log = self.log.read_text()
        self.assertIn(f"{self.old[:12]} shutdown\n", log)
        caches = set(re.findall(r"build --config=opt (--disk_cache=\S+) //bench", log))
        self.assertEqual(caches, {f"--disk_cache={self.root.resolve()}/build/against/cache"})
        self.assertEqual(self.git("status", "--porcelain"), "")

    def test_changes_that_are_not_committed_are_named(self):
        (self.root / "WORKSPACE").write_text("# changed\n")
        self.assertIn(" and changes\n", self.bench("--against", self.old).stdout)

    def test_settings_of_the_user_hold_in_both(self):
        (self.root / ".bazelrc.user").write_text("build --disk_cache=/somewhere\n")
        self.assertEqual(self.bench("--against", self.old).returncode, 0)
        self.assertNotIn("--disk_cache", self.log.read_text())
        copy = self.root / "build/against" / self.old[:12] / ".bazelrc.user"
        self.assertEqual(copy.read_text(), "build --disk_cache=/somewhere\n")

    def test_no_such_commit(self):
        result = self.bench("--against=nosuch")
        self.assertEqual(result.returncode, 2)
        self.assertIn("compare: git rev-parse", result.stderr)


if __name__ == "__main__":
    unittest.main()
