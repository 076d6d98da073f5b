"""State that the backend and the connector of a worker process share: the layers in the order of
their construction, and what the process has of the server."""

from __future__ import annotations

import logging
import math
from typing import Any, Collection, Dict, List, Optional, Set

import torch

from mla_client import errors
from mla_client.pytorch import Rows, gpu_arguments
from mla_client.pytorch.exchange import Exchange
from mla_client.serving import BatchPlan, Layers, LostBlocks, Orders, Pass, Passes, Worker
from mla_client.serving.layers import number_of, projected_dtype_of, weights_of
from mla_client.types import Geometry
from mla_client.vllm import checks
from mla_client.vllm.projected import Projections, whole
from mla_client.vllm.weights import Layer

LOG = logging.getLogger("mla_client")
# The most that pages without rows take of the engine's memory: a byte a token and layer.
PAGES_BYTES = 256 << 20
LARGEST_BLOCK = 256  # rows, where the engine has not chosen yet
# vLLM puts the pages of all layers into one buffer, and its kernels for CPUs read a draft model's
# rows by vectors of so many bytes, which must be aligned.
VECTOR_BYTES = 64
DRAFTS_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
DRAFTS = ("a layer of the draft model, whose rows would be mixed with the model's; give the drafts "
          'a backend of their own ("attention_backend" of --speculative-config)')


