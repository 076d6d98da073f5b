"""The memory of a ring that the C library has opened: the same as SharedMemory, which Python's own
rings have, with blocks that the library gives and device memory that it has mapped.

Threading: as SharedMemory.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Dict, Optional

from mla_client import errors, native
from mla_client.base import gates, process
from mla_client.shm.device import DeviceMemory
from mla_client.shm.shared_memory import DeviceWish, SharedMemory

_SECOND = 1000  # milliseconds


class _Blocks:
    """Blocks of the library's. Threading: the owner's lock."""

    def __init__(self, lib: Any, ring: Any, on_device: bool) -> None:
        self._lib, self._ring, self._on_device = lib, ring, int(on_device)
        self.used: Dict[int, int] = {}

    def take(self, wanted: int) -> Optional[int]:
        """Takes `wanted` bytes and returns their offset; None if no free block is large enough."""
        offset: int = self._lib.mla_ring_allocate(self._ring, wanted, self._on_device)
        if offset == native.NONE:
            return None
        self.used[offset] = wanted
        return offset

    def give(self, offset: int) -> None:
        """Gives a block back."""
        del self.used[offset]
        self._lib.mla_ring_deallocate(self._ring, offset, self._on_device)


class NativeDevice(DeviceMemory):
    """Device memory of a ring of the library's."""

    def __init__(self, memory: "NativeMemory", info: native.Info, device: int,
                 blocks: _Blocks) -> None:
        super().__init__(device, bool(info.nvidia), info.device_bytes, blocks)
        self._memory = memory
        self.address = info.device_memory or 0
        self.warning = (info.device_warning or b"").decode()


class NativeMemory(SharedMemory):
    """A ring of the library's, and its memory."""

    transport = "ring"
    travels = False  # entries say how long their tensors are

    def __init__(self, lib: native.Library, ring: int, wish: DeviceWish,
                 owner: Any = None) -> None:
        """Takes the ring over. Objects that use its memory keep `owner`, which frees it; None:
        one that does no more than that."""
        self.lib: Any = lib
        self.ring = ctypes.c_void_p(ring)
        self._home = process.Home()
        info = native.sized(native.Info)
        error = ctypes.c_void_p()
        lib.check(self.lib.mla_ring_describe(self.ring, ctypes.byref(info), ctypes.byref(error)),
                  error)
        self.handle = b""
        self.boot_id = info.boot_id
        self.ring_entries = info.entries
        self.arena_offset = info.arena_offset
        self.arena_bytes = info.memory_bytes - info.arena_offset
        self.address = info.memory
        # Arrays keep the buffer that they lie in, and that keeps the ring.
        kind: Any = type("_Region", (ctypes.c_ubyte * info.memory_bytes,), {})
        region = kind.from_address(info.memory)
        region.owner = owner or _Owner(lib, self.ring, self._home)
        self.map = region
        self.ended = False
        self.freed = 0
        self._left = False
        self._lock = threading.Lock()
        self._room = gates.Gates()
        blocks: Any = _Blocks(lib, self.ring, False)
        self._blocks = blocks
        self._buffers = 0
        self.chains_in_memory = bool(info.chains_in_memory)
        self.chains_on_device = bool(info.chains_on_device)
        self.why_no_chains = (info.why_no_chains or b"").decode(errors="replace")
        self.device = None
        self.why_no_device = (info.why_no_device or b"none was asked for").decode(errors="replace")
        if info.device_memory:
            device: Any = NativeDevice(self, info, wish.device, _Blocks(lib, self.ring, True))
            self.device = device
        self.warning = (info.device_warning or b"").decode()
        process.leave_at_fork(self)

    @classmethod
    def open(cls, lib: native.Library, path: str, *, tenant: str, size: int, spin_us: int,
             timeout_s: float, wish: DeviceWish) -> "NativeMemory":
        """As SharedMemory.connect, with a ring."""
        uses_gpu = wish.mib > 0 or wish.pins
        options = native.sized(
            native.Options, tenant=tenant.encode(), bytes=size, device_bytes=wish.mib << 20,
            connect_ms=max(1, min(int(timeout_s * _SECOND), 2**31 - 1)), server_spin_us=spin_us,
            request_ms=max(1, int(min(timeout_s, 1e6) * _SECOND)), spin_us=spin_us,
            gpu=wish.device if uses_gpu else -1,
            gpu_library=wish.library.encode() or None)
        ring, error = ctypes.c_void_p(), ctypes.c_void_p()
        functions: Any = lib
        lib.check(functions.mla_ring_open(path.encode(), ctypes.byref(options), ctypes.byref(ring),
                                          ctypes.byref(error)), error)
        assert ring.value is not None
        return cls(lib, ring.value, wish)

    # --- Connection

    def connected(self) -> bool:
        return not self.ended and self.state() is None

    def state(self) -> Optional[errors.MlaError]:
        """Why the ring can not be used any more; None while it can."""
        if self._left:
            return self._home.error()
        error = ctypes.c_void_p()
        if not self.lib.mla_ring_state(self.ring, ctypes.byref(error)):
            return None
        return self.lib.error(error)

    def close(self, timeout_s: float) -> None:
        if not self.ended:
            self.lib.mla_ring_end(self.ring, int(timeout_s * _SECOND))
        self.disconnect()

    def disconnect(self) -> None:
        if self._left:
            return
        self.ended = True
        self.lib.mla_ring_end(self.ring, 0)
        self._room.open()

    def leave(self) -> None:
        self._left = self.ended = True  # the library gives the child pages of its own

    def __del__(self) -> None:
        pass  # the region's owner frees the ring


class _Owner:
    """Frees the ring when nothing uses its memory any more."""

    def __init__(self, lib: Any, ring: Any, home: process.Home) -> None:
        self._lib, self._ring, self._home = lib, ring, home

    def __del__(self) -> None:
        if not self._home.left:
            self._lib.mla_ring_end(self._ring, 0)
            self._lib.mla_ring_free(self._ring)
