"""A cluster whose processes are on hosts of their own, with faults of the network: few of them on
each run, and 200 kills of 16 servers with 50 workers among the longer ones."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

PROGRAM = pathlib.Path(__file__).resolve().parent / "hosts" / "faults.py"
LONG = os.environ.get("MLA_TEST_LONG", "") != ""
SMALL = ("--servers=3", "--workers=4", "--hosts=2", "--kills=16", "--partitions=1",
         "--hold=1", "--away=2")
SKIPPED = 77


class HostsTest(unittest.TestCase):
    def test_no_output_is_wrong_and_no_worker_gives_up(self):
        done = subprocess.run([sys.executable, str(PROGRAM), *(() if LONG else SMALL)],
                              capture_output=True, text=True, check=False)
        if done.returncode == SKIPPED:
            self.skipTest(done.stdout.strip())
        print(done.stdout)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr[-4000:])
        parts = {one["part"]: one for one in map(json.loads, done.stdout.splitlines())}
        self.assertEqual(parts["points"]["kills"], 150 if LONG else 12)
        self.assertEqual(parts["kills"]["kills"], 50 if LONG else 4)
        for name in ("points", "workers"):
            self.assertGreater(parts[name]["outputs"], parts[name].get("kills", 0))
        self.assertGreater(parts["registry"]["turns_meanwhile"], 0)


if __name__ == "__main__":
    unittest.main()
