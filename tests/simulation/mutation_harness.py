"""Plants faults in a copy of the source and lets the simulator find them.

A mutation is a patch in tests/simulation/mutations, named AREA_WHAT.patch, whose text before the
diff says what breaks. The harness copies the tree, applies one patch, compiles the objects that
depend on the patched files, links them with Bazel's objects of everything else, and runs the
simulator until it reports a violation or ends. A patch that does not apply, a mutation that does
not compile and one that is not found within MOST_SEEDS seeds are failures.

    python3 tests/simulation/mutation_harness.py [--table FILE] [NAME...]
"""

import argparse
import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATCHES = ROOT / "tests/simulation/mutations"
WORK = ROOT / "build/mutations"
TARGET = "//tests/simulation:sim"
PARAMS = "bazel-out/k8-opt/bin/tests/simulation/sim-2.params"
# Bazel compiles it as part of the link and lists no headers. No mutation reaches it.
LINKSTAMP = "/base/version/revision.o"
MOST_SEEDS = 10_000
STEPS_PER_SEED = 2_000
# A run without output for this long hangs, and a hang counts as found.
SILENCE_SECONDS = 60
# Same as //:.bazelrc's opt without most optimisation, which takes most of the time.
COMPILE = ["g++", "-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-ffunction-sections", "-w"]
# One of each of five areas, for the quick run.
SAMPLE = ("cache_scrub_skipped", "planner_last_key_row_left_out", "queue_cut_request_forgotten",
          "quotas_one_more_than_the_bound", "redo_work_dropped")
FOLDERS = ("base", "kernels", "proto", "scheduler", "server", "tests/simulation")


class HarnessError(Exception):
    """The harness itself failed, so the mutation was not tested."""


@dataclasses.dataclass
class Result:
    name: str
    about: str
    seeds: int = 0  # seeds until it was found; 0 if it was not
    how: str = ""
    build_seconds: float = 0.0
    run_seconds: float = 0.0


def run(command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True,
                          check=False, **options)


def names():
    return sorted(path.stem for path in PATCHES.glob("*.patch"))


def area_of(name):
    return name.split("_")[0]


def about(name):
    """The patch's own description: the lines before its diff."""
    text = (PATCHES / f"{name}.patch").read_text()
    return " ".join(text.split("\n--- ")[0].split())


