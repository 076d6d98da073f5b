"""A server that answers whatever a test wants."""

import concurrent.futures

import grpc
from mla_client.gen import admin_pb2, attention_pb2, cache_pb2, model_pb2, sequence_pb2

BOOT_ID = 99
METHODS = {
    "Admin": {"GetServerInfo": (admin_pb2.GetServerInfoRequest, admin_pb2.GetServerInfoReply),
              "GetQuota": (admin_pb2.GetQuotaRequest, admin_pb2.GetQuotaReply)},
    "Models": {"Register": (model_pb2.RegisterRequest, model_pb2.RegisterReply),
               "List": (model_pb2.ListModelsRequest, model_pb2.ListModelsReply)},
    "Sequences": {name: (getattr(sequence_pb2, name + "Request"),
                         getattr(sequence_pb2, name + "Reply"))
                  for name in ("Open", "Match", "Get", "Fork", "Truncate", "ReadTail", "Release",
                               "RenewLease", "Probe")},
    "Cache": {"Restore": (cache_pb2.RestoreRequest, cache_pb2.RestoreReply),
              "Explain": (cache_pb2.ExplainRequest, cache_pb2.ExplainReply)},
}


def info():
    """A server's facts about itself."""
    reply = admin_pb2.GetServerInfoReply(api_version="mla.v1", boot_id=BOOT_ID)
    reply.limits.message_bytes = 1 << 20
    reply.limits.inflight_bytes = 1 << 24
    reply.limits.sequence_lease_ms = 60_000
    return reply


def sequence(sequence_id=7, length=0, **fields):
    return sequence_pb2.SequenceInfo(sequence_id=sequence_id, epoch=1, length=length,
                                     lease_left_ms=60_000, **fields)


def registered(request, _context=None):
    """A registration as it was asked for."""
    reply = model_pb2.RegisterReply(model=request.model, boot_id=BOOT_ID, page_group_bytes=1)
    reply.model.page_size = request.model.page_size or 64
    return reply


class HostileServer:
    """`answers` are by method ("Get", ...) or by the kind of a stream's message ("begin_step",
    ...): a function of the request and the call's context, whose reply is sent unchanged. Without
    one the answer is honest."""

    def __init__(self):
        self.answers = {}
        self.calls = []  # names, in the order of the calls
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(16))
        for service, methods in METHODS.items():
            handlers = {name: grpc.unary_unary_rpc_method_handler(
                self._unary(name), request.FromString, bytes)
                        for name, (request, reply) in methods.items()}
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(f"mla.v1.{service}", handlers),))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
            "mla.v1.Attention", {"Attend": grpc.stream_stream_rpc_method_handler(
                self._attend, attention_pb2.AttendStreamRequest.FromString, bytes)}),))
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self):
        self._server.stop(0).wait()

    def _unary(self, name):
        def answer(request, context):
            self.calls.append(name)
            make = self.answers.get(name) or getattr(self, "_" + name.lower())
            reply = make(request, context)
            return reply if isinstance(reply, bytes) else reply.SerializeToString()
        return answer

    def _attend(self, requests, context):
        for request in requests:
            body = request.WhichOneof("body")
            make = self.answers.get(body) or getattr(self, "_" + body)
            reply = make(request, context)
            if not isinstance(reply, bytes):
                reply.tag = request.tag
                if not reply.boot_id:
                    reply.boot_id = BOOT_ID
                reply = reply.SerializeToString()
            yield reply

    # --- Honest answers

    def _getserverinfo(self, request, context):
        return info()

    def _getquota(self, request, context):
        return admin_pb2.GetQuotaReply(boot_id=BOOT_ID, tenants=[admin_pb2.TenantQuota()])

    _register = staticmethod(registered)

    def _list(self, request, context):
        return model_pb2.ListModelsReply(boot_id=BOOT_ID)

    def _open(self, request, context):
        return sequence_pb2.OpenReply(boot_id=BOOT_ID, sequence=sequence())

    def _match(self, request, context):
        return sequence_pb2.MatchReply(boot_id=BOOT_ID, sequence=sequence())

    def _get(self, request, context):
        return sequence_pb2.GetReply(boot_id=BOOT_ID, sequences=[sequence()])

    def _probe(self, request, context):
        return sequence_pb2.ProbeReply(boot_id=BOOT_ID)

    def _fork(self, request, context):
        return sequence_pb2.ForkReply(boot_id=BOOT_ID, sequence=sequence(8))

    def _truncate(self, request, context):
        return sequence_pb2.TruncateReply(boot_id=BOOT_ID, epoch=2, length=request.length)

    def _release(self, request, context):
        return sequence_pb2.ReleaseReply(boot_id=BOOT_ID, released=1)

    def _renewlease(self, request, context):
        return sequence_pb2.RenewLeaseReply(boot_id=BOOT_ID, renewed=1)

    def _begin_step(self, request, context):
        rows = sum(one.rows for one in request.begin_step.sequences)
        return attention_pb2.AttendStreamReply(
            begin_step=attention_pb2.BeginStepReply(total_rows=rows))

    def _end_step(self, request, context):
        return attention_pb2.AttendStreamReply(end_step=attention_pb2.EndStepReply(lengths=[1, 2]))

    def _abort_step(self, request, context):
        return attention_pb2.AttendStreamReply(abort_step=attention_pb2.AbortStepReply())
