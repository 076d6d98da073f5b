"""Steps over every transport: the contract of a Service, and what streams promise beyond it."""

import os
import secrets
import signal
import time
import unittest

import mla_client
import numpy as np
import server_binary
from mla_client import Profile
from service_contract import LAYERS, ServiceContract

INPUTS = (".bazel/bin/server/mla-server", "client/python")
SERVER = None
SHARED_BYTES = 4 << 20


def setUpModule():
    global SERVER
    SERVER = server_binary.start()


def tearDownModule():
    SERVER.stop()


class Transport:
    """Mixin: a client of the transport that the class names."""

    transport = ""
    options = {}

    def make_service(self):
        client = mla_client.Client.connect(SERVER.target, timeout_s=10.0, transport=self.transport,
                                           shared_bytes=SHARED_BYTES, **self.options)
        self.assertEqual(client.transport, self.transport)
        return client


class StreamTests(Transport):
    """Features of a stream that LocalReference does not have."""

    def test_timings(self):
        with self.model.open_sequence() as sequence, \
                self.service.step([(sequence, 3)]) as step:
            for layer in range(LAYERS):
                result = step.attend(layer, self.worker.queries(3, Profile.ABSORBED),
                                     self.worker.kv(3), Profile.ABSORBED)
                timing = result.timings[0]
                self.assertGreater(timing.round_trip_us, 0)
                self.assertGreaterEqual(timing.round_trip_us, timing.kernel_us)
                self.assertEqual((timing.launch_requests, timing.launch_clients), (1, 1))

    def test_futures_complete_in_any_order(self):
        with self.model.open_sequence() as one, self.model.open_sequence() as two:
            kv = self.rows(3)
            steps = [self.service.step([(sequence, 3)]).begin() for sequence in (one, two)]
            asked = []
            for layer in range(LAYERS):
                for step in steps:
                    q = self.worker.queries(3, Profile.EXPANDED)
                    asked.append((layer, q, step.attend_async(layer, q, kv[layer])))
            for layer, q, future in reversed(asked):
                want, _ = self.worker.expected(layer, q, kv[layer], Profile.EXPANDED)
                self.close_to(future.result().o, want)
                self.assertIs(future.result(), future.result())
            for step in steps:
                self.assertEqual(step.end(), [3])

    def test_a_call_is_done_when_its_reply_is_there(self):
        with self.model.open_sequence() as one, self.model.open_sequence() as two:
            steps = [self.service.step([(sequence, 1)]).begin() for sequence in (one, two)]
            kv = self.worker.kv(1)
            os.kill(SERVER.pid, signal.SIGSTOP)
            os.waitpid(SERVER.pid, os.WUNTRACED)  # until all its threads have stopped
            try:
                futures = [step.attend_async(0, None, kv, Profile.APPEND_ONLY) for step in steps]
                for _ in range(3):
                    self.assertEqual([future.done() for future in futures], [False, False])
            finally:
                os.kill(SERVER.pid, signal.SIGCONT)
            while not all(future.done() for future in reversed(futures)):
                time.sleep(0.001)
            for future in futures:
                future.result()
                self.assertTrue(future.done())
            for step in steps:
                step.abort()

    def test_tensor_parallel_ranks(self):
        """Two streams in one step: each brings its heads, one brings the rows."""
        ranks = [self.service.open_stream(), self.service.open_stream()]
        with self.model.open_sequence() as sequence:
            step_id = secrets.randbits(60)
            steps = [self.service.step([(sequence, 4)], participants=2, step_id=step_id,
                                       stream=stream).begin() for stream in ranks]
            kv = self.rows(4)
            for layer in range(LAYERS):
                q = self.worker.queries(4, Profile.EXPANDED)
                want, _ = self.worker.expected(layer, q, kv[layer], Profile.EXPANDED)
                # The rank without rows asks first: it waits for the other's.
                second = steps[1].attend_async(layer, q[:, 1:], None, head_offset=1)
                first = steps[0].attend_async(layer, q[:, :1], kv[layer])
                self.close_to(np.concatenate([first.result().o, second.result().o], axis=1), want)
            with self.assertRaises(mla_client.FailedPrecondition):
                steps[1].end()
            self.assertEqual(steps[0].end(), [4])

    def test_losing_a_rank_aborts_the_step(self):
        ranks = [self.service.open_stream(), self.service.open_stream()]
        with self.model.open_sequence() as sequence:
            step_id = secrets.randbits(60)
            steps = [self.service.step([(sequence, 4)], participants=2, step_id=step_id,
                                       stream=stream).begin() for stream in ranks]
            ranks[1].cancel()
            deadline = time.monotonic() + 5
            while sequence.refresh().in_step and time.monotonic() < deadline:
                time.sleep(0.01)
            with self.assertRaises(mla_client.MlaError):
                steps[0].end()
            self.add(sequence, self.rows(2))

    def test_a_lost_stream_rolls_back(self):
        stream = self.service.open_stream()
        with self.model.open_sequence() as sequence:
            seen = self.add(sequence, self.rows(5))
            step = self.service.step([(sequence, 3)], stream=stream).begin()
            step.attend(0, None, self.worker.kv(3), Profile.APPEND_ONLY)
            stream.cancel()
            deadline = time.monotonic() + 5
            while sequence.refresh().in_step and time.monotonic() < deadline:
                time.sleep(0.01)
            self.assertEqual(sequence.length, 5)
            with self.assertRaises(mla_client.MlaError):
                step.attend(1, None, self.worker.kv(3), Profile.APPEND_ONLY)
            # The client opens another stream itself.
            self.add(sequence, self.rows(2), seen=seen)

    def test_rows_that_never_arrive(self):
        with self.model.open_sequence() as sequence:
            with self.service.step([(sequence, 3)]) as step:
                q = self.worker.queries(1, Profile.ABSORBED)
                with self.assertRaises(mla_client.FailedPrecondition):
                    step.attend(0, q, None, Profile.ABSORBED, row_begin=2)
                step.abort()

    def test_inputs_and_outputs_in_other_buffers(self):
        """Buffers of one stream are ordinary memory to another."""
        other = self.service.open_stream()
        with self.model.open_sequence() as sequence, \
                self.service.buffers(self.model, 3, stream=other) as buffers, \
                self.service.step([(sequence, 3)]) as step:
            for layer in range(LAYERS):
                buffers.q[...] = mla_client.to_bf16(self.worker.queries(3, Profile.EXPANDED))
                buffers.kv[...] = mla_client.to_bf16(self.worker.kv(3))
                result = step.attend(layer, buffers.q, buffers.kv, out=buffers)
                want, _ = self.worker.expected(layer, mla_client.from_bf16(buffers.q),
                                               mla_client.from_bf16(buffers.kv), Profile.EXPANDED)
                self.close_to(mla_client.from_bf16(result.o), want)

    def test_errors_carry_their_details(self):
        with self.model.open_sequence() as sequence, self.service.step([(sequence, 2)]) as step:
            kv = self.worker.kv(2)
            with self.assertRaises(mla_client.InvalidArgument) as caught:
                step.attend(LAYERS, None, kv, Profile.APPEND_ONLY)
            self.assertEqual(caught.exception.detail.field, "attend.layer")
            self.assertEqual(caught.exception.detail.got, str(LAYERS))
            with self.assertRaises(mla_client.InvalidArgument) as caught:
                step.attend(0, None, kv, Profile.APPEND_ONLY, row_begin=2)
            self.assertIn("attend.row", caught.exception.detail.field)
            for wrong in (-1, 2**32):
                with self.assertRaisesRegex(mla_client.InvalidArgument, "attend.layer"):
                    step.attend(wrong, None, kv, Profile.APPEND_ONLY)
            step.abort()
        with self.assertRaises(mla_client.MlaError):
            step.attend(0, None, kv, Profile.APPEND_ONLY)

    def test_a_closed_client_starts_nothing(self):
        client = self.make_service()
        with self.model.open_sequence() as sequence:
            model = client.register_model(self.model.spec)
            mine = mla_client.Sequence(model, sequence.refresh())
            step = client.step([(mine, 1)]).begin()
            client.close()
            with self.assertRaises(mla_client.Unavailable):
                step.attend(0, None, self.worker.kv(1), Profile.APPEND_ONLY)
            with self.assertRaises(mla_client.Unavailable):
                client.step([(mine, 1)]).begin()
            for call in (client.stats, lambda: client.probe(model)):
                with self.assertRaises(mla_client.Unavailable):
                    call()
            self.assertFalse(sequence.refresh().in_step)

    def test_a_client_that_is_given_up_does_not_wait_for_its_server(self):
        client = self.make_service()
        model = client.register_model(self.model.spec)
        sequence = model.open_sequence()
        step = client.step([(sequence, 1)]).begin()
        os.kill(SERVER.pid, signal.SIGSTOP)
        try:
            future = step.attend_async(0, None, self.worker.kv(1), Profile.APPEND_ONLY)
            client.give_up()
            # Closing the stream in order would wait for it, and end the call in another way.
            with self.assertRaisesRegex(mla_client.Unavailable, "was given up"):
                future.result()
        finally:
            os.kill(SERVER.pid, signal.SIGCONT)
        self.service.server_info()  # it answers others


class InlineTest(StreamTests, ServiceContract, unittest.TestCase):
    transport = "inline"


class SharedMemoryTest(StreamTests, ServiceContract, unittest.TestCase):
    transport = "shm"


class RingTest(StreamTests, ServiceContract, unittest.TestCase):
    transport = "ring"


class SleepingRingTest(Transport, ServiceContract, unittest.TestCase):
    transport = "ring"
    options = {"spin_us": 0}


class SmallInlineTest(Transport, ServiceContract, unittest.TestCase):
    """Every call split into many messages."""

    transport = "inline"
    options = {"message_bytes": 4096 + 400}
    # A row of fp32 is larger than a message, and PROJECTED cuts no rows.
    projected_steps = ServiceContract.projected_steps[:2]


class SmallSharedMemoryTest(SmallInlineTest):
    transport = "shm"


class SmallRingTest(SmallInlineTest):
    transport = "ring"


if __name__ == "__main__":
    unittest.main()
