"""Counts the test cases of a run from the reports of the test programs.

Reads a folder that `./dev test` filled: Bazel build events (`*.json`), which name the result files
of exactly the tests of this run (cached ones included), JUnit files of the Python tests (`*.xml`),
and `*.status` files of stages that did not end well. Prints each failure, each skipped case with
its reason and, alone on the last line, `N passed, N failed`, or `N passed, N failed, N skipped`.
Exits 0 if something ran, nothing failed and every stage ended well.

Python cases that passed in an earlier run of the same inputs (runner/unchanged.py) count as passed;
a line says how many they are.

With --quick, a Bazel test that takes more than LIMIT_S seconds of processor time, or a shard of
one, is a failure, because slow tests belong to `./dev test --all`. Python files are listed without
a limit, because some compile mutants or load engines. With --times it prints the sums, of all
shards, and the slowest programs.
"""

import argparse
import json
import pathlib
import re
import sys
import urllib.parse
import xml.etree.ElementTree


PROCESSOR_TIME = "processor_time:"  # prefix of a property; a test program's name follows
UNCHANGED = "unchanged:"  # prefix of a property; its value is a number of cases
LIMIT_S = 60
# Programs that may take longer, at most five: the name, and why.
EXCEPTIONS = {
    "//tests/conformance:host_conformance_gfx942_test": "62 s on a slow machine, emulated",
    "//tests/conformance:host_conformance_gfx950_test": "67 s on a slow machine, emulated",
    "//tests/conformance:host_conformance_sm_90_test": "directed cases of every format, emulated",
    "//tests/conformance:cpu_conformance_test": "every level of instructions",
    "//tests/bench/gpu:gpu_decode_c_test": "device code, emulated",
}
LONGEST = 20  # programs that --times lists


class Count:
    """Numbers of passed, failed and skipped cases, and the names of the failed and skipped ones."""

    def __init__(self):
        self.passed = 0
        self.failed = []
        self.skipped = []
        self.seconds = {}  # seconds of processor time, by test program, of all its shards
        self.longest = {}  # the same of the shard that took longest
        self.unchanged = {}  # cases that passed in an earlier run and did not run, by test program

    def add_xml(self, path, prefix):
        """Adds the cases of a JUnit file; an unreadable or empty file is one failed case."""
        try:
            root = xml.etree.ElementTree.parse(path).getroot()
        except (OSError, xml.etree.ElementTree.ParseError) as error:
            self.failed.append(f"{prefix} (no readable result: {error})")
            return 0
        cases = 0
        for case in root.iter("testcase"):
            if case.get("status") == "notrun":
                continue
            cases += 1
            name = f"{prefix} {case.get('classname', '')}.{case.get('name', '')}"
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed.append(name)
            elif case.find("skipped") is not None or case.get("result") == "skipped":
                skipped = case.find("skipped")
                reason = "" if skipped is None else skipped.get("message") or skipped.text or ""
                self.skipped.append(f"{name}: {' '.join(reason.split()) or 'no reason given'}")
            else:
                self.passed += 1
        for record in root.iter("property"):
            if record.get("name", "").startswith(PROCESSOR_TIME):
                name = record.get("name").removeprefix(PROCESSOR_TIME)
                self.seconds[f"{prefix} {name}"] = float(record.get("value"))
            elif record.get("name", "").startswith(UNCHANGED):
                name = record.get("name").removeprefix(UNCHANGED)
                self.unchanged[f"{prefix} {name}"] = int(record.get("value"))
        return cases

    def add_events(self, path, run):
        """Adds every test of one `bazel test`, whatever its result."""
        tests, results = read_events(path)
        for label in sorted(tests | {label for label, _ in results}):
            mine = [result for (owner, _), result in sorted(results.items()) if owner == label]
            if not mine:
                self.failed.append(f"{run} {label} (did not build)")
            for result in mine:
                self.add_result(f"{run} {label}", result)

    def add_result(self, prefix, result):
        """Adds one finished test action: its cases, or one case for the test if it reported none.
        """
        files = {output["name"]: output.get("uri", "") for output in result["testActionOutput"]}
        uri = urllib.parse.urlparse(files.get("test.xml", ""))
        log = urllib.parse.unquote(urllib.parse.urlparse(files.get("test.log", "")).path)
        seconds = processor_time(pathlib.Path(log))
        if seconds is not None:
            self.seconds[prefix] = self.seconds.get(prefix, 0.0) + seconds
            self.longest[prefix] = max(seconds, self.longest.get(prefix, 0.0))
        failed_before = len(self.failed)
        self.add_xml(urllib.parse.unquote(uri.path), prefix)
        if result["status"] != "PASSED" and len(self.failed) == failed_before:
            self.failed.append(f"{prefix} ({result['status']})")

    def check_times(self):
        """Adds a failure for each Bazel test one of whose shards takes too long."""
        for name, seconds in sorted(self.longest.items()):
            if seconds > LIMIT_S and name.split()[-1] not in EXCEPTIONS:
                self.failed.append(f"{name} ({seconds:.0f} s of processor time, limit {LIMIT_S})")


