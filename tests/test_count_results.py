"""The last line of `./dev test` counts right, for every way in which a test can end."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parent / "count_results.py"

GOOD = """<testsuites><testsuite name="S">
<testcase name="A" classname="S" status="run" result="completed"/>
<testcase name="B" classname="S" status="run" result="completed"/>
<testcase name="C" classname="S" status="notrun" result="suppressed"/>
</testsuite></testsuites>"""
ONE_FAILED = """<testsuites><testsuite name="S">
<testcase name="A" classname="S" status="run" result="completed"/>
<testcase name="B" classname="S" status="run"><failure message="no"/></testcase>
</testsuite></testsuites>"""
EMPTY = "<testsuites></testsuites>"


class CountTest(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.addCleanup(self.scratch.cleanup)
        self.folder = pathlib.Path(self.scratch.name) / "results"
        self.folder.mkdir()

    def events(self, *tests):
        """Writes build events of (label, status or None, xml or None, attempt)."""
        lines = []
        for number, (label, status, xml, attempt) in enumerate(tests):
            lines.append({"id": {"targetConfigured": {"label": label}},
                          "configured": {"targetKind": "cc_test rule"}})
            lines.append({"id": {"targetCompleted": {"label": label}}, "completed": {}})
            if status is None:
                continue
            outputs = []
            if xml is not None:
                path = self.folder.parent / f"{number}.xml"
                path.write_text(xml)
                outputs.append({"name": "test.xml", "uri": f"file://{path}"})
            lines.append({"id": {"testResult": {"label": label, "attempt": attempt}},
                          "testResult": {"status": status, "testActionOutput": outputs}})
        (self.folder / "opt.json").write_text("\n".join(map(json.dumps, lines)) + "\n")

    def count(self, *flags):
        result = subprocess.run([sys.executable, str(SCRIPT), *flags, str(self.folder)],
                                capture_output=True, text=True, check=False)
        return result.stdout.splitlines()[-1], result.returncode

    def test_skipped_cases_are_counted_with_their_reason(self):
        self.events(("//a:t", "PASSED", GOOD.replace(
            'name="B" classname="S" status="run" result="completed"/>',
            'name="B" classname="S" status="run" result="skipped">'
            '<skipped message="only root can"/></testcase>'), 1))
        result = subprocess.run([sys.executable, str(SCRIPT), str(self.folder)],
                                capture_output=True, text=True, check=False)
        self.assertEqual(result.stdout.splitlines()[-1], "1 passed, 0 failed, 1 skipped")
        self.assertIn("S.B: only root can", result.stdout)
        self.assertEqual(result.returncode, 0)

    def test_python_files_are_not_bounded(self):
        (self.folder / "python.xml").write_text(
            '<testsuite><properties><property name="processor_time:test_a" value="61.0"/>'
            '</properties><testcase name="A" classname="S"/></testsuite>')
        self.assertEqual(self.count("--quick"), ("1 passed, 0 failed", 0))

    def times(self, *seconds):
        """Writes build events of a test whose shards took so much processor time."""
        self.events(*[("//a:t", "PASSED", GOOD, 1)] * len(seconds))
        events, lines, shard = self.folder / "opt.json", [], 0
        for event in map(json.loads, events.read_text().splitlines()):
            if "testResult" in event:
                log = self.folder.parent / f"{shard}.log"
                log.write_text(f"text\n\nprocessor time: {seconds[shard]} s\n")
                shard += 1
                event["id"]["testResult"]["shard"] = shard
                event["testResult"]["testActionOutput"].append(
                    {"name": "test.log", "uri": f"file://{log}"})
            lines.append(json.dumps(event) + "\n")
        events.write_text("".join(lines))

    def test_processor_time_is_read_from_the_log(self):
        self.times(75.5)
        self.assertEqual(self.count(), ("2 passed, 0 failed", 0))
        self.assertEqual(self.count("--quick"), ("2 passed, 1 failed", 1))

    def test_the_sum_of_times_has_all_shards_and_the_limit_is_for_each(self):
        self.times(50.5, 20, 30)
        self.assertEqual(self.count("--quick"), ("6 passed, 0 failed", 0))
        result = subprocess.run([sys.executable, str(SCRIPT), "--times", str(self.folder)],
                                capture_output=True, text=True, check=False)
        self.assertEqual(result.stdout.splitlines()[:2], [
            "100 s of processor time in 1 test programs", "   100.5 s opt //a:t"])

    def test_cases_are_counted_not_programs(self):
        self.events(("//a:t", "PASSED", GOOD, 1), ("//b:t", "PASSED", GOOD, 1))
        self.assertEqual(self.count(), ("4 passed, 0 failed", 0))

    def test_failed_case(self):
        self.events(("//a:t", "FAILED", ONE_FAILED, 1))
        self.assertEqual(self.count(), ("1 passed, 1 failed", 1))

    def test_crash_without_result_is_one_failure(self):
        self.events(("//a:t", "FAILED", None, 1), ("//b:t", "PASSED", GOOD, 1))
        self.assertEqual(self.count(), ("2 passed, 1 failed", 1))

    def test_failure_that_no_case_explains(self):
        self.events(("//a:t", "TIMEOUT", GOOD, 1))
        self.assertEqual(self.count(), ("2 passed, 1 failed", 1))

    def test_target_that_did_not_build(self):
        self.events(("//a:t", None, None, 1), ("//b:t", "PASSED", GOOD, 1))
        self.assertEqual(self.count(), ("2 passed, 1 failed", 1))

    def test_last_attempt_counts(self):
        self.events(("//a:t", "FAILED", ONE_FAILED, 1), ("//a:t", "PASSED", GOOD, 2))
        self.assertEqual(self.count(), ("2 passed, 0 failed", 0))

    def test_nothing_ran(self):
        self.assertEqual(self.count(), ("0 passed, 0 failed", 1))
        (self.folder / "python.xml").write_text(EMPTY)
        self.assertEqual(self.count(), ("0 passed, 0 failed", 1))

    def test_stage_that_ended_badly(self):
        self.events(("//a:t", "PASSED", GOOD, 1))
        (self.folder / "opt.status").write_text("1\n")
        self.assertEqual(self.count(), ("2 passed, 0 failed", 1))

    def test_python_results(self):
        (self.folder / "python.xml").write_text(ONE_FAILED)
        self.assertEqual(self.count(), ("1 passed, 1 failed", 1))

    def test_unchanged_cases_are_told(self):
        (self.folder / "python.xml").write_text(
            '<testsuite><properties><property name="unchanged:a/test_a.py" value="1"/>'
            '</properties><testcase name="A" classname="S"/></testsuite>')
        result = subprocess.run([sys.executable, str(SCRIPT), str(self.folder)],
                                capture_output=True, text=True, check=False)
        self.assertEqual(result.stdout.splitlines(), [
            "unchanged: python a/test_a.py: 1 cases passed before", "1 passed, 0 failed"])


if __name__ == "__main__":
    unittest.main()
