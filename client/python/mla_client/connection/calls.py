"""Control calls: deadlines, repeats, and the identity of the server that answers."""

from __future__ import annotations

import random
import threading
import time
from typing import Any, Callable, Iterator, Optional, Tuple

import grpc

from mla_client import errors
from mla_client.base import deadlines, process

ATTEMPTS = 4
FIRST_PAUSE_S = 0.05  # before the first repeat; at most doubled before each further one


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
        self._restarted = False

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
                reply = method(requests() if requests else request, metadata=self.metadata,
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
                # A drain's answer carries none.
                self.see_boot_id(getattr(reply, "boot_id", self.boot_id))
                if self._restarted:
                    raise errors.ServerRestarted("the server restarted: all sequences are gone")
                return reply
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _pause(self, seconds: float) -> bool:
        """Waits before a repeat; false if the client was closed. A connection makes progress only
        while a thread looks after it, and a call that fails at once does not."""
        connecting = grpc.channel_ready_future(self._channel)
        try:
            return not self.closed.wait(seconds)
        finally:
            connecting.cancel()

    def see_boot_id(self, boot_id: Optional[int]) -> None:
        """An answer came from the server that has this boot id."""
        if self.boot_id is not None and boot_id != self.boot_id:
            self._restarted = True
