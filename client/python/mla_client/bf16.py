"""bfloat16 as numpy sees it: the upper half of a float32, kept in uint16.

numpy has no bfloat16 type. These helpers round to nearest even, keep infinities, and keep NaN a NaN
(quiet, sign and upper payload bits preserved), as the server does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def to_bf16(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Rounds float values to bfloat16 bit patterns of the same shape.

    >>> [hex(v) for v in to_bf16([1.0, -2.0, 1.00390625])]
    ['0x3f80', '0xc000', '0x3f80']
    """
    floats = np.ascontiguousarray(values, dtype=np.float32)
    bits = floats.view(np.uint32)
    # Adding 0x7fff plus the lowest kept bit carries into the kept half exactly when rounding up.
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
               >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(floats)
    if nan.any():
        rounded[nan] = ((bits[nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return rounded.reshape(np.shape(values))


def from_bf16(patterns: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widens bfloat16 bit patterns to float32; exact.

    >>> from_bf16(to_bf16([0.5, -3.0])).tolist()
    [0.5, -3.0]
    """
    patterns = np.asarray(patterns, dtype=np.uint16)
    return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_to_bf16(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """float32 values after a round trip through bfloat16."""
    return from_bf16(to_bf16(values))
