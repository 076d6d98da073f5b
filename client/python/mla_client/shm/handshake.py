"""How a client asks a server of the same host for a region, and what the server may answer.

Every byte is defined in the repository's proto/wire/ring_layout.h. The answer is checked before any
of it is used: a region that is not what it is said to be could end this process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import time
from typing import Any, List, NamedTuple, Optional, Tuple

from mla_client import errors
from mla_client.base import deadlines
from mla_client.shm import device as device_memory

HANDSHAKE_MAGIC = 0x314D4853  # "SHM1"
HANDSHAKE_VERSION = 1
WANT_RING, WANT_DEVICE = 1, 2  # flags of the request
HAS_DEVICE = 1  # of the reply
TEXT_BYTES = 128
CONNECT_REQUEST = struct.Struct("<IHHQII128s")
CONNECT_REPLY = struct.Struct("<IHHiI16sQQQII128s")
# magic, entries, offsets of submissions, completions and reply slots.
RING_HEADER = struct.Struct("<IIQQQ")
RING_HEADER_BYTES = 320
ENTRY_BYTES = 64
REPLY_SLOT_BYTES = 1024
PAGE_BYTES = 4096
# A Python that was built for an old C library has no names for these of Linux.
_GET_SEALS, _SEAL_SHRINK = 1034, 2
_CONNECT_PAUSE_S = 0.005  # between attempts while the server has connections to take
_ATTEMPTS = 5  # connections that are tried when the server closes them without an answer
# An arena may be larger than what was asked for by so much: all its pages are mapped at once.
_MOST_ROUNDING = 2 << 20


class ConnectReply(NamedTuple):
    """The server's description of the region that it made."""

    magic: int
    version: int
    flags: int
    code: int
    ring_entries: int
    handle: bytes
    region_bytes: int
    arena_offset: int
    boot_id: int
    spin_us: int
    reserved1: int
    message: bytes


class Answer(NamedTuple):
    """A region, as it was handed over. All of it is the caller's to close."""

    connection: socket.socket
    reply: ConnectReply
    descriptors: List[int]


def ask(path: str, request: bytes, timeout_s: float) -> Answer:
    """Sends the request to the listener at that path. `timeout_s` bounds connection and answer
    together. Unavailable: no listener, or no answer; Unimplemented: another protocol; otherwise
    what the server said when it refused."""
    deadline = time.monotonic() + timeout_s
    for _ in range(_ATTEMPTS):
        answer = _exchange(path, request, deadline)
        if answer is not None:
            return answer
    raise errors.Unavailable("shared memory: the server closed the connection without an answer")


