"""The common parts of streams of steps, and the errors of their calls.

A step belongs to the stream that began it and dies with it. Requests go out in order; replies come
in as they complete and are paired by tag. Another transport is another StepStream, which
`transport.StreamMaker` chooses.

An interrupt (Ctrl-C, or any handler of a signal that raises) may come at any instruction. While a
caller waits for a reply it changes nothing, and the stream goes on. While a request is being sent
or a reply is taken over, it ends the stream, because it is not known how much of it was done.
"""

from __future__ import annotations

import abc
import threading
from typing import Any, Iterator, Optional

from mla_client import errors, wire
from mla_client.base import gates
from mla_client.shm.shared_memory import SharedMemory
from mla_client.types import AttendArgs, Buffers, Geometry, Profile, Timings

CLOSE_TIMEOUT_S = 2.0
LARGEST_TIMEOUT_US = 2**32 - 1  # that a message can carry


class Request(abc.ABC):
    """A request under way."""

    @abc.abstractmethod
    def wait(self, deadline: float) -> Any:
        """Waits for the reply: an AttendStreamReply, or None for an attend, whose outputs are where
        they belong then. Raises MlaError for an error reply, at the deadline (`time.monotonic`) or
        when the stream has ended."""

    @abc.abstractmethod
    def ready(self) -> bool:
        """True if `wait` would not wait any more. Takes replies that have come; waits for none."""


class StepStream(abc.ABC):
    """A stream of steps. Thread safe. Belongs to the process that opened it: in a process that was
    forked from that one, calls are FailedPrecondition (reason "forked"), and `close` and `cancel`
    do nothing.

    When it breaks, every unanswered request fails and `broken` says why; the owner opens another.
    """

    transport: str       # "inline", "shm", "ring" or "ucx"
    message_bytes: int   # attend calls are split so that no message carries more than that
    memory: Optional[SharedMemory] = None
    chains: bool = False  # the server may take messages that wait between calls in their turn

    @property
    @abc.abstractmethod
    def broken(self) -> Optional[errors.MlaError]:
        """Why it can no longer be used; None while it can."""

    @abc.abstractmethod
    def attend(self, step_id: int, args: AttendArgs, chunk: wire.Chunk, geometry: Geometry,
               assembler: wire.ResultAssembler, deadline: float) -> Request:
        """Sends one chunk of an attend call; its outputs and timings go to `assembler`. Waits for
        room first; DeadlineExceeded if there is none in time."""

    @abc.abstractmethod
    def ask(self, deadline: float, reply_bytes: int = 0, tails: bytes = b"",
            **body: Any) -> Request:
        """Sends a request of the stepping protocol that carries no tensor: the one field of
        AttendStreamRequest's `body` that is given. The reply has at most `reply_bytes` bytes; 0: it
        is short. `tails`: of an end_step, or the rotations of a begin_step."""

    def chain(self, step_id: int, out: Buffers, profile: Profile, head_offset: int,
              timeout_s: float) -> Any:
        """Calls with these buffers that a GPU's stream waits for (over_native.Chain); None: there
        are none here."""
        return None

    def capture(self, out: Buffers, profile: Profile, head_offset: int, timeout_s: float) -> Any:
        """Such calls in a graph (over_native.Captured); None: there are none here."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Ends it in order; what is open on it is aborted by the server."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Cancels it at once."""

    @abc.abstractmethod
    def fail(self, error: errors.MlaError) -> None:
        """Ends it at once, with that error for everything that waits."""

    def chunks(self, args: AttendArgs, geometry: Geometry) -> Iterator[wire.Chunk]:
        """The chunks of an attend call. ValueError if one row of one head is too large."""
        place = args.out.place if args.out is not None else None
        if place is not None and place.memory is self.memory:
            # Its outputs are one piece of this stream's memory, whatever their size.
            heads = 0 if args.profile == Profile.APPEND_ONLY else args.num_heads
            return iter([wire.Chunk(0, args.rows, 0, heads, args.kv is not None)])
        return wire.chunks(args, geometry, self.message_bytes)


class InflightBytes:
    """Bounds the bytes that were sent and not yet answered, so that a producer that runs ahead is
    paused here and not in a growing queue. One message is always let through."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._lock = threading.Lock()
        self._changed = gates.Gates()

    def fits(self, size: int) -> bool:
        """Returns true if `size` more bytes may be sent now."""
        return not self._used or self._used + size <= self._limit

    def take(self, size: int) -> bool:
        """Takes room, if there is any."""
        with self._lock:
            if not self.fits(size):
                return False
            self._used += size
            return True

    def wait(self, size: int, deadline: float) -> None:
        """Waits until there is room, which another thread may then take. Raises
        DeadlineExceeded."""
        if not self._changed.wait(lambda: self.fits(size), deadline):
            raise no_room()

    def release(self, size: int) -> None:
        """Returns room."""
        with self._lock:
            self._used -= size
        self._changed.open()


def timeout_us(timeout_s: float) -> int:
    """A timeout as the contract carries it; 0, which means none, for one that is too long."""
    micros = max(1, int(timeout_s * 1e6))
    return micros if micros <= LARGEST_TIMEOUT_US else 0


def timings_of(timings: Any, round_trip_s: float) -> Timings:
    """Timings of an mla.v1.Timings."""
    return Timings(int(round_trip_s * 1e6), timings.queue_us, timings.plan_us, timings.kernel_us,
                   timings.write_us, timings.launch_requests, timings.launch_layers,
                   timings.launch_clients, timings.plan_reused)


def error_of(error: Any) -> errors.MlaError:
    """The exception of an mla.v1.StepError."""
    return errors.from_code(error.code, error.message, errors.ErrorDetail.from_proto(error.detail),
                            error.step_aborted)


def check_body(reply: Any, wanted: str) -> None:
    """Raises the error that a reply is, and DataLoss unless it answers the kind of request that
    was sent."""
    body = reply.WhichOneof("body")
    if body == "error":
        raise error_of(reply.error)
    if body != wanted:
        raise errors.DataLoss(f"the server answered {wanted} with {body or 'nothing'}")


def interrupted(error: BaseException) -> errors.Cancelled:
    """The error of a stream after `error` has interrupted a call on it."""
    return errors.Cancelled(
        f"the Attend stream ended, since {type(error).__name__} interrupted a call on it")


def no_reply() -> errors.DeadlineExceeded:
    """A request was not answered in time."""
    return errors.DeadlineExceeded("no reply before the deadline")


def no_room() -> errors.DeadlineExceeded:
    """A request could not be sent in time."""
    return errors.DeadlineExceeded("attend: no room in the stream before the deadline: earlier "
                                   "requests are unanswered")


def does_not_fit() -> errors.ResourceExhausted:
    """A request cannot be sent at all."""
    return errors.ResourceExhausted("attend: the tensors do not fit into the shared memory: "
                                    "buffers hold the rest of it, or `shared_bytes` is too small")
