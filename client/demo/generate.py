"""Prefill and greedy generation with attention through a service."""

from __future__ import annotations

import dataclasses
import time
from typing import Callable, List, Optional, Sequence, Tuple

import mla_client
import numpy as np
from attention import StepAttention
from model import Array, Model

PREFILL_ROWS = 512  # rows of one prefill step
# A step lives this long without a message. Between two layers this model computes in numpy, which a
# busy machine can stretch beyond the server's default of two seconds.
STEP_LEASE_MS = 30_000
# Longer for sequences too: the thread that renews leases shares the interpreter with the model.
SEQUENCE_LEASE_MS = 60_000


@dataclasses.dataclass
class Phase:
    """Time and requests of one phase of a run."""

    rows: int = 0
    seconds: float = 0.0
    timings: List[mla_client.Timings] = dataclasses.field(default_factory=list)

    def mean(self, name: str) -> float:
        """Mean of one of the timings over the requests."""
        return float(np.mean([getattr(timing, name) for timing in self.timings] or [0]))


class Generator:
    """One sequence of a model whose attention a service computes."""

    def __init__(self, model: Model, service: mla_client.Service, sequence: mla_client.Sequence,
                 profile: mla_client.Profile):
        self.model = model
        self.service = service
        self.sequence = sequence
        self.profile = profile
        self.prefill_phase = Phase()
        self.decode_phase = Phase()

    def attention_of(self, step: mla_client.Step) -> StepAttention:
        """The attention of a step that has begun."""
        return StepAttention(self.model, step, self.profile)

    def finish(self, step: mla_client.Step, start: int, keep: Optional[int]) -> None:
        """Ends a step of rows from position `start` on, of which the first `keep` stay."""
        del start
        if keep is not None:
            step.end([keep])

    def feed(self, tokens: Sequence[int], phase: Optional[Phase] = None,
             keep: Optional[int] = None) -> Array:
        """Adds tokens in one step, of which the first `keep` are committed; returns all logits."""
        begin = time.monotonic()
        start = self.sequence.length
        with self.service.step([(self.sequence, len(tokens))],
                               lease_ms=STEP_LEASE_MS) as step:
            attention = self.attention_of(step)
            logits = self.model.forward(np.asarray(tokens, np.int64),
                                        np.arange(start, start + len(tokens)), attention)
            self.finish(step, start, keep)
        if phase is not None:
            phase.rows += len(tokens)
            phase.seconds += time.monotonic() - begin
            phase.timings += attention.timings
        return logits

    def prefill(self, prompt: Sequence[int], progress: Callable[[int], None] = lambda rows: None,
                rows_a_step: int = PREFILL_ROWS) -> Array:
        """Feeds a prompt in steps; returns the logits of its last row."""
        for begin in range(0, len(prompt), rows_a_step):
            logits = self.feed(prompt[begin:begin + rows_a_step], self.prefill_phase)
            progress(min(begin + rows_a_step, len(prompt)))
        return logits[-1]

    def generate(self, logits: Array, count: int,
                 progress: Callable[[int], None] = lambda tokens: None) -> Tuple[List[int], Array]:
        """Chooses `count` tokens greedily, the first from `logits`; returns them and the logits
        [count, vocab] that each was chosen from. The last token is chosen but not fed."""
        tokens, chosen_from = [], []
        for index in range(count):
            chosen_from.append(logits)
            tokens.append(int(logits.argmax()))
            progress(index + 1)
            if index + 1 < count:
                logits = self.feed(tokens[-1:], self.decode_phase)[-1]
        return tokens, np.array(chosen_from)


def feed_together(generators: Sequence[Generator], tokens: Sequence[int]) -> Array:
    """One token of each of several sequences in one step; logits [sequences, vocab]."""
    first = generators[0]
    positions = np.array([generator.sequence.length for generator in generators])
    with first.service.step([(generator.sequence, 1) for generator in generators],
                            lease_ms=STEP_LEASE_MS) as step:
        attention = StepAttention(first.model, step, first.profile)
        return first.model.forward(np.asarray(tokens, np.int64), positions, attention)
