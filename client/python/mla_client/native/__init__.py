"""The C library of mla-server in this process: rings whose calls a GPU's stream may wait for.

MLA_CLIENT_LIBRARY of the environment names its file; else it is libmla_client.so.0 in this folder,
if the package was built with it. Without it rings are Python's own (mla_client.streams.over_ring),
which chain nothing. MLA_CLIENT_LIBRARY="" asks for that.

The functions are declared in client/c/mla_ring.h. Threading: any thread.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import threading
from typing import Any, Optional, Tuple

from mla_client import errors
from mla_client.base import process

VARIABLE = "MLA_CLIENT_LIBRARY"
FILE = "libmla_client.so.0"
NONE = 2**64 - 1  # no offset
NO_REPLY_YET = b"no_reply_yet"
DEADLINE_EXCEEDED = 4

_P, _TEXT = ctypes.c_void_p, ctypes.c_char_p
_SIZE, _I32, _I64 = ctypes.c_size_t, ctypes.c_int32, ctypes.c_int64
_U8, _U32, _U64 = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64


class Options(ctypes.Structure):
    """mla_ring_options."""

    _fields_ = [("struct_size", _SIZE), ("tenant", _TEXT), ("bytes", _U64), ("device_bytes", _U64),
                ("connect_ms", _I64), ("request_ms", _I64), ("server_spin_us", _I32),
                ("spin_us", _I32), ("server_uid", _I64), ("gpu", _I32), ("reserved", _I32),
                ("gpu_library", _TEXT)]


class Info(ctypes.Structure):
    """mla_ring_info."""

    _fields_ = [("struct_size", _SIZE), ("boot_id", _U64), ("memory", _P), ("memory_bytes", _U64),
                ("arena_offset", _U64), ("device_memory", _P), ("device_bytes", _U64),
                ("entries", _U32), ("nvidia", _I32), ("chains_in_memory", _I32),
                ("chains_on_device", _I32), ("why_no_device", _TEXT), ("why_no_chains", _TEXT),
                ("device_warning", _TEXT)]


class Copy(ctypes.Structure):
    """mla_ring_copy."""

    _fields_ = [("to", _P), ("source", _P), ("width", _U64), ("rows", _U64), ("to_pitch", _U64),
                ("from_pitch", _U64)]


class Entry(ctypes.Structure):
    """mla_ring_entry."""

    _fields_ = [("struct_size", _SIZE), ("step_id", _U64), ("in_offset", _U64),
                ("out_offset", _U64), ("stream", _P), ("layer", _U32), ("row_begin", _U32),
                ("row_count", _U32), ("head_offset", _U32), ("num_heads", _U32),
                ("timeout_us", _U32), ("profile", _U8), ("flags", _U8), ("q_dtype", _U8),
                ("o_dtype", _U8), ("copies_in", ctypes.POINTER(Copy)),
                ("copies_out", ctypes.POINTER(Copy)), ("in_count", _U32), ("out_count", _U32),
                ("in_bytes", _U64), ("out_bytes", _U64), ("in_on_gpu", _U32),
                ("reserved", _U32)]


GiveUp = ctypes.CFUNCTYPE(None, _P)  # of UcxReply


class UcxOptions(ctypes.Structure):
    """mla_ucx_options."""

    _fields_ = [("struct_size", _SIZE), ("library", _TEXT), ("transports", _TEXT),
                ("devices", _TEXT), ("spin_us", _I32), ("puts", _I32),
                ("pins", _I32), ("gpu", _I32), ("gpu_library", _TEXT),
                ("device_memory", _I32)]


class UcxReply(ctypes.Structure):
    """mla_ucx_reply."""

    _fields_ = [("struct_size", _SIZE), ("boot_id", _U64), ("worker_address", _TEXT),
                ("worker_address_bytes", _SIZE), ("token", _TEXT), ("token_bytes", _SIZE),
                ("region_bytes", _U64), ("arena_offset", _U64), ("ring_entries", _U32),
                ("reserved", _U32), ("bytes", _U64), ("request_ms", _I64), ("give_up", GiveUp),
                ("argument", _P), ("arena_key", _TEXT), ("arena_key_bytes", _SIZE),
                ("arena_address", _U64), ("secret", _TEXT), ("secret_bytes", _SIZE),
                ("batches", _I32), ("device_key", _TEXT), ("device_key_bytes", _SIZE),
                ("device_address", _U64), ("device_bytes", _U64)]


class Times(ctypes.Structure):
    """mla_attend_times."""

    _fields_ = [("struct_size", _SIZE), ("queue_us", _U32), ("plan_us", _U32), ("kernel_us", _U32),
                ("write_us", _U32), ("launch_requests", _U32), ("messages", _U32),
                ("launch_layers", _U32), ("launch_clients", _U32), ("plan_reused", _U32)]


# name: (result, arguments)
_FUNCTIONS = {
    "mla_error_code": (ctypes.c_int, [_P]),
    "mla_error_message": (_TEXT, [_P]), "mla_error_field": (_TEXT, [_P]),
    "mla_error_limit": (_TEXT, [_P]), "mla_error_got": (_TEXT, [_P]),
    "mla_error_reason": (_TEXT, [_P]), "mla_error_peer": (_TEXT, [_P]),
    "mla_error_retry_after_ms": (_U32, [_P]), "mla_error_last_good_position": (_U64, [_P]),
    "mla_error_next_row": (_I64, [_P]), "mla_error_free": (None, [_P]),
    "mla_ring_open": (ctypes.c_int, [_TEXT, _P, _P, _P]),
    "mla_ring_describe": (ctypes.c_int, [_P, _P, _P]),
    "mla_ring_allocate": (_U64, [_P, _U64, _I32]),
    "mla_ring_deallocate": (None, [_P, _U64, _I32]),
    "mla_ring_attend": (ctypes.c_int, [_P, _P, _I64, _P, _P]),
    "mla_ring_message": (ctypes.c_int, [_P, _TEXT, _SIZE, _TEXT, _SIZE, _I64, _P, _P]),
    "mla_chain_new": (ctypes.c_int, [_P, _P, _P, _P]),
    "mla_chain_attend": (ctypes.c_int, [_P, _U64, _U32, _P, _P, _I64, _P]),
    "mla_chain_begin": (ctypes.c_int, [_P, _TEXT, _SIZE, _I64, _P]),
    "mla_chain_begin_next": (ctypes.c_int, [_P, _U64, _I64, _P]),
    "mla_chain_end": (ctypes.c_int, [_P, _I64, _P]),
    "mla_chain_wait": (ctypes.c_int, [_P, _I64, _P]),
    "mla_chain_free": (None, [_P]),
    "mla_graph_new": (ctypes.c_int, [_P, _P, _P]),
    "mla_graph_capture": (ctypes.c_int, [_P, _P, _P]),
    "mla_graph_send": (ctypes.c_int, [_P, _U64, _P, _P, _I64, _P, _P]),
    "mla_graph_free": (None, [_P]),
    "mla_request_wait": (ctypes.c_int, [_P, _I64, _P]),
    "mla_request_times": (None, [_P, _P]),
    "mla_request_reply": (_P, [_P, _P]),
    "mla_request_free": (None, [_P]),
    "mla_requests_wait": (ctypes.c_int, [_P, _SIZE, _I64, _P]),
    "mla_requests_free": (None, [_P, _SIZE]),
    "mla_ring_state": (ctypes.c_int, [_P, _P]),
    "mla_ring_end": (None, [_P, _I64]),
    "mla_ring_free": (None, [_P]),
}
# Libraries of before 0.2 do not have these.
_UCX_FUNCTIONS = {
    "mla_ucx_start": (ctypes.c_int, [_P, _P, _P]),
    "mla_ucx_address": (_P, [_P, _P]),
    "mla_ucx_handles_losses": (_I32, [_P]),
    "mla_ucx_open": (ctypes.c_int, [_P, _P, _P, _P]),
    "mla_ucx_free": (None, [_P]),
    "mla_ring_call_ended": (None, [_P, _TEXT]),
}


def sized(kind: Any, **fields: Any) -> Any:
    """A struct of that kind."""
    return kind(struct_size=ctypes.sizeof(kind), **fields)


class Library:
    """The functions of the library, by their names."""

    def __init__(self, path: str) -> None:
        """OSError, or AttributeError, where it cannot be used."""
        self.path = path
        opened = ctypes.CDLL(path)
        self.has_ucx = hasattr(opened, "mla_ucx_start")
        functions = {**_FUNCTIONS, **(_UCX_FUNCTIONS if self.has_ucx else {})}
        for name, (result, arguments) in functions.items():
            function = getattr(opened, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def error(self, pointer: Any) -> errors.MlaError:
        """The exception of an mla_error, which is freed."""
        lib: Any = self

        def text(name: str) -> str:
            value: bytes = getattr(lib, f"mla_error_{name}")(pointer)
            return value.decode(errors="replace")
        try:
            row = lib.mla_error_next_row(pointer)
            detail = errors.ErrorDetail(
                field=text("field"), limit=text("limit"), got=text("got"), reason=text("reason"),
                peer=text("peer"), retry_after_ms=lib.mla_error_retry_after_ms(pointer),
                last_good_position=lib.mla_error_last_good_position(pointer),
                next_row=row if row >= 0 else None)
            return errors.from_code(lib.mla_error_code(pointer), text("message"), detail)
        finally:
            lib.mla_error_free(pointer)

    def check(self, code: int, pointer: Any) -> None:
        """Raises what a call has returned, unless it is MLA_OK."""
        if code:
            raise self.error(pointer)


_lock = threading.Lock()
process.free_at_fork(_lock)
_found: Optional[Tuple[Optional[Library], str]] = None


def library() -> Optional[Library]:
    """The library; None: there is none, for the reason that `why_not` gives. A file that the
    environment names and that cannot be used is FailedPrecondition."""
    return _find()[0]


def why_not() -> str:
    """Why the library was not loaded; empty if it was."""
    return _find()[1]


def _find() -> Tuple[Optional[Library], str]:
    global _found
    with _lock:
        if _found is None:
            _found = _load()
        return _found


def _load() -> Tuple[Optional[Library], str]:
    named = os.environ.get(VARIABLE)
    if named == "":
        return None, f"{VARIABLE} is empty"
    path = named or str(pathlib.Path(__file__).parent / FILE)
    if named is None and not os.path.exists(path):
        return None, f"this package was installed without {FILE}, and {VARIABLE} names none"
    try:
        return Library(path), ""
    except (OSError, AttributeError) as error:
        if named is None:  # libraries that it needs are missing, say
            return None, f"{path}: {error}"
        raise errors.FailedPrecondition(f"{VARIABLE}: {error}") from error
