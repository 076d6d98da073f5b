"""The dashboards: panels that fit, and expressions on metrics that the server exports."""

import json
import pathlib
import re
import tempfile
import unittest

import promql
import test_prometheus
import yaml

FOLDER = promql.ROOT / "deploy/grafana"
ROWS = ["Now", "Traffic", "Latency", "Scheduler", "KV cache", "Devices", "Wire", "Prefix cache",
        "Slower tiers", "Checkpoints and hand-over", "Tenants", "Launches in detail",
        "Configuration and connections"]
ROWS_OF_FLEET = ["Fleet", "Load of each server", "Memory of each server", "Placement",
                 "Failures and upgrades"]


class Dashboard:
    """What holds for each of them; mixed into its tests."""

    name, rows, least_queries = "", [], 0

    def setUp(self):
        self.dashboard = json.loads((FOLDER / self.name).read_text(encoding="utf-8"))
        self.panels = [panel for panel in self.dashboard["panels"] if panel["type"] != "row"]
        self.queries = [(panel["title"], target) for panel in self.panels
                        for target in panel["targets"]]
        self.queries += [(note["name"], note)
                         for note in self.dashboard["annotations"]["list"]]

    def test_rows(self):
        titles = [panel["title"] for panel in self.dashboard["panels"] if panel["type"] == "row"]
        self.assertEqual(titles, self.rows)
        self.assertGreaterEqual(self.dashboard["schemaVersion"], 39)

    def test_expressions_use_what_the_server_exports(self):
        catalogue = promql.Catalogue(test_prometheus.recorded())
        self.assertGreater(len(self.queries), self.least_queries)
        faults = [f"{title}: {fault}" for title, query in self.queries
                  for fault in catalogue.faults(query["expr"])]
        self.assertEqual(faults, [])

    def test_legends_name_labels_that_exist(self):
        labels = promql.Catalogue().labels
        for title, query in self.queries:
            known = set(promql.TARGET_LABELS)
            for name, _ in promql.selectors(query["expr"]):
                known |= set(labels.get(name, {}))
            kept = promql.grouping_labels(query["expr"])
            for label in re.findall(r"\{\{(\w+)\}\}", query.get("legendFormat", "")):
                self.assertIn(label, known, title)
                if "sum" in query["expr"]:
                    self.assertIn(label, kept, f"{title}: summed away")

    def test_prometheus_can_read_the_expressions(self):
        groups = [{"name": "dashboard", "rules": [
            {"record": f"panel:{index}", "expr": promql.plain(query["expr"])}
            for index, (_, query) in enumerate(self.queries)]}]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "dashboard.yaml"
            path.write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")
            result = test_prometheus.promtool("check", "rules", path)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_every_query_is_of_the_chosen_servers(self):
        for title, query in self.queries:
            self.assertEqual(query["datasource"], {"type": "prometheus", "uid": "${datasource}"})
            for name, matchers in promql.selectors(query["expr"]):
                self.assertIn(("job", "=~", "$job"), matchers, f"{title}: {name}")
                self.assertIn(("instance", "=~", "$instance"), matchers, f"{title}: {name}")

    def test_variables(self):
        variables = {entry["name"]: entry for entry in self.dashboard["templating"]["list"]}
        self.assertEqual(list(variables), ["datasource", "job", "instance"])
        self.assertEqual(variables["datasource"]["type"], "datasource")
        for name in ("job", "instance"):
            metric = re.match(r"label_values\((\w+)", variables[name]["query"]["query"]).group(1)
            self.assertIn(metric, promql.exported())

    def test_panels_are_explained_and_do_not_overlap(self):
        self.assertEqual(len({panel["id"] for panel in self.dashboard["panels"]}),
                         len(self.dashboard["panels"]))
        taken = {}
        for panel in self.dashboard["panels"]:
            place = panel["gridPos"]
            self.assertLessEqual(place["x"] + place["w"], 24, panel["title"])
            for cell in ((x, y) for x in range(place["x"], place["x"] + place["w"])
                         for y in range(place["y"], place["y"] + place["h"])):
                other = taken.setdefault(cell, panel["title"])
                self.assertEqual(other, panel["title"], f"both at {cell}")
        for panel in self.panels:
            # Says what is shown, and what a change means or asks for.
            self.assertRegex(panel["description"], r"^[A-Z0-9`].*[.:;] .*\.$", panel["title"])
            self.assertTrue(panel["fieldConfig"]["defaults"]["unit"], panel["title"])


class ServerTest(Dashboard, unittest.TestCase):
    name, rows, least_queries = "dashboard.json", ROWS, 50

    def test_every_metric_is_on_a_panel(self):
        shown = {name for panel in self.panels for target in panel["targets"]
                 for name, _ in promql.selectors(target["expr"])}
        shown |= {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
        self.assertEqual(sorted(set(promql.exported()) - shown), [])


class FleetTest(Dashboard, unittest.TestCase):
    name, rows, least_queries = "fleet.json", ROWS_OF_FLEET, 20

    def test_dashboards_are_told_apart(self):
        found = [json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")]
        for field in ("uid", "title"):
            self.assertEqual(len({one[field] for one in found}), len(found))


if __name__ == "__main__":
    unittest.main()
