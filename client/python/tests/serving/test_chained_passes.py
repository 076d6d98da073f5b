"""Passes whose calls a GPU's stream waits for: whether outputs are good is known at their end."""

import unittest
from unittest import mock

import numpy as np

from mla_client import errors
from mla_client.serving import How, Link, Passes, Scheduled, State
from mla_client.types import Prefix
from serving.fake_server import SPEC, FakeServer, options

WEIGHTS = np.zeros((2, 2, 4)), np.zeros((2, 4, 2))


class Chain:
    """Calls of a step, of which one may have failed."""

    def __init__(self, error=None):
        self.error = error
        self.collected = 0
        self.waits = []  # for the answers to a begin and an end

    def collect(self):
        self.collected += 1
        for wait in self.waits:
            wait()
        if self.error is not None:
            raise self.error


class ChainedPassesTest(unittest.TestCase):
    def setUp(self):
        self.server = FakeServer()
        self.link = Link(options(self.server))
        self.link.start(SPEC, lambda layer: WEIGHTS)

    def passes(self, **given):
        return Passes(self.link, SPEC.layers, **given)

    def begun(self, passes, scheduled, error=None, layers=SPEC.layers):
        """A pass, chained, after some layers; and its chain."""
        made = passes.begin(scheduled, number=1)
        if made.step._chains:  # it has that of the pass before
            (chain,) = made.step._chains
            chain.error = error
        else:
            chain = Chain(error)
            made.step._chains.append(chain)
        made.chained = True
        for _ in range(layers):
            passes.layer_done(made)
        return made, chain

    def old(self, passes):
        """A request with three rows."""
        made = passes.begin([Scheduled("old", 0, 3)])
        for _ in range(SPEC.layers):
            passes.layer_done(made)
        passes.end()

    def test_a_call_that_has_failed_loses_all_requests_of_the_pass(self):
        for error in (errors.InvalidArgument("a call"), errors.Unavailable("it is gone"),
                      errors.NotFound("step")):
            for deferred in (False, True):
                with self.subTest(error=error, deferred=deferred):
                    self.setUp()
                    passes = self.passes(deferred=deferred)
                    self.old(passes)
                    made, chain = self.begun(
                        passes, [Scheduled("old", 3, 1), Scheduled("new", 0, 4)], error)
                    passes.end()
                    self.assertEqual(chain.collected, 1)
                    # Neither's outputs count, though the new one's rows are all in this pass.
                    self.assertEqual([part.how for part in made.parts], [How.VOID, How.VOID])
                    self.assertEqual(sorted(passes.lost()), ["new", "old"])
                    self.assertEqual(passes.last_error.message, error.message)
                    self.assertEqual(passes.state("new"), State.AGAIN)

    def test_an_engine_that_keeps_first_tokens_awaits_the_pass_that_makes_them(self):
        passes = self.passes()
        passes.drops_first_tokens = False
        self.old(passes)
        for scheduled, chains in (([Scheduled("old", 3, 1)], True),
                                  ([Scheduled("old", 4, 1), Scheduled("new", 0, 2)], False)):
            made = passes.begin(scheduled)
            self.assertEqual(made.may_chain, chains)
            for _ in range(SPEC.layers):
                passes.layer_done(made)
            passes.end()

    def test_outputs_that_are_good_commit(self):
        passes = self.passes()
        self.old(passes)
        _, chain = self.begun(passes, [Scheduled("old", 3, 1), Scheduled("new", 0, 4)])
        passes.end()
        self.assertEqual((chain.collected, passes.lost()), (1, []))
        self.assertEqual((passes.length("old"), passes.length("new")), (4, 4))

    def test_a_call_that_is_not_sent_makes_the_layers_before_it_void(self):
        passes = self.passes()
        made, _ = self.begun(passes, [Scheduled("new", 0, 4)], layers=1)
        passes.fail(made, errors.Unavailable("it is gone"))
        self.assertEqual(made.parts[0].how, How.VOID)
        self.assertEqual(passes.lost(), ["new"])

    def test_with_drafts_a_pass_is_known_to_be_good_before_its_tokens_go_out(self):
        passes = self.passes(deferred=True)
        self.old(passes)
        made, chain = self.begun(passes, [Scheduled("old", 3, 2)])
        passes.end()
        self.assertEqual((chain.collected, passes.lost()), (1, []))
        self.assertTrue(made.step.open)

    def ahead(self, passes, scheduled, error=None):
        """A chained pass whose end is not waited for; the chain."""
        made, chain = self.begun(passes, scheduled, error)
        passes.end(ahead=True)
        return chain

    def test_an_end_that_goes_ahead_is_known_when_it_is_asked_for(self):
        passes = self.passes()
        self.old(passes)
        chain = self.ahead(passes, [Scheduled("old", 3, 1)])
        self.assertTrue(passes.ending)
        self.assertEqual((chain.collected, passes.state("old")), (0, State.STEPPING))
        self.assertEqual(passes.lost(), [])
        self.assertEqual((chain.collected, passes.state("old"), passes.length("old")),
                         (1, State.READY, 4))
        # The next pass settles the one before by itself.
        chain = self.ahead(passes, [Scheduled("old", 4, 1)])
        made = passes.begin([Scheduled("old", 5, 1)], number=2)
        self.assertEqual((chain.collected, made.whole), (2, True))  # it is the first pass's, too

    def test_a_call_that_fails_after_the_end_loses_the_requests_all_the_same(self):
        passes = self.passes()
        self.old(passes)
        self.ahead(passes, [Scheduled("old", 3, 1)], errors.InvalidArgument("a call"))
        self.assertEqual((passes.lost(), passes.state("old")), (["old"], State.AGAIN))
        self.assertEqual(passes.lost(), [])

    def test_begins_go_ahead_while_passes_are_good_and_there_is_room(self):
        self.server = FakeServer(pages=16, page=4)
        self.link = Link(options(self.server))
        self.link.start(SPEC, lambda layer: WEIGHTS)
        passes = self.passes()
        self.old(passes)
        waited = []  # passes whose begin was waited for
        for number in range(4, 40):
            before = len(self.link.client.begun_ahead)
            self.ahead(passes, [Scheduled("old", number - 1, 1)])
            if len(self.link.client.begun_ahead) == before:
                waited.append(number - 1)
        # The first, since no chained pass was good before; and where a page is needed and half of
        # the free ones are none.
        self.assertEqual(waited[0], 3)
        self.assertTrue(all(rows % 4 == 0 and rows >= 32 for rows in waited[1:]), waited)
        self.assertEqual((passes.lost(), passes.length("old")), ([], 39))

    def test_a_begin_that_went_ahead_and_is_refused_loses_its_pass_and_the_next_one_waits(self):
        passes = self.passes()
        self.old(passes)
        for rows in (3, 4):  # the second one's begin goes ahead
            self.ahead(passes, [Scheduled("old", rows, 1)])
            self.assertEqual(passes.lost(), [])
        self.assertEqual(len(self.link.client.begun_ahead), 1)
        self.link.client.refuse_next = errors.ResourceExhausted(
            "pages", errors.ErrorDetail(reason="pages_exhausted"))
        self.ahead(passes, [Scheduled("old", 5, 1)])
        self.assertEqual(passes.lost(), ["old"])
        self.assertEqual(passes.last_error.detail.reason, "pages_exhausted")
        ahead = len(self.link.client.begun_ahead)
        made = passes.begin([Scheduled("old", 0, 6, turn=1)], number=9)
        self.assertTrue(made.whole)
        self.assertEqual(len(self.link.client.begun_ahead), ahead)

    def decoding(self, passes, names=("a", "b")):
        """Requests of three rows each that have had one pass of one row, chained."""
        made = passes.begin([Scheduled(name, 0, 3) for name in names])
        for _ in range(SPEC.layers):
            passes.layer_done(made)
        passes.end()
        self.ahead(passes, [Scheduled(name, 3, 1) for name in names])

    def test_passes_alike_follow_one_another(self):
        for ahead in (True, False):
            with self.subTest(ahead=ahead):
                self.setUp()
                passes, client = self.passes(), self.link.client
                self.decoding(passes)
                ids = []
                for rows in range(4, 9):
                    made, chain = self.begun(passes, [Scheduled("a", rows, 1),
                                                      Scheduled("b", rows, 1)])
                    ids.append(made.step.step_id)
                    self.assertEqual((made.whole, made.step.open, passes.state("a")),
                                     (True, True, State.STEPPING))
                    passes.end(ahead)
                    self.assertEqual(passes.ending, ahead)
                    self.assertEqual(passes.lost(), [])
                    self.assertEqual((passes.length("a"), passes.length("b")), (rows + 1,) * 2)
                    self.assertEqual(passes.state("b"), State.READY)
                self.assertEqual((client.followed, chain.collected), (ids, 6))
                self.assertEqual(passes.counts["passes"], 7)
                self.assertEqual([one["length"] for one in self.server.sequences.values()], [9, 9])

    def test_a_pass_that_differs_does_not_follow(self):
        both = [Scheduled("a", 4, 1), Scheduled("b", 4, 1)]
        for scheduled, others in (
                (both[:1], {}), (both[::-1], {}), (both + [Scheduled("c", 0, 2)], {}),
                ([both[0], Scheduled("b", 4, 2)], {}), ([both[0], Scheduled("b", 3, 1)], {}),
                ([both[0], Scheduled("b", 0, 5, turn=1)], {}), (both[:1], {"gone": ["b"]}),
                ([], {}), (both, {"said": {"d": Prefix([1, 2])}})):
            with self.subTest(scheduled=scheduled, others=others):
                self.setUp()
                passes = self.passes()
                self.decoding(passes)
                made = passes.begin(scheduled, **others)
                self.assertEqual(self.link.client.followed, [])
                self.assertTrue(not scheduled or made.whole)
                for _ in range(SPEC.layers if scheduled else 0):
                    passes.layer_done(made)
                passes.end()
                self.assertEqual(passes.lost(), [])
                for each in scheduled:
                    self.assertEqual(passes.length(each.request), each.computed + each.new)

    def test_one_that_follows_and_is_refused_loses_its_requests(self):
        refusal = errors.NotFound("sequence", errors.ErrorDetail(reason="sequence_not_found"))
        for planted in ("begin", "call", "layer"):
            with self.subTest(planted):
                self.setUp()
                passes, client = self.passes(), self.link.client
                self.decoding(passes)
                if planted == "begin":
                    client.refuse_next = refusal
                made, _ = self.begun(passes, [Scheduled("a", 4, 1), Scheduled("b", 4, 1)],
                                     refusal if planted == "call" else None, layers=1)
                self.assertEqual(len(client.followed), 1)
                if planted == "layer":
                    passes.fail(made, refusal)
                passes.layer_done(made)
                passes.end(ahead=True)
                self.assertEqual(sorted(passes.lost()), ["a", "b"])
                self.assertEqual([part.how for part in made.parts], [How.VOID, How.VOID])
                again = passes.begin([Scheduled(name, 0, 5, turn=1) for name in "ab"])
                self.assertEqual((again.whole, len(client.followed)), (True, 1))

    def test_without_room_a_pass_does_not_follow(self):
        passes = self.passes()
        self.decoding(passes)
        with mock.patch.object(passes._room, "take", return_value=False):
            self.ahead(passes, [Scheduled("a", 4, 1), Scheduled("b", 4, 1)])
        self.assertEqual((self.link.client.followed, passes.lost()), ([], []))
        self.ahead(passes, [Scheduled("a", 5, 1), Scheduled("b", 5, 1)])
        self.assertEqual((len(self.link.client.followed), passes.lost()), (1, []))

    def test_a_request_that_another_rank_has_lost_ends_the_row_of_passes(self):
        passes = self.passes()
        self.decoding(passes)
        self.assertEqual(passes.lost(), [])
        passes.recall(["b"])
        made = passes.begin([Scheduled("a", 4, 1), Scheduled("b", 0, 5, turn=1)])
        self.assertEqual((self.link.client.followed, made.whole), ([], True))


if __name__ == "__main__":
    unittest.main()
