"""The runner of Python tests, on a small tree of its own: which files run, what is kept of them,
that a file which reads more than it says fails, and how many run at a time."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tests/engines", "tests/runner")]

# pylint: disable=wrong-import-position
import run_python_tests
import unchanged

INPUTS = ("tests/engines", "tests/runner", "tests/run_python_tests.py")
TEST = """import pathlib, subprocess, sys, unittest
{constants}
ROOT = pathlib.Path(__file__).resolve().parents[2]
class T(unittest.TestCase):
    def test_it(self):
        {body}
"""


class TreeTest(unittest.TestCase):
    """Runs of a file `tests/a/test_x.py`."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name in unchanged.RUNNER:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "tests/a").mkdir()
        self.write("data/one.txt", "1")
        self.write("other.txt", "1")
        self.file('INPUTS = ("data",)', '(ROOT / "data/one.txt").read_text()')

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def file(self, constants, body, name="tests/a/test_x.py"):
        self.write(name, TEST.format(constants=constants, body=body))

    def run_it(self, *flags, **environment):
        """{case: kind} and the names of runs that were left out. The run sees no variable of this
        one that would change a key, so a variable that is set to nothing is a change, too."""
        result = self.root / "result.xml"
        inherited = {name: value for name, value in os.environ.items() if name == "PATH" or not (
            unchanged.VARIABLES.search(name) or unchanged.PROGRAMS.search(name))}
        ended = subprocess.run(
            [sys.executable, str(self.root / "tests/run_python_tests.py"), "--xml", str(result),
             *flags],
            env={**inherited, **environment}, capture_output=True, text=True, check=False)
        self.assertEqual(ended.stderr, "")
        self.said = ended.stdout
        suite = xml.etree.ElementTree.parse(result).getroot()
        cases = {f"{case.get('classname')}.{case.get('name')}": case[0].tag if len(case) else ""
                 for case in suite.iter("testcase")}
        self.assertEqual(ended.returncode, 1 if set(cases.values()) & {"failure", "error"} else 0)
        left_out = [one.get("name").removeprefix("unchanged:") for one in suite.iter("property")
                    if one.get("name").startswith("unchanged:")]
        return cases, left_out

    def kinds(self):
        return set(self.run_it("--skip-unchanged")[0].values())

    def left_out(self):
        return self.run_it("--skip-unchanged")[1]

    def test_a_file_runs_once(self):
        cases, left_out = self.run_it("--skip-unchanged")
        self.assertEqual(left_out, [])
        self.assertEqual(cases, {"tests/a/test_x.py T.test_it": ""})
        self.assertEqual(self.run_it("--skip-unchanged"), (cases, ["tests/a/test_x.py"]))
        self.assertIn("tests/a/test_x.py: 1 cases passed before (unchanged)", self.said)
        self.assertEqual(self.run_it(), (cases, []))  # without the flag all run

    def test_each_change_runs_it_again(self):
        self.assertEqual(self.left_out(), [])
        for change in (lambda: self.write("data/one.txt", "2"),
                       lambda: self.write("data/more/two.txt", "1"),
                       lambda: (self.root / "data/more/two.txt").rename(self.root / "data/three"),
                       lambda: self.file('INPUTS = ("data",)', 'pass'),
                       lambda: self.write("client/python/pyproject.toml",
                                          (ROOT / "client/python/pyproject.toml").read_text()
                                          + "\n")):
            change()
            self.assertEqual(self.left_out(), [])
            self.assertEqual(self.left_out(), ["tests/a/test_x.py"])
        self.write("other.txt", "2")
        self.assertEqual(self.left_out(), ["tests/a/test_x.py"])
        for name in ("MLA_TEST_LONG", "https_proxy", "LD_PRELOAD"):
            self.assertEqual(self.run_it("--skip-unchanged", **{name: ""})[1], [], name)
            self.assertEqual(self.left_out(), [])
        self.write("site/numpy-9.0.dist-info/METADATA", "")
        packages = {"PYTHONPATH": str(self.root / "site")}
        self.assertEqual(self.run_it("--skip-unchanged", **packages)[1], [])
        self.assertEqual(self.run_it("--skip-unchanged", **packages)[1], ["tests/a/test_x.py"])
        (self.root / "site/numpy-9.0.dist-info").rename(self.root / "site/numpy-9.1.dist-info")
        self.assertEqual(self.run_it("--skip-unchanged", **packages)[1], [])

    def test_a_program_outside_the_tree_runs_it_again(self):
        for _ in range(2):
            self.assertEqual(self.run_it("--skip-unchanged", SERVER_UNDER_TEST="/bin/true")[1], [])

    def test_a_file_without_inputs_always_runs(self):
        self.file("", "pass")
        for _ in range(2):
            self.assertEqual(self.left_out(), [])

    def test_an_input_that_is_missing(self):
        self.file('INPUTS = ("data", ".bazel/bin/program")', "pass")
        for _ in range(2):
            self.assertEqual(self.left_out(), [])

    def test_only_a_whole_run_without_a_fault_is_kept(self):
        for body, kind in (("self.fail()", "failure"), ('self.skipTest("no")', "skipped"),
                           ("raise ValueError", "error")):
            self.file('INPUTS = ("data",)', body)
            for _ in range(2):
                self.assertEqual(self.run_it("--skip-unchanged")[1], [])
            self.assertEqual(self.kinds(), {kind})
        self.file('INPUTS = ("data",)', "pass")
        self.run_it("--filter", "test_it")
        self.assertEqual(self.left_out(), [])

    def test_a_fault_of_the_same_inputs_is_not_forgotten(self):
        """A file that passed, and then failed in a run of everything."""
        self.file('INPUTS = ("data",)',
                  'self.assertFalse((ROOT / "build/broken").exists())')
        self.assertEqual(self.kinds(), {""})
        self.write("build/broken", "")
        self.assertEqual(set(self.run_it()[0].values()), {"failure"})
        self.assertEqual(self.run_it("--skip-unchanged"),
                         ({"tests/a/test_x.py T.test_it": "failure"}, []))

    def test_a_fault_of_a_part_is_not_forgotten(self):
        self.file('INPUTS = ("data",)',
                  'self.assertFalse((ROOT / "build/broken").exists())')
        self.assertEqual(self.kinds(), {""})
        self.write("build/broken", "")
        self.assertEqual(set(self.run_it("--filter", "test_it")[0].values()), {"failure"})
        (self.root / "build/broken").unlink()
        self.assertEqual(self.left_out(), [])

    def test_results_that_cannot_be_read(self):
        self.left_out()
        self.write("build/unchanged.json", "{")
        self.assertEqual(self.left_out(), [])

    def test_reading_more_than_the_inputs_fails(self):
        self.write("tests/a/helper.py", "X = 1\n")
        self.write("docs/page.md", "")
        for body, what in (('(ROOT / "other.txt").read_text()', "other.txt"),
                           ("import helper", "tests/a/helper.py"),
                           ('list((ROOT / "docs").iterdir())', "docs"),
                           ('subprocess.run(["cat", ROOT / "other.txt"])', "other.txt"),
                           ('import ctypes, contextlib\n        with contextlib.suppress(OSError):'
                            '\n            ctypes.CDLL(str(ROOT / "other.txt"))', "other.txt"),
                           ('subprocess.run(["cat", "other.txt"], cwd=ROOT)', "other.txt")):
            self.file('INPUTS = ("data",)', body)
            cases, _ = self.run_it("--skip-unchanged")
            self.assertEqual(cases, {"tests/a/test_x.py T.test_it": "",
                                     "tests/a/test_x.py inputs": "error"}, body)
            self.assertIn(f"test_x.py reads what its INPUTS do not name: {what}\n", self.said)
            self.file(f'INPUTS = ("data", "{what}")', body)
            self.assertEqual(self.kinds(), {""}, self.said)

    def test_a_built_program_is_noticed_by_its_real_path(self):
        with tempfile.TemporaryDirectory() as built:
            program = pathlib.Path(built) / "program"
            shutil.copy("/bin/true", program)
            (self.root / ".bazel").mkdir()
            (self.root / ".bazel/bin").symlink_to(built)
            body = 'subprocess.run([(ROOT / ".bazel/bin/program").resolve()], check=True)'
            self.file('INPUTS = ("data",)', body)
            self.assertEqual(self.kinds(), {"", "error"})
            self.file('INPUTS = ("data", ".bazel/bin/program")', body)
            self.assertEqual(self.kinds(), {""}, self.said)

    def test_scratch_is_not_an_input_but_tools_are(self):
        self.write("build/tools/etcd", "")
        self.write("build/other", "")
        self.file('INPUTS = ("data",)', '(ROOT / "build/other").read_text()')
        self.assertEqual(self.kinds(), {""})
        self.file('INPUTS = ("data",)', '(ROOT / "build/tools/etcd").read_text()')
        self.assertEqual(self.kinds(), {"", "error"})

    def test_files_of_one_name_are_told_apart(self):
        self.file("", "pass")
        self.file("", "self.fail()", "tests/b/test_x.py")
        self.assertEqual(self.run_it()[0], {"tests/a/test_x.py T.test_it": "",
                                            "tests/b/test_x.py T.test_it": "failure"})
        suite = xml.etree.ElementTree.parse(self.root / "result.xml").getroot()
        self.assertEqual({one.get("name") for one in suite.iter("property")},
                         {"processor_time:tests/a/test_x.py", "processor_time:tests/b/test_x.py"})


