"""Client of mla-server: attention over a paged latent KV cache that a server holds.

    with mla_client.Client.connect("127.0.0.1:50551") as client:
        model = client.register_model(mla_client.ModelSpec(
            "demo", mla_client.Geometry(16, 512, 64, 128, 128), layers=4, softmax_scale=0.1352))
        for layer, (w_uk, w_uv) in enumerate(weights):
            model.upload_weights(layer, w_uk, w_uv)
        with model.open_sequence() as sequence:
            with client.step([(sequence, len(tokens))]) as step:
                for layer in range(4):
                    out = step.attend(layer, q, kv).o

`LocalReference` has the same methods and computes in this process with numpy.
"""

from mla_client import cluster, pages
from mla_client.bf16 import from_bf16, round_to_bf16, to_bf16
from mla_client.client import Client, Tls
from mla_client.errors import (Aborted, AlreadyExists, AnotherServer, Cancelled, DataLoss,
                               DeadlineExceeded, ErrorDetail, FailedPrecondition, Internal,
                               InvalidArgument, MlaError, NotFound, OutOfRange, PermissionDenied,
                               ResourceExhausted, ServerRestarted, Unauthenticated, Unavailable,
                               Unimplemented, Unknown)
from mla_client.local import LocalReference
from mla_client.operations import ResourceUsage, TenantQuota
from mla_client.service import AttendFuture, Model, Sequence, Service, Step
from mla_client.types import (AttendResult, Buffers, DType, Geometry, ModelSpec, Prefix,
                              PrefixMatch, Profile, SequenceState, Timings, WeightsStatus)

__all__ = [
    "Aborted", "AlreadyExists", "AnotherServer", "AttendFuture", "AttendResult", "Buffers",
    "Cancelled", "Client", "DType", "DataLoss", "DeadlineExceeded", "ErrorDetail",
    "FailedPrecondition", "Geometry",
    "Internal", "InvalidArgument", "LocalReference", "MlaError", "Model", "ModelSpec", "NotFound",
    "OutOfRange", "PermissionDenied", "Prefix", "PrefixMatch", "Profile", "ResourceExhausted",
    "ResourceUsage", "Sequence", "SequenceState", "ServerRestarted", "Service", "Step",
    "TenantQuota", "Timings", "Tls", "Unauthenticated", "Unavailable", "Unimplemented", "Unknown",
    "WeightsStatus", "from_bf16", "pages", "round_to_bf16", "to_bf16",
]
