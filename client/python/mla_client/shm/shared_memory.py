"""Shared memory with a server of the same host: a region, and tensors in its arena.

The server makes the region and passes it through a socket next to its own (handshake.py). When the
connection ends the server forgets the region: the memory stays readable, but nothing reaches the
server through it any more. The same holds in a process that was forked from the client's.
Threading: any thread, except that a Placement or Buffers belongs to one call at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import socket
import threading
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from mla_client import errors, wire
from mla_client.base import gates, process
from mla_client.shm import device as device_memory
from mla_client.shm import handshake
from mla_client.shm.blocks import Blocks
from mla_client.types import AttendArgs, Buffers, DType, Geometry, Profile

# Linux's MAP_POPULATE, for which old Pythons have no name: the pages are there already.
_POPULATE = 0x8000
_FIXED, _NORESERVE = 0x10, 0x4000  # MAP_FIXED and MAP_NORESERVE
ALIGNMENT = 64
_ENDED = select.POLLIN | select.POLLRDHUP


def aligned(size: int) -> int:
    """The next multiple of a tensor's alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


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
        self.on_device = False                  # offsets count in device memory


class DeviceWish(NamedTuple):
    """Device memory that a client asks for in addition to a ring."""

    mib: int = 0       # 0: none
    device: int = 0    # of this process, by the runtime's order
    library: str = ""  # of the runtime; empty: by its usual names
    pins: bool = False  # the region is registered with the GPU's driver


