"""The weights of an attention layer, read back from vLLM's modules whatever a kernel has made of
them."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from mla_client import errors
from mla_client.pytorch.codes import codes_of, decoded
from mla_client.service.projected import BLOCK
from mla_client.serving.layers import Codes, Pair, Weights, split
from mla_client.types import Geometry
from mla_client.vllm.projected import Projections

# Rows with which a quantised layer is compared, and the part of their norm by which they may
# differ: the inputs are rounded to eight bits, too. Other weights differ by more than the norm.
PROBES, QUANTISED_ERROR = 4, 0.2
# The same for a block of codes that has a scale of its own. Inputs in e4m3 are each off by at most
# a sixteenth, so more is another scale.
BLOCK_ERROR = 1 / 16
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
    products = []
    for begin in range(0, columns, ASKED_COLUMNS):
        count = min(ASKED_COLUMNS, columns - begin)
        units = torch.zeros(count, columns, dtype=like.dtype, device=like.device)
        units.diagonal(begin).fill_(1.0)
        products.append(linear.quant_method.apply(linear, units, bias=None).T.to(like.dtype))
    return torch.cat(products, dim=1)


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


def _block_differs(linear: Any, matrix: torch.Tensor) -> bool:
    """True if a quantised layer computes something else than this matrix [rows, columns] does in
    any block of BLOCK x BLOCK: with scales that lie in another order, for example."""
    rows, columns = matrix.shape
    # A probe for each block of columns is zero in the others.
    given = torch.block_diag(*torch.linspace(-1, 1, BLOCK).repeat(-(-columns // BLOCK), 1))
    given = given[:, :columns].to(matrix)
    got = linear.quant_method.apply(linear, given, bias=None).float()
    want = given.float() @ matrix.float().T
    for begin in range(0, rows, BLOCK):
        error, size = ((one[:, begin:begin + BLOCK]).norm(dim=1) for one in (got - want, want))
        if not bool((error <= BLOCK_ERROR * size).all()):
            return True
    return False


def codes_in(linear: Any, name: str, rows: int, columns: int, dtype: torch.dtype
             ) -> Tuple[Optional[Codes], str]:
    """The matrix [rows, columns] of a linear layer as codes. None, and the reason with `name`, if
    the layer does not compute with codes of that kind: a kernel may have packed them."""
    weight = getattr(linear, "weight", None)
    scales = getattr(linear, "weight_scale_inv", getattr(linear, "weight_scale", None))
    block = getattr(linear, "weight_block_size", None)
    if weight is None or getattr(linear, "bias", None) is not None:
        return None, f"{name}: no matrix of its own, or a bias"
    codes, reason = codes_of(weight, scales, block)
    if codes is not None and tuple(weight.shape) != (rows, columns):
        reason = f"{tuple(weight.shape)}, must be {(rows, columns)}"
    elif codes is not None and _block_differs(linear, decoded(weight, scales, block).to(dtype)):
        reason = f"{type(linear.quant_method).__name__} computes with other numbers"
    return (None, f"{name}: {reason}") if reason else (codes, "")


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

    def codes(self) -> Tuple[Optional[Tuple[Codes, Codes]], str]:
        """W_UQ and W_O as codes, in the shapes of `uploaded`; None and the reason if the layer has
        other weights."""
        own, projections = self.geometry, self.projections
        assert projections is not None
        q_dim, columns = own.nope_dim + own.rope_dim, own.num_heads * own.v_dim
        w_uq, reason = codes_in(projections.q_proj, "q_b_proj", own.num_heads * q_dim,
                                own.q_lora_rank, self.dtype)
        if w_uq is None:
            return None, reason
        w_o, reason = codes_in(projections.o_proj, "o_proj", own.hidden_size, columns, self.dtype)
        if w_o is None:
            return None, reason
        return (Codes(w_uq.codes.reshape(own.num_heads, q_dim, -1), w_uq.scales),
                Codes(w_o.codes.reshape(own.hidden_size, own.num_heads, -1), w_o.scales)), ""

    def uploaded(self) -> Weights:
        """What the server gets: `weights`, and of PROJECTED W_UQ [heads, nope + rope, q_lora_rank]
        and W_O [hidden_size, heads, v], as Codes if the layer computes with such."""
        own, projections = self.geometry, self.projections
        if projections is None:
            return self.weights()
        codes, _ = self.codes()
        if codes is not None:
            return (*self.weights(), *codes)
        q_dim = own.nope_dim + own.rope_dim
        w_uq = matrix_of(projections.q_proj, "q_b_proj", own.num_heads * q_dim, own.q_lora_rank,
                         self.dtype)
        w_o = matrix_of(projections.o_proj, "o_proj", own.hidden_size, own.num_heads * own.v_dim,
                        self.dtype)
        return (*self.weights(), w_uq.view(own.num_heads, q_dim, -1),
                w_o.view(own.hidden_size, own.num_heads, -1))
