"""The service computed in this process with numpy: for tests, and to work without a server.

Everything is obvious and slow: float64 accumulation over a plain array per sequence and layer. The
contract's rules about steps, epochs and repeats are kept, so that code that passes here behaves the
same against a server. Leases, limits and quotas are not.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any, Dict, List, Optional, Sequence as Seq, Tuple

import numpy as np
import numpy.typing as npt

from mla_client import bf16, errors, wire
from mla_client.local.attention import (LocalSequence, LocalStep, ModelState, dense_attention,
                                        hidden_rows, projected_queries, tail_below, visible_keys,
                                        whole_entries, window_attention)
from mla_client.local.models import checked_model, refuse_scales
from mla_client.local.sinks import missing_layers, set_sinks
from mla_client.service import AttendFuture, Registered, Service, Step
from mla_client.service.projected import ProjectedWeights
from mla_client.types import (AttendArgs, AttendResult, DType, ModelSpec, Prefix, PrefixMatch,
                              Profile, SequenceState, Timings, WeightsStatus)


class _Done(AttendFuture):
    """A result that is there already."""

    def __init__(self, result: AttendResult) -> None:
        self._result = result

    def result(self) -> AttendResult:
        return self._result

    def done(self) -> bool:
        return True


class LocalReference(Service):
    """Attention in numpy. With `exact` nothing is rounded: queries, cache, weights and outputs stay
    as given (float32); otherwise they are rounded to bf16 where a server's would be. It does not
    have a prefix cache: matches find nothing."""

    def __init__(self, *, exact: bool = False) -> None:
        self.timeout_s = 30.0
        self._exact = exact
        self._lock = threading.RLock()
        self._models: Dict[str, ModelState] = {}
        self._sequences: Dict[int, LocalSequence] = {}
        self._steps: Dict[int, LocalStep] = {}
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

    def _register(self, spec: ModelSpec, lease_ms: int, kv_scales: Seq[float],
                  sinks: Seq[float]) -> Registered:
        del lease_ms  # leases protect nothing here
        spec = checked_model(spec, kv_scales, sinks)
        geometry, heads = spec.geometry, (spec.layers, spec.geometry.num_heads)
        with self._lock:
            known = self._models.get(spec.model_id)
            if known is not None and known.spec != spec:
                raise errors.AlreadyExists(f"model {spec.model_id}: registered with other contents")
            if known is None:
                self._models[spec.model_id] = ModelState(
                    spec,
                    np.zeros((*heads, geometry.nope_dim, geometry.kv_lora_rank), np.float32),
                    np.zeros((*heads, geometry.kv_lora_rank, geometry.v_dim), np.float32),
                    np.zeros(heads, bool),
                    np.full(heads, np.nan if spec.needs_sinks else -np.inf),
                    np.zeros((*heads, geometry.nope_dim + geometry.rope_dim,
                              geometry.q_lora_rank), np.float32),
                    np.zeros((spec.layers, geometry.hidden_size, geometry.num_heads,
                              geometry.v_dim), np.float32),
                    np.full(heads, not spec.rope_layout))
            if len(sinks) > 0:
                self._upload_sinks(spec, 0, 0, np.reshape(sinks, heads))
        key_bytes = spec.index_dim + 4 if spec.index_dim else 0
        return Registered(spec,
                          spec.layers * spec.page_size * (geometry.row_dim * 2 + key_bytes))

    def _upload_scales(self, model_id: str, scales: Seq[float]) -> None:
        self._model(model_id)
        refuse_scales(scales)

    def _upload_sinks(self, spec: ModelSpec, layer_begin: int, head_begin: int,
                      sinks: npt.NDArray) -> List[int]:
        with self._lock:
            model = self._model(spec.model_id)
            return set_sinks(model, layer_begin, head_begin, sinks, self._in_use(model))

    def _in_use(self, model: ModelState) -> bool:
        return any(sequence.model is model for sequence in self._sequences.values())

    def _model(self, model_id: str) -> ModelState:
        model = self._models.get(model_id)
        if model is None:
            raise errors.NotFound(f"model {model_id}: not registered")
        return model

    def _unregister(self, model_id: str) -> None:
        with self._lock:
            model = self._model(model_id)
            if self._in_use(model):
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
            return self._status(model, 2 * (w_uk.size + w_uv.size))

    @staticmethod
    def _status(model: ModelState, size: int) -> WeightsStatus:
        have = model.have_weights & model.have_projected
        missing = np.flatnonzero(~have.all(axis=1)).tolist()
        return WeightsStatus(not missing, missing, size)

    def _upload_projected(self, spec: ModelSpec, layer: int, head_begin: int,
                          weights: ProjectedWeights) -> WeightsStatus:
        with self._lock:
            model = self._model(spec.model_id)
            heads = slice(head_begin, head_begin + weights.heads)
            if not spec.rope_layout or not 0 <= layer < spec.layers:
                raise errors.InvalidArgument(f"chunk: layer {layer}: out of range, or no weights "
                                             "of PROJECTED")
            w_uq, w_o = (self._round(one) for one in weights.decoded(head_begin))
            have = model.have_projected[layer, heads]
            if not (np.array_equal(model.w_uq[layer, heads][have], w_uq[have])
                    and np.array_equal(model.w_o[layer, :, heads][:, have], w_o[:, have])):
                raise errors.AlreadyExists(f"chunk: layer {layer}, heads {heads}: other weights "
                                           "were uploaded before")
            model.w_uq[layer, heads], model.w_o[layer, :, heads] = w_uq, w_o
            model.have_projected[layer, heads] = True
            return self._status(model, weights.heads * (weights.head_bytes(True)
                                                        + weights.head_bytes(False)))

    # --- Sequences

    def _sequence(self, sequence_id: int) -> LocalSequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise errors.NotFound(f"sequence {sequence_id:#x}: not open")
        return sequence

    def _add(self, model: ModelState, rows: List[npt.NDArray], length: int,
             request_id: str) -> SequenceState:
        known = self._by_request.get(request_id) if request_id else None
        if known in self._sequences:
            return self._state(self._sequences[known])
        sequence = LocalSequence(secrets.randbits(63) + 1, model, rows, length=length)
        sequence.entries = [np.zeros((0, model.spec.sent_row_dim), np.float32)] * len(rows)
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
            state = self._add(parent.model, [rows[:length] for rows in parent.rows], length,
                              "fork " + request_id)
            child = self._sequences[state.sequence_id]
            if child.length == length:
                child.entries = whole_entries(parent, length)
                child.tail = tail_below(parent, length)
            return state

    def _settled(self, sequence_id: int, epoch: int) -> LocalSequence:
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
            sequence.entries = whole_entries(sequence, length)
            sequence.tail = tail_below(sequence, length)
            sequence.length = length
            sequence.epoch += 1
            sequence.last_truncate = (length, epoch)
            return sequence.epoch, length

    def _read_tail(self, sequence_id: int, epoch: int, tail_bytes: int) -> Tuple[int, bytes]:
        with self._lock:
            tail = self._settled(sequence_id, epoch).tail
            if tail is None:
                raise errors.NotFound(f"sequence {sequence_id:#x}: no tail",
                                      errors.ErrorDetail(reason="no_tail"))
            return tail

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

    def _state(self, sequence: LocalSequence) -> SequenceState:
        return SequenceState(sequence.id, sequence.epoch, sequence.length,
                             in_step=sequence.step is not None,
                             open_step=sequence.step.id if sequence.step else 0,
                             model_id=sequence.model.spec.model_id,
                             tail_position=sequence.tail[0] if sequence.tail else None)

    # --- Steps

    def _begin(self, step: Step) -> LocalStep:
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
            opened = LocalStep(step.step_id, sequences, list(step.rows),
                           np.zeros((*shape, spec.sent_row_dim), np.float32),
                           np.zeros(shape, bool), [{} for _ in range(spec.layers)])
            for sequence in sequences:
                sequence.step = opened
            self._steps[step.step_id] = opened
            return opened

    def _opened(self, step: Step) -> LocalStep:
        opened = self._steps.get(step.step_id)
        if opened is None:
            raise errors.NotFound(f"step {step.step_id}: not open")
        return opened

    def _drop(self, opened: LocalStep) -> None:
        del self._steps[opened.id]
        for sequence in opened.sequences:
            sequence.step = None

    def _attend(self, step: Step, args: AttendArgs) -> AttendFuture:
        with self._lock:
            opened = self._opened(step)
            model = opened.sequences[0].model
            end = args.row_begin + args.rows
            if missing_layers(model):
                raise errors.FailedPrecondition(
                    f"attend: no sinks of layers {missing_layers(model)}")
            if not 0 <= args.layer < model.spec.layers or end > step.total_rows:
                raise errors.InvalidArgument(
                    f"attend: layer {args.layer}, rows {args.row_begin}..{end}: out of range")
            if args.kv is not None:
                values = self._sent_rows(model.spec, args.kv, args.kv_parts)
                self._store(opened, args.layer, slice(args.row_begin, end), values[:args.rows])
                self._store_entries(opened, args, values[args.rows:])
            if args.q is None:
                return _Done(AttendResult(None, None, [Timings()]))
            if not opened.have_kv[args.layer, :end].all():
                missing = np.flatnonzero(~opened.have_kv[args.layer, :end])
                raise errors.FailedPrecondition(
                    f"attend: no KV rows {missing.tolist()} of layer {args.layer}")
            if (args.profile == Profile.PROJECTED) != bool(model.spec.rope_layout):
                raise errors.FailedPrecondition(
                    f"attend.profile: got {args.profile.name} with rope_layout "
                    f"{model.spec.rope_layout!r}")
            status = self._status(model, 0)
            if args.profile != Profile.ABSORBED and not status.complete:
                raise errors.FailedPrecondition(
                    f"attend: no weights of layers {status.missing_layers}")
            q = self._round(self._through_e4m3(args.q, args.q_parts), args.dtype)
            if args.profile == Profile.PROJECTED:
                if step.rotations is None:
                    raise errors.FailedPrecondition("attend: the step has no rotations")
                q = projected_queries(model, args.layer, q[:, 0],
                                      step.rotations[args.row_begin:end])
                args = args._replace(num_heads=model.spec.geometry.num_heads)
            if args.selects and args.lists is not None:
                args = args._replace(lists=self._select(opened, model, args, args.lists))
            o, lse = self._compute(opened, model, args, q)
            if args.profile == Profile.PROJECTED:
                o = hidden_rows(model, args.layer, o)
            o = o if self._exact or args.o_dtype == DType.F32 else bf16.round_to_bf16(o)
            if args.out is not None and args.out.o is not None:
                target = args.out.o if args.out.o.shape == o.shape else args.out.o[:, 0]
                wire.encode_into(target, o)
                o = target
                if args.want_lse and args.out.lse is not None:
                    args.out.lse[...] = lse
                    lse = args.out.lse
            return _Done(AttendResult(o, lse if args.want_lse else None, [Timings()],
                                      args.lists if args.wanted_lists else None))

    def _through_e4m3(self, values: npt.NDArray, parts: Tuple[int, ...]) -> npt.NDArray:
        """Values after a transport as F8_E4M3."""
        return values if self._exact or not parts else bf16.round_to_e4m3(values, parts)

    def _sent_rows(self, spec: ModelSpec, kv: npt.NDArray, parts: Tuple[int, ...]) -> npt.NDArray:
        """Rows with their index keys, as they are stored."""
        values = self._round(self._through_e4m3(kv, parts))
        if not self._exact and spec.index_dim > 0:
            row_dim = spec.geometry.row_dim
            values[:, row_dim:] = bf16.round_rows_to_e4m3(values[:, row_dim:])
        return values

    @staticmethod
    def _store_entries(opened: LocalStep, args: AttendArgs, values: npt.NDArray) -> None:
        """Stores the entries that rows complete; entries stored before must be equal."""
        if args.entry_ends is None:
            return
        for row in np.flatnonzero(np.diff(args.entry_ends)):
            value = values[args.entry_ends[row]]
            known = opened.entries[args.layer].setdefault(args.row_begin + int(row), value)
            if not np.array_equal(known, value, equal_nan=True):
                raise errors.AlreadyExists("attend: entries differ from those stored before")

    @staticmethod
    def _store(opened: LocalStep, layer: int, rows: slice, values: npt.NDArray) -> None:
        """Stores KV rows; rows that are there already must be equal."""
        have = opened.have_kv[layer, rows]
        stored = opened.kv[layer, rows]
        if not np.array_equal(stored[have], values[have], equal_nan=True):
            raise errors.AlreadyExists("attend: KV rows differ from those stored before")
        opened.kv[layer, rows] = values
        opened.have_kv[layer, rows] = True

    def _select(self, opened: LocalStep, model: ModelState, args: AttendArgs,
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
                index = row - args.row_begin
                logits = weights[index] @ np.maximum(queries[index] @ keys.T, 0)
                best = np.argsort(-logits, kind="stable")[:spec.top_k]
                lists[index, :len(best)] = np.sort(best)
            first += count
        return lists

    def _compute(self, opened: LocalStep, model: ModelState, args: AttendArgs,
                 q: npt.NDArray) -> Tuple[npt.NDArray, npt.NDArray]:
        """Attention of the asked rows, sequence by sequence."""
        geometry = model.spec.geometry
        o_dim = (geometry.v_dim if args.profile == Profile.PROJECTED
                 else geometry.o_dim(args.profile))
        o = np.zeros((args.rows, args.num_heads, o_dim), np.float32)
        lse = np.zeros((args.rows, args.num_heads), np.float32)
        first = 0
        for sequence, count in zip(opened.sequences, opened.rows):
            begin = max(first, args.row_begin)
            end = min(first + count, args.row_begin + args.rows)
            if begin < end:
                keys = np.concatenate([sequence.rows[args.layer],
                                       opened.kv[args.layer, first:end]])
                mine = slice(begin - args.row_begin, end - args.row_begin)
                if model.spec.window > 0:
                    own = [opened.entries[args.layer][row] for row in range(first, end)
                           if row in opened.entries[args.layer]]
                    entries = np.array([*sequence.entries[args.layer], *own]).reshape(
                        -1, keys.shape[1])
                    o[mine], lse[mine] = window_attention(model, args, q[mine], keys, entries,
                                                          mine)
                    first += count
                    continue
                visible = visible_keys(args, mine, len(keys), end - begin)
                o[mine], lse[mine] = dense_attention(model, args, q[mine], keys, visible)
            first += count
        return o, lse

    def _end(self, step: Step, committed: Optional[List[int]],
             tails: List[Tuple[int, bytes]]) -> List[int]:
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
                for layer, made in enumerate(opened.entries):
                    own = [made[row] for row in range(first, first + kept) if row in made]
                    if own:
                        sequence.entries[layer] = np.concatenate([sequence.entries[layer], own])
                sequence.length += kept
                first += rows
            for place, tail in tails:
                sequence = opened.sequences[place]
                sequence.tail = sequence.length, bytes(tail)
            self._drop(opened)
            return [sequence.length for sequence in opened.sequences]

    def _abort(self, step: Step) -> None:
        with self._lock:
            self._drop(self._opened(step))

    def _give_up(self, step: Step) -> None:
        with self._lock:
            if step.step_id in self._steps:
                self._drop(self._opened(step))
