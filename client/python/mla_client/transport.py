"""How a client's streams travel: gRPC messages, tensors in shared memory, or a command ring."""

from __future__ import annotations

import logging
from typing import Any, Callable, Optional, Tuple

import grpc

from mla_client import errors, ring, wire
from mla_client.shared_memory import SharedMemory
from mla_client.stream import AttendStream, StepStream

TRANSPORTS = ("auto", "inline", "shm", "ring")
STOCK_MESSAGE_BYTES = 4 << 20
# The arena must hold the inputs and outputs of several messages.
MESSAGES_IN_ARENA = 4
_CAPABILITY = {"shm": "shared_memory", "ring": "command_ring"}
_log = logging.getLogger("mla_client")


def door_of(target: str) -> str:
    """Path of the door through which the server of a unix target hands out memory; else empty."""
    if not target.startswith("unix:"):
        return ""
    path = target[len("unix:"):]
    return (path[2:] if path.startswith("//") else path) + ".shm"


class StreamMaker:
    """Opens streams of the kind that was asked for, or of the best kind there is."""

    def __init__(self, channel: grpc.Channel, metadata: Tuple[Tuple[str, str], ...], info: Any,
                 on_boot_id: Callable[[int], None], *, transport: str, door: str, tenant: str,
                 message_bytes: int, shared_bytes: int, spin_us: int, timeout_s: float):
        """`info` is the server's GetServerInfoReply; `message_bytes` 0: as large as is sensible."""
        if transport not in TRANSPORTS:
            raise errors.InvalidArgument(
                f"transport: got {transport!r}, must be one of {', '.join(TRANSPORTS)}")
        self.inline_bytes = message_bytes or min(info.limits.message_bytes, STOCK_MESSAGE_BYTES)
        self._channel = channel
        self._metadata = metadata
        self._info = info
        self._on_boot_id = on_boot_id
        self._wanted = transport
        self._door = door
        self._tenant = tenant
        self._message_bytes = message_bytes
        self._shared_bytes = min(shared_bytes, info.limits.shm_region_bytes)
        self._spin_us = spin_us
        self._timeout_s = timeout_s

    def open(self) -> StepStream:
        """Another stream. With "auto" never fails for want of shared memory: it logs why it goes
        over gRPC. Otherwise raises why the wanted kind is not to be had."""
        if self._wanted == "inline":
            return self._over_grpc(None)
        kind = self._wanted
        if kind == "auto":
            kind = "shm" if ring.WHY_NOT else "ring"
        try:
            return self._over_memory(kind)
        except errors.MlaError as error:
            if self._wanted != "auto":
                raise
            # Over TCP that is what everybody expects.
            level = logging.WARNING if self._door else logging.DEBUG
            _log.log(level, "tensors travel inside gRPC messages: %s", error)
        return self._over_grpc(None)

    def _over_grpc(self, memory: Optional[SharedMemory]) -> StepStream:
        size = self.inline_bytes if memory is None else self._bound(memory)
        return AttendStream(self._channel, self._metadata, self._info.limits.inflight_bytes, size,
                            self._on_boot_id, memory)

    def _over_memory(self, kind: str) -> StepStream:
        if not self._door:
            raise errors.InvalidArgument(f"transport: {kind} needs a unix: target without TLS")
        if _CAPABILITY[kind] not in self._info.capabilities:
            raise errors.Unimplemented(f"transport: the server offers no {_CAPABILITY[kind]}")
        if kind == "ring" and ring.WHY_NOT:
            raise errors.Unimplemented(f"transport: ring: {ring.WHY_NOT}")
        memory = SharedMemory.connect(self._door, tenant=self._tenant, size=self._shared_bytes,
                                      ring=kind == "ring", spin_us=self._spin_us,
                                      timeout_s=self._timeout_s)
        self._on_boot_id(memory.boot_id)
        if kind == "ring":
            return ring.RingStream(memory, self._bound(memory), self._on_boot_id,
                                   self._spin_us / 1e6)
        return self._over_grpc(memory)

    def _bound(self, memory: SharedMemory) -> int:
        """Of one message, as if its header were with it."""
        most = memory.arena_bytes // MESSAGES_IN_ARENA + wire.HEADER_BYTES
        return min(self._message_bytes or most, most)
