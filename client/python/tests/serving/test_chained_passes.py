"""Passes whose calls a GPU's stream waits for: whether outputs are good is known at their end."""

import unittest

import numpy as np

from mla_client import errors
from mla_client.serving import How, Link, Passes, Scheduled, State
from serving.fake_server import SPEC, FakeServer, options

WEIGHTS = np.zeros((2, 2, 4)), np.zeros((2, 4, 2))


class Chain:
    """Calls of a step, of which one may have failed."""

    def __init__(self, error=None):
        self.error = error
        self.collected = 0

    def collect(self):
        self.collected += 1
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
                    self.assertEqual(passes.state("new"), State.LOST)

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


if __name__ == "__main__":
    unittest.main()
