"""The model of a node: points that are computed by hand, and the page's tables."""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

# pylint: disable=wrong-import-position
import node_model

PAGE = node_model.ROOT / "docs/benchmarks/node.md"
TERMS = json.loads(node_model.TERMS.read_text(encoding="utf-8"))


class NodeModelTest(unittest.TestCase):
    def test_a_point_by_hand(self):
        """EXPANDED over gRPC at batch 32. A token and layer: 128 heads of 192 and a row of 576
        there, 128 heads of 128 back, two bytes each."""
        there, back = 2 * 32 * (128 * 192 + 576), 2 * 32 * 128 * 128
        self.assertEqual((there, back), (1609728, 1048576))
        # 74.3 us / 8 ranks, 609.3 us of the message, 22 us of the launch, 1.6 MB at 51.6 GB/s,
        # 299.1 us of kernels, 1.05 MB at 52.5 GB/s.
        layer = 9.2875 + 609.3 + 22.0 + 31.1963 + 299.1 + 19.9729
        node = node_model.Node(TERMS)
        self.assertAlmostEqual(node.layer_us("EXPANDED", "inline gRPC", 32), layer, places=3)
        self.assertAlmostEqual(node.tokens_a_second("EXPANDED", "inline gRPC", 32),
                               32 / (61 * layer * 1e-6), places=2)
        self.assertEqual(node.layer_us("EXPANDED", "inline gRPC", 32, True), 609.3)

    def test_a_point_between_measured_ones(self):
        """PROJECTED over RDMA at batch 16: a third of the way from 8 to 32 for the kernels, 67.6 KB
        there and 229.4 KB back at 50 GB/s and over the bus."""
        kernels = 200.7 + (391.9 - 200.7) / 3
        layer = 16.1 + 1.3517 + 4.5875 + 22.0 + 1.3098 + kernels + 4.3691
        node = node_model.Node(TERMS)
        self.assertAlmostEqual(node.layer_us("PROJECTED", "RDMA", 16), layer, places=3)
        self.assertAlmostEqual(node.layer_us("PROJECTED", "RDMA", 16, True), kernels, places=6)

    def test_a_slow_line_is_the_busiest_part(self):
        """At 1.25 GB/s the longer direction of EXPANDED's messages, and of PROJECTED's."""
        slow = node_model.Node(TERMS, 1.25)
        self.assertAlmostEqual(slow.layer_us("EXPANDED", "RDMA", 64, True), 64 * 50.304 / 1.25)
        self.assertAlmostEqual(slow.layer_us("PROJECTED", "RDMA", 64, True), 64 * 14.336 / 1.25)

    def test_where_it_pays(self):
        node = node_model.Node(TERMS)
        for transport in node.transports:
            for in_turns in (False, True):
                batch = node.pays_from(transport, in_turns)
                for other in range(1, 129):
                    faster = (node.tokens_a_second("PROJECTED", transport, other, in_turns)
                              > node.tokens_a_second("EXPANDED", transport, other, in_turns))
                    if batch is not None and other >= batch:
                        self.assertTrue(faster, (transport, in_turns, other))
                    elif other == (batch or 129) - 1:
                        self.assertFalse(faster, (transport, in_turns, other))

    def test_outside_of_measured_points(self):
        points = {"10": 5.0, "20": 15.0}
        self.assertEqual([node_model.between(points, x) for x in (1, 10, 15, 20, 40)],
                         [5.0, 5.0, 10.0, 15.0, 30.0])

    def test_the_page_has_these_tables(self):
        self.assertIn(node_model.tables(TERMS), PAGE.read_text(encoding="utf-8"))

    def test_each_term_says_where_it_comes_from(self):
        named = [TERMS[name] for name in ("bytes", "kernels_us", "launch_us", "bus", "worker_us")]
        for term in (*named, *TERMS["transports"].values()):
            self.assertGreater(len(term["source"]), 20)
        self.assertEqual([name for name, one in TERMS["transports"].items()
                          if not one["measured"]], ["RDMA"])

    def test_rows_for_comparison(self):
        rows = node_model.rows_of(node_model.Node(TERMS))
        self.assertEqual(len(rows), 4 * 3 * len(node_model.BATCHES))
        self.assertEqual(len({(row["transport"], row["profile"], row["batch"]) for row in rows}),
                         len(rows))


if __name__ == "__main__":
    unittest.main()
