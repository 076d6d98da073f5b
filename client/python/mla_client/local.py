"""The same service computed in this process with numpy: for tests, and to work without a server.

Everything is obvious and slow: float64 accumulation over a plain array per sequence and layer. The
contract's rules about steps, epochs and repeats are kept, so that code that passes here behaves the
same against a server. Leases, limits and quotas are not.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from typing import Any, Dict, List, Optional, Sequence as Seq, Tuple

import numpy as np
import numpy.typing as npt

from mla_client import bf16, errors, wire
from mla_client.service import AttendFuture, Service, Step
from mla_client.types import (AttendArgs, AttendResult, DType, ModelSpec, Prefix, PrefixMatch,
                              Profile, SequenceState, Timings, WeightsStatus)


@dataclasses.dataclass
class _Model:
    spec: ModelSpec
    w_uk: npt.NDArray            # [layers, heads, nope, lora], float32
    w_uv: npt.NDArray            # [layers, heads, lora, v]
    have_weights: npt.NDArray    # [layers, heads], bool


@dataclasses.dataclass
class _Sequence:
    id: int
    model: _Model
    rows: List[npt.NDArray]      # by layer: [length, row dim], float32
    epoch: int = 1
    length: int = 0
    step: Optional["_Step"] = None
    last_truncate: Optional[Tuple[int, int]] = None  # (length, expected epoch) of the last one


@dataclasses.dataclass
class _Step:
    id: int
    sequences: List[_Sequence]
    rows: List[int]
    kv: npt.NDArray              # [layers, rows, row dim]
    have_kv: npt.NDArray         # [layers, rows], bool


class _Done(AttendFuture):
    """A result that is there already."""

    def __init__(self, result: AttendResult) -> None:
        self._result = result

    def result(self) -> AttendResult:
        return self._result


def _refuse_scales(scales: Seq[float]) -> None:
    if len(scales) > 0:
        raise errors.FailedPrecondition("kv_scales: got scales for bf16 rows, which have none")


class LocalReference(Service):
    """Attention in numpy. With `exact` nothing is rounded: queries, cache, weights and outputs stay
    as given (float32); otherwise they are rounded to bf16 where a server's would be. It has no
    prefix cache: matches find nothing."""

    def __init__(self, *, exact: bool = False) -> None:
        self.timeout_s = 30.0
        self._exact = exact
        self._lock = threading.RLock()
        self._models: Dict[str, _Model] = {}
        self._sequences: Dict[int, _Sequence] = {}
        self._steps: Dict[int, _Step] = {}
        self._by_request: Dict[str, int] = {}

    def __enter__(self) -> "LocalReference":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def close(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._models.clear()
            self._sequences.clear()
            self._steps.clear()
            self._by_request.clear()

    def _round(self, values: npt.NDArray, dtype: DType = DType.BF16) -> npt.NDArray:
        if values.dtype == np.uint16:
            return bf16.from_bf16(values)
        if self._exact or dtype == DType.F32:
            return np.array(values, np.float32)
        return bf16.round_to_bf16(values)

    # --- Models

    def _register(self, spec: ModelSpec, lease_ms: int,
                  kv_scales: Seq[float]) -> Tuple[ModelSpec, int]:
        del lease_ms  # nothing else runs here that a lease would protect
        geometry = spec.geometry
        if spec.layers < 1 or not spec.softmax_scale > 0 or geometry.num_heads < 1:
            raise errors.InvalidArgument("model: layers, softmax_scale and num_heads must be > 0")
        if spec.kv_format not in ("", "bf16"):
            raise errors.Unimplemented(
                f"model.kv_format: got {spec.kv_format!r}, rows are bf16 in this process")
        if spec.fp8_compute == "on":
            raise errors.InvalidArgument("model.fp8_compute: got 'on' with rows of bf16")
        _refuse_scales(kv_scales)
        sparse = spec.attention == "sparse_v32"
        if spec.attention not in ("", "dense", "sparse_v32") or (spec.top_k > 0) != sparse:
            raise errors.InvalidArgument(
                f"model.top_k: got {spec.top_k} with attention {spec.attention!r}")
        if (spec.index_heads > 0) != (spec.index_dim > 0) or (spec.index_heads > 0 and not sparse):
            raise errors.InvalidArgument(
                f"model.index_heads: got {spec.index_heads} of {spec.index_dim} elements with "
                f"attention {spec.attention!r}")
        spec = dataclasses.replace(spec, page_size=spec.page_size or 64, kv_format="bf16",
                                   fp8_compute="",
                                   attention=spec.attention or "dense",
                                   query_precision=spec.query_precision or "split")
        with self._lock:
            known = self._models.get(spec.model_id)
            if known is not None and known.spec != spec:
                raise errors.AlreadyExists(f"model {spec.model_id}: registered with other contents")
            if known is None:
                heads = (spec.layers, geometry.num_heads)
                self._models[spec.model_id] = _Model(
                    spec,
                    np.zeros((*heads, geometry.nope_dim, geometry.kv_lora_rank), np.float32),
                    np.zeros((*heads, geometry.kv_lora_rank, geometry.v_dim), np.float32),
                    np.zeros(heads, bool))
        key_bytes = spec.index_dim + 4 if spec.index_dim else 0
        return spec, spec.layers * spec.page_size * (geometry.row_dim * 2 + key_bytes)

    def _upload_scales(self, model_id: str, scales: Seq[float]) -> None:
        self._model(model_id)
        _refuse_scales(scales)

    def _model(self, model_id: str) -> _Model:
        model = self._models.get(model_id)
        if model is None:
            raise errors.NotFound(f"model {model_id}: not registered")
        return model

    def _unregister(self, model_id: str) -> None:
        with self._lock:
            model = self._model(model_id)
            if any(sequence.model is model for sequence in self._sequences.values()):
                raise errors.FailedPrecondition(f"model {model_id}: sequences are open")
            del self._models[model_id]

    def _upload(self, spec: ModelSpec, layer: int, head_begin: int, w_uk: npt.NDArray,
                w_uv: npt.NDArray) -> WeightsStatus:
        with self._lock:
            model = self._model(spec.model_id)
            heads = slice(head_begin, head_begin + len(w_uk))
            if not 0 <= layer < spec.layers or heads.stop > spec.geometry.num_heads:
                raise errors.InvalidArgument(f"chunk: layer {layer}, heads {heads}: out of range")
            w_uk, w_uv = self._round(w_uk), self._round(w_uv)
            have = model.have_weights[layer, heads]
            if not (np.array_equal(model.w_uk[layer, heads][have], w_uk[have], equal_nan=True)
                    and np.array_equal(model.w_uv[layer, heads][have], w_uv[have],
                                       equal_nan=True)):
                raise errors.AlreadyExists(f"chunk: layer {layer}, heads {heads}: other weights "
                                           "were uploaded before")
            model.w_uk[layer, heads] = w_uk
            model.w_uv[layer, heads] = w_uv
            model.have_weights[layer, heads] = True
            missing = np.flatnonzero(~model.have_weights.all(axis=1)).tolist()
            return WeightsStatus(not missing, missing, 2 * (w_uk.size + w_uv.size))

    # --- Sequences

    def _sequence(self, sequence_id: int) -> _Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise errors.NotFound(f"sequence {sequence_id:#x}: not open")
        return sequence

    def _add(self, model: _Model, rows: List[npt.NDArray], length: int,
             request_id: str) -> SequenceState:
        known = self._by_request.get(request_id) if request_id else None
        if known in self._sequences:
            return self._state(self._sequences[known])
        sequence = _Sequence(secrets.randbits(63) + 1, model, rows, length=length)
        self._sequences[sequence.id] = sequence
        if request_id:
            self._by_request[request_id] = sequence.id
        return self._state(sequence)

    def _open(self, model_id: str, request_id: str, lease_ms: int,
              prefix: Optional[Prefix]) -> Tuple[SequenceState, PrefixMatch]:
        with self._lock:
            model = self._model(model_id)
            empty = np.zeros((0, model.spec.sent_row_dim), np.float32)
            state = self._add(model, [empty] * model.spec.layers, 0, "open " + request_id)
            return state, PrefixMatch(0, "absent") if prefix is not None else PrefixMatch()

    def _match(self, sequence_id: int, epoch: int, first_row: int,
               prefix: Prefix) -> Tuple[SequenceState, PrefixMatch]:
        with self._lock:
            sequence = self._settled(sequence_id, epoch)
            return self._state(sequence), PrefixMatch(0, "absent")

    def _fork(self, sequence_id: int, epoch: int, length: Optional[int], request_id: str,
              lease_ms: int) -> SequenceState:
        with self._lock:
            parent = self._settled(sequence_id, epoch)
            length = parent.length if length is None else length
            if length > parent.length:
                raise errors.InvalidArgument(f"fork.length: got {length}, at most {parent.length}")
            return self._add(parent.model, [rows[:length] for rows in parent.rows], length,
                             "fork " + request_id)

    def _settled(self, sequence_id: int, epoch: int) -> _Sequence:
        """The sequence, if it is in no step and of that epoch."""
        sequence = self._sequence(sequence_id)
        if sequence.step is not None:
            raise errors.FailedPrecondition(f"sequence {sequence_id:#x}: in an open step")
        if sequence.epoch != epoch:
            raise errors.FailedPrecondition(
                f"sequence {sequence_id:#x}: epoch {epoch}, must be {sequence.epoch}",
                errors.ErrorDetail(reason="epoch_mismatch"))
        return sequence

    def _truncate(self, sequence_id: int, length: int, epoch: int) -> Tuple[int, int]:
        with self._lock:
            sequence = self._sequence(sequence_id)
            if sequence.last_truncate == (length, epoch) and sequence.epoch == epoch + 1:
                return sequence.epoch, length
            sequence = self._settled(sequence_id, epoch)
            if length > sequence.length:
                raise errors.InvalidArgument(
                    f"truncate.length: got {length}, at most {sequence.length}")
            sequence.rows = [rows[:length] for rows in sequence.rows]
            sequence.length = length
            sequence.epoch += 1
            sequence.last_truncate = (length, epoch)
            return sequence.epoch, length

    def _release(self, sequence_ids: List[int]) -> List[int]:
        with self._lock:
            missing = [name for name in sequence_ids if name not in self._sequences]
            for name in sequence_ids:
                sequence = self._sequences.pop(name, None)
                if sequence is not None and sequence.step is not None:
                    self._drop(sequence.step)
            return missing

    def _get(self, sequence_ids: List[int]) -> Tuple[List[SequenceState], List[int]]:
        with self._lock:
            found = [self._state(self._sequences[name]) for name in sequence_ids
                     if name in self._sequences]
            return found, [name for name in sequence_ids if name not in self._sequences]

    def _state(self, sequence: _Sequence) -> SequenceState:
        return SequenceState(sequence.id, sequence.epoch, sequence.length,
                             in_step=sequence.step is not None,
                             open_step=sequence.step.id if sequence.step else 0,
                             model_id=sequence.model.spec.model_id)

    # --- Steps

    def _begin(self, step: Step) -> _Step:
        with self._lock:
            if step.step_id in self._steps:
                raise errors.AlreadyExists(f"step {step.step_id}: open already")
            sequences = [self._settled(sequence.id, sequence.epoch) for sequence in step.sequences]
            if len({sequence.id for sequence in sequences}) < len(sequences):
                raise errors.InvalidArgument("begin_step.sequences: one is named twice")
            for sequence, view, rows in zip(sequences, step.sequences, step.rows):
                if rows < 1 or sequence.length != view.length:
                    raise errors.InvalidArgument(
                        f"begin_step: {rows} rows at position {view.length} of a sequence of "
                        f"length {sequence.length}")
            spec = sequences[0].model.spec
            shape = (spec.layers, step.total_rows)
            opened = _Step(step.step_id, sequences, list(step.rows),
                           np.zeros((*shape, spec.sent_row_dim), np.float32),
                           np.zeros(shape, bool))
            for sequence in sequences:
                sequence.step = opened
            self._steps[step.step_id] = opened
            return opened

    def _opened(self, step: Step) -> _Step:
        opened = self._steps.get(step.step_id)
        if opened is None:
            raise errors.NotFound(f"step {step.step_id}: not open")
        return opened

    def _drop(self, opened: _Step) -> None:
        del self._steps[opened.id]
        for sequence in opened.sequences:
            sequence.step = None

    def _attend(self, step: Step, args: AttendArgs) -> AttendFuture:
        with self._lock:
            opened = self._opened(step)
            model = opened.sequences[0].model
            end = args.row_begin + args.rows
            if not 0 <= args.layer < model.spec.layers or end > step.total_rows:
                raise errors.InvalidArgument(
                    f"attend: layer {args.layer}, rows {args.row_begin}..{end}: out of range")
            if args.kv is not None:
                self._store(opened, args.layer, slice(args.row_begin, end),
                            self._sent_rows(model.spec, args.kv, args.kv_parts))
            if args.q is None:
                return _Done(AttendResult(None, None, [Timings()]))
            if not opened.have_kv[args.layer, :end].all():
                missing = np.flatnonzero(~opened.have_kv[args.layer, :end])
                raise errors.FailedPrecondition(
                    f"attend: no KV rows {missing.tolist()} of layer {args.layer}")
            if args.profile == Profile.EXPANDED and not model.have_weights.all():
                missing = np.flatnonzero(~model.have_weights.all(axis=1)).tolist()
                raise errors.FailedPrecondition(f"attend: no weights of layers {missing}")
            q = self._round(self._through_e4m3(args.q, args.q_parts), args.dtype)
            if args.selects and args.lists is not None:
                args = args._replace(lists=self._select(opened, model, args, args.lists))
            o, lse = self._compute(opened, model, args, q)
            o = o if self._exact or args.o_dtype == DType.F32 else bf16.round_to_bf16(o)
            if args.out is not None and args.out.o is not None:
                wire.encode_into(args.out.o, o)
                o = args.out.o
                if args.want_lse and args.out.lse is not None:
                    args.out.lse[...] = lse
                    lse = args.out.lse
            return _Done(AttendResult(o, lse if args.want_lse else None, [Timings()],
                                      args.lists if args.wanted_lists else None))

    def _through_e4m3(self, values: npt.NDArray, parts: Tuple[int, ...]) -> npt.NDArray:
        """What arrives of values that are sent as F8_E4M3."""
        return values if self._exact or not parts else bf16.round_to_e4m3(values, parts)

    def _sent_rows(self, spec: ModelSpec, kv: npt.NDArray, parts: Tuple[int, ...]) -> npt.NDArray:
        """Rows with their index keys, as they are stored."""
        values = self._round(self._through_e4m3(kv, parts))
        if not self._exact and spec.index_dim > 0:
            row_dim = spec.geometry.row_dim
            values[:, row_dim:] = bf16.round_rows_to_e4m3(values[:, row_dim:])
        return values

    @staticmethod
    def _store(opened: _Step, layer: int, rows: slice, values: npt.NDArray) -> None:
        """Stores KV rows; rows that are there already must be equal."""
        have = opened.have_kv[layer, rows]
        stored = opened.kv[layer, rows]
        if not np.array_equal(stored[have], values[have], equal_nan=True):
            raise errors.AlreadyExists("attend: KV rows differ from those stored before")
        opened.kv[layer, rows] = values
        opened.have_kv[layer, rows] = True

    def _select(self, opened: _Step, model: _Model, args: AttendArgs,
                inputs: npt.NDArray) -> npt.NDArray[np.int32]:
        """The indexer's lists of the asked rows, [rows, top_k]."""
        spec = model.spec
        width = args.dtype.size * spec.index_heads * spec.index_dim
        queries = np.ascontiguousarray(inputs[:, :width]).view(args.dtype.numpy)
        queries = queries if args.dtype == DType.F32 else bf16.from_bf16(queries)
        queries = queries.reshape(-1, spec.index_heads, spec.index_dim).astype(np.float64)
        weights = np.ascontiguousarray(inputs[:, width:]).view("<f4")
        lists = np.full((args.rows, spec.top_k), -1, np.int32)
        first = 0
        for sequence, count in zip(opened.sequences, opened.rows):
            begin = max(first, args.row_begin)
            end = min(first + count, args.row_begin + args.rows)
            for row in range(begin, end):
                rows = np.concatenate([sequence.rows[args.layer],
                                       opened.kv[args.layer, first:row + 1]])
                keys = rows[:, spec.geometry.row_dim:].astype(np.float64)
                at = row - args.row_begin
                logits = weights[at] @ np.maximum(queries[at] @ keys.T, 0)
                best = np.argsort(-logits, kind="stable")[:spec.top_k]
                lists[at, :len(best)] = np.sort(best)
            first += count
        return lists

    def _compute(self, opened: _Step, model: _Model, args: AttendArgs,
                 q: npt.NDArray) -> Tuple[npt.NDArray, npt.NDArray]:
        """Attention of the asked rows, sequence by sequence."""
        geometry = model.spec.geometry
        o = np.zeros((args.rows, args.num_heads, geometry.o_dim(args.profile)), np.float32)
        lse = np.zeros((args.rows, args.num_heads), np.float32)
        first = 0
        for sequence, count in zip(opened.sequences, opened.rows):
            begin = max(first, args.row_begin)
            end = min(first + count, args.row_begin + args.rows)
            if begin < end:
                keys = np.concatenate([sequence.rows[args.layer],
                                       opened.kv[args.layer, first:end]])
                mine = slice(begin - args.row_begin, end - args.row_begin)
                visible = _visible(args, mine, len(keys), end - begin)
                o[mine], lse[mine] = _attention(model, args, q[mine], keys, visible)
            first += count
        return o, lse

    def _end(self, step: Step, committed: Optional[List[int]]) -> List[int]:
        with self._lock:
            opened = self._opened(step)
            committed = opened.rows if committed is None else committed
            if len(committed) != len(opened.rows) or any(
                    not 0 <= kept <= rows for kept, rows in zip(committed, opened.rows)):
                raise errors.InvalidArgument(f"end_step.committed_rows: got {committed}, "
                                             f"at most {opened.rows}")
            first = 0
            for kept, rows in zip(committed, opened.rows):
                have = opened.have_kv[:, first:first + kept]
                if not have.all():
                    raise errors.FailedPrecondition(
                        f"end_step: layer, row {np.argwhere(~have)[0].tolist()} are missing")
                first += rows
            first = 0
            for sequence, kept, rows in zip(opened.sequences, committed, opened.rows):
                sequence.rows = [np.concatenate([old, opened.kv[layer, first:first + kept]])
                                 for layer, old in enumerate(sequence.rows)]
                sequence.length += kept
                first += rows
            self._drop(opened)
            return [sequence.length for sequence in opened.sequences]

    def _abort(self, step: Step) -> None:
        with self._lock:
            self._drop(self._opened(step))


