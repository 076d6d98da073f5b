"""The cache that transformers sees: its rows are on the server."""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional, Tuple

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from mla_client import errors
from mla_client.service import Model
from mla_client.serving.batch import Forward, RemoteBatch
from mla_client.transformers.exchange import Exchange


def is_sparse(model: Model) -> bool:
    """True if an indexer chooses the positions that a row attends to."""
    return model.spec.attention == "sparse_v32"


class Rows:
    """State shared by the layers of one cache."""

    def __init__(self, model: Model, step_lease_ms: int) -> None:
        self.model = model
        self.batch = RemoteBatch(model, step_lease_ms)
        self.exchange = Exchange(model)
        self.tokens: Optional[torch.Tensor] = None  # of the pass that is about to begin
        self.forward: Optional[Forward] = None      # the pass under way

    def begin(self, batch: int, new: int, mask: Optional[torch.Tensor],
              rotations: Optional[torch.Tensor] = None) -> Forward:
        """Begins a pass; mask [batch, length + new], bool. For PROJECTED rotations [batch * new,
        rope] as Service.step has them."""
        tokens, self.tokens = self.tokens, None
        self.forward = self.batch.begin(
            batch, new, None if mask is None else mask.cpu().numpy(),
            None if tokens is None else np.ascontiguousarray(tokens.cpu().numpy()),
            None if rotations is None else rotations.float().cpu().numpy())
        return self.forward

    def release(self) -> None:
        """Releases the sequences on the server and the buffers of the transport."""
        self.batch.reset()
        self.exchange.release()


class _Handed(threading.local):
    """The last arguments of a cache layer in this thread, for the attention function that is called
    next."""

    rows: Optional[Rows] = None
    layer: int = -1
    kv: Optional[torch.Tensor] = None


_handed = _Handed()


def take(layer: int) -> Tuple[Rows, torch.Tensor]:
    """The cache and the new KV rows [batch, new, lora + rope] of the layer that is being
    computed."""
    rows, kv, handed = _handed.rows, _handed.kv, _handed.layer
    _handed.rows = _handed.kv = None
    if rows is None or kv is None or handed != layer:
        raise errors.FailedPrecondition(
            f"attention of layer {layer}: it has no cache whose rows are on the server; call the "
            "model that was attached, with use_cache=True")
    return rows, kv


class RemoteLayer(CacheLayerMixin):
    """A layer of a RemoteCache. `update` passes the new rows on and returns its inputs, so only the
    new rows are expanded locally. Whatever concerns all layers is done by the cache."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, rows: Rows, index: int) -> None:
        super().__init__()
        self._rows = rows
        self._index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to allocate."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        """Latents [batch, 1, new, lora] and rotated keys [batch, 1, new, rope]."""
        geometry = self._rows.model.spec.geometry
        want = (geometry.kv_lora_rank, geometry.rope_dim)
        got = (key_states.shape[-1], value_states.shape[-1])
        if got != want or key_states.shape[1] != 1 or value_states.shape[1] != 1:
            raise errors.Unimplemented(
                f"cache: got rows of {tuple(key_states.shape)} and {tuple(value_states.shape)}, "
                f"must be latents and rotated keys of {want}: this release of transformers caches "
                "others")
        _handed.rows, _handed.layer = self._rows, self._index
        _handed.kv = torch.cat((key_states, value_states), dim=-1)[:, 0]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> Tuple[int, int]:
        """Length and offset of the keys."""
        return self._rows.batch.length + query_length, 0

    def get_seq_length(self) -> int:
        """Positions in the cache, padding included."""
        return self._rows.batch.length

    def get_max_length(self) -> int:
        """It is unlimited here; the server's limits hold."""
        return -1

    def _refuse(self, what: str) -> None:
        raise errors.Unimplemented(f"{what}: the server keeps the rows of all layers together; "
                                   "call the cache, not a layer")

    def offload(self) -> None:
        self._refuse("offload")

    def prefetch(self) -> None:
        self._refuse("prefetch")

    def reset(self) -> None:
        self._refuse("reset")

    def crop(self, tokens_to_remove: int) -> None:
        self._refuse("crop")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._refuse("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._refuse("batch_select_indices")


class IndexedLayer(RemoteLayer):
    """A layer with an indexer. Its keys, [batch, positions, dim], stay here: they are small
    compared with the rows, and the library itself chooses the positions."""

    def __init__(self, rows: Rows, index: int) -> None:
        super().__init__(rows, index)
        self.index_keys: Optional[torch.Tensor] = None

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Adds keys of new positions; returns all."""
        if self.index_keys is not None:
            indexer_key_states = torch.cat((self.index_keys, indexer_key_states), dim=1)
        self.index_keys = indexer_key_states
        return indexer_key_states


class RemoteCache(Cache):
    """A cache for one batch. It frees its sequences on the server when it is released, or dropped.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        kind = IndexedLayer if is_sparse(rows.model) else RemoteLayer
        super().__init__(layers=[kind(rows, index) for index in range(rows.model.spec.layers)])

    def release(self) -> None:
        """Frees its sequences on the server now. The cache is empty afterwards."""
        self.rows.release()
        self._change_keys(lambda keys: None)

    def reset(self) -> None:
        self.rows.batch.reset()
        self._change_keys(lambda keys: None)

    def crop(self, tokens_to_remove: int) -> None:
        self.rows.batch.crop(int(tokens_to_remove))
        length = self.rows.batch.length
        self._change_keys(lambda keys: keys[:, :length])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows.batch.select(np.arange(self.rows.batch.size).repeat(repeats))
        self._change_keys(lambda keys: keys.repeat_interleave(repeats, dim=0))

    def _select(self, indices: torch.Tensor) -> None:
        if self.get_seq_length() > 0:
            self.rows.batch.select(indices.cpu().numpy())
            self._change_keys(lambda keys: keys.index_select(0, indices.to(keys.device)))

    def _change_keys(self, change: Callable[[torch.Tensor], Optional[torch.Tensor]]) -> None:
        """The indexers' keys follow what happens to the rows."""
        for layer in self.layers:
            if isinstance(layer, IndexedLayer) and layer.index_keys is not None:
                layer.index_keys = change(layer.index_keys)
