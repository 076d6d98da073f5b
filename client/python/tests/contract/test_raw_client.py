"""Every RPC, from a stock gRPC client: working calls, and how each wrong call is refused."""

import hashlib
import os
import secrets
import unittest

import grpc
import numpy as np
import server_binary
from mla_client.gen import (admin_pb2, attention_pb2, model_pb2, sequence_pb2, tensor_pb2)
from raw_client import GEOMETRY, LAYERS, ROW_BYTES, RawClient, Refused

SERVER = None
CODE = {code.name: code.value[0] for code in grpc.StatusCode}


def setUpModule():
    global SERVER
    SERVER = server_binary.start()


def tearDownModule():
    SERVER.stop()


class RawTest(unittest.TestCase):
    def setUp(self):
        self.client = RawClient(SERVER.target)
        self.addCleanup(self.client.close)
        self.model = "raw-" + secrets.token_hex(4)
        self.client.register(self.model)
        self.addCleanup(self.clean)

    def clean(self):
        """Removes all sequences and models of this test."""
        reply = self.client.call(self.client.sequences.Get, sequence_pb2.GetRequest())
        self.client.call(self.client.sequences.Release, sequence_pb2.ReleaseRequest(
            sequence_ids=[info.sequence_id for info in reply.sequences]))
        self.client.call(self.client.models.Unregister,
                         model_pb2.UnregisterRequest(model_id=self.model))

    def refused(self, code, act, *args, field=None, **kwargs):
        """`act` is refused with that code; returns the refusal."""
        with self.assertRaises(Refused) as caught:
            act(*args, **kwargs)
        self.assertEqual(caught.exception.code, CODE[code], caught.exception)
        self.assertTrue(caught.exception.message)
        if field is not None:
            self.assertEqual(caught.exception.detail.field, field, caught.exception)
        return caught.exception

    def call(self, method, request):
        return self.client.call(method, request)


