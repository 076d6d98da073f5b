"""What models LocalReference takes."""

from __future__ import annotations

import dataclasses
from typing import Sequence as Seq

from mla_client import errors
from mla_client.local.sinks import check_sinks
from mla_client.types import ModelSpec


def refuse_scales(scales: Seq[float]) -> None:
    if len(scales) > 0:
        raise errors.FailedPrecondition("kv_scales: got scales for bf16 rows, which have none")


def _check_projected(spec: ModelSpec) -> None:
    geometry = spec.geometry
    projects = spec.rope_layout != ""
    if spec.rope_layout not in ("", "interleaved", "halves"):
        raise errors.InvalidArgument(f"model.rope_layout: got {spec.rope_layout!r}")
    if spec.projected_dtype not in (("", "bf16", "e4m3") if projects else ("",)):
        raise errors.InvalidArgument(f"model.projected_dtype: got {spec.projected_dtype!r} with "
                                     f"rope_layout {spec.rope_layout!r}")
    if spec.projected_dtype == "e4m3" and (
            (geometry.nope_dim + geometry.rope_dim) % 16 or geometry.v_dim % 64):
        raise errors.InvalidArgument(
            f"model.projected_dtype: got 'e4m3' with nope_dim + rope_dim "
            f"{geometry.nope_dim + geometry.rope_dim} and v_dim {geometry.v_dim}, must be "
            "multiples of 16 and 64")
    if (geometry.q_lora_rank > 0) != projects or (geometry.hidden_size > 0) != projects or (
            projects and (not geometry.nope_dim or geometry.rope_dim % 2)):
        raise errors.InvalidArgument(
            f"model.q_lora_rank: got {geometry.q_lora_rank}, hidden_size "
            f"{geometry.hidden_size} with rope_layout {spec.rope_layout!r}")


def checked_model(spec: ModelSpec, kv_scales: Seq[float], sinks: Seq[float]) -> ModelSpec:
    """The spec in force, with its defaults."""
    geometry = spec.geometry
    if spec.layers < 1 or not spec.softmax_scale > 0 or geometry.num_heads < 1:
        raise errors.InvalidArgument("model: layers, softmax_scale and num_heads must be > 0")
    if spec.kv_format not in ("", "bf16"):
        raise errors.Unimplemented(
            f"model.kv_format: got {spec.kv_format!r}, rows are bf16 in this process")
    if spec.fp8_compute == "on":
        raise errors.InvalidArgument("model.fp8_compute: got 'on' with rows of bf16")
    refuse_scales(kv_scales)
    sparse, windowed = spec.attention == "sparse_v32", spec.attention == "sparse_v4"
    if spec.attention not in ("", "dense", "sparse_v32", "sparse_v4") or (
            not windowed and (spec.top_k > 0) != sparse):
        raise errors.InvalidArgument(
            f"model.top_k: got {spec.top_k} with attention {spec.attention!r}")
    if (spec.index_heads > 0) != (spec.index_dim > 0) or (spec.index_heads > 0 and not sparse):
        raise errors.InvalidArgument(
            f"model.index_heads: got {spec.index_heads} of {spec.index_dim} elements with "
            f"attention {spec.attention!r}")
    if (spec.window > 0) != windowed or len(spec.ratios) != spec.layers * windowed:
        raise errors.InvalidArgument(
            f"model.window: got {spec.window} rows and {len(spec.ratios)} ratios with "
            f"attention {spec.attention!r}")
    if any(ratio and (spec.page_size or 64) % ratio for ratio in spec.ratios):
        raise errors.InvalidArgument(
            f"model.ratios: got {spec.ratios}, must divide the page size")
    check_sinks(spec, sinks)
    _check_projected(spec)
    if not 0 <= spec.tail_bytes < 1 << 31 or (spec.tail_bytes and not windowed):
        raise errors.InvalidArgument(
            f"model.tail_bytes: got {spec.tail_bytes} with attention {spec.attention!r}")
    if spec.entry_format not in ("", "bf16"):
        raise errors.Unimplemented(
            f"model.entry_format: got {spec.entry_format!r}, entries are bf16 in this process")
    geometry = dataclasses.replace(geometry, wide_output=windowed)
    return dataclasses.replace(spec, page_size=spec.page_size or 64, kv_format="bf16",
                               fp8_compute="", geometry=geometry,
                               entry_format="bf16" if windowed else "",
                               attention=spec.attention or "dense",
                               projected_dtype="bf16" if spec.rope_layout else "",
                               query_precision=spec.query_precision or "split")
