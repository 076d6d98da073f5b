"""One Attend stream: requests out in order, replies in as they complete, paired by tag."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from typing import Any, Callable, Dict, Optional, Tuple

import grpc

from mla_client import errors
from mla_client.gen import attention_pb2

_METHOD = "/mla.v1.Attention/Attend"


class InflightBytes:
    """Bounds the bytes that were sent and not yet answered, so that a producer that runs ahead is
    paused here and not in a growing queue. One message is always let through."""

    def __init__(self, limit: int):
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    def acquire(self, size: int, deadline: float) -> None:
        """Waits for room. Raises DeadlineExceeded."""
        with self._changed:
            while self._used and self._used + size > self._limit:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise errors.DeadlineExceeded("attend: no room in the stream before the "
                                                  "deadline: earlier requests are unanswered")
                self._changed.wait(left)
            self._used += size

    def release(self, size: int) -> None:
        """Returns room."""
        with self._changed:
            self._used -= size
            self._changed.notify_all()


class AttendStream:
    """A bidirectional stream and the thread that reads it. Thread safe.

    A step belongs to the stream that began it and dies with it. When the stream breaks, every
    unanswered request fails and `broken` is set; the owner opens another.
    """

    def __init__(self, channel: grpc.Channel, metadata: Tuple[Tuple[str, str], ...],
                 inflight_bytes: int, on_boot_id: Callable[[int], None]):
        self.broken: Optional[errors.MlaError] = None
        self._on_boot_id = on_boot_id
        self._inflight = InflightBytes(inflight_bytes)
        self._outbox: "queue.SimpleQueue[Optional[bytes]]" = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: Dict[int, Tuple[concurrent.futures.Future, int]] = {}
        self._next_tag = 1
        call = channel.stream_stream(
            _METHOD, request_serializer=bytes,
            response_deserializer=attention_pb2.AttendStreamReply.FromString)
        self._call = call(iter(self._outbox.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="mla-attend", daemon=True)
        self._reader.start()

    def send(self, frame: Callable[[int], bytes], size: int,
             deadline: float) -> concurrent.futures.Future:
        """Sends the message that `frame` makes for its tag. The future gives (reply, receive time).

        The tag is taken and the message queued in one critical section, so that requests travel in
        the order in which this was called.
        """
        self._inflight.acquire(size, deadline)
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._lock:
            if self.broken is not None:
                self._inflight.release(size)
                raise self.broken
            tag = self._next_tag
            self._next_tag += 1
            self._pending[tag] = (future, size)
            self._outbox.put(frame(tag))
        return future

    def close(self) -> None:
        """Half-closes; what is open on the stream is aborted by the server."""
        self._outbox.put(None)
        self._reader.join(timeout=2.0)
        if self._reader.is_alive():
            self._call.cancel()

    def cancel(self) -> None:
        """Cuts the stream at once."""
        self._call.cancel()
        self._outbox.put(None)

    def _read(self) -> None:
        error: errors.MlaError = errors.Unavailable("the Attend stream was closed")
        try:
            for reply in self._call:
                received = time.monotonic()
                self._on_boot_id(reply.boot_id)
                with self._lock:
                    future, size = self._pending.pop(reply.tag, (None, 0))
                if future is not None:
                    self._inflight.release(size)
                    future.set_result((reply, received))
        except grpc.RpcError as rpc_error:
            error = errors.from_rpc(rpc_error)
        finally:
            self._fail(error)

    def _fail(self, error: errors.MlaError) -> None:
        """Every request still waiting ends with the stream's own error."""
        with self._lock:
            self.broken = error
            pending, self._pending = self._pending, {}
        self._outbox.put(None)
        for future, size in pending.values():
            self._inflight.release(size)
            future.set_exception(error)


def wait(future: concurrent.futures.Future, deadline: float) -> Tuple[Any, float]:
    """(reply, receive time) of a request. Raises MlaError for an error reply or at the deadline."""
    try:
        reply, received = future.result(max(0.0, deadline - time.monotonic()))
    except concurrent.futures.TimeoutError:
        raise errors.DeadlineExceeded("no reply before the deadline") from None
    if reply.WhichOneof("body") == "error":
        error = reply.error
        raise errors.from_code(error.code, error.message,
                               errors.ErrorDetail.from_proto(error.detail), error.step_aborted)
    return reply, received
