"""Steps of a client, over its streams."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, List, Optional, Tuple

from mla_client import errors, messages, wire
from mla_client.base import process, tracing
from mla_client.gen import attention_pb2
from mla_client.service import AttendFuture, Service, Step
from mla_client.shm.shared_memory import SharedMemory
from mla_client.streams.stream import Request, StepStream
from mla_client.streams.transport import StreamMaker
from mla_client.types import AttendArgs, AttendResult, Buffers, Profile

# The most bytes of an EndStepReply, and of each sequence's length in it.
REPLY_BYTES = 128
LENGTH_BYTES = 16
# For the abort of a step that its caller has given up.
GIVE_UP_S = 0.1


class _Pending(AttendFuture):
    """The requests that one attend call was split into."""

    def __init__(self, assembler: wire.ResultAssembler, deadline: float) -> None:
        self._assembler = assembler
        self._requests: List[Request] = []
        self._deadline = deadline
        self._result: Optional[AttendResult] = None

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def result(self) -> AttendResult:
        if self._result is None:
            for request in self._requests:
                request.wait(self._deadline)
            self._result = self._assembler.result()
            self._requests.clear()
        return self._result

    def done(self) -> bool:
        return all(request.ready() for request in self._requests)


def _begin_of(step: Step) -> Any:
    begin = attention_pb2.BeginStep(
        step_id=step.step_id, model_id=step.model.spec.model_id, participants=step.participants,
        lease_ms=step.lease_ms, traceparent=tracing.traceparent(),
        rotations=step.rotations is not None)
    add = begin.sequences.add  # messages of a list that is given are copied
    for sequence, rows in zip(step.sequences, step.rows):
        add(sequence_id=sequence.id, epoch=sequence.epoch, start_position=sequence.length,
            rows=rows)
    return begin


def _rotations_of(step: Step) -> bytes:
    return b"" if step.rotations is None else step.rotations.tobytes()


def _lengths_of(step: Step, committed: Optional[List[int]], reply: Any) -> List[int]:
    kept = step.rows if committed is None else committed
    return messages.lengths_of(reply, [sequence.length + count
                                       for sequence, count in zip(step.sequences, kept)])


class Steps(Service):
    """Mixed into Client, which sets all of these."""

    _home: process.Home
    _closed: threading.Event
    _maker: StreamMaker
    _lock: threading.Lock     # of the streams
    _opening: threading.Lock  # one thread opens the own stream, others wait for it
    _stream: Optional[StepStream]  # of steps that name none
    _streams: List[StepStream]     # all that may be in use

    @property
    def transport(self) -> str:
        """How steps that name no stream travel: "inline", "shm" or "ring"."""
        return self._own_stream().transport

    def open_stream(self) -> StepStream:
        """Another stream, for a tensor-parallel rank or a micro-batch."""
        self._home.check()
        if self._closed.is_set():
            raise errors.Unavailable("the client is closed")
        stream = self._maker.open()
        with self._lock:
            closed = self._closed.is_set()  # then close() does not see this one
            opened = self._streams
            if not closed:
                self._streams = [old for old in opened if old.broken is None] + [stream]
        if closed:
            stream.close()
            raise errors.Unavailable("the client is closed")
        for old in opened:
            if old not in self._streams:
                old.cancel()  # broken ones hold memory
        return stream

    def _begin(self, step: Step) -> StepStream:
        stream = step.stream or self._own_stream()
        self._note_begun(step, self._ask(stream, 0, _rotations_of(step),
                                        begin_step=_begin_of(step)))
        return stream

    def _begin_ahead(self, step: Step) -> Optional[Tuple[Any, Callable[[], None]]]:
        stream = step.stream or self._own_stream()
        if not stream.chains:
            return None
        deadline = time.monotonic() + self.timeout_s
        request = stream.ask(deadline, 0, _rotations_of(step), begin_step=_begin_of(step))
        return stream, lambda: self._note_begun(step, request.wait(deadline))

    def _go_on(self, step: Step) -> bool:
        # The chain sends the message of the first step again, with its trace.
        if (self._home.left or self._closed.is_set() or step.participants > 1
                or step.rotations is not None or tracing.traceparent()):
            return False
        step.step_id = (step.step_id + 1) % wire.LARGEST_POSITION
        began: bool = step._chains[0].begin(step.step_id, lambda: attention_pb2.AttendStreamRequest(
            begin_step=_begin_of(step)).SerializeToString())
        return began

    def _note_begun(self, step: Step, reply: Any) -> None:
        if reply.begin_step.total_rows != step.total_rows:
            self._give_up(step)
            raise messages.wrong_answer("begin_step", "total_rows", reply.begin_step.total_rows,
                                        step.total_rows)
        step.joined = reply.begin_step.joined

    def _attend(self, step: Step, args: AttendArgs) -> AttendFuture:
        geometry = step.model.spec.geometry
        stream: StepStream = step._handle
        deadline = time.monotonic() + args.timeout_s
        assembler = wire.ResultAssembler(args, geometry)
        pending = _Pending(assembler, deadline)
        try:
            chunks = list(stream.chunks(args, geometry))
        except ValueError as error:
            raise errors.InvalidArgument(str(error)) from error
        for chunk in chunks:
            pending.add(stream.attend(step.step_id, args, chunk, geometry, assembler, deadline))
        return pending

    def _chain(self, step: Step, out: Buffers, profile: Profile, head_offset: int) -> Any:
        stream: StepStream = step._handle
        return stream.chain(step.step_id, out, profile, head_offset, self.timeout_s)

    def _capture(self, out: Buffers, profile: Profile, head_offset: int, stream: Any) -> Any:
        own: StepStream = stream or self._own_stream()
        return own.capture(out, profile, head_offset, self.timeout_s)

    def _shared_memory(self, stream: Any) -> Optional[SharedMemory]:
        return (stream or self._own_stream()).memory

    def _end(self, step: Step, committed: Optional[List[int]],
             tails: List[Tuple[int, bytes]]) -> List[int]:
        body = attention_pb2.EndStep(step_id=step.step_id, committed_rows=committed or [],
                                     tails=[place for place, _ in tails])
        reply = self._ask(step._handle, REPLY_BYTES + LENGTH_BYTES * len(step.sequences),
                          b"".join(tail for _, tail in tails), end_step=body)
        return _lengths_of(step, committed, reply)

    def _end_ahead(self, step: Step, committed: Optional[List[int]]
                   ) -> Optional[Callable[[], List[int]]]:
        stream: StepStream = step._handle
        if not stream.chains:
            return None
        deadline = time.monotonic() + self.timeout_s
        request = stream.ask(deadline, REPLY_BYTES + LENGTH_BYTES * len(step.sequences),
                             end_step=attention_pb2.EndStep(step_id=step.step_id,
                                                            committed_rows=committed or []))
        return lambda: _lengths_of(step, committed, request.wait(deadline))

    def _abort(self, step: Step) -> None:
        self._ask(step._handle, abort_step=attention_pb2.AbortStep(step_id=step.step_id))

    def _give_up(self, step: Step) -> None:
        stream = step._handle or step.stream or self._stream
        if stream is None:
            return
        try:
            stream.ask(time.monotonic() + GIVE_UP_S,
                       abort_step=attention_pb2.AbortStep(step_id=step.step_id))
        except errors.MlaError:
            pass  # with the stream the step has ended; without room its lease ends it

    def _own_stream(self) -> StepStream:
        """The stream of steps that name none; a new one if the last broke."""
        self._home.check()
        stream = self._stream
        if stream is not None and stream.broken is None:
            return stream
        with self._opening:
            if self._stream is None or self._stream.broken is not None:
                self._stream = self.open_stream()
            return self._stream

    def _ask(self, stream: StepStream, reply_bytes: int = 0, tails: bytes = b"",
             **body: Any) -> Any:
        """One request of the stepping protocol; `tails`: its payload."""
        deadline = time.monotonic() + self.timeout_s
        return stream.ask(deadline, reply_bytes, tails, **body).wait(deadline)
