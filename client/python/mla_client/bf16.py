"""bfloat16 as numpy sees it, the upper half of a float32, kept in uint16; and 8-bit floats.

numpy does not have a bfloat16 type. These helpers round to nearest even, keep infinities, and keep
NaN a NaN (quiet, sign and upper payload bits preserved), as the server does.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np
import numpy.typing as npt

# Values converted at a time, so that the intermediate steps stay in a core's cache.
_BLOCK = 1 << 16
_ONE, _SHIFT, _HALF = np.uint32(1), np.uint32(16), np.uint32(0x7FFF)
_E4M3_LARGEST = 448.0      # largest value of a code
_E4M3_LEAST_EXPONENT = -6  # of codes with a leading bit
_E4M3_MANTISSA_BITS = 3
_SMALLEST_SCALE = 2.0**-100


def to_bf16(values: npt.ArrayLike,
            out: Optional[npt.NDArray[np.uint16]] = None) -> npt.NDArray[np.uint16]:
    """Rounds float values to bfloat16 bit patterns of the same shape; into `out`, if given, which
    must be contiguous. TypeError for what may be patterns already, and for masks.

    >>> [hex(v) for v in to_bf16([1.0, -2.0, 1.00390625])]
    ['0x3f80', '0xc000', '0x3f80']
    """
    given = values if type(values) is np.ndarray else np.asanyarray(values)
    if given.dtype != np.float32 or type(given) is not np.ndarray:
        _check_numbers(given)
    floats = np.ascontiguousarray(given, dtype=np.float32)
    if out is None:
        out = np.empty(given.shape, np.uint16)
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


def _check_numbers(given: npt.NDArray) -> None:
    """Refuses what may be patterns, and masks."""
    masked, kind = isinstance(given, np.ma.MaskedArray), given.dtype.kind
    if masked or kind not in "fiu" or (kind != "f" and given.dtype.itemsize == 2):
        raise TypeError(f"to_bf16: got {given.dtype}{' with a mask' if masked else ''}, must be "
                        "numbers")


def from_bf16(patterns: npt.NDArray[np.uint16],
              out: Optional[npt.NDArray[np.float32]] = None) -> npt.NDArray[np.float32]:
    """Widens bfloat16 bit patterns, of 16 bits each, to float32; exact. Into `out`, if given.
    TypeError for anything else.

    >>> from_bf16(to_bf16([0.5, -3.0])).tolist()
    [0.5, -3.0]
    """
    if type(patterns) is not np.ndarray or patterns.dtype != np.uint16:
        plain = not hasattr(patterns, "dtype")  # a list of numbers
        given = np.asanyarray(patterns)
        if (isinstance(given, np.ma.MaskedArray) or given.dtype.kind not in "iu"
                or (given.dtype.itemsize != 2 and not plain)):
            raise TypeError(f"from_bf16: got {given.dtype}, must be uint16 patterns")
        patterns = given.astype(np.uint16)
    if out is None:
        out = np.empty(patterns.shape, np.float32)
    np.left_shift(patterns, _SHIFT, out=out.view(np.uint32), dtype=np.uint32)
    return out


def round_to_bf16(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Returns float32 values after a round trip through bfloat16."""
    return from_bf16(to_bf16(values))


