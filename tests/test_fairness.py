"""The fairness benchmark computes its bounds right, and its scenes run."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/bench"))

import compare  # pylint: disable=wrong-import-position
import fairness  # pylint: disable=wrong-import-position
import server_binary  # pylint: disable=wrong-import-position

RUN_SECONDS = 10
INPUTS = (".bazel/bin/server/mla-server", "client/python", "tests/bench")
LONG = os.environ.get("MLA_TEST_LONG", "") != ""
# One whose floods compute, one whose floods transfer, and one that launches nothing.
SHORT = ("decode flood", "upload flood", "prefix flood")
SCENE = fairness.Scene("scene", "decode", 2, {})
ALONE = {"p50_us": 400.0, "p99_us": 900.0}
FLOOD = {"requests": 10, "refusals": 1, "cpu_s": 0.5}


def light(**changes):
    return {"p50_us": 5_000.0, "p99_us": 20_000.0, "begin_p99_us": 10.0, "attends": 100,
            "failures": 0, "first_failure": "", "cpu_s": 0.5, **changes}


class BoundsTest(unittest.TestCase):
    def row(self, figures, longest_us=9_000):
        return fairness.row_of(SCENE, ALONE, figures, (FLOOD, FLOOD), 10.0, longest_us, 5.0, 2.5)

    def test_a_scene_within_its_bounds(self):
        row = self.row(light())
        self.assertEqual(fairness.bounds(400.0, 900.0, 10.0), (10_800.0, 31_800.0))
        self.assertEqual(fairness.bounds(400.0, 900.0, 10.0, launches=0), (800.0, 31_800.0))
        self.assertEqual(row["ratio"], round(5_000 / 10_800, 4))
        self.assertEqual(row["p99_ratio"], round(20_000 / 31_800, 4))
        self.assertTrue(row["held"])
        self.assertEqual((row["flood_requests"], row["flood_refusals"], row["clients_cores"],
                          row["server_cores"], row["longest_launch_ms"]), (20, 2, 0.3, 0.5, 9.0))

    def test_each_bound_alone_decides(self):
        at = light(p50_us=10_800.0, p99_us=31_800.0)
        self.assertTrue(self.row(at, 20_000)["held"])
        for change in ({"p50_us": 10_801.0}, {"p99_us": 31_801.0}, {"failures": 1}):
            self.assertFalse(self.row({**at, **change}, 20_000)["held"], change)
        self.assertFalse(self.row(at, 20_001)["held"])

    def test_no_answer_at_all_is_no_success(self):
        row = self.row(light(attends=0, p50_us=0.0, p99_us=0.0))
        self.assertEqual((row["held"], row["ratio"], row["p99_ratio"]), (False, None, None))

    def test_rows_can_be_compared_with_another_commit(self):
        self.assertEqual(set(compare.rows_of([self.row(light())])["scene"]),
                         {"light_p50_us", "light_p99_us", "light_failures", "longest_launch_ms"})


class ScenesTest(unittest.TestCase):
    """Runs scenes from start to end, too briefly for figures: every one in the longer runs. Checks
    only that tenants run and floods get answers."""

    def test_all_scenes(self):
        args = argparse.Namespace(seconds=0.3, server=pathlib.Path(server_binary.path()))
        chosen = [scene for scene in fairness.SCENES if LONG or scene.name in SHORT]
        self.assertEqual(len(chosen), len(fairness.SCENES) if LONG else len(SHORT))
        for scene in chosen:
            with self.subTest(scene.name), tempfile.TemporaryDirectory() as scratch:
                row = fairness.play(scene, args, scratch)
                self.assertEqual(row["scene"], scene.name)
                self.assertGreater(row["light_alone_p50_us"], 0)
                self.assertGreater(row["clients_cores"], 0)
                self.assertGreater(row["longest_launch_ms"], 0)
                json.dumps(row)

    def test_wrong_use(self):
        for arguments, words in ((["--scenes=nosuch"], "no nosuch"), (["--seconds=60"], "at most")):
            result = subprocess.run(
                [sys.executable, str(ROOT / "tests/bench/fairness.py"), *arguments],
                capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
            self.assertEqual(result.returncode, 2)
            self.assertIn(words, result.stderr)


if __name__ == "__main__":
    unittest.main()
