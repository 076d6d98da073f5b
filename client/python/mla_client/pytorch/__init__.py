"""PyTorch tensors on their way to a service and back. Needs torch."""

from __future__ import annotations

import types
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import numpy.typing as npt
import torch

from mla_client import errors
from mla_client.pytorch import fast_path
from mla_client.pytorch.fast_path import FastPath, Rows, parts_of
from mla_client.service import Model, Service, Step
from mla_client.types import Buffers, DType, Profile

__all__ = ["GraphSender", "Sender", "gpu_arguments", "tensor_of"]


def gpu_arguments() -> Dict[str, Any]:
    """Arguments of Client.connect for the GPU that this process uses; empty if it uses none."""
    if not torch.cuda.is_available():
        return {}
    return {"pinned": True, "device": torch.cuda.current_device()}


def tensor_of(array: npt.NDArray) -> torch.Tensor:
    """A tensor over the same memory; uint16 are bf16 patterns."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def whole(kv: Rows) -> torch.Tensor:
    """The rows as one tensor."""
    return kv if isinstance(kv, torch.Tensor) else torch.cat([one.flatten(1) for one in kv], dim=-1)


def _is_plain(tensor: torch.Tensor, own: torch.Tensor) -> bool:
    """True if bytes alone have to be copied between them."""
    return (tensor.dtype == own.dtype and tensor.is_contiguous()
            and tensor.numel() == own.numel())


class Sender:
    """Sends the attention of one layer after another, all in one profile with queries. Tensors
    travel as bf16 if they are bf16, else as float32. They are written into the transport's memory
    if it has room. GPU tensors are written into the server's GPU memory if the client has asked for
    some (`device_bytes` of Client.connect). Belongs to one thread at a time."""

    def __init__(self, profile: Profile = Profile.EXPANDED, rank: int = 0, ranks: int = 1) -> None:
        """`ranks` processes share the heads of a layer. Rank `rank` sends its part of the heads;
        rank 0 also sends the rows."""
        self._profile = profile
        self._rank = rank
        self._ranks = ranks
        self._buffers: Optional[Buffers] = None
        self._tensors: Tuple[Any, ...] = ()  # kv, q and o of the buffers
        self._shape: Any = None   # that they have room for
        self._stream: Any = None  # of steps, that the buffers belong to
        self._used: Any = None    # GPU stream that has used buffers of a GPU last
        self._used_handle = 0
        self._chain: Any = None   # calls with the buffers that a GPU's stream waits for
        self._chained: Any = None  # the step that they belong to
        self.fast_path: Optional[FastPath] = None  # the fast path for its next call

    def attend(self, step: Step, layer: int, q: torch.Tensor, kv: torch.Tensor,
               lists: Optional[npt.NDArray] = None) -> torch.Tensor:
        """q [rows, heads, nope + rope], kv [rows, lora + rope] -> o [rows, heads, v] on the device
        and of the type of q; with ABSORBED q [rows, heads, lora + rope] -> o [rows, heads, lora].
        `heads` counts the heads of this rank. `lists` [rows, width], int32: see Step.attend_sparse.
        """
        dtype = DType.BF16 if q.dtype == torch.bfloat16 else DType.F32
        buffers = self._room(len(q), dtype, q.is_cuda, step)
        own_kv, own_q, own_o = self._tensors
        if own_q.is_cuda:
            buffers.stream = self._follow(own_q.get_device())
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

    def attend_chained(self, step: Step, layer: int, q: torch.Tensor, kv: Rows,
                       output: torch.Tensor) -> bool:
        """As `attend`, for a GPU whose current stream waits for the outputs, which it finds in
        `output`, and no thread does: see Step.chain. `kv` may be in parts; `output` may be flat.
        False: such calls can not be chained, and nothing was sent; use `attend`."""
        if self._rank:
            kv = ()  # the first rank sends the rows
        if (self.fast_path is not None and self._chained is step
                and self.fast_path.attend(layer, q, kv, output)):  # as the layer before
            return True
        if not fast_path.is_on_gpu(q):
            return False
        dtype = DType.BF16 if q.dtype == torch.bfloat16 else DType.F32
        buffers = self._room(len(q), dtype, True, step)
        if self._chained is not step:
            self._chain = step.chain(buffers, self._profile, head_offset=self._rank * q.shape[1])
            self._chained = step
        chain, self.fast_path = self._chain, None
        if chain is None:
            return False
        if self._give(chain, layer, q, kv, output):
            self.fast_path = FastPath(chain, self._used_handle, q, kv, output)
        return True

    def _give(self, chain: Any, layer: int, q: torch.Tensor, kv: Rows,
              output: torch.Tensor) -> bool:
        """Returns true if the library makes all copies."""
        stream, parts = self._follow(q.get_device()), parts_of(kv)
        own_kv, own_q, own_o = self._tensors
        q_plain, o_plain = _is_plain(q, own_q), _is_plain(output, own_o)
        copied = self._lay_out(chain, q, q_plain, o_plain, parts)
        # The library's copies cost the host a few microseconds, PyTorch's three times as much.
        sources, begin = [q] if q_plain else [], 0
        if not q_plain:
            own_q.copy_(q, non_blocking=True)
        for part, by_library in zip(parts, copied):
            if by_library:
                sources.append(part)
            else:
                own_kv[:, begin:begin + part.shape[-1]].copy_(part.flatten(1), non_blocking=True)
            begin += part.shape[-1]
        chain.attend(layer, stream, [one.data_ptr() for one in sources],
                     output.data_ptr() if o_plain else 0)
        if not o_plain:
            output.view(own_o.shape).copy_(own_o, non_blocking=True)
        return q_plain and o_plain and all(copied)

    def _lay_out(self, chain: Any, q: torch.Tensor, q_plain: bool, o_plain: bool,
                 parts: Tuple[torch.Tensor, ...]) -> List[bool]:
        """Tells the chain which copies the library makes. Returns which parts of the rows are among
        them."""
        own_kv, own_q, own_o = self._tensors
        chain.clear(own_q.is_cuda and all(source.get_device() == own_q.get_device()
                                          for source in (q, *parts)))
        if q_plain:
            chain.copy_in(own_q.data_ptr(), own_q.nbytes)
        begin, copied = 0, []
        for part in parts:
            row, size = own_kv.shape[1] * own_kv.element_size(), part.element_size()
            copied.append(part.dtype == own_kv.dtype and part.stride(-1) == 1)
            if copied[-1]:
                # The stride of a dimension of one may be any number.
                pitch = part.stride(0) * size if len(part) > 1 else 0
                chain.copy_in(own_kv.data_ptr() + begin, part.shape[-1] * size, len(part), row,
                              pitch)
            begin += part.shape[-1] * own_kv.element_size()
        if o_plain:
            chain.copy_out(own_o.data_ptr(), own_o.nbytes)
        return copied

    def forget(self) -> None:
        """The transport's memory is not used again: its stream has failed."""
        self._buffers, self._tensors, self._shape, self._stream = None, (), None, None
        self._chain = self._chained = self.fast_path = None

    def release(self) -> None:
        """Gives the memory back."""
        buffers, self._buffers, self._tensors, self._shape = self._buffers, None, (), None
        self._chain = self._chained = self.fast_path = None
        if buffers is None:
            return
        if self._used is not None:  # others may get the memory, and use it on other streams
            self._used.synchronize()
            self._used = None
        buffers.release()

    def _room(self, rows: int, dtype: DType, gpu: bool, step: Step) -> Buffers:
        """Returns buffers for `rows` rows. Reuses the buffers of the last call if they fit and
        their stream is not broken, because a broken stream's memory is gone."""
        shape = rows, dtype, gpu
        if self._buffers is None or self._shape != shape or self._stream is not step._handle:
            self.release()
            buffers = self._make(step, rows, dtype, gpu)
            if buffers.q is None or buffers.o is None:
                raise errors.Internal("buffers of a profile with queries lack tensors")
            on_gpu = buffers.place is not None and buffers.place.on_device
            self._tensors = tuple(
                None if array is None else torch.from_dlpack(array) if on_gpu else tensor_of(array)
                for array in (buffers.kv, buffers.q, buffers.o))
            self._buffers, self._shape, self._stream = buffers, shape, step._handle
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

    def _follow(self, device: int) -> int:
        """Returns the handle of the current stream of the GPU, which writes the tensors. It first
        waits for the stream that used them last."""
        handle = int(fast_path.raw_stream(device))
        if self._used is None or self._used_handle != handle:
            stream = torch.cuda.current_stream(device)
            if self._used is not None:
                stream.wait_stream(self._used)
            self._used, self._used_handle = stream, handle
        return handle


