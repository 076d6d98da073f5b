"""Certificates that change while a client is connected."""

import contextlib
import pathlib
import shutil
import time
import unittest
from unittest import mock

import grpc
import numpy

import mla_client
from mla_client.connection import certificates
from service_contract import GEOMETRY, SCALE
from tests import peers

WAIT_S = 60.0  # only a test that fails waits so long


class RotationTest(unittest.TestCase):
    def setUp(self):
        self.authority = peers.Authority()
        self.addCleanup(self.authority.close)
        self.authority.make_ca("next")
        self.authority.make("red")
        self.authority.make("old")
        self.copy("ca", "roots")  # what the client trusts
        self.copy("ca", "before")
        self.server, self.port = self.authority.serve("--tls-reload-ms=1000")
        self.addCleanup(self.server.stop)

    def copy(self, source, target):
        shutil.copyfile(self.authority.folder / f"{source}.crt",
                        self.authority.folder / f"{target}.crt")

    def rotate(self):
        """Server and client go over to another authority, and the client to another tenant."""
        self.authority.make("server", "DNS:localhost,IP:127.0.0.1", ca="next")
        self.copy("next", "ca")
        self.authority.make("red", "DNS:blue", ca="next")
        self.copy("next", "roots")

    def eventually(self, condition):
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            with contextlib.suppress(mla_client.Unavailable):  # one side may be ahead of the other
                if condition():
                    return
            time.sleep(0.1)
        self.fail("not within a minute")

    def test_calls_and_streams_after_a_change_have_the_new_certificate(self):
        with self.authority.connect("red", self.port, "roots") as client:
            model = client.register_model(mla_client.ModelSpec("m", GEOMETRY, 1, SCALE))
            sequence = model.open_sequence()
            stream = client.open_stream()
            rows = numpy.zeros((1, GEOMETRY.kv_lora_rank + GEOMETRY.rope_dim), numpy.uint16)

            def step(**options):
                with client.step([(sequence, 1)], **options) as one:
                    one.attend(0, None, rows, mla_client.Profile.APPEND_ONLY)
                    one.end()

            step(stream=stream)
            self.rotate()
            self.eventually(lambda: client.models() == [])  # of blue
            step(stream=stream)  # on the connection on which it has begun, as red
            self.assertEqual(sequence.length, 2)
            with self.assertRaises(mla_client.NotFound):
                step(stream=client.open_stream())
        with self.assertRaises(mla_client.Unavailable):  # with what was there before
            self.authority.connect("old", self.port, "before").close()

    def test_files_that_do_not_fit_are_not_used(self):
        key = pathlib.Path(self.authority.files("red")["key"])
        good = key.read_bytes()
        with mock.patch.object(certificates, "LOOK_S", 0.0), \
                self.authority.connect("red", self.port) as client:
            self.authority.make("other")
            for bad in (b"", b"garbage", good[:40],
                        pathlib.Path(self.authority.files("other")["key"]).read_bytes()):
                key.write_bytes(bad)
                self.assertEqual(client.models(), [], bad)
            key.unlink()
            self.assertEqual(client.models(), [])


class RenewedChannelTest(unittest.TestCase):
    def setUp(self):
        self.made = []
        self.tls = mock.Mock()
        self.tls.signature.return_value = 1
        patched = mock.patch.object(certificates, "LOOK_S", 0.0)
        patched.start()
        self.addCleanup(patched.stop)

        def make(credentials):
            self.made.append(mock.Mock(credentials=credentials))
            return self.made[-1]
        self.channel = certificates.RenewedChannel(self.tls, make)
        self.method = self.channel.unary_unary("/a/B", request_serializer=None)

    def test_a_connection_stays_until_its_calls_have_ended(self):
        self.method("first")
        call = self.method.future("second")
        stream_call = self.channel.unary_stream("/a/C")("third")
        self.tls.signature.return_value = 2
        self.method("fourth")
        self.assertEqual(len(self.made), 2)
        self.assertIs(self.made[1].credentials, self.tls.fitting_credentials.return_value)
        sent = [one.unary_unary.return_value for one in self.made]
        self.assertEqual([one.call_args for one in sent], [mock.call("first"), mock.call("fourth")])
        self.assertFalse(self.made[0].close.called)
        call.add_done_callback.call_args[0][0](call)
        self.method("fifth")
        self.assertFalse(self.made[0].close.called)
        stream_call.add_callback.call_args[0][0]()
        self.assertFalse(self.made[0].close.called)  # not by a thread of gRPC's
        self.method("sixth")
        self.assertTrue(self.made[0].close.called)
        self.channel.close()
        self.assertTrue(self.made[1].close.called)

    def test_files_are_looked_at_at_times_and_after_a_server_was_unavailable(self):
        class Lost(grpc.RpcError):
            def code(self):
                return grpc.StatusCode.UNAVAILABLE

        with mock.patch.object(certificates, "LOOK_S", 1e6):
            self.method("call")
            looks = self.tls.signature.call_count
            self.method("call")
            self.assertEqual(self.tls.signature.call_count, looks)
            self.made[0].unary_unary.return_value.side_effect = Lost
            with self.assertRaises(Lost):
                self.method("call")
            self.made[0].unary_unary.return_value.side_effect = None
            self.method("call")
            self.assertEqual(self.tls.signature.call_count, looks + 1)

    def test_a_missing_file_changes_nothing(self):
        self.tls.signature.return_value = None
        self.method("call")
        self.tls.signature.return_value = 1
        self.method("call")
        self.tls.signature.return_value, self.tls.fitting_credentials.return_value = 2, None
        self.method("call")
        self.assertEqual(len(self.made), 1)


if __name__ == "__main__":
    unittest.main()
