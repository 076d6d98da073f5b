"""A language model of the DeepSeek-V3 architecture in numpy, small.

Everything but the attention over the cache happens here: embedding, RMSNorm, the low-rank query and
KV projections, YaRN-scaled rotary positions, SwiGLU, a routed mixture of experts, the output head.
Attention is a function that the caller passes in. So the same forward pass runs with attention
computed in this process and with attention computed by a server.

The weights come from a file (trained/) or from a seed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Callable, List, Mapping, Optional

import numpy as np
import numpy.typing as npt

from mla_client import bf16

Array = npt.NDArray[np.float32]
# (layer, q_nope [rows, heads, nope], q_rope [rows, heads, rope], kv row [rows, lora + rope])
# -> [rows, heads, v]. Queries and keys are rotated already.
Attention = Callable[[int, Array, Array, Array], Array]
# The same with the projections around it: (layer, normed queries [rows, q_lora], kv row) -> hidden
# states [rows, hidden].
Projected = Callable[[int, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Config:
    """Dimensions. The dimensions of a head are DeepSeek-V3's; the rest is small. The defaults are
    for the seeded model."""

    vocab: int = 256  # a token is a byte
    hidden: int = 512
    layers: int = 4
    dense_layers: int = 1  # the first ones have a plain feed-forward block
    heads: int = 16
    q_lora: int = 192
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    v: int = 128
    dense_width: int = 1024
    expert_width: int = 256
    experts: int = 8
    experts_per_token: int = 2
    rope_base: float = 10000.0
    rope_factor: float = 40.0  # YaRN: how far the context is stretched
    rope_original_rows: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_mscale: float = 1.0

    @property
    def softmax_scale(self) -> float:
        """(nope + rope)^-1/2 times the square of YaRN's factor: 0.135234 for these figures."""
        m = 0.1 * self.rope_mscale * math.log(self.rope_factor) + 1.0
        return (self.nope + self.rope) ** -0.5 * m * m


def yarn_frequencies(config: Config) -> npt.NDArray[np.float64]:
    """Angle per position of each pair of rotary dimensions.

    Fast pairs keep their frequency, slow pairs are stretched by the factor, and those between are
    blended along a ramp.
    """
    half = config.rope // 2
    plain = config.rope_base ** (-np.arange(half) / half)

    def pair_of(turns: float) -> float:
        """The pair that makes this many turns over the original context."""
        return (config.rope * math.log(config.rope_original_rows / (turns * 2 * math.pi))
                / (2 * math.log(config.rope_base)))

    low = max(math.floor(pair_of(config.rope_beta_fast)), 0)
    high = min(math.ceil(pair_of(config.rope_beta_slow)), config.rope - 1)
    stretched = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0.0, 1.0)
    return plain * (1.0 - stretched) + plain / config.rope_factor * stretched


