"""Shared memory with a server of the same host: a region, and tensors in its arena.

The server makes the region and passes it through a socket beside its own; every byte of that
exchange, and of the ring that may stand at the region's front, is defined in the repository's
proto/wire/ring_layout.h and checked here. When the connection ends the server forgets the region:
the memory stays readable, but nothing reaches the server through it any more.
Threading: any thread, except that a Placement or Buffers belongs to one call at a time.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import struct
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from mla_client import errors, wire
from mla_client.shm import device as device_memory
from mla_client.shm.blocks import Blocks
from mla_client.types import AttendArgs, Buffers, DType, Geometry, Profile

HANDSHAKE_MAGIC = 0x314D4853  # "SHM1"
HANDSHAKE_VERSION = 1
WANT_RING, WANT_DEVICE = 1, 2  # flags of the request
HAS_DEVICE = 1  # of the reply
ALIGNMENT = 64
TEXT_BYTES = 128
CONNECT_REQUEST = struct.Struct("<IHHQII128s")
CONNECT_REPLY = struct.Struct("<IHHiI16sQQQII128s")
# magic, entries, offsets of submissions, completions and reply slots.
RING_HEADER = struct.Struct("<IIQQQ")
RING_HEADER_BYTES = 320
ENTRY_BYTES = 64
REPLY_SLOT_BYTES = 1024
PAGE_BYTES = 4096
# Of Linux; a Python that was built for an old C library has no names for them.
_POPULATE = 0x8000  # MAP_POPULATE: the pages are there already, so map them at once
_GET_SEALS, _SEAL_SHRINK = 1034, 2
_CONNECT_PAUSE_S = 0.005  # between attempts while the server has connections to take
_ATTEMPTS = 5  # connections that are tried when the server closes them without an answer

_ENDED = select.POLLIN | select.POLLRDHUP


def aligned(size: int) -> int:
    """The next multiple of a tensor's alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class ConnectReply(NamedTuple):
    """What the server says about the region that it made."""

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


class Place(NamedTuple):
    """Where Buffers lie."""

    memory: "SharedMemory"
    in_offset: int
    in_length: int
    out_offset: int
    out_length: int
    on_device: bool = False


class Placement:
    """Where one message's tensors lie: offsets from the region's start, lengths in bytes."""

    __slots__ = ("in_offset", "in_length", "out_offset", "out_length", "o", "lse", "lists",
                 "blocks", "on_device")

    def __init__(self) -> None:
        self.in_offset = self.in_length = self.out_offset = self.out_length = 0
        self.o: Optional[npt.NDArray] = None    # of the wire's type
        self.lse: Optional[npt.NDArray] = None
        self.lists: Optional[npt.NDArray] = None
        self.blocks: List[int] = []             # to be freed after the answer
        self.on_device = False                  # offsets are those of the device memory


class DeviceWish(NamedTuple):
    """Device memory that a client asks for beside a ring."""

    mib: int = 0       # 0: none
    device: int = 0    # of this process, by the runtime's order
    library: str = ""  # of the runtime; empty: by its usual names


