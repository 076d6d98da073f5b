"""The weights of an attention layer, read back from vLLM's modules whatever a kernel has made of
them."""

from __future__ import annotations

from typing import Any, Optional

import torch

from mla_client import errors
from mla_client.serving.layers import Pair, Weights, split
from mla_client.types import Geometry
from mla_client.vllm.projected import Projections

# Rows with which a quantised layer is compared, and the part of their norm by which they may
# differ: the inputs are rounded to eight bits, too. Other weights differ by more than the norm.
PROBES, QUANTISED_ERROR = 4, 0.2
# Columns of a matrix that are asked of its layer at a time.
ASKED_COLUMNS = 2048


def matrix_of(linear: Any, name: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [rows, columns] of a linear layer, not quantised. Unimplemented, with `name`, if
    it cannot be read back."""
    # pylint: disable=import-outside-toplevel
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        get_and_maybe_dequant_weights)
    matrix: torch.Tensor = get_and_maybe_dequant_weights(linear, out_dtype=dtype)
    method = getattr(linear, "quant_method", None)
    if method is not None and (matrix.numel() != rows * columns
                               or _differs(linear, matrix, columns)):
        # A kernel has packed them in an order of its own, or has them alone: the layer itself says
        # what they are.
        matrix = _asked(linear, columns, matrix)
        if _differs(linear, matrix, columns):
            raise errors.Unimplemented(
                f"{name}: its weights cannot be read back from {type(method).__name__}")
    if tuple(matrix.shape) != (rows, columns) or getattr(linear, "bias", None) is not None:
        raise errors.Unimplemented(
            f"{name}: got {tuple(matrix.shape)}, must be the plain matrix {(rows, columns)}: not "
            "split, and without a bias")
    return matrix


def _asked(linear: Any, columns: int, like: torch.Tensor) -> torch.Tensor:
    """The products of a layer with unit vectors, [rows, columns]."""
    found = []
    for begin in range(0, columns, ASKED_COLUMNS):
        count = min(ASKED_COLUMNS, columns - begin)
        units = torch.zeros(count, columns, dtype=like.dtype, device=like.device)
        units.diagonal(begin).fill_(1.0)
        found.append(linear.quant_method.apply(linear, units, bias=None).T.to(like.dtype))
    return torch.cat(found, dim=1)


def _differs(linear: Any, matrix: torch.Tensor, columns: int) -> bool:
    """True if a quantised layer computes something else than this matrix does."""
    method = linear.quant_method
    if type(method).__name__ == "UnquantizedLinearMethod":
        return False
    given = torch.linspace(-1, 1, PROBES * columns, dtype=matrix.dtype,
                           device=matrix.device).view(PROBES, -1)
    got = method.apply(linear, given, bias=None).float()
    want = given.float() @ matrix.float().T
    return float((got - want).norm()) > QUANTISED_ERROR * float(want.norm())


class Layer:
    """Says what the weights of an attention layer's own heads are."""

    def __init__(self, geometry: Geometry, kv_b_proj: Any, dtype: torch.dtype) -> None:
        self.geometry = geometry
        self.kv_b_proj = kv_b_proj
        self.dtype = dtype
        self.projections: Optional[Projections] = None  # that the server has, too

    def weights(self) -> Pair:
        """W_UK [heads, nope, lora] and W_UV [heads, lora, v]."""
        own = self.geometry
        return split(matrix_of(self.kv_b_proj, "kv_b_proj",
                               own.num_heads * (own.nope_dim + own.v_dim), own.kv_lora_rank,
                               self.dtype), own)

    def uploaded(self) -> Weights:
        """What the server gets: `weights`, and of PROJECTED W_UQ [heads, nope + rope, q_lora_rank]
        and W_O [hidden_size, heads, v]."""
        own, projections = self.geometry, self.projections
        if projections is None:
            return self.weights()
        q_dim = own.nope_dim + own.rope_dim
        w_uq = matrix_of(projections.q_proj, "q_b_proj", own.num_heads * q_dim, own.q_lora_rank,
                         self.dtype)
        w_o = matrix_of(projections.o_proj, "o_proj", own.hidden_size, own.num_heads * own.v_dim,
                        self.dtype)
        return (*self.weights(), w_uq.view(own.num_heads, q_dim, -1),
                w_o.view(own.hidden_size, own.num_heads, -1))
