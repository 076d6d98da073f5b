"""Connections of clients: proxies, how many there are, and what becomes of one that is lost."""

import contextlib
import os
import socket
import threading
import unittest
from unittest import mock

import grpc
import mla_client
import numpy as np
import server_binary
from mla_client import Geometry, ModelSpec, Profile
from mla_client.connection import calls, channels, targets
from mla_client.gen import admin_pb2, admin_pb2_grpc

SPEC = ModelSpec("kept", Geometry(2, 32, 16), 1, 0.1)
WAIT_S = 60
STREAMS = channels.STREAMS_A_CONNECTION
SERVER = None


def setUpModule():
    global SERVER
    # As many calls of a connection as streams that a client puts on one.
    SERVER = server_binary.start(f"--wire-connection-streams={STREAMS}", "--log-level=info",
                                 listen="127.0.0.1:0")


def tearDownModule():
    SERVER.stop()


def port():
    return int(SERVER.log().split("tcp_port=")[1].split()[0])


def compute(client, sequence, stream=None):
    """A step of one row."""
    with client.step([(sequence, 1)], stream=stream) as step:
        step.attend(0, np.zeros((1, 2, 48)), np.zeros((1, 48)), Profile.ABSORBED)


class ProxyTest(unittest.TestCase):
    """The environment names a proxy, as in many companies' shells and containers."""

    def setUp(self):
        self.asked = []  # requests to the proxy
        proxy = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(proxy.close)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = proxy.accept()
                    with connection:
                        self.asked.append(connection.recv(200))
        threading.Thread(target=serve, daemon=True).start()
        self.addCleanup(proxy.shutdown, socket.SHUT_RDWR)
        url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        clean.update({name: url for name in ("http_proxy", "https_proxy", "grpc_proxy")})
        patch = mock.patch.dict(os.environ, clean, clear=True)
        patch.start()
        self.addCleanup(patch.stop)

    def test_this_host_is_never_reached_by_a_proxy(self):
        for target in (f"127.0.0.1:{port()}", f"localhost:{port()}", f"ipv4:127.0.0.1:{port()}",
                       f"dns:///localhost:{port()}", SERVER.target):
            for asked_for in (False, True):
                with self.subTest(target=target), mla_client.Client.connect(
                        target, timeout_s=WAIT_S, http_proxy=asked_for) as client:
                    compute(client, client.register_model(SPEC).open_sequence())
        self.assertEqual(self.asked, [])

    def test_other_hosts_are_reached_by_a_proxy_on_request_alone(self):
        for asked_for in (False, True):
            self.assertEqual(self.asked, [])
            with self.assertRaises(mla_client.Unavailable):
                mla_client.Client.connect("server.invalid:50551", timeout_s=WAIT_S,
                                          http_proxy=asked_for)
        self.assertIn(b"CONNECT server.invalid:50551 ", self.asked[0])

    def test_which_addresses_are_of_this_host(self):
        for target in ("unix:/a", "unix:a", "unix-abstract:a", "localhost:1", "LocalHost",
                       "[::1]:1", "::1", "127.9.8.7:1", "ipv6:[::1]:1",
                       "ipv4:127.0.0.1:1,127.0.0.2:1",
                       "[::ffff:127.0.0.1]:1", "a.localhost:1", "dns://1.1.1.1/localhost:1"):
            self.assertTrue(targets.is_local(target), target)
        for target in ("10.0.0.1:1", "example.com:1", "localhost.example.com:1",
                       "127.0.0.1.nip.io:1", "[::2]:1", "ipv4:127.0.0.1:1,10.0.0.1:1",
                       "dns:///example.com:1", ""):
            self.assertFalse(targets.is_local(target), target)


class SharingTest(unittest.TestCase):
    def connect(self, **options):
        client = mla_client.Client.connect(f"127.0.0.1:{port()}", timeout_s=WAIT_S, **options)
        self.addCleanup(client.close)
        return client

    def test_clients_of_a_process_share_no_connection(self):
        clients = [self.connect() for _ in range(2 * STREAMS)]
        for client in clients:
            compute(client, client.register_model(SPEC).open_sequence())
        for client in clients:
            self.assertEqual(client.renew_leases(), 1)

    def test_streams_of_a_client_leave_room_for_its_calls(self):
        client = self.connect()
        model = client.register_model(SPEC)
        watches = [client.watch_events() for _ in range(STREAMS)]
        for watch in watches:
            next(watch)
        for _ in range(3 * STREAMS):
            compute(client, model.open_sequence(), client.open_stream())
        self.assertEqual(client.renew_leases(), 3 * STREAMS)
        made = len(client._channels._streams)
        self.assertEqual(made, 4)
        # Places of streams that have ended are used again.
        for watch in watches:
            watch.close()
        for _ in range(STREAMS):
            compute(client, model.open_sequence(), client.open_stream())
        self.assertEqual(len(client._channels._streams), made)


