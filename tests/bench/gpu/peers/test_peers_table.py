"""The page has the table of the newest run with the peers."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

# pylint: disable=wrong-import-position
import peers_table

INPUTS = ("docs/benchmarks/gpu", "tests/bench/gpu/peers")
PAGE = peers_table.ROOT / "docs/benchmarks/gpu/decode.md"


class PeersTableTest(unittest.TestCase):
    def test_the_page_has_the_newest_run(self):
        date, commit = peers_table.newest(peers_table.dense_rows())
        lines = peers_table.table(date, commit)
        page = PAGE.read_text(encoding="utf-8")
        self.assertEqual(len(lines), 34)
        begin = page.splitlines().index(lines[0])
        self.assertEqual(page.splitlines()[begin:begin + len(lines) + 1], [*lines, ""])
        for text in (f"{date}, commit {commit}",
                     f"{peers_table.reached(lines)} of the {len(lines) - 2} rows reach"):
            self.assertTrue(text in page, text)

    def test_another_run_has_its_own_rows(self):
        lines = peers_table.table("2026-11-30", "57625d03")
        self.assertEqual(len(lines), 34)
        # The median of 19.3, 20.4 and 20.5 us.
        self.assertTrue(any(line.startswith("| 16 | 16 | 1024 | 20.4 | 0.93 |") for line in lines))
        self.assertEqual(peers_table.table("2026-11-30", "other")[2:], [])


if __name__ == "__main__":
    unittest.main()
