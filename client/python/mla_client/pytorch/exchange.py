"""The attention of a pass, layer by layer, whatever becomes of the server: what was sent comes
back, what was not is computed here or counts for nothing."""

from __future__ import annotations

from typing import Callable, List, Optional, Protocol, Tuple

import torch

from mla_client.pytorch import Rows, Sender, whole
from mla_client.pytorch.fast_path import FastPath
from mla_client.serving import How, Part, Pass, Passes, Ranks
from mla_client.serving.faults import FAILURES
from mla_client.types import ModelSpec, Profile

DENSE = ""  # of ModelSpec.attention
# Query rows whose scores are held at a time.
LOCAL_ROWS = 256
# W_UK [heads, nope, lora] and W_UV [heads, lora, v] of a layer, of this rank's heads.
Weights = Callable[[int], Tuple[torch.Tensor, torch.Tensor]]


class Projections(Protocol):
    """A layer's own W_UQ and W_O, for rows that the worker computes: those from position 0 on."""

    def queries(self, given: torch.Tensor) -> torch.Tensor:
        """Low-rank queries [rows, q_lora_rank] -> rotated queries [rows, heads, nope + rope]."""

    def hiddens(self, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs [rows, heads, v] -> hidden states [rows, hidden_size]."""


def local_attention(q: torch.Tensor, kv: torch.Tensor, scale: float, lora: int,
                    weights: Optional[Tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Attention of rows that see one another alone, the first of a sequence: q [rows, heads, nope +
    rope], kv [rows, lora + rope] -> [rows, heads, v]; without weights q is absorbed, and the output
    [rows, heads, lora]. In float32, of the type of q."""
    latent, rope = kv[:, :lora].float(), kv[:, lora:].float()
    queries = q.float()
    if weights is None:
        keys = torch.cat((latent, rope), dim=-1)[:, None]
        values = latent[:, None]
    else:
        w_uk, w_uv = (weight.to(device=q.device, dtype=torch.float32) for weight in weights)
        heads = q.shape[1]
        keys = torch.cat((torch.einsum("sl,hnl->shn", latent, w_uk),
                          rope[:, None].expand(-1, heads, -1)), dim=-1)
        values = torch.einsum("sl,hlv->shv", latent, w_uv)
    heads = q.shape[1]
    keys, values = (one.expand(-1, heads, -1).transpose(0, 1) for one in (keys, values))
    outputs: List[torch.Tensor] = []
    places = torch.arange(len(q), device=q.device)
    for begin in range(0, len(q), LOCAL_ROWS):
        rows = queries[begin:begin + LOCAL_ROWS].transpose(0, 1)
        end = begin + rows.shape[1]
        scores = torch.matmul(rows, keys[:, :end].transpose(1, 2)) * scale
        scores.masked_fill_(places[:end] > places[begin:end, None], float("-inf"))
        outputs.append(torch.matmul(scores.softmax(-1), values[:, :end]).transpose(0, 1))
    return torch.cat(outputs).to(q.dtype)


class Exchange:
    """Exchanges the tensors of one worker's passes with the server. Belongs to one thread at a
    time."""

    def __init__(self, passes: Passes, sender: Sender, scale: float, lora: int,
                 weights: Optional[Weights] = None,
                 projections: Optional[Callable[[int], Projections]] = None) -> None:
        """`weights`: None where queries are absorbed. `projections`, of a layer: of PROJECTED."""
        self._passes = passes
        self._sender = sender
        self._scale = scale
        self._lora = lora
        self._weights = weights
        self._projections = projections
        self.largest = 0  # rows of the largest pass
        # The fast path for further layers of a pass, while nothing is in its way.
        self._fast_path: Optional[FastPath] = None
        self._fast_path_of: Optional[Pass] = None

    @classmethod
    def of(cls, passes: Passes, ranks: Ranks, spec: ModelSpec, weights: Weights,
           projections: Optional[Callable[[int], Projections]] = None) -> "Exchange":
        """The exchange of one of the ranks that share a model's heads. Where an indexer chooses
        positions, queries and outputs are absorbed, and no part is computed here. `projections`, of
        a layer: for a model with a rope_layout."""
        sparse = spec.attention != DENSE
        profile = (Profile.ABSORBED if sparse else
                   Profile.PROJECTED if spec.rope_layout else Profile.EXPANDED)
        passes.computes_locally = not sparse
        return cls(passes, Sender(profile, ranks.rank, ranks.size), spec.softmax_scale,
                   spec.geometry.kv_lora_rank, None if sparse else weights, projections)

    def attend(self, model_pass: Pass, layer: int, q: torch.Tensor, kv: Rows, output: torch.Tensor,
               chosen: Optional[torch.Tensor] = None) -> None:
        """Writes the outputs of a layer, [rows, heads, v] or flat, into `output`. q and kv are as
        in Sender.attend_chained, with the rows of the pass; in PROJECTED q is [rows, 1,
        q_lora_rank] and the output [rows, hidden_size]. `chosen` [rows, width]: the positions that
        each row attends to; None: to all."""
        if self._fast_path is not None and self._fast_path_of is model_pass and chosen is None:
            try:
                if self._fast_path.attend(layer, q, kv, output):
                    model_pass.layers += 1  # all that layer_done does here
                    return
            except FAILURES as error:
                self._fail(model_pass, error)
        self._fast_path = None
        rows = q.shape[0]
        self.largest = max(self.largest, rows)
        if model_pass.step is not None:
            try:
                self._send(model_pass, layer, q, kv, output, chosen)
            except FAILURES as error:
                self._fail(model_pass, error)
        if model_pass.whole:
            if model_pass.chained:
                self._fast_path, self._fast_path_of = self._sender.fast_path, model_pass
        else:
            heads = output.view(rows, q.shape[1], -1)
            for part in model_pass.parts:
                self._without(part, layer, q, whole(kv), heads)
        self._passes.layer_done(model_pass)

    def release(self) -> None:
        """Gives the transport's memory back."""
        self._sender.release()

    def _fail(self, model_pass: Pass, error: Exception) -> None:
        self._sender.forget()
        self._passes.fail(model_pass, error)

    def _send(self, model_pass: Pass, layer: int, q: torch.Tensor, kv: Rows, output: torch.Tensor,
              chosen: Optional[torch.Tensor]) -> None:
        if model_pass.whole:
            self._exchange(model_pass, layer, q, kv, output, chosen)
            return
        output = output.view(q.shape[0], q.shape[1], -1)
        rows = torch.cat([torch.arange(part.begin, part.end)
                          for part in model_pass.sent()]).to(q.device)
        outputs = output.new_empty((len(rows), *output.shape[1:]))
        self._exchange(model_pass, layer, q[rows], whole(kv)[rows], outputs,
                       None if chosen is None else chosen[rows])
        output[rows] = outputs

    def _exchange(self, model_pass: Pass, layer: int, q: torch.Tensor, kv: Rows,
                  output: torch.Tensor, chosen: Optional[torch.Tensor]) -> None:
        """Chained where that can be: then the pass says at its end whether outputs are good."""
        assert model_pass.step is not None
        if chosen is not None:
            lists = chosen.to(device="cpu", dtype=torch.int32).numpy()
            outputs = self._sender.attend(model_pass.step, layer, q, whole(kv), lists)
            output.view(outputs.shape).copy_(outputs)
            return
        may_chain = model_pass.may_chain and (model_pass.chained or model_pass.layers == 0)
        if may_chain and self._sender.attend_chained(model_pass.step, layer, q, kv, output):
            model_pass.chained = True
            return
        # A pass that is repeated begins as the one before was: chained.
        model_pass.chained = model_pass.chained and model_pass.layers > 0
        outputs = self._sender.attend(model_pass.step, layer, q, whole(kv))
        output.view(outputs.shape).copy_(outputs)

    def _without(self, part: Part, layer: int, q: torch.Tensor, kv: torch.Tensor,
                 output: torch.Tensor) -> None:
        rows = slice(part.begin, part.end)
        if part.how == How.VOID:
            output[rows].zero_()
        elif part.how == How.LOCAL:
            output[rows].copy_(self._local(layer, q[rows], kv[rows]))

    def _local(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """The outputs of a request's first rows, as the server has them: [rows, heads, v], or
        [rows, 1, hidden_size]."""
        weights = self._weights(layer) if self._weights is not None else None
        if self._projections is None:
            return local_attention(q, kv, self._scale, self._lora, weights)
        own = self._projections(layer)
        outputs = local_attention(own.queries(q[:, 0]), kv, self._scale, self._lora, weights)
        return own.hiddens(outputs)[:, None]
