"""The fast path of a chained call, for the layers of a step after its first one. Needs torch.

An engine's thread gives a GPU all the work of a layer, so each microsecond of a call is one that
the engine waits for. Between two calls it runs so much other code that nothing of a call is in the
processor's caches: what counts is how many functions and objects a call touches.
"""

from __future__ import annotations

from typing import Any, Callable, Tuple, Union

import torch

# KV rows [rows, lora + rope], or their two parts, the second one [rows, rope] or [rows, 1, rope].
Rows = Union[torch.Tensor, Tuple[torch.Tensor, ...]]


def parts_of(kv: Rows) -> Tuple[torch.Tensor, ...]:
    """The tensors of which the rows consist."""
    return (kv,) if isinstance(kv, torch.Tensor) else kv


def _stream_of(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# The handle of a GPU's current stream. A tenth of the time of the public call.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """True if a stream of a GPU writes the tensor."""
    return tensor.is_cuda


def layout_check(*tensors: torch.Tensor) -> Callable[..., bool]:
    """A function that says whether other tensors have the shapes, strides, types and devices of
    these. PyTorch's own looks at all of them in one call; it is internal to torch."""
    try:
        guards = torch._C._dynamo.guards.TensorGuards(
            *tensors, dynamic_dims_sizes=[list(one.shape) for one in tensors],
            dynamic_dims_strides=[list(one.stride()) for one in tensors])
        if guards.check(*tensors):
            check: Callable[..., bool] = guards.check
            return check
    except (AttributeError, RuntimeError, TypeError):
        pass  # this release of torch has another one
    return plain_check(*tensors)


def plain_check(*tensors: torch.Tensor) -> Callable[..., bool]:
    """As layout_check, by the public properties of tensors, which costs three times as much."""
    def layout(one: torch.Tensor) -> Tuple[Any, ...]:
        return one.shape, one.stride(), one.dtype, one.device
    like = [layout(one) for one in tensors]
    return lambda *given: [layout(one) for one in given] == like


class FastPath:
    """Further calls of a chain whose tensors differ from those of a call before in their addresses
    alone. All of their copies are the library's. Belongs to one thread at a time."""

    __slots__ = ("_attend", "_stream", "_device", "_alike", "_count")

    def __init__(self, chain: Any, stream: int, q: torch.Tensor, kv: Rows,
                 output: torch.Tensor) -> None:
        """The tensors of the call before, of which q and output are contiguous; `kv` without parts:
        rows that come are another rank's to send. `chain` has the call's copies: of q, of each part
        of kv, and of the output."""
        self._attend = chain.attend
        self._stream, self._device = stream, q.get_device()
        parts = parts_of(kv)
        self._count = len(parts)
        self._alike = layout_check(q, *parts, output)

    def attend(self, layer: int, q: torch.Tensor, kv: Rows, output: torch.Tensor) -> bool:
        """As Sender.attend_chained. False: the tensors are laid out in another way, or another
        stream is current. Nothing was sent then."""
        parts: Any = kv if type(kv) is tuple else (kv,)
        if not self._count:
            parts = ()
        if (len(parts) != self._count or not self._alike(q, *parts, output)
                or raw_stream(self._device) != self._stream):
            return False
        sources = [q.data_ptr()]
        for part in parts:
            sources.append(part.data_ptr())
        self._attend(layer, self._stream, sources, output.data_ptr())
        return True
