"""Calls over a ring of the C library for which a GPU's stream waits, and no thread.

Belong to one thread at a time.
"""

from __future__ import annotations

import ctypes
import functools
import time
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence

from mla_client import errors, native
from mla_client.streams import stream

if TYPE_CHECKING:
    from mla_client.streams.over_native import NativeStream

MOST_COPIES = 8
# A wait in the library returns at least this often.
LONGEST_WAIT_MS = 100


class _Calls:
    """Attends of one shape, and the copies that a GPU's stream makes for each of them."""

    def __init__(self, owner: "NativeStream", entry: native.Entry, timeout_s: float) -> None:
        self._owner = owner
        self._entry = entry
        self._entry_at = ctypes.byref(entry)
        self._arrays = (native.Copy * MOST_COPIES)(), (native.Copy * MOST_COPIES)()
        entry.copies_in, entry.copies_out = self._arrays
        self._timeout_s = timeout_s

    def begin(self, step_id: int, message: Callable[[], bytes]) -> bool:
        """Begins the next step; False: these calls have no steps of their own."""
        return False

    def clear(self, from_gpu: bool = False) -> None:
        """No copies. `from_gpu`: those to come copy from memory of the ring's GPU."""
        self._entry.in_count = self._entry.out_count = 0
        self._entry.in_on_gpu = from_gpu

    def copy_in(self, to: int, width: int, rows: int = 1, to_pitch: int = 0,
                from_pitch: int = 0) -> None:
        """A further copy that the stream makes before a call's tensors are there: `rows` of `width`
        bytes, to an address of the GPU or of memory that its driver knows."""
        copy = self._arrays[0][self._entry.in_count]
        copy.to, copy.width, copy.rows = to, width, rows
        copy.to_pitch, copy.from_pitch = to_pitch or width, from_pitch or width
        self._entry.in_count += 1

    def copy_out(self, source: int, width: int) -> None:
        """The copy that the stream makes when the outputs are there."""
        copy = self._arrays[1][0]
        copy.source, copy.width, copy.rows = source, width, 1
        copy.to_pitch = copy.from_pitch = width
        self._entry.out_count = 1

    def _collect(self, waits: Sequence[Callable[[int, Any], int]]) -> None:
        """Waits until all of `waits` have returned; each gets milliseconds and where to put its
        error. Raises the first one's error that has failed."""
        deadline, first = time.monotonic() + self._timeout_s, None
        try:
            for wait in waits:
                try:
                    while not self._came(wait, deadline):
                        if time.monotonic() >= deadline:
                            raise stream.no_reply()
                except errors.MlaError as error:
                    first = first or error
        except BaseException as interrupt:
            self._owner.fail(stream.interrupted(interrupt))
            raise
        if first is not None:
            raise self._owner.why(first).again()

    def _came(self, wait: Callable[[int, Any], int], deadline: float) -> bool:
        memory, pointer = self._owner.memory, ctypes.c_void_p()
        left = min(max(int((deadline - time.monotonic()) * 1e3) + 1, 0), LONGEST_WAIT_MS)
        code = wait(left, ctypes.byref(pointer))
        if not code:
            return True
        waits = (code == native.DEADLINE_EXCEEDED
                 and memory.lib.mla_error_reason(pointer) == native.NO_REPLY_YET)
        error = memory.lib.error(pointer)
        if not waits:
            raise error
        return False


