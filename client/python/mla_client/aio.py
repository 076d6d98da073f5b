"""The step API for asyncio: the same calls, to be awaited.

    async with mla_client.aio.AsyncService(client) as service:
        sequence = await service.open_sequence(model)
        async with service.step([(sequence, rows)]) as step:
            for layer in range(layers):
                out = (await step.attend(layer, q, kv)).o

Requests of one service go out in the order of the calls, from a thread that does nothing else;
replies are awaited in others. So several calls may send rows of a layer at the same time, and many
tasks may share a service. Everything else (errors, deadlines, transports) is as without asyncio.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any, AsyncIterator, Callable, List, Optional, Sequence as Seq, Tuple, TypeVar

import numpy.typing as npt

from mla_client import errors
from mla_client.base.process import Home
from mla_client.pages import Checkpoint, HintAnswer, Pages
from mla_client.pages.events import CacheEvent, CacheMiss
from mla_client.service import Model, Sequence, Service, Step
from mla_client.types import AttendResult, Prefix, PrefixMatch, Profile

# Replies that are awaited at the same time; more wait for a thread.
WAITERS = 16

_Result = TypeVar("_Result")


class AsyncService:
    """A Service, awaited. Belongs to one event loop; the Service stays open when it is closed."""

    def __init__(self, service: Service, *, waiters: int = WAITERS) -> None:
        self.service = service
        self._home = Home()
        self._sender = concurrent.futures.ThreadPoolExecutor(1, "mla-send")
        self._waiters = concurrent.futures.ThreadPoolExecutor(waiters, "mla-wait")

    async def __aenter__(self) -> "AsyncService":
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the threads once calls under way are done. Ends nothing in a forked child."""
        if self._home.left:
            return
        loop = asyncio.get_running_loop()
        for executor in (self._sender, self._waiters):
            await loop.run_in_executor(None, executor.shutdown)

    async def open_sequence(self, model: Model, **options: Any) -> Sequence:
        """As Model.open_sequence."""
        return await self._wait(lambda: model.open_sequence(**options))

    async def fork(self, sequence: Sequence, length: Optional[int] = None,
                   **options: Any) -> Sequence:
        """As Sequence.fork."""
        return await self._wait(lambda: sequence.fork(length, **options))

    async def match(self, sequence: Sequence, prefix: Prefix, first_row: int = 0) -> PrefixMatch:
        """As Sequence.match."""
        return await self._wait(lambda: sequence.match(prefix, first_row))

    async def truncate(self, sequence: Sequence, length: int) -> None:
        """As Sequence.truncate."""
        await self._wait(lambda: sequence.truncate(length))

    async def read_tail(self, sequence: Sequence) -> Tuple[int, bytes]:
        """As Sequence.read_tail."""
        return await self._wait(sequence.read_tail)

    async def export_rows(self, sequence: Sequence, first_row: int = 0,
                          end_row: Optional[int] = None) -> List[bytes]:
        """As Client.export_rows; all parts at once."""
        client = self._client()
        return await self._wait(lambda: list(client.export_rows(sequence, first_row, end_row)))

    async def import_rows(self, model: Model, parts: Seq[bytes], **options: Any) -> Sequence:
        """As Client.import_rows."""
        client = self._client()
        return await self._wait(lambda: client.import_rows(model, parts, **options))

    async def checkpoint(self, sequences: Seq[Sequence]) -> List[Checkpoint]:
        """As Client.checkpoint."""
        client = self._client()
        return await self._wait(lambda: client.checkpoint(sequences))

    async def watch_events(self, after: Optional[int] = None, *,
                           all_tenants: bool = False) -> AsyncIterator[List[CacheEvent]]:
        """As Client.watch_events. Ends with its task, or by `aclose`. Each watch has a thread of
        its own."""
        watch = self._client().watch_events(after, all_tenants=all_tenants)
        waiter = concurrent.futures.ThreadPoolExecutor(1, "mla-events")
        try:
            while True:
                self._home.check()
                # StopIteration cannot pass through a future.
                events = await asyncio.get_running_loop().run_in_executor(
                    waiter, lambda: next(watch, None))
                if events is None:
                    return
                yield events
        finally:
            watch.close()
            waiter.shutdown(wait=False)

    async def explain(self, most: int = 0, *, all_tenants: bool = False) -> List[CacheMiss]:
        """As Client.explain."""
        client = self._client()
        return await self._wait(lambda: client.explain(most, all_tenants=all_tenants))

    async def hint(self, kind: int, target: Any, **options: Any) -> HintAnswer:
        """As Client.hint."""
        client = self._client()
        return await self._wait(lambda: client.hint(kind, target, **options))

    async def attach(self, model: Model, sequence_id: int, **options: Any) -> Sequence:
        """As Client.attach."""
        client = self._client()
        return await self._wait(lambda: client.attach(model, sequence_id, **options))

    async def restore(self, model: Model, sequence_ids: Seq[int],
                      **options: Any) -> List[Sequence]:
        """As Client.restore."""
        client = self._client()
        return await self._wait(lambda: client.restore(model, sequence_ids, **options))

    async def checkpoints(self) -> List[Checkpoint]:
        """As Client.checkpoints."""
        return await self._wait(self._client().checkpoints)

    async def drop_checkpoints(self, sequence_ids: Seq[int]) -> int:
        """As Client.drop_checkpoints."""
        client = self._client()
        return await self._wait(lambda: client.drop_checkpoints(sequence_ids))

    async def release(self, sequence: Sequence) -> None:
        """As Sequence.release."""
        await self._wait(sequence.release)

    def step(self, rows: Seq[Tuple[Sequence, int]], **options: Any) -> "AsyncStep":
        """As Service.step; use it in an `async with` block."""
        return AsyncStep(self, self.service.step(rows, **options))

    def _client(self) -> Pages:
        if not isinstance(self.service, Pages):
            raise errors.Unimplemented("rows move between servers only")
        return self.service

    async def _send(self, call: Callable[[], _Result]) -> _Result:
        """Calls it after all that were sent before."""
        self._home.check()  # a child has none of the threads, and would wait forever
        return await asyncio.get_running_loop().run_in_executor(self._sender, call)

    async def _wait(self, call: Callable[[], _Result]) -> _Result:
        """Calls it in a thread of its own."""
        self._home.check()
        return await asyncio.get_running_loop().run_in_executor(self._waiters, call)


