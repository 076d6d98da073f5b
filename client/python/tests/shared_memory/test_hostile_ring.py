"""Completions of a server that contradict the submissions."""

import time
import unittest

import mla_client
import numpy as np
from fake_listener import BOOT_ID, FakeListener
from mla_client import DataLoss, Profile, wire
from mla_client.gen import attention_pb2
from mla_client.shm import ring
from mla_client.streams.over_ring import RingStream
from mla_client.types import AttendArgs, DType, Geometry

GEOMETRY = Geometry(2, 8, 4)
WAIT_S = 60
Reply = attention_pb2.AttendStreamReply


class HostileRingTest(unittest.TestCase):
    def setUp(self):
        self.listener = FakeListener()
        self.addCleanup(self.listener.close)
        self.stream = RingStream(self.listener.connect(), 1 << 14, lambda boot_id: None)
        self.addCleanup(self.stream.cancel)
        self.free = dict(self.stream.memory._blocks._free)
        self.completions = 0

    def attend(self, profile=Profile.ABSORBED, timeout_s=30.0, **fields):
        """A request under way, and where its outputs will be."""
        q = None if profile == Profile.APPEND_ONLY else np.zeros((1, 2, 12), np.float32)
        args = AttendArgs(0, profile, 0, 1, 0, 0 if q is None else 2, q,
                          np.zeros((1, 12), np.float32), False, DType.BF16, DType.BF16, timeout_s)
        args = args._replace(**fields)
        assembler = wire.ResultAssembler(args, GEOMETRY)
        (chunk,) = self.stream.chunks(args, GEOMETRY)
        return self.stream.attend(1, args, chunk, GEOMETRY, assembler, time.monotonic() + WAIT_S)

    def ask(self):
        return self.stream.ask(time.monotonic() + WAIT_S, end_step=attention_pb2.EndStep())

    def complete(self, kind, message=b""):
        """Completes the request that was submitted last."""
        fields = self.listener.submission(self.completions)[1]
        self.listener.fill(self.completions, kind, fields[4], message=message)
        self.listener.publish(self.completions)
        self.completions += 1

    def wait(self, request):
        return request.wait(time.monotonic() + WAIT_S)

    def test_an_attend_is_done_by_its_own_kind_of_entry_alone(self):
        message = Reply(boot_id=BOOT_ID, abort_step=attention_pb2.AbortStepReply())
        attended = Reply(boot_id=BOOT_ID, attend=attention_pb2.AttendReply())
        for profile in (Profile.ABSORBED, Profile.APPEND_ONLY):
            for kind, said in ((ring.MESSAGE, message), (ring.MESSAGE, attended), (0, None),
                               (9, None), (255, None)):
                request = self.attend(profile)
                self.complete(kind, said.SerializeToString() if said else b"")
                with self.subTest(kind=kind, profile=profile), self.assertRaises(DataLoss):
                    self.wait(request)
        request = self.attend()
        self.complete(ring.MESSAGE, Reply(error=attention_pb2.StepError(
            code=9, message="why")).SerializeToString())
        with self.assertRaisesRegex(mla_client.FailedPrecondition, "why"):
            self.wait(request)
        request = self.attend()
        self.complete(ring.ATTEND)
        self.assertIsNone(self.wait(request))
        self.assertEqual(self.stream.memory._blocks._free, self.free)

    def test_a_message_is_answered_by_a_message_of_its_kind_alone(self):
        for kind, said in ((ring.ATTEND, None), (7, None),
                           (ring.MESSAGE, Reply(begin_step=attention_pb2.BeginStepReply())),
                           (ring.MESSAGE, Reply())):
            request = self.ask()
            self.complete(kind, said.SerializeToString() if said else b"")
            with self.subTest(kind=kind), self.assertRaises(DataLoss):
                self.wait(request)
        request = self.ask()
        self.complete(ring.MESSAGE, Reply(end_step=attention_pb2.EndStepReply(
            lengths=[3])).SerializeToString())
        self.assertEqual(list(self.wait(request).end_step.lengths), [3])
        self.assertEqual(self.stream.memory._blocks._free, self.free)

    def test_what_cannot_be_sent_leaves_no_trace(self):
        for fields in (dict(timeout_s=float("nan")), dict(row_begin=2**32), dict(layer=-1)):
            with self.subTest(fields=fields), self.assertRaises((ValueError, mla_client.MlaError)):
                self.attend(**fields)
            self.assertEqual(self.stream.memory._blocks._free, self.free)
            self.assertEqual(self.stream._in_flight, {})
        request = self.attend()
        self.complete(ring.ATTEND)
        self.wait(request)
        self.assertIsNone(self.stream.broken)

    def test_a_timeout_beyond_what_an_entry_carries_is_none(self):
        for seconds, micros in ((0.0, 1), (1.5, 1_500_000), (4294.0, 4_294_000_000),
                                (4295.0, 0), (1e9, 0)):
            request = self.attend(timeout_s=seconds)
            self.assertEqual(self.listener.submission(self.completions)[1][11], micros)
            self.complete(ring.ATTEND)
            self.wait(request)


if __name__ == "__main__":
    unittest.main()