def rotate(x: Array, positions: npt.NDArray[np.int64],
           frequencies: npt.NDArray[np.float64]) -> Array:
    """Rotary positions on adjacent pairs of the last axis; x [rows, ..., rope]."""
    angles = (positions[:, None] * frequencies).reshape(len(x), *[1] * (x.ndim - 2), -1)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def rotations(config: Config, positions: npt.NDArray[np.int64]) -> Array:
    """What `rotate` multiplies by, [rows, rope]: cosines of the pairs, then their sines."""
    angles = positions[:, None] * yarn_frequencies(config)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rms_norm(x: Array) -> Array:
    """Scales each row to a mean square of one."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


@dataclasses.dataclass
class FeedForward:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    gate: Array
    up: Array
    down: Array

    def __call__(self, x: Array) -> Array:
        gate = x @ self.gate
        return (gate * sigmoid(gate) * (x @ self.up)) @ self.down


@dataclasses.dataclass
class MixtureOfExperts:
    """One shared expert and the best few of the routed ones, weighted by normalised sigmoids."""

    router: Array  # [hidden, experts]
    shared: FeedForward
    routed: List[FeedForward]
    chosen: int

    def __call__(self, x: Array) -> Array:
        scores = sigmoid(x @ self.router)
        best = np.argsort(-scores, axis=-1, kind="stable")[:, :self.chosen]
        weights = np.take_along_axis(scores, best, axis=-1)
        weights /= weights.sum(axis=-1, keepdims=True)
        out = self.shared(x)
        for index, expert in enumerate(self.routed):
            rows, place = np.nonzero(best == index)
            if len(rows):
                out[rows] += weights[rows, place, None] * expert(x[rows])
        return out


@dataclasses.dataclass
class Layer:
    """Weights of one layer."""

    q_down: Array   # [hidden, q_lora]
    q_up: Array     # [q_lora, heads * (nope + rope)]
    kv_down: Array  # [hidden, kv_lora + rope]
    w_uk: Array     # [heads, nope, kv_lora]
    w_uv: Array     # [heads, kv_lora, v]
    out: Array      # [heads * v, hidden]
    feed_forward: Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """The model. Immutable, so threads may share it."""

    config: Config
    embedding: Array  # [vocab, hidden]
    layers: List[Layer]
    head: Array       # [hidden, vocab]
    # Logit difference that rounding on the wire and in the cache was seen to make, by the format of
    # the cache's rows.
    noise: Mapping[str, float]

    def forward(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64],
                attention: Optional[Attention], projected: Optional[Projected] = None) -> Array:
        """Logits [rows, vocab] of tokens at the given positions of their sequences, by one of the
        two functions."""
        c = self.config
        frequencies = yarn_frequencies(c)
        x = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            h = rms_norm(x)
            q_lora = rms_norm(h @ layer.q_down)
            kv = h @ layer.kv_down
            k_rope = rotate(kv[:, c.kv_lora:], positions, frequencies)
            row = np.concatenate([rms_norm(kv[:, :c.kv_lora]), k_rope], axis=-1)
            if projected is not None:
                x = x + projected(index, q_lora, row)
            else:
                assert attention is not None
                q = (q_lora @ layer.q_up).reshape(len(x), c.heads, -1)
                q_rope = rotate(np.ascontiguousarray(q[..., c.nope:]), positions, frequencies)
                o = attention(index, q[..., :c.nope], q_rope, row)
                x = x + o.reshape(len(x), -1) @ layer.out
            x = x + layer.feed_forward(rms_norm(x))
        return rms_norm(x) @ self.head


class _Seeded:
    """Draws the weights of a seeded model, in a fixed order."""

    def __init__(self, config: Config, seed: int):
        self._config = config
        self._rng = np.random.default_rng(seed)

    def weights(self, std: float, *shape: int) -> Array:
        return bf16.round_to_bf16(self._rng.standard_normal(shape, np.float32) * np.float32(std))

    def _feed_forward(self, width: int, gain: float) -> FeedForward:
        hidden = self._config.hidden
        return FeedForward(self.weights(hidden ** -0.5, hidden, width),
                           self.weights(hidden ** -0.5, hidden, width),
                           self.weights(gain * width ** -0.5, width, hidden))

    def layer(self, index: int) -> Layer:
        c = self._config
        if index < c.dense_layers:
            block: Callable[[Array], Array] = self._feed_forward(c.dense_width, 1.0)
        else:
            # Routed experts are kept small: rounding in the cache can tip a close choice between
            # two of them, and the jump would hide the compared differences.
            block = MixtureOfExperts(
                self.weights(2.0 * c.hidden ** -0.5, c.hidden, c.experts),
                self._feed_forward(c.expert_width, 1.0),
                [self._feed_forward(c.expert_width, 0.1) for _ in range(c.experts)],
                c.experts_per_token)
        return Layer(
            q_down=self.weights(c.hidden ** -0.5, c.hidden, c.q_lora),
            # Scores get a deviation of about 1.2 * 1.2 * 1.87, so softmax is peaked.
            q_up=self.weights(1.2 * c.q_lora ** -0.5, c.q_lora, c.heads * (c.nope + c.rope)),
            kv_down=self.weights(1.2 * c.hidden ** -0.5, c.hidden, c.kv_lora + c.rope),
            w_uk=self.weights(1.2 * c.kv_lora ** -0.5, c.heads, c.nope, c.kv_lora),
            w_uv=self.weights(c.kv_lora ** -0.5, c.heads, c.kv_lora, c.v),
            out=self.weights(2.0 * (c.heads * c.v) ** -0.5, c.heads * c.v, c.hidden),
            feed_forward=block)


# Over several seeds and both profiles; logits have a deviation of 1. The best two bytes of random
# weights are too close for the rounding of 8 bits.
NOISE = {"bf16": 0.03}


def seeded(config: Config = Config(), seed: int = 1) -> Model:
    """A model with random weights.

    They are representable in bfloat16, like the weights of released checkpoints. The scales are
    chosen so that attention is peaked (a few keys matter) and carries much of the residual stream:
    a model whose attention did not matter would prove nothing about a server.
    """
    draw = _Seeded(config, seed)
    embedding = draw.weights(1.0, config.vocab, config.hidden)
    layers = [draw.layer(index) for index in range(config.layers)]
    head = draw.weights(config.hidden ** -0.5, config.hidden, config.vocab)
    return Model(config, embedding, layers, head, NOISE)
