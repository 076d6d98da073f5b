"""Counts the test cases of a run from what the test programs themselves reported.

Reads a folder that `./dev test` filled: Bazel build events (`*.json`), which name the result files
of exactly the tests of this run (cached ones included), JUnit files of the Python tests (`*.xml`),
and `*.status` files of stages that did not end well. Prints each failure and, alone on the last
line, `N passed, N failed`. Exits 0 if something ran, nothing failed and every stage ended well.
"""

import json
import pathlib
import sys
import urllib.parse
import xml.etree.ElementTree


class Count:
    """Passed, failed and skipped cases, and the names of those that did not pass."""

    def __init__(self):
        self.passed = 0
        self.failed = []
        self.skipped = []

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
                self.skipped.append(name)
            else:
                self.passed += 1
        return cases

    def add_events(self, path, run):
        """Adds every test of one `bazel test`, whatever became of it."""
        tests, results = read_events(path)
        for label in sorted(tests | {label for label, _ in results}):
            mine = [result for (owner, _), result in sorted(results.items()) if owner == label]
            if not mine:
                self.failed.append(f"{run} {label} (did not build)")
            for result in mine:
                self.add_result(f"{run} {label}", result)

    def add_result(self, prefix, result):
        """Adds one finished test action: its cases, or itself if they do not explain it."""
        files = {output["name"]: output.get("uri", "") for output in result["testActionOutput"]}
        uri = urllib.parse.urlparse(files.get("test.xml", ""))
        failed_before = len(self.failed)
        self.add_xml(urllib.parse.unquote(uri.path), prefix)
        if result["status"] != "PASSED" and len(self.failed) == failed_before:
            self.failed.append(f"{prefix} ({result['status']})")


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
    # A filtered run configures tests that it then does not ask for.
    asked = {label for label in tests if label in completed_labels(path)}
    return asked, results


def completed_labels(path):
    """Labels whose build was attempted in this run."""
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
    total, stages = count(pathlib.Path(sys.argv[1]))
    for name in total.skipped:
        print(f"skipped: {name}")
    for name in total.failed:
        print(f"FAILED: {name}")
    for stage in stages:
        print(f"stage did not end well: {stage}")
    print(f"{total.passed} passed, {len(total.failed)} failed")
    return 0 if total.passed and not total.failed and not stages else 1


if __name__ == "__main__":
    sys.exit(main())
