"""A worker: the demo's trained model in a process of its own, its attention on a server.

All requests of a worker are generated together: a step takes the last token of each, or a piece of
a prompt. When the server restarts, its cache is gone. The worker connects again and prefills its
present text from the tokens; clients see a pause.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is loaded

# pylint: disable=wrong-import-position
import dataclasses
import pathlib
import queue
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

CLIENT = pathlib.Path(__file__).resolve().parents[2] / "client"
sys.path[:0] = [str(CLIENT / "python"), str(CLIENT / "demo")]

import attention
import mla_client
import numpy as np
import trained
from generate import STEP_LEASE_MS
from text import StopFilter

MODEL_ID = "examples-trained"
PREFILL_ROWS = 256      # per step
LEASE_MS = 60_000
RECONNECT_S = 30.0      # how long a server may be away
# The server has lost the sequences, or the connection.
LOST = (mla_client.ServerRestarted, mla_client.NotFound, mla_client.Unavailable,
        mla_client.Aborted)


@dataclasses.dataclass(frozen=True)
class Task:
    """A request as a worker gets it."""

    number: int
    prompt: bytes        # at least one
    choices: int
    max_tokens: int
    temperature: float   # 0: the best token each time
    top_p: float
    seed: int
    stops: Tuple[bytes, ...]


@dataclasses.dataclass(frozen=True)
class Event:
    """An event of a task: some bytes of a choice, its end, or an error of the whole task."""

    number: int
    choice: int = 0
    data: bytes = b""
    tokens: int = 0      # of the choice up to now
    reason: str = ""     # at its end "stop", "length" or "error"
    message: str = ""


class Choice:
    """One continuation of a prompt."""

    def __init__(self, task: Task, index: int) -> None:
        self.task, self.index = task, index
        self.tokens: List[int] = list(task.prompt)  # all tokens up to now
        self.sequence: Optional[mla_client.Sequence] = None
        self.logits: Optional[np.ndarray] = None    # for the next token, once all tokens are fed
        self._filter = StopFilter(task.stops)
        self._random = np.random.default_rng([task.seed, index])

    @property
    def waiting(self) -> List[int]:
        """Tokens that the cache does not have."""
        return self.tokens[self.sequence.length if self.sequence is not None else 0:]

    def choose(self) -> Event:
        """Adds a token, chosen from the logits."""
        token = pick(self.logits, self.task.temperature, self.task.top_p, self._random)
        self.logits = None
        self.tokens.append(token)
        data, stopped = self._filter.add(bytes([token]))
        said = len(self.tokens) - len(self.task.prompt)
        reason = "stop" if stopped else "length" if said == self.task.max_tokens else ""
        if reason == "length":
            data += self._filter.rest()
        return Event(self.task.number, self.index, data, said, reason)


def pick(logits: np.ndarray, temperature: float, top_p: float,
         random: np.random.Generator) -> int:
    """A token: the best one, or one drawn from the most probable that make up `top_p`."""
    if temperature == 0:
        return int(logits.argmax())
    # In 64 bits, where no temperature above 0 is rounded to 0. Far below the best one the quotient
    # is infinite, and its weight 0.
    with np.errstate(over="ignore"):
        weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.argsort(-weights, kind="stable")
    total = np.cumsum(weights[order])
    kept = order[:int(np.searchsorted(total, top_p * total[-1])) + 1]
    return int(random.choice(kept, p=weights[kept] / weights[kept].sum()))


class Worker:
    """The loop of one worker process."""

    def __init__(self, target: str, inbox: Any, outbox: Any) -> None:
        self._target, self._inbox, self._outbox = target, inbox, outbox
        self._model = trained.load()
        self._choices: List[Choice] = []
        self._client: Optional[mla_client.Client] = None
        self._connect()

    def run(self) -> None:
        """Until None comes."""
        while self._take():
            try:
                self._step()
            except LOST as error:
                self._recover(error)
            except Exception as error:  # pylint: disable=broad-except
                # Whatever a request has broken, others are served.
                self._fail(error)
        self._drop(self._choices)
        self._client.close()

    def _connect(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = mla_client.Client.connect(self._target, lease_ms=LEASE_MS)
        self._registered = attention.register(self._client, self._model, MODEL_ID)

    def _take(self) -> bool:
        """Takes the messages of the inbox; waits if it has nothing else to do."""
        while True:
            try:
                message = self._inbox.get(block=not self._choices)
            except queue.Empty:
                return True
            if message is None:
                return False
            if isinstance(message, Task):
                self._choices.append(Choice(message, 0))
            else:  # the number of a task that is not wanted any more
                self._drop([choice for choice in self._choices if choice.task.number == message])

    def _step(self) -> None:
        """A piece of the oldest prompt, else a token of every choice."""
        fresh = next((choice for choice in self._choices if len(choice.waiting) > 1
                      or choice.sequence is None), None)
        if fresh is not None:
            if fresh.sequence is None:
                fresh.sequence = self._registered.open_sequence()
            self._feed({fresh: fresh.waiting[:PREFILL_ROWS]})
        decoding = {choice: choice.waiting for choice in self._choices
                    if choice.sequence is not None and len(choice.waiting) == 1}
        if decoding:
            self._feed(decoding)
        for choice in [choice for choice in self._choices if choice.logits is not None]:
            self._branch(choice)
        for choice in [choice for choice in self._choices if choice.logits is not None]:
            if choice not in self._choices:  # its task has ended with another choice
                continue
            try:
                event = choice.choose()
            except Exception as error:  # pylint: disable=broad-except
                self._fail(error, choice.task.number)
                continue
            self._outbox.put(event)
            if event.reason:
                self._drop([choice])

    def _feed(self, rows: Dict[Choice, List[int]]) -> None:
        """One step that adds these tokens."""
        positions = np.concatenate([np.arange(len(tokens)) + choice.sequence.length
                                    for choice, tokens in rows.items()])
        with self._client.step([(choice.sequence, len(tokens)) for choice, tokens in rows.items()],
                               lease_ms=STEP_LEASE_MS) as step:
            logits = self._model.forward(
                np.concatenate([np.array(tokens, np.int64) for tokens in rows.values()]), positions,
                attention.StepAttention(self._model, step, mla_client.Profile.EXPANDED))
        last = -1
        for choice, tokens in rows.items():
            last += len(tokens)
            if not choice.waiting:
                choice.logits = logits[last]

    def _branch(self, choice: Choice) -> None:
        """The further choices of a prompt share its rows."""
        wanted = choice.task.choices if choice.tokens == list(choice.task.prompt) else 1
        for index in range(1, wanted if choice.index == 0 else 1):
            other = Choice(choice.task, index)
            other.sequence, other.logits = choice.sequence.fork(), choice.logits
            self._choices.append(other)

    def _recover(self, error: mla_client.MlaError) -> None:
        """Connects again; all sequences are filled from their tokens."""
        deadline = time.monotonic() + RECONNECT_S
        while True:
            try:
                self._connect()
                break
            except mla_client.MlaError:
                if time.monotonic() > deadline:
                    self._fail(error)
                    return
                time.sleep(0.2)
        for choice in self._choices:
            choice.sequence = choice.logits = None

    def _fail(self, error: Exception, number: Optional[int] = None) -> None:
        """Ends one task, or all of them: it is not always known which one an error is about."""
        message = str(error) if isinstance(error, mla_client.MlaError) else repr(error)
        ended = [choice for choice in self._choices if number in (None, choice.task.number)]
        for one in {choice.task.number for choice in ended}:
            self._outbox.put(Event(one, reason="error", message=message))
        self._drop(ended)

    def _drop(self, choices: List[Choice]) -> None:
        """Ends choices and frees their rows."""
        self._choices = [choice for choice in self._choices if choice not in choices]
        for choice in choices:
            try:
                if choice.sequence is not None:
                    choice.sequence.release()
            except mla_client.MlaError:
                pass  # the lease frees it


def main(target: str, inbox: Any, outbox: Any) -> None:
    """Body of a worker process. The first event has number -1 and says that it is ready, or why
    not."""
    try:
        worker = Worker(target, inbox, outbox)
    except (mla_client.MlaError, OSError, ValueError) as error:
        outbox.put(Event(-1, reason="error", message=str(error)))
        return
    outbox.put(Event(-1))
    worker.run()