def _exchange(path: str, request: bytes, deadline: float) -> Optional[Answer]:
    """One connection: the request and its answer. None if the server closed it without an answer,
    as one with too many connections may do before it has read the request."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    descriptors: List[int] = []
    try:
        packet, descriptors = _converse(connection, path, request, deadline)
        if not packet:
            connection.close()
            return None
        return Answer(connection, _read_connect_reply(packet, len(descriptors)), descriptors)
    except BaseException as error:
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise errors.Unavailable(f"shared memory: {path}: {error}") from error
        raise


def _converse(connection: socket.socket, path: str, request: bytes,
              deadline: float) -> Tuple[bytes, List[int]]:
    """Returns the bytes of the answer, empty if none came, and the descriptors that came with it.
    """
    _connect(connection, path, deadline)
    try:
        connection.sendall(request)
        connection.settimeout(_time_left(deadline))
        packet, descriptors, _, _ = socket.recv_fds(connection, CONNECT_REPLY.size, 2)
    except (BrokenPipeError, ConnectionResetError):
        return b"", []
    return packet, descriptors


def _layout(name: str, got: Any, wanted: Any) -> errors.Unimplemented:
    """The server and this client do not agree on where things lie."""
    return errors.Unimplemented(f"shared memory: {name}: got {got}, must be {wanted}",
                                errors.ErrorDetail(field=name, got=str(got), limit=str(wanted),
                                                   reason="layout_mismatch"))


def _time_left(deadline: float) -> float:
    """Seconds until then, a positive number: 0 would make a socket one that never waits."""
    return min(max(deadline - time.monotonic(), 1e-3), deadlines.LONGEST_SOCKET_S)


def _connect(connection: socket.socket, path: str, deadline: float) -> None:
    """Connects until then; OSError if it cannot. A unix socket with a timeout does not wait for a
    place among the connections that the server has not taken yet: it says EAGAIN."""
    while True:
        connection.settimeout(_time_left(deadline))
        try:
            connection.connect(path)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_CONNECT_PAUSE_S)


def _read_connect_reply(packet: bytes, descriptors: int) -> ConnectReply:
    """The server's answer. Raises what the server said, or Unimplemented for another layout."""
    if len(packet) != CONNECT_REPLY.size:
        raise _layout("connect_reply", f"{len(packet)} bytes", f"{CONNECT_REPLY.size} bytes")
    connect_reply = ConnectReply(*CONNECT_REPLY.unpack(packet))
    for name, got, wanted in (("connect_reply.magic", connect_reply.magic, HANDSHAKE_MAGIC),
                              ("connect_reply.version", connect_reply.version, HANDSHAKE_VERSION)):
        if got != wanted:
            raise _layout(name, got, wanted)
    if connect_reply.code != 0:
        text = connect_reply.message.rstrip(b"\0").decode(errors="replace")
        raise errors.from_code(connect_reply.code, f"shared memory: {text}")
    if descriptors != 1 and not (descriptors == 2 and connect_reply.flags & HAS_DEVICE):
        raise _layout("connect_reply", f"{descriptors} descriptors", "1 descriptor")
    return connect_reply


def check_region(connect_reply: ConnectReply, descriptor: int, wanted: int) -> None:
    """The memory must be as large as said and sealed, or an access could end this process; and its
    arena as large as wanted, or mapping it could take all memory."""
    size = os.fstat(descriptor).st_size
    if size != connect_reply.region_bytes or not connect_reply.arena_offset < size:
        raise _layout("connect_reply.region_bytes", connect_reply.region_bytes,
                      f"{size}, the memory's size")
    _check_offset(connect_reply)
    arena = size - connect_reply.arena_offset
    if not wanted <= arena <= wanted + _MOST_ROUNDING:
        raise _layout("connect_reply.arena_bytes", arena, f"{wanted}, as it was asked for")
    if not fcntl.fcntl(descriptor, _GET_SEALS) & _SEAL_SHRINK:
        raise _layout("region", "memory that can shrink", "sealed memory")


def ring_end(entries: int) -> int:
    """Bytes of a ring."""
    size = RING_HEADER_BYTES + entries * (2 * ENTRY_BYTES + REPLY_SLOT_BYTES)
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _device_part(entries: int) -> int:
    """Size of the part after a ring that describes its device memory."""
    size = device_memory.HEADER.size + entries * device_memory.HANDLE_BYTES
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _check_offset(connect_reply: ConnectReply) -> None:
    """The arena must begin where the ring ends, or at once if there is none."""
    entries = connect_reply.ring_entries
    if entries & (entries - 1):
        raise _layout("connect_reply.ring_entries", entries, "a power of two")
    end = ring_end(entries) if entries else 0
    if connect_reply.flags & HAS_DEVICE:
        end += _device_part(entries)
    if connect_reply.arena_offset != end:
        raise _layout("connect_reply.arena_offset", connect_reply.arena_offset, end)


def check_ring(connect_reply: ConnectReply, memory: mmap.mmap) -> None:
    """The ring's parts must lie where this client expects them."""
    entries = connect_reply.ring_entries
    if entries == 0:
        return
    completions = RING_HEADER_BYTES + entries * ENTRY_BYTES
    replies = completions + entries * ENTRY_BYTES
    header = RING_HEADER.unpack_from(memory, 0)
    wanted = (HANDSHAKE_MAGIC, entries, RING_HEADER_BYTES, completions, replies)
    for name, got, value in zip(("magic", "entries", "submissions_offset", "completions_offset",
                                 "replies_offset"), header, wanted):
        if got != value:
            raise _layout(f"ring.{name}", got, value)
