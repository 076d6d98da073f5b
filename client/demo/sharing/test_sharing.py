"""The scenes of shared rows, with attention computed by LocalReference."""

import contextlib
import dataclasses
import tempfile
import unittest

import attention
import checks
import mla_client
import model as models
import numpy as np
import scenes
import server_binary
from mla_client.types import PrefixMatch
from sharing import beams, prefix, restore

SMALL = models.Config(hidden=64, layers=3, heads=2, q_lora=32, kv_lora=32, nope=16, rope=8, v=16,
                      dense_width=64, expert_width=32, experts=4)
PROMPT = (list(b"the quick brown fox jumps over the lazy dog, twice") * 10)[:480]


class Caching(mla_client.LocalReference):
    """With a prefix cache of one text: the rows of the first sequence that is released."""

    def __init__(self, change=lambda rows: rows):
        super().__init__(exact=True)
        self._change = change
        self._named, self._texts, self._rows = {}, [], []

    def _open(self, model_id, request_id, lease_ms, named):
        state, _ = super()._open(model_id, request_id, lease_ms, None)
        self._named[state.sequence_id] = named
        if not self._texts or named.salt:
            return state, PrefixMatch()
        return self._take(state.sequence_id, named)

    def _take(self, sequence_id, named):
        text = self._texts[0]
        most = min(len(text), named.max_rows)
        found = next((row for row in range(most) if text[row] != named.token_ids[row]), most)
        opened = self._sequences[sequence_id]
        opened.rows = [self._change(rows[:found].copy()) for rows in self._rows]
        opened.length = found
        return self._get([sequence_id])[0][0], PrefixMatch(found, "all")

    def _match(self, sequence_id, epoch, first_row, named):
        before = self._named[sequence_id].token_ids[:first_row]
        self._named[sequence_id] = mla_client.Prefix([*before, *named.token_ids])
        return self._get([sequence_id])[0][0], PrefixMatch()

    def _release(self, sequence_ids):
        if not self._texts:
            opened = self._sequences[sequence_ids[0]]
            self._texts.append(list(self._named[sequence_ids[0]].token_ids)[:opened.length])
            self._rows = [rows[:opened.length].copy() for rows in opened.rows]
        return super()._release(sequence_ids)


class Shifted(mla_client.LocalReference):
    """A service with a fault: keys belong to the row before."""

    def _compute(self, opened, model, args, q):
        kept = opened.kv[args.layer].copy()
        opened.kv[args.layer] = np.roll(kept, 1, axis=0)
        try:
            return super()._compute(opened, model, args, q)
        finally:
            opened.kv[args.layer] = kept


def two_turns(service):
    """Returns (True if the scene passes, its lines)."""
    model = models.seeded(SMALL)
    said = []
    ok = prefix.turns(model, attention.register(service, model, "small"),
                      mla_client.Profile.EXPANDED, PROMPT, checks.LocalModel(model), said.append)
    return ok, said


def search(service):
    """As two_turns, for the beam search."""
    model = models.seeded(SMALL)
    said = []
    registered = attention.register(service, model, "small")
    run = scenes.generate(model, service, registered, mla_client.Profile.EXPANDED, PROMPT[:50], 2,
                          said.append)
    ok = beams.search(run, checks.LocalModel(model), lambda: 0, said.append)
    left = service._sequences  # pylint: disable=protected-access
    return ok and len(left) == 1, said


class PrefixTest(unittest.TestCase):
    def test_rows_of_the_first_turn_are_taken(self):
        ok, said = two_turns(Caching())
        self.assertTrue(ok, said)
        self.assertIn("463 of 496 rows found, 93 % hit, 33 computed", said[-1])

    def test_a_service_without_a_cache_fails(self):
        ok, said = two_turns(mla_client.LocalReference(exact=True))
        self.assertFalse(ok)
        self.assertIn("0 of 496 rows found", said[-1])

    def test_rows_of_something_else_are_found(self):
        ok, said = two_turns(Caching(lambda rows: np.roll(rows, 1, axis=1)))
        self.assertFalse(ok, said)


class BeamsTest(unittest.TestCase):
    def test_beams_are_those_of_the_local_model(self):
        ok, said = search(mla_client.LocalReference(exact=True))
        self.assertTrue(ok, said)
        self.assertIn("0 near ties", said[-1])

    def test_a_faulty_service_is_found(self):
        ok, said = search(Shifted(exact=True))
        self.assertFalse(ok, said)


class RestoreTest(unittest.TestCase):
    """Against a server, which is killed and starts again."""

    def crash(self, change=lambda run: run):
        """Returns True if the scene passes with the run that `change` returns, and its lines."""
        model = models.seeded(SMALL)
        said = []
        with tempfile.TemporaryDirectory() as folder:
            server = server_binary.start(f"--checkpoint-path={folder}/saved")
            self.addCleanup(server.stop)

            @contextlib.contextmanager
            def restarted():
                server.kill()
                server.start()
                with mla_client.Client.connect(server.target) as client:
                    yield attention.register(client, model, "small")

            with mla_client.Client.connect(server.target) as client:
                registered = attention.register(client, model, "small")
                run = scenes.generate(model, client, registered, mla_client.Profile.EXPANDED,
                                      PROMPT[:50], 8, said.append)
                ok = restore.crash(change(run), client, restarted, PROMPT[50:60],
                                   checks.LocalModel(model), said.append)
        return ok, said

    def test_a_conversation_goes_on(self):
        ok, said = self.crash()
        self.assertTrue(ok, said)
        self.assertIn("restore: 57 rows", said[-1])

    def test_rows_of_another_conversation_are_found(self):
        ok, said = self.crash(lambda run: dataclasses.replace(run, prompt=run.prompt[::-1]))
        self.assertFalse(ok, said)


if __name__ == "__main__":
    unittest.main()
