"""Rows that follow from tokens, and attention over them in float64.

A KV row depends on the sequence's tokens up to its own position, on the layer and on nothing else.
So every worker knows each row of every sequence and needs no server for that.
"""

import dataclasses

import numpy as np

import mla_client

LAYERS = 4
HEADS = 4
PAGE_ROWS = 16
TOP_K = 48
GEOMETRY = mla_client.Geometry(HEADS, kv_lora_rank=512, rope_dim=64, nope_dim=32, v_dim=32)
SOFTMAX_SCALE = 0.09
# Largest difference between an output in float32 of the CPU backend, which multiplies in bf16, and
# the oracle's. Outputs are averages of values below 1.
OUTPUT_BOUND = 0.03

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model of the soak."""

    name: str
    sparse: bool = False

    def spec(self) -> mla_client.ModelSpec:
        """The model as every worker registers it."""
        return mla_client.ModelSpec(self.name, GEOMETRY, LAYERS, SOFTMAX_SCALE, page_size=PAGE_ROWS,
                                    attention="sparse_v32" if self.sparse else "dense",
                                    top_k=TOP_K if self.sparse else 0)


KINDS = (Kind("dense"), Kind("sparse", sparse=True))


def mixed(values):
    """A hash of each of the uint64 values (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        values = values + _GOLDEN
        values = (values ^ (values >> np.uint64(30))) * _MIX_1
        values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def chained(seed, tokens):
    """[len(tokens)] uint64: a hash of the tokens up to each position."""
    hashes = np.empty(len(tokens), np.uint64)
    state = np.uint64(seed)
    for index, token in enumerate(tokens):
        state = mixed(np.array([state ^ np.uint64(token)], np.uint64))[0]
        hashes[index] = state
    return hashes


def row_bits(hashes, layer):
    """[len(hashes), row dim] uint16: bf16 patterns of KV rows, in (-1, 1), none of them zero."""
    columns = np.arange(GEOMETRY.row_dim, dtype=np.uint64) + np.uint64(layer << 32)
    words = mixed(hashes[:, None] ^ mixed(columns)[None, :])
    signs = (words & np.uint64(1)) << np.uint64(15)
    exponents = (np.uint64(122) + ((words >> np.uint64(8)) % np.uint64(5))) << np.uint64(7)
    return (signs | exponents | ((words >> np.uint64(16)) & np.uint64(0x7F))).astype(np.uint16)


class Text:
    """The tokens of one sequence, and the rows that they stand for."""

    def __init__(self, kind, tokens=()):
        self.kind = kind
        self.tokens = list(tokens)
        self._seed = 1 + KINDS.index(kind)
        self._hashes = chained(self._seed, self.tokens)

    def __len__(self):
        return len(self.tokens)

    def first(self, length):
        """The text of the first rows."""
        text = Text(self.kind)
        text.tokens, text._hashes = self.tokens[:length], self._hashes[:length]
        return text

    def extended(self, tokens):
        """The text with more tokens."""
        text = self.first(len(self))
        state = self._hashes[-1] if len(self) else self._seed
        text.tokens = self.tokens + list(tokens)
        text._hashes = np.concatenate([self._hashes, chained(state, tokens)])
        return text

    def bits(self, layer, begin, end):
        """[end - begin, row dim] uint16."""
        return row_bits(self._hashes[begin:end], layer)


@dataclasses.dataclass
class Call:
    """One attend of rows [begin, end) of a text, and what it must return."""

    q: np.ndarray                      # [rows, heads, q dim], bf16 patterns
    lists: object                      # [rows] arrays of positions, or None
    profile: mla_client.Profile


def attended(text, layer, begin, end, call, weights):
    """(o [rows, heads, o dim], lse [rows, heads]) in float64. `weights`: (W_UK, W_UV) by layer."""
    rows = mla_client.from_bf16(text.bits(layer, 0, end)).astype(np.float64)
    q = mla_client.from_bf16(call.q).astype(np.float64)
    w_uk, w_uv = weights[layer]
    if call.profile == mla_client.Profile.EXPANDED:
        nope = np.einsum("rhn,hnl->rhl", q[..., :GEOMETRY.nope_dim], w_uk)
        q = np.concatenate([nope, q[..., GEOMETRY.nope_dim:]], axis=-1)
    scores = np.einsum("rhd,kd->rhk", q, rows) * SOFTMAX_SCALE
    visible = np.arange(end)[None, :] <= np.arange(begin, end)[:, None]
    if call.lists is not None:
        chosen = np.zeros_like(visible)
        for row, positions in enumerate(call.lists):
            chosen[row, positions] = True
        visible = visible & chosen
    scores = np.where(visible[:, None, :], scores, -np.inf)
    peaks = scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(scores - peaks)
    sums = exponentials.sum(axis=-1, keepdims=True)
    o = np.einsum("rhk,kl->rhl", exponentials / sums, rows[:, :GEOMETRY.kv_lora_rank])
    if call.profile == mla_client.Profile.EXPANDED:
        o = np.einsum("rhl,hlv->rhv", o, w_uv)
    return o, (peaks + np.log(sums))[..., 0]


def model_weights(kind):
    """[(W_UK, W_UV)] by layer, float64 values that bf16 holds exactly; equal in all workers."""
    random = np.random.default_rng(17 + KINDS.index(kind))

    def matrix(*shape):
        return mla_client.round_to_bf16(random.normal(0, 0.05, shape).astype(np.float32))
    return [(matrix(HEADS, GEOMETRY.nope_dim, GEOMETRY.kv_lora_rank).astype(np.float64),
             matrix(HEADS, GEOMETRY.kv_lora_rank, GEOMETRY.v_dim).astype(np.float64))
            for _ in range(LAYERS)]