class SharedMemory:
    """A region and the connection that keeps it."""

    def __init__(self, connection: socket.socket, connect_reply: ConnectReply,
                 descriptor: int, device_descriptor: Optional[int] = None,
                 wish: DeviceWish = DeviceWish()) -> None:
        """Takes over the region's descriptor and the connection. Unimplemented if the region is not
        laid out as agreed."""
        self._connection = connection
        self.handle = connect_reply.handle
        self.boot_id = connect_reply.boot_id
        self.ring_entries = connect_reply.ring_entries
        self.arena_offset = connect_reply.arena_offset
        self.arena_bytes = connect_reply.region_bytes - connect_reply.arena_offset
        self.ended = False
        self.freed = 0  # blocks given back so far: changes whenever there may be more room
        try:
            _check_region(connect_reply, descriptor)
            self.map = mmap.mmap(descriptor, connect_reply.region_bytes,
                                 flags=mmap.MAP_SHARED | _POPULATE)
        finally:
            os.close(descriptor)
        _check_ring(connect_reply, self.map)
        self.address = np.frombuffer(self.map, np.uint8).__array_interface__["data"][0]
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._blocks = Blocks(self.arena_offset, self.arena_bytes)
        self.device: Optional[device_memory.DeviceRegion] = None
        self.why_no_device = "none was asked for"
        if wish.mib > 0:
            self._map_device(connect_reply, device_descriptor, wish)
        self._buffers = 0  # blocks among them that no reply will give back

    @classmethod
    def connect(cls, path: str, *, tenant: str = "", size: int = 64 << 20, ring: bool = True,
                spin_us: int = 0, timeout_s: float = 30.0,
                wish: DeviceWish = DeviceWish()) -> "SharedMemory":
        """Asks the listener at that path for a region with `size` bytes of arena.

        `spin_us`: how long the server's thread should spin on the ring before it sleeps; it may
        grant less. `timeout_s` bounds connection and answer together: the server takes the
        region's pages first, which a busy machine can draw out. Unavailable: no listener;
        Unimplemented: another layout; otherwise what the server said when it refused.
        """
        name = tenant.encode()
        if len(name) >= TEXT_BYTES:
            raise errors.InvalidArgument(
                f"shared memory: tenant: got {len(name)} bytes, at most {TEXT_BYTES - 1}")
        if not ring:
            wish = DeviceWish()
        flags = WANT_RING * ring | WANT_DEVICE * (wish.mib > 0)
        request = CONNECT_REQUEST.pack(HANDSHAKE_MAGIC, HANDSHAKE_VERSION, flags, size, spin_us,
                                       wish.mib, name)
        deadline = time.monotonic() + timeout_s
        for _ in range(_ATTEMPTS):
            memory = cls._exchange(path, request, deadline, wish)
            if memory is not None:
                return memory
        raise errors.Unavailable(
            "shared memory: the server closed the connection without an answer")

    @classmethod
    def _exchange(cls, path: str, request: bytes, deadline: float,
                  wish: DeviceWish) -> Optional["SharedMemory"]:
        """One connection: the request and its answer. None if the server closed it without an
        answer, as one with too many connections may do before it has read the request."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        descriptors: List[int] = []
        try:
            _connect(connection, path, deadline)
            try:
                connection.sendall(request)
                connection.settimeout(_time_left(deadline))
                packet, descriptors, _, _ = socket.recv_fds(connection, CONNECT_REPLY.size, 2)
            except (BrokenPipeError, ConnectionResetError):
                packet = b""
            if not packet:
                connection.close()
                return None
            connect_reply = _read_connect_reply(packet, len(descriptors))
            return cls(connection, connect_reply, descriptors.pop(0),
                       descriptors[0] if descriptors else None, wish)
        except OSError as error:
            connection.close()
            raise errors.Unavailable(f"shared memory: {path}: {error}") from error
        except BaseException:
            connection.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    # --- Connection

    def connected(self) -> bool:
        """False once either side has given the connection up."""
        return not self.ended and not self._wait_for_end(0)

    def close(self, timeout_s: float) -> None:
        """Gives the connection up; returns once the server has ended its side (a ring's steps are
        aborted then), or after that time."""
        if not self.ended:
            try:
                self._connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # ended by the other side in the meantime
            self._wait_for_end(timeout_s)
        self.disconnect()

    def disconnect(self) -> None:
        """Gives the connection up at once."""
        with self._lock:
            self.ended = True
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it had ended already
            self._room.notify_all()

    def _wait_for_end(self, timeout_s: float) -> bool:
        poller = select.poll()  # one for all threads would refuse the second
        poller.register(self._connection, _ENDED)
        return bool(poller.poll(timeout_s * 1e3))

    def __del__(self) -> None:
        self._connection.close()

    # --- Device memory

    def _map_device(self, connect_reply: ConnectReply, descriptor: Optional[int],
                    wish: DeviceWish) -> None:
        """Maps it; a client without it sends its tensors another way, so this fails nothing."""
        if not connect_reply.flags & HAS_DEVICE:
            said = connect_reply.message.rstrip(b"\0").decode(errors="replace")
            self.why_no_device = said or "the server offers none"
            return
        at = _ring_end(self.ring_entries)
        try:
            self.device = device_memory.DeviceRegion(
                self.map[at:self.arena_offset], descriptor, self.ring_entries, wish.device,
                wish.library)
        except errors.MlaError as error:
            self.why_no_device = str(error)
            return

    def device_buffers(self, geometry: Geometry, profile: Profile, rows: int, heads: int,
                       row_dim: int, want_lse: bool, dtype: DType, o_dtype: DType) -> Buffers:
        """As `buffers`, in device memory. Unavailable without it, ResourceExhausted without
        room."""
        device = self.device
        if device is None:
            raise errors.Unavailable(f"device memory: {self.why_no_device}")
        lengths = _lengths(wire.sizes(geometry, profile, rows, heads, row_dim, want_lse, dtype,
                                      o_dtype))
        offsets, free = device.allocate(*lengths), device.free
        place = Place(self, offsets[0], lengths[0], offsets[1], lengths[1], True)
        kv_rows, q, o, lse = _tensors(device.array, place, geometry, profile, rows, heads, row_dim,
                                      want_lse, dtype, o_dtype)
        return Buffers(kv_rows, q, o, lse, dtype, place, lambda: free(offsets))

    # --- Arena

    def allocate(self, *sizes: int) -> Optional[List[int]]:
        """Offsets of that many bytes each, at multiples of 64, or None, and nothing is taken, if
        there is no such room."""
        with self._lock:
            offsets: List[int] = []
            for size in sizes:
                offset = self._blocks.take(aligned(max(size, 1)))
                if offset is None:
                    for taken in offsets:
                        self._blocks.give(taken)
                    return None
                offsets.append(offset)
            return offsets

    def free(self, offsets: Sequence[int]) -> None:
        """Gives back what `allocate` returned."""
        with self._lock:
            for offset in offsets:
                self._blocks.give(offset)
            self.freed += 1
            self._room.notify_all()

    def exhausted(self, seen: int) -> bool:
        """True if Buffers alone hold memory and `freed` is still what was seen: what did not fit
        will not fit later either."""
        with self._lock:
            return self.freed == seen and len(self._blocks.used) == self._buffers

    def wait_for_room(self, seen: int, deadline: float) -> bool:
        """Waits until `freed` differs from what was seen or the connection has ended; False if the
        deadline comes first."""
        with self._room:
            return self._room.wait_for(lambda: self.freed != seen or self.ended,
                                       max(0.0, deadline - time.monotonic()))

    def array(self, offset: int, shape: Tuple[int, ...], dtype: Any) -> npt.NDArray:
        """The bytes at an offset as an array. It keeps the memory mapped."""
        return np.ndarray(shape, dtype, self.map, offset)

    # --- Tensors

    def buffers(self, geometry: Geometry, profile: Profile, rows: int, heads: int, row_dim: int,
                want_lse: bool, dtype: DType, o_dtype: DType) -> Optional[Buffers]:
        """Memory for the tensors of calls of that shape, with KV rows of `row_dim` elements or, if
        that is 0, without; None if there is no room."""
        in_length, out_length = _lengths(wire.sizes(geometry, profile, rows, heads, row_dim,
                                                    want_lse, dtype, o_dtype))
        offsets = self.allocate(in_length, out_length)
        if offsets is None:
            return None
        with self._lock:
            self._buffers += len(offsets)
        place = Place(self, offsets[0], in_length, offsets[1], out_length)
        kv_rows, q, o, lse = _tensors(self.array, place, geometry, profile, rows, heads, row_dim,
                                      want_lse, dtype, o_dtype)
        return Buffers(kv_rows, q, o, lse, dtype, place, lambda: self._free_both(place))

    def _free_both(self, place: Place) -> None:
        with self._lock:
            self._buffers -= 2
        self.free((place.in_offset, place.out_offset))

    def place(self, args: AttendArgs, chunk: wire.Chunk, geometry: Geometry) -> Optional[Placement]:
        """Puts one message's inputs into the arena and finds room for its outputs; tensors that lie
        right already stay where they are. None if there is no room."""
        placement = Placement()
        out = args.out  # if its memory is of use here
        if out is not None and (out.place is None or out.place.memory is not self
                                or chunk.rows != args.rows or chunk.heads != args.num_heads):
            out = None
        if (out is not None and args.q is out.q and args.kv is out.kv and args.lists is None
                and not args.q_parts and not args.kv_parts):
            (_, placement.in_offset, placement.in_length, placement.out_offset,
             placement.out_length, placement.on_device) = out.place
            placement.o, placement.lse = out.o, out.lse
            return placement
        row_dim = args.kv.shape[1] if chunk.has_kv and args.kv is not None else 0
        sizes = wire.sizes(geometry, args.profile, chunk.rows, chunk.heads, row_dim,
                           args.want_lse, args.dtype, args.o_dtype, args.wanted_lists,
                           args.q_parts, args.kv_parts, wire.entries_of(args, chunk))
        kv_end, o_end = aligned(sizes.kv), aligned(sizes.o)
        placement.in_length = kv_end + sizes.q if sizes.q else sizes.kv
        lists_at = aligned(placement.in_length)
        if args.lists is not None:
            placement.in_length = lists_at + wire.list_bytes(args, chunk.rows)
        placement.out_length = o_end + sizes.lse if sizes.lse else sizes.o
        lists_out_at = aligned(placement.out_length)
        if sizes.lists:  # not among the caller's buffers
            placement.out_length = lists_out_at + sizes.lists
            out = None
        copy_out = out is None and sizes.o > 0
        offsets = self.allocate(placement.in_length, *[placement.out_length] * copy_out)
        if offsets is None:
            return None
        placement.blocks = offsets
        at = placement.in_offset = offsets[0]
        for part in wire.request_arrays(args, chunk):
            sent = part.dtype if part.dtype == np.uint8 else args.dtype.numpy
            wire.encode_into(self.array(at, part.shape, sent), part)
            at += kv_end
        for lists in wire.lists_of(args, chunk):
            self.array(placement.in_offset + lists_at, lists.shape, lists.dtype)[...] = lists
        if out is not None:
            placement.out_offset = out.place.out_offset
            placement.o, placement.lse = out.o, out.lse
        elif copy_out:
            at = placement.out_offset = offsets[1]
            placement.o = self.array(at, (chunk.rows, chunk.heads, geometry.o_dim(args.profile)),
                                     args.o_dtype.numpy)
            if sizes.lse:
                placement.lse = self.array(at + o_end, (chunk.rows, chunk.heads), np.float32)
            if sizes.lists:
                placement.lists = self.array(at + lists_out_at, (chunk.rows, args.wanted_lists),
                                             np.dtype("<i4"))
        return placement

    def unplace(self, placement: Placement) -> None:
        """Gives back what `place` took. The outputs must have been read."""
        if placement.blocks:
            self.free(placement.blocks)
            placement.blocks = []


def _lengths(sizes: wire.Sizes) -> Tuple[int, int]:
    """Bytes of inputs and of outputs in one block each."""
    return (aligned(sizes.kv) + sizes.q if sizes.q else sizes.kv,
            aligned(sizes.o) + sizes.lse if sizes.lse else sizes.o)


def _tensors(array: Any, place: Place, geometry: Geometry, profile: Profile, rows: int, heads: int,
             row_dim: int, want_lse: bool, dtype: DType,
             o_dtype: DType) -> Tuple[Any, Any, Any, Any]:
    """kv, q, o and lse of such a place; None for those that the call does not have."""
    sizes = wire.sizes(geometry, profile, rows, heads, row_dim, want_lse, dtype, o_dtype)
    at_in, at_out = place.in_offset, place.out_offset
    return (array(at_in, (rows, row_dim), dtype.numpy) if row_dim else None,
            array(at_in + aligned(sizes.kv), (rows, heads, geometry.q_dim(profile)), dtype.numpy)
            if sizes.q else None,
            array(at_out, (rows, heads, geometry.o_dim(profile)), o_dtype.numpy)
            if sizes.o else None,
            array(at_out + aligned(sizes.o), (rows, heads), np.float32) if sizes.lse else None)


def _layout(name: str, got: Any, wanted: Any) -> errors.Unimplemented:
    """The server and this client do not agree on where things lie."""
    return errors.Unimplemented(f"shared memory: {name}: got {got}, must be {wanted}",
                                errors.ErrorDetail(field=name, got=str(got), limit=str(wanted),
                                                   reason="layout_mismatch"))


def _time_left(deadline: float) -> float:
    """Seconds until then, a positive number: 0 would make a socket one that never waits."""
    return max(deadline - time.monotonic(), 1e-3)


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


def _check_region(connect_reply: ConnectReply, descriptor: int) -> None:
    """The memory must be as large as said and sealed, or an access could end this process."""
    size = os.fstat(descriptor).st_size
    if size != connect_reply.region_bytes or not connect_reply.arena_offset < size:
        raise _layout("connect_reply.region_bytes", connect_reply.region_bytes,
                      f"{size}, the memory's size")
    if not fcntl.fcntl(descriptor, _GET_SEALS) & _SEAL_SHRINK:
        raise _layout("region", "memory that can shrink", "sealed memory")


def _ring_end(entries: int) -> int:
    """Bytes of a ring."""
    size = RING_HEADER_BYTES + entries * (2 * ENTRY_BYTES + REPLY_SLOT_BYTES)
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _device_part(entries: int) -> int:
    """Bytes behind a ring that say where its device memory is."""
    size = device_memory.HEADER.size + entries * device_memory.HANDLE_BYTES
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _check_ring(connect_reply: ConnectReply, memory: mmap.mmap) -> None:
    """The ring's parts must lie where this client expects them."""
    entries = connect_reply.ring_entries
    completions = RING_HEADER_BYTES + entries * ENTRY_BYTES
    replies = completions + entries * ENTRY_BYTES
    end = _ring_end(entries)
    if connect_reply.flags & HAS_DEVICE:
        end += _device_part(entries)
    if entries == 0:
        if connect_reply.arena_offset != 0:
            raise _layout("connect_reply.arena_offset", connect_reply.arena_offset, 0)
        return
    if entries & (entries - 1):
        raise _layout("connect_reply.ring_entries", entries, "a power of two")
    if connect_reply.arena_offset != end:
        raise _layout("connect_reply.arena_offset", connect_reply.arena_offset, end)
    header = RING_HEADER.unpack_from(memory, 0)
    wanted = (HANDSHAKE_MAGIC, entries, RING_HEADER_BYTES, completions, replies)
    for name, got, value in zip(("magic", "entries", "submissions_offset", "completions_offset",
                                 "replies_offset"), header, wanted):
        if got != value:
            raise _layout(f"ring.{name}", got, value)
