"""How a client's streams travel: gRPC messages, tensors in shared memory, or a command ring, which
lies in shared memory or travels over UCX."""

from __future__ import annotations

import logging
from typing import Any, Callable, Optional, Tuple

from mla_client import errors, native, wire
from mla_client.connection.channels import STOCK_MESSAGE_BYTES, Channels
from mla_client.shm import ring
from mla_client.shm.native_memory import NativeMemory
from mla_client.shm.shared_memory import DeviceWish, SharedMemory
from mla_client.shm.ucx_memory import UcxMemory
from mla_client.streams.over_grpc import AttendStream
from mla_client.streams.over_native import NativeStream
from mla_client.streams.over_ring import RingStream
from mla_client.streams.stream import StepStream

TRANSPORTS = ("auto", "inline", "shm", "ring", "ucx", "ucx_puts", "ucx_device")
_UCX = ("ucx", "ucx_puts", "ucx_device")
# The memory that a stream asks for if the caller gives no size, and the smallest useful size.
DEFAULT_SHARED_BYTES = 64 << 20
LEAST_SHARED_BYTES = 4 << 20
# The arena must hold the inputs and outputs of several messages.
MESSAGES_IN_ARENA = 4
_CAPABILITY = {"shm": "shared_memory", "ring": "command_ring", "ucx": "ucx",
               "ucx_puts": "ucx", "ucx_device": "ucx"}
_log = logging.getLogger("mla_client")


