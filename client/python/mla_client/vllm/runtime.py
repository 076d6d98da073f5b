"""State that the backend and the connector of a worker process share: the layers in the order of
their construction, the link to the server and the passes."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any, Collection, Dict, List, NamedTuple, Optional, Set, Tuple

import numpy.typing as npt
import torch

from mla_client import errors
from mla_client.pytorch import Rows, Sender, gpu_arguments
from mla_client.pytorch.exchange import Exchange
from mla_client.serving import Link, Pass, Passes
from mla_client.types import Geometry, ModelSpec
from mla_client.vllm import checks
from mla_client.vllm.batches import BatchPlan, LostBlocks, Orders

LOG = logging.getLogger("mla_client")
# The most that pages without rows take of the engine's memory: a byte a token and layer.
PAGES_BYTES = 256 << 20
LARGEST_BLOCK = 256  # rows, where the engine has not chosen yet


def layer_of(name: str) -> int:
    """The number in a name like "model.layers.3.self_attn.kv_b_proj"."""
    numbers = re.findall(r"\.(\d+)\.", f".{name}.")
    if len(numbers) != 1:
        raise errors.Unimplemented(f"attention layer {name!r}: its name must have one number")
    return int(numbers[0])


class Layer(NamedTuple):
    """An attention layer as it was built, with its own heads."""

    geometry: Geometry
    scale: float
    kv_b_proj: Any
    dtype: torch.dtype

    def weights(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """W_UK [heads, nope, lora] and W_UV [heads, lora, v], not quantised."""
        # pylint: disable=import-outside-toplevel
        from vllm.model_executor.layers.quantization.utils.quant_utils import (
            get_and_maybe_dequant_weights)
        g = self.geometry
        both = get_and_maybe_dequant_weights(self.kv_b_proj, out_dtype=self.dtype).T.reshape(
            g.kv_lora_rank, g.num_heads, g.nope_dim + g.v_dim)
        return both[..., :g.nope_dim].permute(1, 2, 0), both[..., g.nope_dim:].transpose(0, 1)

    def arrays(self) -> Tuple[npt.NDArray, npt.NDArray]:
        """The same in float32, in host memory."""
        w_uk, w_uv = (weight.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
                      for weight in self.weights())
        return w_uk, w_uv


class Runtime:
    """The shared state of one worker process; used by one thread."""

    def __init__(self) -> None:
        self.layers: Dict[int, Layer] = {}
        self.link: Optional[Link] = None
        self.passes: Optional[Passes] = None
        self.plan: Optional[BatchPlan] = None  # of the pass under way; None: a pass without a plan
        self._config: Any = None
        self._exchange: Optional[Exchange] = None
        self._orders = Orders()
        self._begun: Optional[Pass] = None
        self._places: Dict[int, int] = {}  # of each layer among the layers of this process

    def prepare(self, config: Any) -> None:
        """Before the first layer is built: refuses what cannot be, and looks at the server."""
        if self.link is not None and self._config is config:
            return
        checks.check(config)
        self.__init__()  # type: ignore[misc]  # of another engine in one process
        self._config = config
        self.link = Link(checks.options_of(config).with_defaults(gpu_arguments()),
                         checks.ranks_of(config))
        limits = self.link.look()
        self._bound_pages(limits)

    def add(self, name: str, layer: Layer) -> int:
        """A layer that is built; returns its number."""
        number = layer_of(name)
        known = next(iter(self.layers.values()), None)
        if known is not None and (known.geometry, known.scale) != (layer.geometry, layer.scale):
            raise errors.Unimplemented(
                f"{name}: it differs from layers before it in dimensions or scale")
        if number >= self._config.model_config.hf_text_config.num_hidden_layers:
            raise errors.Unimplemented(
                f"{name}: a layer of the draft model, whose rows would be mixed with the model's; "
                'give the drafts a backend of their own ("attention_backend" of '
                "--speculative-config)")
        self.layers[number] = layer
        return number

    def start(self) -> None:
        """The weights are there: registers the model and uploads them."""
        if not self.layers or self.link is None:
            raise errors.Unimplemented(
                "the connector MlaServerConnector without MLA layers of its backend: "
                "--attention-backend CUSTOM is missing, or the model has no MLA")
        numbers = sorted(self.layers)
        self._places = {number: place for place, number in enumerate(numbers)}
        one, ranks, options = self.layers[numbers[0]], self.link.ranks, self.link.options
        geometry = dataclasses.replace(one.geometry,
                                       num_heads=one.geometry.num_heads * ranks.size)
        config = self._config
        drafts = config.speculative_config is not None
        self.link.start(
            ModelSpec(options.model_id, geometry, len(numbers), one.scale, options.page_size),
            lambda place: self.layers[numbers[place]].arrays())
        self.passes = Passes(self.link, len(numbers), deferred=drafts,
                             name=f"{options.arguments['client_id']}/{options.model_id}")
        self._exchange = Exchange(
            self.passes, Sender(rank=ranks.rank, ranks=ranks.size), one.scale,
            geometry.kv_lora_rank, lambda place: self.layers[numbers[place]].weights())

    def attend(self, number: int, q: torch.Tensor, kv: Rows, metadata: Any,
               output: torch.Tensor) -> None:
        """Attention of a layer: q [rows, heads, nope + rope], kv [rows, lora] and [rows, rope] ->
        `output` [rows, heads * v]; zeros in a pass without a plan."""
        if self.plan is None or self._exchange is None:
            output.zero_()
            return
        made = self._begun or self._begin(metadata)
        self._exchange.attend(made, self._places[number], q, kv, output)

    def finish(self) -> None:
        """The pass is over: commits it, unless a later one is to say what of it was right."""
        if self.passes is None or self.plan is None:
            return
        if self._begun is None:  # without tokens
            plan = self.plan.plan
            self._begun = self.passes.begin((), plan.gone, plan.said, plan.number)
        # With asynchronous scheduling another thread hands out what a pass has found.
        self.passes.end(ahead=not self._config.scheduler_config.async_scheduling)

    def bind(self, plan: Optional[BatchPlan]) -> None:
        """The pass that comes; None: it is over."""
        self.plan, self._begun = plan, None

    def lost_blocks(self) -> Collection[int]:
        """First blocks of requests that must begin again. While the pass is ending they are found
        when they are asked for, because the stream's work on samples need not wait for that."""
        if self.passes is None or self.plan is None:
            return set()
        passes, first = self.passes, self.plan.first

        def found() -> Set[int]:
            return {first[name] for name in passes.lost() if name in first}
        return LostBlocks(found) if passes.ending else found()

    def counts(self) -> Dict[str, int]:
        """Counts so far: rows of the largest pass, passes, failed passes, drafts kept."""
        if self._exchange is None or self.passes is None:
            return {}
        return {"largest": self._exchange.largest, **self.passes.counts}

    def close(self) -> None:
        """Releases what the server has and ends the connection."""
        if self.passes is not None:
            self.passes.close()
        if self._exchange is not None:
            self._exchange.release()
        if self.link is not None:
            self.link.close()
        self.__init__()  # type: ignore[misc]

    def _begin(self, metadata: Any) -> Pass:
        assert self.plan is not None and self.passes is not None
        plan = self.plan
        rows: List[int] = metadata.rows
        batch = self._orders.of(plan, rows, metadata.blocks, metadata.computed)
        if self.link is not None and self.link.ranks.size > 1 and metadata.slots.is_cuda:
            # The ranks have all had the last layer of the pass before once this one's queries are
            # there: only then may it end.
            torch.cuda.current_stream().synchronize()
        self._begun = self.passes.begin(batch, plan.plan.gone, plan.plan.said, plan.plan.number)
        return self._begun

    def _bound_pages(self, limits: Any) -> None:
        """As many blocks as the server's pool has rows for, unless the user says how much memory;
        a number of blocks that the user gives is the engine's to heed."""
        cache = self._config.cache_config
        if cache.kv_cache_memory_bytes is not None:
            return
        parallel, text = self._config.parallel_config, self._config.model_config.hf_text_config
        layers = text.num_hidden_layers
        row_bytes = 2 * (text.kv_lora_rank + text.qk_rope_head_dim) * layers
        rows = limits.kv_cache_bytes // row_bytes
        here = -(-layers // parallel.pipeline_parallel_size)
        bound = min(rows * here, PAGES_BYTES)
        # A block more, which the engine keeps for itself.
        cache.kv_cache_memory_bytes = bound + (cache.block_size or LARGEST_BLOCK) * here
        LOG.info("mla: the server's pool holds %d rows of this model; %d tokens at a time", rows,
                 bound // here)


runtime = Runtime()
