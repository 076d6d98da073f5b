"""Attention as DeepSeek V4 has it: a window, compressed entries and sinks, by a service.

Each row attends, in one softmax, to the last WINDOW rows, to compressed entries and to a sink.
Layers differ: one kind is without entries; one has an entry for 4 rows, of which an indexer of the
worker chooses TOP_K; one has an entry for 8 rows, and uses all of them. The worker makes entries:
means over their rows. Rows that no complete entry stands for yet are its tail, which it leaves with
each step. Now and then it forgets all rows and continues from the tail that the server has. Rows
and entries are keys and values alike, so an output has a rotated part. The worker rotates it back
by its own position before it continues.

The comparison is as in the V3.2 demo: the local float32 model is fed the tokens that the remote one
chose, and attends to the entries in the remote lists. These lists are compared with lists of the
local indexer.
"""

from __future__ import annotations

from typing import List, Optional, Sequence

import mla_client
import numpy as np
from attention import StepAttention, per_head
from checks import NOISE_FACTOR, compare
from generate import Generator, Phase
from model import Array, Attention, Model, rotate, yarn_frequencies
from v32.sparse import Indexer, ListComparison, Lists, Result

WINDOW = 8
TOP_K = 16
RATIOS = (0, 4, 8)  # ratio of a layer: by its index modulo 3
LISTED = 4          # layers of this ratio attend to lists

PAGE = 16  # positions
RESTARTS = 7  # at lengths that this divides, the worker has lost its rows


