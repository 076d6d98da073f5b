"""Flags of tests that clang compiles, held against those of everything else."""

import ast
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# It has an effect in optimised code only.
NOT_FOR_TESTS = {"-D_FORTIFY_SOURCE=2"}


class FlagsTest(unittest.TestCase):
    """Libraries are compiled by the flags of .bazelrc, sources of tests by a list of their own.
    Inline functions of both would differ if only one of them got, for example, a macro."""

    def test_tests_have_the_flags_of_opt_that_change_what_a_program_does(self):
        lines = re.findall(r"^build(?::opt)? (.*)$", (ROOT / ".bazelrc").read_text(), re.M)
        options = re.findall(r"--c(?:xx)?opt=(-(?:std=|D|f)\S+)", " ".join(lines))
        self.assertIn("-std=c++20", options)
        text = (ROOT / "third_party/precompiled/objects.bzl").read_text()
        flags = ast.literal_eval(re.search(r"^CLANG_FLAGS = (\[.*?\n\])", text, re.M | re.S)[1])
        self.assertEqual(set(options) - NOT_FOR_TESTS - set(flags), set())


if __name__ == "__main__":
    unittest.main()
