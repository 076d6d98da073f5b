"""The scripts that make pictures of the documents: charts from answers of Prometheus, and sizes."""

import json
import pathlib
import re
import sys
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs/pictures"
sys.path.insert(0, str(PICTURES))

import dashboard  # noqa: E402  pylint: disable=wrong-import-position
from parts import browser  # noqa: E402  pylint: disable=wrong-import-position


class DashboardTest(unittest.TestCase):
    def setUp(self):
        self.board = json.loads(dashboard.DASHBOARD.read_text(encoding="utf-8"))

    def answers(self, labels, points):
        """One series for every expression of the rows that are drawn."""
        return {target["expr"]: [(labels, points)]
                for _, panels in dashboard.panels_of(self.board, dashboard.ROWS)
                for panel in panels for target in panel["targets"]}

    def test_rows_are_the_dashboards(self):
        drawn = dashboard.panels_of(self.board, dashboard.ROWS)
        self.assertEqual([row["title"] for row, _ in drawn], list(dashboard.ROWS))
        self.assertGreater(min(len(panels) for _, panels in drawn), 3)

    def test_every_panel_is_drawn_with_its_values(self):
        answers = self.answers({"tenant": "<red>"}, [(10.0, 1.0), (11.0, 3.0)])
        text, height = dashboard.draw(self.board, dashboard.ROWS, answers)
        for _, panels in dashboard.panels_of(self.board, dashboard.ROWS):
            for panel in panels:
                self.assertIn(f"<b>{panel['title']}</b>", text)
        self.assertNotIn("<red>", text)
        self.assertIn("&lt;red&gt;", text)
        bottoms = [int(top) + int(size) for top, size in
                   re.findall(r"top: (\d+)px; width: \d+px; height: (\d+)px", text)]
        self.assertGreater(len(bottoms), 15)
        self.assertLessEqual(max(bottoms), height)

    def test_a_chart_reaches_from_its_first_value_to_its_last(self):
        text = dashboard.chart([("a", [(10.0, 0.0), (15.0, 2.0), (20.0, 4.0)])], "s", 100, 54)
        self.assertIn('points="0,54 50,34 100,14"', text)
        self.assertIn(">4 s<", text)
        self.assertIn("No data", dashboard.chart([], "s", 100, 54))

    def test_units_are_grafanas(self):
        for value, unit, text in ((0.25, "s", "250 ms"), (3e-6, "s", "3 us"), (0.826, "percentunit",
                                  "82.6 %"), (5 * 2**20, "bytes", "5 MiB"), (3830, "short",
                                  "3.83 K"), (577, "reqps", "577 req/s"), (2.5e9, "Bps",
                                  "2.5 GB/s"), (0, "none", "0")):
            self.assertEqual(dashboard.in_unit(value, unit), text)

    def test_values_that_are_no_numbers_are_left_out(self):
        reply = mock.MagicMock()
        reply.__enter__.return_value.read.return_value = json.dumps({"data": {"result": [
            {"metric": {"a": "b"}, "values": [[1, "NaN"], [2, "5"], [3, "+Inf"]]},
            {"metric": {"a": "c"}, "values": [[1, "NaN"]]}]}}).encode()
        with mock.patch("urllib.request.urlopen", return_value=reply) as asked:
            found = dashboard.ask("http://x", 'rate(m{job=~"$job"}[$__rate_interval])', 1, 3)
        self.assertEqual(found, [({"a": "b"}, [(2, 5.0)])])
        self.assertIn("%5B15s%5D", asked.call_args[0][0])


class PicturesTest(unittest.TestCase):
    def test_pictures_are_small_and_shown(self):
        pages = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md"))
        found = sorted(PICTURES.glob("*.png"))
        self.assertEqual(len(found), 3)
        for path in found:
            self.assertLessEqual(path.stat().st_size, browser.MOST_BYTES, path)
            self.assertIn(f"](pictures/{path.name})", pages)

    def test_the_command_knows_every_script(self):
        command = (ROOT / "dev").read_text(encoding="utf-8")
        (known,) = re.findall(r"die \"picture: .*there are: (.*)\"", command)
        self.assertEqual(sorted(known.split(", ")),
                         sorted(path.stem for path in PICTURES.glob("*.py")))
        self.assertRegex(command, r"docs \| picture \|")  # among the commands that are run


if __name__ == "__main__":
    unittest.main()
