"""The memory of a ring that travels over UCX: a mirror of the server's, which the C library moves.

The ring lives as long as its call, Transports.OpenUcx, which a thread waits for. Threading: as
NativeMemory.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any, Callable, Optional, Tuple

import grpc

from mla_client import errors, native
from mla_client.base import process
from mla_client.gen import transport_pb2, transport_pb2_grpc
from mla_client.shm.native_memory import NativeMemory
from mla_client.shm.shared_memory import DeviceWish

FRAMES_VERSION = 1  # proto/wire/ucx/frames.h
_SECOND = 1000  # milliseconds
_END_S = 5.0  # for the thread of a call that was cancelled


class _Call:
    """The call of a ring, and the thread that waits for its end."""

    def __init__(self, lib: Any, channels: Any) -> None:
        self._lib = lib
        self._carrier = channels.stream()
        self._stub = transport_pb2_grpc.TransportsStub(self._carrier.__enter__())
        self._call: Any = None
        self._ring: Any = None
        self._thread: Optional[threading.Thread] = None
        self._free: Callable[[], None] = lambda: None
        # The thread and `end` take one each. No lock: `end` may interrupt either, in a finalizer.
        self._turns = itertools.count()
        self.give_up = native.GiveUp(lambda argument: self.cancel())

    def start(self, request: Any, metadata: Tuple[Tuple[str, str], ...], timeout_s: float) -> Any:
        """The server's reply."""
        self._call = self._stub.OpenUcx(request, metadata=metadata)
        timer = threading.Timer(timeout_s, self._call.cancel)
        timer.daemon = True
        timer.start()
        try:
            return next(self._call)
        except StopIteration:
            raise errors.DataLoss("UCX: the server has described no ring") from None
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.CANCELLED:
                raise errors.DeadlineExceeded(
                    "UCX: the server did not open a ring in time") from error
            raise errors.from_rpc(error) from error
        finally:
            timer.cancel()

    def watch(self, ring: Any) -> None:
        """From now on the ring learns of the call's end."""
        self._ring = ring
        self._thread = threading.Thread(target=self._wait, name="mla-ucx", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        why = "the server has ended the UCX ring"
        try:
            for _ in self._call:
                pass
        except grpc.RpcError as error:
            why = f"the UCX ring has ended: {error.details()}"
        self._lib.mla_ring_call_ended(self._ring, why.encode())
        self._take_turn()

    def cancel(self) -> None:
        """Asks the server to end the ring."""
        if self._call is not None:
            self._call.cancel()

    def end(self, free: Callable[[], None] = lambda: None) -> None:
        """Cancels, and waits for the thread. `free` is called once the thread does not use the ring
        any more: by the thread itself, if it goes on for long or is the caller."""
        self._free = free
        self.cancel()
        self._carrier.__exit__(None, None, None)
        if self._thread is None:
            free()
            return
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)
        self._take_turn()

    def _take_turn(self) -> None:
        if next(self._turns) == 1:  # the second one
            self._free()


class UcxMemory(NativeMemory):
    """A ring over UCX, and this side's copy of its memory."""

    transport = "ucx"
    travels = True

    @classmethod
    def open_call(cls, lib: native.Library, channels: Any, metadata: Tuple[Tuple[str, str], ...],
                  *, size: int, spin_us: int, timeout_s: float,
                  puts: bool = False, device: bool = False,
                  wish: DeviceWish = DeviceWish()) -> "UcxMemory":
        """Opens a ring with `size` bytes for tensors, at the server of these channels. `puts`:
        tensors are put, if the server allows it; `device`: into memory of its GPU. `wish` may
        have `pins`."""
        functions: Any = lib
        ucx, error = ctypes.c_void_p(), ctypes.c_void_p()
        options = native.sized(
            native.UcxOptions, spin_us=spin_us, puts=int(puts), device_memory=int(device),
            pins=int(wish.pins), gpu=wish.device, gpu_library=wish.library.encode() or None)
        lib.check(functions.mla_ucx_start(ctypes.byref(options), ctypes.byref(ucx),
                                          ctypes.byref(error)), error)
        call = _Call(lib, channels)
        try:
            length = ctypes.c_size_t()
            address = functions.mla_ucx_address(ucx, ctypes.byref(length))
            request = transport_pb2.OpenUcxRequest(
                version=FRAMES_VERSION, worker_address=ctypes.string_at(address, length.value),
                bytes=size, spin_us=spin_us, puts=puts, encrypts=True,
                batches=True, device_memory=device,
                handles_losses=bool(functions.mla_ucx_handles_losses(ucx)))
            reply = call.start(request, metadata, timeout_s)
            described = native.sized(
                native.UcxReply, boot_id=reply.boot_id, worker_address=reply.worker_address,
                worker_address_bytes=len(reply.worker_address), token=reply.token,
                token_bytes=len(reply.token), region_bytes=reply.region_bytes,
                arena_offset=reply.arena_offset, ring_entries=reply.ring_entries, bytes=size,
                request_ms=max(1, int(min(timeout_s, 1e6) * _SECOND)), give_up=call.give_up,
                batches=int(reply.batches))
            if reply.secret:
                described.secret, described.secret_bytes = reply.secret, len(reply.secret)
            if reply.arena_key:
                described.arena_key = reply.arena_key
                described.arena_key_bytes = len(reply.arena_key)
                described.arena_address = reply.arena_address
            if reply.device_key:
                described.device_key = reply.device_key
                described.device_key_bytes = len(reply.device_key)
                described.device_address = reply.device_address
                described.device_bytes = reply.device_bytes
            ring = ctypes.c_void_p()
            lib.check(functions.mla_ucx_open(ucx, ctypes.byref(described), ctypes.byref(ring),
                                             ctypes.byref(error)), error)
            assert ring.value is not None
            call.watch(ctypes.c_void_p(ring.value))
        except BaseException:
            call.end()
            raise
        finally:
            functions.mla_ucx_free(ucx)
        return cls(lib, ring.value, wish,
                   _Owner(lib, ctypes.c_void_p(ring.value), process.Home(), call))


class _Owner:
    """Frees the ring when nothing uses its memory any more."""

    def __init__(self, lib: Any, ring: Any, home: process.Home, call: _Call) -> None:
        self._lib, self._ring, self._home, self._call = lib, ring, home, call

    def __del__(self) -> None:
        if self._home.left:
            return
        lib, ring = self._lib, self._ring
        lib.mla_ring_end(ring, 0)
        self._call.end(lambda: lib.mla_ring_free(ring))
