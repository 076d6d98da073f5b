"""State of LocalReference, and its attention in numpy."""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional, Tuple

import numpy as np
import numpy.typing as npt

from mla_client import errors
from mla_client.types import AttendArgs, ModelSpec, Profile


@dataclasses.dataclass
class ModelState:
    spec: ModelSpec
    w_uk: npt.NDArray            # [layers, heads, nope, lora], float32
    w_uv: npt.NDArray            # [layers, heads, lora, v]
    have_weights: npt.NDArray    # [layers, heads], bool
    sinks: npt.NDArray           # [layers, heads], float64; -inf: no sink, NaN: not set yet
    # Of PROJECTED: [layers, heads, nope + rope, q_lora_rank], [layers, hidden_size, heads, v], and
    # which heads are there.
    w_uq: npt.NDArray
    w_o: npt.NDArray
    have_projected: npt.NDArray


@dataclasses.dataclass
class LocalSequence:
    id: int
    model: ModelState
    rows: List[npt.NDArray]      # by layer: [length, row dim], float32
    epoch: int = 1
    length: int = 0
    step: Optional["LocalStep"] = None
    entries: List[npt.NDArray] = dataclasses.field(default_factory=list)  # as rows
    last_truncate: Optional[Tuple[int, int]] = None  # (length, expected epoch) of the last one
    tail: Optional[Tuple[int, bytes]] = None         # (position, tail)


@dataclasses.dataclass
class LocalStep:
    id: int
    sequences: List[LocalSequence]
    rows: List[int]
    kv: npt.NDArray              # [layers, rows, row dim]
    have_kv: npt.NDArray         # [layers, rows], bool
    # By layer: entries that the rows make whole, by row.
    entries: List[Dict[int, npt.NDArray]] = dataclasses.field(default_factory=list)


def tail_below(sequence: LocalSequence, length: int) -> Optional[Tuple[int, bytes]]:
    """The tail of a sequence's first rows."""
    return sequence.tail if sequence.tail and sequence.tail[0] <= length else None


def whole_entries(sequence: LocalSequence, length: int) -> List[npt.NDArray]:
    """By layer, the entries of a sequence's first rows."""
    ratios = sequence.model.spec.ratios
    return [entries[:length // ratios[layer]] if ratios and ratios[layer] else entries[:0]
            for layer, entries in enumerate(sequence.entries)]


def window_attention(model: ModelState, args: AttendArgs, q: npt.NDArray, rows: npt.NDArray,
                      entries: npt.NDArray, mine: slice) -> Tuple[npt.NDArray, npt.NDArray]:
    """Attention of rows q [n, heads, d], the last of all `rows`, to a window, entries and sinks."""
    spec = model.spec
    ratio = spec.ratios[args.layer]
    heads = slice(args.head_offset, args.head_offset + args.num_heads)
    o = np.zeros(q.shape, np.float32)
    lse = np.zeros(q.shape[:2], np.float32)
    for row in range(len(q)):
        visible = len(rows) - len(q) + row + 1
        whole = visible // ratio if ratio else 0
        chosen = np.arange(whole)
        if args.lists is not None:
            listed = args.lists[mine][row]
            for slot, entry in enumerate(listed):
                if not -1 <= entry < whole:
                    raise errors.InvalidArgument(
                        f"payload: got {entry} at row {args.row_begin + mine.start + row}, slot "
                        f"{slot} of the index lists, must be -1, or 0..{whole - 1}: the entries "
                        "that the row sees",
                        errors.ErrorDetail(field="payload", reason="list_position"))
            chosen = np.unique(listed[listed >= 0])
        keys = np.concatenate([rows[max(0, visible - spec.window):visible],
                               entries[chosen]]).astype(np.float64)
        scores = (q[row].astype(np.float64) @ keys.T) * spec.softmax_scale
        peak = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - peak)
        total = weights.sum(axis=-1, keepdims=True)
        sink = np.exp(model.sinks[args.layer, heads, None] - peak)
        o[row] = (weights / (total + sink)) @ keys
        lse[row] = (peak + np.log(total))[:, 0]
    return o, lse


