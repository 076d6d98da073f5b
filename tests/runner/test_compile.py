"""The script that compiles the sources of tests tells Bazel which declared files were not read."""

import pathlib
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
INPUTS = ("tests/runner/test_compile.py", "third_party/precompiled/compile.sh")

# Writes the names in $READ as a compiler does: the object's first, and several to a line.
COMPILER = r"""#!/usr/bin/env bash
while [[ "$1" != -MF ]]; do shift; done
printf 'made.o: %s \\\n' "$READ" >"$2"
"""
DECLARED = ("a/read.h", "a/not_read.h", "bazel-out/k8-opt/bin/a/made.h")


class CompileTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "declared").write_text("".join(name + "\n" for name in DECLARED))
        (self.folder / "compiler").write_text(COMPILER)
        (self.folder / "compiler").chmod(0o755)

    def compile(self, *read):
        """The files that Bazel is told not to need, and what the script says of an error."""
        unused = self.folder / "unused"
        ended = subprocess.run(
            [str(ROOT / "third_party/precompiled/compile.sh"), str(unused),
             str(self.folder / "declared"), str(self.folder / "compiler")],
            env={"PATH": "/usr/bin:/bin", "READ": " \\\n  ".join(read)}, capture_output=True,
            text=True, check=False)
        self.assertEqual(ended.returncode != 0, ended.stderr != "")
        return (None if ended.stderr else unused.read_text().split()), ended.stderr

    def test_a_file_that_was_read_is_needed(self):
        for name in DECLARED:
            others = sorted(set(DECLARED) - {name})
            # As an object has it, as a compiled header's own sources have it, and as a header
            # that is compiled on top of another one keeps it.
            for root in ("", "./", "/proc/self/cwd/./", "/proc/self/cwd/"):
                with self.subTest(name=root + name):
                    self.assertEqual(self.compile("/usr/include/string.h", root + name),
                                     (others, ""))

    def test_a_file_that_is_not_declared_is_an_error(self):
        for root in ("", "./", "/proc/self/cwd/./"):
            with self.subTest(root=root):
                unused, error = self.compile(root + "a/read.h", root + "b/other.h")
                self.assertIsNone(unused)
                self.assertEqual(error, "read, and not in deps: b/other.h\n")

    def test_files_of_other_compiled_headers_need_no_declaration(self):
        """A change of one of them changes the compiled header."""
        self.assertEqual(self.compile("/proc/self/cwd/b/other.h", "/usr/include/string.h"),
                         (sorted(DECLARED), ""))


if __name__ == "__main__":
    unittest.main()
