"""One worker of the soak: random calls on sequences of its own, each compared with the oracle.

    worker.py --target unix:PATH --tenant NAME --transport ring --seed N --log FILE [--plant]

Ends with status 0 after SIGTERM, with 1 at the first wrong answer. Each operation is a line of
JSON in the log, written before the call begins.
"""

import argparse
import dataclasses
import io
import json
import signal
import sys
import time

import numpy as np

import mla_client
from mla_client import pages
from mla_client.gen import cache_pb2
from mla_client.pages import HintKind

import oracle

CALL_TIMEOUT_S = 20.0
LEASE_MS = 4000
MOST_SEQUENCES = 8
MOST_ROWS = 320          # largest length of one sequence
MOST_STEP_ROWS = 40
SHARED_TEXTS = 6         # prompts that a tenant's workers share
PROMPT_ROWS = (20, 130)  # their length
RECONNECT_S = 600.0      # a server that starts again is there by then, on a busy machine too


class WrongAnswer(Exception):
    """The server's result differs from the oracle."""


@dataclasses.dataclass
class Held:
    """A sequence, and the text that its rows must match."""

    sequence: mla_client.Sequence
    text: oracle.Text
    # Tokens that were declared to the server for the next rows. These rows must come before others.
    declared: list = dataclasses.field(default_factory=list)

    def next_tokens(self, count, more):
        """The tokens of the next rows; `more` are taken after the declared ones."""
        return (self.declared + more)[:count]

    def cut(self, length):
        """Cuts the sequence. The server then forgets the tokens declared for later rows."""
        self.sequence.truncate(length)
        self.text, self.declared = self.text.first(self.sequence.length), []

    def grow(self, text):
        """Adds rows that a step or the prefix cache has added."""
        self.declared = self.declared[len(text) - len(self.text):]
        self.text = text


@dataclasses.dataclass
class Saved:
    """A checkpoint on the server's disk."""

    kind: oracle.Kind
    text: oracle.Text


def prompt(kind, number, tenant):
    """A text with which all workers of a tenant begin sequences."""
    random = np.random.default_rng([number, len(tenant), ord(tenant[-1])])
    count = int(random.integers(*PROMPT_ROWS))
    return oracle.Text(kind, random.integers(1, 50_000, count).tolist())


