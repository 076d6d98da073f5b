"""Every object of the chart fits the interface of Kubernetes and the custom resources that it uses,
by models that others have made from their definitions. Part of the longer runs: the models are
packages of PyPI."""

import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = pathlib.Path(__file__).with_name("chart_models.py")
sys.path += [str(PROGRAM.parents[1]), str(PROGRAM.parents[2] / "engines")]

# pylint: disable=wrong-import-position
import chart  # noqa: E402
import environments  # noqa: E402

LONG = os.environ.get("MLA_TEST_LONG", "") != ""


class ChartModelsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not LONG:
            raise unittest.SkipTest("part of the longer runs: ./dev test --all")
        cls.python = environments.make("chart-models")

    def check(self, items):
        """The exit status and what the program printed."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(items, file)
            file.flush()
            done = subprocess.run([self.python, PROGRAM, file.name], text=True, check=False,
                                  stdout=subprocess.PIPE, timeout=300)
        return done.returncode, done.stdout

    def test_objects_of_all_scenarios_fit(self):
        items = [item for over in chart.SCENARIOS.values()
                 for item in chart.Rendered(over).objects.values()]
        status, said = self.check(items)
        self.assertEqual(status, 0, said)
        for kind in ("StatefulSet", "Certificate", "PrometheusRule", "ServiceMonitor"):
            self.assertIn(kind, said.split("\n", 1)[0].split())

    def test_faults_are_found(self):
        """An unknown field deep inside, a wrong type, a missing field, an unknown kind."""
        item = chart.Rendered(chart.SCENARIOS["everything"])
        unknown, wrong, missing, other = (copy.deepcopy(item.one(kind)) for kind in
                                          ("ServiceMonitor", "StatefulSet", "Certificate",
                                           "Service"))
        unknown["spec"]["endpoints"][0]["pathh"] = "/metrics"
        wrong["spec"]["replicas"] = "many"
        del missing["spec"]["issuerRef"]
        other["kind"] = "Servise"
        status, said = self.check([unknown, wrong, missing, other])
        self.assertEqual(status, 1)
        for fault in ("ServiceMonitor.spec.endpoints[0].pathh: not known", "spec.replicas",
                      "spec.issuerRef", "v1 Servise: no model"):
            self.assertIn(fault, said)


if __name__ == "__main__":
    unittest.main()
