"""Assigns the rows of a batch to requests, without vLLM."""

import pathlib
import pickle
import sys
import types
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "client" / "python"),
                str(HERE.parents[1] / "client" / "python" / "tests")]

# pylint: disable=wrong-import-position
from mla_client import errors
from mla_client.serving import Admission, Link, Pause
from mla_client.vllm.batches import LostBlocks, Orders, Planner
from serving.fake_server import SPEC, FakeServer, options

BLOCK = 4


def output(new=(), cached=(), gone=(), preempted=(), resumed=()):
    """A SchedulerOutput: new and cached are (request, blocks, computed, rows)."""
    rows = {each[0]: each[3] for each in (*new, *cached)}
    return types.SimpleNamespace(
        finished_req_ids=set(gone), preempted_req_ids=set(preempted), num_scheduled_tokens=rows,
        scheduled_new_reqs=[types.SimpleNamespace(
            req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, blocks, computed, _ in new],
        scheduled_cached_reqs=types.SimpleNamespace(
            req_ids=[each[0] for each in cached], resumed_req_ids=set(resumed),
            new_block_ids=[(each[1],) if each[1] else None for each in cached],
            num_computed_tokens=[each[2] for each in cached]))


class Batches(unittest.TestCase):
    def setUp(self):
        self.server = FakeServer()
        worker = Link(options(self.server))
        worker.start(SPEC, None)
        self.planner = Planner(Admission(Link(options(self.server), pause=Pause(0, 0)), "s", False),
                               BLOCK)

    def test_rows_are_known_by_the_blocks_that_they_are_written_to(self):
        plan = self.planner.plan(output(new=[("a", [3, 5], 0, 6), ("b", [7], 0, 2)]))
        batch = plan.in_order([7, 3], [2, 6])
        self.assertEqual([each.request for each in batch], ["b", "a"])
        plan = self.planner.plan(output(cached=[("a", [9], 8, 1), ("b", None, 2, 1)]))
        batch = plan.in_order([7, 9], [1, 1])
        self.assertEqual([(each.request, each.computed) for each in batch], [("b", 2), ("a", 8)])
        self.assertEqual(plan.first, {"a": 3, "b": 7})

    def test_a_batch_that_is_not_the_plans_is_refused(self):
        plan = self.planner.plan(output(new=[("a", [3], 0, 2), ("b", [7], 0, 2)]))
        for blocks, rows in (([3, 8], [2, 2]), ([3], [2]), ([3, 3], [2, 2]), ([3, 7], [2, 1]),
                             ([3, 7, 7], [2, 2, 1])):
            with self.assertRaisesRegex(errors.Internal, "the batch has"):
                plan.in_order(blocks, rows)

    def test_resumed_requests_have_other_blocks(self):
        self.planner.plan(output(new=[("a", [3], 0, 4)]))
        self.planner.plan(output(preempted=["a"]))
        plan = self.planner.plan(output(cached=[("a", [6], 0, 4)], resumed=["a"]))
        self.assertEqual([each.request for each in plan.in_order([6], [4])], ["a"])
        self.assertEqual(plan.plan.scheduled[0].turn, self.turn_before(plan) + 1)

    def turn_before(self, plan):
        return plan.plan.scheduled[0].turn - 1

    def test_turns_rise_when_a_request_begins_from_nothing(self):
        turns = [self.planner.plan(output(new=[("a", [3, 4], 0, 4)])).plan.scheduled[0].turn]
        for computed, rows in ((4, 1), (5, 1), (0, 6)):
            turns.append(self.planner.plan(output(
                cached=[("a", None, computed, rows)])).plan.scheduled[0].turn)
        self.assertEqual([turn - turns[0] for turn in turns], [0, 0, 0, 1])

    def test_counts_that_are_too_high_are_the_batchs(self):
        planner = Planner(self.planner.admission, BLOCK, drafts=8)
        planner.plan(output(new=[("a", [3, 4, 5], 0, 4)]))
        plan = planner.plan(output(cached=[("a", None, 8, 4)]))  # some of whose drafts were wrong
        self.assertEqual([each.computed for each in plan.in_order([4], [4], [5])], [5])

    def test_an_order_is_read_once_while_passes_are_alike(self):
        orders, reads = Orders(), []

        def read(blocks):
            reads.append(blocks)
            return blocks
        plan = self.planner.plan(output(new=[("a", [3], 0, 2), ("b", [7], 0, 2)]))
        orders.of(plan, [2, 2], lambda: read([7, 3]))
        for computed in (2, 3):
            plan = self.planner.plan(output(cached=[("a", None, computed, 1),
                                                    ("b", None, computed, 1)]))
            batch = orders.of(plan, [1, 1], lambda: read([7, 3]))
            self.assertEqual([(each.request, each.computed) for each in batch],
                             [("b", computed), ("a", computed)])
        self.assertEqual(len(reads), 2)
        plan = self.planner.plan(output(cached=[("a", [8], 4, 1)], gone=["b"]))
        self.assertEqual([each.request for each in orders.of(plan, [1], lambda: read([8]))], ["a"])
        self.assertEqual(len(reads), 3)

    def test_lost_blocks_are_looked_for_once_and_when_they_are_asked_for(self):
        for ask, answer in ((bool, True), (len, 2), (sorted, [3, 8]),
                            (lambda lost: 8 in lost, True),
                            (lambda lost: {4} | lost, {3, 4, 8}),
                            (lambda lost: lost | {4}, {3, 4, 8})):
            searches = []

            def find():
                searches.append(1)
                return {8, 3}
            lost = LostBlocks(find)
            self.assertEqual(searches, [])
            self.assertEqual(ask(lost), answer)
            sent = pickle.loads(pickle.dumps(lost))  # to the engine in another process
            self.assertEqual((type(sent), sent, len(searches)), (set, {3, 8}, 1))
        self.assertFalse(LostBlocks(set))


if __name__ == "__main__":
    unittest.main()