class Worker:
    """Holds sequences of both kinds of models. One thread."""

    def __init__(self, arguments):
        self._arguments = arguments
        self._random = np.random.default_rng(arguments.seed)
        self._log = open(arguments.log, "a", encoding="ascii", buffering=1)
        self._weights = {kind: oracle.model_weights(kind) for kind in oracle.KINDS}
        self._held = []
        self._saved = {}
        self._plant = arguments.plant
        self._client = None
        self._models = {}
        self.counts = {}

    # --- Connection

    def connect(self):
        """Connects and registers the models; waits for a server that is starting."""
        deadline = time.monotonic() + RECONNECT_S
        while True:
            try:
                self._open_client()
                return
            except mla_client.MlaError as error:
                self._note("connect", error=str(error)[:200])
                if time.monotonic() > deadline:
                    raise WrongAnswer(f"no server within {RECONNECT_S} s: {error}") from error
                time.sleep(0.2)

    def _open_client(self):
        if self._client is not None:
            self._client.close()
        arguments = self._arguments
        self._client = mla_client.Client.connect(
            arguments.target, tenant=arguments.tenant, transport=arguments.transport,
            client_id=f"{arguments.tenant}-{arguments.seed}", timeout_s=CALL_TIMEOUT_S,
            lease_ms=LEASE_MS, shared_bytes=None if arguments.transport == "inline" else 8 << 20)
        self._models = {}
        for kind in oracle.KINDS:
            model = self._client.register_model(kind.spec())
            for layer, (w_uk, w_uv) in enumerate(self._weights[kind]):
                model.upload_weights(layer, w_uk.astype(np.float32), w_uv.astype(np.float32))
            self._models[kind] = model

    # --- Log

    def _note(self, operation, **values):
        line = {"t": round(time.monotonic(), 4), "op": operation, **values}
        self._log.write(json.dumps(line) + "\n")

    def _wrong(self, what, **values):
        self._note("WRONG", what=what, **values)
        raise WrongAnswer(what)

    # --- Choices

    def _chance(self, percent):
        return self._random.integers(100) < percent

    def _below(self, bound):
        return int(self._random.integers(bound))

    def _tokens(self, count):
        return self._random.integers(1, 50_000, count).tolist()

    def _pick(self):
        return self._held[self._below(len(self._held))] if self._held else None

    def _list(self, position):
        """Positions that the row at this position attends to, ascending."""
        count = 1 + self._below(oracle.TOP_K)
        return np.unique(self._random.integers(0, position + 1, count)).astype(np.int32)

    # --- Operations: each takes the server and the oracle from one state to the next

    def open_sequence(self):
        """Opens a sequence, most of them with a prompt that others have, too."""
        if len(self._held) >= MOST_SEQUENCES:
            return self.release()
        kind = oracle.KINDS[self._below(len(oracle.KINDS))]
        text = oracle.Text(kind)
        prefix = None
        if self._chance(80):
            text = prompt(kind, self._below(SHARED_TEXTS), self._arguments.tenant)
            prefix = mla_client.Prefix(token_ids=text.tokens)
        sequence = self._models[kind].open_sequence(prefix=prefix)
        if sequence.length > len(text):
            self._wrong("prefix is longer than its tokens", got=sequence.length, most=len(text))
        held = Held(sequence, text.first(sequence.length), text.tokens[sequence.length:])
        self._held.append(held)
        if sequence.length:
            self.check_rows(held)
        if held.declared:
            self._step([(held, list(held.declared))])
        return None

    def check_rows(self, held=None):
        """Compares every committed row with the oracle's, bit by bit."""
        held = held or self._pick()
        if held is None or not len(held.text):
            return
        got = [[] for _ in range(oracle.LAYERS)]
        payload = b""
        for part in self._client.export_rows(held.sequence):
            message = cache_pb2.PagesPart.FromString(part)
            payload += message.chunk.payload
            if message.HasField("group_end"):
                words = np.frombuffer(payload, "<u2").reshape(oracle.LAYERS, -1,
                                                              oracle.GEOMETRY.row_dim)
                for layer in range(oracle.LAYERS):
                    got[layer].append(words[layer])
                payload = b""
        self._compare_rows(held, got)

    def _compare_rows(self, held, got):
        for layer, chunks in enumerate(got):
            rows = np.concatenate(chunks) if chunks else np.empty((0, 0), np.uint16)
            want = held.text.bits(layer, 0, len(held.text))
            if len(rows) != len(want):
                self._wrong("an export has another number of rows", got=len(rows), want=len(want))
            different = np.nonzero((rows != want).any(axis=1))[0]
            if len(different):
                first = int(different[0])
                self._wrong("rows differ", id=held.sequence.id, layer=layer, row=first,
                            rows=len(different), zeros=int((~rows[different].any(axis=1)).sum()))

    def step(self):
        """Adds rows to one to three sequences of a model."""
        first = self._pick()
        if first is None:
            return self.open_sequence()
        chosen = [held for held in self._held if held.text.kind == first.text.kind
                  and (held is first or self._chance(40))][:3]
        rows = []
        for held in chosen:
            count = 1 + self._below(MOST_STEP_ROWS if self._chance(30) else 3)
            if len(held.text) + count > MOST_ROWS:
                held.cut(self._below(len(held.text)))
            rows.append((held, held.next_tokens(count, self._tokens(count))))
        return self._step(rows)

    def _step(self, rows):
        texts = [held.text.extended(tokens) for held, tokens in rows]
        aborts = self._chance(8)
        committed = None
        try:
            with self._client.step([(held.sequence, len(tokens)) for held, tokens in rows]) as step:
                for layer in range(oracle.LAYERS):
                    self._attend(step, layer, rows, texts)
                if aborts:
                    step.abort()
                elif self._chance(20):
                    committed = [1 + self._below(len(tokens)) for _, tokens in rows]
                    step.end(committed)
        except mla_client.MlaError:
            self._settle(rows, texts)
            raise
        for index, (held, tokens) in enumerate(rows):
            added = 0 if aborts else committed[index] if committed else len(tokens)
            held.grow(texts[index].first(len(held.text) + added))
            if held.sequence.length != len(held.text):
                self._wrong("a step left another length", got=held.sequence.length,
                            want=len(held.text))

    def _settle(self, rows, texts):
        """After a failed step: either all of its rows exist or none."""
        for index, (held, _) in enumerate(rows):
            try:
                held.sequence.refresh()
            except mla_client.MlaError:
                self._drop(held)
                continue
            if not len(held.text) <= held.sequence.length <= len(texts[index]):
                self._wrong("a failed step left another length", got=held.sequence.length,
                            before=len(held.text), after=len(texts[index]))
            held.grow(texts[index].first(held.sequence.length))

    def _attend(self, step, layer, rows, texts):
        spans = [(text, len(held.text), len(text)) for (held, _), text in zip(rows, texts)]
        kv = np.concatenate([text.bits(layer, begin, end) for text, begin, end in spans])
        if self._plant and self._chance(2):
            kv[0, 0] ^= 0x4000
        if self._chance(10):
            step.attend(layer, None, kv, mla_client.Profile.APPEND_ONLY)
            return
        sparse = rows[0][0].text.kind.sparse and self._chance(70)
        profile = (mla_client.Profile.ABSORBED if sparse or self._chance(60)
                   else mla_client.Profile.EXPANDED)
        q = mla_client.to_bf16(self._random.normal(
            0, 0.5, (len(kv), oracle.HEADS, oracle.GEOMETRY.q_dim(profile))).astype(np.float32))
        lists = None
        if sparse:
            lists = [self._list(position) for _, begin, end in spans
                     for position in range(begin, end)]
        options = {"want_lse": True, "o_dtype": mla_client.DType.F32}
        if lists is not None:
            got = step.attend_sparse(layer, q, lists, kv, profile, **options)
        else:
            got = step.attend(layer, q, kv, profile, **options)
        first = 0
        for text, begin, end in spans:
            last = first + end - begin
            call = oracle.Call(q[first:last], lists[first:last] if lists else None, profile)
            o, lse = oracle.attended(text, layer, begin, end, call,
                                     self._weights[text.kind])
            worst = max(float(np.abs(got.o[first:last] - o).max()),
                        float(np.abs(got.lse[first:last] - lse).max()))
            if not worst <= oracle.OUTPUT_BOUND:
                self._wrong("an output differs", layer=layer, begin=begin, end=end,
                            profile=profile.name, sparse=sparse, worst=worst)
            first = last

    def fork(self):
        """Forks a sequence at any length."""
        held = self._pick()
        if held is None or len(self._held) >= MOST_SEQUENCES:
            return self.release()
        length = self._below(len(held.text) + 1)
        child = held.sequence.fork(length)
        if child.length != length:
            self._wrong("a fork has another length", got=child.length, want=length)
        self._held.append(Held(child, held.text.first(length)))
        return None

    def truncate(self):
        """Cuts a sequence."""
        held = self._pick()
        if held is None:
            return
        held.cut(self._below(len(held.text) + 1))

    def match(self):
        """Declares the rows of a sequence, so that others can share them."""
        held = self._pick()
        if held is None or not len(held.text):
            return
        declared = held.declared + self._tokens(self._below(20))
        try:
            held.sequence.match(mla_client.Prefix(token_ids=held.text.tokens + declared))
        except mla_client.MlaError:
            self._drop(held)  # the server may know the tokens or not
            held.sequence.release()
            raise
        added = held.sequence.length - len(held.text)
        if not 0 <= added <= len(declared):
            self._wrong("a match has another length", got=held.sequence.length)
        held.declared = declared
        held.grow(held.text.extended(declared[:added]))

    def release(self):
        """Compares the rows of a sequence, then releases it."""
        held = self._pick()
        if held is None:
            return
        if self._chance(50):
            self.check_rows(held)
        held.sequence.release()
        self._held.remove(held)

    def copy_rows(self):
        """Exports a sequence and imports it as another."""
        held = self._pick()
        if held is None or not len(held.text) or len(self._held) >= MOST_SEQUENCES:
            return self.release()
        file = io.BytesIO()
        pages.write(file, self._client.export_rows(held.sequence))
        file.seek(0)
        copy = self._client.import_rows(self._models[held.text.kind], pages.read(file))
        copied = Held(copy, held.text.first(len(held.text)))
        if copy.length != len(held.text):
            self._wrong("an import has another length", got=copy.length, want=len(held.text))
        self._held.append(copied)
        self.check_rows(copied)
        return None

    def save(self):
        """Writes a sequence to the server's disk, or opens one that is there."""
        held = self._pick()
        if held is None or not len(held.text):
            return
        self._client.checkpoint([held.sequence])
        self._saved[held.sequence.id] = Saved(held.text.kind, held.text.first(len(held.text)))
        if len(self._saved) > 6:
            number = next(iter(self._saved))
            del self._saved[number]
            self._client.drop_checkpoints([number])

    def restore(self):
        """Opens a sequence again from the server's disk."""
        here = {held.sequence.id for held in self._held}
        gone = [number for number in self._saved if number not in here]
        if not gone or len(self._held) >= MOST_SEQUENCES:
            return self.release()
        number = gone[self._below(len(gone))]
        saved = self._saved[number]
        sequence = self._client.restore(self._models[saved.kind], [number])[0]
        restored = Held(sequence, saved.text.first(len(saved.text)))
        if sequence.length != len(saved.text):
            self._wrong("a checkpoint has another length", got=sequence.length,
                        want=len(saved.text))
        self._held.append(restored)
        self.check_rows(restored)
        return None

    def hint(self):
        """Moves cached rows between tiers."""
        kind = oracle.KINDS[self._below(len(oracle.KINDS))]
        text = prompt(kind, self._below(SHARED_TEXTS), self._arguments.tenant)
        wish = (HintKind.PIN, HintKind.RETAIN, HintKind.PREFETCH, HintKind.DEMOTE)[self._below(4)]
        self._client.hint(wish, (self._models[kind], mla_client.Prefix(token_ids=text.tokens)),
                          ttl_ms=500 if wish == HintKind.PIN else 0,
                          priority=self._below(4) if wish == HintKind.RETAIN else 0)

    # --- Life

    def _drop(self, held):
        if held in self._held:
            self._held.remove(held)

    def _recover(self, error):
        """Finds out which sequences are there after an error."""
        if isinstance(error, (mla_client.Unavailable, mla_client.ServerRestarted,
                              mla_client.DataLoss)):
            self._held.clear()  # leases of the old connection end them
            self.connect()
            return
        if isinstance(error, mla_client.ResourceExhausted):
            if self._held:
                self.release()
            return
        for held in list(self._held):
            try:
                held.sequence.refresh()
            except mla_client.NotFound:
                self._drop(held)
                continue
            if held.sequence.length != len(held.text):
                self._wrong("a refused call changed a length", got=held.sequence.length,
                            want=len(held.text))

    def run(self, ended):
        """Runs until `ended()` returns true. Raises WrongAnswer."""
        operations = (self.step,) * 10 + (
            self.open_sequence, self.open_sequence, self.open_sequence, self.fork, self.truncate,
            self.match, self.release, self.copy_rows, self.copy_rows, self.save, self.restore,
            self.hint, self.check_rows)
        while not ended():
            operation = operations[self._below(len(operations))]
            name = operation.__name__
            self._note(name, held=len(self._held))
            try:
                operation()
                self._count(name)
            except mla_client.MlaError as error:
                self._fail(name, error)

    def _fail(self, name, error):
        """Recovery may fail too; the same rules apply to that error."""
        while error is not None:
            self._note(name, error=type(error).__name__, text=str(error)[:300])
            self._count(f"{name}: {type(error).__name__}")
            if isinstance(error, (mla_client.InvalidArgument, mla_client.Internal,
                                  mla_client.Unknown)):
                self._wrong("an error that no valid call gets", error=str(error)[:300])
            try:
                self._recover(error)
                error = None
            except mla_client.MlaError as next_error:
                error = next_error

    def _count(self, name):
        self.counts[name] = self.counts.get(name, 0) + 1

    def finish(self):
        """Compares the remaining rows, and writes the counts."""
        for held in list(self._held):
            try:
                self.check_rows(held)
                self._count("check_rows")
            except mla_client.MlaError as error:
                self._fail("check_rows", error)
        self._note("counts", counts=self.counts)
        self._client.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "tenant", "transport", "log"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--plant", action="store_true", help="send a wrong row now and then")
    ended = []
    # Before the log exists: a worker without one was told to end before it had begun.
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    worker = Worker(parser.parse_args())
    try:
        worker.connect()
        worker.run(lambda: bool(ended))
        worker.finish()
    except WrongAnswer as wrong:
        print(f"wrong: {wrong}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
