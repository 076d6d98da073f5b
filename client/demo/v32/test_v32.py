"""The demo of sparse attention, with attention computed by LocalReference."""

import unittest

import mla_client
import model as models
import numpy as np
from v32 import run, sparse

INPUTS = ("client/demo", "client/python")
SMALL = models.Config(hidden=64, layers=3, heads=2, q_lora=32, kv_lora=32, nope=16, rope=8, v=16,
                      dense_width=64, expert_width=32, experts=4)
PROMPT = (list(b"the quick brown fox jumps over the lazy dog, twice") * 7)[:310]


class Faulty(mla_client.LocalReference):
    """A service that attends to other rows than its lists name."""

    def __init__(self, change):
        super().__init__(exact=True)
        self._change = change

    def _attend(self, step, args):
        if args.lists is not None:
            first = step.sequences[0].length + args.row_begin
            lists = np.stack([self._change(entries, first + row)
                              for row, entries in enumerate(args.lists)])
            args = args._replace(lists=lists)
        return super()._attend(step, args)


def reversed_positions(entries, own):
    return np.where(entries < 0, entries, own - entries).astype(np.int32)


def other_positions(entries, own):
    return np.random.default_rng(own).integers(0, own + 1, entries.shape).astype(np.int32)


def one_less(entries, own):
    del own
    return np.concatenate([entries[1:], [np.int32(-1)]])  # without the best


class V32Test(unittest.TestCase):
    def setUp(self):
        self.model = models.seeded(SMALL)

    def test_a_run_agrees(self):
        for profile in run.PROFILES:
            result = run.generate(self.model, mla_client.LocalReference(exact=True), profile,
                                  PROMPT, 16)
            self.assertTrue(result.ok, result)
            self.assertEqual(result.lists.rows, (len(PROMPT) + 15) * SMALL.layers)
            self.assertEqual(result.lists.near_ties, 0)
            self.assertLess(result.tokens.error, 1e-3)

    def test_rounded_rows_agree_but_for_near_ties(self):
        result = run.generate(self.model, mla_client.LocalReference(), mla_client.Profile.ABSORBED,
                              PROMPT, 16)
        self.assertTrue(result.ok, result)

    def test_other_rows_are_found(self):
        for change in (reversed_positions, other_positions, one_less):
            with self.subTest(change=change.__name__):
                result = run.generate(self.model, Faulty(change), mla_client.Profile.ABSORBED,
                                      PROMPT, 16)
                self.assertFalse(result.ok, result)

    def test_dense_attention_is_found(self):
        class Dense(mla_client.LocalReference):
            def _attend(self, step, args):
                return super()._attend(step, args._replace(lists=None))

        result = run.generate(self.model, Dense(exact=True), mla_client.Profile.EXPANDED, PROMPT,
                              16)
        self.assertFalse(result.ok, result)


class ServersIndexerTest(unittest.TestCase):
    """As above, with lists of the service's own indexer."""

    def generate(self, service):
        return run.generate(models.seeded(SMALL), service, mla_client.Profile.ABSORBED, PROMPT, 16,
                            by_service=True)

    def test_a_run_agrees(self):
        result = self.generate(mla_client.LocalReference())
        self.assertTrue(result.ok, result)
        self.assertEqual(result.lists.rows, (len(PROMPT) + 15) * SMALL.layers)

    def test_other_choices_are_found(self):
        for change in (reversed_positions, other_positions, one_less):
            class Other(mla_client.LocalReference):
                """Its indexer chooses other rows, and says so."""

                def _select(self, opened, model, args, inputs, change=change):
                    lists = super()._select(opened, model, args, inputs)
                    first = opened.sequences[0].length + args.row_begin
                    return np.stack([change(entries, first + row)
                                     for row, entries in enumerate(lists)])

            with self.subTest(change=change.__name__):
                result = self.generate(Other())
                self.assertFalse(result.ok, result)
                self.assertGreater(result.lists.wrong, 0)

    def test_lists_that_are_returned_and_not_attended_to_are_found(self):
        class Liar(mla_client.LocalReference):
            """Returns the right lists, and attends to others."""

            def _compute(self, opened, model, args, q):
                first = opened.sequences[0].length + args.row_begin
                lists = np.stack([reversed_positions(entries, first + row)
                                  for row, entries in enumerate(args.lists)])
                return super()._compute(opened, model, args._replace(lists=lists), q)

        result = self.generate(Liar())
        self.assertFalse(result.ok, result)


class IndexerTest(unittest.TestCase):
    def test_chooses_the_best_and_of_equals_the_lower(self):
        logits = np.full((3, 40), -np.inf, np.float32)
        logits[0, :3] = [1, 2, 2]
        logits[1, :30] = 1
        logits[2] = np.arange(40)
        lists = sparse.Indexer.choose(logits)
        self.assertEqual([list(positions) for positions in lists],
                         [[1, 2, 0], list(range(16)), list(range(39, 23, -1))])

    def test_judges_lists(self):
        logits = np.arange(40, dtype=np.float32)
        best = np.arange(24, 40)
        for positions, near_ties, wrong in (
                (best, 0, 0), (best[::-1], 0, 0),
                (np.r_[23, 25:40], 1, 0),          # one place off
                (np.r_[20, 25:40], 0, 1),          # four off: more than the gap
                (np.r_[24:39, 3], 0, 1),           # without the very best
                (best[1:], 0, 1), (np.r_[best, 23], 0, 1)):
            comparison = sparse.ListComparison()
            comparison.add(positions, logits)
            self.assertEqual((comparison.near_ties, comparison.wrong), (near_ties, wrong))


if __name__ == "__main__":
    unittest.main()
