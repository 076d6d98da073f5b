"""A cluster whose processes are on hosts of their own, with faults of the network: few of them on
each run, and 200 kills of 16 servers with 50 workers among the longer ones. Also one client and one
server between which packets vanish."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

RUN_SECONDS = 45
WEIGHT = 2
INPUTS = (".bazel/bin/server/mla-server", "build/tools/usr/bin/etcd", "client/python",
          "tests/cluster", "tests/peers.py")
HOSTS = pathlib.Path(__file__).resolve().parent / "hosts"
LONG = os.environ.get("MLA_TEST_LONG", "") != ""
SMALL = ("--servers=3", "--workers=4", "--hosts=2", "--kills=8", "--partitions=1",
         "--hold=1", "--away=2")
SKIPPED = 77


class HostsTest(unittest.TestCase):
    def run_program(self, name, *arguments):
        """Runs it; returns its lines of JSON."""
        done = subprocess.run([sys.executable, str(HOSTS / name), *arguments],
                              capture_output=True, text=True, check=False)
        if done.returncode == SKIPPED:
            self.skipTest(done.stdout.strip())
        print(done.stdout)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr[-4000:])
        return [json.loads(line) for line in done.stdout.splitlines()]

    def test_a_client_is_back_after_packets_have_vanished(self):
        lengths = self.run_program("outages.py", f"--runs={10 if LONG else 1}",
                                   "--lengths=1.7,5,13" if LONG else "--lengths=1.7,5")
        for one in lengths:
            self.assertEqual(len(one["back_s"]), 10 if LONG else 1)

    def test_no_output_is_wrong_and_no_worker_gives_up(self):
        found = self.run_program("faults.py", *(() if LONG else SMALL))
        parts = {one["part"]: one for one in found}
        self.assertEqual(parts["points"]["kills"], 150 if LONG else 6)
        self.assertEqual(parts["kills"]["kills"], 50 if LONG else 2)
        for name in ("points", "workers"):
            self.assertGreater(parts[name]["outputs"], parts[name].get("kills", 0))
        self.assertGreater(parts["registry"]["turns_meanwhile"], 0)


if __name__ == "__main__":
    unittest.main()
