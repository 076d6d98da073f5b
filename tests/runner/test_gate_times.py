"""The changes whose runs ./dev test --times measures reach objects and programs."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

import gate_times  # pylint: disable=wrong-import-position

HEADER = "#ifndef A_H_\n#define A_H_\nint a();\n#endif  // A_H_\n"
SOURCE = '#include "a.h"\n#include "a.h"\nint a() { return 1; }\n'


class ChangeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "a.h").write_text(HEADER)
        (self.folder / "a.cc").write_text(SOURCE)
        (self.folder / "main.cc").write_text("int main() {}\n")

    def program(self):
        """The bytes of a program with the flags of the product."""
        subprocess.run(["g++", "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror",
                        "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections", "a.cc",
                        "main.cc", "-o", "program"], cwd=self.folder, check=True)
        return (self.folder / "program").read_bytes()

    def test_a_change_reaches_the_program(self):
        before = self.program()
        self.assertEqual(self.program(), before)
        for path in ("a.cc", "a.h", "a.h"):
            gate_times.change(self.folder, path)
            after = self.program()
            self.assertNotEqual(after, before, path)
            before = after

    def test_the_files_are_there(self):
        for path in (gate_times.SCHEDULER_SOURCE, gate_times.DEVICE_HEADER):
            self.assertTrue((ROOT / path).is_file(), path)


if __name__ == "__main__":
    unittest.main()
