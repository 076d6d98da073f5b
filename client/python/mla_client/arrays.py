"""Tensors as callers give them: numpy arrays, PyTorch tensors, lists.

bfloat16 is not a numpy type: its patterns are uint16. Every other integer type is refused: patterns
that were taken for numbers would give wrong outputs without a word.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_client import bf16, errors

_PATTERNS = np.dtype(np.uint16)
_FLOATS = np.dtype(np.float32)


def _refused(name: str, got: Any, hint: str = "") -> errors.InvalidArgument:
    limit = "an array of floats, or of uint16, which are bf16 patterns"
    return errors.InvalidArgument(f"{name}: got {got}, must be {limit}{hint}",
                                  errors.ErrorDetail(field=name, got=str(got), limit=limit))


def floats(name: str, array: Any) -> Any:
    """Returns an array of float32, or of uint16 in this machine's order, which are bf16 patterns:
    the given one if it is such an array, and None for None. InvalidArgument names what cannot be
    read as floats. Tensors of PyTorch lie in host memory; their gradients are not followed.
    """
    if array is None or (type(array) is np.ndarray and array.dtype in (_FLOATS, _PATTERNS)):
        return array
    if _is_torch(array):
        array = _of_torch(name, array)
    if isinstance(array, np.ma.MaskedArray):
        raise _refused(name, "a masked array", ": fill the masked values first")
    plain = getattr(array, "dtype", None) is None  # lists of numbers
    if getattr(getattr(array, "dtype", None), "name", "") == "bfloat16":  # ml_dtypes, as in JAX
        return np.asarray(array).view(np.uint16)
    try:
        values = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refused(name, type(array).__name__, f": {error}") from error
    kind = values.dtype.kind
    if kind == "u" and values.dtype.itemsize == 2 and not plain:
        return values.astype(np.uint16, copy=False)  # its byte order may be the other one
    if kind == "f" or (plain and kind in "iu"):
        return values.astype(np.float32, copy=False)
    hint = ": view bf16 patterns as numpy.uint16" if values.dtype.itemsize == 2 else ""
    raise _refused(name, values.dtype, hint)


def numbers(name: str, array: Any) -> npt.NDArray[np.float32]:
    """Does what `floats` does, but always returns float32."""
    found = floats(name, array)
    return bf16.from_bf16(found) if found.dtype == _PATTERNS else found


def _is_torch(array: Any) -> bool:
    return "torch" in sys.modules and isinstance(array, sys.modules["torch"].Tensor)


def _of_torch(name: str, tensor: Any) -> npt.NDArray:
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise _refused(name, f"a tensor on {tensor.device}",
                       ': copy it to the host (.cpu()), or use buffers(device="cuda")')
    tensor = tensor.detach()
    try:
        if tensor.dtype == torch.bfloat16:
            return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise _refused(name, f"a tensor of {tensor.dtype}", f": {error}") from error
