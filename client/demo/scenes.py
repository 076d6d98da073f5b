"""The scenes of the demo: each runs against a service and says whether it went well."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Callable, Iterator, List, Sequence, Tuple

import mla_client
import numpy as np
from checks import Comparison, LocalModel
from generate import SEQUENCE_LEASE_MS, Generator, feed_together
from mla_client.gen import admin_pb2
from mla_client.testing import ServerProcess
from model import Array, Model

Say = Callable[[str], None]
BRANCH_TOKENS = 16
DRAFT_ROWS = 4
DRAFT_KEPT = 2


@dataclasses.dataclass
class Run:
    """A prompt, and the tokens generated after it."""

    generator: Generator
    prompt: List[int]
    tokens: List[int]
    logits: Array  # [tokens, vocab] that each token was chosen from


@contextlib.contextmanager
def served(server: str, server_args: List[str], transport: str
           ) -> Iterator[Tuple[mla_client.Client, admin_pb2.GetServerInfoReply, Say]]:
    """A client of a server that runs in this context, the server's facts, and a function that
    prints lines with the time since the start."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)

    with ServerProcess(server, server_args) as process, mla_client.Client.connect(
            process.target, transport=transport, lease_ms=SEQUENCE_LEASE_MS) as client:
        info = client.server_info()
        say(f"server {info.server_version}, backend {info.backend.name}, transport "
            f"{client.transport}")
        yield client, info, say


def generate(model: Model, service: mla_client.Service, registered: mla_client.Model,
             profile: mla_client.Profile, prompt: List[int], count: int, say: Say) -> Run:
    """Prefill and greedy generation; the sequence stays open."""
    name = profile.name.lower()
    generator = Generator(model, service, registered.open_sequence(), profile)
    logits = generator.prefill(
        prompt, lambda rows: say(f"{name}: prefill {rows}/{len(prompt)} rows"))
    tokens, chosen_from = generator.generate(
        logits, count, lambda done: done % 16 or say(f"{name}: generated {done}/{count} tokens"))
    return Run(generator, prompt, tokens, chosen_from)


def fork(run: Run, local: LocalModel, say: Say) -> bool:
    """Two children of the prompt continue differently, in common steps; the parent is untouched."""
    parent = run.generator
    parent_length = parent.sequence.length
    second_best = int(np.argsort(run.logits[0])[-2])
    with parent.sequence.fork(len(run.prompt)) as left, \
            parent.sequence.fork(len(run.prompt)) as right:
        branches = [Generator(parent.model, parent.service, sequence, parent.profile)
                    for sequence in (left, right)]
        tokens = [[run.tokens[0]], [second_best]]
        logits: List[List[Array]] = [[], []]
        for _ in range(BRANCH_TOKENS):
            both = feed_together(branches, [line[-1] for line in tokens])
            for line, seen, row in zip(tokens, logits, both):
                seen.append(row)
                line.append(int(row.argmax()))
        results = [local.check([*run.prompt, line[0]], line[1:], np.array(seen))
                   for line, seen in zip(tokens, logits)]
    # The parent goes on as if nothing had happened.
    row = parent.feed(run.tokens[-1:])
    after = local.check([*run.prompt, *run.tokens], [int(row[-1].argmax())], row)
    untouched = parent.sequence.length == parent_length + 1
    say(f"fork: first branch {results[0]}")
    say(f"fork: second branch {results[1]}")
    say(f"fork: parent afterwards {after}")
    return (all(result.ok for result in [*results, after]) and untouched
            and tokens[0] != tokens[1])


def speculate(run: Run, local: LocalModel, say: Say) -> bool:
    """Verifies a draft of which two rows are right, keeps those, goes on; then truncates."""
    parent = run.generator
    with parent.sequence.fork(len(run.prompt)) as sequence:
        generator = Generator(parent.model, parent.service, sequence, parent.profile)
        # The first two rows are what greedy generation chose; the others are certainly not.
        wrong = [(token + 1) % 256 for token in run.tokens[DRAFT_KEPT:DRAFT_ROWS]]
        draft = [*run.tokens[:DRAFT_KEPT], *wrong]
        verified = generator.feed(draft, keep=DRAFT_KEPT)
        kept = sequence.length == len(run.prompt) + DRAFT_KEPT
        prompt = [*run.prompt, *draft[:DRAFT_KEPT]]
        epoch_kept = sequence.epoch
        tokens, logits = generator.generate(verified[DRAFT_KEPT - 1], BRANCH_TOKENS)
        first = local.check(prompt, tokens, logits)
        say(f"speculate: {DRAFT_ROWS} rows verified, {DRAFT_KEPT} kept, then {first}")

        # Truncation drops the continuation; generating again must give the same kind of answer.
        sequence.truncate(len(run.prompt) + 1)
        fenced = sequence.epoch > epoch_kept and _stale_epoch_is_refused(generator, epoch_kept)
        again = generator.feed(draft[1:DRAFT_KEPT])
        tokens, logits = generator.generate(again[-1], BRANCH_TOKENS)
        second = local.check(prompt, tokens, logits)
        say(f"truncate: to {len(run.prompt) + 1} rows, regenerated, {second}")
    return first.ok and second.ok and kept and fenced


def _stale_epoch_is_refused(generator: Generator, epoch: int) -> bool:
    """A step of the dropped branch must not be accepted."""
    sequence = generator.sequence
    current, sequence.epoch = sequence.epoch, epoch
    try:
        generator.service.step([(sequence, 1)]).begin().abort()
    except mla_client.FailedPrecondition:
        return True
    finally:
        sequence.epoch = current
    return False


def check_run(run: Run, local: LocalModel, say: Say) -> Comparison:
    """The comparison of a whole run."""
    result = local.check(run.prompt, run.tokens, run.logits)
    say(f"{run.generator.profile.name.lower()}: {result}")
    return result


def text_of(tokens: Sequence[int]) -> str:
    """Tokens as a reader sees them: bytes, escaped if they are not text."""
    return repr(bytes(tokens))[2:-1]