class GraphSender(Sender):
    """Attention in a torch.cuda.CUDAGraph. `capture`, for one layer after another, belongs among
    the work that is captured. Before each replay of the graph `send` sends all these calls. Belongs
    to one thread at a time."""

    def __init__(self, service: Service, model: Model, rows: int, *,
                 dtype: torch.dtype = torch.bfloat16, profile: Profile = Profile.EXPANDED) -> None:
        """Takes buffers for `rows` rows, which stay until `release`. Make it before the capture
        begins. FailedPrecondition where calls can not be chained."""
        super().__init__(profile)
        place: Any = types.SimpleNamespace(service=service, model=model, _handle=None)
        sent = DType.BF16 if dtype == torch.bfloat16 else DType.F32
        buffers = self._room(rows, sent, True, place)
        self._chain = service.capture(buffers, profile)
        if self._chain is None:
            raise errors.FailedPrecondition("graph: calls can not be chained here")

    def capture(self, layer: int, q: torch.Tensor, kv: Rows, output: torch.Tensor) -> None:
        """As Sender.attend_chained, while the current stream is captured. Nothing is sent."""
        self._give(self._chain, layer, q, kv, output)

    def send(self, step: Step, graph: torch.cuda.CUDAGraph) -> None:
        """Sends the calls as calls of `step`. Replay the graph next, on the current stream. Whether
        its outputs are good is known when Step.end or collect has returned. The graph is one of
        `torch.cuda.CUDAGraph(keep_graph=True)`, since the nodes of others are gone."""
        device = torch.cuda.current_device()
        step.replay(self._chain, graph.raw_cuda_graph_exec(), int(fast_path.raw_stream(device)))