class SharedMemory:
    """A region and the connection that keeps it."""

    def __init__(self, connection: socket.socket, connect_reply: handshake.ConnectReply,
                 descriptor: int, wanted: int, device_descriptor: Optional[int] = None,
                 wish: DeviceWish = DeviceWish()) -> None:
        """Takes over the region's descriptor and the connection. Unimplemented if the region is not
        laid out as agreed, with an arena of the `wanted` bytes."""
        self._connection = connection
        self.handle = connect_reply.handle
        self.boot_id = connect_reply.boot_id
        self.ring_entries = connect_reply.ring_entries
        self.arena_offset = connect_reply.arena_offset
        self.arena_bytes = connect_reply.region_bytes - connect_reply.arena_offset
        self.ended = False
        self.freed = 0  # blocks given back so far: changes whenever there may be more room
        try:
            handshake.check_region(connect_reply, descriptor, wanted)
            self.map = mmap.mmap(descriptor, connect_reply.region_bytes,
                                 flags=mmap.MAP_SHARED | _POPULATE)
        finally:
            os.close(descriptor)
        handshake.check_ring(connect_reply, self.map)
        self.address = np.frombuffer(self.map, np.uint8).__array_interface__["data"][0]
        self._left = False  # in a child that was forked, where no thread may give a lock back
        self._lock = threading.Lock()
        self._room = gates.Gates()
        self._blocks = Blocks(self.arena_offset, self.arena_bytes)
        self.device: Optional[device_memory.DeviceRegion] = None
        self.why_no_device = "none was asked for"
        if wish.mib > 0:
            self._map_device(connect_reply, device_descriptor, wish)
        self._buffers = 0  # blocks among them that no reply will give back
        process.leave_at_fork(self)

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
        if len(name) >= handshake.TEXT_BYTES:
            raise errors.InvalidArgument(
                f"shared memory: tenant: got {len(name)} bytes, at most {handshake.TEXT_BYTES - 1}")
        if not ring:
            wish = DeviceWish()
        flags = handshake.WANT_RING * ring | handshake.WANT_DEVICE * (wish.mib > 0)
        request = handshake.CONNECT_REQUEST.pack(
            handshake.HANDSHAKE_MAGIC, handshake.HANDSHAKE_VERSION, flags, size, spin_us, wish.mib,
            name)
        answer = handshake.ask(path, request, timeout_s)
        descriptors = answer.descriptors
        try:
            return cls(answer.connection, answer.reply, descriptors.pop(0), size,
                       descriptors[0] if descriptors else None, wish)
        except BaseException:
            answer.connection.close()
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
        if self._left:
            return
        with self._lock:
            self.ended = True
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it had ended already
        self._room.open()

    def leave(self) -> None:
        """In a child that was forked: the region is the parent's. Empty pages take the place of the
        child's view, so that nothing that the child writes reaches the server. Its copy of the
        connection is closed, or the server would not see the parent's end."""
        self._left = self.ended = True
        self._connection.close()
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap(ctypes.c_void_p(self.address), ctypes.c_size_t(len(self.map)),
                  mmap.PROT_READ | mmap.PROT_WRITE,
                  mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | _NORESERVE, -1,
                  ctypes.c_long(0))

    def _wait_for_end(self, timeout_s: float) -> bool:
        poller = select.poll()  # one for all threads would refuse the second
        poller.register(self._connection, _ENDED)
        return bool(poller.poll(timeout_s * 1e3))

    def __del__(self) -> None:
        self._connection.close()

    # --- Device memory

    def check_granted(self) -> None:
        """Unavailable if the server has not granted the device memory that was asked for."""
        if self.device is None:
            raise errors.Unavailable(
                f"device_bytes: the server grants none: {self.why_no_device}; raise its "
                "shm.device_bytes, shm.total_bytes and tenants.region_bytes, or ask for 0")

    def _map_device(self, connect_reply: handshake.ConnectReply, descriptor: Optional[int],
                    wish: DeviceWish) -> None:
        """Maps it; a client without it sends its tensors another way, so this fails nothing."""
        if not connect_reply.flags & handshake.HAS_DEVICE:
            said = connect_reply.message.rstrip(b"\0").decode(errors="replace")
            self.why_no_device = said or "the server offers none"
            return
        start = handshake.ring_end(self.ring_entries)
        try:
            self.device = device_memory.DeviceRegion(
                self.map[start:self.arena_offset], descriptor, self.ring_entries, wish.device,
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
        layout = _Layout(wire.sizes(geometry, profile, rows, heads, row_dim, want_lse, dtype,
                                    o_dtype))
        offsets, free = device.allocate(layout.in_length, layout.out_length), device.free
        place = Place(self, offsets[0], layout.in_length, offsets[1], layout.out_length, True)
        kv_rows, q, o, lse = _tensors(device.array, place, geometry, profile, rows, heads, row_dim,
                                      want_lse, dtype, o_dtype)
        return Buffers(kv_rows, q, o, lse, dtype, place, lambda: free(offsets))

    # --- Arena

    def allocate(self, *sizes: int) -> Optional[List[int]]:
        """Takes blocks of these sizes and returns their offsets, which are multiples of 64. Returns
        None and takes nothing if one of them does not fit."""
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
        if self._left:
            return
        with self._lock:
            for offset in offsets:
                self._blocks.give(offset)
            self.freed += 1
        self._room.open()

    def exhausted(self, seen: int) -> bool:
        """True if Buffers alone hold memory and `freed` is still what was seen: what did not fit
        will not fit later either."""
        with self._lock:
            return self.freed == seen and len(self._blocks.used) == self._buffers

    def wait_for_room(self, seen: int, deadline: float) -> bool:
        """Waits until `freed` differs from what was seen or the connection has ended; False if the
        deadline comes first."""
        return self._room.wait(lambda: self.freed != seen or self.ended, deadline)

    def array(self, offset: int, shape: Tuple[int, ...], dtype: Any) -> npt.NDArray:
        """The bytes at an offset as an array. It keeps the memory mapped."""
        return np.ndarray(shape, dtype, self.map, offset)

    # --- Tensors

    def buffers(self, geometry: Geometry, profile: Profile, rows: int, heads: int, row_dim: int,
                want_lse: bool, dtype: DType, o_dtype: DType) -> Optional[Buffers]:
        """Takes memory for the tensors of calls of that shape, with KV rows of `row_dim` elements,
        or without KV rows if that is 0. None if the memory is not free."""
        layout = _Layout(wire.sizes(geometry, profile, rows, heads, row_dim, want_lse, dtype,
                                    o_dtype))
        offsets = self.allocate(layout.in_length, layout.out_length)
        if offsets is None:
            return None
        with self._lock:
            self._buffers += len(offsets)
        place = Place(self, offsets[0], layout.in_length, offsets[1], layout.out_length)
        kv_rows, q, o, lse = _tensors(self.array, place, geometry, profile, rows, heads, row_dim,
                                      want_lse, dtype, o_dtype)
        return Buffers(kv_rows, q, o, lse, dtype, place, lambda: self._free_both(place))

    def _free_both(self, place: Place) -> None:
        if self._left:
            return
        with self._lock:
            self._buffers -= 2
        self.free((place.in_offset, place.out_offset))

    def place(self, args: AttendArgs, chunk: wire.Chunk, geometry: Geometry) -> Optional[Placement]:
        """Puts one message's inputs into the arena and finds room for its outputs. Tensors that
        already lie in the right places are used there. None if the room is not free."""
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
        layout = _Layout(sizes, 0 if args.lists is None else wire.list_bytes(args, chunk.rows))
        placement.in_length, placement.out_length = layout.in_length, layout.out_length
        if sizes.lists:  # not among the caller's buffers
            out = None
        copy_out = out is None and sizes.o > 0
        offsets = self.allocate(placement.in_length, *[placement.out_length] * copy_out)
        if offsets is None:
            return None
        placement.blocks = offsets
        offset = placement.in_offset = offsets[0]
        for part in wire.request_arrays(args, chunk):
            sent = part.dtype if part.dtype == np.uint8 else args.dtype.numpy
            wire.encode_into(self.array(offset, part.shape, sent), part)
            offset += layout.q
        for lists in wire.lists_of(args, chunk):
            self.array(placement.in_offset + layout.lists, lists.shape, lists.dtype)[...] = lists
        if out is not None:
            placement.out_offset = out.place.out_offset
            placement.o, placement.lse = out.o, out.lse
        elif copy_out:
            offset = placement.out_offset = offsets[1]
            placement.o = self.array(
                offset, (chunk.rows, chunk.heads, geometry.o_dim(args.profile)), args.o_dtype.numpy)
            if sizes.lse:
                placement.lse = self.array(offset + layout.lse, (chunk.rows, chunk.heads),
                                           np.float32)
            if sizes.lists:
                placement.lists = self.array(offset + layout.lists_out,
                                             (chunk.rows, args.wanted_lists), np.dtype("<i4"))
        return placement

    def unplace(self, placement: Placement) -> None:
        """Gives back what `place` took. The outputs must have been read."""
        if placement.blocks:
            self.free(placement.blocks)
            placement.blocks = []


class _Layout:
    """Where the tensors of one message lie: bytes from the begin of the block of inputs (kv, q,
    lists) or of outputs (o, lse, lists). The rule is AttendLayout's of
    proto/wire/attend_layout.h."""

    def __init__(self, sizes: wire.Sizes, list_bytes: int = 0) -> None:
        self.q = aligned(sizes.kv)
        in_end = self.q + sizes.q if sizes.q else sizes.kv
        self.lists = aligned(in_end)
        self.in_length = self.lists + list_bytes if list_bytes else in_end
        self.lse = aligned(sizes.o)
        out_end = self.lse + sizes.lse if sizes.lse else sizes.o
        self.lists_out = aligned(out_end)
        self.out_length = self.lists_out + sizes.lists if sizes.lists else out_end


def _tensors(array: Any, place: Place, geometry: Geometry, profile: Profile, rows: int, heads: int,
             row_dim: int, want_lse: bool, dtype: DType,
             o_dtype: DType) -> Tuple[Any, Any, Any, Any]:
    """Returns kv, q, o and lse at the offsets of `place`; None for a tensor that the call does not
    have."""
    sizes = wire.sizes(geometry, profile, rows, heads, row_dim, want_lse, dtype, o_dtype)
    layout = _Layout(sizes)
    inputs, outputs = place.in_offset, place.out_offset
    return (array(inputs, (rows, row_dim), dtype.numpy) if row_dim else None,
            array(inputs + layout.q, (rows, heads, geometry.q_dim(profile)), dtype.numpy)
            if sizes.q else None,
            array(outputs, (rows, heads, geometry.o_dim(profile)), o_dtype.numpy)
            if sizes.o else None,
            array(outputs + layout.lse, (rows, heads), np.float32) if sizes.lse else None)
