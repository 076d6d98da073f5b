"""Shared memory and rings with a real server: choosing, running out, and a server that dies."""

import contextlib
import gc
import os
import pathlib
import signal
import tempfile
import threading
import time
import unittest
from unittest import mock

import mla_client
import numpy as np
import server_binary
from mla_client import Profile
from mla_client.connection.targets import check_socket_owner
from mla_client.shm import fence, ring
from service_contract import GEOMETRY, LAYERS, SCALE, Worker

RING_ENTRIES = 4
LEASE_MS = 30_000  # the expected values are computed between two messages of a step
SERVER = None


def setUpModule():
    global SERVER
    SERVER = server_binary.start(f"--shm-ring-entries={RING_ENTRIES}")


def tearDownModule():
    SERVER.stop()


def connect(server, **options):
    values = dict(timeout_s=10.0, shared_bytes=1 << 20)
    values.update(options)
    return mla_client.Client.connect(server.target, **values)


def register(client, name="same-host"):
    """The model, with weights."""
    worker = Worker()
    model = client.register_model(mla_client.ModelSpec(name, GEOMETRY, LAYERS, SCALE, 4))
    for layer in range(LAYERS):
        model.upload_weights(layer, worker.w_uk[layer], worker.w_uv[layer])
    return model


def stopped(server):
    """Stops the server's process wherever it is."""
    os.kill(server.pid, signal.SIGSTOP)
    while " T " not in pathlib.Path(f"/proc/{server.pid}/stat").read_text():
        time.sleep(0.001)


