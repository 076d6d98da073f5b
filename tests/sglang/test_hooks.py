"""What the hooks around SGLang's own functions do, with its own classes and without an engine."""

import dataclasses
import importlib
import pathlib
import sys
import types
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "standin"))

# pylint: disable=wrong-import-position
import torch
from mla_client import errors
from mla_client.serving import Passes, Request, Requests, State
from mla_client.sglang import NAME, OPTIONS, backend, hooks, plugin
from mla_client.sglang.runtime import runtime
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor)
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod)

ENVIRONMENT = "sglang"
GATE = False
REGISTRY = "sglang.srt.layers.attention.attention_registry"


class HooksTest(unittest.TestCase):
    def test_every_target_is_a_function_of_this_release(self):
        for target, name in plugin.HOOKS.items():
            module, owner, method = f"sglang.srt.{target}".rsplit(".", 2)
            found = getattr(getattr(importlib.import_module(module), owner), method)
            self.assertTrue(callable(found), target)
            self.assertTrue(callable(getattr(hooks, name)), name)

    def test_the_pool_takes_the_memory_of_one_row(self):
        pool = object.__new__(MLATokenToKVPool)
        pool.size, pool.page_size, pool.layer_num = 4096, 64, 3
        pool.kv_cache_dim, pool.store_dtype, pool.device = 576, torch.bfloat16, "cpu"
        hooks.create_no_buffers(None, pool)
        self.assertEqual([tuple(one.shape) for one in pool.kv_buffer], [(4160, 1, 576)] * 3)
        self.assertEqual({one.untyped_storage().nbytes() for one in pool.kv_buffer}, {1152})
        self.assertEqual(len({one.data_ptr() for one in pool.kv_buffer}), 1)

        class Other(MLATokenToKVPool):
            """A pool of another kind."""
        with self.assertRaisesRegex(errors.Unimplemented, "a KV pool of type Other"):
            hooks.create_no_buffers(None, object.__new__(Other))

    def test_the_pool_has_the_servers_rows(self):
        asked = []
        configurator = types.SimpleNamespace(
            calculate_pool_sizes_from_max_tokens=lambda *args: asked.append(args))
        with mock.patch.object(runtime, "rows_of_pool", lambda: 1000):
            hooks.size_pool(None, configurator, 1 << 40, 64)
        with mock.patch.object(runtime, "rows_of_pool", lambda: 1 << 40):
            hooks.size_pool(None, configurator, 1 << 40, 1)
        self.assertEqual(asked, [(960, 64), (hooks.MAX_TOKENS, 1)])
        self.assertEqual(hooks.need_no_bytes(None, configurator), 0)

    def test_queries_are_never_absorbed(self):
        self.assertEqual(backend._expanded(None, None), AttnForwardMethod.MHA)

    def test_a_request_that_gives_its_slot_back_is_released_before_the_hook_returns(self):
        freed = []
        requests = types.SimpleNamespace(freed=lambda *args: freed.append(args))
        req = types.SimpleNamespace(rid="r", origin_input_ids=[1, 2], output_ids=[3])
        with mock.patch.object(runtime, "requests", requests):
            self.assertEqual(hooks.release(lambda pool, one: (pool, one), "pool", req),
                             ("pool", req))
        self.assertEqual(freed, [("r", [1, 2, 3])])

    def test_a_request_without_room_waits(self):
        requests = types.SimpleNamespace(waits=lambda rid: rid == "waits")
        with mock.patch.object(runtime, "requests", requests):
            for rid, want in (("waits", AddReqResult.NO_TOKEN), ("runs", "added")):
                self.assertEqual(hooks.admit(lambda adder, req: "added", None,
                                             types.SimpleNamespace(rid=rid)), want)


class Batch:
    """A batch of requests. SGLang copies it where passes overlap; copies have no caches."""

    def __init__(self, reqs):
        self.reqs = list(reqs)

    def filter_batch(self, reqs_to_exclude):
        self.reqs = [req for req in self.reqs if req not in reqs_to_exclude]


def processor(overlap):
    """SGLang's own processor of results."""
    fields = {field.name: None for field in dataclasses.fields(SchedulerBatchResultProcessor)}
    return SchedulerBatchResultProcessor(**{**fields, "enable_overlap": overlap})


