"""Sparse attention as DeepSeek V3.2 has it: an indexer chooses the rows, a service attends to them.

The indexer runs in the worker, or in the service, which then keeps the index keys as e4m3. Its keys
are small projections of the KV rows, and its queries small projections of the attention's queries,
so that it finds the rows that matter. Its logits are

    logit(t, s) = sum over index heads h of  w[h] * relu(q[t, h] . k[s])

over the rows that t sees, of which the best TOP_K are its list; of equal ones the lower position.

The comparison is as in checks.py, forced twice: the local float32 model is fed the tokens that the
remote one chose, and attends to the rows that the remote indexer chose. So no choice excuses the
next one. Each list is then compared with the list of the local indexer. If rounding alone explains
their difference, it is a near tie of the indexer: the logits of all rows in question then lie
within GAP of the worst one to be chosen. Otherwise the list is wrong.
"""

from __future__ import annotations

import dataclasses
from typing import List, Sequence

import mla_client
import numpy as np
import numpy.typing as npt
from attention import StepAttention, per_head
from checks import NOISE_FACTOR, Comparison, compare
from generate import Generator
from mla_client import bf16
from model import Array, Attention, Model

TOP_K = 16
INDEX_DIM = 128
# Relative to the largest logit of a row. Rounding in the cache moves logits by 0.01 of it and less.
GAP = 1 / 32
# At most this part of all lists may be near ties.
MOST_NEAR_TIES = 0.2

Lists = List[npt.NDArray[np.int64]]  # positions, by row


class Indexer:
    """Chooses rows. Immutable, so threads may share it."""

    def __init__(self, model: Model, seed: int = 3, rounded: bool = False):
        """`rounded`: keys are e4m3, as services keep them."""
        c = model.config
        rng = np.random.default_rng(seed)
        shape = (c.kv_lora + c.rope, INDEX_DIM)
        self._model = model
        self._rounded = rounded
        self._project = (rng.standard_normal(shape) / np.sqrt(INDEX_DIM)).astype(np.float32)
        self.head_weights = rng.uniform(0.5, 1.5, c.heads).astype(np.float32)

    def keys(self, row: Array) -> Array:
        """Index keys [rows, INDEX_DIM] of KV rows."""
        keys = row @ self._project
        return bf16.round_rows_to_e4m3(mla_client.round_to_bf16(keys)) if self._rounded else keys

    def queries(self, layer: int, q_nope: Array, q_rope: Array) -> Array:
        """Index queries [rows, heads, INDEX_DIM]."""
        absorbed = per_head(q_nope, self._model.layers[layer].w_uk)
        return np.concatenate([absorbed, q_rope], axis=-1) @ self._project

    def logits(self, layer: int, q_nope: Array, q_rope: Array, keys: Array) -> Array:
        """[rows, keys]; the last row sees all of `keys`, and keys that a row does not see are -inf.
        """
        products = np.maximum(self.queries(layer, q_nope, q_rope) @ keys.T, 0)
        logits = np.einsum("rhk,h->rk", products, self.head_weights)  # over [rows, heads, keys]
        last = np.arange(len(keys) - len(q_nope), len(keys))
        logits[np.arange(len(keys)) > last[:, None]] = -np.inf
        return logits

    @staticmethod
    def choose(logits: Array) -> Lists:
        """The best positions of each row, best first."""
        order = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP_K]
        return [positions[np.isfinite(row[positions])] for positions, row in zip(order, logits)]


class SparseAttention(StepAttention):
    """Attention of one step, to the rows that the generator's indexer chooses."""

    def __init__(self, generator: "SparseGenerator", step: mla_client.Step):
        super().__init__(generator.model, step, generator.profile)
        self._generator = generator
        self._start = generator.sequence.length

    def __call__(self, layer: int, q_nope: Array, q_rope: Array, row: Array) -> Array:
        generator = self._generator
        if generator.sequence.model.spec.index_heads > 0:
            return self._by_service(layer, q_nope, q_rope, row)
        keys = np.concatenate([generator.index_keys[layer][:self._start],
                               generator.indexer.keys(row)])
        generator.index_keys[layer] = keys
        lists = generator.indexer.choose(
            generator.indexer.logits(layer, q_nope, q_rope, keys))
        generator.lists[layer][self._start:] = lists
        return self.attend(layer, q_nope, q_rope, row, lists)


    def _by_service(self, layer: int, q_nope: Array, q_rope: Array, row: Array) -> Array:
        generator, indexer = self._generator, self._generator.indexer
        weights = np.broadcast_to(indexer.head_weights, (len(row), len(indexer.head_weights)))
        index = indexer.queries(layer, q_nope, q_rope), weights
        sent = np.concatenate([row, indexer.keys(row)], axis=-1)
        o = self.attend(layer, q_nope, q_rope, sent, index=index)
        generator.lists[layer][self._start:] = [list(entries[entries >= 0])
                                                for entries in self.chosen]
        return o


