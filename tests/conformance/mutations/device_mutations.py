"""Plants faults in the device kernels and lets their conformance run on the host find them.

A mutation replaces one piece of text, which must occur exactly once in its file. The harness edits
a copy of kernels/, compiles the kernels of the mutation's architectures for the host (one
translation unit each) and gives the library to host_conformance as a device image. A text that is
not there, a mutation that does not compile and one that no case notices are failures. Of the last
kind, those are told apart whose text no kernel of the architecture uses: no case can find them.

    python3 tests/conformance/mutations/device_mutations.py [--sample] [NAME...]
"""

import argparse
import dataclasses
import pathlib
import platform
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

# pylint: disable=wrong-import-position
from device_mutation_list import KINDS, MUTATIONS, SAMPLE  # noqa: F401

DEVICE = pathlib.Path("kernels/hip/device")
WORK = ROOT / "build/device_mutations"
TARGET = "//tests/conformance:host_conformance"
RUNFILES = ROOT / ".bazel/bin/tests/conformance/host_conformance.runfiles"
PROGRAM = "tests/conformance/host_conformance"
# As kernels/hip/tools/host_copts.bzl, whose flags decide how fast a lane is. Kernels are compiled
# by clang without optimisation: a mutant is found after few cases, and g++ -O1 took longer for one
# than its cases. Without optimisation, clang does not keep lanes apart with TLS descriptors.
FAST = ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-w", "-I.", "-ffp-contract=off", *FAST]
KERNELS, BLOCK = ["clang++-22", *FLAGS, "-O0"], ["g++", *FLAGS, "-O2"]
SOURCES = {"gfx950": "gfx950.cc", "gfx942": "gfx942.cc", "sm_90": "sm90.cc"}
# A run of this length hangs, and a hang counts as found: all cases take a minute or two.
MOST_SECONDS = 900


class HarnessError(Exception):
    """The harness itself failed, so the mutation was not tested."""


@dataclasses.dataclass
class Result:
    found: bool
    how: str
    build_seconds: float
    run_seconds: float


def run(command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True,
                          check=False, **options)


def named(name):
    return next(m for m in MUTATIONS if m.name == name)


class Harness:
    """The unmutated build, and what is made of it."""

    def __init__(self):
        built = run(["bazel", "build", "--config=opt", TARGET], cwd=ROOT)
        if built.returncode != 0:
            raise HarnessError("bazel build: " + built.stderr[-2000:])
        # Copies the program, so that other builds do not change it.
        self.program = WORK / "run"
        self.tree = WORK / "tree"
        shutil.rmtree(WORK, ignore_errors=True)
        folder = next(path.parent.parent.parent for path in RUNFILES.glob(f"*/{PROGRAM}"))
        shutil.copytree(folder, self.program, ignore=shutil.ignore_patterns("*.runfiles*"))
        listing = run(["git", "ls-files", "-co", "--exclude-standard", "--", "kernels"], cwd=ROOT)
        for path in listing.stdout.splitlines():
            if path.endswith((".h", ".cc", ".hip")) and (ROOT / path).is_file():
                (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, self.tree / path)
        self.block = []
        for source in sorted((self.tree / "kernels/hip/emulator/block").glob("*.cc")):
            if source.name.endswith("_test.cc"):
                continue
            self.block.append(WORK / f"{source.stem}.o")
            self.compile(BLOCK, source, self.block[-1])

    def compile(self, command, source, target):
        built = run([*command, "-c", source, "-o", target], cwd=self.tree)
        if built.returncode != 0:
            raise HarnessError(f"{source.name} does not compile:\n{built.stderr[-2000:]}")

    def kernels(self, arch):
        """Compiles the kernels of the tree as it is now."""
        made = WORK / f"{arch}.o"
        self.compile(KERNELS, self.tree / "kernels/hip/host_images" / SOURCES[arch], made)
        return made

    def library(self, arch):
        """Builds the kernels of the tree as it is now as a library."""
        made, target = self.kernels(arch), WORK / f"{arch}.so"
        linked = run(["g++", "-shared", "-Wl,-Bsymbolic", made, *self.block, "-o", target])
        if linked.returncode != 0:
            raise HarnessError(f"{arch}: does not link:\n{linked.stderr[-2000:]}")
        return target

    def conformance(self, arch, library, *flags):
        """Returns (True if all cases passed, output of the run)."""
        try:
            ended = run([self.program / PROGRAM, "--arch", arch, "--image", library,
                         "--first-failure", "1", *flags], cwd=self.program, timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            return False, "hangs"
        text = ended.stderr + ended.stdout
        if ended.returncode < 0:
            text += f"FAIL ends by signal {-ended.returncode}\n"
        if ended.returncode == 2:
            raise HarnessError(f"{arch}: the conformance run says {text[-2000:]}")
        return ended.returncode == 0, text

    def find(self, mutation, arch):
        file = self.tree / DEVICE / mutation.file
        original = file.read_text()
        if original.count(mutation.old) != 1:
            raise HarnessError(f"{mutation.name}: {mutation.file} has its text "
                               f"{original.count(mutation.old)} times")
        begin = time.monotonic()
        file.write_text(original.replace(mutation.old, mutation.new))
        try:
            library = self.library(arch)
            mutated = (WORK / f"{arch}.o").read_bytes()
        finally:
            file.write_text(original)
        built = time.monotonic()
        passed, text = self.conformance(arch, library, *mutation.flags)
        lines = sorted(line for line in text.splitlines()
                       if line.startswith(("fake device", "FAIL")))
        how = lines[-1] if lines else text[-200:]
        if passed and mutated == self.kernels(arch).read_bytes():
            how = f"no kernel of {arch} uses the text"
        return Result(not passed, how, built - begin, time.monotonic() - built)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutations to run; default: all")
    parser.add_argument("--sample", action="store_true", help="the mutations of the quick run")
    options = parser.parse_args()
    harness = Harness()
    faults = 0
    chosen = [named(name) for name in options.names or (SAMPLE if options.sample else ())]
    for mutation in chosen or MUTATIONS:
        for arch in mutation.archs:
            result = harness.find(mutation, arch)
            faults += not result.found
            found = "found" if result.found else "NOT FOUND"
            print(f"{mutation.name} on {arch}: {found}, built in {result.build_seconds:.1f} s, "
                  f"run {result.run_seconds:.1f} s: {result.how[:160]}", flush=True)
    print(f"device mutations: {faults} not found")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
