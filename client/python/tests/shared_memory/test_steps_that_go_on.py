"""Steps that follow one another, whose begins and ends are calls of a chain of the C library."""

import unittest

import numpy as np
from mla_client import Profile, errors
from mla_client.base import tracing
from service_contract import LAYERS
from shared_memory.native_ring import Gpu, RingCase


class StepsThatGoOnTest(RingCase):
    def a_chained_step(self, client, sequence, buffers, gpu):
        """A step whose calls are chained, ended ahead with all of its rows, and finished."""
        step = client.step([(sequence, 3)]).begin(ahead=True)
        chain = step.chain(buffers, Profile.ABSORBED)
        self.calls(chain, gpu)
        step.end_ahead()
        self.assertFalse(step.go_on())  # not before it has ended
        step.finish()
        return step, chain

    def calls(self, chain, gpu):
        for layer in range(LAYERS):
            chain.attend(layer, gpu.stream.value)

    def test_a_step_goes_on(self):
        client, model = self.pinned()
        gpu = Gpu()
        with model.open_sequence() as sequence, model.open_sequence() as other:
            buffers = self.filled(client, model)
            awaited = []
            for _ in range(4):
                with client.step([(other, 3)]) as step:
                    for layer in range(LAYERS):
                        awaited.append(step.attend(layer, buffers.q, buffers.kv, Profile.ABSORBED,
                                                   out=buffers).o.copy())
            step, chain = self.a_chained_step(client, sequence, buffers, gpu)
            found, ids = [], {step.step_id}
            for turn in range(1, 4):
                self.assertTrue(step.go_on())
                ids.add(step.step_id)
                self.assertTrue(step.open)
                for layer in range(LAYERS):
                    buffers.o[...] = 0
                    chain.attend(layer, gpu.stream.value)
                    gpu.finish()
                    found.append(buffers.o.copy())
                step.end_ahead()
                self.assertEqual(sequence.length, 3 * turn)  # as before
                step.finish()
                self.assertEqual((sequence.length, step.open), (3 * turn + 3, False))
            self.assertEqual(len(ids), 4)
            np.testing.assert_array_equal(found, awaited[LAYERS:])
            self.assertEqual(sequence.refresh().length, 12)

    def test_a_step_that_goes_on_and_is_refused_says_so_at_the_end(self):
        client, model = self.pinned()
        gpu = Gpu()
        for ending in ("finish", "collect", "abort"):
            with self.subTest(ending), model.open_sequence() as sequence:
                buffers = self.filled(client, model)
                step, chain = self.a_chained_step(client, sequence, buffers, gpu)
                self.assertTrue(step.go_on())
                self.calls(chain, gpu)
                step.end_ahead()
                step.finish()
                sequence.truncate(1)  # so the next one would start elsewhere
                self.assertTrue(step.go_on())
                self.calls(chain, gpu)
                if ending == "abort":
                    with self.assertRaises(errors.NotFound):
                        step.abort()
                else:
                    if ending == "finish":
                        step.end_ahead()
                    with self.assertRaises(errors.MlaError) as caught:
                        getattr(step, ending)()
                    self.assertEqual(caught.exception.detail.reason, "epoch_mismatch")
                self.assertFalse(step.go_on())
                self.assertEqual(sequence.length, 1)
                with client.step([(sequence, 1)]) as step:  # the stream is as good as before
                    step.attend(0, self.q[:1], self.kv[:1], Profile.ABSORBED)
                    step.abort()
                buffers.release()

    def test_a_step_whose_rows_were_not_all_kept_does_not_go_on(self):
        client, model = self.pinned()
        gpu = Gpu()
        with model.open_sequence() as sequence:
            buffers = self.filled(client, model)
            step, chain = self.a_chained_step(client, sequence, buffers, gpu)
            self.assertTrue(step.go_on())
            self.calls(chain, gpu)
            step.end_ahead([1])
            step.finish()
            self.assertEqual((sequence.length, step.go_on()), (4, False))
            step, chain = self.a_chained_step(client, sequence, buffers, gpu)
            self.assertTrue(step.go_on())
            self.calls(chain, gpu)
            step.abort()
            self.assertEqual((sequence.length, step.go_on()), (7, False))
            step, chain = self.a_chained_step(client, sequence, buffers, gpu)
            self.assertTrue(step.go_on())
            self.calls(chain, gpu)
            self.assertEqual((step.end(), step.go_on()), ([13], False))

    def test_a_step_with_a_trace_does_not_go_on(self):
        client, model = self.pinned()
        gpu = Gpu()
        with model.open_sequence() as sequence:
            buffers = self.filled(client, model)
            step, _ = self.a_chained_step(client, sequence, buffers, gpu)
            self.addCleanup(tracing.set_source, None)
            tracing.set_source(lambda: "00-" + "1" * 32 + "-" + "2" * 16 + "-01")
            self.assertFalse(step.go_on())


if __name__ == "__main__":
    unittest.main()
