"""Waiting for a word in memory that two processes share: the kernel's futex, not private."""

from __future__ import annotations

import ctypes
import platform
from typing import Optional

_WAIT, _WAKE, _EVERYBODY = 0, 1, 0x7FFFFFFF
# futex's number by architecture; the libc has no function for it.
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221}
_NUMBER: Optional[int] = _NUMBERS.get(platform.machine())

# Why sleeping on a word is not possible here; empty: it is.
WHY_NOT = "" if _NUMBER is not None else f"futex: unknown architecture {platform.machine()}"


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


# CDLL gives the interpreter's lock up during the call.
_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32,
                     ctypes.POINTER(_Timespec), ctypes.c_void_p, ctypes.c_int]


def wait(address: int, value: int, seconds: float) -> None:
    """Sleeps while the word at `address` equals `value`, for `seconds` at most; may return early.
    The caller keeps the memory mapped."""
    nanoseconds = max(0, int(seconds * 1e9))
    timeout = _Timespec(*divmod(nanoseconds, 1_000_000_000))
    _syscall(_NUMBER, address, _WAIT, value, ctypes.byref(timeout), None, 0)


def wake(address: int) -> None:
    """Wakes all threads that wait for the word."""
    _syscall(_NUMBER, address, _WAKE, _EVERYBODY, None, None, 0)