class Forwarder:
    """Passes connections on to the server, until it forgets the present ones: their bytes then
    vanish, as after the restart of a firewall."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.links = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def forget(self):
        for link in list(self.links):
            link.clear()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", port()))
                known = threading.Event()
                known.set()
                self.links.append(known)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(*ends, known), daemon=True).start()

    @staticmethod
    def _pump(source, sink, known):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if known.is_set():
                    sink.sendall(data)


class LossTest(unittest.TestCase):
    def test_a_connection_that_was_forgotten_is_made_again(self):
        forwarder = Forwarder()
        self.addCleanup(forwarder.close)
        with mock.patch.object(channels, "KEEPALIVE_MS", 1000), \
                mock.patch.object(channels, "KEEPALIVE_ANSWER_MS", 1000), \
                mla_client.Client.connect(forwarder.target, timeout_s=WAIT_S) as client:
            sequence = client.register_model(SPEC).open_sequence()
            compute(client, sequence)
            forwarder.forget()
            # Without a probe this waits for as long as it may, and fails.
            self.assertEqual(sequence.refresh().length, 1)
            with contextlib.suppress(mla_client.Unavailable):  # the stream's own is lost, too
                compute(client, sequence)
            sequence.refresh()
            compute(client, sequence)

    def test_probes_come_as_often_as_a_server_takes_them(self):
        for target, answer_ms in (("host:1", 2500), ("localhost:1", 10_000)):
            with mock.patch.object(grpc, "insecure_channel") as made:
                channels.maker_of(target, None, 0, False)()
            options = dict(made.call_args[1]["options"])
            self.assertGreaterEqual(options["grpc.keepalive_time_ms"], 5000)
            self.assertEqual(options["grpc.keepalive_timeout_ms"], answer_ms)
            self.assertLessEqual(options["grpc.keepalive_time_ms"] + answer_ms, 30_000)
            # gRPC reads an answer between calls up to 5 s later: a shorter time would end
            # connections that are well.
            self.assertEqual(options["grpc.keepalive_permit_without_calls"], int(answer_ms > 5000))
            self.assertEqual(options["grpc.http2.max_pings_without_data"], 0)

    def test_pauses_between_attempts_are_short(self):
        with mock.patch.object(grpc, "insecure_channel") as made:
            channels.maker_of("host:1", None, 0, False)()
        options = dict(made.call_args[1]["options"])
        self.assertEqual(options["grpc.initial_reconnect_backoff_ms"], 100)
        self.assertEqual(options["grpc.max_reconnect_backoff_ms"], 1000)
        self.assertEqual(options["grpc.min_reconnect_backoff_ms"], 5_000)  # bounds an attempt

    def test_a_server_that_is_back_is_found_soon(self):
        """A listener that ends every connection counts them: with gRPC's own pauses, up to two
        minutes, the last of these connections would take ten minutes."""
        attempts, wanted = [], threading.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(listener.close)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()
                    attempts.append(None)
                    if len(attempts) == 12:
                        wanted.set()
        threading.Thread(target=serve, daemon=True).start()
        self.addCleanup(listener.shutdown, socket.SHUT_RDWR)
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        with channels.maker_of(target, None, 0, False)() as channel:
            pending = admin_pb2_grpc.AdminStub(channel).GetServerInfo.future(
                admin_pb2.GetServerInfoRequest(), timeout=WAIT_S, wait_for_ready=True)
            self.assertTrue(wanted.wait(WAIT_S))
            pending.cancel()

    def test_a_close_during_a_pause_ends_no_thread_by_an_error(self):
        failed, before = [], set(threading.enumerate())
        channel = grpc.insecure_channel("127.0.0.1:1")  # nothing listens there
        control = calls.Calls(channel, (), WAIT_S)

        class Closes:
            """Closes the channel during the pause, as another thread may."""

            def wait(self, _seconds):
                channel.close()
                for thread in set(threading.enumerate()) - before:
                    thread.join()
                return True
        control.closed = Closes()
        with mock.patch.object(threading, "excepthook",
                               side_effect=lambda hook: failed.append(hook.exc_value)):
            self.assertFalse(control._pause(WAIT_S))
        self.assertEqual(failed, [])


class MessageBytesTest(unittest.TestCase):
    def test_no_message_is_larger_than_the_server_takes(self):
        server = server_binary.start("--wire-message-bytes=1MiB", listen="127.0.0.1:0")
        self.addCleanup(server.stop)
        with mla_client.Client.connect(server.target, transport="inline", timeout_s=WAIT_S,
                                       message_bytes=64 << 20) as client:
            self.assertEqual(client.message_bytes, client.server_info().limits.message_bytes)
            model = client.register_model(ModelSpec("large", Geometry(64, 64, 16), 1, 0.1))
            one, two = model.open_sequence(), model.open_sequence()
            other = client.step([(two, 1)], lease_ms=WAIT_S * 1000).begin()
            with client.step([(one, 256)], lease_ms=WAIT_S * 1000) as step:
                result = step.attend(0, np.zeros((256, 64, 80), np.uint16),
                                     np.zeros((256, 80), np.uint16), Profile.ABSORBED)
            self.assertGreater(len(result.timings), 2)  # of 2.6 MB
            other.attend(0, None, np.zeros((1, 80), np.uint16), Profile.APPEND_ONLY)
            self.assertEqual(other.end(), [1])
        with self.assertRaisesRegex(mla_client.InvalidArgument, "message_bytes: got -1"):
            mla_client.Client.connect(server.target, message_bytes=-1, timeout_s=WAIT_S)


if __name__ == "__main__":
    unittest.main()
