"""Bounds of connections, seen from outside the process."""

import json
import pathlib
import resource
import socket
import time
import unittest
import urllib.request

import grpc
import mla_client
import server_binary
from mla_client.gen import admin_pb2, admin_pb2_grpc

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # with empty settings
HEADERS, CONTINUATION = 1, 9  # types of HTTP/2 frames
WAIT_S = 60


def frame(kind, stream, payload):
    """An HTTP/2 frame without flags."""
    return (len(payload).to_bytes(3, "big") + bytes([kind, 0]) + stream.to_bytes(4, "big") +
            payload)


def header(name, value):
    """A header of HPACK that enters no table. Name and value are shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


class ConnectionsTest(unittest.TestCase):
    def start(self, *arguments):
        """A server with a TCP port and an operations port."""
        self.server = server_binary.start("--log-level=info", "--log-format=json",
                                          "--ops-listen=127.0.0.1:0", *arguments,
                                          listen="127.0.0.1:0")
        self.addCleanup(self.server.stop)
        started = next(event for event in map(json.loads, self.server.log().splitlines())
                       if event["event"] == "listening")
        self.tcp = ("127.0.0.1", int(started["tcp_port"]))
        self.ops_port = int(started["ops_port"])

    def page(self, path):
        """The answer of the operations port."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ops_port}{path}", timeout=20) as page:
            return page.read().decode()

    def connect(self, address, kind=socket.SOCK_STREAM):
        """A connection that says nothing; None if the server's queue is full."""
        family = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
        one = socket.socket(family, kind)
        self.addCleanup(one.close)
        one.settimeout(WAIT_S if family == socket.AF_INET else 0.1)
        try:
            one.connect(address)
        except BlockingIOError:
            return None
        one.settimeout(WAIT_S)
        return one

    def served(self, address):
        """A connection to which the server has sent its settings, or None if it closed it."""
        one = self.connect(address)
        try:
            if one.recv(4096):
                return one
        except ConnectionResetError:
            pass
        return None

    def becomes_served(self, address):
        """As `served`, once connections that have ended are noticed."""
        deadline = time.monotonic() + WAIT_S
        while True:
            one = self.served(address)
            if one is not None or time.monotonic() > deadline:
                self.assertIsNotNone(one)
                return one
            time.sleep(0.05)

    def test_probes_are_answered_when_clients_use_up_the_descriptors(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        self.start()
        limit = 128
        resource.prlimit(self.server.pid, resource.RLIMIT_NOFILE, (limit, limit))
        unix = str(self.server.socket)
        silent = []
        for address, kind in ((self.tcp, socket.SOCK_STREAM), (unix, socket.SOCK_STREAM),
                              (unix + ".shm", socket.SOCK_SEQPACKET)):
            silent += [self.connect(address, kind) for _ in range(300)]
        for path in ("/livez", "/readyz") * 3:
            self.page(path)  # raises for any other answer than 200
        self.assertLess(len(list(pathlib.Path(f"/proc/{self.server.pid}/fd").iterdir())), limit)
        self.assertNotIn("mla_connections_refused_total 0\n", self.page("/metrics"))
        for one in silent:
            if one is not None:
                one.close()
        # Each listener goes on.
        for address in (self.tcp, unix):
            self.becomes_served(address)
        with mla_client.Client.connect(self.server.target, transport="ring") as client:
            client.stats()

    def test_connections_are_bounded_in_all_and_for_each_peer(self):
        self.start("--wire-max-connections=6", "--wire-peer-connections=4")
        unix = str(self.server.socket)
        held = [self.becomes_served(unix) for _ in range(4)]
        self.assertIsNone(self.served(unix))
        held += [self.becomes_served(self.tcp) for _ in range(2)]
        self.assertIsNone(self.served(self.tcp))
        self.assertNotIn("mla_connections_refused_total 0\n", self.page("/metrics"))
        held[0].close()
        self.becomes_served(unix)

    def test_calls_of_a_connection_are_bounded(self):
        self.start("--wire-connection-streams=2")
        with grpc.insecure_channel(self.server.target) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            calls = []
            for _ in range(2):
                calls.append(stub.WatchStatus(admin_pb2.WatchStatusRequest(interval_ms=1000),
                                              timeout=WAIT_S))
                next(calls[-1])
            with self.assertRaises(grpc.RpcError) as caught:
                stub.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=0.5)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
            calls[0].cancel()
            stub.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=WAIT_S)
            calls[1].cancel()

    def test_headers_that_never_end_are_refused(self):
        self.start("--wire-quota-bytes=16MiB")
        hostile = self.becomes_served(str(self.server.socket))
        hostile.sendall(PREFACE + frame(HEADERS, 1, header(b":method", b"POST")))
        more = frame(CONTINUATION, 1,
                     b"".join(header(b"a%d" % i, b"v" * 60) for i in range(200)))
        with self.assertRaises((BrokenPipeError, ConnectionResetError)):
            for _ in range((512 << 20) // len(more)):
                hostile.sendall(more)
        with mla_client.Client.connect(self.server.target) as client:
            client.stats()

    def test_a_connection_that_answers_no_probe_is_closed(self):
        self.start("--wire-keepalive-ms=1000")
        dead = self.becomes_served(str(self.server.socket))
        dead.sendall(PREFACE)
        while dead.recv(4096):  # a time-out is an error
            pass


if __name__ == "__main__":
    unittest.main()
