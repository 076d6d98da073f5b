"""Keeps the leases of a client's sequences: when to renew, and the thread that does."""

from __future__ import annotations

import collections
import threading
import time
from typing import Callable, Counter, Dict, Iterable, Optional

from mla_client import errors

# Renewals in one lease: two may fail before a sequence is lost.
RENEWALS_A_LEASE = 3
# After a failed renewal: this many attempts in the time of one renewal.
RETRIES_A_RENEWAL = 4
# Between two renewals, at least: a server that names tiny leases is not flooded.
LEAST_RETRY_S = 0.02


class LeaseSchedule:
    """When the next renewal is due: a third of the shortest lease after the last one.

    One renewal serves all sequences of a client, so the sequence with the shortest lease decides.
    Times are seconds of any monotonic clock. Not thread-safe.
    """

    def __init__(self) -> None:
        self._leases: Dict[int, float] = {}  # lease of each open sequence
        self._open: Counter[float] = collections.Counter()  # sequences by lease: few values
        self._due: Optional[float] = None

    def add(self, sequence_id: int, lease_s: float, left_s: float, now: float) -> None:
        """Takes a sequence in. `left_s` is the rest of its lease: less than the lease if it was
        opened earlier and the call repeated."""
        if lease_s <= 0:
            return
        self.drop([sequence_id])
        self._leases[sequence_id] = lease_s
        self._open[lease_s] += 1
        due = now + min(lease_s, left_s) / RENEWALS_A_LEASE
        self._due = due if self._due is None else min(self._due, due)

    def drop(self, sequence_ids: Iterable[int]) -> None:
        """Forgets sequences that were released."""
        for sequence_id in sequence_ids:
            lease_s = self._leases.pop(sequence_id, None)
            if lease_s is None:
                continue
            self._open[lease_s] -= 1
            if not self._open[lease_s]:
                del self._open[lease_s]
        if not self._leases:
            self._due = None

    def set_all(self, lease_s: float, now: float) -> None:
        """All leases were renewed at that length."""
        self._leases = dict.fromkeys(self._leases, lease_s)
        self._open = collections.Counter({lease_s: len(self._leases)} if self._leases else {})
        self.renewed(True, now)

    def period_s(self) -> float:
        """Between two renewals; 0 without sequences."""
        return min(self._open, default=0.0) / RENEWALS_A_LEASE

    def due(self) -> Optional[float]:
        """Time of the next renewal; None without sequences."""
        return self._due

    def renewed(self, well: bool, now: float) -> None:
        """Plans the next one. A failed renewal is repeated soon, not after a whole period."""
        if self._leases:
            period = self.period_s()
            self._due = now + max(period if well else period / RETRIES_A_RENEWAL, LEAST_RETRY_S)


class LeaseRenewer:
    """Renews in a thread of its own, which starts with the first sequence. Thread-safe."""

    def __init__(self, renew: Callable[[float], None]) -> None:
        """`renew` renews all leases of the client, within that many seconds; MlaError if it
        cannot."""
        self.error: Optional[errors.MlaError] = None  # of the last renewal
        self._renew = renew
        self._schedule = LeaseSchedule()
        # Callers take the lock separately: they may be interrupted, and entering a condition then
        # leaves it locked for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: Optional[threading.Thread] = None
        self._closed = False

    def add(self, sequence_id: int, lease_ms: int, left_ms: int) -> None:
        """Renews this sequence's lease from now on."""
        with self._lock:
            self._schedule.add(sequence_id, lease_ms / 1e3, left_ms / 1e3, time.monotonic())
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="mla-lease", daemon=True)
                self._thread.start()
            self._changed.notify()

    def drop(self, sequence_ids: Iterable[int]) -> None:
        """Stops counting these sequences."""
        with self._lock:
            self._schedule.drop(sequence_ids)

    def set_all(self, lease_ms: int) -> None:
        """All leases were renewed at that length."""
        with self._lock:
            self._schedule.set_all(lease_ms / 1e3, time.monotonic())
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread. Leases run out from now on."""
        with self._lock:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _wait(self) -> Optional[float]:
        """Until a renewal is due; the time it may take. Returns None when closed."""
        with self._changed:
            while not self._closed:
                due = self._schedule.due()
                remaining_s = None if due is None else due - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    return max(self._schedule.period_s(), LEAST_RETRY_S)
                self._changed.wait(remaining_s)
        return None

    def _run(self) -> None:
        while True:
            timeout_s = self._wait()
            if timeout_s is None:
                return
            try:
                self._renew(timeout_s)
                self.error = None
            except errors.MlaError as error:
                # Kept for the caller to read; the next call on a lost sequence says NOT_FOUND.
                self.error = error
            except Exception as error:  # the thread must go on: without it every lease runs out
                self.error = errors.Internal(
                    f"the leases were not renewed: {type(error).__name__}: {error}")
            with self._changed:
                self._schedule.renewed(self.error is None, time.monotonic())
