"""The client's types as messages of the contract, and back.

Answers are checked before they are used: a server may be newer than this client, or may not be the
server it claims to be. A number of an enum that is not known here is kept as its digits; an answer
that contradicts the request is DataLoss.
"""

from __future__ import annotations

import hashlib
from typing import Any, Iterator, List, Optional, Sequence as Seq, Tuple

import numpy.typing as npt

from mla_client import errors, wire
from mla_client.gen import model_pb2, sequence_pb2, tensor_pb2
from mla_client.service.projected import ProjectedWeights
from mla_client.types import (DType, Geometry, ModelSpec, Prefix, PrefixMatch, Probe,
                              SequenceState)

# By number in the contract.
_PRECISIONS = ("", "bf16", "split")
_KV_FORMATS = ("", "bf16", "fp8_tensor", "fp8_row", "fp8_page")
_ROPE_LAYOUTS = ("", "interleaved", "halves")
_PROJECTED_DTYPES = ("", "bf16", "f32", "e4m3")
_ATTENTION = ("", "dense", "sparse_v32", "sparse_v4")
_FP8_COMPUTE = ("", "off", "on")
MATCH_ENDS = ("", "all", "absent", "diverged", "evicted", "deferred")
# Rows of a sequence, at most: with the rows of a step, positions still fit 63 bits.
MOST_ROWS = 2**62


def name_of(number: int, names: Seq[str]) -> str:
    """Returns the name of an enum's number; its digits, if a newer server sends another."""
    return names[number] if 0 <= number < len(names) else str(number)


def _number_of(name: str, names: Tuple[str, ...], field: str) -> int:
    if name in names:
        return names.index(name)
    if name.isdecimal() and len(names) <= int(name) < 2**31:
        return int(name)  # a value that a newer server has named
    known = ", ".join(repr(one) for one in names[1:])
    raise errors.InvalidArgument(f"model.{field}: got {name!r}, must be {known} or ''")


def wrong_answer(call: str, what: str, got: Any, wanted: Any) -> errors.DataLoss:
    """Returns the error for an answer that contradicts the request."""
    return errors.DataLoss(f"{call}: the server's answer has {what} {got}, must be {wanted}",
                           errors.ErrorDetail(field=what, got=str(got), limit=str(wanted),
                                              reason="wrong_answer"))


def prefix_to_proto(prefix: Prefix) -> sequence_pb2.Prefix:
    """Returns the message for a prefix; it cannot say `max_rows` 0, for which callers leave out the
    prefix.
    """
    if prefix.max_rows is not None and prefix.max_rows < 1:
        raise errors.InvalidArgument(
            f"prefix.max_rows: got {prefix.max_rows}, must be 1 or more, or None")
    try:
        return sequence_pb2.Prefix(token_ids=prefix.token_ids, page_keys=prefix.page_keys,
                                   salt=prefix.salt, max_rows=prefix.max_rows or 0)
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument(f"prefix: {error}") from error


def match_from_proto(match: Any) -> PrefixMatch:
    return PrefixMatch(match.rows, name_of(match.end, MATCH_ENDS))


def probe_from_proto(reply: Any) -> Probe:
    rows = reply.rows_in_pool + reply.rows_in_host + reply.rows_in_file
    if rows > reply.rows_asked:
        raise wrong_answer("probe", "rows", rows, f"at most {reply.rows_asked}")
    return Probe(reply.boot_id, reply.rows_asked, reply.rows_in_pool, reply.rows_in_host,
                 reply.rows_in_file, reply.kv_bytes_free, reply.kv_bytes_total, reply.sequences,
                 reply.queued_requests, reply.wait_us / 1e6, reply.draining, reply.kv_bytes_cached)


def state_of(info: Any, call: str = "sequence", sequence_id: Optional[int] = None) -> SequenceState:
    """Returns the state of a sequence in a reply; with `sequence_id`, it must be that sequence."""
    if sequence_id is not None and info.sequence_id != sequence_id:
        raise wrong_answer(call, "sequence_id", f"{info.sequence_id:#x}", f"{sequence_id:#x}")
    if info.length > MOST_ROWS:
        raise wrong_answer(call, "length", info.length, f"at most {MOST_ROWS}")
    return SequenceState(info.sequence_id, info.epoch, info.length, info.lease_left_ms,
                         info.in_step, info.open_step, info.model_id, info.client_id,
                         info.page_groups, info.declared,
                         info.tail_position if info.HasField("tail_position") else None,
                         info.tenant, info.age_ms if info.HasField("age_ms") else None,
                         info.kv_bytes)


