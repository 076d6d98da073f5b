"""deploy/first_run.sh packs the results of every step, whatever the machine has. Programs that
stand for the built ones run in their place."""

import os
import pathlib
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
  trap 'exit 0' TERM
  sleep 60 & wait
fi
FAILS
exit 0
"""
STEPS = ("instructions", "self-test", "conformance-small", "conformance", "conformance-8-bits",
         "conformance-lists", "conformance-windows", "server-info", "server-attend",
         "server-bench", "server-with-graphs-info", "server-with-graphs-attend",
         "server-with-graphs-bench", "bench-decode", "bench-decode-8-bits", "bench-prefill",
         "bench-prefill-8-bits")


class FirstRunTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_with(self, fails="", seconds="20"):
        """(exit status, files of the archive by name)"""
        for program in PROGRAMS:
            path = self.folder / "programs" / program
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(STAND_IN.replace("FAILS", fails), encoding="utf-8")
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

    def test_the_programs_are_built_by_these_names(self):
        for program in PROGRAMS:
            folder, name = program.rsplit("/", 1)
            build = (ROOT / folder / "BUILD.bazel").read_text(encoding="utf-8")
            self.assertIn(f'name = "{name}"', build)


if __name__ == "__main__":
    unittest.main()