class Worker:
    """The worker's part of attention. Immutable, so threads may share it."""

    def __init__(self, model: Model, seed: int = 5):
        c = model.config
        rng = np.random.default_rng(seed)
        self.model = model
        self.indexer = Indexer(model)
        self.ratios = tuple(RATIOS[layer % len(RATIOS)] for layer in range(c.layers))
        self.sinks = rng.uniform(-1, 2, (c.layers, c.heads)).astype(np.float32)
        self._frequencies = yarn_frequencies(c)
        # Applied to an output's rotated part.
        self._mix = (0.1 * rng.standard_normal((c.rope, c.v))).astype(np.float32)

    def spec(self, name: str, kv_format: str) -> mla_client.ModelSpec:
        """The model as a service must know it."""
        c = self.model.config
        return mla_client.ModelSpec(
            name, mla_client.Geometry(c.heads, c.kv_lora, c.rope), c.layers, c.softmax_scale, PAGE,
            kv_format=kv_format, attention="sparse_v4", top_k=TOP_K, window=WINDOW,
            ratios=self.ratios, tail_bytes=4 * max(RATIOS) * c.layers * (c.kv_lora + c.rope))

    def entries(self, layer: int, rows: Array, first: int, last: int) -> Array:
        """Entries that rows [first, last) of a sequence complete; `rows` has all its rows."""
        ratio = self.ratios[layer]
        whole = range(first // ratio, last // ratio) if ratio else range(0)
        means = [rows[index * ratio:(index + 1) * ratio].mean(axis=0) for index in whole]
        return np.array(means, np.float32).reshape(-1, rows.shape[1])

    def tail(self, rows: Sequence[Array], length: int) -> bytes:
        """The tail of a sequence's first `length` rows: by layer, the rows that no complete entry
        stands for. Each layer has room for max(RATIOS) rows."""
        kept = np.zeros((len(rows), max(RATIOS), rows[0].shape[1]), np.float32)
        for layer, of_layer in enumerate(rows):
            ratio = self.ratios[layer] or 1
            own = of_layer[length // ratio * ratio:length]
            kept[layer, :len(own)] = own
        return kept.tobytes()

    def rows_of_tail(self, tail: bytes, length: int) -> List[Array]:
        """The first `length` rows by layer, as far as a tail has them; the others are NaN."""
        c = self.model.config
        kept = np.frombuffer(tail, np.float32).reshape(c.layers, max(RATIOS), -1)
        rows = []
        for layer, own in enumerate(kept):
            count = length % (self.ratios[layer] or 1)
            lost = np.full((length - count, own.shape[1]), np.nan, np.float32)
            rows.append(np.concatenate([lost, own[:count]]))
        return rows

    def query(self, layer: int, q_nope: Array, q_rope: Array) -> Array:
        """[rows, heads, lora + rope]."""
        absorbed = per_head(q_nope, self.model.layers[layer].w_uk)
        return np.concatenate([absorbed, q_rope], axis=-1)

    def finish(self, layer: int, o: Array, first: int) -> Array:
        """Outputs [rows, heads, lora + rope] of the rows from position `first` on: values that the
        model continues with."""
        lora = self.model.config.kv_lora
        back = -np.arange(first, first + len(o))
        rotated = rotate(np.ascontiguousarray(o[..., lora:]), back, self._frequencies)
        return per_head(o[..., :lora], self.model.layers[layer].w_uv) + rotated @ self._mix

    def logits(self, layer: int, q_nope: Array, q_rope: Array, entries: Array,
               first: int) -> Array:
        """The indexer's [rows, entries], of rows from position `first` on; -inf of entries that are
        not whole for a row."""
        keys = self.indexer.keys(entries)
        products = np.maximum(self.indexer.queries(layer, q_nope, q_rope) @ keys.T, 0)
        logits = np.einsum("rhk,h->rk", products, self.indexer.head_weights)
        whole = np.arange(first + 1, first + len(q_nope) + 1) // self.ratios[layer]
        logits[np.arange(len(entries)) >= whole[:, None]] = -np.inf
        return logits

    def attend(self, layer: int, q: Array, rows: Array, entries: Array, sink: bool = True) -> Array:
        """One row's attention q [heads, lora + rope] in float32, to rows and entries."""
        keys = np.concatenate([rows, entries])
        scores = np.float32(self.model.config.softmax_scale) * (q @ keys.T)
        peak = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - peak)
        rest = np.exp(self.sinks[layer][:, None] - peak) if sink else 0
        return (weights / (weights.sum(axis=-1, keepdims=True) + rest)) @ keys


class WindowAttention(StepAttention):
    """Attention of one step."""

    def __init__(self, generator: "WindowGenerator", step: mla_client.Step):
        super().__init__(generator.model, step, generator.profile)
        self._generator = generator
        self._start = generator.sequence.length

    def __call__(self, layer: int, q_nope: Array, q_rope: Array, row: Array) -> Array:
        generator, worker, start = self._generator, self._generator.worker, self._start
        rows = np.concatenate([generator.rows[layer][:start], row])
        generator.rows[layer] = rows
        made = worker.entries(layer, rows, start, len(rows))
        ratio = worker.ratios[layer]
        entries = np.concatenate([generator.entries[layer][:start // ratio if ratio else 0], made])
        generator.entries[layer] = entries
        lists = None
        if ratio == LISTED:
            lists = Indexer.choose(worker.logits(layer, q_nope, q_rope, entries, start))
            generator.lists[layer][start:] = lists
        result = self._step.attend_window(layer, worker.query(layer, q_nope, q_rope), row, made,
                                          lists)
        self.timings += result.timings
        assert result.o is not None
        return worker.finish(layer, result.o, start)


class WindowGenerator(Generator):
    """One sequence; remembers its rows, from which entries are made, the entries, for the indexer,
    and the lists that it sent."""

    def __init__(self, worker: Worker, service: mla_client.Service, sequence: mla_client.Sequence):
        super().__init__(worker.model, service, sequence, mla_client.Profile.ABSORBED)
        c = worker.model.config
        self.worker = worker
        self.rows: List[Array] = [np.zeros((0, c.kv_lora + c.rope), np.float32)] * c.layers
        self.entries = list(self.rows)
        self.lists: List[Lists] = [[] for _ in range(c.layers)]  # by layer and position
        self.restarts = 0

    def attention_of(self, step: mla_client.Step) -> StepAttention:
        return WindowAttention(self, step)

    def finish(self, step: mla_client.Step, start: int, keep: Optional[int]) -> None:
        count = step.total_rows if keep is None else keep
        step.end([count], tails={0: self.worker.tail(self.rows, start + count)})

    def feed(self, tokens: Sequence[int], phase: Optional[Phase] = None,
             keep: Optional[int] = None) -> Array:
        if self.sequence.length and self.sequence.length % RESTARTS == 0:
            position, tail = self.sequence.read_tail()
            self.rows = self.worker.rows_of_tail(tail, position)
            self.restarts += 1
        return super().feed(tokens, phase, keep)


def forced_attention(worker: Worker, lists: List[Lists], comparison: ListComparison) -> Attention:
    """Attention in float32 over whole texts, to the entries of these lists. `comparison` gets the
    local indexer's comparison of the lists."""

    def attend(layer: int, q_nope: Array, q_rope: Array, row: Array) -> Array:
        q = worker.query(layer, q_nope, q_rope)
        entries = worker.entries(layer, row, 0, len(row))
        ratio = worker.ratios[layer]
        logits = worker.logits(layer, q_nope, q_rope, entries, 0) if ratio == LISTED else None
        o = np.empty((*q.shape[:2], row.shape[1]), np.float32)
        for index in range(len(row)):
            chosen = np.arange((index + 1) // ratio if ratio else 0)
            if logits is not None:
                chosen = np.asarray(lists[layer][index], np.int64)
                if index + 1 >= ratio:
                    comparison.add(chosen, logits[index])
            window = row[max(0, index + 1 - WINDOW):index + 1]
            o[index] = worker.attend(layer, q[index], window, entries[chosen])
        return worker.finish(layer, o, 0)

    return attend


def check(generator: WindowGenerator, prompt: Sequence[int], tokens: List[int],
          remote: Array) -> Result:
    """Checks tokens generated after a prompt from the remote logits [len(tokens), vocab]."""
    model = generator.model
    text = np.array([*prompt, *tokens[:-1]], np.int64)
    lists = ListComparison()
    local = model.forward(text, np.arange(len(text)),
                          forced_attention(generator.worker, generator.lists, lists))
    bound = NOISE_FACTOR * model.noise["bf16"]
    return Result(compare(tokens, remote, local[len(prompt) - 1:], bound), lists)
