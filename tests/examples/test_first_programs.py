"""The pages' first program in C++, with a server: it computes what it says."""

import os
import pathlib
import re
import subprocess
import unittest

import server_binary

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("BINARIES_UNDER_TEST", ROOT / ".bazel/bin"))
LIMIT_S = 120


def run(*command):
    """What the program prints; raises if it fails."""
    return subprocess.run([str(word) for word in command], cwd=ROOT, text=True, check=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=LIMIT_S).stdout


class FirstProgramsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = server_binary.start()
        cls.addClassCleanup(cls.server.stop)

    def test_cpp(self):
        shown = run(BINARIES / "examples/cpp/attend", self.server.target)
        rows = re.findall(r"^(\d+) rows computed in \d+ us, the sequence has (\d+)$", shown, re.M)
        self.assertEqual(rows, [("100", "100"), ("1", "101"), ("1", "102")])

    def test_cpp_without_a_server(self):
        done = subprocess.run([BINARIES / "examples/cpp/attend", "unix:/nonexistent.sock"],
                              text=True, capture_output=True, timeout=LIMIT_S, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("/nonexistent.sock", done.stderr)


if __name__ == "__main__":
    unittest.main()