class SideBySideTest(unittest.TestCase):
    def run_all(self, weights, jobs):
        """The most that ran at a time, in weight, and the order in which runs began."""
        lock, now, most, begun = threading.Lock(), [0], [0], []

        def function(run):
            with lock:
                begun.append(int(run.path.name))
                now[0] += min(run.weight, jobs)
                most[0] = max(most[0], now[0])
            with lock:
                now[0] -= min(run.weight, jobs)
            return run.weight

        work = [run_python_tests.Run(pathlib.Path(str(number)), "", weight)
                for number, weight in enumerate(weights)]
        results = list(run_python_tests.run_side_by_side(work, jobs, function))
        self.assertEqual(sorted(result for _, result in results), sorted(weights))
        self.assertTrue(all(run.weight == result for run, result in results))
        return most[0], begun

    def test_weights_stay_below_the_jobs(self):
        most, begun = self.run_all([1, 2, 3, 1, 2, 2, 1, 1], 3)
        self.assertLessEqual(most, 3)
        self.assertEqual(sorted(begun), list(range(8)))

    def test_a_run_heavier_than_all_jobs_runs_alone(self):
        self.assertLessEqual(self.run_all([5, 1, 5], 2)[0], 2)

    def test_the_longest_begin_first(self):
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for name, text in (("test_a.py", ""), ("test_b.py", "RUN_SECONDS = 5\n"),
                               ("test_c.py", "WEIGHT = 2\n"), ("test_d.py", "RUN_SECONDS = 60\n")):
                paths.append(pathlib.Path(folder) / name)
                paths[-1].write_text(text)
            found = run_python_tests.runs(paths, False)
        self.assertEqual([run.path.name for run in found],
                         ["test_d.py", "test_b.py", "test_c.py", "test_a.py"])
        self.assertEqual([run.weight for run in found], [1, 1, 2, 1])


if __name__ == "__main__":
    unittest.main()
