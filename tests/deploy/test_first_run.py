"""deploy/first_run.sh packs the results of every step, whatever the machine has. Programs that
stand for the built ones run in their place."""

import os
import pathlib
import re
import socket
import subprocess
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy/first_run.sh"
PROGRAMS = ("tests/tile/tile_conformance", "tests/conformance/gpu_conformance",
            "tests/bench/gpu/gpu_bench", "tests/bench/gpu/gpu_prefill", "client/mlactl/mlactl",
            "server/mla-server")
# Prints its arguments. A server runs until it is told to end.
STAND_IN = """#!/usr/bin/env bash
echo "ran $(basename "$0") $* on $(hostname)"
if [[ "$(basename "$0") $*" == "mla-server"*"--unix-path"* ]]; then
  trap 'ENDS' TERM
  sleep 60 & wait
fi
FAILS
exit 0
"""
STEPS = ("instructions", "self-test", "conformance-small", "conformance", "conformance-8-bits",
         "conformance-lists", "conformance-windows", "server-info", "server-attend",
         "server-bench", "server-bench-inline", "server-end", "server-with-graphs-info",
         "server-with-graphs-attend", "server-with-graphs-bench",
         "server-with-graphs-bench-inline", "server-with-graphs-end", "bench-decode",
         "bench-decode-8-bits", "bench-prefill", "bench-prefill-8-bits")


class FirstRunTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_with(self, fails="", seconds="20", ends="exit 0"):
        """(exit status, files of the archive by name); `ends` is what a server does at its end."""
        for program in PROGRAMS:
            path = self.folder / "programs" / program
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(STAND_IN.replace("FAILS", fails).replace("ENDS", ends),
                            encoding="utf-8")
            path.chmod(0o755)
        archive = self.folder / "out.tar.gz"
        ended = subprocess.run(
            [SCRIPT, archive], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
            env={**os.environ, "FIRST_RUN_PROGRAMS": str(self.folder / "programs"),
                 "FIRST_RUN_SECONDS": seconds})
        with tarfile.open(archive) as packed:
            files = {pathlib.PurePath(name).name: packed.extractfile(name).read().decode()
                     for name in packed.getnames() if packed.getmember(name).isfile()}
        return ended, files

    def test_every_step_is_packed(self):
        ended, files = self.run_with()
        self.assertEqual(ended.returncode, 0, ended.stdout + ended.stderr)
        results = [line.split() for line in files["summary.txt"].splitlines()]
        self.assertEqual([(line[0], line[1]) for line in results],
                         [(step, "passed") for step in STEPS])
        for step in STEPS:
            if not step.endswith("-end"):
                self.assertIn("ran ", files[f"{step}.log"])
        self.assertIn("--gpu-graphs=on", files["server-with-graphs-server.log"])
        self.assertIn("the server ended with status 0", files["server-server.log"])
        for name in ("machine.log", "rocminfo.log", "rocm-smi.log", "kernel-log.log"):
            self.assertIn(name, files)
        for text in files.values():
            self.assertNotIn(socket.gethostname(), text)

    def test_a_step_that_fails_or_hangs_does_not_end_the_run(self):
        ended, files = self.run_with(
            '[[ "$*" == *v32* ]] && exit 3\n[[ "$0" == *gpu_prefill ]] && sleep 60', seconds="2")
        self.assertEqual(ended.returncode, 1)
        results = {line.split()[0]: line.split()[1:4] for line in files["summary.txt"].splitlines()}
        self.assertEqual(list(results), list(STEPS))
        self.assertEqual(results["conformance-lists"], ["FAILED", "status", "3"])
        self.assertEqual(results["bench-prefill"], ["FAILED", "status", "124"])
        self.assertIn("not done within 2 s", files["bench-prefill.log"])
        self.assertEqual(results["conformance"][0], "passed")

    def test_a_server_that_does_not_end_is_killed(self):
        ended, files = self.run_with(seconds="2", ends="wait")
        self.assertEqual(ended.returncode, 1)
        results = {line.split()[0]: line.split()[1:4] for line in files["summary.txt"].splitlines()}
        self.assertEqual(list(results), list(STEPS))
        self.assertEqual(results["server-end"], ["FAILED", "status", "137"])
        self.assertIn("the server ended with status 137", files["server-server.log"])
        self.assertEqual(results["bench-decode"][0], "passed")

    def test_a_server_that_fails_is_a_result(self):
        _, files = self.run_with(ends="exit 3")
        results = {line.split()[0]: line.split()[1:4] for line in files["summary.txt"].splitlines()}
        self.assertEqual(results["server-with-graphs-end"], ["FAILED", "status", "3"])

    def test_the_programs_know_the_options(self):
        """Each option of a step stands in the sources of the program that gets it."""
        script = SCRIPT.read_text(encoding="utf-8").replace("\\\n", " ")
        sources = {
            "conformance": ["tests/conformance/gpu_conformance.cc"],
            "bench/gpu_bench": ["tests/bench/gpu/gpu_bench.cc"],
            "bench/gpu_prefill": ["tests/bench/gpu/gpu_prefill.cc"],
            "mlactl": sorted((ROOT / "client/mlactl").rglob("*.cc")),
            "programs/server/mla-server": ["server/config/config.cc",
                                           "docs/configuration.md"],
        }
        seen = 0
        for line in script.splitlines():
            for program, files in sources.items():
                if f'"${program}' not in line:
                    continue
                text = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
                for option in re.findall(r"--([a-z][a-z0-9-]+)", line):
                    self.assertRegex(text, rf'(--|"){option}\b', f"{program} --{option}")
                    seen += 1
        self.assertGreater(seen, 30)

    def test_the_programs_are_built_by_these_names(self):
        for program in PROGRAMS:
            folder, name = program.rsplit("/", 1)
            build = (ROOT / folder / "BUILD.bazel").read_text(encoding="utf-8")
            self.assertIn(f'name = "{name}"', build)

    def test_they_are_what_the_build_for_devices_makes(self):
        dev = (ROOT / "dev").read_text(encoding="utf-8")
        for program in PROGRAMS:
            folder, name = program.rsplit("/", 1)
            build = (ROOT / folder / "BUILD.bazel").read_text(encoding="utf-8")
            rule = re.search(rf'\w+\(\n    name = "{name}",\n.*?^\)', build, re.M | re.S)[0]
            self.assertTrue('"hip",' in rule or f"//{folder}:{name}" in dev, program)


if __name__ == "__main__":
    unittest.main()
