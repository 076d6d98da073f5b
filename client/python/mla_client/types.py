"""Values of the contract as plain Python types."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt


_U2: np.dtype = np.dtype("<u2")
_F4: np.dtype = np.dtype("<f4")


class Profile(enum.IntEnum):
    """Says what a worker sends in a request and gets in the reply; see proto/README.md."""

    ABSORBED = 1     # q [rows, heads, lora + rope] -> o [rows, heads, lora]
    EXPANDED = 2     # q [rows, heads, nope + rope] -> o [rows, heads, v]
    APPEND_ONLY = 3  # KV rows only
    # q [rows, q_lora_rank], normed -> o [rows, hidden_size], for models with a rope_layout
    PROJECTED = 4


class DType(enum.IntEnum):
    """The type of a tensor's elements on the wire."""

    BF16 = 1
    F32 = 2
    # 8 bits an element, together with fp32 scales, which are powers of two. For queries and KV rows
    # only: arrays are given as for BF16, and encoded when sent.
    F8_E4M3 = 3

    @property
    def size(self) -> int:
        """Returns the bytes of an element; for F8_E4M3 the bytes of an element before it is
        encoded.
        """
        return 4 if self is DType.F32 else 2

    @property
    def numpy(self) -> np.dtype:
        """Returns the element type of an array of this type: bf16 patterns are uint16."""
        return _F4 if self is DType.F32 else _U2


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The dimensions of one attention layer, in elements."""

    num_heads: int
    kv_lora_rank: int
    rope_dim: int
    nope_dim: int = 0
    v_dim: int = 0
    # Outputs are as wide as queries: for "sparse_v4", set by Service.register_model.
    wide_output: bool = False
    # For PROJECTED: elements of a normed query row, and of a row of hidden states.
    q_lora_rank: int = 0
    hidden_size: int = 0

    @property
    def row_dim(self) -> int:
        """Returns the elements of a KV row: the latent part, then the rotated part."""
        return self.kv_lora_rank + self.rope_dim

    def q_dim(self, profile: Profile) -> int:
        """Returns the elements of a query head; for PROJECTED, where heads share them, those of a
        row.
        """
        if profile == Profile.ABSORBED:
            return self.row_dim
        if profile == Profile.PROJECTED:
            return self.q_lora_rank
        return self.nope_dim + self.rope_dim if profile == Profile.EXPANDED else 0

    def q_parts(self, profile: Profile) -> Tuple[int, ...]:
        """Returns how many values of a query head share each scale in F8_E4M3."""
        if profile == Profile.EXPANDED:
            return (self.q_dim(profile),)
        return tuple(part for part in (self.kv_lora_rank, self.rope_dim) if part > 0)

    def o_dim(self, profile: Profile) -> int:
        """Returns the elements of an output head; for PROJECTED those of a row."""
        if profile == Profile.ABSORBED:
            return self.row_dim if self.wide_output else self.kv_lora_rank
        if profile == Profile.PROJECTED:
            return self.hidden_size
        return self.v_dim if profile == Profile.EXPANDED else 0


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model as registered. `softmax_scale` does not have a default, because it follows from the
    model."""

    model_id: str
    geometry: Geometry
    layers: int
    softmax_scale: float
    page_size: int = 0  # rows a page; 0: the server's default
    # How EXPANDED keeps absorbed queries: "bf16" or "split" (two bf16 parts); "": as the server's
    # backend can, which the registered model names.
    query_precision: str = ""
    # How the cache keeps KV rows: "bf16", "fp8_tensor" (one scale a layer, see
    # Service.register_model), "fp8_row" (scales in every row) or "fp8_page" (scales in every page);
    # "": bf16.
    kv_format: str = ""
    # "sparse_v32": rows may bring index lists of at most `top_k` entries (Step.attend_sparse);
    # "sparse_v4": rows attend to the last `window` rows and to compressed entries, all of them or
    # the entries of such lists (Step.attend_window); "dense" or "": neither.
    attention: str = ""
    top_k: int = 0
    # The server's own indexer, for "sparse_v32" (Step.attend_indexed): the number of heads of its
    # queries, and the number of elements of a head and of an index key. An index key follows each
    # KV row. 0: no indexer.
    index_heads: int = 0
    index_dim: int = 0
    # Digest of all weights that KV rows come from: 32 bytes (a SHA-256, say), or none. Rows are
    # neither shared nor imported where it differs.
    weights_digest: bytes = b""
    # Selects 8-bit products over 8-bit rows, which costs accuracy: "on", "off", or "" for the
    # faster choice of the server's backend. The registered model names the value in force.
    fp8_compute: str = ""
    # For "sparse_v4": the number of rows that are kept; for each layer the number of positions that
    # an entry stands for, 0 or a divisor of page_size; and the format of entries ("": as rows).
    window: int = 0
    ratios: Tuple[int, ...] = ()
    entry_format: str = ""
    # For "sparse_v4": bytes that the worker stores with a sequence in addition to rows and entries,
    # by its steps (Step.end). 0: no tails.
    tail_bytes: int = 0
    # For "sparse_v4": every layer and head has a sink that the client brings, with register_model
    # or Model.upload_sinks; until all are set Attend is FailedPrecondition.
    needs_sinks: bool = False
    # For PROJECTED, which models with a layout have in place of ABSORBED and EXPANDED: the server
    # makes the queries (Model.upload_projected) and rotates them (Service.step's `rotations`).
    # "interleaved": elements 2 i and 2 i + 1 of the rotated part are a pair; "halves": elements i
    # and i + rope_dim / 2. The worker leaves its rotated keys in the same order. "": no such model.
    rope_layout: str = ""
    # How the server holds W_UQ and W_O: "e4m3", as the codes and scales that are then uploaded, in
    # half the bytes and with the same results; "bf16" or "": as bf16. The registered model names
    # the type in force, which is "bf16" on servers that hold no codes.
    projected_dtype: str = ""

    @property
    def kv_parts(self) -> Tuple[int, ...]:
        """Returns how many values of a KV row, as it is sent, share each scale in F8_E4M3."""
        parts = (self.geometry.kv_lora_rank, self.geometry.rope_dim, self.index_dim)
        return tuple(part for part in parts if part > 0)

    def entry_ends(self, layer: int, starts: Sequence[int], rows: Sequence[int]
                   ) -> npt.NDArray[np.int64]:
        """Returns how many entries the first 0, 1, ... rows of a step complete at a layer, if its
        sequences have `starts` rows before it and get `rows`.
        """
        ratio = self.ratios[layer] if self.ratios else 0
        whole = [((start + np.arange(1, count + 1)) % ratio == 0) if ratio
                 else np.zeros(count, bool) for start, count in zip(starts, rows)]
        return np.concatenate([[0], np.cumsum(np.concatenate(whole))]).astype(np.int64)

    @property
    def sent_row_dim(self) -> int:
        """Returns the elements of a KV row as it is sent: the row, then its index key."""
        return self.geometry.row_dim + self.index_dim


