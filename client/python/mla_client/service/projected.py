"""Weights and rotations of PROJECTED, as arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Tuple

import numpy as np
import numpy.typing as npt

from mla_client import arrays, bf16, errors, wire
from mla_client.types import DType, Geometry, ModelSpec

BLOCK = 128  # rows and columns of a block with one scale


@dataclasses.dataclass(frozen=True)
class ProjectedWeights:
    """Holds W_UQ and W_O of some heads of a layer: floats or bf16 patterns, or e4m3 codes with the
    scales of the whole matrices.
    """

    w_uq: npt.NDArray  # [heads, nope + rope, q_lora_rank]
    w_o: npt.NDArray   # [hidden_size, heads, v_dim], as w_uq
    w_uq_scales: Optional[npt.NDArray[np.float32]]  # of blocks of [all heads * (nope + rope), ...]
    w_o_scales: Optional[npt.NDArray[np.float32]]   # of blocks of [hidden_size, all heads * v_dim]

    @property
    def heads(self) -> int:
        return len(self.w_uq)

    def decoded(self, head_begin: int) -> Tuple[npt.NDArray, npt.NDArray]:
        """Returns W_UQ and W_O without scales."""
        if self.w_uq_scales is None or self.w_o_scales is None:
            return self.w_uq, self.w_o
        q_dim, v_dim = self.w_uq.shape[1], self.w_o.shape[2]
        rows = head_begin * q_dim + np.arange(self.heads * q_dim).reshape(self.heads, q_dim, 1)
        columns = head_begin * v_dim + np.arange(self.heads * v_dim).reshape(self.heads, v_dim)
        w_uq = bf16.numbers_of(self.w_uq) * self.w_uq_scales[
            rows // BLOCK, np.arange(self.w_uq.shape[2]) // BLOCK]
        w_o = bf16.numbers_of(self.w_o) * self.w_o_scales[
            np.arange(len(self.w_o))[:, None, None] // BLOCK, columns // BLOCK]
        return w_uq, w_o

    def head_bytes(self, queries: bool) -> int:
        """Returns the bytes of one head as it is sent, without scales."""
        values = self.w_uq[0] if queries else self.w_o[:, 0]
        return values.size * (2 if self.w_uq_scales is None else 1)

    def payload(self, queries: bool, begin: int, end: int, head_begin: int) -> bytes:
        """Returns heads [begin, end) of one of the two; `head_begin` is the number of their first
        head.
        """
        values = self.w_uq[begin:end] if queries else self.w_o[:, begin:end]
        scales = self.w_uq_scales if queries else self.w_o_scales
        if scales is None:
            return wire.encode(values, DType.BF16).tobytes()
        dim = self.w_uq.shape[1] if queries else self.w_o.shape[2]
        first, last = (head_begin + begin) * dim // BLOCK, ((head_begin + end) * dim - 1) // BLOCK
        own = scales[first:last + 1] if queries else scales[:, first:last + 1]
        return values.tobytes() + np.ascontiguousarray(own, "<f4").tobytes()


def _blocks(name: str, scales: Any, rows: int, columns: int) -> npt.NDArray[np.float32]:
    given = arrays.numbers(name, scales).astype(np.float32, copy=False)
    wire.check_shape(name, given, (-(-rows // BLOCK), -(-columns // BLOCK)))
    return given


def weights_of(geometry: Geometry, w_uq: Any, w_o: Any, w_uq_scales: Any,
               w_o_scales: Any) -> ProjectedWeights:
    """Checks shapes. The two scales come together."""
    if (w_uq_scales is None) != (w_o_scales is None):
        raise errors.InvalidArgument("w_o_scales: come together with w_uq_scales")
    fp8 = w_uq_scales is not None
    w_uq, w_o = ((np.asanyarray(one) if fp8 else arrays.floats(name, one))
                 for name, one in (("w_uq", w_uq), ("w_o", w_o)))
    heads = len(w_uq) if w_uq.ndim else 0
    q_dim, v_dim = geometry.nope_dim + geometry.rope_dim, geometry.v_dim
    wire.check_shape("w_uq", w_uq, (heads, q_dim, geometry.q_lora_rank))
    if w_o.shape == (geometry.hidden_size, heads * v_dim):
        w_o = w_o.reshape(geometry.hidden_size, heads, v_dim)
    wire.check_shape("w_o", w_o, (geometry.hidden_size, heads, v_dim))
    if not heads:
        raise errors.InvalidArgument("w_uq: got no heads")
    if not fp8:
        return ProjectedWeights(w_uq, w_o, None, None)
    for name, codes in (("w_uq", w_uq), ("w_o", w_o)):
        if codes.dtype != np.uint8:
            raise errors.InvalidArgument(f"{name}: got {codes.dtype}, must be uint8 codes of e4m3 "
                                         "together with scales")
    return ProjectedWeights(
        w_uq, w_o,
        _blocks("w_uq_scales", w_uq_scales, geometry.num_heads * q_dim, geometry.q_lora_rank),
        _blocks("w_o_scales", w_o_scales, geometry.hidden_size, geometry.num_heads * v_dim))


def check_call(want_lse: bool, head_offset: int, dtype: DType) -> None:
    """Refuses the options that an attend of PROJECTED does not have."""
    if want_lse or head_offset or dtype == DType.F8_E4M3:
        raise errors.InvalidArgument("attend: PROJECTED takes neither want_lse, head_offset "
                                     "nor queries in F8_E4M3")


def rotations_of(spec: ModelSpec, rotations: Any, rows: int) -> Optional[npt.NDArray[np.float32]]:
    """Returns the rotations of a step of `rows` rows, checked; None if there are none."""
    if rotations is None:
        return None
    if not spec.rope_layout:
        raise errors.InvalidArgument(
            "step.rotations: the worker rotates the queries of the model (rope_layout)")
    given = np.ascontiguousarray(arrays.numbers("step.rotations", rotations), "<f4")
    wire.check_shape("step.rotations", given, (rows, spec.geometry.rope_dim))
    return given
