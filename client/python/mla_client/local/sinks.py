"""Sinks of LocalReference's models: which may be set, and when."""

from __future__ import annotations

from typing import List, Sequence as Seq

import numpy as np
import numpy.typing as npt

from mla_client import errors
from mla_client.local.attention import ModelState
from mla_client.types import ModelSpec


def check_sinks(spec: ModelSpec, sinks: Seq[float]) -> None:
    """Checks the sinks of a registration: none, or one for each layer and head."""
    windowed = spec.attention == "sparse_v4"
    if len(sinks) not in (0, spec.layers * spec.geometry.num_heads * windowed):
        raise errors.InvalidArgument("sinks: must be one a layer and head of a window")
    _check_values(np.array(sinks, np.float64))
    if spec.needs_sinks and not windowed:
        raise errors.InvalidArgument("model.needs_sinks: must be False without a window")


def set_sinks(model: ModelState, layer: int, head: int, sinks: npt.NDArray,
              in_use: bool) -> List[int]:
    """Sets `sinks` [layers, heads] from `layer` and `head` on; `in_use`: sequences are open.
    Returns the layers that still miss some."""
    spec = model.spec
    if not spec.window:
        raise errors.InvalidArgument("sinks: must be none, the attention has no window")
    for name, begin, count, limit in (("layer", layer, sinks.shape[0], spec.layers),
                                      ("head", head, sinks.shape[1], spec.geometry.num_heads)):
        if begin >= limit:
            raise errors.InvalidArgument(f"{name}_begin: got {begin}, must be below {limit}")
        if begin + count > limit:
            raise errors.InvalidArgument(
                f"{name}_count: got {count}, must be at most {limit - begin}")
    _check_values(sinks.reshape(-1))
    place = model.sinks[layer:layer + sinks.shape[0], head:head + sinks.shape[1]]
    if in_use and (~np.isnan(place) & (place != sinks)).any():
        raise errors.AlreadyExists("sinks: got other ones while sequences are open")
    place[...] = sinks
    return missing_layers(model)


def missing_layers(model: ModelState) -> List[int]:
    """Layers that lack sinks which the model needs."""
    return [int(layer) for layer in np.flatnonzero(np.isnan(model.sinks).any(axis=1))]


def _check_values(values: npt.NDArray) -> None:
    bad = np.flatnonzero(~np.isfinite(values) & (values != -np.inf))
    if bad.size:
        raise errors.InvalidArgument(
            f"sinks[{bad[0]}]: got {values[bad[0]]}, must be a finite number, or -inf: none")
