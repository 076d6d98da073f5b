"""Matrices of checkpoints in 8-bit floats: their codes and scales, and what these stand for."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch

from mla_client import errors
from mla_client.service.projected import BLOCK
from mla_client.serving.layers import Codes

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# In fnuz, AMD's e4m3 of gfx942, a code stands for half of the number that it is in e4m3, except
# these: 240 and -240, which are NaN there, and NaN, which is -0 there.
FNUZ_ALONE = (0x7F, 0xFF, 0x80)


def codes_of(weight: torch.Tensor, scales: Optional[torch.Tensor],
             block: Optional[Sequence[int]]) -> Tuple[Optional[Codes], str]:
    """The codes [rows, columns] and scales of a matrix whose scales are of blocks `block`. If a
    server cannot hold it so, None and the reason."""
    if weight.ndim != 2 or weight.dtype not in FLOAT8:
        return None, (f"{weight.dtype} {tuple(weight.shape)}, must be a matrix in "
                      "torch.float8_e4m3fn or float8_e4m3fnuz")
    if block is None or tuple(block) != (BLOCK, BLOCK):
        return None, (f"scales of {'no blocks' if block is None else f'blocks {tuple(block)}'}, "
                      f"must be of {BLOCK} x {BLOCK}")
    want = tuple(-(-size // BLOCK) for size in weight.shape)
    if scales is None or not scales.is_floating_point() or tuple(scales.shape) != want:
        got = "missing" if scales is None else f"{scales.dtype} {tuple(scales.shape)}"
        return None, f"scales {got}, must be floats {want}"
    codes, block_scales = weight.detach().view(torch.uint8), scales.detach().float()
    if weight.dtype == torch.float8_e4m3fnuz:
        if any(bool((codes == code).any()) for code in FNUZ_ALONE):
            return None, "codes of torch.float8_e4m3fnuz that e4m3 does not have"
        block_scales = block_scales / 2
    return Codes(codes, block_scales), ""


def decoded(weight: torch.Tensor, scales: torch.Tensor, block: Optional[Sequence[int]]
            ) -> torch.Tensor:
    """A matrix [rows, columns] of codes in bf16. `scales` are of blocks `block`; None: there is one
    for all. Unimplemented if they have another shape."""
    want = () if block is None else tuple(-(-one // size) for one, size in zip(weight.shape, block))
    each = scales.detach().float()
    if block is None and each.numel() == 1:
        each = each.reshape(())
    if tuple(each.shape) != want:
        raise errors.Unimplemented(f"scales {tuple(scales.shape)} of a matrix "
                                   f"{tuple(weight.shape)}, must be {want}")
    if block is not None:
        for axis, size in enumerate(block):
            each = each.repeat_interleave(size, axis).narrow(axis, 0, weight.shape[axis])
    return (weight.detach().float() * each).to(torch.bfloat16)
