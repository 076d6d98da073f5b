"""The attention layers of one process, as engines build them, and what the server gets of them.

Weights may be arrays of numpy or tensors of torch: what is done to them here both can.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence as Seq, Tuple

import numpy as np
import numpy.typing as npt

from mla_client import errors
from mla_client.serving.plan import Part, Ranks
from mla_client.service import Model
from mla_client.types import Geometry, ModelSpec

LOG = logging.getLogger("mla_client")
# Two numbers of one scale that were computed on different ways.
SCALE_TOLERANCE = 1e-5
# W_UK [heads, nope, lora] and W_UV [heads, lora, v] of a layer.
Pair = Tuple[Any, Any]
# The pair, and where the server has the other projections W_UQ [heads, nope + rope, q_lora_rank]
# and W_O [hidden_size, heads, v], too, each of which may be Codes.
Weights = Tuple[Any, ...]
# ModelSpec.projected_dtype as users may ask for it; "": as the checkpoint has the weights.
PROJECTED_DTYPES = ("", "bf16", "e4m3")
# A scale of codes that a server holds is for so many rows of W_UQ, and columns of W_O.
SCALED_ROWS, SCALED_COLUMNS = 16, 64


@dataclasses.dataclass(frozen=True)
class Codes:
    """W_UQ or W_O of all heads in eight bits, as checkpoints have them: the number of a code times
    the scale of its block, rounded to bf16, is a weight."""

    codes: Any   # uint8, e4m3; in the shape of the weights
    scales: Any  # float32, of the blocks of 128 x 128 of the checkpoint's matrix


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


def check_projected_dtype(asked: Any, projected: bool) -> None:
    """InvalidArgument for a type that is none, and for one without projections on the server."""
    if asked not in PROJECTED_DTYPES:
        raise errors.InvalidArgument(
            f'projected_dtype: got {asked!r}, must be "bf16", "e4m3", or "" for the type of the '
            "checkpoint")
    if asked and not projected:
        raise errors.InvalidArgument(f"projected_dtype: got {asked!r} without projected")


def projected_dtype_of(asked: str, reasons: Iterable[str], geometry: Geometry) -> str:
    """ModelSpec.projected_dtype: what is asked for, or else "e4m3" if every layer has Codes.
    `reasons` say in the order of the layers why one has none; "" if it has them. Unimplemented,
    with the first reason, if "e4m3" is asked for and cannot be."""
    if asked == "bf16":
        return asked
    rows, columns = geometry.nope_dim + geometry.rope_dim, geometry.v_dim
    reason = next((f"layer {place}, {one}" for place, one in enumerate(reasons) if one), "")
    if not reason and (rows % SCALED_ROWS or columns % SCALED_COLUMNS):
        reason = (f"nope_dim + rope_dim {rows} and v_dim {columns}, must be multiples of "
                  f"{SCALED_ROWS} and {SCALED_COLUMNS}")
    if not reason:
        return "e4m3"
    if asked:
        raise errors.Unimplemented(f"projected_dtype: e4m3: {reason}")
    LOG.info("mla: the server holds W_UQ and W_O as bf16: %s", reason)
    return "bf16"


def _on_host(weight: Any, dtype: Any) -> npt.NDArray:
    if hasattr(weight, "detach"):
        weight = weight.detach().to("cpu")
        weight = (weight if dtype == np.uint8 else weight.float()).numpy()
    return np.ascontiguousarray(weight, dtype=dtype)


def dense(weights: Weights) -> Weights:
    """The weights as contiguous arrays of the host: float32, and uint8 for codes."""
    return tuple(Codes(_on_host(one.codes, np.uint8), _on_host(one.scales, np.float32))
                 if isinstance(one, Codes) else _on_host(one, np.float32) for one in weights)


def id_of(kind: str, weights: Iterable[Weights]) -> str:
    """A model's id that follows from its weights: workers of one checkpoint share a model."""
    digest = hashlib.sha256()
    for one in weights:
        for part in dense(one):
            for array in (part.codes, part.scales) if isinstance(part, Codes) else (part,):
                digest.update(array.data)
    return f"{kind}-{digest.hexdigest()[:16]}"


def upload(model: Model, weights: Callable[[int], Weights], ranks: Ranks = Ranks()) -> None:
    """Uploads the weights of all layers of this rank's heads; a rank alone completes them. Codes
    go as codes to every model: a server that holds bf16 decodes them. AlreadyExists if the server
    holds codes under this model's name, and these weights have none."""
    first, _ = ranks.heads(model.spec.geometry.num_heads)
    complete = False
    for layer in range(model.spec.layers):
        w_uk, w_uv, *projections = weights(layer)
        if projections:
            _upload_projections(model, layer, projections, first)
        complete = model.upload_weights(layer, w_uk, w_uv, head_begin=first).complete
    if ranks.size == 1 and not complete:
        raise errors.Internal(
            f"model {model.spec.model_id}: weights are not complete after their upload")


def _upload_projections(model: Model, layer: int, weights: Seq[Any], first: int) -> None:
    w_uq, w_o = weights
    if isinstance(w_uq, Codes):
        model.upload_projected(layer, w_uq.codes, w_o.codes, head_begin=first,
                               w_uq_scales=w_uq.scales, w_o_scales=w_o.scales)
        return
    if model.spec.projected_dtype == "e4m3":
        raise errors.AlreadyExists(
            f"model {model.spec.model_id}: the server holds codes of e4m3 as its W_UQ and W_O, and "
            f"layer {layer} of this checkpoint has none")
    model.upload_projected(layer, w_uq, w_o, head_begin=first)


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
