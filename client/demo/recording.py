"""Records the requests to a service, with the answers that it should give; RECORDING.md is the
format.

`Recorder` stands between the demo and a client. It computes the expected outputs with a
LocalReference that is given the same bytes. Threading: one thread.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Sequence as Seq, Tuple

import mla_client
import numpy as np
import numpy.typing as npt
from mla_client import wire
from mla_client.service import Registered
from mla_client.types import AttendArgs, Prefix, PrefixMatch, SequenceState

FORMAT, VERSION = "mla-recording", 1
_HEADER_BYTES = struct.Struct("<I")
_PAYLOAD_BYTES = struct.Struct("<Q")


class Writer:
    """A file of records, or a part of one."""

    def __init__(self, path: str, *, part: bool = False):
        """A `part` has no header line, no weights and no end; `append_part` adds it to a file."""
        self._file: BinaryIO = open(path, "wb")
        self.is_part = part
        self._spec: Optional[mla_client.ModelSpec] = None

    def model(self, spec: mla_client.ModelSpec) -> None:
        """Writes the header line for the only model. Repeating it changes nothing."""
        if self._spec is None and not self.is_part:
            model = {"model_id": spec.model_id, **dataclasses.asdict(spec.geometry),
                     "layers": spec.layers, "softmax_scale": spec.softmax_scale,
                     "page_size": spec.page_size}
            line = json.dumps({"format": FORMAT, "version": VERSION, "models": [model]})
            self._file.write(line.encode() + b"\n")
        elif self._spec not in (None, spec):
            raise ValueError(f"recording: holds {self._spec}, got {spec}")
        self._spec = spec

    def write(self, kind: str, payload: Tuple[npt.NDArray, ...] = (), **keys: Any) -> None:
        """One record."""
        header = json.dumps({"kind": kind, **keys}).encode()
        self._file.write(_HEADER_BYTES.pack(len(header)) + header)
        self._file.write(_PAYLOAD_BYTES.pack(sum(part.nbytes for part in payload)))
        for part in payload:
            self._file.write(np.ascontiguousarray(part).data)

    def append_part(self, path: str) -> None:
        """All records of a part that was closed."""
        with open(path, "rb") as part:
            while block := part.read(1 << 20):
                self._file.write(block)

    def close(self) -> None:
        """Completes the file."""
        if not self.is_part:
            self.write("done")
        self._file.close()


def read(path: str) -> Iterator[Tuple[Dict[str, Any], bytes]]:
    """The header line with no payload, then the records. ValueError if the file is not a recording,
    has another version or is incomplete."""
    with open(path, "rb") as file:
        try:
            first = json.loads(file.readline())
        except ValueError as error:
            raise ValueError(f"{path}: not a recording: {error}") from error
        if first.get("format") != FORMAT or first.get("version") != VERSION:
            raise ValueError(f"{path}: got {first.get('format')} {first.get('version')}, must be "
                             f"{FORMAT} {VERSION}")
        yield first, b""

        def exactly(count: int) -> bytes:
            data = file.read(count)
            if len(data) != count:
                raise ValueError(f"{path}: cut short at byte {file.tell()}")
            return data

        kind = ""
        while kind != "done":
            header = json.loads(exactly(*_HEADER_BYTES.unpack(exactly(_HEADER_BYTES.size))))
            payload = exactly(*_PAYLOAD_BYTES.unpack(exactly(_PAYLOAD_BYTES.size)))
            kind = header["kind"]
            yield header, payload


class Recorder(mla_client.Service):
    """A Service that passes everything on to another and writes it down."""

    def __init__(self, service: mla_client.Service, writer: Writer, *, first_number: int = 1):
        """`first_number`: first number of sequences and steps; numbers of several recorders that
        write to one file must not overlap. The recorder of a part uploads no weights: the service
        has them."""
        self.timeout_s = service.timeout_s
        self._service = service
        self._writer = writer
        self._next_number = first_number
        self._reference = mla_client.LocalReference()
        self._models: Dict[str, mla_client.Model] = {}
        # By the service's ids: the number in the file, and the object of the reference.
        self._sequences: Dict[int, Tuple[int, mla_client.Sequence]] = {}
        self._steps: Dict[int, Tuple[int, mla_client.Step]] = {}
        self._w_uv: Dict[Tuple[int, int], npt.NDArray] = {}  # by layer and first head
        self._largest: Dict[Tuple[int, mla_client.Profile], float] = {}  # |V| by layer

    def close(self) -> None:
        """Completes the file."""
        self._writer.close()

    def _number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    # --- Models

    def _register(self, spec: mla_client.ModelSpec, lease_ms: int, kv_scales: Seq[float],
                  sinks: Seq[float]) -> Registered:
        if spec.window > 0:
            raise mla_client.Unimplemented("model.window: recordings do not hold entries")
        if spec.rope_layout:
            raise mla_client.Unimplemented("model.rope_layout: recordings do not hold rotations")
        reference = self._reference.register_model(spec)  # refuses what recordings do not hold
        answer = self._service._register(spec, lease_ms, kv_scales, sinks)
        self._writer.model(spec)
        self._models[spec.model_id] = reference
        return answer

    def _upload_scales(self, model_id: str, scales: Seq[float]) -> None:
        self._service._upload_scales(model_id, scales)

    def _upload_sinks(self, spec: mla_client.ModelSpec, layer_begin: int, head_begin: int,
                      sinks: npt.NDArray) -> List[int]:
        raise mla_client.Unimplemented("model.window: recordings do not hold entries")

    def _unregister(self, model_id: str) -> None:
        self._service._unregister(model_id)

    def _upload(self, spec: mla_client.ModelSpec, layer: int, head_begin: int, w_uk: npt.NDArray,
                w_uv: npt.NDArray) -> mla_client.WeightsStatus:
        w_uk, w_uv = (wire.encode(array, mla_client.DType.BF16) for array in (w_uk, w_uv))
        self._w_uv[layer, head_begin] = mla_client.from_bf16(w_uv)
        status = self._models[spec.model_id].upload_weights(layer, w_uk, w_uv, head_begin)
        if not self._writer.is_part:
            status = self._service._upload(spec, layer, head_begin, w_uk, w_uv)
            self._writer.write("weights", (w_uk, w_uv), model_id=spec.model_id, layer=layer,
                               head_begin=head_begin, head_count=len(w_uk))
        return status

    # --- Sequences

    def _open(self, model_id: str, request_id: str, lease_ms: int,
              prefix: Optional[Prefix]) -> Tuple[SequenceState, PrefixMatch]:
        # Replayed requests must not depend on a cache: every row is sent.
        state, matched = self._service._open(model_id, request_id, lease_ms, None)
        number = self._number()
        self._sequences[state.sequence_id] = number, self._models[model_id].open_sequence()
        self._writer.write("open", sequence=number, model_id=model_id)
        return state, matched

    def _match(self, sequence_id: int, epoch: int, first_row: int,
               prefix: Prefix) -> Tuple[SequenceState, PrefixMatch]:
        return self._get([sequence_id])[0][0], PrefixMatch()

    def _fork(self, sequence_id: int, epoch: int, length: Optional[int], request_id: str,
              lease_ms: int) -> SequenceState:
        state = self._service._fork(sequence_id, epoch, length, request_id, lease_ms)
        number = self._number()
        parent, reference = self._sequences[sequence_id]
        self._sequences[state.sequence_id] = number, reference.fork(length)
        self._writer.write("fork", sequence=number, parent=parent, length=state.length)
        return state

    def _truncate(self, sequence_id: int, length: int, epoch: int) -> Tuple[int, int]:
        answer = self._service._truncate(sequence_id, length, epoch)
        number, reference = self._sequences[sequence_id]
        reference.truncate(length)
        self._writer.write("truncate", sequence=number, length=length)
        return answer

    def _read_tail(self, sequence_id: int, epoch: int, tail_bytes: int) -> Tuple[int, bytes]:
        return self._service._read_tail(sequence_id, epoch, tail_bytes)

    def _release(self, sequence_ids: List[int]) -> List[int]:
        missing = self._service._release(sequence_ids)
        for sequence_id in sequence_ids:
            number, reference = self._sequences.pop(sequence_id)
            reference.release()
            self._writer.write("release", sequence=number)
        return missing

    def _get(self, sequence_ids: List[int]) -> Tuple[List[SequenceState], List[int]]:
        return self._service._get(sequence_ids)

    # --- Steps

    def _begin(self, step: mla_client.Step) -> Any:
        handle = self._service._begin(step)
        number = self._number()
        known = [self._sequences[sequence.id] for sequence in step.sequences]
        self._steps[step.step_id] = number, self._reference.step(
            [(reference, rows) for (_, reference), rows in zip(known, step.rows)]).begin()
        self._writer.write("begin", step=number, sequences=[
            {"sequence": name, "start_position": sequence.length, "rows": rows}
            for (name, _), sequence, rows in zip(known, step.sequences, step.rows)])
        return handle

    def _attend(self, step: mla_client.Step, args: AttendArgs) -> mla_client.AttendFuture:
        future = self._service._attend(step, args)
        number, reference = self._steps[step.step_id]
        inputs = [None if array is None else wire.encode(array, args.dtype)
                  for array in (args.kv, args.q)]
        right = reference.attend(
            args.layer, inputs[1], inputs[0], args.profile, row_begin=args.row_begin,
            head_offset=args.head_offset, want_lse=True, dtype=args.dtype,
            o_dtype=mla_client.DType.F32)
        if inputs[0] is not None:
            self._see_values(step.model.spec, args.layer, inputs[0])
        tensors = [*inputs, right.o, right.lse]
        sizes = [0 if array is None else array.nbytes for array in tensors]
        self._writer.write(
            "attend", tuple(array for array in tensors if array is not None), step=number,
            layer=args.layer, row_begin=args.row_begin, row_count=args.rows,
            head_offset=args.head_offset, num_heads=args.num_heads, profile=args.profile.name,
            has_kv=args.kv is not None, dtype=args.dtype.name.lower(),
            max_v=self._largest.get((args.layer, args.profile), 0.0),
            **dict(zip(("kv_bytes", "q_bytes", "o_bytes", "lse_bytes"), sizes)))
        return future

    def _see_values(self, spec: mla_client.ModelSpec, layer: int, kv: npt.NDArray) -> None:
        """Keeps the largest magnitude of the values that rows stand for, by layer and profile."""
        rows = kv if kv.dtype == np.float32 else mla_client.from_bf16(kv)
        latent = rows[:, :spec.geometry.kv_lora_rank]
        expanded = [latent @ w_uv for (of, _), w_uv in self._w_uv.items() if of == layer]
        for profile, values in ((mla_client.Profile.ABSORBED, [latent]),
                                (mla_client.Profile.EXPANDED, expanded)):
            for array in values:
                largest = self._largest.get((layer, profile), 0.0)
                self._largest[layer, profile] = max(largest, float(np.abs(array).max()))

    def _end(self, step: mla_client.Step, committed: Optional[List[int]],
             tails: List[Tuple[int, bytes]]) -> List[int]:
        lengths = self._service._end(step, committed, tails)
        number, reference = self._steps.pop(step.step_id)
        expected = reference.end(committed)
        if expected != lengths:
            raise RuntimeError(f"recording: the service says lengths {lengths}, must be {expected}")
        kept = list(step.rows) if committed is None else committed
        self._writer.write("end", step=number, committed_rows=kept, lengths=lengths)
        return lengths

    def _abort(self, step: mla_client.Step) -> None:
        self._service._abort(step)
        number, reference = self._steps.pop(step.step_id)
        reference.abort()
        self._writer.write("abort", step=number)

    def _shared_memory(self, stream: Any) -> Any:
        return self._service._shared_memory(stream)
