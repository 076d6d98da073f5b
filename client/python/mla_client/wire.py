"""Framing of Attend messages, splitting of work under the message bound, tensors as bytes.

`payload` is the highest field of its message, so a message is the serialized header followed by the
tag, the length and the tensor bytes: the tensors are joined into the message once and never pass
through a protobuf object.
"""

from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence as Seq, Tuple

import numpy as np
import numpy.typing as npt

from mla_client import arrays, bf16, errors
from mla_client.types import (AttendArgs, AttendResult, DType, Geometry, ModelSpec, Profile,
                              Timings)

# Tag of field 2047 with wire type 2 (length-delimited), as a varint.
_PAYLOAD_TAG = bytes([0xFA, 0x7F])
# Room for the header of a message and of its reply.
HEADER_BYTES = 4096
LARGEST = 2**32 - 1  # largest index of the contract
LARGEST_POSITION = 2**64 - 1


class Chunk(NamedTuple):
    """A part of an attend call that fits one message each way."""

    row_begin: int  # within the call
    rows: int
    head_begin: int  # within the call
    heads: int
    has_kv: bool


class Sizes(NamedTuple):
    """Bytes of the tensors of one message."""

    kv: int
    q: int
    o: int
    lse: int
    lists: int = 0  # in the reply


def list_bytes(args: AttendArgs, rows: int) -> int:
    """Bytes of the index lists or inputs of `rows` rows."""
    return 0 if args.lists is None else rows * args.lists.shape[1] * args.lists.itemsize


def vector_bytes(dim: int, dtype: DType, parts: Tuple[int, ...]) -> int:
    """Bytes of a query head or KV row of `dim` elements as it is sent, `parts` as AttendArgs."""
    return dim + 4 * len(parts) if parts and dim else dim * dtype.size


def sizes(geometry: Geometry, profile: Profile, rows: int, heads: int, row_dim: int, want_lse: bool,
          dtype: DType, o_dtype: DType, wanted_lists: int = 0, q_parts: Tuple[int, ...] = (),
          kv_parts: Tuple[int, ...] = (), entries: int = 0) -> Sizes:
    """Bytes that a message of this shape carries in each direction. `row_dim` is the number of
    elements of a KV row as sent, or 0 without KV rows; `entries` follow the rows."""
    kv = (rows + entries) * vector_bytes(row_dim, dtype, kv_parts)
    if profile == Profile.APPEND_ONLY:
        return Sizes(kv, 0, 0, 0)
    pairs = rows * heads
    return Sizes(kv, pairs * vector_bytes(geometry.q_dim(profile), dtype, q_parts),
                 pairs * geometry.o_dim(profile) * o_dtype.size, pairs * 4 if want_lse else 0,
                 rows * wanted_lists * 4)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def frame(header: bytes, parts: List[npt.NDArray]) -> bytes:
    """A serialized header with the arrays as its payload; one copy."""
    size = sum(part.nbytes for part in parts)
    if size == 0:
        return header
    return b"".join([header, _PAYLOAD_TAG, _varint(size), *(part.data.cast("B") for part in parts)])


def encode(values: npt.NDArray, dtype: DType) -> npt.NDArray:
    """Little-endian contiguous array of the wire type; uint16 input is bf16 patterns already."""
    if dtype == DType.BF16:
        values = values if values.dtype == np.uint16 else bf16.to_bf16(values)
        return np.ascontiguousarray(values, dtype="<u2")
    if values.dtype == np.uint16:
        values = bf16.from_bf16(values)
    return np.ascontiguousarray(values, dtype="<f4")


def encode_into(target: npt.NDArray, values: npt.NDArray) -> None:
    """Writes values, uint16 being bf16 patterns, into a contiguous array of either wire type."""
    if target.dtype == values.dtype:
        target[...] = values
    elif target.dtype == np.uint16:
        bf16.to_bf16(values, target)
    else:
        decode_into(target, values)


def decode_into(target: npt.NDArray, values: npt.NDArray) -> None:
    """Writes an array of either wire type into one of float32 or of the same type."""
    if values.dtype == np.uint16 and target.dtype != np.uint16:
        bf16.from_bf16(values, target)
    elif target is not values:
        target[...] = values


