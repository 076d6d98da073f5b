"""Decides what a failed call means for an engine's requests, and how long to leave a server alone.
"""

from __future__ import annotations

import enum
import random
import time
from typing import Callable, Optional

from mla_client import errors

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
# A call raises one of these after its connection was closed: gRPC's own is a ValueError.
FAILURES = (errors.MlaError, ValueError)


class Fault(enum.Enum):
    """Kinds of faults, by what the engine does about them."""

    NO_ROOM = "no room"  # the server is well and full: later
    LOST = "lost"        # the server is well and has not what was named: from nothing
    AWAY = "away"        # the server is dead, restarted or drains: connect again, from nothing
    OTHER = "other"      # the call itself is wrong: from nothing, and it is logged


def fault_of(error: errors.MlaError) -> Fault:
    """Returns the fault that caused the error of a call for a sequence, a step or a model."""
    if isinstance(error, (errors.ServerRestarted, errors.AnotherServer, errors.Unavailable,
                          errors.Cancelled)):
        return Fault.AWAY
    if isinstance(error, errors.ResourceExhausted):
        return Fault.NO_ROOM
    if isinstance(error, (errors.NotFound, errors.Aborted, errors.FailedPrecondition,
                          errors.AlreadyExists, errors.DeadlineExceeded, errors.OutOfRange)):
        return Fault.LOST
    return Fault.OTHER


class Pause:
    """Grows with each failure in a row, up to a bound, with some chance in it so that workers do
    not come together. Not thread-safe."""

    def __init__(self, first_s: float = FIRST_PAUSE_S, longest_s: float = LONGEST_PAUSE_S,
                 now: Callable[[], float] = time.monotonic) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._now = now
        self._failures = 0
        self._until = 0.0
        self._since: Optional[float] = None

    def failed(self, hint_s: float = 0.0) -> None:
        """Another failure; `hint_s`: what the server has asked for."""
        now = self._now()
        pause = min(self._longest_s, self._first_s * 2.0 ** min(self._failures, 16))
        self._failures += 1
        self._until = now + max(hint_s, pause * random.uniform(0.5, 1.0))
        self._since = now if self._since is None else self._since

    def well(self) -> None:
        """It works again."""
        self._failures, self._until, self._since = 0, 0.0, None

    @property
    def over(self) -> bool:
        """True if it may be tried now."""
        return self._now() >= self._until

    @property
    def lasts_s(self) -> float:
        """Since the first failure in a row; 0: there is none."""
        return 0.0 if self._since is None else self._now() - self._since
