"""Every numeric and text field of every request, at the edges of its type: refused or served, never
a crash, never INTERNAL, and a refusal for a bad value names the field."""

import math
import secrets
import unittest

import grpc
import server_binary
from google.protobuf.descriptor import FieldDescriptor
from mla_client.gen import admin_pb2, attention_pb2, model_pb2, sequence_pb2
from raw_client import LAYERS, ROW_BYTES, RawClient, Refused

SERVER = None
INTEGERS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, -1, -2**31]
FLOATS = [0.0, -1.0, math.inf, -math.inf, math.nan, 1e308, 5e-324]
TEXTS = ["", "x" * 128, "x" * 129, "x" * 5000, "../..", "\0", "é" * 64]
# Errors that a client may get for its own input.
ALLOWED = {code.value[0] for code in (
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED)}
INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]


def setUpModule():
    global SERVER
    SERVER = server_binary.start("--limits-kv-wait-ms=20")


def tearDownModule():
    SERVER.stop()


def values_of(field):
    """Edge values that fit the field's type."""
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return FLOATS
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return [False, True]
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return TEXTS if field.type == FieldDescriptor.TYPE_STRING else [b"", b"\0" * 31, b"x" * 33]
    low, high = {FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
                 FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
                 FieldDescriptor.CPPTYPE_INT32: (-2**31, 2**31 - 1),
                 FieldDescriptor.CPPTYPE_INT64: (-2**63, 2**63 - 1),
                 FieldDescriptor.CPPTYPE_ENUM: (-2**31, 2**31 - 1)}[field.cpp_type]
    return [value for value in INTEGERS if low <= value <= high]


def mutations(message, path=""):
    """(path, copy with one field set to an edge value) for every field, nested ones included."""
    for field in message.DESCRIPTOR.fields:
        name = f"{path}{field.name}"
        repeated = field.label == FieldDescriptor.LABEL_REPEATED
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            inner = getattr(message, field.name)
            if repeated and not len(inner):
                continue
            for inner_name, changed in mutations(inner[0] if repeated else inner, name + "."):
                copy = type(message)()
                copy.CopyFrom(message)
                target = getattr(copy, field.name)
                (target[0] if repeated else target).CopyFrom(changed)
                yield inner_name, copy
            continue
        for value in values_of(field):
            copy = type(message)()
            copy.CopyFrom(message)
            if repeated:
                del getattr(copy, field.name)[:]
                getattr(copy, field.name).append(value)
            else:
                setattr(copy, field.name, value)
            yield name, copy


