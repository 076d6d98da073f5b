"""The client's types as messages of the contract, and back."""

from __future__ import annotations

import hashlib
from typing import Any, Iterator, Tuple

import numpy.typing as npt

from mla_client import errors, wire
from mla_client.gen import model_pb2, sequence_pb2, tensor_pb2
from mla_client.pages.events import match_end
from mla_client.types import DType, Geometry, ModelSpec, Prefix, PrefixMatch

# By number in the contract.
_PRECISIONS = ("", "bf16", "split")
_KV_FORMATS = ("", "bf16", "fp8_tensor", "fp8_row", "fp8_page")
_ATTENTION = ("", "dense", "sparse_v32", "sparse_v4")
_FP8_COMPUTE = ("", "off", "on")


def prefix_to_proto(prefix: Prefix) -> sequence_pb2.Prefix:
    try:
        return sequence_pb2.Prefix(token_ids=prefix.token_ids, page_keys=prefix.page_keys,
                                   salt=prefix.salt, max_rows=prefix.max_rows)
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument(f"prefix: {error}") from error


def match_from_proto(match: Any) -> PrefixMatch:
    return PrefixMatch(match.rows, match_end(match.end))


def _number_of(name: str, names: Tuple[str, ...], field: str) -> int:
    if name not in names:
        known = ", ".join(repr(one) for one in names[1:])
        raise errors.InvalidArgument(f"model.{field}: got {name!r}, must be {known} or ''")
    return names.index(name)


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
        rope_owner=model_pb2.ROPE_OWNER_WORKER, page_size=spec.page_size,
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
                              message.attention == model_pb2.ATTENTION_KIND_SPARSE_V4),
                     message.layers, message.softmax_scale, message.page_size,
                     _PRECISIONS[message.query_precision], _KV_FORMATS[message.kv_format],
                     _ATTENTION[message.attention], message.top_k, message.index_heads,
                     message.index_dim, message.weights_digest,
                     _FP8_COMPUTE[message.fp8_compute], message.window, tuple(message.ratios),
                     _KV_FORMATS[message.entry_format], message.tail_bytes,
                     message.needs_sinks)


def weight_chunks(model_id: str, layer: int, head_begin: int, w_uk: npt.NDArray,
                   w_uv: npt.NDArray, chunk_bytes: int) -> Iterator[Any]:
    """The messages of one upload: header, chunks of whole heads within the bound, digest."""
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
