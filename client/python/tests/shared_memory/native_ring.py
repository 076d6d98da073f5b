"""What tests of the C library's rings have in common: a server, clients, and a fake GPU."""

import ctypes
import itertools
import os
import unittest
from unittest import mock

import mla_client
import server_binary
from mla_client import Profile, native
from mla_client.streams.over_native import NativeStream
from service_contract import GEOMETRY, LAYERS, SCALE, Worker

LIBRARY = server_binary.ROOT / ".bazel/bin/client/c/libmla_client.so"
FAKE = server_binary.ROOT / ".bazel/bin/tests/fake_hip/libfake_hip.so"
WAIT_S = 30


class Gpu:
    """A stream of the fake GPU, on which a thread waits."""

    def __init__(self):
        self.library = ctypes.CDLL(str(FAKE))
        self.stream = ctypes.c_void_p()
        self.call("hipStreamCreateWithFlags", ctypes.byref(self.stream), 1)

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise OSError(f"{name}: {code}")

    def finish(self):
        """Waits until the stream has done what it was given."""
        self.call("hipStreamSynchronize", self.stream)

    def capture(self, work):
        """The graph of what `work` gives the stream; it is its only instance, too."""
        self.call("fake_hip_begin_capture", self.stream)
        try:
            work()
        finally:
            self.library.fake_hip_end_capture.restype = ctypes.c_void_p
            graph = self.library.fake_hip_end_capture(self.stream)
        return graph

    def launch(self, graph):
        """Gives the stream the graph's work."""
        self.call("fake_hip_launch_captured", ctypes.c_void_p(graph), self.stream)


class RingCase(unittest.TestCase):
    """One server for all cases of a class."""

    @classmethod
    def setUpClass(cls):
        with mock.patch.dict(os.environ, {native.VARIABLE: str(LIBRARY)}):
            native._found = None
            assert native.library() is not None, native.why_not()
        cls.server = server_binary.start()

    @classmethod
    def tearDownClass(cls):
        native._found = None
        cls.server.stop()

    steps = itertools.count(1)

    def setUp(self):
        self.worker = Worker()
        self.q, self.kv = self.worker.queries(3, Profile.ABSORBED), self.worker.kv(3)
        self.want, _ = self.worker.expected(0, self.q, self.kv, Profile.ABSORBED)

    def connect(self, **options):
        client = mla_client.Client.connect(self.server.target, transport="ring", timeout_s=WAIT_S,
                                           shared_bytes=1 << 20, **options)
        self.addCleanup(client.close)
        model = client.register_model(mla_client.ModelSpec("native", GEOMETRY, LAYERS, SCALE, 4))
        self.assertIsInstance(client._own_stream(), NativeStream)
        return client, model

    def pinned(self):
        return self.connect(pinned=True, device_library=str(FAKE))

    def filled(self, client, model):
        buffers = client.buffers(model, 3, Profile.ABSORBED)
        buffers.q[...] = mla_client.bf16.to_bf16(self.q)
        buffers.kv[...] = mla_client.bf16.to_bf16(self.kv)
        return buffers
