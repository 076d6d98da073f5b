"""The honest comparison: results with a server's attention against the same model computed locally.

Teacher-forced: the local float32 model is fed the tokens that the remote one chose, so that one
difference cannot excuse the next. At each position the remote token must be the local best one, or
the two best local logits must be closer than twice the largest logit difference seen (E): rounding
alone then explains the choice. E itself must stay below a fixed bound.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from attention import local_attention, shifted, zeroed
from model import Array, Model

# E must stay below this many times the noise that was measured with the model.
NOISE_FACTOR = 4
MAX_NEAR_TIES = 8


def bounds(noise: Mapping[str, float]) -> Dict[str, float]:
    """By format of KV rows, what E must stay below, of a model with this noise."""
    return {kv_format: NOISE_FACTOR * seen for kv_format, seen in noise.items()}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Remote against local over some positions."""

    positions: int
    agree: int      # local best, or a near tie
    near_ties: int  # not the local best, but closer than 2 E
    error: float    # E
    bound: float    # bound of E

    @property
    def ok(self) -> bool:
        return (self.agree == self.positions > 0 and self.near_ties <= MAX_NEAR_TIES
                and self.error < self.bound)

    def __str__(self) -> str:
        return (f"{self.agree}/{self.positions} agree, {self.near_ties} near ties, "
                f"E {self.error:.4f} (bound {self.bound:.2f})")


def compare(tokens: Sequence[int], remote: Array, local: Array, bound: float) -> Comparison:
    """Compares the tokens chosen from remote logits [n, vocab] with the local logits; `bound` is
    the bound of E."""
    if (remote.shape != local.shape or len(tokens) != len(local) or not len(tokens)
            or not np.isfinite(remote).all()):
        return Comparison(len(tokens), 0, 0, float("inf"), bound)
    error = float(np.abs(remote - local).max())
    best = np.sort(local, axis=-1)
    margin = best[:, -1] - best[:, -2]
    same = local.argmax(axis=-1) == np.asarray(tokens)
    tie = ~same & (margin < 2 * error)
    return Comparison(len(tokens), int(same.sum() + tie.sum()), int(tie.sum()), error,
                      bound)


@dataclasses.dataclass(frozen=True)
class _Prefix:
    """A text that was run already: its KV rows by layer, and the logits after its last token."""

    text: npt.NDArray[np.int64]
    rows: List[Array]
    last: Array


class LocalModel:
    """The model run locally over whole texts; beginnings that were run before are not run again."""

    def __init__(self, model: Model, kv_format: str = "bf16"):
        """`kv_format`: the format of the cache that the remote logits come from."""
        self._model = model
        self.bound = bounds(model.noise)[kv_format]  # bound of E
        self._prefixes: List[_Prefix] = []

    def logits(self, text: npt.NDArray[np.int64], first: int) -> Array:
        """Logits at positions first, first + 1, ... of the text."""
        prefix = next((prefix for prefix in self._prefixes if len(prefix.text) <= first + 1
                       and np.array_equal(prefix.text, text[:len(prefix.text)])), None)
        if prefix is None:
            prefix = self._run(text[:first + 1])
        known = len(prefix.text)
        if known == len(text):
            return prefix.last[None]
        rest = self._model.forward(text[known:], np.arange(known, len(text)),
                                   local_attention(self._model, past=prefix.rows))
        return np.concatenate([prefix.last[None], rest])[first + 1 - known:]

    def _run(self, text: npt.NDArray[np.int64]) -> _Prefix:
        rows: List[Array] = []
        logits = self._model.forward(text, np.arange(len(text)),
                                     local_attention(self._model, kept=rows))
        self._prefixes.append(_Prefix(text, rows, logits[-1]))
        return self._prefixes[-1]

    def check(self, prompt: Sequence[int], tokens: List[int], remote: Array) -> Comparison:
        """Checks tokens generated after a prompt from the remote logits [len(tokens), vocab]."""
        text = np.array([*prompt, *tokens[:-1]], np.int64)
        return compare(tokens, remote, self.logits(text, len(prompt) - 1), self.bound)

    def controls(self, prompt: Sequence[int], tokens: List[int]) -> "Controls":
        """How many of the local choices change when attention is broken on purpose."""
        text = np.array([*prompt, *tokens[:-1]], np.int64)
        right = self.logits(text, len(prompt) - 1).argmax(axis=-1)
        changed = []
        for broken in (zeroed(self._model), shifted(self._model)):
            wrong = self._model.forward(text, np.arange(len(text)), broken)[len(prompt) - 1:]
            changed.append(int((wrong.argmax(axis=-1) != right).sum()))
        return Controls(len(tokens), *changed)


@dataclasses.dataclass(frozen=True)
class Controls:
    """Tokens changed by each negative control."""

    tokens: int
    zeroed: int
    shifted: int

    @property
    def required(self) -> int:
        """Half of the tokens."""
        return self.tokens // 2

    @property
    def ok(self) -> bool:
        return min(self.zeroed, self.shifted) >= self.required