class BeginAgainTest(unittest.TestCase):
    """Requests whose rows the server has lost, in SGLang's two loops."""

    def setUp(self):
        self.passes = Passes(types.SimpleNamespace(client=None), 1)
        self.passes.last_error = errors.Unavailable("it is away")
        self.first = mock.Mock(patient=True)
        self.requests = Requests(types.SimpleNamespace(passes=self.passes), self.first)
        for owner, name, value in ((runtime, "requests", self.requests),
                                   (hooks, "release_req", self.release)):
            patched = mock.patch.object(owner, name, value)
            patched.start()
            self.addCleanup(patched.stop)
        runtime.put_out = []
        self.reqs = [types.SimpleNamespace(
            rid=rid, tokens=0, is_retracted=False, to_finish=None, inflight_middle_chunks=0,
            finished=lambda: False, kv=types.SimpleNamespace(holds_kv=True)) for rid in "abc"]
        for req in self.reqs:
            self.requests._names[req.rid] = req.rid
            self.passes._requests[req.rid] = Request(req.rid)
        self.released, self.queue = [], []

    def lose(self, rids):
        """A pass has found that their rows are gone."""
        for rid in rids:
            self.passes._lose(rid)

    def states(self):
        return [self.passes.state(req.rid) for req in self.reqs]

    def release(self, *, req, req_to_token_pool, tree_cache, **others):
        """As SGLang's release_req, which needs the scheduler's pools."""
        self.assertEqual((req_to_token_pool, tree_cache), ("slots", "tree"))
        self.assertTrue(req.kv.holds_kv)
        req.kv.holds_kv = False
        self.released.append(req.rid)

    def scheduler(self, overlap, flying=False):
        """`flying`: one more pass has been launched."""
        return types.SimpleNamespace(
            enable_overlap=overlap, running_batch=Batch(self.reqs),
            result_queue=[None] if flying else [], req_to_token_pool="slots", tree_cache="tree",
            token_to_kv_pool_allocator="rows", batch_result_processor=processor(overlap),
            _add_request_to_queue=lambda req, is_retracted: self.queue.append(req.rid))

    @staticmethod
    def process(scheduler, batch, result):
        """As SGLang's: a token for each, but for those put back if the processor skips them."""
        for req in batch.reqs:
            if not (scheduler.batch_result_processor.enable_overlap and req.is_retracted):
                req.tokens += 1
        return result

    def check(self, scheduler):
        a, b, _ = self.reqs
        self.assertEqual((a.tokens, b.tokens), (0, 0))
        self.assertEqual((self.released, self.queue), (["a", "b"], ["a", "b"]))
        self.assertEqual([req.rid for req in scheduler.running_batch.reqs], ["c"])
        self.assertFalse(scheduler.running_batch.batch_is_full)

    def test_passes_one_after_another(self):
        scheduler = self.scheduler(False)
        self.lose("ab")
        self.assertEqual(hooks.begin_again(self.process, scheduler, scheduler.running_batch, "r"),
                         "r")
        self.check(scheduler)
        self.assertEqual(self.reqs[2].tokens, 1)
        self.assertFalse(scheduler.batch_result_processor.enable_overlap)

    def test_passes_that_overlap(self):
        """They are put back when the pass that had been launched already is over."""
        scheduler = self.scheduler(True, flying=True)
        first, second = Batch(self.reqs), Batch(self.reqs)
        self.lose("ab")
        hooks.begin_again(self.process, scheduler, first, None)
        self.assertEqual((self.queue, len(scheduler.running_batch.reqs)), ([], 1))
        self.lose("a")  # the launched pass has lost it, too
        hooks.begin_again(self.process, scheduler, second, None)
        self.check(scheduler)
        self.assertEqual(self.reqs[2].tokens, 2)
        self.assertEqual(runtime.put_out, [])

    def test_a_launched_pass_of_others(self):
        """It has none of them, and ends all the same."""
        scheduler = self.scheduler(True, flying=True)
        self.lose("ab")
        hooks.begin_again(self.process, scheduler, Batch(self.reqs), None)
        hooks.begin_again(self.process, scheduler, Batch([]), None)
        self.check(scheduler)

    def test_no_pass_is_launched(self):
        scheduler = self.scheduler(True)
        self.lose("ab")
        hooks.begin_again(self.process, scheduler, Batch(self.reqs), None)
        self.check(scheduler)

    def test_prompts_begin_again(self):
        """They are not in the running batch yet."""
        scheduler = self.scheduler(False)
        scheduler.running_batch, prompts = Batch(self.reqs[2:]), Batch(self.reqs[:2])
        self.lose("ab")
        hooks.begin_again(self.process, scheduler, prompts, None)
        self.check(scheduler)
        self.assertEqual(prompts.reqs, [])

    def test_a_prompt_in_its_middle_begins_again_after_its_last_pass(self):
        for overlap in (False, True):
            with self.subTest(overlap=overlap):
                self.setUp()
                scheduler, a = self.scheduler(overlap), self.reqs[0]
                a.inflight_middle_chunks = 1
                self.lose("a")
                hooks.begin_again(self.process, scheduler, Batch([a]), None)
                self.assertEqual((a.to_finish, a.is_retracted, self.queue), (None, False, []))
                self.assertEqual(self.states()[0], State.AGAIN)
                a.inflight_middle_chunks = 0  # SGLang counts it down
                hooks.begin_again(self.process, scheduler, Batch([a]), None)
                self.assertEqual((self.released, self.queue), (["a"], ["a"]))
                self.assertEqual(self.states()[0], State.OUT)
                self.assertNotIn(a, scheduler.running_batch.reqs)

    def test_prompts_whose_own_tokens_are_in_the_results_fail(self):
        scheduler = self.scheduler(False)
        self.reqs[0].inflight_middle_chunks = 1
        scheduler.running_batch = Batch([])
        self.lose("ab")
        result = types.SimpleNamespace(extend_input_len_per_req=[4, 4, 4],
                                       extend_logprob_start_len_per_req=[3, 0, 4])
        hooks.begin_again(self.process, scheduler, Batch(self.reqs), result)
        self.assertEqual([req.to_finish is not None for req in self.reqs], [True, True, False])
        self.assertEqual((self.released, self.queue), ([], []))

    def test_after_too_long_they_fail(self):
        self.first.patient = False
        scheduler = self.scheduler(False)
        self.lose("b")
        hooks.begin_again(self.process, scheduler, scheduler.running_batch, None)
        self.assertEqual(self.queue, [])
        self.assertEqual([req.to_finish is not None for req in self.reqs], [False, True, False])
        self.assertIn("mla-server: UNAVAILABLE: it is away", str(vars(self.reqs[1].to_finish)))


