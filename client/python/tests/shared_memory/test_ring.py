"""The client's end of regions and rings, against listeners that hold anything."""

import ctypes
import os
import re
import socket
import struct
import tempfile
import threading
import time
import types
import unittest
from unittest import mock

import mla_client
import server_binary
from fake_listener import ARENA_BYTES, BOOT_ID, ENTRIES, FakeListener, ring_bytes
from mla_client.gen import attention_pb2
from mla_client.shm import device, fence, futex, handshake, ring, shared_memory
from mla_client.streams.over_ring import RingStream

# Bytes of the types in ring_layout.h, as struct's letters.
LETTERS = {"uint8_t": "B", "uint16_t": "H", "uint32_t": "I", "int32_t": "i", "uint64_t": "Q"}
SIZES = {"kHandleBytes": 16, "kHandshakeTextBytes": handshake.TEXT_BYTES}


def descriptors():
    return len(os.listdir("/proc/self/fd"))


class LayoutTest(unittest.TestCase):
    """struct's letters here must agree with the contract in C++."""

    def setUp(self):
        self.text = (server_binary.ROOT / "proto/wire/ring_layout.h").read_text()

    def fields(self, name):
        """struct's format of a plain struct of the header."""
        body = re.search(rf"^struct {name} {{$(.*?)^}};$", self.text, re.M | re.S).group(1)
        letters = "<"
        for kind, many in re.findall(r"^  (\w+) \w+(?:\[(\w+)\])?;", body, re.M):
            count = SIZES.get(many) or int(many or 0)
            letters += f"{count}s" if count else LETTERS[kind]
        return letters

    def test_packets_and_entries(self):
        for name, ours in (("ConnectRequest", handshake.CONNECT_REQUEST),
                           ("ConnectReply", handshake.CONNECT_REPLY)):
            self.assertEqual(self.fields(name), ours.format)
        for name, ours in (("SubmissionEntry", ring.SUBMISSION),
                           ("CompletionEntry", ring.COMPLETION)):
            self.assertEqual(self.fields(name), "<I" + ours.format[1:])
            self.assertEqual(ours.size, handshake.ENTRY_BYTES - 4)

    def test_header(self):
        whole = self.fields("RingHeader")
        self.assertTrue(whole.startswith(handshake.RING_HEADER.format))
        self.assertEqual(struct.calcsize(whole), handshake.RING_HEADER_BYTES)
        for name, offset in (("submit_doorbell", 4 * ring.SUBMIT_DOORBELL),
                             ("complete_doorbell", 4 * ring.COMPLETE_DOORBELL),
                             ("completions_taken", 8 * ring.COMPLETIONS_TAKEN),
                             ("closed", 4 * ring.CLOSED)):
            self.assertIn(f"offsetof(RingHeader, {name}) == {offset}", self.text)

    def test_numbers(self):
        for name, value in (("kHandshakeMagic", f"{handshake.HANDSHAKE_MAGIC:#x}"),
                            ("kHandshakeVersion", handshake.HANDSHAKE_VERSION),
                            ("kWantRing", handshake.WANT_RING),
                            ("kWantDevice", handshake.WANT_DEVICE),
                            ("kHasDevice", handshake.HAS_DEVICE),
                            ("kEntryOnDevice", ring.ON_DEVICE),
                            ("kDeviceDescriptor", device.DESCRIPTOR),
                            ("kDeviceHandle", device.HANDLE),
                            ("kDeviceHandleBytes", device.HANDLE_BYTES),
                            ("kSharedAlignment", shared_memory.ALIGNMENT),
                            ("kReplySlotBytes", handshake.REPLY_SLOT_BYTES),
                            ("kEntryAttend", ring.ATTEND), ("kEntryMessage", ring.MESSAGE),
                            ("kEntryHasKv", ring.HAS_KV), ("kEntryWantLse", ring.WANT_LSE),
                            ("kEntryPlanReused", ring.PLAN_REUSED)):
            self.assertRegex(self.text, rf"\b{name} = {value}[;,]")


