"""Promises of docs/security.md that no single class can show, checked from outside the process."""

import json
import os
import pathlib
import re
import resource
import socket
import time
import unittest
import urllib.request

import grpc
import mla_client
import numpy as np
import server_binary
from mla_client import Profile
from service_contract import GEOMETRY, SCALE

SECRET = 0x4D4C  # a bf16 pattern, and the letters "LM"
LISTENING = "0A"  # TCP_LISTEN in /proc/net
MAPPED = "0000000000000000FFFF0000"


def listening(pid):
    """Addresses and paths on which a process listens."""
    sockets = set()
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.update(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
        except FileNotFoundError:
            pass  # closed in between
    found = []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in sockets and (fields[3] == LISTENING or name.startswith("udp")):
                address, port = fields[1].rsplit(":", 1)
                # gRPC's sockets are of version 6 and carry addresses of version 4.
                found.append((name[:3], address.replace(MAPPED, ""), int(port, 16)))
    for line in pathlib.Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in sockets and int(fields[3], 16) & 0x10000:  # it accepts connections
            found.append(("unix", fields[7] if len(fields) > 7 else "", 0))
    return sorted(found)


class PromisesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = server_binary.start("--log-level=debug", "--log-format=json",
                                         "--ops-listen=127.0.0.1:0", listen="127.0.0.1:0")
        cls.addClassCleanup(cls.server.stop)
        started = next(event for event in map(json.loads, cls.server.log().splitlines())
                       if event["event"] == "listening")
        cls.tcp_port, cls.ops_port = int(started["tcp_port"]), int(started["ops_port"])

    def setUp(self):
        self.client = mla_client.Client.connect(self.server.target, transport="inline")
        self.addCleanup(self.client.close)
        self.model = self.client.register_model(
            mla_client.ModelSpec("promises", GEOMETRY, 1, SCALE))

    def page(self, path):
        """The answer of the operations port."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ops_port}{path}",
                                    timeout=10) as page:
            return page.read().decode()

    def test_nothing_listens_but_what_is_configured(self):
        loopback = "0100007F"
        self.assertEqual(listening(self.server.pid), sorted([
            ("tcp", loopback, self.tcp_port), ("tcp", loopback, self.ops_port),
            ("unix", str(self.server.socket), 0), ("unix", f"{self.server.socket}.shm", 0)]))

    def test_sequence_ids_cannot_be_guessed(self):
        """Every bit of an id is drawn: each is set in some of 128 ids and clear in others."""
        ids = [self.model.open_sequence().id for _ in range(128)]
        every, some = 2**64 - 1, 0
        for one in ids:
            every, some = every & one, some | one
        self.assertEqual((len(set(ids)), every, some), (128, 0, 2**64 - 1))
        self.client._release(ids)

    def test_tensors_reach_neither_log_nor_operations_port(self):
        """Rows of one pattern, computed, refused and sent under a wrong shape."""
        geometry = GEOMETRY
        q = np.full((2, geometry.num_heads, geometry.q_dim(Profile.ABSORBED)), SECRET, np.uint16)
        kv = np.full((2, geometry.row_dim), SECRET, np.uint16)
        with self.model.open_sequence() as sequence:
            with self.client.step([(sequence, 2)]) as step:
                step.attend(0, q, kv, Profile.ABSORBED)
                for layer, profile in ((7, Profile.ABSORBED), (0, Profile.EXPANDED)):
                    with self.assertRaises(mla_client.MlaError):
                        step.attend(layer, q[..., :geometry.q_dim(profile)], kv, profile)
        raw = grpc.insecure_channel(self.server.target)
        try:
            raw.unary_unary("/mla.v1.Models/Register")(kv.tobytes(), timeout=10)
            self.fail("bytes that are no message were taken")
        except grpc.RpcError as error:
            self.assertEqual(error.code(), grpc.StatusCode.INVALID_ARGUMENT)
        finally:
            raw.close()
        said = self.server.log()
        said += "".join(map(self.page, ("/metrics", "/readyz", "/statusz")))
        self.assertIn("listening", said)
        value = np.array([SECRET << 16], np.uint32).view(np.float32)[0]
        for trace in ("LMLM", "MLML", f"{SECRET:04x}" * 2, f"{value:.6g}", str(int(value))):
            self.assertNotIn(trace, said)

    def test_names_cannot_forge_lines(self):
        """Line ends are refused in names; quotes stay inside their field of log and metrics."""
        for name in ('x\n{"level":"info"}', "x\ry", "x\x1b[2J"):
            with self.assertRaises(mla_client.InvalidArgument):
                self.client.register_model(mla_client.ModelSpec(name, GEOMETRY, 1, SCALE))
        name = 'x"}1_forged{y="'
        with mla_client.Client(grpc.insecure_channel(self.server.target), tenant=name) as client:
            model = client.register_model(mla_client.ModelSpec(name, GEOMETRY, 1, SCALE))
            with model.open_sequence() as sequence, client.step([(sequence, 1)]) as step:
                step.attend(0, None, np.zeros((1, GEOMETRY.row_dim)), Profile.APPEND_ONLY)
            metrics = self.page("/metrics")
            model.unregister()
        for line in self.server.log().splitlines():
            self.assertIn("event", json.loads(line))
        for line in metrics.splitlines():
            self.assertRegex(line, r'^(#.*|\w+(\{(\w+="([^"\\]|\\.)*",?)*\})? [-+\w.]+)$')


class DescriptorsTest(unittest.TestCase):
    """Connections that send nothing must not use up what others and probes need."""

    def test_the_server_takes_all_descriptors_that_it_may_have(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.assertGreater(hard, 256)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            server = server_binary.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        try:
            limits = pathlib.Path(f"/proc/{server.pid}/limits").read_text()
            self.assertRegex(limits, rf"Max open files +{hard} +{hard} ")
        finally:
            server.stop()

    def test_connections_that_send_nothing_are_closed(self):
        server = server_binary.start("--wire-handshake-ms=200")
        try:
            for first_bytes in (b"", b"PRI * HTTP/2.0"):
                with socket.socket(socket.AF_UNIX) as silent:
                    silent.connect(str(server.socket))
                    silent.sendall(first_bytes)
                    # A bound for all of it: gRPC sends settings and pings during that time, and
                    # gives up after 40 s.
                    deadline = time.monotonic() + 20
                    open_still = True
                    while open_still:
                        silent.settimeout(max(0.001, deadline - time.monotonic()))
                        open_still = silent.recv(4096)
            with mla_client.Client.connect(server.target) as client:
                self.assertEqual(client.stats().streams, 0)
        finally:
            server.stop()


if __name__ == "__main__":
    unittest.main()
