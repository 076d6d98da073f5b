"""mlactl-plot: what it draws of the reports of `mlactl bench`, and what it refuses."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "client/mlactl/bench/mlactl_plot.py"
sys.path.insert(0, str(PROGRAM.parent))
INPUTS = ("client/mlactl/agents/scene_report.cc", "client/mlactl/bench/mlactl_plot.py",
          "tests/bench/test_mlactl_plot.py")

# pylint: disable=wrong-import-position
import mlactl_plot

SVG = "{http://www.w3.org/2000/svg}"


def run_of(name, curve, series):
    """A run of a report: its curve as (quantile, us), its series as (s, steps/s, p99 in us)."""
    return {"name": name, "step_curve": curve,
            "series": [{"at_s": at_s, "steps_per_s": rate, "p99_us": p99}
                       for at_s, rate, p99 in series]}


def bench_report(*runs):
    """A report of decode steps."""
    return {"format": "mlactl-bench", "version": 1, "model": {"num_heads": 16, "layers": 2},
            "runs": list(runs)}


def turn(conversation, found_rows, first_ms, branch=False):
    """A turn of 100 rows."""
    return {"conversation": conversation, "branch": branch, "input_rows": 100,
            "found_rows": found_rows, "first_ms": first_ms}


def scene_report(*turns):
    """A report of a scene."""
    return {"format": "mlactl-agents", "version": 1, "scene": "agents", "hit_rate": 0.5,
            "model": {"num_heads": 4, "layers": 4}, "turns": list(turns)}


class PlotTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()  # pylint: disable=consider-using-with
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def plot(self, *arguments, text=""):
        """Runs the program."""
        return subprocess.run([sys.executable, PROGRAM, *map(str, arguments)], input=text,
                              capture_output=True, text=True, check=False)

    def texts(self, path):
        """All texts of an SVG."""
        root = xml.etree.ElementTree.parse(path).getroot()
        return ["".join(element.itertext()) for element in root.iter(SVG + "text")]

    def test_runs_are_drawn_with_names_as_they_are(self):
        report = bench_report(
            run_of("shm <b> & $x$", [[0.0, 90], [0.9, 200], [0.99, 300], [1.0, 900]],
                   [(0.5, 100, 300), (1.0, 120, 0)]),
            run_of("ring", [[1.0, 80]], []))
        picture = self.folder / "wire.svg"
        done = self.plot("-", picture, text=json.dumps(report))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        texts = self.texts(picture)
        self.assertEqual(texts.count("shm <b> & $x$"), 3)
        self.assertEqual(texts.count("ring"), 3)
        for text in ("mlactl bench: 16 heads, 2 layers", "Throughput over time", "99 %", "100"):
            self.assertIn(text, texts)
        again = self.folder / "again.svg"
        saved = self.folder / "report.json"
        saved.write_text(json.dumps(report), encoding="utf-8")
        self.assertEqual(self.plot(saved, again).returncode, 0)
        self.assertEqual(picture.read_bytes(), again.read_bytes())

    def test_percentiles_are_placed_by_nines(self):
        for quantile, place in ((0.0, 0), (0.9, 1), (0.99, 2), (0.9999, 4)):
            self.assertAlmostEqual(mlactl_plot.nines(quantile), place, places=6)
        title, charts = mlactl_plot.bench_charts(bench_report(
            run_of("a", [[0.0, 1], [0.99, 2], [1.0, 3]], [])))
        self.assertEqual(title, "mlactl bench: 16 heads, 2 layers")
        self.assertEqual([chart.percentiles for chart in charts], [True, False, False])
        self.assertEqual(mlactl_plot.last_nine(charts[0]), 2)

    def test_times_of_windows_without_steps_are_left_out(self):
        _, (_, rate, tail) = mlactl_plot.bench_charts(bench_report(
            run_of("a", [[1.0, 3]], [(1, 10, 50), (2, 0, 0)])))
        self.assertEqual(rate.lines[0].points, [(1, 10), (2, 0)])
        self.assertEqual(tail.lines[0].points, [(1, 50)])

    def test_scenes_by_number_of_the_turn_and_by_class(self):
        title, (found, first, curve) = mlactl_plot.scene_charts(scene_report(
            turn(7, 0, 40), turn(8, 20, 30), turn(7, 96, 5), turn(7, 100, 1, branch=True),
            turn(8, 80, 9)))
        self.assertEqual(title, "mlactl bench --scene=agents: 4 heads, 4 layers, "
                                "50.0 % of the rows found")
        self.assertEqual(found.lines[0].points, [(1, 10), (2, 88)])
        self.assertEqual([line.points for line in first.lines], [[(1, 30), (2, 5)],
                                                                 [(1, 40), (2, 9)]])
        self.assertEqual({line.name: line.points for line in curve.lines}, {
            "found 96 % or more": [(0.5, 1), (1.0, 5)], "found 80 to 96 %": [(1.0, 9)],
            "found less than 80 %": [(1.0, 30)], "found none": [(1.0, 40)]})

    def test_classes_are_those_of_the_report(self):
        """mlactl counts turns by the same shares, in its text and in first_ms."""
        source = (ROOT / "client/mlactl/agents/scene_report.cc").read_text(encoding="utf-8")
        table = re.search(r"HitClass, \d+> kClasses = \{\s*\{(.*?)\};", source, re.S)[1]
        classes = re.findall(r'\{"([^"]+)", ([-.\de]+)\}', table)
        self.assertEqual([(name, float(least)) for name, least in classes],
                         list(mlactl_plot.HIT_CLASSES))

    def test_reports_with_nothing_to_draw_are_drawn(self):
        for name, report in (("bench", bench_report()), ("scene", scene_report()),
                             ("steps", bench_report(run_of("a", [], [])))):
            picture = self.folder / f"{name}.svg"
            done = self.plot("-", picture, text=json.dumps(report))
            self.assertEqual((done.returncode, done.stderr), (0, ""), name)
            self.assertTrue(self.texts(picture))

    def test_other_endings(self):
        for ending, magic in ((".png", b"\x89PNG"), (".pdf", b"%PDF")):
            picture = self.folder / f"x{ending}"
            done = self.plot("-", picture,
                             text=json.dumps(bench_report(run_of("a", [[1.0, 3]], []))))
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(picture.read_bytes()[:4], magic)

    def test_refusals_say_what_is_wrong(self):
        picture = self.folder / "x.svg"
        missing = self.folder / "none"
        old = json.dumps({"format": "mlactl-bench", "version": 2})
        for arguments, text, message in (
                (["-", picture], "{}", "the report is not one of mlactl bench --json"),
                (["-", picture], "[1", "the report is not one of mlactl bench --json"),
                (["-", picture], old, "'mlactl-bench' of version 2, must be one of mlactl-bench"),
                (["-", picture], json.dumps(dict(bench_report(), runs=[{}])),
                 "the report lacks 'name'"),
                ([missing, picture], "", f"{missing}: No such file or directory"),
                (["--check", missing / "x.svg"], "", f"there is no folder {missing}"),
                (["--check", "x.gif"], "", "x.gif: must end in .pdf, .png, .svg")):
            done = self.plot(*arguments, text=text)
            self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
            self.assertIn(message, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertFalse(picture.exists())

    def test_a_check_draws_nothing(self):
        picture = self.folder / "x.svg"
        done = self.plot("--check", picture)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))
        self.assertFalse(picture.exists())

    def test_without_matplotlib_a_check_says_what_to_install(self):
        (self.folder / "matplotlib.py").write_text("raise ImportError('none')\n", encoding="utf-8")
        done = subprocess.run([sys.executable, PROGRAM, "--check", self.folder / "x.svg"],
                              capture_output=True, text=True, check=False,
                              env={"PYTHONPATH": str(self.folder)})
        self.assertEqual(done.returncode, 1)
        self.assertIn("python3-matplotlib", done.stderr)


if __name__ == "__main__":
    unittest.main()