class StreamMaker:
    """Opens streams of the kind that was asked for, or of the best kind there is."""

    def __init__(self, channels: Channels, metadata: Tuple[Tuple[str, str], ...], info: Any,
                 on_boot_id: Callable[[int], None], *, transport: str, shm_path: str, tenant: str,
                 message_bytes: int, shared_bytes: Optional[int], spin_us: int,
                 timeout_s: float, wish: DeviceWish = DeviceWish()) -> None:
        """`info` is the server's GetServerInfoReply; `message_bytes` 0: as large as is sensible,
        and never more than the server takes; `shared_bytes` None: DEFAULT_SHARED_BYTES, halved
        while the server has less left; 0: no shared memory."""
        if transport not in TRANSPORTS:
            raise errors.InvalidArgument(
                f"transport: got {transport!r}, must be one of {', '.join(TRANSPORTS)}")
        if shared_bytes is not None and shared_bytes < 0:
            raise errors.InvalidArgument(f"shared_bytes: got {shared_bytes}, must be 0 or more")
        if shared_bytes == 0 and transport in _CAPABILITY:
            raise errors.InvalidArgument(f"shared_bytes: got 0, transport {transport} needs some")
        if wish.mib > 0 and (transport in ("inline", "shm", *_UCX) or shared_bytes == 0):
            raise errors.InvalidArgument(f"device_bytes: got {wish.mib} MiB, needs the ring")
        if message_bytes < 0:
            raise errors.InvalidArgument(f"message_bytes: got {message_bytes}, must be 0 or more")
        self.inline_bytes = min(message_bytes or STOCK_MESSAGE_BYTES, info.limits.message_bytes)
        self._channels = channels
        self._metadata = metadata
        self._info = info
        self._on_boot_id = on_boot_id
        self._wanted = "inline" if shared_bytes == 0 else transport
        self._shm_path = shm_path
        self._tenant = tenant
        self._message_bytes = message_bytes
        self._shared_bytes = shared_bytes
        self._warned = False  # that streams go over gRPC; once is enough
        self._spin_us = spin_us
        self._timeout_s = timeout_s
        self._wish = wish

    def open(self) -> StepStream:
        """Another stream. With "auto" never fails for want of shared memory: the first time that
        one goes over gRPC it warns why. Otherwise raises why the wanted kind is not available."""
        if self._wanted == "inline":
            return self._over_grpc(None)
        kind = self._wanted
        if kind == "auto":
            kind = "shm" if ring.WHY_NOT and native.library() is None else "ring"
        try:
            return self._over_memory(kind)
        except errors.MlaError as error:
            if self._wanted != "auto" or self._wish.mib > 0:
                raise
            # Over TCP that is expected.
            level = logging.WARNING if self._shm_path and not self._warned else logging.DEBUG
            self._warned = True
            _log.log(level, "no shared memory, so tensors travel inside gRPC messages, which is "
                            "slower: %s%s", error, self._advice(error))
        return self._over_grpc(None)

    def _over_grpc(self, memory: Optional[SharedMemory]) -> StepStream:
        size = self.inline_bytes if memory is None else self._bound(memory)
        return AttendStream(self._channels, self._metadata, self._info.limits.inflight_bytes, size,
                            self._on_boot_id, memory)

    def _over_memory(self, kind: str) -> StepStream:
        if not self._shm_path and kind not in _UCX:
            raise errors.InvalidArgument(f"transport: {kind} needs a unix: target without TLS")
        if _CAPABILITY[kind] not in self._info.capabilities:
            raise errors.Unimplemented(f"transport: the server offers no {_CAPABILITY[kind]}")
        if kind in _UCX:
            self._check_ucx()
        if kind == "ring" and ring.WHY_NOT and native.library() is None:
            raise errors.Unimplemented(f"transport: ring: {ring.WHY_NOT}")
        memory = self._region(kind)
        self._on_boot_id(memory.boot_id)
        if isinstance(memory, NativeMemory):
            return NativeStream(memory, self._bound(memory), self._on_boot_id)
        if kind == "ring":
            return RingStream(memory, self._bound(memory), self._on_boot_id, self._spin_us / 1e6)
        return self._over_grpc(memory)

    @staticmethod
    def _check_ucx() -> None:
        """Unimplemented where this process cannot carry rings over UCX."""
        lib = native.library()
        if lib is None:
            raise errors.Unimplemented(f"transport: ucx: {native.why_not()}")
        if not lib.has_ucx:
            raise errors.Unimplemented(f"transport: ucx: {lib.path} is too old for it")

    def _region(self, kind: str) -> SharedMemory:
        """Memory of the wanted size, or of what the server has left if none was asked for."""
        limit = self._info.limits.shm_region_bytes
        wanted = DEFAULT_SHARED_BYTES if self._shared_bytes is None else self._shared_bytes
        size = min(wanted, limit)
        while True:
            try:
                memory = self._connect(kind, size)
            except errors.ResourceExhausted:
                if self._shared_bytes is not None or size // 2 < LEAST_SHARED_BYTES:
                    raise
                size //= 2
                continue
            if kind == "ring" and self._wish.mib > 0:
                memory.check_granted()
            if memory.device is not None and memory.device.warning:
                _log.warning("%s", memory.device.warning)
            if size < min(wanted, limit):
                _log.info("the server had %d MiB of shared memory left for this stream, not %d: "
                          "large steps are split into more messages", size >> 20,
                          min(wanted, limit) >> 20)
            return memory

    def _connect(self, kind: str, size: int) -> SharedMemory:
        lib = native.library() if kind in ("ring", *_UCX) else None
        if lib is not None and kind in _UCX:
            return UcxMemory.open_call(lib, self._channels, self._metadata, size=size,
                                       spin_us=self._spin_us, timeout_s=self._timeout_s,
                                       puts=kind != "ucx", device=kind == "ucx_device",
                                       wish=self._wish)
        if lib is not None:
            return NativeMemory.open(lib, self._shm_path, tenant=self._tenant, size=size,
                                     spin_us=self._spin_us, timeout_s=self._timeout_s,
                                     wish=self._wish)
        return SharedMemory.connect(self._shm_path, tenant=self._tenant, size=size,
                                    ring=kind == "ring", spin_us=self._spin_us,
                                    timeout_s=self._timeout_s, wish=self._wish)

    def _advice(self, error: errors.MlaError) -> str:
        """Advice for a refusal because the server lacks room; empty for other errors."""
        if not isinstance(error, errors.ResourceExhausted):
            return ""
        limits = self._info.limits
        return (f" (the server's shm.total_bytes is {limits.shm_total_bytes >> 20} MiB, "
                f"shm.regions_max {limits.shm_regions_max}, shm.tenant_regions "
                f"{limits.shm_tenant_regions}: raise them, or let its clients ask for less with "
                "shared_bytes)")

    def _bound(self, memory: SharedMemory) -> int:
        """The bound of one message, its header included."""
        most = memory.arena_bytes // MESSAGES_IN_ARENA + wire.HEADER_BYTES
        return min(self._message_bytes or most, most)