class Chain(_Calls):
    """Calls of one step and one shape for which a GPU's stream waits and no thread. The work on the
    stream before a call writes the tensors, and the work after it reads the outputs. Only when
    `collect` has returned is it known that these are good. Belongs to one thread at a time.

    A chain can go on to the steps that follow its first one, if they are alike: then their begins
    and ends are calls of the chain, too."""

    def __init__(self, owner: "NativeStream", entry: native.Entry, timeout_s: float) -> None:
        super().__init__(owner, entry, timeout_s)
        # The library's chains: one for each set of copies. The last one is of the copies now.
        self._made: List[ctypes.c_void_p] = []
        self._now: Optional[ctypes.c_void_p] = None
        self._begun: Optional[ctypes.c_void_p] = None  # the one that began the last step
        self._addresses: Any = None  # of the next call's copies
        # Kept for all calls: looking these up for each layer would cost as much as the call.
        self._call, self._step_id = owner.memory.lib.mla_chain_attend, entry.step_id
        self._error = ctypes.c_void_p()
        self._error_at = ctypes.byref(self._error)

    def clear(self, from_gpu: bool = False) -> None:
        super().clear(from_gpu)
        self._now = None

    def attend(self, layer: int, gpu_stream: int, sources: Sequence[int] = (),
               to: int = 0) -> None:
        """The next layer. Waits only for room in the ring. `sources`: addresses that are copied
        from, in the order of copy_in; `to`: where to copy_out copies. The copies of a chain's first
        call are those of all later ones, until `clear`."""
        chain = self._now or self._new()
        self._addresses[:] = [*sources, to][:len(self._addresses)]
        try:
            if self._call(chain, self._step_id, layer, gpu_stream, self._addresses, 0,
                          self._error_at):
                self._once_more(lambda room_ms, _, error: int(self._call(
                    chain, self._step_id, layer, gpu_stream, self._addresses, room_ms, error)))
        except errors.MlaError:
            raise
        except BaseException as error:
            self._owner.fail(stream.interrupted(error))
            raise

    def begin(self, step_id: int, message: Callable[[], bytes]) -> bool:
        """Begins the next step, whose answer `collect` waits for. `message` makes its
        AttendStreamRequest, if it does not follow a step that this chain has begun. Returns False
        if it was not sent."""
        chain, lib = self._now, self._owner.memory.lib
        if chain is None or self._owner.ended is not None:
            return False
        try:
            if chain is self._begun:
                code = lib.mla_chain_begin_next(chain, step_id, 0, self._error_at)
            else:
                begin = message()
                code = lib.mla_chain_begin(chain, begin, len(begin), 0, self._error_at)
        except BaseException as error:
            self._owner.fail(stream.interrupted(error))
            raise
        if code:
            lib.mla_error_free(self._error)
            return False
        self._step_id, self._begun = step_id, chain
        return True

    def end(self) -> None:
        """Ends the step that `begin` began, with all of its rows. `collect` waits for the answer.
        """
        chain, lib = self._begun, self._owner.memory.lib
        try:
            if lib.mla_chain_end(chain, 0, self._error_at):
                self._once_more(lambda room_ms, _, error: int(lib.mla_chain_end(
                    chain, room_ms, error)))
        except errors.MlaError:
            raise
        except BaseException as error:
            self._owner.fail(stream.interrupted(error))
            raise

    def _new(self) -> ctypes.c_void_p:
        """A chain of the library's with the copies that the entry has."""
        memory, chain = self._owner.memory, ctypes.c_void_p()
        memory.lib.check(memory.lib.mla_chain_new(memory.ring, self._entry_at, ctypes.byref(chain),
                                                  self._error_at), self._error)
        self._made.append(chain)
        self._now = chain
        self._addresses = (ctypes.c_void_p * (self._entry.in_count + self._entry.out_count))()
        return chain

    def _once_more(self, call: Callable[[int, Any, Any], int]) -> None:
        """A call has failed: sends it when there is room. `call`: as of NativeStream.send."""
        owner = self._owner
        try:
            owner.check_room(self._error)
        except errors.MlaError as error:
            raise owner.why(error).again()
        owner.send(call, time.monotonic() + self._timeout_s)

    def collect(self) -> None:
        """Waits for all calls so far. Raises the first one's error that has failed."""
        lib = self._owner.memory.lib
        try:
            self._collect([functools.partial(lib.mla_chain_wait, chain) for chain in self._made])
        except BaseException:
            self._free()
            raise

    def _free(self) -> None:
        made, self._made, self._now, self._begun = self._made, [], None, None
        if not self._owner.memory._home.left:
            for chain in made:
                self._owner.memory.lib.mla_chain_free(chain)

    def __del__(self) -> None:
        self._free()


class Captured(_Calls):
    """Calls in a graph of the GPU's runtime. `attend`, while the stream captures the graph, sends
    nothing. Before each launch of an instance of the graph, `replay` sends all of them."""

    def __init__(self, owner: "NativeStream", entry: native.Entry, timeout_s: float) -> None:
        super().__init__(owner, entry, timeout_s)
        self._calls = 0
        self._handles: List[int] = []  # of the library's requests
        self._graph, error = ctypes.c_void_p(), ctypes.c_void_p()
        memory = owner.memory
        memory.lib.check(memory.lib.mla_graph_new(memory.ring, ctypes.byref(self._graph),
                                                  ctypes.byref(error)), error)

    def attend(self, layer: int, gpu_stream: int, sources: Sequence[int] = (),
               to: int = 0) -> None:
        """The next layer. `sources` and `to`: as of Chain.attend."""
        entry, (copies_in, copies_out) = self._entry, self._arrays
        entry.layer, entry.stream = layer, gpu_stream or None
        for place, source in enumerate(sources):
            copies_in[place].source = source
        copies_out[0].to = to or None
        memory, error = self._owner.memory, ctypes.c_void_p()
        memory.lib.check(memory.lib.mla_graph_capture(self._graph, self._entry_at,
                                                      ctypes.byref(error)), error)
        self._calls += 1

    def replay(self, step_id: int, graph_exec: int, gpu_stream: int) -> None:
        """Sends the calls as calls of that step. `graph_exec`: the handle of the instance, as
        `torch.cuda.CUDAGraph.raw_cuda_graph_exec` gives it, which is launched next on this stream.
        """
        handles = (ctypes.c_void_p * self._calls)()

        def send(room_ms: int, _: Any, error: Any) -> int:
            memory = self._owner.memory
            code: int = memory.lib.mla_graph_send(self._graph, step_id, graph_exec,
                                                  gpu_stream or None, room_ms, handles, error)
            return code
        try:
            self._owner.send(send, time.monotonic() + self._timeout_s)
            self._handles.extend(handles)
        except errors.MlaError:
            raise
        except BaseException as interrupt:
            self._owner.fail(stream.interrupted(interrupt))
            raise

    def collect(self) -> None:
        """Waits for all calls so far. Raises the first one's error that has failed."""
        count, lib = len(self._handles), self._owner.memory.lib
        if not count:
            return
        handles = (ctypes.c_void_p * count)(*self._handles)
        try:
            self._collect([functools.partial(lib.mla_requests_wait, handles, count)])
        finally:
            self._free()

    def _free(self) -> None:
        count = len(self._handles)
        if count and not self._owner.memory._home.left:
            self._owner.memory.lib.mla_requests_free((ctypes.c_void_p * count)(*self._handles),
                                                     count)
        self._handles.clear()

    def __del__(self) -> None:
        self._free()
        if self._graph and not self._owner.memory._home.left:
            self._owner.memory.lib.mla_graph_free(self._graph)