def to_e4m3(values: npt.NDArray, parts: Tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Vectors [..., dim] as they are sent as DType.F8_E4M3, in bytes: the codes of all vectors,
    then the float32 scales of their parts; part i has `parts[i]` values, and sum(parts) == dim.

    A scale is the smallest power of two under which no finite value of its part saturates, 2^-100
    to 2^72. Codes are rounded to nearest even; infinities become the largest, NaN stays NaN.
    """
    floats = from_bf16(values) if values.dtype == np.uint16 else np.asarray(values, np.float32)
    floats = floats.reshape(-1, sum(parts))
    codes = np.empty(floats.shape, np.uint8)
    scales = np.empty((len(floats), len(parts)), "<f4")
    begin = 0
    for number, size in enumerate(parts):
        part = np.ascontiguousarray(floats[:, begin:begin + size])
        exponents = _scale_exponents(part)
        scales[:, number] = np.ldexp(np.float32(1), exponents)
        codes[:, begin:begin + size] = _codes(np.ldexp(part, -exponents[:, None]))
        begin += size
    return np.concatenate((codes.reshape(-1), scales.view(np.uint8).reshape(-1)))


def from_e4m3(sent: npt.NDArray[np.uint8], parts: Tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Returns the vectors [n, dim] that `to_e4m3` wrote."""
    dim = sum(parts)
    count = len(sent) // (dim + 4 * len(parts))
    codes = sent[:count * dim].reshape(count, dim)
    scales = sent[count * dim:].copy().view("<f4").reshape(count, len(parts))
    return _NUMBERS[codes] * np.repeat(scales, parts, axis=1)


def numbers_of(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Returns the numbers for which codes of e4m3 stand."""
    return _NUMBERS[codes]


def round_to_e4m3(values: npt.NDArray, parts: Tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Returns float32 values after a round trip through e4m3."""
    return from_e4m3(to_e4m3(values, parts), parts).reshape(np.shape(values))


def _scale_exponents(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    magnitudes = np.abs(values)
    magnitudes[~np.isfinite(magnitudes)] = 0
    largest = magnitudes.max(axis=1, initial=0.0).view(np.uint32)
    # Carries into the exponent if the mantissa is above 1.75, the mantissa of the largest code.
    exponents = ((largest + np.uint32(0x1FFFFF)) >> np.uint32(23)).astype(np.int32) - (127 + 8)
    return np.clip(exponents, -100, 72)


def _codes(scaled: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    bits = scaled.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    capped = np.minimum(magnitude, np.float32(448).view(np.uint32))
    normal = ((capped + np.uint32(0x7FFFF) + (capped >> np.uint32(20) & _ONE)) >> np.uint32(20))
    # Below 2^-6 codes count units of 2^-9, and so does the mantissa of this sum.
    base = np.float32(2**14)
    small = (np.minimum(np.abs(scaled), np.float32(1)) + base).view(np.uint32)
    small = small - base.view(np.uint32)
    code = np.where(capped < np.float32(2**-6).view(np.uint32), small, normal - np.uint32(960))
    code = np.where(code > 0, code | (bits >> np.uint32(24) & np.uint32(0x80)), code)
    return np.where(np.isnan(scaled), 0x7F, code).astype(np.uint8)


def _numbers() -> npt.NDArray[np.float32]:
    """The value of each code."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    numbers = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10),
                       np.ldexp(1.0 * mantissa, -9))
    numbers[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes >= 128, -numbers, numbers).astype(np.float32)


_NUMBERS = _numbers()


def round_rows_to_e4m3(values: npt.NDArray) -> npt.NDArray[np.float32]:
    """Values of index keys [n, dim], which are finite, after the server's cache has stored them as
    8-bit floats: each row has the smallest power of two as scale under which its largest magnitude
    is a code, and values are rounded to the nearest."""
    values = np.asarray(values, np.float64)
    largest = np.abs(values).max(axis=1, keepdims=True, initial=0.0)
    least = _E4M3_LARGEST * _SMALLEST_SCALE
    exponent = np.ceil(np.log2(np.maximum(largest, least) / _E4M3_LARGEST))
    scaled = values / 2.0**exponent
    _, binary = np.frexp(scaled)  # scaled = m * 2^binary with m in [0.5, 1)
    step = 2.0**(np.maximum(binary - 1, _E4M3_LEAST_EXPONENT) - _E4M3_MANTISSA_BITS)
    codes = np.round(scaled / step) * step  # to even, as numpy rounds
    return (codes * 2.0**exponent).astype(np.float32)
