"""Timeouts of any length, and values that are not timeouts."""

import unittest
from unittest import mock

import mla_client
import numpy as np
import server_binary
from mla_client import Geometry, InvalidArgument, ModelSpec, Profile
from mla_client.base import deadlines
from mla_client.streams.stream import timeout_us

FOREVER = float("inf")
SPEC = ModelSpec("timeouts", Geometry(2, 64, 16), 1, 0.1)
WRONG = (None, float("nan"), -1, -0.5, -FOREVER, "5", True, [1], 1j)
SERVER = None


def setUpModule():
    global SERVER
    SERVER = server_binary.start(listen="127.0.0.1:0")


def tearDownModule():
    SERVER.stop()


class TimeoutsTest(unittest.TestCase):
    def test_what_a_timeout_is(self):
        for given, seconds in ((0, 0.0), (3, 3.0), (np.float32(0.5), 0.5), (np.int64(7), 7.0),
                               (1e12, deadlines.LONGEST_S), (FOREVER, deadlines.LONGEST_S)):
            self.assertEqual(deadlines.checked("x", given), seconds)
        for wrong in WRONG:
            with self.subTest(wrong=wrong), self.assertRaisesRegex(InvalidArgument, " x: got"):
                deadlines.checked("x", wrong)

    def test_what_a_message_carries(self):
        for seconds, micros in ((0, 1), (1e-9, 1), (2.5, 2_500_000), (4294.967295, 2**32 - 1),
                                (4294.967296, 0), (deadlines.LONGEST_S, 0)):
            self.assertEqual(timeout_us(seconds), micros)

    def test_clients_that_wait_for_ever(self):
        for transport in ("ring", "shm", "inline"):
            for timeout_s in (FOREVER, 1e12, 1e300):
                with self.subTest(transport=transport, timeout_s=timeout_s), \
                        mla_client.Client.connect(SERVER.target, transport=transport,
                                                  timeout_s=timeout_s) as client, \
                        client.register_model(SPEC).open_sequence() as sequence:
                    with client.step([(sequence, 2)]) as step:
                        step.attend(0, np.zeros((2, 2, 80)), np.zeros((2, 80)), Profile.ABSORBED)
                    self.assertEqual(sequence.refresh().length, 2)
                    list(client.export_rows(sequence))
                    client.drain(deadline_ms=1)
                    client.cancel_drain()

    def test_clients_with_what_is_no_timeout(self):
        for wrong in WRONG:
            with self.subTest(wrong=wrong), self.assertRaisesRegex(InvalidArgument, "timeout_s"):
                mla_client.Client.connect(SERVER.target, timeout_s=wrong)
            with self.subTest(wrong=wrong), mock.patch("mla_client.client.Calls"), \
                    self.assertRaisesRegex(InvalidArgument, "timeout_s"):
                mla_client.Client(mock.Mock(), timeout_s=wrong)

    def test_calls_keep_no_memory_whatever_their_timeout(self):
        q, kv = np.zeros((64, 2, 80), np.float32), np.zeros((64, 80), np.float32)
        for transport in ("ring", "shm", "inline"):
            with mla_client.Client.connect(SERVER.target, transport=transport, timeout_s=30.0,
                                           shared_bytes=1 << 20) as client, \
                    client.register_model(SPEC).open_sequence() as sequence, \
                    client.step([(sequence, 64)], lease_ms=60_000) as step:
                memory = client._own_stream().memory
                free = memory and dict(memory._blocks._free)
                for timeout_s in (FOREVER, 1e12, 30, *WRONG[1:]):
                    for _ in range(8):
                        if timeout_s in (FOREVER, 1e12, 30):
                            step.attend(0, q, kv, Profile.ABSORBED, timeout_s=timeout_s)
                        else:
                            with self.assertRaisesRegex(InvalidArgument, "attend.timeout_s"):
                                step.attend(0, q, kv, Profile.ABSORBED, timeout_s=timeout_s)
                    self.assertEqual(memory and memory._blocks._free, free, timeout_s)
                self.assertEqual(step.end(), [64])


if __name__ == "__main__":
    unittest.main()
