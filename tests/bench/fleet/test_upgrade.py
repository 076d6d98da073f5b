"""A rolling upgrade of eight servers, with one eighth of their memory free, loses no sequence and
computes no row again. Few sequences on each run, all of the benchmark's among the longer ones."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = pathlib.Path(__file__).resolve().with_name("upgrade.py")
LONG = os.environ.get("MLA_TEST_LONG", "") != ""
SMALL = ("--sequences=14", "--workers=1")


class UpgradeTest(unittest.TestCase):
    def test_no_sequence_is_lost_and_no_row_computed_again(self):
        with tempfile.TemporaryDirectory() as folder:
            rows = pathlib.Path(folder, "rows.json")
            done = subprocess.run(
                [sys.executable, str(PROGRAM), f"--json={rows}", *(() if LONG else SMALL)],
                capture_output=True, text=True, check=False)
            print(done.stdout)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr[-4000:])
            (row,) = json.loads(rows.read_text(encoding="utf-8"))
        self.assertEqual((row["lost"], row["rows_again"], row["wrong"]), (0, 0, 0))
        # Each server has handed over at least the sequences that were opened there.
        self.assertGreaterEqual(row["moved"], 8 * (28 if LONG else 14))
        self.assertGreater(row["outputs"], 0)


if __name__ == "__main__":
    unittest.main()
