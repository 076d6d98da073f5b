"""A cluster of real processes that are killed: each point of a step once on each run, 200 kills of
16 servers with 50 workers among the longer ones."""

import os
import pathlib
import subprocess
import sys
import unittest

import real

HERE = pathlib.Path(__file__).resolve().parent
LONG = os.environ.get("MLA_TEST_LONG", "") != ""


# Deadlines of the workers decide which rows fail, so a busy machine can fail these tests.
class RealTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not LONG:
            raise unittest.SkipTest("part of the longer runs: ./dev test --all")
        cls.fleet = real.Fleet(3)
        cls.addClassCleanup(cls.fleet.__exit__)
        cls.fleet.__enter__()

    def test_a_server_that_is_killed_at_any_point_of_a_step_takes_its_own_sequences_alone(self):
        wrong, figures = real.kill_at_each_point(self.fleet, len(real.POINTS), 1)
        self.assertEqual(wrong, [])
        self.assertEqual(figures["kills"], len(real.POINTS))
        self.assertGreater(figures["outputs"], 2 * len(real.POINTS))

    def test_workers_go_on_while_the_registry_is_away(self):
        wrong, figures = real.without_registry(self.fleet, 2)
        self.assertEqual(wrong, [])
        self.assertGreater(figures["outputs"], 0)

    def test_workers_of_their_own_go_on_while_servers_are_killed(self):
        wrong, figures = real.many_workers(self.fleet, 4, 2, 3)
        self.assertEqual(wrong, [])
        self.assertEqual(figures["kills"], 2)


class ProgramTest(unittest.TestCase):
    def test_the_program_finds_nothing_wrong(self):
        if not LONG:
            self.skipTest("part of the longer runs: ./dev test --all")
        done = subprocess.run([sys.executable, str(HERE / "real.py")], capture_output=True,
                              text=True, check=False)
        print(done.stdout)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr[-4000:])


if __name__ == "__main__":
    unittest.main()
