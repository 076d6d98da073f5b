"""What the Python tests of this tree say that they read is there."""

import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tests/engines", "tests/runner")]

# pylint: disable=wrong-import-position
import run_python_tests

BUILT = (".bazel/bin/", "build/tools/")  # inputs that ./dev test makes


class DeclaredTest(unittest.TestCase):
    """The files of this tree."""

    def test_inputs_are_paths_of_the_tree(self):
        declared = 0
        for folder in run_python_tests.FOLDERS:
            for path in (ROOT / folder).rglob("test_*.py"):
                inputs = run_python_tests.constants_of(path).get("INPUTS")
                if inputs is None:
                    continue
                declared += 1
                self.assertIsInstance(inputs, tuple, path)
                for name in inputs:
                    self.assertTrue((ROOT / name).exists() or name.startswith(BUILT),
                                    f"{path}: {name}")
                    self.assertNotIn("..", pathlib.PurePath(name).parts, path)
        self.assertGreater(declared, 0)


if __name__ == "__main__":
    unittest.main()
