"""Which process an object belongs to, and what becomes of its copy in another one.

A child that `fork` makes has copies of its parent's objects. The child shares the parent's sockets
and memory, and has none of its threads. So it must not use the objects, nor end anything that the
parent still uses: a call by a copy fails at once, and closing a copy ends nothing.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from mla_client import errors

_forks = 0  # in the line of processes that led to this one, as far as Python has seen them
_channels_made = False
_grpc_broken = False  # by a fork: its threads are gone, and its sockets are the parent's
_objects: "weakref.WeakSet[Any]" = weakref.WeakSet()
_grpc_objects: "weakref.WeakSet[Any]" = weakref.WeakSet()


class Home:
    """The process that made an object. Threading: any thread."""

    __slots__ = ("_pid", "_forks")

    def __init__(self) -> None:
        self._pid, self._forks = os.getpid(), _forks

    @property
    def left(self) -> bool:
        """Returns true in any process except the one that made the object."""
        # A number of a process may come again; code in C may fork without Python's knowledge.
        return self._forks != _forks or os.getpid() != self._pid

    def check(self) -> None:
        """Raises FailedPrecondition (reason "forked") in any process except the one that made the
        object."""
        if self._forks != _forks or os.getpid() != self._pid:
            raise self.error()

    def check_copy(self) -> None:
        """As `check`, without asking the system: only forks that Python knows of count."""
        if self._forks != _forks:
            raise self.error()

    def error(self) -> errors.FailedPrecondition:
        """Why a copy cannot be used."""
        return errors.FailedPrecondition(
            f"the client belongs to process {self._pid}, and process {os.getpid()} was forked from "
            "it: connect in each process, after the fork",
            errors.ErrorDetail(reason="forked"))


def before_a_channel() -> None:
    """To be called before a channel of gRPC is made. FailedPrecondition (reason "forked") where
    gRPC was in use when this process was forked: calls would hang, past every deadline, and the
    parent would miss events of its own."""
    global _channels_made
    if _grpc_broken:
        raise errors.FailedPrecondition(
            f"process {os.getpid()} was forked from one that had connected, and gRPC does not "
            "survive that: connect after the fork only, or start processes by spawn or forkserver",
            errors.ErrorDetail(reason="forked"))
    _channels_made = True


def leave_at_fork(one: Any) -> None:
    """Calls `one.leave()` in every child that is forked while `one` exists."""
    _objects.add(one)


def keep_at_fork(one: Any) -> None:
    """Calls `keep(one)` in every child that is forked while `one` exists."""
    _grpc_objects.add(one)


def free_at_fork(lock: Any) -> None:
    """Frees a lock of a module in every child that is forked: a thread that the child does not have
    may have had it."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)


def keep(one: Any) -> None:
    """Keeps an object until the process ends. Examples: a function that C code calls when Python
    has ended already; an object of the gRPC library, whose destructor would wait for threads that
    a child does not have, or write to the parent's connection."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _after_fork_in_child() -> None:
    global _forks, _grpc_broken
    _forks += 1
    _grpc_broken = _channels_made
    for one in tuple(_grpc_objects):
        keep(one)
    for one in tuple(_objects):
        one.leave()
    _objects.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