class EveryRpcTest(RawTest):
    def test_admin(self):
        info = self.call(self.client.admin.GetServerInfo, admin_pb2.GetServerInfoRequest())
        self.assertEqual(info.api_version, "mla.v1")
        self.assertTrue(info.server_version)
        self.assertTrue(info.supported_shapes)
        self.assertGreaterEqual(info.limits.message_bytes, 65536)
        self.assertEqual([backend.chosen for backend in info.backends].count(True), 1)
        stats = self.call(self.client.admin.GetStats, admin_pb2.GetStatsRequest())
        self.assertEqual(stats.boot_id, info.boot_id)
        self.assertGreaterEqual(stats.models, 1)

    def test_watch_status(self):
        updates = self.client.admin.WatchStatus(admin_pb2.WatchStatusRequest(interval_ms=100),
                                                timeout=10, metadata=self.client.metadata)
        seen = [next(updates) for _ in range(3)]
        updates.cancel()
        for update in seen:
            self.assertEqual(update.state, admin_pb2.SERVER_STATE_SERVING)
            self.assertEqual(update.boot_id, seen[0].boot_id)

    def test_models(self):
        listed = self.call(self.client.models.List, model_pb2.ListModelsRequest()).models
        entry = next(entry for entry in listed if entry.model.model_id == self.model)
        self.assertEqual((entry.model.page_size, entry.weights_complete, entry.sequences),
                         (4, False, 0))
        reply = self.client.register(self.model)
        self.assertEqual(reply.page_group_bytes % (LAYERS * 4), 0)
        self.assertGreater(reply.page_groups_max, 0)

    def test_sequence_life(self):
        info = self.client.open(self.model, request_id="one")
        self.assertEqual(self.client.open(self.model, request_id="one").sequence_id,
                         info.sequence_id)
        stream = self.client.stream()
        self.assertEqual(stream.begin(1, self.model, [(info, 5)]).begin_step.total_rows, 5)
        state = self.call(self.client.sequences.Get,
                          sequence_pb2.GetRequest(sequence_ids=[info.sequence_id])).sequences[0]
        self.assertEqual((state.in_step, state.open_step), (True, 1))
        for layer in range(LAYERS):
            stream.append(1, layer, 5)
        self.assertEqual(list(stream.end(1).end_step.lengths), [5])
        child = self.call(self.client.sequences.Fork, sequence_pb2.ForkRequest(
            sequence_id=info.sequence_id, expected_epoch=info.epoch, length=3)).sequence
        self.assertEqual((child.length, child.client_id), (3, "raw"))
        truncated = self.call(self.client.sequences.Truncate, sequence_pb2.TruncateRequest(
            sequence_id=info.sequence_id, length=2, expected_epoch=info.epoch))
        self.assertEqual((truncated.length, truncated.epoch > info.epoch), (2, True))
        renewed = self.call(self.client.sequences.RenewLease,
                            sequence_pb2.RenewLeaseRequest(client_id="raw"))
        self.assertEqual(renewed.renewed, 2)
        gone = self.call(self.client.sequences.Release, sequence_pb2.ReleaseRequest(
            sequence_ids=[info.sequence_id, child.sequence_id, 12345]))
        self.assertEqual((gone.released, list(gone.not_found)), (2, [12345]))
        self.assertEqual(stream.close(), grpc.StatusCode.OK)

    def test_attend_values(self):
        """Two equal keys: the output is their common latent part, the LSE log 2 above the score."""
        info = self.client.open(self.model)
        stream = self.client.stream()
        stream.begin(9, self.model, [(info, 2)])
        row = np.arange(48, dtype=np.float32) / 8
        q = np.full((2, 2, 48), 0.25, np.float32)
        payload = np.stack([row, row]).tobytes() + q.tobytes()
        reply = stream.ask(payload, attend=attention_pb2.Attend(
            step_id=9, row_count=2, num_heads=2, profile=attention_pb2.PROFILE_ABSORBED,
            has_kv=True, want_lse=True, q_dtype=tensor_pb2.DTYPE_F32,
            o_dtype=tensor_pb2.DTYPE_F32))
        values = np.frombuffer(reply.payload, "<f4")
        np.testing.assert_allclose(values[:128].reshape(2, 2, 32),
                                   np.broadcast_to(row[:32], (2, 2, 32)), rtol=1e-2)
        score = 0.2 * 0.25 * row.sum()
        np.testing.assert_allclose(values[128:].reshape(2, 2),
                                   [[score] * 2, [score + np.log(2)] * 2], rtol=1e-2)
        self.assertEqual(reply.timings.launch_requests, 1)
        stream.abort(9)

    def test_upload(self):
        def parts(digest=None, chunks=None, fill=b"\0"):
            Request = model_pb2.UploadWeightsRequest
            yield Request(header=Request.Header(model_id=self.model))
            payload = fill * (2 * 2 * (16 * 32 + 32 * 16))
            for layer in chunks or range(LAYERS):
                yield Request(chunk=Request.Chunk(layer=layer, head_count=2, payload=payload))
            good = hashlib.sha256(payload * len(chunks or range(LAYERS))).digest()
            yield Request(trailer=Request.Trailer(sha256=digest or good))

        upload = self.client.models.UploadWeights
        self.refused("DATA_LOSS", self.call, upload, parts(bytes(32)))
        self.refused("INVALID_ARGUMENT", self.call, upload, iter([]))
        self.refused("INVALID_ARGUMENT", self.call, upload, list(parts())[:-1].__iter__())
        partial = self.call(upload, parts(chunks=[1]))
        self.assertEqual((partial.complete, list(partial.missing_layers)), (False, [0]))
        self.assertTrue(self.call(upload, parts(chunks=[0])).complete)
        self.assertTrue(self.call(upload, parts()).complete)
        self.refused("ALREADY_EXISTS", self.call, upload, parts(fill=b"\1"))

    def test_health(self):
        check = self.client.channel.unary_unary("/grpc.health.v1.Health/Check")
        for name in (b"", b"mla.v1.Attention", b"mla.v1.Sequences", b"mla.v1.Models"):
            request = bytes([0x0A, len(name)]) + name if name else b""
            self.assertEqual(check(request, timeout=10), b"\x08\x01", name)  # SERVING
        with self.assertRaises(grpc.RpcError) as caught:
            check(b"\x0a\x04none", timeout=10)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)

    def test_reflection_names_the_services(self):
        info = self.client.channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        reply = next(info(iter([b"\x3a\x01*"]), timeout=10))  # list_services: "*"
        for name in (b"mla.v1.Attention", b"mla.v1.Sequences", b"mla.v1.Models", b"mla.v1.Admin",
                     b"grpc.health.v1.Health"):
            self.assertIn(name, reply)

    def test_unknown_method(self):
        with self.assertRaises(grpc.RpcError) as caught:
            self.client.channel.unary_unary("/mla.v1.Attention/Nothing")(b"", timeout=10)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)


