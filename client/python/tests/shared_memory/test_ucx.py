"""The transport "ucx": steps over UCX's TCP and shared memory on this machine, its errors and ends.

Needs the C library and UCX; without them the tests say so and are skipped.
"""

import json
import os
import queue
import signal
import subprocess
import threading
import time
import unittest
import urllib.request
from unittest import mock

import mla_client
import numpy as np
import server_binary
from mla_client import errors
from mla_client.base import process
from mla_client.shm import ucx_memory
from mla_client.types import DType, Profile
from service_contract import GEOMETRY, LAYERS, SCALE

SPEC = mla_client.ModelSpec("m", GEOMETRY, LAYERS, SCALE, page_size=4)


def steps(client, tokens=3):
    """The outputs of a step of a new sequence, by layer."""
    random = np.random.default_rng(1)
    model = client.register_model(SPEC)
    outputs = []
    with model.open_sequence() as sequence, client.step([(sequence, tokens)]) as step:
        for layer in range(LAYERS):
            kv = random.standard_normal((tokens, GEOMETRY.row_dim), np.float32)
            q = random.standard_normal(
                (tokens, GEOMETRY.num_heads, GEOMETRY.q_dim(Profile.ABSORBED)), np.float32)
            outputs.append(np.array(step.attend(layer, q, kv, Profile.ABSORBED,
                                                o_dtype=DType.F32).o))
    return outputs


class EndTest(unittest.TestCase):
    """The end of a ring that nothing uses any more, without a server."""

    def setUp(self):
        self.freed = queue.SimpleQueue()
        self.lib = mock.Mock(mla_ring_free=self.freed.put)
        self.call = ucx_memory._Call(self.lib, mock.MagicMock())
        self.owners = [ucx_memory._Owner(self.lib, "ring", process.Home(), self.call)]

    def test_in_the_thread_of_its_call(self):
        def replies():
            self.owners.clear()  # as a collection of garbage there does
            yield from ()
        self.call._call = mock.MagicMock(__iter__=lambda _: replies())
        self.call.watch("ring")
        self.assertEqual(self.freed.get(timeout=60), "ring")

    def test_while_the_thread_goes_on(self):
        goes_on = threading.Event()

        def replies():
            goes_on.wait()
            yield from ()
        self.call._call = mock.MagicMock(__iter__=lambda _: replies())
        self.call.watch("ring")
        with mock.patch.object(ucx_memory, "_END_S", 0.01):
            self.owners.clear()
        self.assertTrue(self.freed.empty())
        goes_on.set()
        self.assertEqual(self.freed.get(timeout=60), "ring")
        self.lib.mla_ring_call_ended.assert_called_once()