class BadInputTest(unittest.TestCase):
    def setUp(self):
        self.client = RawClient(SERVER.target)
        self.addCleanup(self.client.close)
        self.model = "bad-" + secrets.token_hex(4)
        self.client.register(self.model)

    def tearDown(self):
        """Whatever was sent, the next well-formed step is served."""
        info = self.client.open(self.model)
        stream = self.client.stream()
        stream.begin(1, self.model, [(info, 2)])
        for layer in range(LAYERS):
            stream.append(1, layer, 2)
        self.assertEqual(list(stream.end(1).end_step.lengths), [2])
        stream.close()
        sequences = self.client.call(self.client.sequences.Get, sequence_pb2.GetRequest())
        self.client.call(self.client.sequences.Release, sequence_pb2.ReleaseRequest(
            sequence_ids=[info.sequence_id for info in sequences.sequences]))

    def judge(self, name, changed, act):
        """Runs one mutation; returns True if it was refused."""
        try:
            act(changed)
        except Refused as refused:
            text = f"{name} in {type(changed).__name__}: {str(changed)[:200]}: {refused}"
            self.assertIn(refused.code, ALLOWED, text)
            self.assertTrue(refused.message, text)
            if refused.code == INVALID:
                self.assertTrue(refused.detail.field, text)
            return True
        return False

    def check(self, base, act, at_least):
        """Sends all mutations of a message; at least `at_least` of them must be refused."""
        tried = refused = 0
        for name, changed in mutations(base):
            tried += 1
            refused += self.judge(name, changed, act)
        self.assertGreaterEqual(refused, at_least, f"{refused} of {tried} refused")

    def unary(self, method):
        return lambda request: self.client.call(method, request)

    def test_register(self):
        def act(request):
            self.client.call(self.client.models.Register, request)
            self.client.call(self.client.models.Unregister,
                             model_pb2.UnregisterRequest(model_id=request.model.model_id))

        self.check(model_pb2.RegisterRequest(model=self.client.spec("other")), act, 40)

    def test_open(self):
        self.check(sequence_pb2.OpenRequest(model_id=self.model, client_id="c"),
                   self.unary(self.client.sequences.Open), 8)

    def test_fork_and_truncate(self):
        info = self.client.open(self.model)
        self.check(sequence_pb2.ForkRequest(sequence_id=info.sequence_id, length=0,
                                            expected_epoch=info.epoch),
                   self.unary(self.client.sequences.Fork), 15)
        self.check(sequence_pb2.TruncateRequest(sequence_id=info.sequence_id,
                                                expected_epoch=info.epoch),
                   self.unary(self.client.sequences.Truncate), 12)

    def test_get_release_renew(self):
        for request, method in (
                (sequence_pb2.GetRequest(sequence_ids=[5]), self.client.sequences.Get),
                (sequence_pb2.ReleaseRequest(sequence_ids=[5]), self.client.sequences.Release),
                (sequence_pb2.RenewLeaseRequest(sequence_ids=[5], client_id="x"),
                 self.client.sequences.RenewLease)):
            self.check(request, self.unary(method), 0)

    def test_admin(self):
        watch = self.client.admin.WatchStatus

        def first_update(request):
            call = watch(request, timeout=10, metadata=self.client.metadata)
            next(call)
            call.cancel()

        self.check(admin_pb2.WatchStatusRequest(interval_ms=100), first_update, 0)

    def test_upload(self):
        Request = model_pb2.UploadWeightsRequest
        payload = bytes(2 * 2 * (16 * 32 + 32 * 16))

        def act(chunk):
            parts = [Request(header=Request.Header(model_id=self.model)), Request(chunk=chunk),
                     Request(trailer=Request.Trailer(sha256=bytes(32)))]
            self.client.call(self.client.models.UploadWeights, iter(parts))

        # The digest is wrong, so even a correct chunk is refused (as DATA_LOSS).
        ALLOWED.add(grpc.StatusCode.DATA_LOSS.value[0])
        self.addCleanup(ALLOWED.discard, grpc.StatusCode.DATA_LOSS.value[0])
        base = Request.Chunk(layer=0, head_begin=0, head_count=2, payload=payload)
        self.check(base, act, sum(1 for _ in mutations(base)))

    def stream_act(self, prepare=None):
        """Sends one body on a stream with a fresh step 7 of two rows, then cleans up."""

        def act(name, body, payload=b""):
            info = self.client.open(self.model)
            stream = self.client.stream()
            try:
                stream.begin(7, self.model, [(info, 2)])
                if prepare:
                    prepare(stream)
                stream.ask(payload, **{name: body})
            except grpc.RpcError as error:  # the stream was ended, not the request refused
                raise Refused(error.code().value[0], error.details(),
                              attention_pb2.StepError().detail) from error
            finally:
                stream._call.cancel()
                self.client.call(self.client.sequences.Release, sequence_pb2.ReleaseRequest(
                    sequence_ids=[info.sequence_id]))

        return act

    def test_begin_step(self):
        info = self.client.open(self.model)
        stream = [self.client.stream()]

        def act(body):
            stream[0].ask(begin_step=body)
            stream[0].abort(body.step_id)

        base = attention_pb2.BeginStep(
            step_id=5, model_id=self.model, lease_ms=1000, participants=1,
            sequences=[attention_pb2.StepSequence(sequence_id=info.sequence_id, epoch=info.epoch,
                                                  rows=1)])
        self.check(base, act, 25)
        stream[0].close()

    def test_attend(self):
        act = self.stream_act()
        base = attention_pb2.Attend(step_id=7, row_count=2, has_kv=True,
                                    profile=attention_pb2.PROFILE_APPEND_ONLY)
        self.check(base, lambda body: act("attend", body, bytes(2 * ROW_BYTES)), 35)
        absorbed = attention_pb2.Attend(step_id=7, row_count=2, has_kv=True, num_heads=2,
                                        profile=attention_pb2.PROFILE_ABSORBED)
        payload = bytes(2 * ROW_BYTES + 2 * 2 * ROW_BYTES)
        self.check(absorbed, lambda body: act("attend", body, payload), 40)

    def test_end_and_abort(self):
        def fill(stream):
            for layer in range(LAYERS):
                stream.append(7, layer, 2)

        act = self.stream_act(fill)
        self.check(attention_pb2.EndStep(step_id=7, committed_rows=[1]),
                   lambda body: act("end_step", body), 9)
        self.check(attention_pb2.AbortStep(step_id=7), lambda body: act("abort_step", body), 6)


if __name__ == "__main__":
    unittest.main()