class SparseGenerator(Generator):
    """One sequence; remembers the index keys of its rows, and the lists that it sent."""

    def __init__(self, model: Model, service: mla_client.Service, sequence: mla_client.Sequence,
                 profile: mla_client.Profile, indexer: Indexer):
        super().__init__(model, service, sequence, profile)
        self.indexer = indexer
        layers = model.config.layers
        self.index_keys: List[Array] = [np.zeros((0, INDEX_DIM), np.float32)] * layers
        self.lists: List[Lists] = [[] for _ in range(layers)]  # by layer and position

    def attention_of(self, step: mla_client.Step) -> StepAttention:
        return SparseAttention(self, step)


@dataclasses.dataclass
class ListComparison:
    """Compares lists of a remote run with lists of the local indexer."""

    rows: int = 0
    near_ties: int = 0
    wrong: int = 0

    @property
    def ok(self) -> bool:
        return self.wrong == 0 and self.rows > 0 and self.near_ties <= MOST_NEAR_TIES * self.rows

    def __str__(self) -> str:
        return f"{self.rows} lists, {self.near_ties} near ties, {self.wrong} wrong"

    def add(self, positions: npt.NDArray[np.int64], logits: Array) -> None:
        """One list, and the local logits [keys] of its row."""
        self.rows += 1
        own = Indexer.choose(logits[None])[0]
        if set(own) == set(positions):
            return
        # Positions in only one of the lists, however good the worst chosen one is.
        threshold = logits[own[-1]]
        differing = [*(set(own) ^ set(positions))]
        gap = GAP * np.abs(logits[np.isfinite(logits)]).max()
        tie = len(positions) == len(own) and (np.abs(logits[differing] - threshold) <= gap).all()
        self.near_ties += bool(tie)
        self.wrong += not tie


def forced_attention(model: Model, indexer: Indexer, lists: List[Lists],
                     comparison: ListComparison) -> Attention:
    """Attention in float32 over whole texts, to the rows of these lists, keys and values expanded.
    `comparison` gets the local indexer's comparison of the lists."""
    c = model.config

    def attend(layer: int, q_nope: Array, q_rope: Array, row: Array) -> Array:
        weights = model.layers[layer]
        logits = indexer.logits(layer, q_nope, q_rope, indexer.keys(row))
        out = np.empty((len(row), c.heads, c.v), np.float32)
        for index, positions in enumerate(lists[layer][:len(row)]):
            comparison.add(positions, logits[index])
            if len(positions) == 0:
                out[index] = 0
                continue
            latent, k_rope = row[positions, :c.kv_lora], row[positions, c.kv_lora:]
            for head in range(c.heads):
                k_nope = latent @ weights.w_uk[head].T
                scores = np.float32(c.softmax_scale) * (k_nope @ q_nope[index, head]
                                                        + k_rope @ q_rope[index, head])
                scores = np.exp(scores - scores.max())
                out[index, head] = scores @ (latent @ weights.w_uv[head]) / scores.sum()
        return out

    return attend


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a run."""

    tokens: Comparison
    lists: ListComparison

    @property
    def ok(self) -> bool:
        return self.tokens.ok and self.lists.ok

    def __str__(self) -> str:
        return f"{self.tokens}; {self.lists}"


def check(generator: SparseGenerator, prompt: Sequence[int], tokens: List[int],
          remote: Array) -> Result:
    """Checks tokens generated after a prompt from the remote logits [len(tokens), vocab]."""
    model = generator.model
    text = np.array([*prompt, *tokens[:-1]], np.int64)
    lists = ListComparison()
    local = model.forward(text, np.arange(len(text)),
                          forced_attention(model, generator.indexer, generator.lists, lists))
    bound = NOISE_FACTOR * model.noise["bf16"]
    return Result(compare(tokens, remote, local[len(prompt) - 1:], bound), lists)
