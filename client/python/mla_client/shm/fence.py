"""The order in which stores to shared memory become visible to the other process.

CPython executes one bytecode after another and each access below is one call into compiled code, so
no compiler reorders them; what is left is the processor.

- On x86-64 stores become visible in program order and loads are not reordered with loads: plain
  stores through mmap are enough to publish an entry by writing its sequence word last, and to read
  one by loading that word first. Only a store followed by a load of something else may swap; that
  needs `full()`, for which any locked instruction does: CPython takes every lock with one.
- On other architectures plain accesses are not enough. There every step uses the full fence of
  libatomic (the compiler's run-time library); where that is not installed `WHY_NOT` says so and the
  ring is not used.

An access of an aligned 4- or 8-byte word through a cast memoryview is a single load or store.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from typing import Callable, Tuple

from mla_client.base import process

_SEQ_CST = 5  # __ATOMIC_SEQ_CST
_LOCK = threading.Lock()
process.free_at_fork(_LOCK)


def _nothing() -> None:
    """Program order is enough."""


def _locked() -> None:
    """A full fence on x86-64: taking a lock is a locked compare-and-swap."""
    with _LOCK:
        pass


def by_library() -> Callable[[], None]:
    """A full fence by libatomic. OSError or AttributeError if it is not there."""
    fence = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence
    fence.argtypes, fence.restype = [ctypes.c_int], None

    def full() -> None:
        fence(_SEQ_CST)

    return full


def choose(machine: str) -> Tuple[Callable[[], None], Callable[[], None], str]:
    """(`ordered`, `full`, why neither exists or "") for a processor as `uname -m` names it."""
    if sys.byteorder != "little":
        return _nothing, _nothing, "the ring's integers are little endian, this machine's are not"
    if machine in ("x86_64", "AMD64"):
        return _nothing, _locked, ""
    try:
        fence = by_library()
    except (OSError, AttributeError) as error:
        return _nothing, _nothing, f"{machine} needs libatomic for memory fences: {error}"
    return fence, fence, ""


# `ordered()` between two stores, or two loads, keeps their order; `full()` also keeps a store
# before a later load. Any thread.
ordered, full, WHY_NOT = choose(platform.machine())
