"""The Python client against a real server."""

import dataclasses
import os
import pathlib
import signal
import threading
import time
import unittest
from unittest import mock

import mla_client
import numpy as np
import server_binary
from mla_client import Prefix, PrefixMatch, Profile
from mla_client.gen import model_pb2
from service_contract import GEOMETRY, LAYERS, SCALE, ServiceContract

SERVER = None


def setUpModule():
    global SERVER
    SERVER = server_binary.start()


def tearDownModule():
    SERVER.stop()


class ClientTest(ServiceContract, unittest.TestCase):
    """Features that only a server has. Inherits the helpers; the contract itself runs above."""

    def make_service(self):
        return mla_client.Client.connect(SERVER.target, timeout_s=10.0, transport="inline")

    def test_info_and_stats(self):
        info = self.service.server_info()
        self.assertEqual((info.api_version, info.boot_id), ("mla.v1", self.service.boot_id))
        self.assertTrue(info.backend.chosen)
        self.assertIn(info.backend.name, [backend.name for backend in info.backends])
        before = self.service.stats()
        with self.model.open_sequence() as sequence:
            self.add(sequence, self.rows(8))
            during = self.service.stats()
            self.assertGreaterEqual(during.sequences, 1)
            self.assertGreater(during.kv_bytes_used, 0)
        after = self.service.stats()
        self.assertGreater(after.launches, before.launches)
        self.assertGreaterEqual(after.rows_prefill - before.rows_prefill, 8 * LAYERS)
        self.assertGreater(after.received_bytes, before.received_bytes)

    def test_rows_of_eight_bits(self):
        """The result must be attention over rows whose values lost at most a sixteenth."""
        rng = np.random.default_rng(3)
        for kv_format, scales in (("bf16", ()), ("fp8_row", ()), ("fp8_tensor", [1 / 64] * LAYERS)):
            with self.subTest(kv_format):
                spec = dataclasses.replace(self.model.spec, model_id=kv_format, kv_format=kv_format)
                model = self.service.register_model(spec, kv_scales=scales)
                self.assertEqual(model.spec.kv_format, kv_format)
                kv = rng.standard_normal((6, GEOMETRY.row_dim)).astype("f4")
                q = rng.standard_normal((6, GEOMETRY.num_heads, GEOMETRY.row_dim)).astype("f4")
                with model.open_sequence() as sequence, self.service.step([(sequence, 6)]) as step:
                    for layer in range(LAYERS):
                        answer = step.attend(layer, q, kv, Profile.ABSORBED)
                # The first row sees itself alone.
                error = np.abs(np.asarray(answer.o, "f4")[0] - kv[0, :GEOMETRY.kv_lora_rank])
                bound = np.abs(kv[0, :GEOMETRY.kv_lora_rank]) / (200 if kv_format == "bf16" else 15)
                self.assertTrue((error <= bound + 1e-3).all(), error.max())
        with self.assertRaises(mla_client.FailedPrecondition):
            self.model.upload_scales([1.0] * LAYERS)

    def test_a_tail_is_read_whole_though_steps_replace_it(self):
        """A step of no row leaves another tail at the same position, between two parts."""
        size = 100_000  # two parts
        model = self.service.register_model(self.window_spec(tail_bytes=size))
        ask = self.service._call
        with model.open_sequence() as sequence:
            self.append([sequence], 3, [3], {0: bytes(size)})
            for replaced, turns in ((1, 2), (99, 4)):
                tails = [bytes([value]) * size for value in range(1, replaced + 1)]
                serials = []

                def replace(call, request, **options):
                    reply = ask(call, request, **options)
                    if call == self.service._sequences.ReadTail and request.offset == 0:
                        serials.append(reply.serial)
                        if tails:
                            self.append([sequence], 1, [0], {0: tails.pop(0)})
                    return reply

                with mock.patch.object(self.service, "_call", replace):
                    if replaced == 1:
                        self.assertEqual(sequence.read_tail(), (3, b"\1" * size))
                    else:
                        with self.assertRaisesRegex(mla_client.Aborted, "other tails"):
                            sequence.read_tail()
                self.assertEqual(len(serials), turns)
                self.assertEqual(sorted(set(serials)), serials)  # each is higher

    def test_prefixes_are_shared(self):
        model = self.service.register_model(
            dataclasses.replace(self.model.spec, model_id="prefixes", page_size=4))
        rng = np.random.default_rng(7)
        kv = rng.standard_normal((LAYERS, 10, GEOMETRY.row_dim)).astype("f4")
        q = rng.standard_normal((1, GEOMETRY.num_heads, GEOMETRY.row_dim)).astype("f4")
        tokens = list(range(100, 110))

        def add(sequence, first, rows, o=None):
            with self.service.step([(sequence, rows)]) as step:
                for layer in range(LAYERS):
                    queries = np.repeat(q, rows, axis=0)
                    o = step.attend(layer, queries, kv[layer, first:first + rows],
                                    Profile.ABSORBED).o
            return np.asarray(o)[-1]

        with model.open_sequence(prefix=Prefix(tokens[:9])) as first:
            self.assertEqual((first.length, first.matched), (0, PrefixMatch(0, "absent")))
            add(first, 0, 9)
            whole = add(first, 9, 1)
            self.assertEqual(first.match(Prefix(tokens[9:]), first_row=9).rows, 0)
            self.assertEqual(first.refresh().declared, 10)
        with model.open_sequence(prefix=Prefix(tokens, max_rows=9)) as second:
            self.assertEqual((second.length, second.matched), (9, PrefixMatch(9, "all")))
            np.testing.assert_array_equal(add(second, 9, 1), whole)
        for other in (Prefix(tokens, salt="mine"), Prefix([1] + tokens[1:])):
            with model.open_sequence(prefix=other) as third:
                self.assertEqual(third.length, 0)
        with model.open_sequence(prefix=Prefix(tokens[:6] + [1, 2])) as fourth:
            self.assertEqual((fourth.length, fourth.matched.end), (6, "diverged"))
            with self.assertRaises(mla_client.FailedPrecondition):
                fourth.match(Prefix([5]), first_row=2)
        with self.assertRaises(mla_client.InvalidArgument):
            model.open_sequence(prefix=Prefix(page_keys=[b"short"]))

    def test_scales_are_checked(self):
        spec = dataclasses.replace(self.model.spec, model_id="scales", kv_format="fp8_tensor")
        with self.assertRaisesRegex(mla_client.InvalidArgument, r"kv_scales\[1\]"):
            self.service.register_model(spec, kv_scales=[1.0] + [0.0] * (LAYERS - 1))
        model = self.service.register_model(spec)
        with self.assertRaises(mla_client.InvalidArgument):
            model.upload_scales([1.0] * (LAYERS + 1))
        model.upload_scales([0.5] * LAYERS)
        with model.open_sequence():
            model.upload_scales([0.5] * LAYERS)
            with self.assertRaises(mla_client.AlreadyExists):
                model.upload_scales([0.25] * LAYERS)
        with self.assertRaises(mla_client.InvalidArgument):
            self.service.register_model(dataclasses.replace(spec, kv_format="fp4"))

    def test_leases_are_renewed(self):
        with mla_client.Client.connect(SERVER.target, lease_ms=600) as client:
            model = client.register_model(self.model.spec)
            with model.open_sequence() as sequence:
                time.sleep(1.5)
                self.assertGreater(sequence.refresh().lease_left_ms, 0)
                self.assertIsNone(client.lease_error)

    def test_a_later_shorter_lease_is_renewed(self):
        """The first sequence's lease once decided how often all leases are renewed."""
        with mla_client.Client.connect(SERVER.target, lease_ms=600_000) as client:
            model = client.register_model(self.model.spec)
            with model.open_sequence(), model.open_sequence(lease_ms=3000) as late, \
                    late.fork(lease_ms=3000) as child:
                for sequence in (late, child):
                    left = sequence.refresh().lease_left_ms
                    # NotFound ends it when the lease was lost.
                    while (now_left := sequence.refresh().lease_left_ms) <= left:
                        left = now_left
                        time.sleep(0.05)

    def test_without_renewal_a_lease_ends(self):
        client = mla_client.Client.connect(SERVER.target, lease_ms=300)
        sequence = client.register_model(self.model.spec).open_sequence()
        client.close()
        time.sleep(1.0)
        found, missing = self.service._get([sequence.id])
        self.assertEqual((found, missing), ([], [sequence.id]))

    def test_an_upload_waits_for_that_of_another_worker(self):
        spec = dataclasses.replace(self.model.spec, model_id="shared")
        model = self.service.register_model(spec)
        under_way, finish = threading.Event(), threading.Event()

        def requests():
            request = model_pb2.UploadWeightsRequest
            yield request(header=request.Header(model_id="shared"))
            under_way.set()
            finish.wait(10)

        other = self.service._models.UploadWeights.future(
            requests(), metadata=self.service._metadata, timeout=10)
        self.assertTrue(under_way.wait(10))
        time.sleep(0.05)  # the server has the header
        threading.Timer(0.2, finish.set).start()
        heads = (GEOMETRY.num_heads,)
        status = model.upload_weights(
            0, np.ones((*heads, GEOMETRY.nope_dim, GEOMETRY.kv_lora_rank)),
            np.ones((*heads, GEOMETRY.kv_lora_rank, GEOMETRY.v_dim)))
        self.assertTrue(finish.is_set())
        self.assertEqual(status.missing_layers, list(range(1, LAYERS)))
        self.assertIsNotNone(other.exception(10))  # it had no digest

    def test_tenants_do_not_see_each_other(self):
        with mla_client.Client.connect(SERVER.target, tenant="other") as other, \
                self.model.open_sequence() as sequence:
            self.assertNotIn(self.model.spec.model_id, [spec.model_id for spec in other.models()])
            with self.assertRaises(mla_client.NotFound):
                other._fork(sequence.id, sequence.epoch, None, "", 0)
            self.assertEqual(other._release([sequence.id]), [sequence.id])
            self.assertEqual(sequence.refresh().length, 0)

    def test_listing(self):
        self.assertIn(self.model.spec, self.service.models())
        with self.model.open_sequence() as sequence:
            self.assertEqual([state.sequence_id for state in self.service.sequences()],
                             [sequence.id])
        self.assertEqual(self.service.sequences(), [])

    def test_pages_run_out_as_a_whole(self):
        with self.model.open_sequence() as sequence:
            before = self.service.stats().kv_bytes_used
            total = self.service.server_info().limits
            rows = min(total.max_step_rows, total.max_sequence_rows)
            opened = []
            try:
                with self.assertRaises(mla_client.ResourceExhausted) as caught:
                    for _ in range(4096):
                        child = self.model.open_sequence()
                        opened.append(child)
                        self.service.step([(child, rows)]).begin()
                self.assertTrue(caught.exception.detail.reason)
            finally:
                for child in opened:
                    child.release()
            self.assertEqual(self.service.stats().kv_bytes_used, before)
            self.add(sequence, self.rows(1))

    def test_deadline_of_a_call_is_kept(self):
        """A call to a server that does not answer ends with the caller's own deadline."""
        server = server_binary.start()
        client = mla_client.Client.connect(server.target, timeout_s=0.5)
        try:
            os.kill(server.pid, signal.SIGSTOP)
            while " T " not in pathlib.Path(f"/proc/{server.pid}/stat").read_text():
                time.sleep(0.01)
            begin = time.monotonic()
            with self.assertRaises((mla_client.DeadlineExceeded, mla_client.Unavailable)):
                client.stats()
            self.assertLess(time.monotonic() - begin, 3.0)
        finally:
            os.kill(server.pid, signal.SIGCONT)
            client.close()
            server.stop()

    def test_restart_is_noticed(self):
        server = server_binary.start()
        with mla_client.Client.connect(server.target, timeout_s=20.0) as client:
            model = client.register_model(self.model.spec)
            sequence = model.open_sequence()
            os.kill(server.pid, signal.SIGKILL)
            server._process.wait()
            server.start()
            with self.assertRaises(mla_client.NotFound):
                sequence.refresh()
        server.stop()

    def test_drain_refuses_new_and_finishes_open_steps(self):
        server = server_binary.start()
        with mla_client.Client.connect(server.target) as client:
            model = client.register_model(self.model.spec)
            sequence = model.open_sequence()
            step = client.step([(sequence, 1)]).begin()
            status = []
            stopper = threading.Thread(target=lambda: status.append(server.stop()))
            stopper.start()
            deadline = time.monotonic() + 5
            refused = None
            while refused is None and time.monotonic() < deadline:
                try:
                    model.open_sequence().release()
                    time.sleep(0.02)
                except mla_client.Unavailable as error:
                    refused = error
            self.assertIsNotNone(refused)
            self.assertEqual(refused.detail.reason, "draining")
            for layer in range(LAYERS):
                step.attend(layer, None, self.worker.kv(1), Profile.APPEND_ONLY)
            self.assertEqual(step.end(), [1])
            stopper.join()
        self.assertEqual(status, [0])


# ClientTest takes the helpers of the contract, not its tests a third time.
for _name in [name for name in dir(ServiceContract) if name.startswith("test_")]:
    setattr(ClientTest, _name, None)


class ConnectTest(unittest.TestCase):
    def test_nobody_there(self):
        with self.assertRaises(mla_client.Unavailable):
            mla_client.Client.connect("unix:/nowhere/mla.sock", timeout_s=1.0)

    def test_over_tcp(self):
        server = server_binary.start("--log-level=info", listen="127.0.0.1:0")
        try:
            port = server.log().split("tcp_port=")[1].split()[0]
            with mla_client.Client.connect(f"127.0.0.1:{port}") as client:
                model = client.register_model(mla_client.ModelSpec("tcp", GEOMETRY, 1, SCALE))
                with model.open_sequence() as sequence, client.step([(sequence, 2)]) as step:
                    step.attend(0, None, np.ones((2, GEOMETRY.row_dim)), Profile.APPEND_ONLY)
                self.assertEqual(sequence.length, 2)
        finally:
            server.stop()


if __name__ == "__main__":
    unittest.main()
