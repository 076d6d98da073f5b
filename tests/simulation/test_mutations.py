"""The simulator finds planted faults: a sample of them, or all with MLA_TEST_LONG."""

import collections
import os
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import mutation_harness  # noqa: E402

RUN_SECONDS = 22
AREAS = ("cache", "planner", "queue", "leases", "quotas", "redo", "prefix", "lists", "moves",
         "windows", "tiers", "ahead", "handover", "slabs")
ALL = os.environ.get("MLA_TEST_LONG", "") != ""


class MutationTest(unittest.TestCase):
    def test_every_area_has_its_mutations(self):
        areas = collections.Counter(mutation_harness.area_of(name)
                                    for name in mutation_harness.names())
        self.assertGreaterEqual(sum(areas.values()), 30)
        for area in AREAS:
            self.assertGreaterEqual(areas[area], 3, area)

    def test_every_mutation_is_in_the_table(self):
        table = (mutation_harness.ROOT / "docs/reliability.md").read_text()
        for name in mutation_harness.names():
            self.assertIn(f"| `{name}` |", table, "run mutation_harness.py --table docs/...")

    def test_every_mutation_says_what_it_plants(self):
        for name in mutation_harness.names():
            self.assertRegex(mutation_harness.about(name), r"^[A-Z].*\.$", name)

    def test_every_mutation_applies(self):
        for name in mutation_harness.names():
            check = mutation_harness.run(
                ["git", "apply", "--check", mutation_harness.PATCHES / f"{name}.patch"],
                cwd=mutation_harness.ROOT)
            self.assertEqual(check.returncode, 0, f"{name}: {check.stderr}")

    def test_mutations_are_found(self):
        harness = mutation_harness.Harness()
        for name in mutation_harness.names() if ALL else mutation_harness.SAMPLE:
            with self.subTest(name):
                result = harness.find(name)
                self.assertGreater(result.seeds, 0,
                                   f"not found within {mutation_harness.MOST_SEEDS} seeds")


if __name__ == "__main__":
    unittest.main()