class SocketOwnerTest(unittest.TestCase):
    """Sockets that another user could have put where the server's is looked for."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = os.path.join(self.folder, "mla.sock")
        pathlib.Path(self.path).touch()

    def owned_by(self, uid):
        found = os.lstat(self.path)
        values = list(found)
        values[4] = uid
        return mock.patch.object(os, "lstat", return_value=os.stat_result(values))

    def test_a_socket_of_another_user_is_refused_where_all_may_write(self):
        os.chmod(self.folder, 0o1777)
        with self.owned_by(12345):
            with self.assertRaisesRegex(mla_client.PermissionDenied, "belongs to user 12345"):
                mla_client.Client.connect(f"unix:{self.path}", timeout_s=0.1)
            check_socket_owner(self.path, server_uid=12345)
        for trusted in (0, os.geteuid()):
            with self.owned_by(trusted):
                check_socket_owner(self.path)
        check_socket_owner(os.path.join(self.folder, "none"))

    def test_a_folder_of_the_servers_own_is_trusted(self):
        os.chmod(self.folder, 0o770)
        with self.owned_by(12345):
            check_socket_owner(self.path)


class ChoiceTest(unittest.TestCase):
    """Which transport a client chooses, and its log about that."""

    def test_a_unix_target_gets_a_ring(self):
        with connect(SERVER) as client:
            with self.assertNoLogs("mla_client", "INFO"):
                self.assertEqual(client.transport, "ring")
            self.assertEqual((client.stats().rings, client.stats().shared_regions), (1, 1))
        with connect(SERVER, transport="inline") as client:
            deadline = time.monotonic() + 5
            while client.stats().rings and time.monotonic() < deadline:
                time.sleep(0.01)
            self.assertEqual((client.stats().rings, client.stats().shared_regions), (0, 0))
            self.assertEqual(client.transport, "inline")

    def test_the_target_forms_of_a_unix_socket(self):
        for target in (f"unix:{SERVER.socket}", f"unix://{SERVER.socket}"):
            with mla_client.Client.connect(target, shared_bytes=1 << 20) as client:
                self.assertEqual(client.transport, "ring")

    def test_a_server_without_shared_memory(self):
        server = server_binary.start("--shm-enabled=false")
        self.addCleanup(server.stop)
        with connect(server) as client, self.assertLogs("mla_client", "WARNING") as said:
            self.assertEqual(client.transport, "inline")
            self.assertIn("no command_ring", said.output[0])
        for transport in ("ring", "shm"):
            with self.assertRaises(mla_client.Unimplemented):
                connect(server, transport=transport)

    def test_no_regions_left(self):
        server = server_binary.start("--shm-regions-max=1", "--shm-tenant-regions=1")
        self.addCleanup(server.stop)
        with connect(server) as first, connect(server) as second:
            self.assertEqual(first.transport, "ring")
            with self.assertLogs("mla_client", "WARNING") as said:
                self.assertEqual(second.transport, "inline")
            self.assertIn("RESOURCE_EXHAUSTED", said.output[0])
            with self.assertRaises(mla_client.ResourceExhausted):
                connect(server, transport="ring")

    def test_regions_shrink_before_clients_go_without(self):
        server = server_binary.start("--shm-region-bytes=32MiB", "--shm-total-bytes=40MiB",
                                     "--tenants-region-bytes=40MiB")
        self.addCleanup(server.stop)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connect(server, shared_bytes=None)) for _ in range(3)]
            with self.assertNoLogs("mla_client", "WARNING"):
                self.assertEqual([client.transport for client in clients[:2]], ["ring", "ring"])
            # The bound is 40 MiB; 32 and a ring are taken. 16 and 8 do not fit in the rest, 4 do.
            sizes = [client._own_stream().memory.arena_bytes >> 20 for client in clients[:2]]
            self.assertEqual(sizes, [32, 4])
            with self.assertLogs("mla_client", "WARNING") as said:
                self.assertEqual(clients[2].transport, "inline")
                clients[2].open_stream()
                clients[2].open_stream()
            self.assertEqual(len(said.output), 1)  # once, however many streams
            self.assertRegex(said.output[0], "slower.*RESOURCE_EXHAUSTED.*shm.total_bytes is 40 MiB"
                                             ".*shared_bytes")
            # A size that was asked for is not made smaller.
            with self.assertRaises(mla_client.ResourceExhausted):
                connect(server, transport="ring", shared_bytes=8 << 20)
            with connect(server, transport="ring", shared_bytes=1 << 20) as small:
                self.assertEqual(small.transport, "ring")

    def test_no_shared_memory_wanted(self):
        with self.assertNoLogs("mla_client", "WARNING"), connect(SERVER, shared_bytes=0) as client:
            self.assertEqual(client.transport, "inline")
            self.assertIsNone(client._own_stream().memory)
        for transport in ("ring", "shm"):
            with self.assertRaisesRegex(mla_client.InvalidArgument, "shared_bytes: got 0"):
                connect(SERVER, transport=transport, shared_bytes=0)
        with self.assertRaisesRegex(mla_client.InvalidArgument, "shared_bytes: got -1"):
            connect(SERVER, shared_bytes=-1)

    def test_over_tcp(self):
        server = server_binary.start("--log-level=info", listen="127.0.0.1:0")
        self.addCleanup(server.stop)
        target = f"127.0.0.1:{server.log().split('tcp_port=')[1].split()[0]}"
        with mla_client.Client.connect(target) as client, \
                self.assertNoLogs("mla_client", "WARNING"):
            self.assertEqual(client.transport, "inline")
        with self.assertRaisesRegex(mla_client.InvalidArgument, "unix"):
            mla_client.Client.connect(target, transport="ring")

    def test_a_machine_without_fences(self):
        with mock.patch.object(ring, "WHY_NOT", "no fences here"):
            with connect(SERVER) as client:
                self.assertEqual(client.transport, "shm")
            with self.assertRaisesRegex(mla_client.Unimplemented, "no fences here"):
                connect(SERVER, transport="ring")

    def test_another_layout_falls_back(self):
        with mock.patch("mla_client.shm.handshake.HANDSHAKE_VERSION", 2):
            with connect(SERVER) as client, self.assertLogs("mla_client", "WARNING") as said:
                self.assertEqual(client.transport, "inline")
            self.assertIn("version", said.output[0])

    def test_no_such_transport(self):
        with self.assertRaisesRegex(mla_client.InvalidArgument, "'pigeon'.*auto, inline"):
            connect(SERVER, transport="pigeon")


class PressureTest(unittest.TestCase):
    """More work than the ring or its memory holds."""

    def check(self, rows, requests, **options):
        """Sends all layers' requests without waiting, then checks every answer."""
        worker = Worker()
        with connect(SERVER, **options) as client, register(client).open_sequence() as sequence, \
                client.step([(sequence, rows * requests)], lease_ms=LEASE_MS) as step:
            asked = []
            kv = worker.kv(rows * requests)
            for layer in range(LAYERS):
                q = worker.queries(rows * requests, Profile.EXPANDED)
                for begin in range(0, len(q), rows):
                    part = slice(begin, begin + rows)
                    asked.append((layer, q, part, step.attend_async(layer, q[part], kv[part],
                                                                    row_begin=begin)))
            for layer, q, part, future in asked:
                want, _ = worker.expected(layer, q[:part.stop], kv[:part.stop], Profile.EXPANDED)
                np.testing.assert_allclose(future.result().o, want[part], atol=2e-2, rtol=2e-2)
            step.abort()
            return client

    def test_more_requests_than_entries(self):
        self.check(1, 5 * RING_ENTRIES, transport="ring")

    def test_more_tensors_than_memory(self):
        for transport in ("ring", "shm"):
            with self.subTest(transport=transport):
                # A request of 10 rows takes 4 kB of it.
                self.check(10, 12, transport=transport, shared_bytes=16384)

    def test_buffers_that_leave_no_room(self):
        for transport in ("ring", "shm"):
            with self.subTest(transport=transport), \
                    connect(SERVER, transport=transport, shared_bytes=65536) as client, \
                    register(client).open_sequence() as sequence:
                model = sequence.model
                held = []
                while not held or held[-1].place is not None:
                    held.append(client.buffers(model, 8, Profile.ABSORBED))
                self.assertGreater(len(held), 3)
                worker = Worker()
                with client.step([(sequence, 8)], lease_ms=LEASE_MS) as step:
                    q, kv = worker.queries(8, Profile.ABSORBED), worker.kv(8)
                    with self.assertRaisesRegex(mla_client.ResourceExhausted, "shared_bytes"):
                        for _ in range(4):
                            step.attend(0, q, kv, Profile.ABSORBED)
                    held[0].release()
                    held[0].release()
                    o = step.attend(0, q, kv, Profile.ABSORBED).o
                    want, _ = worker.expected(0, q, kv, Profile.ABSORBED)
                    np.testing.assert_allclose(o, want, atol=2e-2, rtol=2e-2)
                    step.abort()

    def test_inputs_that_fit_without_their_outputs(self):
        for transport in ("ring", "shm"):
            with self.subTest(transport=transport), \
                    connect(SERVER, transport=transport, shared_bytes=8192) as client, \
                    register(client).open_sequence() as sequence:
                worker = Worker()
                q, kv = worker.queries(8, Profile.ABSORBED), worker.kv(8)
                # 4.6 of 8.2 kB are held; a piece of the call wants 2 kB each way.
                with client.buffers(sequence.model, 8, Profile.ABSORBED) as held, \
                        client.step([(sequence, 8)], lease_ms=LEASE_MS) as step:
                    self.assertIsNotNone(held.place)
                    with self.assertRaises(mla_client.ResourceExhausted):
                        step.attend(0, q, kv, Profile.ABSORBED, o_dtype=mla_client.DType.F32)
                    held.release()
                    step.attend(0, q, kv, Profile.ABSORBED, o_dtype=mla_client.DType.F32)
                    step.abort()

    def test_tensors_in_place_are_not_copied(self):
        for transport in ("ring", "shm"):
            with self.subTest(transport=transport), \
                    connect(SERVER, transport=transport) as client, \
                    register(client).open_sequence() as sequence, \
                    client.buffers(sequence.model, 64) as buffers, \
                    client.step([(sequence, 64)], lease_ms=LEASE_MS) as step:
                memory = buffers.place.memory
                free = dict(memory._blocks._free)
                buffers.q[...], buffers.kv[...] = 0, 0
                before = client.stats()
                for layer in range(LAYERS):
                    step.attend(layer, buffers.q, buffers.kv, out=buffers)
                    # It took no memory from the arena.
                    self.assertEqual(memory._blocks._free, free)
                after = client.stats()
                moved = LAYERS * (buffers.q.nbytes + buffers.kv.nbytes + buffers.o.nbytes)
                self.assertEqual(after.shared_bytes - before.shared_bytes, moved)
                self.assertEqual(after.copied_bytes, before.copied_bytes)

    def test_many_sequences_in_one_step(self):
        """The reply to such an end fits no slot of the ring."""
        with connect(SERVER, transport="ring") as client:
            model = register(client)
            sequences = [model.open_sequence() for _ in range(150)]
            for _ in range(2):
                rows = [(sequence, 1) for sequence in sequences]
                with client.step(rows, lease_ms=LEASE_MS) as step:
                    for layer in range(LAYERS):
                        step.attend(layer, None, np.ones((150, GEOMETRY.row_dim)),
                                    Profile.APPEND_ONLY)
            self.assertEqual([sequence.length for sequence in sequences], [2] * 150)
            for sequence in sequences:
                sequence.release()

    def test_several_threads_on_one_ring(self):
        """Each takes completions for the others."""
        worker, faults = Worker(), []
        with connect(SERVER, transport="ring", spin_us=50) as client:
            model = register(client)
            kv, q = worker.kv(2), worker.queries(2, Profile.ABSORBED)
            want, _ = worker.expected(0, q, kv, Profile.ABSORBED)

            def work():
                try:
                    for _ in range(10):
                        with model.open_sequence() as sequence, \
                                client.step([(sequence, 2)], lease_ms=LEASE_MS) as step:
                            for layer in range(LAYERS):
                                o = step.attend(layer, q, kv, Profile.ABSORBED).o
                                np.testing.assert_allclose(o, want, atol=2e-2, rtol=2e-2)
                except BaseException as error:  # reported by the main thread
                    faults.append(error)

            threads = [threading.Thread(target=work) for _ in range(2 * RING_ENTRIES)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(client.stats().rings, 1)
        self.assertEqual(faults, [])

    def test_several_threads_without_enough_memory(self):
        """No caller is told that it does not fit while another thread's tensors are in the way."""
        worker, faults = Worker(), []
        for transport in ("ring", "shm"):
            with connect(SERVER, transport=transport, shared_bytes=8192) as client:
                model = register(client)
                kv, q = worker.kv(7), worker.queries(7, Profile.ABSORBED)  # 4 kB with the outputs

                def work():
                    try:
                        for _ in range(8):
                            with model.open_sequence() as sequence, \
                                    client.step([(sequence, 7)], lease_ms=LEASE_MS) as step:
                                for layer in range(LAYERS):
                                    step.attend(layer, q, kv, Profile.ABSORBED)
                    except BaseException as error:  # reported by the main thread
                        faults.append(error)

                threads = [threading.Thread(target=work) for _ in range(6)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                self.assertEqual(faults, [])

    def test_with_the_fences_of_other_architectures(self):
        library = fence.by_library()
        with mock.patch.object(fence, "ordered", library), \
                mock.patch.object(fence, "full", library):
            self.check(2, RING_ENTRIES, transport="ring")


class DeathTest(unittest.TestCase):
    """A server that stops answering."""

    def setUp(self):
        self.server = server_binary.start()
        self.addCleanup(self.server.stop)

    def kill(self):
        os.kill(self.server.pid, signal.SIGKILL)
        self.server._process.wait()

    def test_killed_with_a_request_under_way(self):
        for transport in ("ring", "shm", "inline"):
            with self.subTest(transport=transport):
                client = connect(self.server, transport=transport, timeout_s=20.0)
                sequence = register(client).open_sequence()
                step = client.step([(sequence, 1)], lease_ms=LEASE_MS).begin()
                stopped(self.server)
                future = step.attend_async(0, None, np.ones((1, GEOMETRY.row_dim)),
                                           Profile.APPEND_ONLY)
                threading.Timer(0.1, self.kill).start()
                begin = time.monotonic()
                with self.assertRaises(mla_client.Unavailable):
                    future.result()
                self.assertLess(time.monotonic() - begin, 5.0)
                self.server.start()
                # Another server: the client resumes nothing.
                with self.assertRaises(mla_client.NotFound):
                    client.step([(sequence, 1)], lease_ms=LEASE_MS).begin()
                with self.assertRaises(mla_client.ServerRestarted):
                    sequence.refresh()
                client.close()

    def test_a_deadline_leaves_the_stream_usable(self):
        for transport in ("ring", "shm", "inline"):
            with self.subTest(transport=transport), \
                    connect(self.server, transport=transport) as client, \
                    register(client).open_sequence() as sequence:
                stream = client.open_stream()
                kv = np.ones((1, GEOMETRY.row_dim))
                step = client.step([(sequence, 1)], lease_ms=LEASE_MS, stream=stream).begin()
                free = stream.memory and dict(stream.memory._blocks._free)
                stopped(self.server)
                try:
                    begin = time.monotonic()
                    with self.assertRaises(mla_client.DeadlineExceeded):
                        step.attend(0, None, kv, Profile.APPEND_ONLY, timeout_s=0.2)
                    self.assertLess(time.monotonic() - begin, 5.0)
                finally:
                    os.kill(self.server.pid, signal.SIGCONT)
                for layer in range(LAYERS):
                    step.attend(layer, None, kv, Profile.APPEND_ONLY)
                self.assertEqual(step.end(), [1])
                self.assertIsNone(stream.broken)
                self.assertEqual(stream.memory and stream.memory._blocks._free, free)

    def test_a_connection_that_is_lost_rolls_the_step_back(self):
        with connect(self.server, transport="ring") as client, \
                register(client).open_sequence() as sequence:
            step = client.step([(sequence, 1)], lease_ms=LEASE_MS).begin()
            stream = client._stream
            stream.memory.disconnect()
            # The server may take a request from the ring before it sees that the socket is gone; a
            # repeat brings the same rows.
            deadline = time.monotonic() + 5
            with self.assertRaises(mla_client.Unavailable):
                while time.monotonic() < deadline:
                    step.attend(0, None, np.ones((1, GEOMETRY.row_dim)), Profile.APPEND_ONLY)
            while sequence.refresh().in_step and time.monotonic() < deadline:
                time.sleep(0.01)
            with client.step([(sequence, 1)], lease_ms=LEASE_MS) as step:
                self.assertIsNot(client._stream, stream)
                for layer in range(LAYERS):
                    step.attend(layer, None, np.ones((1, GEOMETRY.row_dim)), Profile.APPEND_ONLY)
            self.assertEqual(sequence.length, 1)

    def regions(self):
        """How many regions this process has mapped."""
        return pathlib.Path("/proc/self/maps").read_text().count("memfd:mla-region")

    def test_broken_streams_give_their_memory_back(self):
        """At once: no cycle of references keeps it for the garbage collector."""
        gc.collect()
        before = self.regions()
        self.addCleanup(gc.enable)
        gc.disable()
        for transport in ("ring", "shm"):
            with self.subTest(transport=transport), \
                    connect(self.server, transport=transport) as client, \
                    register(client).open_sequence() as sequence:
                for end in ("cancel", "close", "disconnect"):
                    stream = client.open_stream()
                    step = client.step([(sequence, 1)], lease_ms=LEASE_MS, stream=stream).begin()
                    getattr(stream.memory if end == "disconnect" else stream, end)()
                    with self.assertRaises(mla_client.MlaError):
                        while True:
                            step.attend(0, None, np.ones((1, GEOMETRY.row_dim)),
                                        Profile.APPEND_ONLY)
                    del step, stream
                    # The next stream finds the broken one and ends it, together with its step.
                    client.open_stream()
                    deadline = time.monotonic() + 5
                    while sequence.refresh().in_step and time.monotonic() < deadline:
                        time.sleep(0.01)
                    client._streams.pop().close()
                client.open_stream()
                self.assertEqual(len(client._streams), 2)
                deadline = time.monotonic() + 5
                while (self.regions() > before + 2 or client.stats().shared_regions > 2) and (
                        time.monotonic() < deadline):
                    time.sleep(0.01)
                self.assertEqual(self.regions(), before + 2)
                self.assertEqual(client.stats().shared_regions, 2)


if __name__ == "__main__":
    unittest.main()
