"""Requests, prefixes and passes of one scheduler process: the engine's scheduler and its model
runner are one thread there. Ranks that share heads have a process each, which decide alike: the
first one asks the server, and tells the others."""

from __future__ import annotations

import itertools
import secrets
import weakref
from typing import Any, Callable, Dict, List, Optional, Set, Tuple, TypeVar

import numpy.typing as npt
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.common import _req_radix_key, match_kv_cache
from sglang.srt.runtime_context import get_parallel
from sglang.version import __version__

from mla_client import errors
from mla_client.pytorch import Sender, gpu_arguments
from mla_client.pytorch.exchange import Exchange
from mla_client.serving import Admission, Link, Options, Pass, PassPlan, Passes, Ranks
from mla_client.sglang import checks
from mla_client.types import Geometry, ModelSpec

_Value = TypeVar("_Value")


def _array(weight: torch.Tensor) -> npt.NDArray:
    return weight.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()


class Runtime:
    """Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self.passes: Optional[Passes] = None
        self.admission: Optional[Admission] = None  # of the first rank
        self.spec: Optional[ModelSpec] = None
        self._link: Optional[Link] = None
        self._limits: Any = None
        self._group: Any = None  # of the ranks that share heads; None: there is one
        self._exchange: Optional[Exchange] = None
        self._attention: List[Any] = []  # modules, by layer
        self._pass: Optional[Pass] = None
        self._numbers = itertools.count()
        self._names: Dict[str, str] = {}  # of requests here, by the engine's names
        self._waiting: Set[str] = set()
        self._gone: Set[str] = set()      # of requests that have not been released
        self._lost: Set[str] = set()

    # --- Starting and ending

    def look(self, runner: Any) -> None:
        """Before the model is loaded: connects to the server, and learns its bounds."""
        if self._link is not None:
            return
        parallel = get_parallel()
        ranks = Ranks(parallel.attn_tp_rank, parallel.attn_tp_size)
        if ranks.size > 1:
            self._group = parallel.attn_tp_group
        name = self._agreed(lambda: secrets.token_hex(6))
        options = Options.of(checks.options(), runner.model_config.model_path,
                             f"sglang-{name}-{parallel.attn_dp_rank}")
        link = Link(options.with_defaults(gpu_arguments()), ranks)
        self._limits = link.look()
        self._link = link
        self.spec = _spec(runner.model_config, options.model_id)

    def start(self, runner: Any) -> None:
        """The weights are there: registers the model and uploads them."""
        checks.check(runner)
        if self._link is None or self.spec is None:
            raise errors.Internal("the backend is made before a model was loaded")
        ranks = self._link.ranks
        self._attention = _attention_of(runner.model, self.spec, ranks)
        self._link.start(self.spec, self._upload)
        self.passes = Passes(self._link, self.spec.layers,
                             name=str(self._link.options.arguments["client_id"]))
        self._exchange = Exchange(self.passes, Sender(rank=ranks.rank, ranks=ranks.size),
                                  self.spec.softmax_scale, self.spec.geometry.kv_lora_rank,
                                  self._weights)
        if ranks.sends_rows:
            self.admission = Admission(self._link, checks.salt(runner, __version__),
                                       self._link.options.prefix_cache)

    def close(self) -> None:
        """Releases what the server has and ends the connection."""
        if self.passes is not None:
            self.passes.close()
        if self._exchange is not None:
            self._exchange.release()
        if self.admission is not None:
            self.admission.close()
        elif self._link is not None:
            self._link.close()
        self.__init__()  # type: ignore[misc]

    def rows_of_pool(self) -> int:
        """Rows of this model that the server's pool has room for."""
        assert self.spec is not None
        row_bytes = 2 * self.spec.geometry.row_dim * self.spec.layers
        return int(self._limits.kv_cache_bytes) // row_bytes

    # --- Scheduling

    def place(self, req: Any, tree: Any) -> None:
        """Gives a request that may be scheduled the prefix that the server has: the tree, whose
        rows are nowhere but there, is cut or grown to it."""
        if self._link is None:
            return
        name = self._named(req)
        tokens = req.full_untruncated_fill_ids
        limit = req._compute_max_prefix_len(len(tokens)) if tree.supports_prefix_sharing() else 0
        shares = limit > 0 and checks.shareable(req)
        rows = self._agreed(lambda: self._admitted(name, req, shares))
        self._waiting.discard(name)
        if rows is None:
            self._waiting.add(name)
        want = min(rows or 0, limit) // tree.page_size * tree.page_size
        if req.prefix_len < want:
            _grow(req, tree, want)
        if req.prefix_len > want or want > 0:
            match_kv_cache(req, tree, tokens, max_prefix_len=want)
            req.kv.cache_protected_len = req.prefix_len

    def waits(self, req: Any) -> bool:
        """True for a request that the server has no room for now."""
        return self._names.get(req.rid) in self._waiting

    def freed(self, req: Any) -> None:
        """A request has given its slot back: its rows are released at once, and found by others
        that begin with the same tokens."""
        name = self._names.get(req.rid)
        if name is None or self.passes is None:
            return
        if self.admission is not None:
            self.admission.ended(name, [*req.origin_input_ids, *req.output_ids])
        self._gone.add(name)
        plan = self._planned({})
        self.passes.begin((), plan.gone, plan.said, plan.number)
        self.passes.end()

    def take_lost(self, reqs: List[Any]) -> List[Any]:
        """Returns the requests of `reqs` whose rows are lost; each is returned only once."""
        if self.passes is None:
            return []
        names = set(self.passes.lost())
        if self._group is not None:
            names = set().union(*self._group.all_gather_object(names))
        self._lost |= names
        found = [req for req in reqs if self._names.get(req.rid) in self._lost]
        self._lost -= {self._names[req.rid] for req in found}
        return found

    def patient(self) -> bool:
        """True while requests whose rows are lost are to begin again."""
        return self._agreed(lambda: self.admission is not None and self.admission.patient)

    def reason(self) -> str:
        """Why rows are lost."""
        return str(self.passes.last_error if self.passes is not None else "it is away")

    # --- Passes

    def begin(self, rids: List[str], rows: List[Tuple[int, int]]) -> None:
        """Begins a pass with (computed, new) rows of each request, in this order."""
        assert self.passes is not None
        unknown = [rid for rid in rids if rid not in self._names]
        if unknown:
            raise errors.Internal(f"requests {unknown} were not placed before their pass")
        plan = self._planned({self._names[rid]: pair for rid, pair in zip(rids, rows)})
        self._pass = self.passes.begin(plan.scheduled, plan.gone, plan.said, plan.number)

    def begin_empty(self) -> None:
        """Begins a pass of the engine's own, which stores no rows."""
        self._pass = None

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """q [rows, heads, nope + rope], kv [rows, lora + rope] -> [rows, heads * v]; rows that the
        pass has more than its requests are padding, whose outputs are zero."""
        assert self.spec is not None
        output = q.new_zeros(len(q), q.shape[1] * self.spec.geometry.v_dim)
        made = self._pass
        if made is None or self._exchange is None or self.passes is None:
            return output
        if layer != made.layers:
            raise errors.Internal(f"layer {layer}: must be {made.layers} of the pass")
        rows = made.parts[-1].end
        if rows > len(q):
            raise errors.Internal(f"layer {layer}: got {len(q)} rows, the requests have {rows}")
        self._exchange.attend(made, layer, q[:rows], kv[:rows], output[:rows])
        if made.layers == self.spec.layers:
            self.passes.end()
            self._pass = None
        return output

    # --- Inside

    def _named(self, req: Any) -> str:
        """The name of a request, of which no other one has it; the engine's may be used again."""
        name = getattr(req, "mla_name", None)
        if name is None:
            name = f"{req.rid}#{next(self._numbers)}"
            req.mla_name = name
            # A request that is dropped before it was scheduled gives its reservation back.
            weakref.finalize(req, self._gone.add, name).atexit = False
        self._names[req.rid] = name
        return name

    def _admitted(self, name: str, req: Any, shares: bool) -> Optional[int]:
        assert self.admission is not None
        return self.admission.admit(name, req.full_untruncated_fill_ids,
                                    checks.salt_of_request(req), shares)

    def _planned(self, rows: Dict[str, Tuple[int, int]]) -> PassPlan:
        gone, self._gone = self._gone, set()
        for rid in [rid for rid, name in self._names.items() if name in gone]:
            del self._names[rid]
        self._waiting -= gone
        return self._agreed(lambda: self.admission.plan(rows, gone))  # type: ignore[union-attr]

    def _agreed(self, make: Callable[[], _Value]) -> _Value:
        """Returns on all ranks what `make` returns on the first one."""
        if self._group is None:
            return make()
        value = make() if self._group.rank_in_group == 0 else None
        return self._group.broadcast_object(value, src=0)

    def _upload(self, layer: int) -> Tuple[npt.NDArray, npt.NDArray]:
        """The weights of a layer as the server takes them."""
        w_uk, w_uv = self._weights(layer)
        return _array(w_uk), _array(w_uv)

    def _weights(self, layer: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """W_UK [heads, nope, lora] and W_UV [heads, lora, v], as SGLang has cut them."""
        module = self._attention[layer]
        return module.w_kc, module.w_vc


def _spec(config: Any, model_id: str) -> ModelSpec:
    geometry = Geometry(config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim,
                        config.qk_nope_head_dim, config.v_head_dim)
    return ModelSpec(model_id, geometry, config.num_hidden_layers, config.scaling)


def _attention_of(model: Any, spec: ModelSpec, ranks: Ranks) -> List[Any]:
    """The modules of MLA by layer. Unimplemented where they are not what the server computes."""
    geometry, (_, heads) = spec.geometry, ranks.heads(spec.geometry.num_heads)
    found = sorted((module for module in model.modules()
                    if hasattr(module, "w_kc") and hasattr(module, "attn_mha")),
                   key=lambda module: module.layer_id)
    if [module.layer_id for module in found] != list(range(spec.layers)):
        raise errors.Unimplemented(
            f"MLA layers {[module.layer_id for module in found]}, must be 0 to {spec.layers - 1}")
    want = ((heads, geometry.nope_dim, geometry.kv_lora_rank),
            (heads, geometry.kv_lora_rank, geometry.v_dim))
    for module in found:
        got = tuple(None if weight is None else tuple(weight.shape)
                    for weight in (module.w_kc, module.w_vc))
        if module.use_dsa:
            raise errors.Unimplemented("sparse attention")
        if got != want or module.w_scale_k is not None or not (
                torch.is_floating_point(module.w_kc) and module.w_kc.element_size() > 1):
            raise errors.Unimplemented(
                f"layer {module.layer_id}: W_UK and W_UV are {got}, must be {want}, not quantised")
    return found


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
