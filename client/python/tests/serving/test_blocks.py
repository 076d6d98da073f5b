"""Assigns the rows of a batch to requests by the blocks that they are written to."""

import pickle
import unittest
from random import Random

from mla_client import errors
from mla_client.serving import Admission, Given, Link, LostBlocks, Orders, Pause, Planner
from mla_client.types import Prefix
from serving.fake_server import SPEC, FakeServer, options

BLOCK = 4


def given(new=(), cached=(), resumed=()):
    """Decisions about requests: new and cached are (request, blocks, computed, rows)."""
    return [Given(name, computed, rows, tuple(blocks or ()),
                  begins=(name, blocks, computed, rows) in new or name in resumed)
            for name, blocks, computed, rows in (*new, *cached)]


class Batches(unittest.TestCase):
    def setUp(self):
        self.server = FakeServer()
        worker = Link(options(self.server))
        worker.start(SPEC, None)
        self.planner = Planner(Admission(Link(options(self.server), pause=Pause(0, 0)), "s", False),
                               BLOCK)

    def test_rows_are_known_by_the_blocks_that_they_are_written_to(self):
        plan = self.planner.plan(given(new=[("a", [3, 5], 0, 6), ("b", [7], 0, 2)]), ())
        batch = plan.in_order([7, 3], [2, 6])
        self.assertEqual([each.request for each in batch], ["b", "a"])
        plan = self.planner.plan(given(cached=[("a", [9], 8, 1), ("b", None, 2, 1)]), ())
        batch = plan.in_order([7, 9], [1, 1])
        self.assertEqual([(each.request, each.computed) for each in batch], [("b", 2), ("a", 8)])
        self.assertEqual(plan.first, {"a": 3, "b": 7})

    def test_a_batch_that_is_not_the_plans_is_refused(self):
        plan = self.planner.plan(given(new=[("a", [3], 0, 2), ("b", [7], 0, 2)]), ())
        for blocks, rows in (([3, 8], [2, 2]), ([3], [2]), ([3, 3], [2, 2]), ([3, 7], [2, 1]),
                             ([3, 7, 7], [2, 2, 1])):
            with self.assertRaisesRegex(errors.Internal, "the batch has"):
                plan.in_order(blocks, rows)

    def test_resumed_requests_have_other_blocks(self):
        self.planner.plan(given(new=[("a", [3], 0, 4)]), ())
        self.planner.plan([], ["a"])
        plan = self.planner.plan(given(cached=[("a", [6], 0, 4)], resumed=["a"]), ())
        self.assertEqual([each.request for each in plan.in_order([6], [4])], ["a"])
        self.assertEqual(plan.plan.scheduled[0].turn, self.turn_before(plan) + 1)

    def turn_before(self, plan):
        return plan.plan.scheduled[0].turn - 1

    def test_turns_rise_when_a_request_begins_from_nothing(self):
        turns = [self.planner.plan(given(new=[("a", [3, 4], 0, 4)]), ()).plan.scheduled[0].turn]
        for computed, rows in ((4, 1), (5, 1), (0, 6)):
            turns.append(self.planner.plan(given(
                cached=[("a", None, computed, rows)]), ()).plan.scheduled[0].turn)
        self.assertEqual([turn - turns[0] for turn in turns], [0, 0, 0, 1])

    def test_counts_that_are_too_high_are_the_batchs(self):
        planner = Planner(self.planner.admission, BLOCK, drafts=8)
        planner.plan(given(new=[("a", [3, 4, 5], 0, 4)]), ())
        # Some of the drafts that the plan counts were wrong.
        plan = planner.plan(given(cached=[("a", None, 8, 4)]), ())
        self.assertEqual([each.computed for each in plan.in_order([4], [4], [5])], [5])

    def test_an_order_is_read_once_while_passes_are_alike(self):
        orders, reads = Orders(), []

        def read(blocks):
            reads.append(blocks)
            return blocks
        plan = self.planner.plan(given(new=[("a", [3], 0, 2), ("b", [7], 0, 2)]), ())
        orders.of(plan, [2, 2], lambda: read([7, 3]))
        for computed in (2, 3):
            plan = self.planner.plan(given(cached=[("a", None, computed, 1),
                                                    ("b", None, computed, 1)]), ())
            batch = orders.of(plan, [1, 1], lambda: read([7, 3]))
            self.assertEqual([(each.request, each.computed) for each in batch],
                             [("b", computed), ("a", computed)])
        self.assertEqual(len(reads), 2)
        plan = self.planner.plan(given(cached=[("a", [8], 4, 1)]), ["b"])
        self.assertEqual([each.request for each in orders.of(plan, [1], lambda: read([8]))], ["a"])
        self.assertEqual(len(reads), 3)

    def test_a_plan_like_the_last_one_is_that_plan(self):
        """Against a planner that makes each plan from the start, in random runs of an engine."""
        random = Random(43)
        alike = 0
        for run in range(40):
            plain = Planner(self.planner.admission, BLOCK)
            planner = Planner(Admission(Link(options(self.server), pause=Pause(0, 0)), "s", False),
                              BLOCK)
            blocks = iter(range(10 ** 6))
            length, held, gone = {}, {}, set()
            for turn in range(30):
                event = random.random()
                if event < 0.1 and length:  # ends
                    gone = {random.choice(list(length))}
                    for name in gone:
                        del length[name], held[name]
                fresh = f"{run}.{turn}" if event > 0.9 or not length else ""
                if fresh:
                    length[fresh], held[fresh] = 0, 0
                rows = {name: 1 if before else random.randint(1, 9)
                        for name, before in length.items()}
                if event > 0.5 and event < 0.55 and len(rows) > 1:  # waits
                    del rows[random.choice(list(rows))]
                if event > 0.8:
                    rows = dict(reversed(rows.items()))
                more = {}
                for name, count in rows.items():
                    wanted = -(-(length[name] + count) // BLOCK) - held[name]
                    # An engine may give a block before it is needed.
                    wanted += random.random() < 0.1 and wanted >= 0
                    more[name] = [next(blocks) for _ in range(max(0, wanted))]
                    held[name] += len(more[name])
                scheduled = [Given(name, length[name], count, tuple(more[name]), name == fresh)
                             for name, count in rows.items()]
                want = plain.plan(scheduled, gone)
                got = None if fresh or gone else planner.again(
                    rows, list(rows), [length[name] for name in rows],
                    [(more[name],) if more[name] else None for name in rows])
                alike += got is not None
                got = got or planner.plan(scheduled, gone)
                self.assertEqual(*([(each.request, each.computed, each.new, each.sequence)
                                    for each in one.plan.scheduled] for one in (want, got)))
                self.assertEqual((got.first, got.key), (want.first, want.key))
                self.assertEqual({**got.blocks, **want.blocks}, got.blocks)
                for name, count in rows.items():
                    length[name] += count
                gone = set()
        self.assertGreater(alike, 300)

    def test_a_plan_that_is_sent_to_another_process_stays_as_it_was(self):
        first = self.planner.plan(given(new=[("a", [3], 0, 3)]), ())
        self.planner.plan(given(cached=[("a", None, 3, 1)]), ())
        second = self.planner.again({"a": 1}, ["a"], [4], [([9],)])
        third = self.planner.again({"a": 1}, ["a"], [5], [None])
        self.assertEqual(first.blocks, {3: "a"})
        self.assertEqual((second.plan.scheduled[0].computed, third.plan.scheduled[0].computed),
                         (4, 5))
        self.assertEqual(third.plan.number, second.plan.number + 1)
        self.assertEqual(pickle.loads(pickle.dumps(third)), third)
        self.assertIsNone(self.planner.again({"a": 1}, ["a"], [5], [None]))  # not the next one
        self.assertIsNone(self.planner.again({"a": 2}, ["a"], [6], [None]))
        self.planner.admission._said["b"] = Prefix([1, 2])  # which a plan has to say
        self.assertIsNone(self.planner.again({"a": 1}, ["a"], [6], [None]))

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