class Harness:
    """The unmutated build, and the objects made from it."""

    def __init__(self):
        built = run(["bazel", "build", "--config=opt", TARGET], cwd=ROOT)
        if built.returncode != 0:
            raise HarnessError("bazel build: " + built.stderr[-2000:])
        found = run(["bazel", "info", "--config=opt", "execution_root"], cwd=ROOT)
        self.execution_root = pathlib.Path(found.stdout.strip())
        self.params = (self.execution_root / PARAMS).read_text().splitlines()
        self.objects = {}  # object -> files it was compiled from, the source first
        for line in self.params:
            if line.endswith(".o") and not line.endswith(LINKSTAMP):
                self.objects[line] = self.depends_on(line)
        self.tree = WORK / "tree"
        self.copy_tree()

    def depends_on(self, name):
        file = (self.execution_root / name).with_suffix(".d")
        if not file.is_file():
            raise HarnessError(f"{file}: Bazel has left no list of what {name} depends on")
        words = file.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        return [word for word in words if not word.startswith("/")]

    def copy_tree(self):
        shutil.rmtree(WORK, ignore_errors=True)
        listing = run(["git", "ls-files", "-co", "--exclude-standard", "--", *FOLDERS], cwd=ROOT)
        for path in listing.stdout.splitlines():
            if path.endswith((".h", ".cc", ".proto")) and (ROOT / path).is_file():
                (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, self.tree / path)

    def patch(self, name, *flags):
        # Outside any repository, so that git reads paths relative to the copy.
        environment = {"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(WORK)}
        return run(["git", "apply", *flags, PATCHES / f"{name}.patch"], cwd=self.tree,
                   env=environment)

    def compile(self, name, patched):
        """Objects that depend on the patched files, by the name of Bazel's object."""
        made = {}
        for number, (target, files) in enumerate(sorted(self.objects.items())):
            if not patched.intersection(files):
                continue
            made[target] = WORK / f"{name}.{number}.o"
            built = run([*COMPILE, "-I", self.tree,
                         "-I", self.execution_root / "bazel-out/k8-opt/bin",
                         "-I", self.execution_root / "bazel-out/k8-opt/bin/proto",
                         "-c", self.tree / files[0], "-o", made[target]])
            if built.returncode != 0:
                raise HarnessError(f"{name}: {files[0]} does not compile:\n{built.stderr[-2000:]}")
        if not made:
            raise HarnessError(f"{name}: nothing of the simulator depends on {sorted(patched)}")
        return made

    def build(self, name):
        """Binary of the mutation."""
        text = (PATCHES / f"{name}.patch").read_text()
        patched = set(re.findall(r"^\+\+\+ b/(\S+)", text, re.M))
        applied = self.patch(name)
        if applied.returncode != 0:
            raise HarnessError(f"{name}: the patch does not apply: {applied.stderr}")
        try:
            made = self.compile(name, patched)
        finally:
            reverted = self.patch(name, "--reverse")
        if reverted.returncode != 0:
            raise HarnessError(f"{name}: the patch cannot be taken back: {reverted.stderr}")
        binary = WORK / name
        lines = [str(made.get(line, line)) for line in self.params]
        lines[lines.index("-o") + 1] = str(binary)
        params = WORK / f"{name}.params"
        params.write_text("\n".join(lines) + "\n")
        linked = run(["g++", f"@{params}"], cwd=self.execution_root)
        if linked.returncode != 0:
            raise HarnessError(f"{name}: does not link:\n{linked.stderr[-2000:]}")
        for path in made.values():
            path.unlink()
        return binary

    def find(self, name):
        result = Result(name, about(name))
        begin = time.monotonic()
        binary = self.build(name)
        built = time.monotonic()
        result.build_seconds = built - begin
        result.seeds, result.how = seeds_needed(binary)
        result.run_seconds = time.monotonic() - built
        binary.unlink()
        return result


def seeds_needed(binary):
    """Returns (seeds until the simulator found a violation, how it showed). 0 seeds means that it
    was not found."""
    command = [str(binary), "--quiet", "--progress", "--seeds", str(MOST_SEEDS), "--ops",
               str(MOST_SEEDS * STEPS_PER_SEED), "--steps", str(STEPS_PER_SEED), "--threads", "2"]
    log = WORK / "run.log"
    with open(log, "w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        seen, since = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.05)
            size = log.stat().st_size
            if size != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() - since > SILENCE_SECONDS:
                process.kill()
                process.wait()
                return last_seed(log), "hangs"
    text = log.read_text(errors="replace")
    found = re.search(r"^violation after (\d+) seeds: (.*)", text, re.M)
    if found:
        return int(found.group(1)), found.group(2)
    if process.returncode not in (0, 1, 2):
        lines = [line for line in text.splitlines() if not line.startswith("seed ")]
        return last_seed(log), " ".join(lines[-1:]) or f"ends by signal {-process.returncode}"
    if process.returncode != 0:
        raise HarnessError(f"{binary.name}: the simulator ended with {process.returncode}:\n{text}")
    return 0, ""


def last_seed(log):
    """Seeds begun when a run ended by itself."""
    return max([1, *(int(n) for n in re.findall(r"^seed (\d+)", log.read_text(errors="replace"),
                                                re.M))])


def table(results):
    lines = ["| mutation | what is planted | seeds | how it showed |", "|---|---|---|---|"]
    for r in sorted(results, key=lambda one: one.name):
        how = re.sub(r"\d{6,}", "N", r.how).replace("|", "/")
        lines.append(f"| `{r.name}` | {r.about} | {r.seeds or 'not found'} | {how[:110]} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutations to run; default: all")
    parser.add_argument("--sample", action="store_true", help="the mutations of the quick run")
    parser.add_argument("--table", help="writes the table between the marks of this file")
    options = parser.parse_args()
    harness = Harness()
    results = []
    faults = 0
    for name in options.names or (SAMPLE if options.sample else names()):
        try:
            result = harness.find(name)
        except HarnessError as error:
            print(f"mutation {error}", flush=True)
            faults += 1
            continue
        results.append(result)
        faults += result.seeds == 0
        print(f"{name}: {result.seeds or 'NOT FOUND, of'} seeds, built in "
              f"{result.build_seconds:.1f} s, run {result.run_seconds:.1f} s: {result.how[:150]}",
              flush=True)
    if options.table:
        file = pathlib.Path(options.table)
        begin, end = "<!-- mutations: begin -->\n", "<!-- mutations: end -->"
        head, rest = file.read_text().split(begin)
        file.write_text(head + begin + "\n" + table(results) + "\n" + end + rest.split(end)[1])
    print(f"mutations: {len(results)} built, {faults} failures")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