class AsyncStep:
    """A Step, awaited. Leaving its `async with` block commits all rows unless `end` or `abort` was
    called inside; an exception, a cancelled task among them, aborts it."""

    def __init__(self, owner: AsyncService, step: Step) -> None:
        self.step = step
        self._owner = owner

    async def __aenter__(self) -> "AsyncStep":
        try:
            await asyncio.shield(self._owner._send(self.step.begin))
        except asyncio.CancelledError as error:  # it may still begin
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(self, kind: Any, value: Any, trace: Any) -> None:
        # A cancelled task must not leave the step open, so this part is not cancelled with it.
        await asyncio.shield(self._owner._send(lambda: self.step.__exit__(kind, value, trace)))

    async def attend(self, layer: int, q: Optional[npt.NDArray], kv: Optional[npt.NDArray] = None,
                     profile: Profile = Profile.EXPANDED, **options: Any) -> AttendResult:
        """As Step.attend. Arrays must stay as they are until it is done."""
        future = await self._owner._send(
            lambda: self.step.attend_async(layer, q, kv, profile, **options))
        return await self._owner._wait(future.result)

    async def attend_sparse(self, layer: int, q: npt.NDArray, lists: Any, *args: Any,
                            **options: Any) -> AttendResult:
        """As Step.attend_sparse. Arrays must stay as they are until it is done, here and below."""
        future = await self._owner._send(
            lambda: self.step.attend_sparse_async(layer, q, lists, *args, **options))
        return await self._owner._wait(future.result)

    async def attend_indexed(self, layer: int, q: npt.NDArray, index_queries: npt.NDArray,
                             head_weights: npt.NDArray, *args: Any,
                             **options: Any) -> AttendResult:
        """As Step.attend_indexed."""
        future = await self._owner._send(lambda: self.step.attend_indexed_async(
            layer, q, index_queries, head_weights, *args, **options))
        return await self._owner._wait(future.result)

    async def attend_window(self, layer: int, q: npt.NDArray, *args: Any,
                            **options: Any) -> AttendResult:
        """As Step.attend_window."""
        future = await self._owner._send(
            lambda: self.step.attend_window_async(layer, q, *args, **options))
        return await self._owner._wait(future.result)

    async def end(self, committed: Optional[Seq[int]] = None, **options: Any) -> List[int]:
        """As Step.end."""
        return await self._owner._send(lambda: self.step.end(committed, **options))

    async def abort(self) -> None:
        """As Step.abort."""
        await self._owner._send(self.step.abort)
