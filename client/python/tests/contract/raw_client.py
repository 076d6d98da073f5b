"""A stock gRPC client: generated stubs and nothing of ours, as any other language would have."""

import queue

import grpc
from mla_client.gen import (admin_pb2_grpc, attention_pb2, attention_pb2_grpc, error_pb2,
                            model_pb2, model_pb2_grpc, sequence_pb2, sequence_pb2_grpc, tensor_pb2)

TIMEOUT_S = 10.0
GEOMETRY = dict(num_heads=2, kv_lora_rank=32, rope_dim=16, nope_dim=16, v_dim=16)
ROW_BYTES = 2 * (GEOMETRY["kv_lora_rank"] + GEOMETRY["rope_dim"])
LAYERS = 2


class Refused(Exception):
    """A call or a stream request was refused."""

    def __init__(self, code, message, detail):
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.detail = detail


class RawClient:
    """Stubs over one channel; unary calls raise Refused."""

    def __init__(self, target, tenant="default"):
        self.channel = grpc.insecure_channel(target)
        self.metadata = (("mla-tenant", tenant),)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        self.models = model_pb2_grpc.ModelsStub(self.channel)
        self.sequences = sequence_pb2_grpc.SequencesStub(self.channel)
        self.attention = attention_pb2_grpc.AttentionStub(self.channel)

    def call(self, method, request):
        """One unary (or request-streaming) call."""
        try:
            return method(request, timeout=TIMEOUT_S, metadata=self.metadata)
        except grpc.RpcError as error:
            detail = error_pb2.ErrorDetail()
            for key, value in error.trailing_metadata() or ():
                if key == "mla-error-detail-bin":
                    detail.ParseFromString(value)
            raise Refused(error.code().value[0], error.details(), detail) from error

    def spec(self, model_id, **changes):
        """A small model that every backend supports."""
        values = dict(model_id=model_id, geometry=tensor_pb2.Geometry(**GEOMETRY), layers=LAYERS,
                      softmax_scale=0.2, kv_dtype=tensor_pb2.DTYPE_BF16,
                      rope_owner=model_pb2.ROPE_OWNER_WORKER, page_size=4)
        values.update(changes)
        return model_pb2.ModelSpec(**values)

    def register(self, model_id, **changes):
        return self.call(self.models.Register,
                         model_pb2.RegisterRequest(model=self.spec(model_id, **changes)))

    def open(self, model_id, **fields):
        """Opens a sequence; returns its SequenceInfo."""
        request = sequence_pb2.OpenRequest(model_id=model_id, client_id="raw", **fields)
        return self.call(self.sequences.Open, request).sequence

    def stream(self):
        return RawStream(self)

    def close(self):
        self.channel.close()


class RawStream:
    """One Attend stream, a request at a time."""

    def __init__(self, client):
        self._out = queue.SimpleQueue()
        self._call = client.attention.Attend(iter(self._out.get, None), metadata=client.metadata,
                                             timeout=60)
        self._tag = 0

    def ask(self, payload=b"", **body):
        """Sends one request; returns the reply or raises Refused for a StepError."""
        self._tag += 1
        self._out.put(attention_pb2.AttendStreamRequest(tag=self._tag, payload=payload, **body))
        reply = next(self._call)
        assert reply.tag == self._tag, (reply.tag, self._tag)
        if reply.WhichOneof("body") == "error":
            raise Refused(reply.error.code, reply.error.message, reply.error.detail)
        return reply

    def begin(self, step_id, model_id, rows, **fields):
        """BeginStep of (SequenceInfo, rows) pairs."""
        sequences = [attention_pb2.StepSequence(sequence_id=info.sequence_id, epoch=info.epoch,
                                                start_position=info.length, rows=count)
                     for info, count in rows]
        return self.ask(begin_step=attention_pb2.BeginStep(
            step_id=step_id, model_id=model_id, sequences=sequences, **fields))

    def append(self, step_id, layer, rows, **fields):
        """Stores zero rows."""
        values = dict(step_id=step_id, layer=layer, row_count=rows, has_kv=True,
                      profile=attention_pb2.PROFILE_APPEND_ONLY)
        values.update(fields)
        return self.ask(bytes(ROW_BYTES * rows), attend=attention_pb2.Attend(**values))

    def end(self, step_id, **fields):
        return self.ask(end_step=attention_pb2.EndStep(step_id=step_id, **fields))

    def abort(self, step_id):
        return self.ask(abort_step=attention_pb2.AbortStep(step_id=step_id))

    def close(self):
        """Half-closes and waits for the end; returns the status code."""
        self._out.put(None)
        for _ in self._call:
            pass
        return self._call.code()
