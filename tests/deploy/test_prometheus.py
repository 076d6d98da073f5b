"""Alerts and recording rules: valid, tested, and about metrics that the server exports."""

import re
import shutil
import subprocess
import unittest

import promql
import yaml

INPUTS = ("build/tools/usr/bin/promtool", "deploy", "docs", "server/metrics", "tests/deploy")
ROOT = promql.ROOT
FOLDER = ROOT / "deploy/prometheus"
UNIT_TESTS = ROOT / "tests/deploy/alerts_test.yaml"


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules():
    """Every rule of both files."""
    return [rule for name in ("rules.yaml", "alerts.yaml")
            for group in load(FOLDER / name)["groups"] for rule in group["rules"]]


def alerts():
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def recorded():
    """{recorded series: its labels}."""
    return {rule["record"]: (promql.grouping_labels(rule["expr"]) - {"le"}) or {"job", "instance"}
            for rule in rules() if "record" in rule}


def promtool(*arguments):
    """Runs promtool, which ./dev setup and ./dev test unpack; returns the finished process."""
    unpacked = ROOT / "build/tools/usr/bin/promtool"
    program = str(unpacked) if unpacked.exists() else shutil.which("promtool")
    if program is None:
        raise FileNotFoundError("no promtool: run ./dev setup")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True,
                          check=False)


class ReadingTest(unittest.TestCase):
    """The tests' own reading of PromQL and of the server's metrics sees what it must."""

    def test_selectors(self):
        expression = ('histogram_quantile(0.99, sum by (le, job) (rate(a_bucket{x="p{q", '
                      'y!~"r|s"}[5m]))) / on (job) group_left () (b:c:d > 1e9) unless d or 0 * e')
        self.assertEqual(list(promql.selectors(expression)),
                         [("a_bucket", [("x", "=", "p{q"), ("y", "!~", "r|s")]), ("b:c:d", []),
                          ("d", []), ("e", [])])
        self.assertEqual(promql.grouping_labels(expression), {"le", "job"})

    def test_faults_are_seen(self):
        catalogue = promql.Catalogue()
        for expression, fault in (
                ("rate(mla_requests[5m])", "no metric mla_requests"),
                ("mla_request_queue_seconds", "no metric mla_request_queue_seconds"),
                ('mla_launches_total{phase="plan"}', "mla_launches_total has no label phase"),
                ('mla_launch_duration_seconds_sum{phase="plann"}',
                 "mla_launch_duration_seconds_sum: phase is never plann"),
                ('mla_requests_total{code=~"OK|Internal"}',
                 "mla_requests_total: code is never Internal"),
                ("sum by (pod) (mla_serving)", "nothing has the label pod")):
            self.assertEqual(list(catalogue.faults(expression)), [fault], expression)
        self.assertEqual(
            list(catalogue.faults('sum by (reason) (mla_streams_disconnected_total)')), [])

    def test_labels_of_the_declarations_are_read(self):
        labels = promql.exported_labels()
        self.assertEqual(labels["mla_launch_duration_seconds"],
                         {"phase": {"schedule", "plan", "run", "complete"}})
        self.assertEqual(set(labels["mla_backend_info"]), {"name", "arch", "device"})
        self.assertEqual(labels["mla_device_memory_bytes"], {"use": {"kv", "workspace"}})
        self.assertEqual(set(labels["mla_requests_total"]), {"tenant", "code"})
        self.assertIn("RESOURCE_EXHAUSTED", labels["mla_requests_total"]["code"])
        self.assertEqual(labels["mla_admission_rejected_total"], {"reason": set()})


class RulesTest(unittest.TestCase):
    def test_promtool_accepts_the_files(self):
        for arguments in (["check", "rules", FOLDER / "rules.yaml", FOLDER / "alerts.yaml"],
                          ["check", "config", FOLDER / "prometheus.yaml"]):
            result = promtool(*arguments)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_alerts_do_what_their_tests_say(self):
        result = promtool("test", "rules", UNIT_TESTS)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_every_alert_is_tested_on_both_sides(self):
        tried = {}
        for test in load(UNIT_TESTS)["tests"]:
            for case in test.get("alert_rule_test", []):
                tried.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
        self.assertEqual(tried, {name: {True, False} for name in alerts()})

    def test_expressions_use_what_the_server_exports(self):
        catalogue = promql.Catalogue(recorded())
        faults = [f"{rule.get('alert', rule.get('record'))}: {fault}"
                  for rule in rules() for fault in catalogue.faults(rule["expr"])]
        self.assertEqual(faults, [])

    def test_test_series_exist(self):
        known = promql.Catalogue(recorded()).labels
        for test in load(UNIT_TESTS)["tests"]:
            for series in test["input_series"]:
                (name, matchers), = promql.selectors(series["series"])
                self.assertIn(name, known)
                self.assertLessEqual({label for label, _, _ in matchers},
                                     set(known[name]) | promql.TARGET_LABELS, series["series"])

    def test_recorded_series_are_used(self):
        names = {name for rule in rules() for name, _ in promql.selectors(rule["expr"])}
        self.assertEqual(set(recorded()) - names, set())

    def test_alerts_explain_themselves(self):
        manual = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
        for name, rule in alerts().items():
            self.assertIn(rule["labels"]["severity"], ("critical", "warning"), name)
            notes = rule["annotations"]
            self.assertEqual(set(notes), {"summary", "description", "runbook_url"}, name)
            self.assertIn("$labels.instance", notes["summary"], name)
            self.assertEqual(notes["runbook_url"], f"docs/runbook.md#{name.lower()}")
            self.assertIn(f"\n## {name}\n", manual)

    def test_runbook_has_no_section_of_a_past_alert(self):
        manual = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
        self.assertEqual(set(re.findall(r"^## (Mla\w+)$", manual, re.M)), set(alerts()))

    def test_example_scrapes_the_default_port(self):
        job, = load(FOLDER / "prometheus.yaml")["scrape_configs"]
        listen = load(ROOT / "deploy/config/example.yaml")["ops"]["listen"]
        self.assertEqual(job["static_configs"][0]["targets"], [listen])
        self.assertRegex(job["job_name"], "^.*mla-server.*$")
        self.assertEqual(set(load(FOLDER / "prometheus.yaml")["rule_files"]),
                         {path.name for path in FOLDER.glob("*.yaml")} - {"prometheus.yaml"})


if __name__ == "__main__":
    unittest.main()
