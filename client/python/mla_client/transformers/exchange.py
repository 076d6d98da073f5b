"""Tensors on their way to a service and back."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import numpy.typing as npt
import torch

from mla_client import errors
from mla_client.service import Model
from mla_client.transformers.batch import Forward
from mla_client.types import Buffers, DType, Profile


def tensor_of(array: npt.NDArray) -> torch.Tensor:
    """A tensor over the same memory; uint16 are bf16 patterns."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Exchange:
    """Sends the attention of one layer after another. Tensors travel as bf16 if the model computes
    in bf16, else as float32; they are written into the transport's own memory where it has room.
    Belongs to one thread at a time."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._buffers: Optional[Buffers] = None
        self._stream: Any = None  # that the buffers belong to
        self._forward: Optional[Forward] = None
        self._take = self._give = self._source = torch.zeros(0, dtype=torch.int64)

    def attend(self, forward: Forward, layer: int, query: torch.Tensor,
               rows: torch.Tensor) -> torch.Tensor:
        """query [batch, heads, new, nope + rope], rows [batch, new, lora + rope] -> the outputs
        [batch, new, heads, v]; zeros where there is padding."""
        batch, heads, new, width = query.shape
        geometry = self._model.spec.geometry
        shape = (batch * new, heads, geometry.v_dim)
        if forward.step is None:
            return query.new_zeros(shape).view(batch, new, *shape[1:])
        q = query.transpose(1, 2).reshape(batch * new, heads, width)
        kv = rows.reshape(batch * new, geometry.row_dim)
        if not forward.plain:
            self._place(forward, query.device)
            q, kv = q[self._take], kv[self._take]
        dtype = DType.BF16 if query.dtype == torch.bfloat16 else DType.F32
        buffers = self._room(len(q), dtype, forward.step)
        tensor_of(buffers.q).copy_(q)
        tensor_of(buffers.kv).copy_(kv)
        forward.step.attend(layer, buffers.q, buffers.kv, Profile.EXPANDED, out=buffers)
        # A copy even on the CPU: the next layer writes to the same memory.
        o = tensor_of(buffers.o).to(device=query.device, dtype=query.dtype, copy=True)
        if not forward.plain:
            o = o.new_zeros(shape).index_copy_(0, self._give, o[self._source])
        return o.view(batch, new, *shape[1:])

    def release(self) -> None:
        """Gives the memory back."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            buffers.release()

    def _place(self, forward: Forward, device: torch.device) -> None:
        """The pass's indices on the device of its tensors, once a pass."""
        if self._forward is not forward or self._take.device != device:
            self._forward = forward
            self._take, self._give, self._source = (
                torch.from_numpy(indices).to(device)
                for indices in (forward.take, forward.give, forward.source))

    def _room(self, rows: int, dtype: DType, step: Any) -> Buffers:
        """Buffers of so many rows: those of the last call if they fit. A stream that broke took its
        memory along."""
        buffers = self._buffers
        if (buffers is None or buffers.q is None or len(buffers.q) != rows
                or buffers.dtype != dtype or self._stream is not step._handle):
            self.release()
            buffers = self._model.service.buffers(self._model, rows, Profile.EXPANDED, dtype=dtype,
                                                  o_dtype=dtype)
            if buffers.kv is None or buffers.q is None or buffers.o is None:
                raise errors.Internal("buffers of EXPANDED without tensors")
            self._buffers, self._stream = buffers, step._handle
        return buffers
