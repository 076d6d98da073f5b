"""bfloat16 as numpy sees it: the upper half of a float32, kept in uint16.

numpy has no bfloat16 type. These helpers round to nearest even, keep infinities, and keep NaN a NaN
(quiet, sign and upper payload bits preserved), as the server does.
"""

from __future__ import annotations

from typing import Optional

import numpy as np
import numpy.typing as npt

# Values converted at a time, so that the intermediate steps stay in a core's cache.
_BLOCK = 1 << 16
_ONE, _SHIFT, _HALF = np.uint32(1), np.uint32(16), np.uint32(0x7FFF)
_E4M3_LARGEST = 448.0      # that a code stands for
_E4M3_LEAST_EXPONENT = -6  # of codes with a leading bit
_E4M3_MANTISSA_BITS = 3
_SMALLEST_SCALE = 2.0**-100


def to_bf16(values: npt.ArrayLike,
            out: Optional[npt.NDArray[np.uint16]] = None) -> npt.NDArray[np.uint16]:
    """Rounds float values to bfloat16 bit patterns of the same shape; into `out`, if given, which
    must be contiguous.

    >>> [hex(v) for v in to_bf16([1.0, -2.0, 1.00390625])]
    ['0x3f80', '0xc000', '0x3f80']
    """
    floats = np.ascontiguousarray(values, dtype=np.float32)
    if out is None:
        out = np.empty(np.shape(values), np.uint16)
    flat, target = floats.reshape(-1), out.reshape(-1)
    scratch = np.empty(min(flat.size, _BLOCK), np.uint32)
    for begin in range(0, flat.size, _BLOCK):
        block = flat[begin:begin + _BLOCK]
        bits, rounded = block.view(np.uint32), scratch[:block.size]
        # Adding 0x7fff plus the lowest kept bit carries into the kept half exactly when rounding
        # up.
        np.right_shift(bits, _SHIFT, out=rounded)
        np.bitwise_and(rounded, _ONE, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.add(rounded, _HALF, out=rounded)
        kept = target[begin:begin + _BLOCK]
        np.right_shift(rounded, _SHIFT, out=kept, casting="unsafe")
        nan = np.isnan(block)
        if nan.any():
            kept[nan] = ((bits[nan] >> _SHIFT) | np.uint32(0x40)).astype(np.uint16)
    return out


def from_bf16(patterns: npt.NDArray[np.uint16],
              out: Optional[npt.NDArray[np.float32]] = None) -> npt.NDArray[np.float32]:
    """Widens bfloat16 bit patterns to float32; exact. Into `out`, if given.

    >>> from_bf16(to_bf16([0.5, -3.0])).tolist()
    [0.5, -3.0]
    """
    patterns = np.asarray(patterns, dtype=np.uint16)
    if out is None:
        out = np.empty(patterns.shape, np.float32)
    np.left_shift(patterns, _SHIFT, out=out.view(np.uint32), dtype=np.uint32)
    return out


def round_to_bf16(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """float32 values after a round trip through bfloat16."""
    return from_bf16(to_bf16(values))


def round_rows_to_e4m3(values: npt.NDArray) -> npt.NDArray[np.float32]:
    """What the server's cache keeps of index keys [n, dim], which are finite, as 8-bit floats: each
    row has the smallest power of two as scale under which its largest magnitude is a code, and
    values are rounded to the nearest."""
    values = np.asarray(values, np.float64)
    largest = np.abs(values).max(axis=1, keepdims=True, initial=0.0)
    least = _E4M3_LARGEST * _SMALLEST_SCALE
    exponent = np.ceil(np.log2(np.maximum(largest, least) / _E4M3_LARGEST))
    scaled = values / 2.0**exponent
    _, binary = np.frexp(scaled)  # scaled = m * 2^binary with m in [0.5, 1)
    step = 2.0**(np.maximum(binary - 1, _E4M3_LEAST_EXPONENT) - _E4M3_MANTISSA_BITS)
    codes = np.round(scaled / step) * step  # to even, as numpy rounds
    return (codes * 2.0**exponent).astype(np.float32)