class Runtime:
    """The shared state of one worker process; used by one thread."""

    def __init__(self) -> None:
        self.layers = Layers()
        self.worker: Optional[Worker[Exchange]] = None
        self.plan: Optional[BatchPlan] = None  # of the pass under way; None: a pass without a plan
        self.top_k = 0  # positions that an indexer chooses for each row; 0: there is none
        self._config: Any = None
        self._orders = Orders()
        self._finished = False  # the pass under way

    def prepare(self, config: Any) -> None:
        """Before the first layer is built: refuses what cannot be, and looks at the server."""
        if self.worker is not None and self._config is config:
            return
        drafts = config.speculative_config
        if self.worker is not None and drafts is not None and (
                drafts is self._config.speculative_config):
            raise errors.Unimplemented(DRAFTS)  # the configuration is another one for the drafts
        checks.check(config)
        self.__init__()  # type: ignore[misc]  # of another engine in one process
        self._config, self.top_k = config, checks.top_k_of(config)
        self.worker = Worker(checks.options_of(config).with_defaults(gpu_arguments()),
                             checks.ranks_of(config))
        if not self.top_k:
            self._bound_pages(self.worker)

    def token_bytes(self, block_size: int) -> int:
        """Bytes of a token in a layer's pages, which no rows lie in."""
        if not self._drafts_have_layers:
            return 1
        return VECTOR_BYTES // math.gcd(VECTOR_BYTES, block_size)

    @property
    def _drafts_have_layers(self) -> bool:
        drafts = self._config.speculative_config if self._config is not None else None
        return drafts is not None and drafts.method not in DRAFTS_WITHOUT_LAYERS

    def add(self, name: str, geometry: Geometry, scale: float, kv_b_proj: Any) -> int:
        """A layer that is built; returns its number."""
        number = number_of(name)
        if number >= self._config.model_config.hf_text_config.num_hidden_layers:
            raise errors.Unimplemented(f"{name}: {DRAFTS}")
        self.layers.add(name, number, geometry, scale,
                        Layer(geometry, kv_b_proj, torch.get_default_dtype()))
        return number

    @property
    def projected(self) -> bool:
        """True if the server has W_UQ and W_O, too."""
        return self.worker is not None and self.worker.link.options.projected

    def add_projections(self, number: int, layer: Any) -> None:
        """The layer around one that `add` has had, with its projections."""
        kept: Layer = self.layers.at(number)
        kept.projections = Projections(layer, kept.geometry)

    def start(self) -> None:
        """The weights are there: registers the model and uploads them."""
        worker = self.worker
        if not len(self.layers) or worker is None:
            raise errors.Unimplemented(
                "the connector MlaServerConnector without MLA layers of its backend: "
                "--attention-backend CUSTOM is missing, or the model has no MLA")
        options, layers = worker.link.options, self.layers.in_order()
        ranks = worker.link.ranks
        more: Dict[str, Any] = {}
        if self.top_k:
            more = {"attention": "sparse_v32", "top_k": self.top_k}
        projections: List[Projections] = []
        table = None
        if self.projected:
            projections = whole([layer.projections for layer in layers])
            more = {"rope_layout": projections[0].layout, "projected_dtype": projected_dtype_of(
                options.projected_dtype, (layer.codes()[1] for layer in layers),
                self.layers.geometry)}
            table = projections[0].table(self._config.model_config.max_model_len)
        spec = self.layers.spec(options.model_id, ranks, options.page_size, **more)

        def exchange(passes: Passes) -> Exchange:
            passes.rotations = table
            # vLLM looks at blocks whose rows were there before the pass alone.
            passes.drops_first_tokens = False
            return Exchange.of(passes, ranks, spec, lambda place: layers[place].weights(),
                               projections.__getitem__ if projections else None)
        worker.start(spec, weights_of(layers, Layer.uploaded), exchange,
                     deferred=self._config.speculative_config is not None)

    def attend(self, number: int, q: torch.Tensor, kv: Rows, metadata: Any,
               output: torch.Tensor, chosen: Optional[torch.Tensor] = None) -> None:
        """Attention of a layer: q [rows, heads, nope + rope], kv [rows, lora] and [rows, rope] ->
        `output` [rows, heads * v]; with projections on the server q [rows, 1, q_lora_rank] ->
        [rows, hidden_size]. Zeros in a pass without a plan. With `chosen` [rows, top_k], the
        positions of each row, q and `output` are absorbed."""
        plan, worker = self.plan, self.worker
        if plan is None or worker is None or worker.exchange is None:
            output.zero_()
            return
        made = worker.made or self._begin(worker, plan, metadata)
        worker.exchange.attend(made, self.layers.places[number], q, kv, output, chosen)

    def finish(self) -> None:
        """The pass is over: commits it, unless a later one is to say what of it was right."""
        if self.worker is None or self.worker.passes is None or self.plan is None:
            return
        self._finished = True
        if self.worker.made is None:  # without tokens
            self.worker.begin(self.plan.plan, ())
        # With asynchronous scheduling another thread hands out what a pass has found.
        self.worker.end(ahead=not self._config.scheduler_config.async_scheduling)

    def bind(self, plan: Optional[BatchPlan]) -> None:
        """The pass that comes; None: it is over. vLLM 0.29 finishes no pass without tokens, which
        releases requests that have ended: others may wait for their room."""
        if plan is None and self.plan is not None and not (
                self._finished or self.plan.plan.scheduled):
            self.finish()
        self.plan, self._finished = plan, False
        if self.worker is not None:
            self.worker.made = None

    def lost_blocks(self) -> Collection[int]:
        """First blocks of requests that must begin again. While the pass is ending they are found
        when they are asked for, because the stream's work on samples need not wait for that."""
        if self.worker is None or self.worker.passes is None or self.plan is None:
            return set()
        passes, plan = self.worker.passes, self.plan

        def found() -> Set[int]:
            return plan.first_of(passes.lost())
        return LostBlocks(found) if passes.ending else found()

    def counts(self) -> Dict[str, int]:
        """As Worker.counts."""
        return self.worker.counts() if self.worker is not None else {}

    def close(self) -> None:
        """Releases what the server has and ends the connection."""
        if self.worker is not None:
            self.worker.close()
        self.__init__()  # type: ignore[misc]

    def _begin(self, worker: Worker, plan: BatchPlan, metadata: Any) -> Pass:
        batch = self._orders.of(plan, metadata.rows, metadata.blocks, metadata.computed)
        if worker.link.ranks.size > 1 and metadata.slots.is_cuda:
            # The ranks have all had the last layer of the pass before once this one's queries are
            # there: only then may it end.
            torch.cuda.current_stream().synchronize()
        return worker.begin(plan.plan, batch)

    def _bound_pages(self, worker: Worker) -> None:
        """As many blocks as the server's pool has rows for, unless the user says how much memory;
        a number of blocks that the user gives is the engine's to heed."""
        cache = self._config.cache_config
        if cache.kv_cache_memory_bytes is not None or self._drafts_have_layers:
            return  # the rows of a draft model's layers are the engine's, and are larger
        parallel, text = self._config.parallel_config, self._config.model_config.hf_text_config
        layers = text.num_hidden_layers
        rows = worker.rows_of_pool(text.kv_lora_rank + text.qk_rope_head_dim, layers)
        here = -(-layers // parallel.pipeline_parallel_size)
        bound = min(rows * here, PAGES_BYTES)
        # A block more, which the engine keeps for itself.
        cache.kv_cache_memory_bytes = bound + (cache.block_size or LARGEST_BLOCK) * here
        LOG.info("mla: the server's pool holds %d rows of this model; %d tokens at a time", rows,
                 bound // here)


runtime = Runtime()
