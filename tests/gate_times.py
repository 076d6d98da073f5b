"""Duration of `./dev test`, cold and after a change; `./dev test --times` runs this.

Clones this tree's HEAD into a new folder with empty caches (packages stay installed) and runs the
tests in it three times: cold, after a change of one source of the scheduler, and after a change of
one header of device code. Nothing else may run on the machine. Prints one row per run and the sums
of the cold run's tests. Takes hours.
"""

import argparse
import collections
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCHEDULER_SOURCE = "scheduler/steps/launches.cc"
DEVICE_HEADER = "kernels/hip/device/primitives/memory.h"
BOUNDS_MIN = {"cold": 25, "a source of the scheduler": 4, "a device header": 8}


def run_tests(clone, home):
    """Minutes of one run, and its last line."""
    environment = dict(os.environ, HOME=str(home), XDG_CACHE_HOME=str(home / ".cache"))
    started = time.monotonic()
    ended = subprocess.run(["./dev", "test"], cwd=clone, env=environment, capture_output=True,
                           text=True, stdin=subprocess.DEVNULL, check=False)
    minutes = (time.monotonic() - started) / 60
    (clone / "build" / "test.log").write_text(ended.stdout + ended.stderr)
    return minutes, (ended.stdout.splitlines() or ["nothing"])[-1]


def change(clone, path):
    """Adds a number that objects and programs keep: a change that leaves an object as it was, such
    as a comment, repeats no test. A header gets it within its guard."""
    file = clone / path
    number = time.time_ns() % 10**12  # the line has to fit in 100 columns
    line = f"[[gnu::used, gnu::retain]] static const long kChanged{number} = {number};"
    head, guard, tail = file.read_text(encoding="utf-8").rpartition("#endif")
    if path.endswith(".h"):
        file.write_text(f"{head}{line}\n{guard}{tail}", encoding="utf-8")
    else:
        with file.open("a", encoding="utf-8") as end:
            end.write(line + "\n")


def stages(clone):
    """Seconds of tests by stage, from the records of Bazel's tests: {kind: (count, seconds)}."""
    sums = collections.defaultdict(lambda: [0, 0.0])
    for path in sorted((clone / "build/results").glob("*.json")):
        for line in path.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            result = event.get("testResult")
            if result:
                sums[f"tests of {path.stem}"][0] += 1
                sums[f"tests of {path.stem}"][1] += int(
                    result.get("testAttemptDurationMillis", 0)) / 1000
    return sums


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    within = True
    for number in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            clone, home = pathlib.Path(folder) / "clone", pathlib.Path(folder) / "home"
            home.mkdir()
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
            for name, path in (("cold", None), ("a source of the scheduler", SCHEDULER_SOURCE),
                               ("a device header", DEVICE_HEADER)):
                if path:
                    change(clone, path)
                minutes, last = run_tests(clone, home)
                bound = BOUNDS_MIN[name]
                within = within and minutes <= bound and " 0 failed" in last
                print(f"run {number + 1}, {name}: {minutes:.1f} min (bound {bound}); {last}",
                      flush=True)
                if name == "cold":
                    for kind, (count, seconds) in sorted(stages(clone).items()):
                        print(f"  {kind}: {count} in {seconds:.0f} s", flush=True)
            subprocess.run(["bazel", "shutdown"], cwd=clone, check=False, capture_output=True,
                           env=dict(os.environ, HOME=str(home),
                                    XDG_CACHE_HOME=str(home / ".cache")))
            # Bazel makes its outputs read-only, so they must become writable before they can be
            # removed.
            subprocess.run(["chmod", "-R", "u+w", str(home)], check=False)
            shutil.rmtree(home, ignore_errors=True)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
