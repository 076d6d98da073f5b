"""PyTorch tensors on their way to a service and back. Needs torch."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import numpy.typing as npt
import torch

from mla_client import errors
from mla_client.service import Model, Step
from mla_client.types import Buffers, DType, Profile

__all__ = ["Sender", "tensor_of"]


def tensor_of(array: npt.NDArray) -> torch.Tensor:
    """A tensor over the same memory; uint16 are bf16 patterns."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Sender:
    """Sends the attention of one layer after another, all in one profile with queries. Tensors
    travel as bf16 if they are bf16, else as float32; they are written into the transport's own
    memory where it has room. Belongs to one thread at a time."""

    def __init__(self, model: Model, profile: Profile = Profile.EXPANDED) -> None:
        self._model = model
        self._profile = profile
        self._buffers: Optional[Buffers] = None
        self._stream: Any = None  # that the buffers belong to

    def attend(self, step: Step, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """q [rows, heads, nope + rope], kv [rows, lora + rope] -> o [rows, heads, v] on the device
        and of the type of q; with ABSORBED q [rows, heads, lora + rope] -> o [rows, heads, lora].
        """
        dtype = DType.BF16 if q.dtype == torch.bfloat16 else DType.F32
        buffers = self._room(len(q), dtype, step)
        assert buffers.kv is not None and buffers.q is not None and buffers.o is not None
        tensor_of(buffers.q).copy_(q)
        tensor_of(buffers.kv).copy_(kv)
        step.attend(layer, buffers.q, buffers.kv, self._profile, out=buffers)
        # A copy even on the CPU: the next layer writes to the same memory.
        return tensor_of(buffers.o).to(device=q.device, dtype=q.dtype, copy=True)

    def release(self) -> None:
        """Gives the memory back."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            buffers.release()

    def _room(self, rows: int, dtype: DType, step: Step) -> Buffers:
        """Buffers of so many rows: those of the last call if they fit. A stream that broke took its
        memory along."""
        buffers = self._buffers
        if (buffers is None or buffers.q is None or len(buffers.q) != rows
                or buffers.dtype != dtype or self._stream is not step._handle):
            self.release()
            buffers = self._model.service.buffers(self._model, rows, self._profile, dtype=dtype,
                                                  o_dtype=dtype)
            if buffers.kv is None or buffers.q is None or buffers.o is None:
                raise errors.Internal("buffers of a profile with queries lack tensors")
            self._buffers, self._stream = buffers, step._handle
        return buffers
