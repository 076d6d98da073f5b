"""Waiting for what other threads do, in calls that a signal may interrupt at any point.

A handler of a signal that raises (Ctrl-C raises KeyboardInterrupt) does so between any two
instructions of the main thread. `threading.Condition` may then keep its lock, and every other
thread waits for it for ever. The classes here hold no lock while they wait, and a waiter that has
missed its call checks again after a while.

Threading: any thread.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Dict

# A waiter looks this often whether it has missed its call.
LONGEST_WAIT_S = 0.1


class Latch:
    """Is open from the first `open` on."""

    __slots__ = ("_lock", "_open")

    def __init__(self) -> None:
        self._open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Lets every waiter pass. Repeating is harmless."""
        if not self._open:
            self._open = True
            try:
                self._lock.release()
            except RuntimeError:
                pass  # another thread has opened it just now

    def wait(self, deadline: float) -> bool:
        """Waits until it is open; false if the deadline (`time.monotonic`) comes first."""
        while not self._open:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            if self._lock.acquire(timeout=min(remaining_s, LONGEST_WAIT_S)):
                self._lock.release()  # for the next waiter
        return True


class Gates:
    """Threads that wait until a condition holds. A thread that changes the condition calls `open`
    afterwards."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: Dict[Any, None] = {}  # a lock for each waiter, which `open` releases

    def wait(self, holds: Callable[[], bool], deadline: float) -> bool:
        """Waits until `holds()`; false if the deadline (`time.monotonic`) comes first."""
        gate = threading.Lock()
        gate.acquire()
        try:
            self._waiting[gate] = None
            while not holds():
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return False
                gate.acquire(timeout=min(remaining_s, LONGEST_WAIT_S))
            return True
        finally:
            self._waiting.pop(gate, None)

    def open(self) -> None:
        """Has every waiter look at its condition."""
        if not self._waiting:
            return
        for gate in tuple(self._waiting):
            try:
                gate.release()
            except RuntimeError:
                pass  # it has been released, and its waiter looks soon