def _visible(args: AttendArgs, mine: slice, keys: int, rows: int) -> npt.NDArray:
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


def _attention(model: _Model, args: AttendArgs, q: npt.NDArray, keys: npt.NDArray,
               visible: npt.NDArray) -> Tuple[npt.NDArray, npt.NDArray]:
    """Softmax attention of rows q [rows, heads, d] over the keys that `visible` says."""
    geometry = model.spec.geometry
    heads = slice(args.head_offset, args.head_offset + args.num_heads)
    keys = keys[:, :geometry.row_dim].astype(np.float64)
    q = q.astype(np.float64).transpose(1, 0, 2)  # [heads, rows, d]
    if args.profile == Profile.EXPANDED:
        nope = q[..., :geometry.nope_dim] @ model.w_uk[args.layer, heads]
        q = np.concatenate([nope, q[..., geometry.nope_dim:]], axis=-1)
    scores = (q @ keys.T) * model.spec.softmax_scale
    scores = np.where(visible, scores, -np.inf)
    peak = scores.max(axis=-1, keepdims=True)
    empty = peak == -np.inf  # a row without a key has output 0 and lse -inf
    weights = np.exp(scores - np.where(empty, 0, peak))
    total = weights.sum(axis=-1, keepdims=True)
    # What no row attends to may be anything.
    values = np.where(visible.any(axis=0)[:, None], keys[:, :geometry.kv_lora_rank], 0)
    o = (weights / np.where(empty, 1, total)) @ values
    if args.profile == Profile.EXPANDED:
        o = o @ model.w_uv[args.layer, heads]
    with np.errstate(divide="ignore"):
        lse = (np.where(empty, 0, peak) + np.log(total))[..., 0]
    return o.transpose(1, 0, 2).astype(np.float32), lse.T.astype(np.float32)