def kv_parts(kv_row_dtype: Optional[DType], dtype: DType, spec: ModelSpec) -> Tuple[int, ...]:
    """Value of AttendArgs.kv_parts; `dtype` is the type that the server decodes queries to."""
    if kv_row_dtype == DType.F8_E4M3:
        return spec.kv_parts
    if kv_row_dtype is not None and kv_row_dtype != dtype:
        raise errors.InvalidArgument(f"attend.kv_row_dtype: got {DType(kv_row_dtype).name}, must "
                                     f"be F8_E4M3, or {dtype.name} as q")
    return ()


def message_heads(args: AttendArgs, heads: int, geometry: Geometry) -> int:
    """Attend.num_heads of a message with `heads` of AttendArgs.num_heads."""
    return geometry.num_heads if args.profile == Profile.PROJECTED else heads


def output_dtype(dtype: DType) -> DType:
    if dtype == DType.F8_E4M3:
        raise errors.InvalidArgument("attend.o_dtype: got F8_E4M3, must be BF16 or F32")
    return DType(dtype)


def check_number(name: str, number: int, limit: int = LARGEST) -> None:
    """INVALID_ARGUMENT unless the number is 0..most."""
    if not 0 <= number <= limit:
        raise errors.InvalidArgument(
            f"{name}: got {number}, must be 0..{limit}",
            errors.ErrorDetail(field=name, got=str(number), limit=f"0..{limit}"))


def check_numbers(name: str, numbers: Seq[int], limit: int = LARGEST) -> None:
    """As check_number, for each of them."""
    if numbers and not (0 <= min(numbers) and max(numbers) <= limit):
        for index, number in enumerate(numbers):
            check_number(f"{name}[{index}]", number, limit)


def check_shape(name: str, array: Optional[npt.NDArray], shape: Optional[Tuple[int, ...]]) -> None:
    """INVALID_ARGUMENT unless the array has this shape; None means no array."""
    got = None if array is None else array.shape
    if got != shape:
        raise errors.InvalidArgument(f"{name}: got shape {got}, must be {shape}")


def index_inputs(queries: npt.NDArray, weights: npt.NDArray, rows: int, spec: ModelSpec,
                  dtype: DType) -> npt.NDArray[np.uint8]:
    """The indexer's input for each row, as bytes: its queries, then the weights of its heads."""
    if spec.index_heads == 0:
        raise errors.InvalidArgument("attend.index: the model was registered without index_heads")
    queries = arrays.floats("attend.index_queries", queries)
    weights = arrays.numbers("attend.head_weights", weights).astype("<f4", copy=False)
    check_shape("attend.index_queries", queries, (rows, spec.index_heads, spec.index_dim))
    check_shape("attend.head_weights", weights, (rows, spec.index_heads))
    return np.concatenate([encode(queries, dtype).reshape(rows, -1).view(np.uint8),
                           np.ascontiguousarray(weights).view(np.uint8)], axis=1)


def with_entries(spec: ModelSpec, kv: Optional[npt.NDArray], entries: Optional[npt.NDArray],
                 ends: npt.NDArray[np.int64], parts: Tuple[int, ...]
                 ) -> Tuple[Optional[npt.NDArray], Optional[npt.NDArray[np.int64]]]:
    """Appends the entries that KV rows complete, and returns them with AttendArgs.entry_ends.
    `ends` are ModelSpec.entry_ends before the first row and after each row."""
    if spec.window == 0:
        if entries is not None:
            raise errors.InvalidArgument("attend.entries: the model has none")
        return kv, None
    if parts and kv is not None:
        raise errors.InvalidArgument("attend.kv_row_dtype: got F8_E4M3, must be as q or BF16: "
                                     "entries of the model come with its rows")
    own = ends - ends[:1]
    count = int(own[-1]) if kv is not None and len(own) else 0
    given = np.zeros((0, spec.sent_row_dim), np.float32) if entries is None else entries
    check_shape("attend.entries", given, (count, spec.sent_row_dim))
    if count == 0 or kv is None:
        return kv, own
    if kv.dtype != given.dtype:  # one of the two has bf16 patterns
        kv, given = (bf16.from_bf16(one) if one.dtype == np.uint16 else one for one in (kv, given))
    return np.concatenate([kv, given]), own


