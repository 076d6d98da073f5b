"""Requests of vLLM that begin with rows of the server's prefix cache (see test_vllm.py)."""

import types
import unittest
from unittest import mock

import mla_client
import numpy as np
import server_binary
import test_vllm
from mla_client.vllm.requests import Prefixes
from mla_client.vllm.runtime import runtime

SERVER = None


def setUpModule():
    global SERVER  # pylint: disable=global-statement
    SERVER = server_binary.start()


def tearDownModule():
    SERVER.stop()


class PrefixCase(unittest.TestCase):
    """Requests of an engine, `self.engine`."""

    def request(self, name, tokens, **changes):
        return types.SimpleNamespace(**{
            "request_id": name, "all_token_ids": self.engine.texts[name][:tokens],
            "cache_salt": None, "lora_request": None, "mm_features": [], "prompt_embeds": None,
            "resumable": False, "skip_reading_prefix_cache": False, **changes})

    def ask(self, name, tokens, **changes):
        """Rows that the scheduler is told of, for a request with so many tokens."""
        matched, later = self.engine.scheduler.get_num_new_matched_tokens(
            self.request(name, tokens, **changes), 0)
        self.assertFalse(later)
        self.engine.computed[name] = matched
        return matched

    def run_all(self, name, tokens, **options):
        """What is left of so many tokens, and its hidden states are right."""
        hidden = self.engine.run({name: tokens - self.engine.computed[name]}, **options)
        want = self.engine.whole(self.engine.texts[name][:tokens])[-len(hidden[name]):]
        np.testing.assert_allclose(hidden[name], want, atol=0.1)

    def finish(self, name, tokens, **options):
        self.engine.scheduler.request_finished(self.request(name, tokens), [])
        return self.engine.run({}, finished=[name], **options)


class PrefixTest(PrefixCase):
    def setUp(self):
        self.tenant = self.id()[-40:]
        self.worker = mla_client.Client.connect(SERVER.target, tenant=self.tenant,
                                                client_id="vllm-e")
        self.addCleanup(self.worker.close)
        self.addCleanup(test_vllm.doubles.op_registry_oot.clear)
        with mock.patch.dict(test_vllm.os.environ, {test_vllm.plugin.SWITCH: "1"}):
            test_vllm.plugin.register()
        self.addCleanup(runtime.close)

    def start(self, **options):
        self.engine = test_vllm.Engine(
            self.worker, target=SERVER.target,
            extra={"tenant": self.tenant, "client_id": "vllm-e"}, **options)
        self.addCleanup(self.engine.scheduler.shutdown)
        self.engine.texts = {"a": list(range(1, 13)), "b": list(range(1, 7)) + list(range(20, 26)),
                             "c": list(range(1, 13))}

    def sequences(self):
        return sorted(state.length for state in self.worker.sequences())

    def test_a_prompt_begins_with_rows_of_another(self):
        self.start()
        self.assertEqual(self.ask("a", 8), 0)
        self.run_all("a", 8)
        self.finish("a", 9)
        self.assertEqual(self.sequences(), [])
        self.assertEqual(self.ask("b", 10), 6)
        self.assertEqual(self.ask("b", 10), 6)  # while it waits
        self.assertEqual(self.sequences(), [6])
        self.run_all("b", 10)
        self.assertEqual(self.sequences(), [10])
        self.finish("b", 10)
        self.assertEqual(self.sequences(), [])

    def test_answers_are_found_too(self):
        self.start()
        self.ask("a", 3)
        self.run_all("a", 3)
        for tokens in range(4, 10):
            self.run_all("a", tokens)
        self.finish("a", 10)
        self.assertEqual(self.ask("c", 12), 9)
        self.run_all("c", 12)

    def test_the_last_token_is_always_computed(self):
        self.start()
        self.ask("a", 8)
        self.run_all("a", 8)
        self.finish("a", 9)
        self.assertEqual(self.ask("c", 8), 7)
        self.run_all("c", 8)
        self.assertEqual(self.ask("b", 1), 0)

    def test_what_is_not_shared(self):
        self.start()
        self.ask("a", 8, cache_salt="mine")
        self.run_all("a", 8)
        self.finish("a", 9)
        for change in ({"cache_salt": None}, {"cache_salt": "yours"}, {"lora_request": 1},
                       {"mm_features": [1]}, {"prompt_embeds": 1}, {"resumable": True},
                       {"skip_reading_prefix_cache": True}):
            with self.subTest(**change):
                self.assertEqual(self.ask("c", 8, **{"cache_salt": "mine", **change}), 0)
                self.engine.run({}, finished=["c"])
                self.assertEqual(self.sequences(), [])
        self.assertEqual(self.ask("c", 8, cache_salt="mine"), 7)

    def test_a_request_that_was_put_back_begins_with_its_rows(self):
        self.start()
        self.ask("a", 8)
        self.run_all("a", 8)
        self.engine.run({}, preempted=["a"])
        self.assertEqual(self.sequences(), [])
        self.assertEqual(self.ask("a", 9), 8)
        self.run_all("a", 9, resumed=["a"])
        self.assertEqual(self.sequences(), [9])
        self.engine.computed["a"] = self.ask("a", 10)  # put back, and the worker was not told
        self.run_all("a", 10, resumed=["a"])
        self.assertEqual(self.sequences(), [10])
        self.engine.computed["a"] = self.ask("a", 11)
        self.run_all("a", 11, resumed=["a"], preempted=["a"])  # both in one pass
        self.assertEqual(self.sequences(), [11])

    def test_rows_of_refused_drafts_are_not_found(self):
        self.start(speculative_config=object())
        self.ask("a", 6)
        self.run_all("a", 6)
        right, self.engine.texts["a"] = self.engine.texts["a"], list(range(1, 8)) + [40] * 5
        self.engine.run({"a": 4})              # a token and three drafts, none of them right
        self.engine.texts["a"] = right
        self.finish("a", 8)
        for text in (right, list(range(1, 8)) + [40] * 5):  # not even that of the last token
            self.engine.texts["c"] = text
            self.assertEqual(self.ask("c", 12), 7)
            self.engine.run({}, finished=["c"])

    def test_leases_are_the_worker_s_after_the_plan(self):
        self.start()
        self.ask("a", 8)
        scheduler = self.engine.scheduler._client
        self.assertEqual(len(scheduler._renewer._schedule._leases), 1)
        self.run_all("a", 8)
        self.assertEqual(len(scheduler._renewer._schedule._leases), 0)
        self.assertEqual(len(self.worker._renewer._schedule._leases), 1)
        self.assertEqual(scheduler.client_id, self.worker.client_id)
        self.ask("b", 8)
        self.engine.scheduler.shutdown()
        self.assertEqual(self.sequences(), [8])

    def test_without_room_nothing_is_shared(self):
        service = mock.Mock()
        service._open.side_effect = mla_client.ResourceExhausted("prefix tokens")
        prefixes = Prefixes(service, "m", "")
        self.assertEqual(prefixes.matched("a", [1, 2, 3], ""), 0)
        self.assertIsNone(prefixes.take("a"))
        self.assertIsNone(prefixes.ended("a", [1, 2, 3]))


if __name__ == "__main__":
    unittest.main()
