"""The cluster's client and placement over simulated servers: a fiftieth of the calls on each run,
and all of them among the longer ones."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

RUN_SECONDS = 34
INPUTS = ("client/python", "tests/cluster")
HERE = pathlib.Path(__file__).resolve().parent
LONG = os.environ.get("MLA_TEST_LONG", "") != ""


def simulate(*arguments):
    """Exit status, figures and what was wrong."""
    done = subprocess.run([sys.executable, str(HERE / "simulate.py"), *arguments],
                          capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    figures = json.loads(lines[0]) if lines and lines[0].startswith("{") else {}
    return done.returncode, figures, "\n".join(lines[1:]) + done.stderr


class SimulationTest(unittest.TestCase):
    def run_it(self, *arguments):
        status, figures, wrong = simulate(*arguments)
        self.assertEqual((status, wrong), (0, ""), figures)
        print(json.dumps(figures))
        return figures

    def test_nothing_is_wrong_while_servers_fail(self):
        for seed in range(1, 3):
            found = self.run_it("--servers=12", "--workers=20", "--ops=8000", "--faults=0.08",
                                f"--seed={seed}")
            self.assertGreater(found["killed"], 0)
            self.assertGreater(sum(found["recovered"].values()), 0)

    def test_measures_hold_without_faults(self):
        self.run_it("--servers=12", "--workers=20", "--ops=14000", "--faults=0")

    def test_a_seed_repeats(self):
        some = ("--servers=6", "--workers=6", "--ops=1500", "--faults=0.1", "--seed=5")
        first, second = (simulate(*some)[1] for _ in range(2))
        for figures in (first, second):
            figures.pop("seconds")
        self.assertEqual(first, second)

    def test_a_fleet(self):
        # Enough agents a server in both, so that chance alone fills none of them.
        fleet = (("--servers=64", "--workers=1000", "--ops=1000000") if LONG else
                 ("--servers=4", "--workers=50", "--ops=30000"))
        self.assertGreater(self.run_it(*fleet, "--faults=0.002")["killed"], 0)
        # It judges the measures, which need enough turns of each worker, and a last death.
        found = self.run_it(*fleet, "--faults=0")
        self.assertGreater(found["load_after_death"], 0)


class MutationsTest(unittest.TestCase):
    def test_planted_faults_are_found(self):
        found = subprocess.run(
            [sys.executable, str(HERE / "mutations.py"), "--every", "1" if LONG else "11"],
            capture_output=True, text=True, check=False)
        print(found.stdout)
        self.assertEqual(found.returncode, 0, found.stdout + found.stderr)


if __name__ == "__main__":
    unittest.main()
