"""PyTorch tensors on their way to a service and back. Needs torch."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np
import numpy.typing as npt
import torch

from mla_client import errors
from mla_client.service import Step
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
    memory where it has room, those of a GPU into the server's GPU if the client has asked for
    memory there (`device_bytes` of Client.connect). Belongs to one thread at a time."""

    def __init__(self, profile: Profile = Profile.EXPANDED, rank: int = 0, ranks: int = 1) -> None:
        """Of `ranks` that share the heads of a layer, this one sends those of its place, and the
        first one the rows."""
        self._profile = profile
        self._rank = rank
        self._ranks = ranks
        self._buffers: Optional[Buffers] = None
        self._tensors: Tuple[Any, ...] = ()  # kv, q and o of the buffers
        self._shape: Any = None   # that they have room for
        self._stream: Any = None  # of steps, that the buffers belong to
        self._used: Any = None    # GPU stream that has used buffers of a GPU last

    def attend(self, step: Step, layer: int, q: torch.Tensor, kv: torch.Tensor,
               lists: Optional[npt.NDArray] = None) -> torch.Tensor:
        """q [rows, heads, nope + rope], kv [rows, lora + rope] -> o [rows, heads, v] on the device
        and of the type of q; with ABSORBED q [rows, heads, lora + rope] -> o [rows, heads, lora].
        Heads are those of this rank. `lists` [rows, width], int32: see Step.attend_sparse.
        """
        dtype = DType.BF16 if q.dtype == torch.bfloat16 else DType.F32
        buffers = self._room(len(q), dtype, q.is_cuda, step)
        own_kv, own_q, own_o = self._tensors
        if own_q.is_cuda:
            buffers.stream = self._follow(own_q.device)
        own_q.copy_(q)
        if own_kv is not None:
            own_kv.copy_(kv)
        options: Any = {"out": buffers, "head_offset": self._rank * q.shape[1]}
        if lists is None:
            step.attend(layer, buffers.q, buffers.kv, self._profile, **options)
        else:
            assert buffers.q is not None  # own_q is a view of it
            step.attend_sparse(layer, buffers.q, lists, buffers.kv, self._profile, **options)
        # A copy even on one device: the next layer writes to the same memory.
        return own_o.to(device=q.device, dtype=q.dtype, copy=True)

    def forget(self) -> None:
        """The transport's memory is not used again: its stream has failed."""
        self._buffers, self._tensors, self._shape, self._stream = None, (), None, None

    def release(self) -> None:
        """Gives the memory back."""
        buffers, self._buffers, self._tensors, self._shape = self._buffers, None, (), None
        if buffers is None:
            return
        if self._used is not None:  # others may get the memory, and use it on other streams
            self._used.synchronize()
            self._used = None
        buffers.release()

    def _room(self, rows: int, dtype: DType, gpu: bool, step: Step) -> Buffers:
        """Buffers of so many rows: those of the last call if they fit. A stream that broke took its
        memory along."""
        shape = rows, dtype, gpu
        if self._buffers is None or self._shape != shape or self._stream is not step._handle:
            self.release()
            made = self._make(step, rows, dtype, gpu)
            if made.q is None or made.o is None:
                raise errors.Internal("buffers of a profile with queries lack tensors")
            on_gpu = made.place is not None and made.place.on_device
            self._tensors = tuple(
                None if array is None else torch.from_dlpack(array) if on_gpu else tensor_of(array)
                for array in (made.kv, made.q, made.o))
            self._buffers, self._shape, self._stream = made, shape, step._handle
        return self._buffers

    def _make(self, step: Step, rows: int, dtype: DType, gpu: bool) -> Buffers:
        service = step.service  # where its sequences are, which may have moved
        shape: Any = {"dtype": dtype, "o_dtype": dtype, "kv": self._rank == 0,
                      "heads": step.model.spec.geometry.num_heads // self._ranks}
        if gpu:
            try:
                return service.buffers(step.model, rows, self._profile, device="cuda", **shape)
            except (errors.Unavailable, errors.ResourceExhausted):
                pass  # none there, or too little: through the host
        return service.buffers(step.model, rows, self._profile, **shape)

    def _follow(self, device: torch.device) -> int:
        """Handle of the GPU stream that writes the tensors, behind the one that used them last."""
        stream = torch.cuda.current_stream(device)
        if self._used is not None and self._used != stream:
            stream.wait_stream(self._used)
        self._used = stream
        return int(stream.cuda_stream)