def projected_queries(model: ModelState, layer: int, rows: npt.NDArray,
                      rotations: npt.NDArray) -> npt.NDArray[np.float32]:
    """Queries [n, heads, nope + rope] of normed rows [n, q_lora_rank], rotated."""
    geometry = model.spec.geometry
    q = np.einsum("nk,hdk->nhd", rows.astype(np.float64), model.w_uq[layer].astype(np.float64))
    rotated = q[..., geometry.nope_dim:]
    pairs = geometry.rope_dim // 2
    halves = model.spec.rope_layout == "halves"
    first = slice(0, pairs) if halves else slice(0, None, 2)
    second = slice(pairs, None) if halves else slice(1, None, 2)
    cosines, sines = rotations[:, None, :pairs], rotations[:, None, pairs:]
    x, y = rotated[..., first].copy(), rotated[..., second].copy()
    rotated[..., first] = x * cosines - y * sines
    rotated[..., second] = x * sines + y * cosines
    return q.astype(np.float32)


def hidden_rows(model: ModelState, layer: int, o: npt.NDArray) -> npt.NDArray[np.float32]:
    """Rows [n, hidden_size] of outputs [n, heads, v]."""
    hidden: npt.NDArray[np.float32] = np.einsum(
        "nhv,ihv->ni", o.astype(np.float64), model.w_o[layer].astype(np.float64)
    ).astype(np.float32)
    return hidden


def visible_keys(args: AttendArgs, mine: slice, keys: int, rows: int) -> npt.NDArray:
    """Which of the keys each of the rows attends to, [rows, keys]; the last row sees them all."""
    seen = np.arange(keys) <= np.arange(keys - rows, keys)[:, None]
    if args.lists is None:
        return seen
    listed = np.zeros_like(seen)
    for row, entries in enumerate(args.lists[mine]):
        last = keys - rows + row
        for slot, position in enumerate(entries):
            if not -1 <= position <= last:
                raise errors.InvalidArgument(
                    f"payload: got {position} at row {args.row_begin + mine.start + row}, slot "
                    f"{slot} of the index lists, must be -1, or 0..{last}: the positions that the "
                    "row sees", errors.ErrorDetail(field="payload", reason="list_position"))
        listed[row, entries[entries >= 0]] = True
    return listed


def dense_attention(model: ModelState, args: AttendArgs, q: npt.NDArray, keys: npt.NDArray,
               visible: npt.NDArray) -> Tuple[npt.NDArray, npt.NDArray]:
    """Softmax attention of rows q [rows, heads, d] over the keys that `visible` says."""
    geometry = model.spec.geometry
    heads = slice(args.head_offset, args.head_offset + args.num_heads)
    keys = keys[:, :geometry.row_dim].astype(np.float64)
    q = q.astype(np.float64).transpose(1, 0, 2)  # [heads, rows, d]
    if args.profile in (Profile.EXPANDED, Profile.PROJECTED):
        nope = q[..., :geometry.nope_dim] @ model.w_uk[args.layer, heads]
        q = np.concatenate([nope, q[..., geometry.nope_dim:]], axis=-1)
    scores = (q @ keys.T) * model.spec.softmax_scale
    scores = np.where(visible, scores, -np.inf)
    peak = scores.max(axis=-1, keepdims=True)
    empty = peak == -np.inf  # a row without a key has output 0 and lse -inf
    weights = np.exp(scores - np.where(empty, 0, peak))
    total = weights.sum(axis=-1, keepdims=True)
    # Rows that no query attends to may hold anything.
    values = np.where(visible.any(axis=0)[:, None], keys[:, :geometry.kv_lora_rank], 0)
    o = (weights / np.where(empty, 1, total)) @ values
    if args.profile in (Profile.EXPANDED, Profile.PROJECTED):
        o = o @ model.w_uv[args.layer, heads]
    with np.errstate(divide="ignore"):
        lse = (np.where(empty, 0, peak) + np.log(total))[..., 0]
    return o.transpose(1, 0, 2).astype(np.float32), lse.T.astype(np.float32)
