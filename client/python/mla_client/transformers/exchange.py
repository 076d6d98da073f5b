"""Tensors as transformers lays them out, and as rows of a step."""

from __future__ import annotations

from typing import Optional

import torch

from mla_client.pytorch import Sender
from mla_client.service import Model
from mla_client.serving.batch import Forward
from mla_client.types import Profile


class Exchange:
    """Sends the attention of one layer after another, in the model's profile. Belongs to one thread
    at a time."""

    def __init__(self, model: Model) -> None:
        self._geometry = model.spec.geometry
        self._sender = Sender(Profile.PROJECTED if model.spec.rope_layout else Profile.EXPANDED)
        self._forward: Optional[Forward] = None
        self._take = self._give = self._source = torch.zeros(0, dtype=torch.int64)

    def attend(self, forward: Forward, layer: int, query: torch.Tensor, rows: torch.Tensor,
               lists: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Takes query [batch, heads, new, nope + rope] and rows [batch, new, lora + rope]; returns
        the outputs [batch, new, heads, v], with zeros at padding. `lists` [batch, new, width]: the
        positions that each row attends to, -1 for none; without them it attends to all."""
        return self._send(forward, layer, query.transpose(1, 2), rows, self._geometry.v_dim, lists)

    def attend_projected(self, forward: Forward, layer: int, query: torch.Tensor,
                         rows: torch.Tensor) -> torch.Tensor:
        """Takes normed queries [batch, new, q_lora_rank] and rows [batch, new, lora + rope].

        Returns hidden states [batch, new, hidden_size], with zeros at padding."""
        return self._send(forward, layer, query[:, :, None], rows,
                          self._geometry.hidden_size)[:, :, 0]

    def _send(self, forward: Forward, layer: int, query: torch.Tensor, rows: torch.Tensor,
              o_dim: int, lists: Optional[torch.Tensor] = None) -> torch.Tensor:
        """query [batch, new, heads, any] -> [batch, new, heads, o dim]."""
        batch, new, heads, width = query.shape
        shape = (batch * new, heads, o_dim)
        if forward.step is None:
            return query.new_zeros(shape).view(batch, new, *shape[1:])
        q = query.reshape(batch * new, heads, width)
        kv = rows.reshape(batch * new, self._geometry.row_dim)
        if not forward.plain:
            self._place(forward, query.device)
            q, kv = q[self._take], kv[self._take]
        chosen = None
        if lists is not None:
            flat = lists.reshape(batch * new, -1)
            chosen = (flat if forward.plain else flat[self._take]).to(torch.int32).cpu().numpy()
        o = self._sender.attend(forward.step, layer, q, kv, chosen)
        if not forward.plain:
            o = o.new_zeros(shape).index_copy_(0, self._give, o[self._source])
        return o.view(batch, new, *shape[1:])

    def release(self) -> None:
        """Gives the transport's memory back."""
        self._sender.release()

    def _place(self, forward: Forward, device: torch.device) -> None:
        """The pass's indices on the device of its tensors, once a pass."""
        if self._forward is not forward or self._take.device != device:
            self._forward = forward
            self._take, self._give, self._source = (
                torch.from_numpy(indices).to(device)
                for indices in (forward.take, forward.give, forward.source))
