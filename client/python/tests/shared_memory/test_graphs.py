"""Chained calls of the C library's rings in graphs of a GPU's runtime."""

import ctypes
import unittest

import mla_client
import numpy as np
from mla_client import Profile, errors
from service_contract import LAYERS
from shared_memory.native_ring import Gpu, RingCase


class GraphTest(RingCase):
    def captured(self, client, model, gpu, layers=range(LAYERS)):
        """A graph with a call for each layer, which copies q in and o out; its calls, the source of
        q and what o is copied to."""
        buffers = self.filled(client, model)
        calls = client.capture(buffers, Profile.ABSORBED)
        q, found = buffers.q.copy(), np.zeros((LAYERS, *buffers.o.shape), buffers.o.dtype)
        calls.copy_in(buffers.q.ctypes.data, q.nbytes)
        calls.copy_out(buffers.o.ctypes.data, buffers.o.nbytes)

        def work():
            for place, layer in enumerate(layers):
                calls.attend(layer, gpu.stream.value, [q.ctypes.data], found[place].ctypes.data)
        graph = gpu.capture(work)
        self.addCleanup(gpu.library.fake_hip_free_captured, ctypes.c_void_p(graph))
        self.addCleanup(lambda: buffers)  # as long as the graph
        return graph, calls, q, found

    def test_a_graph_is_launched_again_and_again(self):
        client, model = self.pinned()
        gpu = Gpu()
        graph, calls, q, found = self.captured(client, model, gpu)
        with model.open_sequence() as sequence:
            for turn in range(30):  # many times around the ring, at other slots each time
                found[...] = 0
                step = client.step([(sequence, 3)]).begin(ahead=turn % 2 == 1)
                step.replay(calls, graph, gpu.stream.value)
                gpu.launch(graph)
                gpu.finish()
                step.end_ahead([0])
                for layer in range(LAYERS):
                    np.testing.assert_allclose(mla_client.from_bf16(found[layer]),
                                               self.expected_of(layer), atol=2e-2, rtol=2e-2)
                step.finish()
            # Calls of a chain go between launches of graphs.
            buffers = self.filled(client, model)
            with client.step([(sequence, 3)]) as step:
                chain = step.chain(buffers, Profile.ABSORBED)
                chain.attend(0, gpu.stream.value)
                gpu.finish()
                np.testing.assert_allclose(mla_client.from_bf16(buffers.o), self.expected_of(0),
                                           atol=2e-2, rtol=2e-2)
                step.abort()

    def expected_of(self, layer):
        return self.worker.expected(layer, self.q, self.kv, Profile.ABSORBED)[0]

    def test_a_graph_whose_call_fails_lets_the_stream_go_on_and_says_so(self):
        client, model = self.pinned()
        gpu = Gpu()
        graph, calls, _, _ = self.captured(client, model, gpu, layers=(0, LAYERS))
        with model.open_sequence() as sequence:
            step = client.step([(sequence, 3)]).begin()
            step.replay(calls, graph, gpu.stream.value)
            gpu.launch(graph)
            gpu.finish()
            with self.assertRaises(errors.InvalidArgument) as caught:
                step.collect()
            self.assertEqual(caught.exception.detail.field, "attend.layer")
            step.abort()

    def test_a_stream_that_captures_nothing_is_refused(self):
        client, model = self.pinned()
        buffers, gpu = self.filled(client, model), Gpu()
        calls = client.capture(buffers, Profile.ABSORBED)
        with self.assertRaises(errors.FailedPrecondition) as caught:
            calls.attend(0, gpu.stream.value)
        self.assertIn("captures no graph", caught.exception.message)

    def test_a_graph_of_more_calls_than_the_ring_has_entries_is_refused(self):
        client, model = self.pinned()
        gpu = Gpu()
        buffers = self.filled(client, model)
        calls = client.capture(buffers, Profile.ABSORBED)
        entries = client._own_stream().memory.ring_entries
        graph = gpu.capture(lambda: [calls.attend(0, gpu.stream.value)
                                     for _ in range(entries + 1)])
        with model.open_sequence() as sequence, client.step([(sequence, 3)]) as step:
            with self.assertRaises(errors.ResourceExhausted) as caught:
                step.replay(calls, graph, gpu.stream.value)
            self.assertIn(f"the ring has {entries} entries", caught.exception.message)
            step.abort()
        gpu.library.fake_hip_free_captured(ctypes.c_void_p(graph))


if __name__ == "__main__":
    unittest.main()