def only_of(reply: Any, sequence_id: int) -> SequenceState:
    """Returns the sequence that was asked for. Raises NotFound; with the reason "moved", it names
    the server that has the sequence.
    """
    if reply.sequences:
        return state_of(reply.sequences[0], "get", sequence_id)
    peer = next((one.peer for one in reply.moved if one.sequence_id == sequence_id), "")
    fate = f"has moved to {peer}" if peer else "is not open here"
    raise errors.NotFound(
        f"sequence {sequence_id:#x} {fate}",
        errors.ErrorDetail(field="sequence_id", peer=peer,
                           reason="moved" if peer else "sequence_not_found"))


def lengths_of(reply: Any, wanted: Seq[int]) -> List[int]:
    """Returns the lengths that a step has left, one for each of its sequences."""
    lengths = list(reply.end_step.lengths)
    if len(lengths) != len(wanted):
        raise wrong_answer("end_step", "lengths", f"of {len(lengths)} sequences", len(wanted))
    if lengths != list(wanted):
        raise wrong_answer("end_step", "lengths", lengths, list(wanted))
    return lengths


def spec_to_proto(spec: ModelSpec) -> model_pb2.ModelSpec:
    kv_format = _number_of(spec.kv_format, _KV_FORMATS, "kv_format")
    bf16 = kv_format <= tensor_pb2.KV_FORMAT_BF16
    return model_pb2.ModelSpec(
        model_id=spec.model_id, geometry=tensor_pb2.Geometry(
            num_heads=spec.geometry.num_heads, kv_lora_rank=spec.geometry.kv_lora_rank,
            rope_dim=spec.geometry.rope_dim, nope_dim=spec.geometry.nope_dim,
            v_dim=spec.geometry.v_dim),
        layers=spec.layers, softmax_scale=spec.softmax_scale,
        kv_dtype=tensor_pb2.DTYPE_BF16 if bf16 else tensor_pb2.DTYPE_UNSPECIFIED,
        kv_format=kv_format,
        rope_owner=(model_pb2.ROPE_OWNER_SERVER if spec.rope_layout
                    else model_pb2.ROPE_OWNER_WORKER),
        rope_layout=_number_of(spec.rope_layout, _ROPE_LAYOUTS, "rope_layout"),
        q_lora_rank=spec.geometry.q_lora_rank, hidden_size=spec.geometry.hidden_size,
        projected_dtype=_number_of(spec.projected_dtype, _PROJECTED_DTYPES, "projected_dtype"),
        page_size=spec.page_size,
        query_precision=_number_of(spec.query_precision, _PRECISIONS, "query_precision"),
        fp8_compute=_number_of(spec.fp8_compute, _FP8_COMPUTE, "fp8_compute"),
        attention=_number_of(spec.attention, _ATTENTION, "attention"), top_k=spec.top_k,
        index_heads=spec.index_heads, index_dim=spec.index_dim,
        weights_digest=spec.weights_digest, window=spec.window, ratios=spec.ratios,
        entry_format=_number_of(spec.entry_format, _KV_FORMATS, "entry_format"),
        tail_bytes=spec.tail_bytes, needs_sinks=spec.needs_sinks)


def spec_from_proto(message: Any) -> ModelSpec:
    geometry = message.geometry
    return ModelSpec(message.model_id,
                     Geometry(geometry.num_heads, geometry.kv_lora_rank, geometry.rope_dim,
                              geometry.nope_dim, geometry.v_dim,
                              message.attention == model_pb2.ATTENTION_KIND_SPARSE_V4,
                              message.q_lora_rank, message.hidden_size),
                     message.layers, message.softmax_scale, message.page_size,
                     name_of(message.query_precision, _PRECISIONS),
                     name_of(message.kv_format, _KV_FORMATS),
                     name_of(message.attention, _ATTENTION), message.top_k, message.index_heads,
                     message.index_dim, message.weights_digest,
                     name_of(message.fp8_compute, _FP8_COMPUTE), message.window,
                     tuple(message.ratios), name_of(message.entry_format, _KV_FORMATS),
                     message.tail_bytes, message.needs_sinks,
                     name_of(message.rope_layout, _ROPE_LAYOUTS),
                     name_of(message.projected_dtype, _PROJECTED_DTYPES))


