"""Errors as exceptions, one class per canonical status code, with the server's ErrorDetail."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Type

import grpc
from google.protobuf.message import DecodeError

from mla_client.gen import error_pb2

DETAIL_KEY = "mla-error-detail-bin"


@dataclasses.dataclass(frozen=True)
class ErrorDetail:
    """Describes the fault in terms of the contract; empty fields do not apply."""

    field: str = ""
    limit: str = ""
    got: str = ""
    retry_after_ms: int = 0
    reason: str = ""
    last_good_position: int = 0
    # For a refusal by a bound: the resource, the wanted and the free amount, and the owner of the
    # bound, "tenant" or "server".
    resource: str = ""
    wanted: int = 0
    free: int = 0
    bound: int = 0
    bound_of: str = ""
    # For an attend with KV rows that failed while its step stays open: the step's first row that
    # the layer does not have.
    next_row: Optional[int] = None
    # "HOST:PORT" of the server to go to: it has the sequence now (reason "moved"), or this one
    # drains and its sequences move there, so that a new one may be opened there ("draining").
    peer: str = ""
    # 32 hex digits: the trace in which the server recorded the failed call; "" if it did not.
    trace_id: str = ""

    @classmethod
    def from_proto(cls, message: Any) -> "ErrorDetail":
        """Reads an mla.v1.ErrorDetail."""
        return cls(message.field, message.limit, message.got, message.retry_after_ms,
                   message.reason, message.last_good_position, message.resource, message.wanted,
                   message.free, message.bound, message.bound_of,
                   message.next_row if message.HasField("next_row") else None, message.peer,
                   message.trace_id)


class MlaError(Exception):
    """A call failed. `code` is the canonical gRPC status code."""

    code = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, detail: Optional[ErrorDetail] = None,
                 step_aborted: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail or ErrorDetail()
        # True if the step that the request belonged to is gone.
        self.step_aborted = step_aborted

    def again(self) -> "MlaError":
        """Returns an equal error to raise. An error that an object keeps must not be raised itself:
        it would hold the frames through which it went, and these the memory of a stream that is
        gone.
        """
        return type(self)(self.message, self.detail, self.step_aborted)

    def __str__(self) -> str:
        parts = [f"{self.code.name}: {self.message}"]
        detail = self.detail
        for name, value in (("field", detail.field), ("got", detail.got),
                            ("limit", detail.limit), ("reason", detail.reason),
                            ("peer", detail.peer), ("trace", detail.trace_id)):
            if value and value not in self.message:
                parts.append(f"{name} {value}")
        return "; ".join(parts)


class Cancelled(MlaError):
    """The stream or the call was cancelled."""
    code = grpc.StatusCode.CANCELLED


class Unknown(MlaError):
    """No better code is known."""


class InvalidArgument(MlaError):
    """The request can never succeed; `detail.field` names the fault."""
    code = grpc.StatusCode.INVALID_ARGUMENT


class DeadlineExceeded(MlaError):
    """There was no answer in time, or the launch did not start in time."""
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class NotFound(MlaError):
    """There is no such model or sequence: it was never opened, was released, has expired, or was
    lost by a restart.
    """
    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(MlaError):
    """The name is taken by something else, or rows differ from those already stored."""
    code = grpc.StatusCode.ALREADY_EXISTS


class PermissionDenied(MlaError):
    """The tenant may not do this."""
    code = grpc.StatusCode.PERMISSION_DENIED


class ResourceExhausted(MlaError):
    """Pages, queue places or another bound are used up; see `detail.retry_after_ms`."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(MlaError):
    """The request is right, but the state is wrong: epoch, open step, missing rows or weights."""
    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(MlaError):
    """The step was aborted."""
    code = grpc.StatusCode.ABORTED


class OutOfRange(MlaError):
    """A position lies beyond the sequence."""
    code = grpc.StatusCode.OUT_OF_RANGE


class Unimplemented(MlaError):
    """The server does not support this; the message lists the supported choices."""
    code = grpc.StatusCode.UNIMPLEMENTED


class Internal(MlaError):
    """The server failed, for example in a kernel."""
    code = grpc.StatusCode.INTERNAL


class Unavailable(MlaError):
    """The server is not reachable or draining."""
    code = grpc.StatusCode.UNAVAILABLE


class DataLoss(MlaError):
    """Data did not arrive as it was sent."""
    code = grpc.StatusCode.DATA_LOSS


class Unauthenticated(MlaError):
    """The credentials are missing or not accepted."""
    code = grpc.StatusCode.UNAUTHENTICATED


class AnotherServer(NotFound):
    """Another server answered on the same address: a balancer stands in between. Sequences live in
    one server, so its own address must be used, or a target that names the cluster."""


class ServerRestarted(NotFound):
    """The boot id changed: every sequence and model of this client is gone. Connect again."""


_BY_CODE: Dict[int, Type[MlaError]] = {
    cls.code.value[0]: cls
    for cls in (Cancelled, Unknown, InvalidArgument, DeadlineExceeded, NotFound, AlreadyExists,
                PermissionDenied, ResourceExhausted, FailedPrecondition, Aborted, OutOfRange,
                Unimplemented, Internal, Unavailable, DataLoss, Unauthenticated)
}


def from_code(code: int, message: str, detail: Optional[ErrorDetail] = None,
              step_aborted: bool = False) -> MlaError:
    """Returns the exception for a numeric status code; unknown codes become Unknown."""
    return _BY_CODE.get(code, Unknown)(message, detail, step_aborted)


def from_rpc(error: grpc.RpcError) -> MlaError:
    """Returns the exception of a failed call, with the detail from its trailing metadata. A detail
    that cannot be read, as a proxy may send one, counts as none.
    """
    detail = None
    for key, value in error.trailing_metadata() or ():
        if key == DETAIL_KEY:
            try:
                detail = ErrorDetail.from_proto(error_pb2.ErrorDetail.FromString(value))
            except (DecodeError, TypeError):
                detail = None
    code = error.code() or grpc.StatusCode.UNKNOWN
    return from_code(code.value[0], error.details() or "", detail)
