"""The attention layers of one process, as engines build them, and what the server gets of them.

Weights may be arrays of numpy or tensors of torch: what is done to them here both can.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence as Seq, Tuple

import numpy as np
import numpy.typing as npt

from mla_client import errors
from mla_client.serving.plan import Part, Ranks
from mla_client.service import Model
from mla_client.types import Geometry, ModelSpec

# Two numbers of one scale that were computed on different ways.
SCALE_TOLERANCE = 1e-5
# W_UK [heads, nope, lora] and W_UV [heads, lora, v] of a layer.
Pair = Tuple[Any, Any]
# The pair, and where the server has the other projections W_UQ [heads, nope + rope, q_lora_rank]
# and W_O [hidden_size, heads, v], too.
Weights = Tuple[Any, ...]


def number_of(name: str) -> int:
    """The number in a name like "model.layers.3.self_attn.kv_b_proj"."""
    numbers = re.findall(r"\.(\d+)\.", f".{name}.")
    if len(numbers) != 1:
        raise errors.Unimplemented(f"attention layer {name!r}: its name must have one number")
    return int(numbers[0])


class Layers:
    """The layers of one process by their numbers in the model; `kept` are the engine's own things,
    one a layer. All layers have one geometry, of this process's heads, and one scale."""

    def __init__(self) -> None:
        self._kept: Dict[int, Any] = {}
        self.places: Dict[int, int] = {}  # of layers among those of this process, by their numbers
        self._like: Optional[Tuple[Geometry, float]] = None

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, name: str, number: int, geometry: Geometry, scale: float, kept: Any) -> None:
        """Another layer. Unimplemented if it differs from those before it."""
        if self._like is None:
            self._like = geometry, scale
        if self._like[0] != geometry or abs(self._like[1] - scale) > SCALE_TOLERANCE * abs(scale):
            raise errors.Unimplemented(
                f"{name}: it differs from layers before it in dimensions or scale: {geometry}, "
                f"scale {scale}; before: {self._like[0]}, scale {self._like[1]}")
        self._kept[number] = kept
        self.places = {layer: place for place, layer in enumerate(sorted(self._kept))}

    def check_whole(self, count: int = 0) -> None:
        """Unimplemented if the layers are not numbered from 0, up to `count` if it is given."""
        numbers = sorted(self._kept)
        if not numbers or numbers != list(range(count or len(numbers))):
            raise errors.Unimplemented(
                f"attention layers {numbers}: must be numbered from 0"
                + (f" to {count - 1}" if count else ""))

    def at(self, number: int) -> Any:
        """What was kept of a layer."""
        return self._kept[number]

    def in_order(self) -> List[Any]:
        """What was kept of each layer, in the order in which the server has them."""
        return [self._kept[number] for number in sorted(self._kept)]

    @property
    def geometry(self) -> Geometry:
        """Of each layer, with this process's heads."""
        return self._shared()[0]

    @property
    def scale(self) -> float:
        """Of the scores before the softmax."""
        return self._shared()[1]

    def spec(self, model_id: str, ranks: Ranks = Ranks(), page_size: int = 0, **others: Any
             ) -> ModelSpec:
        """The model as it is registered, with the heads of all ranks. `others`: of ModelSpec."""
        own = self.geometry
        whole = dataclasses.replace(own, num_heads=own.num_heads * ranks.size)
        return ModelSpec(model_id, whole, len(self), self.scale, page_size, **others)

    def _shared(self) -> Tuple[Geometry, float]:
        if self._like is None:
            raise errors.Unimplemented("the model has no attention layers that are MLA")
        return self._like


def split(matrix: Any, geometry: Geometry) -> Pair:
    """W_UK [heads, nope, lora] and W_UV [heads, lora, v] of a `kv_b_proj` [heads * (nope + v),
    lora], as views. Unimplemented for a matrix of another shape: it is packed, or a slice."""
    want = geometry.num_heads * (geometry.nope_dim + geometry.v_dim), geometry.kv_lora_rank
    if tuple(matrix.shape) != want:
        raise errors.Unimplemented(
            f"kv_b_proj: got {tuple(matrix.shape)}, must be the plain matrix {want}: neither "
            "quantised nor split")
    whole = matrix.reshape(geometry.num_heads, geometry.nope_dim + geometry.v_dim, -1)
    return whole[:, :geometry.nope_dim], whole[:, geometry.nope_dim:].swapaxes(1, 2)


def check_pair(name: str, pair: Pair, geometry: Geometry) -> None:
    """Unimplemented if weights that an engine has cut itself are not those of the geometry."""
    got = tuple(None if weight is None else tuple(weight.shape) for weight in pair)
    want = ((geometry.num_heads, geometry.nope_dim, geometry.kv_lora_rank),
            (geometry.num_heads, geometry.kv_lora_rank, geometry.v_dim))
    if got != want:
        raise errors.Unimplemented(f"{name}: W_UK and W_UV are {got}, must be {want}")


def dense(weights: Weights) -> Weights:
    """The weights as contiguous float32 arrays of the host."""
    found = []
    for weight in weights:
        if hasattr(weight, "detach"):
            weight = weight.detach().to("cpu").float().numpy()
        found.append(np.ascontiguousarray(weight, dtype=np.float32))
    return tuple(found)


def id_of(kind: str, weights: Iterable[Weights]) -> str:
    """A model's id that follows from its weights: workers of one checkpoint share a model."""
    digest = hashlib.sha256()
    for one in weights:
        for part in dense(one):
            digest.update(part.data)
    return f"{kind}-{digest.hexdigest()[:16]}"


def upload(model: Model, weights: Callable[[int], Weights], ranks: Ranks = Ranks()) -> None:
    """Uploads the weights of all layers of this rank's heads; a rank alone completes them."""
    first, _ = ranks.heads(model.spec.geometry.num_heads)
    complete = False
    for layer in range(model.spec.layers):
        w_uk, w_uv, *projections = weights(layer)
        if projections:
            w_uq, w_o = projections
            model.upload_projected(layer, w_uq, w_o, head_begin=first)
        complete = model.upload_weights(layer, w_uk, w_uv, head_begin=first).complete
    if ranks.size == 1 and not complete:
        raise errors.Internal(
            f"model {model.spec.model_id}: weights are not complete after their upload")


def weights_of(kept: Seq[Any], of: Callable[[Any], Weights]) -> Callable[[int], Weights]:
    """The weights of the layers that `kept` has, as they are uploaded."""
    return lambda place: dense(of(kept[place]))


def rotations_of(table: Optional[npt.NDArray], parts: Iterable[Part]) -> Optional[npt.NDArray]:
    """Rotations of the rows of `parts`, [rows, rope], of a table of all positions; None without
    one."""
    if table is None:
        return None
    return np.concatenate([table[part.computed:part.computed + part.end - part.begin]
                           for part in parts])