class PluginTest(unittest.TestCase):
    def test_another_release_is_refused_by_name_when_the_backend_is_asked_for(self):
        made = {}
        with mock.patch("sglang.version.__version__", "0.5.24"), \
                mock.patch(f"{REGISTRY}.ATTENTION_BACKENDS", {}), \
                mock.patch(f"{REGISTRY}.register_attention_backend",
                           lambda name: lambda create: made.update({name: create})):
            plugin.register()
        with self.assertRaisesRegex(errors.Unimplemented, "SGLang 0.5.24: .* 0.5.23; install"):
            made[NAME](None)

    def test_hooks_without_the_backend_change_nothing(self):
        hook = plugin._lazy("need_no_bytes")
        with mock.patch.object(hooks, "chosen", lambda: False):
            self.assertEqual(hook(lambda *args: args, 1, 2), (1, 2))
        with mock.patch.object(hooks, "chosen", lambda: True):
            self.assertEqual(hook(lambda *args: args, 1, 2), 0)

    def test_options_come_from_the_environment(self):
        from mla_client.serving import options_in
        for text in ("", "[]", "{}", "{"):
            with mock.patch.dict("os.environ", {OPTIONS: text}):
                with self.assertRaisesRegex(errors.InvalidArgument, "MLA_SGLANG of the environ"):
                    options_in(OPTIONS)
        with mock.patch.dict("os.environ", {OPTIONS: '{"target": "a", "away_s": 2}'}):
            self.assertEqual(options_in(OPTIONS), {"target": "a", "away_s": 2})


if __name__ == "__main__":
    unittest.main()
