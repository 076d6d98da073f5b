"""The demo of attention to a window, with attention computed by LocalReference."""

import dataclasses
import unittest

import mla_client
import model as models
import numpy as np
from v4 import run, window

INPUTS = ("client/demo", "client/python")
SMALL = models.Config(hidden=64, layers=3, heads=2, q_lora=32, kv_lora=32, nope=16, rope=8, v=16,
                      dense_width=64, expert_width=32, experts=4)
PROMPT = (list(b"the quick brown fox jumps over the lazy dog, twice") * 7)[:310]


def generate(service):
    return run.generate(models.seeded(SMALL), service, PROMPT, 16)


class Faulty(mla_client.LocalReference):
    """A service that changes an attend call."""

    def __init__(self, change):
        super().__init__(exact=True)
        self._change = change

    def _attend(self, step, args):
        return super()._attend(step, self._change(step, args))


class V4Test(unittest.TestCase):
    def test_a_run_agrees(self):
        result = generate(mla_client.LocalReference(exact=True))
        self.assertTrue(result.ok, result)
        self.assertEqual(result.lists.rows, len(PROMPT) + 15 - 3)  # in the one layer with lists
        self.assertEqual(result.lists.near_ties, 0)
        self.assertLess(result.tokens.error, 1e-3)

    def test_rounded_rows_agree_but_for_near_ties(self):
        result = generate(mla_client.LocalReference())
        self.assertTrue(result.ok, result)

    def test_other_entries_are_found(self):
        def changed(step, args, change):
            # `change`: lists and how many entries each row sees, as a column, to the new lists.
            if args.lists is None:
                return args
            last = (step.sequences[0].length + args.row_begin + np.arange(1, args.rows + 1)) // 4
            return args._replace(lists=np.where(args.lists < 0, -1,
                                                change(args.lists, last[:, None])))

        def reversed_lists(step, args):
            return changed(step, args, lambda lists, last: last - 1 - lists)

        drawn = np.random.default_rng(1)

        def replaced_lists(step, args):
            return changed(step, args, lambda lists, last: drawn.integers(
                0, np.maximum(last, 1), lists.shape, dtype=np.int32))

        def no_lists(step, args):
            del step
            return args._replace(lists=None)

        for change in (reversed_lists, replaced_lists, no_lists):
            with self.subTest(change=change.__name__):
                result = generate(Faulty(change))
                self.assertFalse(result.ok, result)

    def test_missing_sinks_are_found(self):
        class WithoutSinks(mla_client.LocalReference):
            def _register(self, spec, lease_ms, kv_scales, sinks):
                return super()._register(spec, lease_ms, kv_scales, [])

        result = generate(WithoutSinks(exact=True))
        self.assertFalse(result.ok, result)

    def test_another_tail_is_found(self):
        class Stale(mla_client.LocalReference):
            reads = 0

            def _read_tail(self, sequence_id, epoch, tail_bytes):
                position, tail = super()._read_tail(sequence_id, epoch, tail_bytes)
                self.reads += 1
                return position, np.full(len(tail) // 4, 9, np.float32).tobytes()

        service = Stale(exact=True)
        result = generate(service)
        self.assertGreater(service.reads, 1)
        self.assertFalse(result.ok, result)

    def test_a_narrower_window_is_found(self):
        class Narrow(mla_client.LocalReference):
            def _register(self, spec, lease_ms, kv_scales, sinks):
                made = super()._register(spec, lease_ms, kv_scales, sinks)
                model = self._models[spec.model_id]
                model.spec = dataclasses.replace(model.spec, window=window.WINDOW - 1)
                return made

        result = generate(Narrow(exact=True))
        self.assertFalse(result.ok, result)


if __name__ == "__main__":
    unittest.main()
