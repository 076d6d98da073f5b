"""What the connector and the layers of a worker process share: the weights, then the model on the
server and its passes."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Optional, Tuple

import numpy.typing as npt
import torch

from mla_client import errors
from mla_client.pytorch import Sender
from mla_client.service import Model, Service
from mla_client.service.passes import Passes
from mla_client.types import Geometry, ModelSpec

STEP_LEASE_MS = 30_000


def layer_of(name: str) -> int:
    """The number in a name like "model.layers.3.self_attn.attn"."""
    numbers = re.findall(r"\.(\d+)\.", f".{name}.")
    if len(numbers) != 1:
        raise errors.Unimplemented(f"attention layer {name!r}: its name must have one number")
    return int(numbers[0])


def _array(weight: torch.Tensor) -> npt.NDArray:
    return weight.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()


class Runtime:
    """Of one process. Layers add their weights when they are loaded; `start` brings them to the
    server."""

    def __init__(self) -> None:
        self._geometry: Optional[Tuple[Geometry, float]] = None
        self._weights: Dict[int, Tuple[npt.NDArray, npt.NDArray]] = {}
        self._service: Any = None
        self._sender: Optional[Sender] = None
        self.passes: Optional[Passes] = None

    def add(self, name: str, geometry: Geometry, scale: float, w_uk: torch.Tensor,
            w_uv: torch.Tensor) -> None:
        """W_UK [heads, nope, lora] and W_UV [heads, lora, v] of a layer."""
        if self._geometry not in (None, (geometry, scale)):
            raise errors.Unimplemented(
                f"{name}: it differs from layers before it in dimensions or scale")
        self._geometry = geometry, scale
        self._weights[layer_of(name)] = (_array(w_uk), _array(w_uv))

    def start(self, connect: Callable[[], Service], model_id: str) -> None:
        """Registers the model and uploads the weights. They are kept here only where the service
        follows sequences to other servers, which get them then."""
        layers = len(self._weights)
        if self._geometry is None or sorted(self._weights) != list(range(layers)):
            raise errors.Unimplemented(
                f"attention layers {sorted(self._weights)}: they must be numbered from 0, all of "
                "one kind and in this process")
        geometry, scale = self._geometry
        self._service = connect()
        model = self._service.register_model(ModelSpec(model_id, geometry, layers, scale))
        weights, self._weights = self._weights, {}

        def upload(to: Model) -> None:
            for layer, (w_uk, w_uv) in sorted(weights.items()):
                to.upload_weights(layer, w_uk, w_uv)

        upload(model)
        self._service._prepare_moved(model_id, upload)
        self._sender = Sender()
        self.passes = Passes(model, STEP_LEASE_MS)

    def attend(self, name: str, q: torch.Tensor, kv: torch.Tensor) -> Optional[torch.Tensor]:
        """Attention of a layer: q [rows, heads, nope + rope], kv [rows, lora + rope] -> [rows,
        heads, v]; None in a pass without requests."""
        step = self.passes.step if self.passes is not None else None
        if step is None or self._sender is None or self.passes is None:
            return None
        o = self._sender.attend(step, layer_of(name), q, kv)
        self.passes.layer_done()
        return o

    def close(self) -> None:
        """Releases what the server has and ends the connection."""
        if self.passes is not None and self._sender is not None:
            self.passes.close()
            self._sender.release()
            self._service.close()
        self._geometry = self.passes = self._sender = None
        self._weights.clear()


runtime = Runtime()
