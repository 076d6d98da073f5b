"""The dev script and the documents about it agree."""

import pathlib
import re
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def dev(*arguments):
    return subprocess.run([str(ROOT / "dev"), *arguments], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, check=False)


class DevScriptTest(unittest.TestCase):
    def commands(self):
        return set(re.findall(r"^cmd_([a-z-]+)\(\)", (ROOT / "dev").read_text(), re.M)) - {"help"}

    def test_help_lists_every_command(self):
        listed = dev("help")
        self.assertEqual(listed.returncode, 0)
        self.assertEqual(set(re.findall(r"^  ([a-z-]+) ", listed.stdout, re.M)), self.commands())

    def test_the_manual_names_every_command(self):
        text = (ROOT / "CONTRIBUTING.md").read_text()
        for command in self.commands():
            self.assertIn(f"./dev {command}", text)

    def test_wrong_use_is_refused(self):
        for arguments, word in ((["nosuch"], "nosuch"), (["test", "some"], "--all"),
                                (["build", "fast"], "opt, asan"),
                                (["package", "rpm"], "must be image, deb"),
                                (["package"], "must be image, deb"),
                                (["package", "deb", "deb"], "one word")):
            result = dev(*arguments)
            self.assertEqual(result.returncode, 1, arguments)
            self.assertIn(word, result.stderr)

    def test_every_package_is_listed_where_they_are_explained(self):
        script = (ROOT / "dev").read_text()
        listed = set()
        for block in re.findall(r"^readonly [A-Z]+_PACKAGES=\((.*?)\)", script, re.M | re.S):
            listed |= set(block.split())
        self.assertGreater(len(listed), 20)
        explained = (ROOT / "third_party/README.md").read_text()
        self.assertEqual([name for name in sorted(listed) if name not in explained], [])

    def test_device_compilers_can_be_chosen(self):
        """Actions have a fixed environment, so the variables that the build script reads must be
        passed on."""
        script = (ROOT / "kernels/hip/tools/build_device_code.sh").read_text()
        read = set(re.findall(r"\$\{(HIP_CLANG|NVCC|ROCM_PATH|[A-Z_]+_PATH)[:}]", script))
        self.assertEqual(read, {"HIP_CLANG", "NVCC", "ROCM_PATH"})
        options = re.findall(r"^build .*", (ROOT / ".bazelrc").read_text(), re.M)
        passed = set(re.findall(r"--action_env=(\w+)", " ".join(options)))
        self.assertEqual(passed, read)

    def test_a_benchmark_is_compared_with_another_commit(self):
        """The other commit's script may be older; this tree's script does the comparison."""
        for arguments in (["--against", "nosuch"], ["--json", "x.json", "--against=nosuch"]):
            result = dev("bench", "plan", *arguments)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("compare: git rev-parse", result.stderr)

    def test_fuzz_lists_the_targets_that_are_built(self):
        build = (ROOT / "tests/fuzz/BUILD.bazel").read_text()
        targets = set(re.findall(r'^fuzz_target\(\n    name = "(\w+)"', build, re.M))
        self.assertIn("wire", targets)
        self.assertEqual(set(dev("fuzz").stdout.split()), targets)
        for arguments, word in ((["nosuch"], "there are: "), (["wire", "0"], "must be seconds")):
            result = dev("fuzz", *arguments)
            self.assertEqual(result.returncode, 1, arguments)
            self.assertIn(word, result.stderr)

    def test_ci_runs_the_tests(self):
        self.assertRegex((ROOT / ".ci/run").read_text(), r"\nexec \./dev test </dev/null\n")


if __name__ == "__main__":
    unittest.main()
