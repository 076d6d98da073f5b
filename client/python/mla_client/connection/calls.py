"""Control calls: deadlines, repeats, and the identity of the server that answers."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any, Callable, Iterator, Optional, Tuple

import grpc

from mla_client import errors
from mla_client.base import deadlines, process, tracing
from mla_client.gen import admin_pb2, admin_pb2_grpc

ATTEMPTS = 4
FIRST_PAUSE_S = 0.05  # before the first repeat; at most doubled before each further one
# Longest question which server answers. Within it two answers count as one.
ASK_S = 1.0
_OTHERS = {
    "server_restarted": errors.ServerRestarted(
        "the server restarted: all sequences are gone",
        errors.ErrorDetail(reason="server_restarted")),
    "another_server": errors.AnotherServer(
        "another server answered on this address, as servers after a balancer do: use the server's "
        "own address, or a target that names the cluster",
        errors.ErrorDetail(reason="another_server")),
}


class Calls:
    """Makes the control calls of a client. Threading: any thread."""

    def __init__(self, channel: grpc.Channel, metadata: Tuple[Tuple[str, str], ...],
                 timeout_s: float) -> None:
        self._channel = channel
        self.metadata = metadata
        self.timeout_s = timeout_s
        self.home = process.Home()
        self.closed = threading.Event()  # ends pauses between repeats
        self.boot_id: Optional[int] = None  # of the server that answered first
        self._answered = time.monotonic()   # when that one did last
        self._other: Optional[errors.MlaError] = None  # why its answers are not to be used

    def __call__(self, method: Callable[..., Any], request: Any, *, idempotent: bool = True,
                 requests: Optional[Callable[[], Iterator[Any]]] = None,
                 timeout_s: Optional[float] = None) -> Any:
        """One call with a deadline (None: the client's). Calls that may be repeated are, while the
        server is unavailable and time is left, unless it is draining."""
        self.home.check()
        timeout_s = self.timeout_s if timeout_s is None else min(timeout_s, deadlines.LONGEST_S)
        deadline = time.monotonic() + timeout_s
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self.while_open():
                    reply = method(requests() if requests else request,
                                   metadata=self.metadata + tracing.metadata(),
                                   timeout=max(0.001, deadline - time.monotonic()))
            except grpc.RpcError as rpc_error:
                error = errors.from_rpc(rpc_error)
                pause = max(error.detail.retry_after_ms / 1e3,
                            FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.0))
                if (not idempotent or not isinstance(error, errors.Unavailable)
                        or error.detail.reason == "draining" or attempt == ATTEMPTS
                        or time.monotonic() + pause >= deadline or not self._pause(pause)):
                    raise error from rpc_error
            else:
                if hasattr(reply, "boot_id"):  # a drain's answer carries none
                    self.check(reply)
                elif self._other is not None:
                    raise self._why_other().again()
                return reply
        raise AssertionError("unreachable: the last attempt returns or raises")

    @contextlib.contextmanager
    def while_open(self) -> Iterator[None]:
        """Calls of gRPC in its block raise Unavailable if another thread has closed the client: a
        cluster's client does so with a server that does not answer, under calls that begin."""
        try:
            yield
        except ValueError as error:  # gRPC's for a channel that is closed
            if not self.closed.is_set():
                raise
            raise errors.Unavailable("the client is closed") from error

    def check(self, reply: Any) -> None:
        """The same of a reply to a call that was made elsewhere. Raises ServerRestarted or
        AnotherServer."""
        self.see_boot_id(reply.boot_id)
        if self._other is not None:
            raise self._why_other().again()

    def _pause(self, seconds: float) -> bool:
        """Waits before a repeat; false if the client was closed. A connection makes progress only
        while a thread looks after it: here that of a call which waits for the connection. The
        thread of channel_ready_future would end by an error if the client is closed meanwhile."""
        with self.while_open():
            connecting = admin_pb2_grpc.AdminStub(self._channel).GetServerInfo.future(
                admin_pb2.GetServerInfoRequest(), metadata=self.metadata, timeout=seconds,
                wait_for_ready=True)
        try:
            return not self.closed.wait(seconds)
        finally:
            connecting.cancel()

    def see_boot_id(self, boot_id: Optional[int]) -> None:
        """An answer came from the server that has this boot id."""
        if self.boot_id is not None and boot_id != self.boot_id:
            if self._other is None:
                self._other = errors.ServerRestarted(
                    "the server restarted: all sequences are gone")
        else:
            self._answered = time.monotonic()

    def _why_other(self) -> errors.MlaError:
        """Returns why another process answers. If it ran already when the first one answered last,
        it is another server, and the address is a balancer's."""
        other, asked = self._other, time.monotonic()
        if isinstance(other, errors.ServerRestarted) and not other.detail.reason:
            reason = "server_restarted"
            try:
                with self.while_open():
                    info = admin_pb2_grpc.AdminStub(self._channel).GetServerInfo(
                        admin_pb2.GetServerInfoRequest(), metadata=self.metadata, timeout=ASK_S)
                since = asked - self._answered
                if info.boot_id == self.boot_id or info.uptime_ms / 1e3 > since + ASK_S:
                    reason = "another_server"
            except grpc.RpcError:
                pass  # it says nothing, as one does that has just started
            self._other = _OTHERS[reason]
        assert self._other is not None
        return self._other