class RefusalTest(RawTest):
    def test_register(self):
        for code, field, changes in (
                ("INVALID_ARGUMENT", "model.model_id", dict(model_id="")),
                ("INVALID_ARGUMENT", "model.model_id", dict(model_id="x" * 129)),
                ("INVALID_ARGUMENT", "model.softmax_scale", dict(softmax_scale=0)),
                ("INVALID_ARGUMENT", "model.softmax_scale", dict(softmax_scale=float("nan"))),
                ("INVALID_ARGUMENT", "model.layers", dict(layers=0)),
                ("INVALID_ARGUMENT", "model.rope_owner", dict(rope_owner=0)),
                ("INVALID_ARGUMENT", "model.kv_dtype", dict(kv_dtype=tensor_pb2.DTYPE_F32)),
                ("ALREADY_EXISTS", None, dict(softmax_scale=0.3))):
            with self.subTest(changes=changes):
                model_id = changes.pop("model_id", self.model if code == "ALREADY_EXISTS" else
                                       "other")
                self.refused(code, self.client.register, model_id, field=field, **changes)

    def test_shapes_that_no_backend_supports(self):
        wide = tensor_pb2.Geometry(**{**GEOMETRY, "num_heads": 1 << 20})
        with self.assertRaises(Refused) as caught:
            self.client.register("other", geometry=wide)
        self.assertIn(caught.exception.code, (CODE["UNIMPLEMENTED"], CODE["INVALID_ARGUMENT"]))
        self.assertTrue(caught.exception.detail.limit, caught.exception)

    def test_not_found(self):
        missing = dict(sequence_id=77)
        sequences = self.client.sequences
        self.refused("NOT_FOUND", self.client.open, "no such model")
        self.refused("NOT_FOUND", self.call, sequences.Fork, sequence_pb2.ForkRequest(**missing))
        self.refused("NOT_FOUND", self.call, sequences.Truncate,
                     sequence_pb2.TruncateRequest(**missing))
        self.refused("NOT_FOUND", self.call, self.client.models.Unregister,
                     model_pb2.UnregisterRequest(model_id="no such model"))
        reply = self.call(sequences.Get, sequence_pb2.GetRequest(sequence_ids=[77]))
        self.assertEqual(list(reply.not_found), [77])

    def test_step_rules(self):
        info = self.client.open(self.model)
        stream = self.client.stream()
        old = sequence_pb2.SequenceInfo()
        old.CopyFrom(info)
        old.epoch += 1
        ahead = sequence_pb2.SequenceInfo()
        ahead.CopyFrom(info)
        ahead.length = 5
        absent = sequence_pb2.SequenceInfo(sequence_id=77, epoch=1)
        self.refused("FAILED_PRECONDITION", stream.begin, 1, self.model, [(old, 1)])
        self.refused("NOT_FOUND", stream.begin, 1, self.model, [(absent, 1)])
        with self.assertRaises(Refused):
            stream.begin(1, self.model, [(ahead, 1)])
        self.refused("INVALID_ARGUMENT", stream.begin, 1, self.model, [])
        self.refused("INVALID_ARGUMENT", stream.begin, 1, self.model, [(info, 0)])
        # An id that no test of this server has used: a step that was aborted is remembered as such.
        self.refused("NOT_FOUND", stream.append, 9001, 0, 1)
        stream.begin(1, self.model, [(info, 4)])
        with self.assertRaises(Refused):
            stream.begin(1, self.model, [(info, 3)])
        self.refused("FAILED_PRECONDITION", stream.end, 1)
        self.refused("INVALID_ARGUMENT", stream.append, 1, LAYERS, 4, field="attend.layer")
        self.refused("INVALID_ARGUMENT", stream.append, 1, 0, 5, field="attend.row_count")
        self.refused("FAILED_PRECONDITION", stream.ask, bytes(2 * 2 * 32),
                     attend=attention_pb2.Attend(step_id=1, row_count=1, num_heads=2,
                                                 profile=attention_pb2.PROFILE_EXPANDED))
        stream.append(1, 0, 4)
        self.refused("ALREADY_EXISTS", stream.ask, b"\x01" * (ROW_BYTES * 4),
                     attend=attention_pb2.Attend(step_id=1, row_count=4, has_kv=True,
                                                 profile=attention_pb2.PROFILE_APPEND_ONLY))
        stream.append(1, 0, 4)  # equal bytes may be sent again
        stream.abort(1)
        self.refused("ABORTED", stream.abort, 1)
        self.refused("NOT_FOUND", stream.abort, 2)

    def test_payload_sizes(self):
        info = self.client.open(self.model)
        stream = self.client.stream()
        stream.begin(1, self.model, [(info, 2)])
        for size in (0, 1, 2 * ROW_BYTES - 1, 2 * ROW_BYTES + 1):
            attend = attention_pb2.Attend(step_id=1, row_count=2, has_kv=True,
                                          profile=attention_pb2.PROFILE_APPEND_ONLY)
            refusal = self.refused("INVALID_ARGUMENT", stream.ask, bytes(size), attend=attend)
            self.assertIn(str(2 * ROW_BYTES), refusal.message + refusal.detail.limit)
        stream.append(1, 0, 2)
        stream.abort(1)

    def test_a_request_without_body(self):
        stream = self.client.stream()
        with self.assertRaises((Refused, grpc.RpcError)):
            stream.ask()

    def test_bytes_that_are_no_message(self):
        call = self.client.channel.stream_stream("/mla.v1.Attention/Attend")
        for junk in (b"\xff" * 40, b"\x12\xff\xff\xff\xff\x0f", os.urandom(64) + b"\xff"):
            with self.assertRaises(grpc.RpcError) as caught:
                list(call(iter([junk]), timeout=10, metadata=self.client.metadata))
            self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)

    def test_fields_in_any_order(self):
        """protobuf lets a writer put the payload first."""
        info = self.client.open(self.model)
        begin = attention_pb2.AttendStreamRequest(tag=1, begin_step=attention_pb2.BeginStep(
            step_id=4, model_id=self.model, sequences=[attention_pb2.StepSequence(
                sequence_id=info.sequence_id, epoch=info.epoch, rows=1)]))
        attend = attention_pb2.AttendStreamRequest(tag=2, attend=attention_pb2.Attend(
            step_id=4, row_count=1, has_kv=True, profile=attention_pb2.PROFILE_APPEND_ONLY))
        payload = attention_pb2.AttendStreamRequest(payload=bytes(ROW_BYTES))
        call = self.client.channel.stream_stream(
            "/mla.v1.Attention/Attend",
            response_deserializer=attention_pb2.AttendStreamReply.FromString)
        messages = [begin.SerializeToString(),
                    payload.SerializeToString() + attend.SerializeToString()]
        replies = list(call(iter(messages), timeout=10, metadata=self.client.metadata))
        self.assertEqual([reply.WhichOneof("body") for reply in replies],
                         ["begin_step", "attend"], replies)

    def test_message_above_the_bound(self):
        limit = self.call(self.client.admin.GetServerInfo,
                          admin_pb2.GetServerInfoRequest()).limits.message_bytes
        stream = self.client.stream()
        with self.assertRaises((Refused, grpc.RpcError)) as caught:
            stream.ask(bytes(limit + 4096), attend=attention_pb2.Attend(step_id=1))
        code = caught.exception.code
        self.assertIn(code if isinstance(code, int) else code().value[0],
                      (CODE["RESOURCE_EXHAUSTED"], CODE["INVALID_ARGUMENT"]))

    def test_tenants_are_separate(self):
        info = self.client.open(self.model)
        other = RawClient(SERVER.target, tenant="other")
        self.addCleanup(other.close)
        self.refused("NOT_FOUND", other.open, self.model)
        self.refused("NOT_FOUND", other.call, other.sequences.Truncate,
                     sequence_pb2.TruncateRequest(sequence_id=info.sequence_id,
                                                  expected_epoch=info.epoch))
        self.refused("NOT_FOUND", other.stream().begin, 1, self.model, [(info, 1)])

    def test_cancelled_stream(self):
        stream = self.client.stream()
        info = self.client.open(self.model)
        stream.begin(1, self.model, [(info, 1)])
        stream._call.cancel()
        with self.assertRaises((grpc.RpcError, StopIteration)):
            stream.ask(end_step=attention_pb2.EndStep(step_id=1))
        self.assertEqual(stream._call.code(), grpc.StatusCode.CANCELLED)


if __name__ == "__main__":
    unittest.main()