def processor_time(log):
    """Returns the times that processor_time.sh wrote at the end of a test's log, or None."""
    if not log.is_file():
        return None
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 200))
        match = re.search(rb"processor time: ([0-9.]+) s\s*$", file.read())
    return float(match[1]) if match else None


def read_events(path):
    """The test labels of a build event file, and the last attempt of each (label, shard, run)."""
    tests, results, attempts = set(), {}, {}
    for line in path.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        name = event.get("id", {})
        if "targetConfigured" in name:
            if event.get("configured", {}).get("targetKind", "").endswith("_test rule"):
                tests.add(name["targetConfigured"]["label"])
        elif "testResult" in name and "testResult" in event:
            where = name["testResult"]
            key = (where["label"], (where.get("shard", 0), where.get("run", 0)))
            attempt = where.get("attempt", 0)
            if attempt >= attempts.get(key, -1):
                attempts[key] = attempt
                result = event["testResult"]
                result.setdefault("testActionOutput", [])
                results[key] = result
    # A filtered run also configures tests that it does not request.
    asked = {label for label in tests if label in completed_labels(path)}
    return asked, results


def completed_labels(path):
    """Labels whose build this run attempted."""
    labels = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        name = json.loads(line).get("id", {})
        if "targetCompleted" in name:
            labels.add(name["targetCompleted"]["label"])
    return labels


def count(folder):
    """Counts a results folder; returns the count and the stages that did not end well."""
    total = Count()
    for path in sorted(folder.glob("*.json")):
        total.add_events(path, path.stem)
    for path in sorted(folder.glob("*.xml")):
        total.add_xml(path, path.stem)
    stages = [f"{path.stem} (status {path.read_text().strip()})"
              for path in sorted(folder.glob("*.status"))]
    return total, stages


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--times", action="store_true")
    args = parser.parse_args()
    total, stages = count(args.results)
    if args.quick:
        total.check_times()
    if args.times:
        print(f"{sum(total.seconds.values()):.0f} s of processor time in {len(total.seconds)} "
              "test programs")
        for name, seconds in sorted(total.seconds.items(), key=lambda item: -item[1])[:LONGEST]:
            print(f"{seconds:8.1f} s {name}")
    for name, cases in sorted(total.unchanged.items()):
        print(f"unchanged: {name}: {cases} cases passed before")
    for name in total.skipped:
        print(f"skipped: {name}")
    for name in total.failed:
        print(f"FAILED: {name}")
    for stage in stages:
        print(f"stage did not end well: {stage}")
    skipped = f", {len(total.skipped)} skipped" if total.skipped else ""
    print(f"{total.passed} passed, {len(total.failed)} failed{skipped}")
    return 0 if total.passed and not total.failed and not stages else 1


if __name__ == "__main__":
    sys.exit(main())