@dataclasses.dataclass(frozen=True)
class SequenceState:
    """A sequence as the server sees it."""

    sequence_id: int
    epoch: int
    length: int
    lease_left_ms: int = 0
    in_step: bool = False
    open_step: int = 0
    model_id: str = ""
    client_id: str = ""
    page_groups: int = 0
    declared: int = 0  # leading rows with declared contents
    tail_position: Optional[int] = None  # length that its tail belongs to; None: no tail
    tenant: str = ""  # of Client.all_sequences; else empty
    # Since it was opened, forked or imported on this server. None, with kv_bytes 0: the server has
    # no capability "all_sequences".
    age_ms: Optional[int] = None
    kv_bytes: int = 0  # of page_groups, shared ones included


@dataclasses.dataclass(frozen=True)
class Prefix:
    """Says what rows stand for, so that sequences can share them: ids of tokens, one for each row,
    or 32 bytes for each whole page of the model's page_size rows, equal where the page's tokens
    are.
    """

    token_ids: Sequence[int] = ()
    page_keys: Sequence[bytes] = ()
    salt: str = ""  # rows are shared between equal salts only
    # Rows that the sequence is to have afterwards, at most; None: all that are found. 0 takes none,
    # and the server is told with the sequence's next match.
    max_rows: Optional[int] = None

    def first(self, rows: int, page_size: int) -> "Prefix":
        """Returns the declaration of the first rows."""
        return dataclasses.replace(self, token_ids=self.token_ids[:rows],
                                   page_keys=self.page_keys[:rows // page_size])

    def followed_by(self, other: "Prefix", first_row: int,
                    page_size: int) -> Tuple["Prefix", int]:
        """Returns the declaration of the rows before `first_row`, followed by `other`, and the
        first row of the result. Only `other` if the two cannot be joined.
        """
        said = self.first(first_row, page_size)
        by_key = len(self.page_keys) > 0
        whole = (first_row == len(said.page_keys) * page_size if by_key
                 else first_row == len(said.token_ids))
        if not whole or said.salt != other.salt or by_key != (len(other.page_keys) > 0):
            return other, first_row
        return dataclasses.replace(other, token_ids=[*said.token_ids, *other.token_ids],
                                   page_keys=[*said.page_keys, *other.page_keys]), 0


class PrefixMatch(NamedTuple):
    """The rows that a sequence took from the prefix cache."""

    rows: int = 0
    # "all", or why the next row was not found: "absent", "diverged" (other rows follow), "evicted",
    # "deferred" (on its way back from a slower tier: ask again); "": no rows were asked for, or the
    # sequence ends inside a page.
    end: str = ""


@dataclasses.dataclass(frozen=True)
class WeightsStatus:
    """The answer to an upload."""

    complete: bool
    missing_layers: List[int]
    bytes: int


class Timings(NamedTuple):
    """The times of one request in microseconds; the server measures all except the first."""

    round_trip_us: int = 0  # sent to received, by this client
    queue_us: int = 0
    plan_us: int = 0
    kernel_us: int = 0
    write_us: int = 0
    launch_requests: int = 0
    launch_layers: int = 0
    launch_clients: int = 0
    plan_reused: bool = False

    @property
    def network_us(self) -> int:
        """Returns the time that the server did not measure: both transports and both codecs."""
        known = self.queue_us + self.plan_us + self.kernel_us + self.write_us
        return max(0, self.round_trip_us - known)


class AttendResult(NamedTuple):
    """The output of `Step.attend`. Arrays are float32 whatever travelled on the wire, except that
    with `out=` they are the buffers' own.
    """

    # [rows, heads, o dim], or [rows, hidden_size] for PROJECTED; None for APPEND_ONLY
    o: Optional[npt.NDArray]
    lse: Optional[npt.NDArray[np.float32]]  # [rows, heads], natural log; None unless asked for
    timings: List[Timings]                  # one per message that the work was split into
    # [rows, top_k] from the server's indexer, ascending, then padded with -1; None unless asked
    # for.
    lists: Optional[npt.NDArray[np.int32]] = None


class Buffers:
    """Memory for the tensors of attend calls of one shape, in the place that the transport prefers.

    Made by `Service.buffers`. Write `kv` and `q`, pass them and the object itself to
    `Step.attend(layer, buffers.q, buffers.kv, profile, out=buffers)`, read `o` and `lse`. Over
    shared memory the server reads and writes these very bytes; over anything else they are ordinary
    arrays. May be used for one call after another, not for two at a time.

    Ownership: the memory is the stream's. After `release` (or the `with` block) it may hold other
    tensors: views must not be used any more. Until then it stays, even beyond the stream's end;
    memory of a GPU ends with the stream.

    On a GPU (`device="cuda"`) the tensors are `mla_client.shm.device.DeviceArray`, which
    `torch.from_dlpack` takes. kv and q must be these very objects, and the call waits for the
    earlier work of `stream`.
    """

    def __init__(self, kv: Optional[npt.NDArray], q: Optional[npt.NDArray],
                 o: Optional[npt.NDArray], lse: Optional[npt.NDArray[np.float32]], dtype: DType,
                 place: Any = None, release: Optional[Callable[[], None]] = None) -> None:
        self.kv = kv    # [rows, row dim]; uint16 (bf16 patterns) or float32, as `dtype` says
        # [rows, heads, q dim], as kv; None for APPEND_ONLY. In PROJECTED q and o have one head.
        self.q = q
        self.o = o      # [rows, heads, o dim], uint16 or float32; None for APPEND_ONLY
        self.lse = lse  # [rows, heads]; None unless asked for
        self.dtype = dtype
        # The number of heads that a chained call names: all of the model in PROJECTED, else q's.
        self.heads = 0 if q is None else q.shape[1]
        self.place = place  # its place in shared memory; None: not in shared memory
        self.stream = 0     # handle of the GPU's stream that writes kv and q; 0: the default one
        self._release = release

    def release(self) -> None:
        """Gives the memory back. REQUIRES: no call with it is under way. Repeating is harmless."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> "Buffers":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.release()


class AttendArgs(NamedTuple):
    """One validated attend call: rows [row_begin, row_begin + rows) of a step at one layer."""

    layer: int
    profile: Profile
    row_begin: int
    rows: int
    head_offset: int
    num_heads: int             # 1 in PROJECTED, whose rows are for all heads
    q: Optional[npt.NDArray]   # [rows, heads, q dim], float32 or uint16 (bf16 patterns)
    # [rows, row dim], of the same type as q; then the entries that the rows make whole.
    kv: Optional[npt.NDArray]
    want_lse: bool
    dtype: DType
    o_dtype: DType
    timeout_s: float
    out: Optional[Buffers] = None  # destination of the outputs; its q and kv may be this call's
    # [rows, top_k], padded with -1; or the inputs of the server's indexer, as bytes.
    lists: Optional[npt.NDArray] = None
    selects: bool = False   # the latter
    wanted_lists: int = 0   # top_k, if the indexer's lists are to be returned
    # The number of values in each part of a query head and of a KV row that has its own scale, if
    # they are sent as F8_E4M3; `dtype` is then the type after decoding on the server.
    q_parts: Tuple[int, ...] = ()
    kv_parts: Tuple[int, ...] = ()
    # [rows + 1]: entries that the first 0, 1, ... rows complete; None unless the model is
    # "sparse_v4".
    entry_ends: Optional[npt.NDArray[np.int64]] = None

    @property
    def q_dtype(self) -> DType:
        """Returns the type of the queries as they are sent."""
        return DType.F8_E4M3 if self.q_parts else self.dtype


def fill_of(free: int, total: int) -> float:
    """Returns the part of `total` that is taken; 0 if it is not known."""
    return 0.0 if total <= 0 else min(1.0, max(0.0, 1.0 - free / total))


@dataclasses.dataclass(frozen=True)
class Probe:
    """A server's answer to Sequences.Probe."""

    boot_id: int = 0
    rows_asked: int = 0
    rows_in_pool: int = 0
    rows_in_host: int = 0
    rows_in_file: int = 0
    bytes_free: int = 0
    bytes_total: int = 0
    sequences: int = 0
    queued: int = 0
    wait_s: float = 0.0
    draining: bool = False
    bytes_cached: int = 0  # the part of bytes_free that the prefix cache keeps

    @property
    def rows(self) -> int:
        """Returns the number of rows that need not be computed again."""
        return self.rows_in_pool + self.rows_in_host + self.rows_in_file

    @property
    def fill(self) -> float:
        """Returns the part of the pool, 0 to 1, that has rows of sequences or cached rows."""
        return fill_of(self.bytes_free - self.bytes_cached, self.bytes_total)
