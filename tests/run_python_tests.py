"""Runs the Python tests (unittest) and writes one JUnit record per case.

Test programs are the files `test_*.py` below FOLDERS; nothing needs registering. With --filter only
the cases whose name contains the text run.
"""

import argparse
import pathlib
import sys
import time
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ["client/python/tests", "client/demo", "client/demo/sharing", "client/demo/v32",
           "client/demo/v4", "tests"]


class RecordingResult(unittest.TextTestResult):
    """Text on the terminal, and a record of every case for the file."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.records = {}
        self.started = 0.0

    def startTest(self, test):
        super().startTest(test)
        self.started = time.monotonic()
        self.records[test.id()] = [None, "", 0.0]

    def stopTest(self, test):
        self.records[test.id()][2] = time.monotonic() - self.started
        super().stopTest(test)

    def _fail(self, test, kind, err):
        # A class or module that cannot be set up never started a case: it is one of its own.
        record = self.records.setdefault(test.id(), [None, "", 0.0])
        record[0], record[1] = kind, record[1] + self._exc_info_to_string(err, test)

    def addError(self, test, err):
        super().addError(test, err)
        self._fail(test, "error", err)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._fail(test, "failure", err)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._fail(test, "failure", err)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.records.setdefault(test.id(), [None, "", 0.0])[:2] = ["skipped", reason]

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.records[test.id()][:2] = ["failure", "unexpected success"]


def write_xml(path, records):
    """Writes the records as a JUnit file."""
    suite = xml.etree.ElementTree.Element("testsuite", name="python", tests=str(len(records)))
    for name, (kind, text, seconds) in records.items():
        owner, _, method = name.rpartition(".")
        case = xml.etree.ElementTree.SubElement(
            suite, "testcase", classname=owner, name=method, time=f"{seconds:.3f}")
        if kind:
            xml.etree.ElementTree.SubElement(case, kind).text = text
    path.parent.mkdir(parents=True, exist_ok=True)
    xml.etree.ElementTree.ElementTree(suite).write(path, encoding="utf-8")


def cases_of(suite):
    """Flattens a suite into its cases."""
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from cases_of(item)
        else:
            yield item


def load(text):
    """Cases of all folders whose name contains `text`."""
    sys.path[:0] = [str(ROOT / name) for name in ("client/python", "client/python/tests",
                                                  "client/demo", ".")]
    files = sorted({path for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py")})
    suite = unittest.TestSuite()
    for path in files:
        sys.path.insert(0, str(path.parent))
        loaded = unittest.defaultTestLoader.loadTestsFromName(path.stem)
        suite.addTests(case for case in cases_of(loaded) if text in case.id())
    return suite


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--xml", type=pathlib.Path)
    parser.add_argument("--filter", default="")
    args = parser.parse_args()
    runner = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=RecordingResult)
    result = runner.run(load(args.filter))
    if args.xml:
        write_xml(args.xml, result.records)
    return 0 if result.wasSuccessful() and result.records else 1


if __name__ == "__main__":
    sys.exit(main())
