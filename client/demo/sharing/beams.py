"""A scene of the demo: beam search over one prompt."""

from __future__ import annotations

import dataclasses
from typing import Callable, List, Tuple

import numpy as np
from checks import MAX_NEAR_TIES, LocalModel
from generate import Generator, feed_together
from model import Array
from scenes import Run, Say

BEAMS = 8
BEAM_STEPS = 8


@dataclasses.dataclass
class _Beam:
    """One hypothesis: its tokens, and its log probability in the local model."""

    generator: Generator
    tokens: List[int]
    score: float  # of all tokens, by the local model
    remote: float  # the same by the service's logits


def _log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def search(run: Run, local: LocalModel, copied: Callable[[], int], say: Say) -> bool:
    """Beam search over one prompt, a fork a beam and step. The beams that are kept must be the
    local model's beams, or differ from them by no more than rounding. `copied`: returns the number
    of page groups that the service has copied."""
    parent = run.generator
    root = parent.sequence.fork(len(run.prompt))
    alive = [_Beam(Generator(parent.model, parent.service, root, parent.profile), [], 0.0, 0.0)]
    logits = run.logits[:1]  # logits for the first token
    before = copied()
    error, ties, choices = 0.0, 0, 0
    for step in range(BEAM_STEPS):
        seen = [local.logits(np.array([*run.prompt, *beam.tokens], np.int64),
                             len(run.prompt) - 1 + len(beam.tokens))[-1] for beam in alive]
        error = max(error, max(float(np.abs(ours - right).max())
                               for ours, right in zip(logits, seen)))
        kept = _best([beam.remote + _log_softmax(row) for beam, row in zip(alive, logits)])
        scores = [beam.score + _log_softmax(row) for beam, row in zip(alive, seen)]
        # Two sums of log probabilities, each off by at most 2 E a token, may change places.
        least = min(scores[beam][token] for beam, token in _best(scores))
        worse = [choice for choice in kept if scores[choice[0]][choice[1]] < least]
        choices += len(kept)
        ties += len(worse)
        if any(scores[beam][token] < least - 4 * error * (step + 1) for beam, token in worse):
            say(f"beams: step {step} keeps beams that the local model drops, E {error:.4f}")
            _release(alive)
            return False
        following = [_fork(alive[beam], token, scores[beam][token],
                           alive[beam].remote + _log_softmax(logits[beam])[token])
                     for beam, token in kept]
        _release(alive)
        alive = following
        logits = feed_together([beam.generator for beam in alive],
                               [beam.tokens[-1] for beam in alive])
    length = alive[0].generator.sequence.length
    _release(alive)
    say(f"beams: {BEAMS} beams over {length} rows, {choices} choices, {ties} near ties, "
        f"E {error:.4f} (bound {local.bound:.2f}); page groups copied "
        f"{copied() - before}")
    return error < local.bound and ties <= MAX_NEAR_TIES


def _best(scores: List[Array]) -> List[Tuple[int, int]]:
    """(beam, token) of the best continuations, the best first."""
    table = np.array(scores)
    order = np.argsort(-table, axis=None, kind="stable")[:BEAMS]
    return [(int(at // table.shape[1]), int(at % table.shape[1])) for at in order]


def _fork(beam: _Beam, token: int, score: float, remote: float) -> _Beam:
    of = beam.generator
    child = Generator(of.model, of.service, of.sequence.fork(), of.profile)
    return _Beam(child, [*beam.tokens, token], float(score), float(remote))


def _release(alive: List[_Beam]) -> None:
    for beam in alive:
        beam.generator.sequence.release()