class ListenerTest(unittest.TestCase):
    def connect(self, **listener):
        opened = FakeListener(**listener)
        self.addCleanup(opened.close)
        return opened.connect(tenant="red", spin_us=7)

    def test_what_is_asked_and_given(self):
        listener = FakeListener()
        self.addCleanup(listener.close)
        memory = listener.connect(tenant="red", spin_us=7)
        magic, version, flags, size, spin_us, _, tenant = listener.connect_request
        self.assertEqual((magic, version, flags, size, spin_us, tenant.rstrip(b"\0")),
                         (handshake.HANDSHAKE_MAGIC, 1, handshake.WANT_RING, ARENA_BYTES,
                          7, b"red"))
        self.assertEqual((memory.handle, memory.boot_id, memory.ring_entries, memory.arena_offset,
                          memory.arena_bytes), (b"h" * 16, BOOT_ID, ENTRIES, ring_bytes(),
                                                ARENA_BYTES))
        self.assertTrue(memory.connected())
        memory.array(memory.arena_offset, (3,), "u1")[...] = (1, 2, 3)
        self.assertEqual(bytes(listener.region[ring_bytes():ring_bytes() + 3]), b"\1\2\3")

    def test_a_busy_listener_is_waited_for(self):
        """Waiting connections of other clients must not look like a refusal."""
        with tempfile.TemporaryDirectory(prefix="mla-busy-") as folder:
            path = f"{folder}/mla.sock.shm"
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(path)
                listener.listen(0)
                others = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(4)]
                waiting = 0
                for other in others:
                    self.addCleanup(other.close)
                    other.setblocking(False)
                    waiting += other.connect_ex(path) == 0
                self.assertLess(waiting, len(others))  # the listener's queue is full
                with self.assertRaises(mla_client.Unavailable):
                    shared_memory.SharedMemory.connect(path, timeout_s=0.05)
                seen = []
                listener.settimeout(20)  # if the client does not come

                def serve():
                    for _ in range(waiting + 1):
                        taken, _ = listener.accept()
                        self.addCleanup(taken.close)
                    seen.append(len(taken.recv(4096)))
                    taken.close()  # no connect_reply
                    listener.close()  # and there is not another attempt

                thread = threading.Timer(0.05, serve)
                thread.start()
                with self.assertRaises(mla_client.MlaError):
                    shared_memory.SharedMemory.connect(path, timeout_s=60.0)
                thread.join()
                self.assertEqual(seen, [handshake.CONNECT_REQUEST.size])

    def test_the_timeout_bounds_connection_and_answer_together(self):
        now = [1000.0]
        with tempfile.TemporaryDirectory(prefix="mla-busy-") as folder:
            path = f"{folder}/mla.sock.shm"
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(path)
                listener.listen(0)
                other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.addCleanup(other.close)
                other.connect(path)  # the listener's queue is full

                def sleep(seconds):
                    now[0] += seconds
                    if now[0] >= 1007.0:
                        listener.accept()[0].close()

                waits = []

                def receive(connection, *_):
                    waits.append(connection.gettimeout())
                    raise TimeoutError

                clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
                with mock.patch.object(handshake, "time", clock), \
                        mock.patch.object(socket, "recv_fds", receive), \
                        self.assertRaises(mla_client.Unavailable):
                    shared_memory.SharedMemory.connect(path, timeout_s=10.0)
        self.assertEqual(len(waits), 1)
        self.assertAlmostEqual(waits[0], 3.0, delta=0.1)

    def test_a_connection_closed_without_an_answer_is_tried_again(self):
        listener = FakeListener(closed_first=2)
        self.addCleanup(listener.close)
        self.assertEqual(listener.connect().boot_id, BOOT_ID)
        self.assertEqual(listener.accepted, 3)

    def test_another_layout_is_refused_by_name(self):
        size = ring_bytes() + ARENA_BYTES
        for field, listener in (
                ("connect_reply.magic", dict(magic=1)), ("connect_reply.version", dict(version=2)),
                ("connect_reply.ring_entries", dict(ring_entries=3)),
                ("connect_reply.arena_offset", dict(arena_offset=ring_bytes() + 4096)),
                ("connect_reply.arena_offset", dict(ring_entries=0)),
                ("connect_reply.region_bytes", dict(region_bytes=size + 4096)),
                ("connect_reply.region_bytes", dict(arena_offset=size)),
                # All its pages would be mapped at once.
                ("connect_reply.arena_bytes", dict(arena_bytes=ARENA_BYTES + (4 << 20))),
                ("connect_reply.arena_bytes", dict(arena_bytes=ARENA_BYTES // 2)),
                ("ring.magic", dict(ring_header=dict(magic=1))),
                ("ring.entries", dict(ring_header=dict(entries=8))),
                ("ring.submissions_offset", dict(ring_header=dict(submissions=384))),
                ("ring.completions_offset", dict(ring_header=dict(completions=0))),
                ("ring.replies_offset", dict(ring_header=dict(replies=0))),
                ("region", dict(seal=False)), ("connect_reply", dict(packet=b"short")),
                ("connect_reply", dict(descriptors=0))):
            with self.subTest(field=field, listener=listener):
                before = descriptors()
                with self.assertRaises(mla_client.Unimplemented) as caught:
                    self.connect(**listener)
                self.assertEqual(caught.exception.detail.field, field)
                self.assertEqual(caught.exception.detail.reason, "layout_mismatch")
                self.assertIn(field, str(caught.exception))
                self.doCleanups()
                self.assertLessEqual(descriptors(), before)

    def test_refusals(self):
        for error, listener in ((mla_client.ResourceExhausted, dict(code=8, message=b"no more")),
                            (mla_client.InvalidArgument, dict(code=3, message=b"tenant")),
                            (mla_client.Unavailable, dict(packet=b""))):
            with self.subTest(listener=listener), self.assertRaises(error) as caught:
                self.connect(**listener)
            self.assertIn(listener.get("message", b"without an answer").decode(),
                          str(caught.exception))
        with self.assertRaises(mla_client.Unavailable):
            shared_memory.SharedMemory.connect("/nowhere/mla.sock.shm")
        with self.assertRaises(mla_client.Unavailable):
            shared_memory.SharedMemory.connect("/" + "x" * 200)
        with self.assertRaises(mla_client.InvalidArgument):
            shared_memory.SharedMemory.connect("/nowhere", tenant="t" * 128)


class ArenaTest(unittest.TestCase):
    def setUp(self):
        listener = FakeListener()
        self.addCleanup(listener.close)
        self.memory = listener.connect()

    def test_blocks_are_apart_and_come_back(self):
        offsets = self.memory.allocate(1, 64, 65, 4096)
        self.assertEqual([offset - offsets[0] for offset in offsets], [0, 64, 128, 256])
        self.assertTrue(all(offset % 64 == 0 for offset in offsets))
        self.assertIsNone(self.memory.allocate(ARENA_BYTES))
        for order in ((2, 0, 3, 1), (1, 0, 2, 3)):
            for index in order:
                self.memory.free([offsets[index]])
            # Joined again, whatever the order: all of it is one block.
            whole = self.memory.allocate(ARENA_BYTES)
            self.assertEqual(whole, [self.memory.arena_offset])
            self.memory.free(whole)
            offsets = self.memory.allocate(1, 64, 65, 4096)

    def test_all_or_nothing(self):
        free, freed = dict(self.memory._blocks._free), self.memory.freed
        self.assertIsNone(self.memory.allocate(ARENA_BYTES // 2, ARENA_BYTES // 2 + 1))
        # Not even counted: a caller that waits for room must not take it for room.
        self.assertEqual((self.memory._blocks._free, self.memory.freed), (free, freed))
        self.assertTrue(self.memory.exhausted(freed))
        held = self.memory.allocate(ARENA_BYTES // 2, ARENA_BYTES // 2)
        self.assertFalse(self.memory.exhausted(freed))
        self.memory.free(held)
        self.assertEqual(self.memory._blocks._free, free)

    def test_waiting_for_room(self):
        whole = self.memory.allocate(ARENA_BYTES)
        seen = self.memory.freed
        self.assertFalse(self.memory.wait_for_room(seen, time.monotonic() + 0.01))
        threading.Timer(0.05, self.memory.free, (whole,)).start()
        self.assertTrue(self.memory.wait_for_room(seen, time.monotonic() + 5))


class RingTest(unittest.TestCase):
    def setUp(self):
        self.listener = FakeListener()
        self.addCleanup(self.listener.close)
        self.memory = self.listener.connect()
        self.ring = ring.Ring(self.memory, 0.0)

    def submit(self, tag):
        self.ring.submit(ring.ATTEND, 2, 3, 0x21, tag, 9, 4, 5, 6, 7, 8, 1000, 4096, 8192)

    def test_entries_are_laid_out_as_agreed(self):
        for index in range(ENTRIES):
            self.assertFalse(self.ring.full())
            self.assertEqual(self.listener.submission(index)[0], 0)
            self.submit(index + 100)
            self.assertEqual(self.listener.submission(index),
                             (index + 1, (1, 2, 3, 0x21, index + 100, 9, 4, 5, 6, 7, 8, 1000, 4096,
                                          8192)))
        self.assertTrue(self.ring.full())

    def test_completions(self):
        for index in range(3 * ENTRIES):
            self.listener.fill(index, ring.ATTEND, index)
            self.listener.publish(index)
            self.assertTrue(self.ring.ready())
            got = self.ring.take()
            self.assertEqual((got.kind, got.flags, got.launch_layers, got.tag, got.boot_id,
                              got.queue_us, got.plan_us, got.kernel_us, got.write_us,
                              got.launch_requests, got.launch_clients, got.message),
                             (1, 1, 3, index, BOOT_ID, 10, 20, 30, 40, 5, 6, None))
            self.assertEqual(self.listener.longs[ring.COMPLETIONS_TAKEN], index + 1)
            self.assertFalse(self.ring.ready())

    def test_sequence_words_wrap(self):
        last = 2**32 - 1
        self.ring._submitted = self.ring._taken = last
        self.submit(1)
        self.assertEqual(self.listener.submission(last)[0], 0)
        self.submit(2)
        self.assertEqual(self.listener.submission(last + 1)[0], 1)
        self.listener.words[(self.listener.completions + last % ENTRIES * 64) // 4] = last - 3
        self.assertFalse(self.ring.ready())
        self.listener.fill(last, ring.ATTEND, 7)
        self.listener.publish(last)
        self.assertTrue(self.ring.ready())
        self.assertEqual(self.ring.take().tag, 7)
        self.assertEqual(self.listener.longs[ring.COMPLETIONS_TAKEN], last + 1)

    def test_half_written_entries_are_not_read(self):
        self.listener.fill(0, ring.ATTEND, 5)
        self.assertFalse(self.ring.ready())
        self.assertFalse(self.ring.wait(time.monotonic() + 0.02))
        self.listener.publish(0)
        self.assertTrue(self.ring.wait(time.monotonic() + 5))
        self.assertEqual(self.ring.take().tag, 5)

    def test_a_sleeping_server_is_woken_and_no_other(self):
        self.submit(1)
        self.assertEqual(self.listener.words[ring.SUBMIT_DOORBELL], 0)
        self.listener.words[ring.SERVER_WAITS] = 1
        doorbell = ctypes.addressof(
            ctypes.c_uint32.from_buffer(self.listener.region, 4 * ring.SUBMIT_DOORBELL))
        woken = []
        sleeper = threading.Thread(
            target=lambda: (futex.wait(doorbell, 0, 10.0), woken.append(time.monotonic())))
        begin = time.monotonic()
        sleeper.start()
        time.sleep(0.05)
        self.submit(2)
        sleeper.join()
        self.assertEqual(self.listener.words[ring.SUBMIT_DOORBELL], 1)
        self.assertLess(woken[0] - begin, 5.0)

    def test_a_sleeping_client_is_woken(self):
        taken = []
        sleeper = threading.Thread(
            target=lambda: taken.append(self.ring.wait(time.monotonic() + 10)))
        with mock.patch.object(ring, "LONGEST_SLEEP_S", 10.0):
            begin = time.monotonic()
            sleeper.start()
            while not self.listener.words[ring.CLIENT_WAITS]:
                time.sleep(0.001)
            self.listener.fill(0, ring.ATTEND, 1)
            self.listener.publish(0)
            self.ring.wake_waiter()  # as the server does: the doorbell, then the futex
            sleeper.join()
        self.assertEqual(taken, [True])
        self.assertLess(time.monotonic() - begin, 5.0)
        self.assertEqual(self.listener.words[ring.CLIENT_WAITS], 0)

    def test_a_spinning_client_never_says_that_it_sleeps(self):
        spinning = ring.Ring(self.memory, 10.0)
        slept = []
        sleeper = threading.Thread(target=lambda: slept.append(spinning.wait(time.monotonic() + 9)))
        sleeper.start()
        for _ in range(20):
            self.assertEqual(self.listener.words[ring.CLIENT_WAITS], 0)
            time.sleep(0.002)
        self.listener.fill(0, ring.ATTEND, 1)
        self.listener.publish(0)
        sleeper.join()
        self.assertEqual(slept, [True])

    def test_what_was_completed_before_the_end_is_taken(self):
        self.listener.fill(0, ring.ATTEND, 1)
        self.listener.publish(0)
        self.listener.words[ring.CLOSED] = 1
        self.assertTrue(self.ring.wait(time.monotonic() + 5))
        self.ring.take()
        with self.assertRaises(mla_client.Unavailable):
            self.ring.wait(time.monotonic() + 5)

    def test_a_lost_connection_ends_the_wait(self):
        threading.Timer(0.05, self.listener.connection.close).start()
        begin = time.monotonic()
        with self.assertRaises(mla_client.Unavailable):
            self.ring.wait(time.monotonic() + 30)
        self.assertLess(time.monotonic() - begin, 5.0)


class StreamTest(unittest.TestCase):
    """RingStream over a region where the test plays the server."""

    def setUp(self):
        self.listener = FakeListener()
        self.addCleanup(self.listener.close)
        self.boot_ids = []
        self.stream = RingStream(self.listener.connect(), 1 << 14, self.boot_ids.append)

    def ask(self, seconds=5.0):
        return self.stream.ask(time.monotonic() + seconds, abort_step=attention_pb2.AbortStep())

    def answer(self, index, tag, **fields):
        reply = attention_pb2.AttendStreamReply(tag=tag, boot_id=BOOT_ID, **fields)
        self.listener.fill(index, ring.MESSAGE, tag, message=reply.SerializeToString())
        self.listener.publish(index)

    def test_replies_in_any_order(self):
        requests = [self.ask() for _ in range(ENTRIES)]
        tags = [self.listener.submission(index)[1][4] for index in range(ENTRIES)]
        for index, (_, fields) in enumerate(map(self.listener.submission, range(ENTRIES))):
            kind, size, offset = fields[0], fields[8], fields[12]
            sent = attention_pb2.AttendStreamRequest.FromString(
                bytes(self.listener.region[offset:offset + size]))
            self.assertEqual((kind, sent.tag, sent.WhichOneof("body")),
                             (ring.MESSAGE, tags[index], "abort_step"))
        for index, tag in enumerate(reversed(tags)):
            self.answer(index, tag, abort_step=attention_pb2.AbortStepReply())
        for request, tag in zip(requests, tags):
            self.assertEqual(request.wait(time.monotonic() + 5).tag, tag)
        self.assertEqual(self.boot_ids, [BOOT_ID] * ENTRIES)
        self.stream.cancel()

    def test_overflow_waits_for_a_completion(self):
        first = [self.ask() for _ in range(ENTRIES)]
        with self.assertRaises(mla_client.DeadlineExceeded) as caught:
            self.ask(0.05)
        self.assertIn("no room", str(caught.exception))
        self.answer(0, self.listener.submission(0)[1][4], abort_step=attention_pb2.AbortStepReply())
        self.ask()
        self.assertEqual(self.listener.submission(ENTRIES)[0], ENTRIES + 1)
        first[0].wait(time.monotonic())
        self.stream.cancel()

    def test_an_error_reply(self):
        request = self.ask()
        self.answer(0, 1, error=attention_pb2.StepError(code=9, message="why", step_aborted=True))
        with self.assertRaises(mla_client.FailedPrecondition) as caught:
            request.wait(time.monotonic() + 5)
        self.assertTrue(caught.exception.step_aborted)
        self.assertIsNone(self.stream.broken)

    def test_replies_that_are_none(self):
        for message, at in ((b"\xff\xff", None), (b"", None), (b"", 1 << 40)):
            with self.subTest(message=message, at=at):
                self.setUp()
                request = self.ask()
                self.listener.fill(0, ring.MESSAGE, 1, message=message, at=at)
                self.listener.publish(0)
                with self.assertRaises(mla_client.DataLoss):
                    request.wait(time.monotonic() + 0.5)

    def test_a_reply_to_nothing_breaks_the_stream(self):
        request = self.ask()
        self.answer(0, 999, abort_step=attention_pb2.AbortStepReply())
        with self.assertRaises(mla_client.DataLoss):
            request.wait(time.monotonic() + 5)
        self.assertIsInstance(self.stream.broken, mla_client.DataLoss)
        with self.assertRaises(mla_client.DataLoss):
            self.ask()

    def test_late_replies_give_their_memory_back(self):
        free = dict(self.stream.memory._blocks._free)
        request = self.ask()
        with self.assertRaises(mla_client.DeadlineExceeded):
            request.wait(time.monotonic() + 0.02)
        self.assertNotEqual(self.stream.memory._blocks._free, free)
        self.answer(0, 1, abort_step=attention_pb2.AbortStepReply())
        other = self.ask()
        self.answer(1, 2, abort_step=attention_pb2.AbortStepReply())
        other.wait(time.monotonic() + 5)
        self.assertEqual(self.stream.memory._blocks._free, free)

    def test_cancel_ends_a_wait_in_another_thread(self):
        request = self.ask()
        threading.Timer(0.05, self.stream.cancel).start()
        begin = time.monotonic()
        with mock.patch.object(ring, "LONGEST_SLEEP_S", 10.0), \
                self.assertRaises(mla_client.Cancelled):
            request.wait(time.monotonic() + 10)
        self.assertLess(time.monotonic() - begin, 5.0)
        self.assertIsInstance(self.stream.broken, mla_client.Cancelled)


class FenceTest(unittest.TestCase):
    def test_by_architecture(self):
        ordered, full, why_not = fence.choose("x86_64")
        self.assertEqual((ordered(), full(), why_not), (None, None, ""))
        library = fence.by_library()
        with mock.patch.object(fence, "by_library", return_value=library):
            self.assertEqual(fence.choose("aarch64"), (library, library, ""))
        with mock.patch.object(fence, "by_library", side_effect=OSError("not there")):
            self.assertIn("libatomic", fence.choose("aarch64")[2])
        with mock.patch("sys.byteorder", "big"):
            self.assertIn("little endian", fence.choose("x86_64")[2])

    def test_futex_sleeps_only_for_the_value(self):
        word = ctypes.c_uint32(5)
        begin = time.monotonic()
        futex.wait(ctypes.addressof(word), 4, 10.0)
        self.assertLess(time.monotonic() - begin, 5.0)
        futex.wait(ctypes.addressof(word), 5, 0.05)
        self.assertGreaterEqual(time.monotonic() - begin, 0.05)


if __name__ == "__main__":
    unittest.main()