def index_lists(lists: Any, rows: int, spec: ModelSpec) -> npt.NDArray[np.int32]:
    """[rows, top_k], filled with -1."""
    if spec.top_k == 0:
        raise errors.InvalidArgument(
            "attend.lists: the model's attention is dense, or takes no lists")
    if len(lists) != rows:
        raise errors.InvalidArgument(f"attend.lists: got {len(lists)} lists, must be {rows}")
    filled = np.full((rows, spec.top_k), -1, "<i4")
    for row, given in enumerate(lists):
        entries = np.asanyarray(given)
        if entries.ndim != 1 or len(entries) > spec.top_k:
            raise errors.InvalidArgument(f"attend.lists[{row}]: got shape {entries.shape}, must be "
                                         f"one of at most {spec.top_k} entries")
        if not len(entries):
            continue
        # A mask of positions is not a list of positions.
        if entries.dtype.kind not in "iu" or isinstance(entries, np.ma.MaskedArray) or (
                not np.array_equal(entries.astype(np.int32), entries)):
            raise errors.InvalidArgument(f"attend.lists[{row}]: got {entries.dtype}, must be "
                                         "int32 positions")
        filled[row, :len(entries)] = entries
    return filled


def chunks(args: AttendArgs, geometry: Geometry, message_bytes: int) -> Iterator[Chunk]:
    """Splits a call so that each request and each reply stays below `message_bytes`.

    Rows are split first, in order. If one row of all heads is too large, heads are split too, and
    the row's KV goes with its first head slice.
    """
    room = message_bytes - HEADER_BYTES
    kv_bytes = (vector_bytes(args.kv.shape[1], args.dtype, args.kv_parts)
                if args.kv is not None else 0)
    # A row makes one entry whole at most.
    row_bytes = kv_bytes * (1 if args.entry_ends is None else 2) + list_bytes(args, 1)
    head_in = vector_bytes(geometry.q_dim(args.profile), args.dtype, args.q_parts)
    head_out = geometry.o_dim(args.profile) * args.o_dtype.size + (4 if args.want_lse else 0)
    row_out = 4 * args.wanted_lists
    heads = args.num_heads if args.profile != Profile.APPEND_ONLY else 0
    heads_that_fit = heads
    if heads:
        heads_that_fit = min(heads, (room - row_bytes) // head_in, (room - row_out) // head_out)
    if room < row_bytes or (heads and heads_that_fit < 1):
        raise ValueError(f"message_bytes: got {message_bytes}, too small for one row of one head")
    if heads_that_fit < heads:
        for row in range(args.rows):
            for head in range(0, heads, heads_that_fit):
                yield Chunk(row, 1, head, min(heads_that_fit, heads - head),
                          head == 0 and kv_bytes > 0)
        return
    rows_that_fit = room // max(row_bytes + heads * head_in, heads * head_out + row_out, 1)
    for row in range(0, args.rows, rows_that_fit):
        yield Chunk(row, min(rows_that_fit, args.rows - row), 0, heads, kv_bytes > 0)


def entries_of(args: AttendArgs, chunk: Chunk) -> int:
    """Number of entries after the KV rows of a chunk."""
    if args.entry_ends is None or not chunk.has_kv:
        return 0
    return int(args.entry_ends[chunk.row_begin + chunk.rows] - args.entry_ends[chunk.row_begin])


def _kv_of(args: AttendArgs, chunk: Chunk) -> npt.NDArray:
    assert args.kv is not None
    own = args.kv[chunk.row_begin:chunk.row_begin + chunk.rows]
    if args.entry_ends is None:
        return own
    first = args.rows + int(args.entry_ends[chunk.row_begin])
    return np.concatenate([own, args.kv[first:first + entries_of(args, chunk)]])


def request_arrays(args: AttendArgs, chunk: Chunk) -> List[npt.NDArray]:
    """Arrays that one chunk sends, KV rows if it carries them, then queries: as the caller gave it,
    or as bytes if it is sent as F8_E4M3."""
    whole = chunk.rows == args.rows and chunk.heads in (args.num_heads, 0)
    rows = slice(chunk.row_begin, chunk.row_begin + chunk.rows)
    arrays = []
    if chunk.has_kv and args.kv is not None:
        kv = args.kv if whole else _kv_of(args, chunk)
        arrays.append(bf16.to_e4m3(kv, args.kv_parts) if args.kv_parts else kv)
    if args.q is not None:
        q = args.q if whole else args.q[rows, chunk.head_begin:chunk.head_begin + chunk.heads]
        arrays.append(bf16.to_e4m3(q, args.q_parts) if args.q_parts else q)
    return arrays


def lists_of(args: AttendArgs, chunk: Chunk) -> List[npt.NDArray]:
    """The index lists or inputs of one chunk, if there are any, in a list."""
    if args.lists is None:
        return []
    return [args.lists[chunk.row_begin:chunk.row_begin + chunk.rows]]


def request_parts(args: AttendArgs, chunk: Chunk) -> List[npt.NDArray]:
    """The payload of one chunk."""
    parts = [array if array.dtype == np.uint8 else encode(array, args.dtype)
             for array in request_arrays(args, chunk)]
    return parts + lists_of(args, chunk)


class ResultAssembler:
    """Puts the replies of a call's chunks together, in new arrays or in the caller's buffers."""

    def __init__(self, args: AttendArgs, geometry: Geometry) -> None:
        self._args = args
        self._o_dim = geometry.o_dim(args.profile)
        self._o: Optional[npt.NDArray] = None
        self._lse: Optional[npt.NDArray] = None
        self._lists: Optional[npt.NDArray[np.int32]] = None
        self._timings: List[Timings] = []
        if args.wanted_lists > 0:
            self._lists = np.empty((args.rows, args.wanted_lists), np.int32)
        if args.profile == Profile.APPEND_ONLY:
            return
        if args.out is not None:
            self._o, self._lse = args.out.o, args.out.lse
            return
        self._o = np.empty((args.rows, args.num_heads, self._o_dim), np.float32)
        if args.want_lse:
            self._lse = np.empty((args.rows, args.num_heads), np.float32)

    def add(self, chunk: Chunk, payload: bytes, timings: Timings) -> None:
        """Takes one reply. Raises ValueError if its payload is not of the size asked for."""
        o_bytes = lse_bytes = 0
        if self._o is not None:
            o_bytes = chunk.rows * chunk.heads * self._o_dim * self._args.o_dtype.size
            lse_bytes = chunk.rows * chunk.heads * 4 if self._lse is not None else 0
        size = o_bytes + lse_bytes + chunk.rows * self._args.wanted_lists * 4
        if len(payload) != size:
            raise ValueError(f"reply payload: got {len(payload)} bytes, must be {size}")
        o = lse = lists = None
        if self._o is not None:
            o = np.ndarray((chunk.rows, chunk.heads, self._o_dim), self._args.o_dtype.numpy,
                           payload)
        if self._lse is not None:
            lse = np.ndarray((chunk.rows, chunk.heads), DType.F32.numpy, payload, o_bytes)
        if self._lists is not None:
            lists = np.ndarray((chunk.rows, self._args.wanted_lists), "<i4", payload,
                               o_bytes + lse_bytes)
        self.put(chunk, o, lse, timings, lists)

    def put(self, chunk: Chunk, o: Optional[npt.NDArray], lse: Optional[npt.NDArray],
            timings: Timings, lists: Optional[npt.NDArray] = None) -> None:
        """Takes one reply as arrays of the wire's type, which may be the caller's own buffers."""
        self._timings.append(timings)
        rows = slice(chunk.row_begin, chunk.row_begin + chunk.rows)
        if self._lists is not None and lists is not None:
            self._lists[rows] = lists
        if self._o is None or o is None or o is self._o:
            return
        heads = slice(chunk.head_begin, chunk.head_begin + chunk.heads)
        decode_into(self._o[rows, heads], o)
        if self._lse is not None and lse is not None:
            self._lse[rows, heads] = lse

    def result(self) -> AttendResult:
        """The call's result once every chunk was added."""
        o = self._o
        if o is not None and self._args.profile == Profile.PROJECTED:
            o = o.squeeze(1)  # a tensor of a GPU, too, can do that
        return AttendResult(o, self._lse, self._timings, self._lists)