def check_in_force(asked: ModelSpec, got: ModelSpec) -> None:
    """The registered model must be the requested one: tensors are laid out by it."""
    if asked.kv_format not in ("", "bf16", got.kv_format):
        raise errors.Unimplemented(f"model.kv_format: the server does not know "
                                   f"{asked.kv_format!r} and keeps rows as bf16")
    if asked.attention not in ("", "dense", got.attention):
        raise errors.Unimplemented(f"model.attention: the server does not know "
                                   f"{asked.attention!r}")
    if asked.index_heads != got.index_heads:
        raise errors.Unimplemented("model.index_heads: the server has no indexer")
    if asked.needs_sinks != got.needs_sinks:
        raise errors.Unimplemented(
            "model.needs_sinks: the server takes sinks with register_model only")
    for field in ("num_heads", "kv_lora_rank", "rope_dim", "nope_dim", "v_dim", "q_lora_rank",
                  "hidden_size"):
        wanted, value = getattr(asked.geometry, field), getattr(got.geometry, field)
        if wanted != value:
            raise wrong_answer("register_model", f"model.geometry.{field}", value, wanted)
    for field in ("model_id", "layers", "softmax_scale", "top_k", "index_dim", "window",
                  "tail_bytes", "rope_layout"):
        wanted, value = getattr(asked, field), getattr(got, field)
        if wanted != value:
            raise wrong_answer("register_model", f"model.{field}", value, wanted)
    if tuple(asked.ratios) != got.ratios:
        raise wrong_answer("register_model", "model.ratios", got.ratios, tuple(asked.ratios))
    if asked.page_size not in (0, got.page_size) or got.page_size < 1:
        raise wrong_answer("register_model", "model.page_size", got.page_size,
                           asked.page_size or "1 or more")


def projected_chunks(model_id: str, layer: int, head_begin: int, weights: ProjectedWeights,
                     chunk_bytes: int) -> Iterator[Any]:
    """Does what `weight_chunks` does, for W_UQ and then W_O."""
    Request = model_pb2.UploadWeightsRequest
    yield Request(header=Request.Header(model_id=model_id))
    digest = hashlib.sha256()
    heads = weights.heads
    for part in (model_pb2.WEIGHT_PART_QUERIES, model_pb2.WEIGHT_PART_OUTPUTS):
        head_bytes = weights.head_bytes(part == model_pb2.WEIGHT_PART_QUERIES)
        heads_a_chunk = max(1, chunk_bytes // (head_bytes + head_bytes // 64))
        for begin in range(0, heads, heads_a_chunk):
            end = min(heads, begin + heads_a_chunk)
            payload = weights.payload(part == model_pb2.WEIGHT_PART_QUERIES, begin, end,
                                      head_begin)
            digest.update(payload)
            yield Request(chunk=Request.Chunk(
                layer=layer, head_begin=head_begin + begin, head_count=end - begin, part=part,
                dtype=tensor_pb2.DTYPE_F8_E4M3 if weights.w_uq_scales is not None
                else tensor_pb2.DTYPE_BF16, payload=payload))
    yield Request(trailer=Request.Trailer(sha256=digest.digest()))


def weight_chunks(model_id: str, layer: int, head_begin: int, w_uk: npt.NDArray,
                   w_uv: npt.NDArray, chunk_bytes: int) -> Iterator[Any]:
    """Yields the messages of one upload: header, chunks of whole heads within the bound, digest."""
    Request = model_pb2.UploadWeightsRequest
    yield Request(header=Request.Header(model_id=model_id))
    digest = hashlib.sha256()
    head_bytes = 2 * (w_uk[0].size + w_uv[0].size)
    heads_a_chunk = max(1, chunk_bytes // head_bytes)
    for begin in range(0, len(w_uk), heads_a_chunk):
        heads = slice(begin, begin + heads_a_chunk)
        payload = (wire.encode(w_uk[heads], DType.BF16).tobytes() +
                   wire.encode(w_uv[heads], DType.BF16).tobytes())
        digest.update(payload)
        yield Request(chunk=Request.Chunk(layer=layer, head_begin=head_begin + begin,
                                          head_count=len(w_uk[heads]), payload=payload))
    yield Request(trailer=Request.Trailer(sha256=digest.digest()))
