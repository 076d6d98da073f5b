"""Values of the contract as plain Python types."""

from __future__ import annotations

import dataclasses
import enum
from typing import List, Optional

import numpy as np
import numpy.typing as npt


class Profile(enum.IntEnum):
    """What a worker sends and gets back; see proto/README.md."""

    ABSORBED = 1     # q [rows, heads, lora + rope] -> o [rows, heads, lora]
    EXPANDED = 2     # q [rows, heads, nope + rope] -> o [rows, heads, v]
    APPEND_ONLY = 3  # KV rows only


class DType(enum.IntEnum):
    """Element type on the wire."""

    BF16 = 1
    F32 = 2

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return 2 if self is DType.BF16 else 4


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Dimensions of one attention layer, in elements."""

    num_heads: int
    kv_lora_rank: int
    rope_dim: int
    nope_dim: int = 0
    v_dim: int = 0

    @property
    def row_dim(self) -> int:
        """Elements of a KV row: latent, then rotated part."""
        return self.kv_lora_rank + self.rope_dim

    def q_dim(self, profile: Profile) -> int:
        """Elements of a query head."""
        if profile == Profile.ABSORBED:
            return self.row_dim
        return self.nope_dim + self.rope_dim if profile == Profile.EXPANDED else 0

    def o_dim(self, profile: Profile) -> int:
        """Elements of an output head."""
        if profile == Profile.ABSORBED:
            return self.kv_lora_rank
        return self.v_dim if profile == Profile.EXPANDED else 0


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model as registered. `softmax_scale` has no default: it follows from the model."""

    model_id: str
    geometry: Geometry
    layers: int
    softmax_scale: float
    page_size: int = 0  # rows a page; 0: the server's default


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


@dataclasses.dataclass(frozen=True)
class WeightsStatus:
    """Answer to an upload."""

    complete: bool
    missing_layers: List[int]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Timings:
    """Where the time of one request went, in microseconds; all but the first by the server."""

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
        """What the server did not account for: both transports and both codecs."""
        known = self.queue_us + self.plan_us + self.kernel_us + self.write_us
        return max(0, self.round_trip_us - known)


@dataclasses.dataclass(frozen=True)
class AttendResult:
    """Output of `Step.attend`. Arrays are float32 whatever travelled on the wire."""

    o: Optional[npt.NDArray[np.float32]]    # [rows, heads, o dim]; None for APPEND_ONLY
    lse: Optional[npt.NDArray[np.float32]]  # [rows, heads], natural log; None unless asked for
    timings: List[Timings]                  # one per message that the work was cut into


@dataclasses.dataclass(frozen=True)
class AttendArgs:
    """One validated attend call: rows [row_begin, row_begin + rows) of a step at one layer."""

    layer: int
    profile: Profile
    row_begin: int
    rows: int
    head_offset: int
    num_heads: int
    q: Optional[npt.NDArray]   # [rows, heads, q dim], float32 or uint16 (bf16 patterns)
    kv: Optional[npt.NDArray]  # [rows, row dim], of the same type as q
    want_lse: bool
    dtype: DType
    o_dtype: DType
    timeout_s: float
