"""What one scheduler process has of the server: the engine's scheduler and its model runner are one
thread there. Ranks that share heads have a process each."""

from __future__ import annotations

import secrets
from typing import Any, List, Optional, Tuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.common import _req_radix_key, match_kv_cache
from sglang.srt.runtime_context import get_parallel
from sglang.version import __version__

from mla_client import errors
from mla_client.pytorch import gpu_arguments
from mla_client.pytorch.exchange import Exchange
from mla_client.serving import (Admission, Layers, Options, Ranks, Requests, Worker, agreed,
                                options_in, refuse)
from mla_client.serving.layers import Pair, check_pair, weights_of
from mla_client.sglang import OPTIONS, checks
from mla_client.types import Geometry, ModelSpec


class Runtime:
    """Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self.worker: Optional[Worker[Exchange]] = None
        self.requests: Optional[Requests] = None  # None: the model is not there yet
        # Requests that begin again as soon as the pass under way is over, which still has them.
        self.put_out: List[Any] = []
        self._group: Any = None  # of the ranks that share heads; None: there is one
        self._config: Any = None  # of the model

    def look(self, runner: Any) -> None:
        """Before the model is loaded: connects to the server, and learns its bounds."""
        if self.worker is not None:
            return
        parallel = get_parallel()
        ranks = Ranks(parallel.attn_tp_rank, parallel.attn_tp_size)
        if ranks.size > 1:
            self._group = parallel.attn_tp_group
        self._config = runner.model_config
        name = agreed(self._group, lambda: secrets.token_hex(6))
        options = Options.of(options_in(OPTIONS), runner.model_config.model_path,
                             f"sglang-{name}-{parallel.attn_dp_rank}")
        refuse([(options.projected, "projected: this adapter has SGLang's own queries and outputs "
                 "alone")])
        self.worker = Worker(options.with_defaults(gpu_arguments()), ranks)

    def start(self, runner: Any) -> None:
        """The weights are there: registers the model and uploads them."""
        checks.check(runner)
        worker = self.worker
        if worker is None:
            raise errors.Internal("the backend is made before a model was loaded")
        ranks, options = worker.link.ranks, worker.link.options
        layers = _layers_of(runner.model, runner.model_config, ranks)
        modules = layers.in_order()
        spec = layers.spec(options.model_id, ranks, options.page_size)
        worker.start(spec, weights_of(modules, _weights),
                     lambda passes: Exchange.of(passes, ranks, spec,
                                                lambda place: _weights(modules[place])))
        admission = Admission(worker.link, checks.salt(runner, __version__),
                              options.prefix_cache) if ranks.sends_rows else None
        self.requests = Requests(worker, admission, self._group)

    def close(self) -> None:
        """Releases what the server has and ends the connection."""
        ending = self.requests or self.worker
        if ending is not None:
            ending.close()
        self.__init__()  # type: ignore[misc]

    @property
    def spec(self) -> Optional[ModelSpec]:
        """The model as it is registered."""
        return self.worker.spec if self.worker is not None else None

    def rows_of_pool(self) -> int:
        """Rows of the model that the server's pool has room for."""
        assert self.worker is not None
        config = self._config
        return self.worker.rows_of_pool(config.kv_lora_rank + config.qk_rope_head_dim,
                                        config.num_hidden_layers)

    def place(self, req: Any, tree: Any) -> None:
        """Gives a request that may be scheduled the prefix that the server has: the tree, whose
        rows are nowhere but there, is cut or grown to it."""
        if self.requests is None:
            return
        tokens = req.full_untruncated_fill_ids
        limit = req._compute_max_prefix_len(len(tokens)) if tree.supports_prefix_sharing() else 0
        rows = self.requests.admit(req.rid, req, tokens, checks.salt_of_request(req),
                                   checks.shareable(req), limit > 0)
        want = min(rows, limit) // tree.page_size * tree.page_size
        if req.prefix_len < want:
            _grow(req, tree, want)
        if req.prefix_len > want or want > 0:
            match_kv_cache(req, tree, tokens, max_prefix_len=want)
            req.kv.cache_protected_len = req.prefix_len

    def freed(self, req: Any) -> None:
        """A request has given its slot back."""
        if self.requests is not None:
            self.requests.freed(req.rid, [*req.origin_input_ids, *req.output_ids])

    def begin(self, rids: List[str], rows: List[Tuple[int, int]]) -> None:
        """Begins a pass with (computed, new) rows of each request, in this order; without requests
        it is one of the engine's own, which stores no rows."""
        assert self.worker is not None and self.requests is not None
        self.worker.made = None
        if rids:
            self.requests.begin(rids, rows)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """q [rows, heads, nope + rope], kv [rows, lora + rope] -> [rows, heads * v]; rows that the
        pass has more than its requests are padding, whose outputs are zero."""
        worker = self.worker
        assert worker is not None and worker.spec is not None and worker.exchange is not None
        output = q.new_zeros(len(q), q.shape[1] * worker.spec.geometry.v_dim)
        model_pass = worker.made
        if model_pass is not None:
            rows = worker.check_turn(layer, len(q))
            worker.exchange.attend(model_pass, layer, q[:rows], kv[:rows], output[:rows])
            if model_pass.layers == worker.spec.layers:
                worker.end()
        return output


def _weights(module: Any) -> Pair:
    """W_UK [heads, nope, lora] and W_UV [heads, lora, v], as SGLang has cut them."""
    return module.w_kc, module.w_vc


def _layers_of(model: Any, config: Any, ranks: Ranks) -> Layers:
    """The modules of MLA. Unimplemented where they are not what the server computes."""
    geometry = Geometry(ranks.heads(config.num_attention_heads)[1], config.kv_lora_rank,
                        config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim)
    layers = Layers()
    for module in model.modules():
        if hasattr(module, "w_kc") and hasattr(module, "attn_mha"):
            name = f"layer {module.layer_id}"
            refuse([(module.use_dsa, "sparse attention"),
                    (module.w_scale_k is not None or not torch.is_floating_point(module.w_kc)
                     or module.w_kc.element_size() < 2, f"{name}: quantised W_UK and W_UV")])
            check_pair(name, _weights(module), geometry)
            layers.add(name, module.layer_id, geometry, config.scaling, module)
    layers.check_whole(config.num_hidden_layers)
    return layers


def _grow(req: Any, tree: Any, want: int) -> None:
    """Puts tokens into the tree whose rows the server has; without room for them the prefix stays
    shorter."""
    have = tree.prefix_device_indices(req)
    slots = tree.token_to_kv_pool_allocator.alloc(want - req.prefix_len)
    if slots is None:
        return
    key = _req_radix_key(tree, req, req.full_untruncated_fill_ids, want)
    tree.insert(InsertParams(key=key, value=torch.cat((have, slots.to(have))),
                             prev_prefix_len=req.prefix_len, inserted_len=req.prefix_len))


runtime = Runtime()