class UcxTest(unittest.TestCase):
    """One server with UCX."""

    @classmethod
    def setUpClass(cls):
        reason = server_binary.why_no_ucx()
        if reason:
            raise unittest.SkipTest(reason)
        os.environ["UCX_TLS"] = "tcp"
        cls.addClassCleanup(os.environ.pop, "UCX_TLS")
        cls.server = server_binary.start("--ucx-enabled=true", "--ucx-puts=true",
                                         "--log-level=info", "--log-format=json",
                                         "--ops-listen=127.0.0.1:0")
        cls.addClassCleanup(cls.server.stop)
        started = next(event for event in map(json.loads, cls.server.log().splitlines())
                       if event["event"] == "listening")
        cls.ops_port = int(started["ops_port"])

    def connect(self, transport="ucx", **options):
        """A client of the server, closed with the test."""
        client = mla_client.Client.connect(self.server.target, transport=transport, **options)
        self.addCleanup(client.close)
        return client

    def relays(self):
        """Processes of relays."""
        found = subprocess.run(["pgrep", "-P", str(self.server.pid), "-f", "ucx-relay"],
                               capture_output=True, check=False).stdout.split()
        return [int(pid) for pid in found]

    def test_outputs_are_those_of_grpc(self):
        for transport in ("ucx", "ucx_puts"):
            client = self.connect(transport)
            self.assertEqual(client.transport, "ucx")
            for ours, theirs in zip(steps(client, 60), steps(self.connect("inline"), 60)):
                np.testing.assert_array_equal(ours, theirs)

    def metrics(self):
        """Values of the metrics of rings over UCX, by name and label."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ops_port}/metrics",
                                    timeout=20) as page:
            lines = page.read().decode().splitlines()
        return {name: float(value) for name, value in
                (line.rsplit(" ", 1) for line in lines if line.startswith("mla_ucx_"))}

    def test_traffic_and_ends_are_counted(self):
        before = self.metrics()
        for transport, way in (("ucx", "frame_out"), ("ucx_puts", "put_out")):
            client = mla_client.Client.connect(self.server.target, transport=transport)
            steps(client, 60)
            client.close()
            end = time.monotonic() + 30
            name = f'mla_ucx_payload_bytes_total{{way="{way}"}}'
            while self.metrics()[name] <= before[name] or self.metrics()["mla_ucx_rings_open"] > 0:
                self.assertLess(time.monotonic(), end, self.metrics())
                time.sleep(0.05)
        after = self.metrics()
        grown = {name: after[name] - before[name] for name in after}
        self.assertGreaterEqual(grown["mla_ucx_rings_opened_total"], 2)
        self.assertGreaterEqual(grown['mla_ucx_rings_ended_total{by="call"}'], 2)
        for direction in ("in", "out"):
            self.assertGreater(grown[f'mla_ucx_frames_total{{direction="{direction}"}}'], 4)

    def test_buffers_are_sent_from_their_places(self):
        client = self.connect()
        model = client.register_model(SPEC)
        with model.open_sequence() as sequence, \
                client.buffers(model, 2, Profile.ABSORBED) as buffers, \
                client.step([(sequence, 2)]) as step:
            for layer in range(LAYERS):
                buffers.q[...], buffers.kv[...] = 0x3f80, 0x3f80  # 1.0
                step.attend(layer, buffers.q, buffers.kv, Profile.ABSORBED, out=buffers)
                np.testing.assert_array_equal(buffers.o, 0x3f80)

    def test_the_end_of_a_client_ends_its_relay(self):
        client = mla_client.Client.connect(self.server.target, transport="ucx", tenant="ends")
        steps(client)
        before = len(self.relays())
        client.close()
        del client
        end = time.monotonic() + 30
        while len(self.relays()) >= before:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def test_the_end_of_a_relay_is_an_error(self):
        client = self.connect(tenant="relay")
        steps(client)
        for pid in self.relays():
            os.kill(pid, signal.SIGKILL)
        with self.assertRaises(errors.Unavailable):
            for _ in range(100):
                steps(client)
                time.sleep(0.02)

    def test_a_server_without_ucx_refuses(self):
        with server_binary.start() as server, self.assertRaises(errors.Unimplemented) as caught:
            mla_client.Client.connect(server.target, transport="ucx")
        self.assertIn("ucx", str(caught.exception))

    def test_memory_of_a_gpu_is_refused_with_the_reason(self):
        with self.assertRaises(errors.FailedPrecondition) as caught:
            steps(self.connect("ucx_device"))
        self.assertEqual(caught.exception.detail.field, "device_memory")
        self.assertIn("ucx.device_memory", str(caught.exception))
        # This server has no GPU.
        with server_binary.start("--ucx-enabled=true", "--ucx-puts=true",
                                 "--ucx-device-memory=true", "--shm-device-bytes=64MiB"
                                 ) as server, self.assertRaises(errors.Unavailable) as caught:
            steps(mla_client.Client.connect(server.target, transport="ucx_device"))
        self.assertIn("device memory", str(caught.exception))

    def test_device_memory_does_not_travel(self):
        with self.assertRaises(errors.InvalidArgument):
            self.connect(device_bytes=1 << 20)


if __name__ == "__main__":
    unittest.main()
