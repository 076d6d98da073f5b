"""mla_client.sglang on doubles of SGLang: a small engine runs batches, and hidden states must be
those of whole texts with attention computed here."""

import inspect
import itertools
import json
import os
import random
import time
import types
import unittest
from unittest import mock

import mla_client
import numpy as np
import server_binary
import sglang_doubles as doubles
import sglang_signatures
import torch

doubles.install()

# pylint: disable=wrong-import-position
from mla_client.sglang import backend, plugin, requests
from tests import library_signatures

HIDDEN, HEADS, LAYERS, LORA, ROPE, NOPE, V = 24, 2, 2, 32, 8, 16, 12
SCALE = (NOPE + ROPE) ** -0.5
Mode = doubles.ForwardMode


def rotary(positions, x):
    """Turns pairs of halves of [rows, heads, ROPE]."""
    half = ROPE // 2
    angle = positions[:, None, None] * 100.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Layer:
    """An attention layer of DeepSeek, as SGLang computes it with absorbed weights."""

    def __init__(self, index, apart):
        self.apart = apart  # rotated parts are handed over beside the latent ones
        self.q, self.kv, self.w_kc, self.w_vc, self.o = (
            torch.randn(shape) * shape[-2] ** -0.5 for shape in (
                (HIDDEN, HEADS * (NOPE + ROPE)), (HIDDEN, LORA + ROPE), (HEADS, NOPE, LORA),
                (HEADS, LORA, V), (HEADS * V, HIDDEN)))
        self.attn_mqa = doubles.RadixAttention(HEADS, LORA + ROPE, SCALE, 1, index, v_head_dim=LORA)

    def project(self, at, x):
        """Absorbed queries and rows, each latent and rotated."""
        q = (x @ self.q).view(-1, HEADS, NOPE + ROPE)
        latent, k_pe = (x @ self.kv).split((LORA, ROPE), dim=-1)
        absorbed = torch.bmm(q[..., :NOPE].transpose(0, 1), self.w_kc).transpose(0, 1)
        return absorbed, rotary(at, q[..., NOPE:]), norm(latent)[:, None], rotary(at, k_pe[:, None])

    def output(self, latent):
        """Of the attention's outputs [rows, HEADS * LORA]."""
        latent = latent.view(-1, HEADS, LORA).transpose(0, 1)
        return torch.bmm(latent, self.w_vc).transpose(0, 1).flatten(1) @ self.o

    def __call__(self, at, x, batch):
        handler = doubles.AttentionBackendRegistry.get_handler(plugin.NAME)
        assert handler(self, batch) == doubles.AttnForwardMethod.MLA
        q, q_pe, k, k_pe = self.project(at, x)
        if self.apart:
            out = self.attn_mqa(q, k, k, batch, q_rope=q_pe, k_rope=k_pe)
        else:
            out = self.attn_mqa(torch.cat((q, q_pe), -1), torch.cat((k, k_pe), -1), k, batch)
        return self.output(out)

    def whole(self, at, x):
        """The same with attention computed here."""
        q, q_pe, k, k_pe = self.project(at, x)
        query, key = torch.cat((q, q_pe), -1), torch.cat((k, k_pe), -1)[:, 0]
        scores = torch.einsum("qhd,kd->hqk", query, key) * SCALE
        hidden = torch.ones(len(x), len(x)).triu(1).bool()
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.output(torch.einsum("hqk,kd->qhd", weights, k[:, 0]).flatten(1))


def runner_of(**changes):
    """A model runner; `changes` are of its arguments or its own."""
    graphs = types.SimpleNamespace
    args = doubles.ServerArgs(
        "small", disable_radix_cache=True, disable_overlap_schedule=True,
        cuda_graph_config=graphs(decode=graphs(backend="disabled"),
                                 prefill=graphs(backend="disabled")))
    runner = types.SimpleNamespace(
        server_args=args, use_mla_backend=True, is_draft_worker=False,
        prefill_attention_backend_str=plugin.NAME, decode_attention_backend_str=plugin.NAME,
        req_to_token_pool=doubles.ReqToTokenPool(6, 64, "cpu", False),
        model_config=types.SimpleNamespace(
            model_path="small", num_attention_heads=HEADS, num_hidden_layers=LAYERS,
            kv_lora_rank=LORA, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=V,
            scaling=SCALE))
    for name, value in changes.items():
        setattr(args if hasattr(args, name) else runner, name, value)
    return runner


class Engine:
    """Schedules by hand: a batch is what the test says."""

    def __init__(self, service, apart=False):
        torch.manual_seed(3)
        self.embedding = torch.randn(50, HIDDEN)
        self.layers = [Layer(index, apart) for index in range(LAYERS)]
        self.runner = runner_of()
        with mock.patch.dict(os.environ, {backend.OPTIONS: '{"target": "none"}'}), \
                mock.patch.object(mla_client.Client, "connect", lambda target, **options: service):
            self.backend = doubles.ATTENTION_BACKENDS[plugin.NAME](self.runner)
        doubles.RadixAttention.backend = self.backend
        self.texts = {name: list(range(first, first + 12))
                      for name, first in (("a", 1), ("b", 20), ("c", 33))}
        self.requests = {}

    def batch(self, rows, mode):
        """Of so many tokens of each request."""
        for name in rows:
            self.requests.setdefault(name, types.SimpleNamespace(req_pool_idx=None, computed=0))
        chosen = [self.requests[name] for name in rows]
        slots = self.runner.req_to_token_pool.alloc(chosen)
        before, new = [each.computed for each in chosen], list(rows.values())
        ends = torch.tensor([b + n for b, n in zip(before, new)])
        batch = doubles.ForwardBatch(mode, len(rows), None, torch.tensor(slots), ends, None,
                                     int(ends.sum()), rids=list(rows))
        batch.positions = torch.tensor([at for b, n in zip(before, new) for at in range(b, b + n)])
        if mode == Mode.DECODE:
            batch.seq_lens_cpu = ends
        else:
            batch.extend_seq_lens, batch.extend_prefix_lens = map(torch.tensor, (new, before))
        return batch

    def run(self, rows, mode=None):
        """Hidden states by request."""
        if mode is None:
            mode = Mode.DECODE if set(rows.values()) == {1} else Mode.EXTEND
        batch = self.batch(rows, mode)
        self.backend.init_forward_metadata(batch)
        tokens = [token for name, count in rows.items() for token in itertools.islice(
            self.texts[name], self.requests[name].computed, self.requests[name].computed + count)]
        x = self.embedding[torch.tensor(tokens)]
        for layer in self.layers:
            x = x + layer(batch.positions, x, batch)
        for name, count in rows.items():
            self.requests[name].computed += count
        return dict(zip(rows, x.split(list(rows.values()))))

    def finish(self, *names, again=False):
        """Requests end, or are put back."""
        for name in names:
            self.runner.req_to_token_pool.free(self.requests[name])
            self.requests[name].computed = 0
            if not again:
                del self.requests[name]

    def whole(self, tokens):
        """Hidden states of a text."""
        x, at = self.embedding[torch.tensor(tokens)], torch.arange(len(tokens))
        for layer in self.layers:
            x = x + layer.whole(at, x)
        return x


class EngineTest(unittest.TestCase):
    def setUp(self):
        self.service = self.make_service()
        plugin.register()
        plugin.register()  # every process calls it, maybe more than once
        self.addCleanup(doubles.ATTENTION_BACKENDS.clear)

    def make_service(self):
        return mla_client.LocalReference(exact=True)

    def engine(self, **options):
        engine = Engine(self.service, **options)
        self.addCleanup(engine.backend._requests.close)
        return engine

    def check(self, engine, hidden, tolerance=1e-4):
        """Hidden states of the last batch."""
        for name, states in hidden.items():
            end = engine.requests[name].computed
            want = engine.whole(engine.texts[name][:end])[end - len(states):]
            np.testing.assert_allclose(states, want, atol=tolerance)

    def sequences(self):
        return sorted(sequence.length for sequence in self.service._sequences.values())

    def test_prompts_pieces_and_tokens(self):
        for apart in (False, True):
            with self.subTest(apart=apart):
                engine = self.engine(apart=apart)
                self.check(engine, engine.run({"a": 5}))
                self.check(engine, engine.run({"b": 3, "c": 2}))
                self.check(engine, engine.run({"a": 1, "b": 1, "c": 1}))
                self.check(engine, engine.run({"b": 4, "a": 1}, Mode.MIXED))
                self.check(engine, engine.run({"c": 1, "b": 1, "a": 1}))
                self.assertEqual(self.sequences(), [4, 8, 9])
                engine.backend._requests.close()

    def test_a_request_that_ended_is_released(self):
        engine = self.engine()
        engine.run({"a": 5, "b": 2})
        engine.finish("a")
        self.check(engine, engine.run({"b": 1}))
        self.assertEqual(self.sequences(), [3])
        self.assertEqual(list(engine.backend._requests._slots), ["b"])

    def test_a_slot_that_another_has_is_not_the_same_request(self):
        engine = self.engine()
        engine.run({"a": 5})
        slot = engine.requests["a"].req_pool_idx
        engine.finish("a")
        engine.runner.req_to_token_pool.free_slots.sort()
        self.check(engine, engine.run({"c": 3}))
        self.assertEqual(engine.requests["c"].req_pool_idx, slot)
        self.assertEqual(self.sequences(), [3])

    def test_a_request_that_was_put_back_begins_again(self):
        for taken in (False, True):  # its slot meanwhile, in the batch in which it is back
            with self.subTest(taken=taken):
                engine = self.engine()
                engine.run({"a": 5, "b": 2})
                engine.finish("a", again=True)
                self.check(engine, engine.run({"b": 1}))
                if taken:
                    engine.runner.req_to_token_pool.free_slots.sort()
                    self.check(engine, engine.run({"c": 2, "a": 6}))
                else:
                    self.check(engine, engine.run({"a": 6}))
                self.check(engine, engine.run({"a": 1, "b": 1}))
                self.assertEqual(self.sequences(), [2, 4, 7] if taken else [4, 7])
                engine.backend._requests.close()

    def test_an_id_may_come_again(self):
        engine = self.engine()
        engine.run({"a": 5})
        engine.finish("a")
        engine.texts["a"] = list(range(30, 42))
        self.check(engine, engine.run({"a": 3}))  # in another slot, then in the same one
        engine.finish("a")
        engine.runner.req_to_token_pool.free_slots.reverse()
        self.check(engine, engine.run({"a": 4}))
        self.assertEqual(self.sequences(), [4])

    def test_two_requests_of_one_id_are_refused(self):
        engine = self.engine()
        engine.run({"a": 5})
        engine.requests["a"] = types.SimpleNamespace(req_pool_idx=None, computed=0)
        with self.assertRaisesRegex(mla_client.FailedPrecondition, "in slot 2, and in 1"):
            engine.run({"a": 3})
        for names, slots in ((("b", "b"), (3, 4)), (("b", "c"), (3, 3)), (("b",), ())):
            with self.assertRaisesRegex(mla_client.FailedPrecondition, "of its own"):
                engine.backend._requests.begin([requests.Scheduled(name, 0, 1) for name in names],
                                               slots)

    def test_rows_that_the_server_lacks_are_refused(self):
        engine = self.engine()
        engine.run({"a": 5})
        engine.requests["b"] = types.SimpleNamespace(req_pool_idx=None, computed=4)
        with self.assertRaisesRegex(mla_client.FailedPrecondition, "4 tokens .* 0 on the server"):
            engine.run({"b": 2}, Mode.EXTEND)
        engine.requests["a"].computed = 3  # nor are rows dropped: no one said that they are wrong
        with self.assertRaisesRegex(mla_client.FailedPrecondition, "3 tokens .* 5 on the server"):
            engine.run({"a": 1})

    def test_schedules_drawn_at_random(self):
        drawn = random.Random(5)
        engine = self.engine()
        for _ in range(100):
            for name, request in list(engine.requests.items()):
                if request.req_pool_idx and (request.computed == 12 or drawn.random() < 0.1):
                    engine.finish(name, again=drawn.random() < 0.5)
            drawn.shuffle(engine.runner.req_to_token_pool.free_slots)
            rows = {}
            for name in drawn.sample("abc", drawn.randint(1, 3)):
                if name not in engine.requests:
                    engine.texts[name] = [drawn.randrange(50) for _ in range(12)]
                left = 12 - getattr(engine.requests.get(name), "computed", 0)
                rows[name] = drawn.choice((1, drawn.randint(1, left)))
            self.check(engine, engine.run(rows))
            alive = [request.computed for request in engine.requests.values() if request.computed]
            self.assertEqual(self.sequences(), sorted(alive))

    def test_requests_that_end_are_released_without_a_pass(self):
        with mock.patch.object(requests, "LOOK_S", 0.02):
            engine = self.engine()
        engine.run({"a": 5, "b": 2})
        time.sleep(0.1)
        self.assertEqual(self.sequences(), [2, 5])
        engine.finish("b")
        deadline = time.monotonic() + 10
        while self.sequences() != [5] and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertEqual(self.sequences(), [5])
        self.check(engine, engine.run({"a": 1}))

    def test_batches_to_warm_up_store_nothing(self):
        engine = self.engine()
        batch = engine.batch({"a": 2}, Mode.DECODE)
        batch.rids = None
        engine.backend.init_forward_metadata(batch)
        x = torch.ones(2, HIDDEN)
        for layer in engine.layers:
            out = layer(torch.arange(2), x, batch)
            self.assertFalse(out.any())
        self.assertEqual(self.sequences(), [])
        self.assertEqual(engine.backend.get_cuda_graph_seq_len_fill_value(), 1)
        engine.run({"a": 2}, Mode.EXTEND)
        with self.assertRaisesRegex(mla_client.FailedPrecondition, "1 are running"):
            engine.backend.init_forward_metadata(batch)

    def test_an_idle_batch_is_none(self):
        engine = self.engine()
        engine.run({"a": 2})
        batch = engine.batch({}, Mode.IDLE)
        engine.backend.init_forward_metadata(batch)
        q, k = torch.ones(0, HEADS, LORA + ROPE), torch.ones(0, 1, LORA + ROPE)
        out = engine.layers[0].attn_mqa(q, k, k[..., :LORA].contiguous(), batch)
        self.assertEqual(out.shape, (0, HEADS * LORA))
        self.check(engine, engine.run({"a": 1}))

    def test_a_pass_that_failed_is_aborted(self):
        engine = self.engine()
        engine.run({"a": 2})
        with mock.patch.object(engine.layers[1], "project", side_effect=RuntimeError("full")):
            with self.assertRaisesRegex(RuntimeError, "full"):
                engine.run({"a": 1})
        with self.assertRaisesRegex(mla_client.FailedPrecondition, "1 of 2 layers"):
            engine.run({"a": 1})
        self.check(engine, engine.run({"a": 1}))

    def test_layers_out_of_turn_are_refused(self):
        engine = self.engine()
        engine.run({"a": 2})
        batch = engine.batch({"a": 1}, Mode.DECODE)
        for begun, layer in ((False, 0), (True, 1)):
            if begun:
                engine.backend.init_forward_metadata(batch)
            with self.assertRaisesRegex(mla_client.FailedPrecondition, "must be 0 of a pass"):
                engine.layers[layer](torch.arange(1), torch.ones(1, HIDDEN), batch)
        with self.assertRaisesRegex(mla_client.FailedPrecondition, "got 3 rows, must be the 1"):
            engine.layers[0](torch.arange(3), torch.ones(3, HIDDEN), batch)

    def test_layers_that_do_not_fit(self):
        engine = self.engine()
        mqa = engine.layers[0].attn_mqa
        for change in ({"head_dim": NOPE + ROPE, "v_head_dim": V}, {"tp_k_head_num": HEADS},
                       {"scaling": SCALE * 1.01}, {"logit_cap": 30.0}, {"tp_q_head_num": 1}):
            with mock.patch.multiple(mqa, **change):
                with self.assertRaisesRegex(mla_client.Unimplemented, "must be"):
                    engine.backend.forward_extend(None, None, None, mqa, None)
        with self.assertRaisesRegex(mla_client.Unimplemented, "topk_indices"):
            engine.backend.forward_decode(None, None, None, mqa, None, topk_indices=1, sinks=None)
        with self.assertRaisesRegex(mla_client.Unimplemented, "kept elsewhere"):
            engine.backend.forward_decode(None, None, None, mqa, None, False)

    def test_graphs_and_modes_that_are_refused(self):
        engine = self.engine()
        with self.assertRaisesRegex(mla_client.Unimplemented, "CUDA graphs"):
            engine.backend.init_cuda_graph_state(1, 1)
        with self.assertRaisesRegex(mla_client.Unimplemented, "CUDA graphs"):
            engine.backend.init_forward_metadata_out_graph(engine.batch({"a": 1}, Mode.DECODE),
                                                           in_capture=True)
        for mode in set(Mode) - {Mode.EXTEND, Mode.DECODE, Mode.MIXED, Mode.IDLE}:
            with self.assertRaisesRegex(mla_client.Unimplemented, mode.name):
                engine.backend.init_forward_metadata(engine.batch({"a": 1}, mode))

    def test_the_end_of_an_engine(self):
        engine = self.engine()
        engine.run({"a": 2})
        with mock.patch.object(self.service, "close"):
            engine.backend.close()
        self.assertEqual(self.sequences(), [])


class ServerTest(EngineTest):
    """The same over a server, whose cache rounds rows to bf16."""

    @classmethod
    def setUpClass(cls):
        cls.server = server_binary.start()

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def make_service(self):
        client = mla_client.Client.connect(self.server.target,
                                           tenant=f"{self.id()[-40:]}-{os.urandom(3).hex()}")
        self.addCleanup(client.close)
        return client

    def check(self, engine, hidden, tolerance=0.1):
        super().check(engine, hidden, tolerance)

    def sequences(self):
        return sorted(state.length for state in self.service.sequences())


class StartTest(unittest.TestCase):
    def setUp(self):
        self.addCleanup(doubles.ATTENTION_BACKENDS.clear)

    def test_a_choice_of_the_command_line(self):
        plugin.register()
        self.assertEqual(doubles.ATTENTION_BACKEND_CHOICES.count(plugin.NAME), 1)

    def test_another_plugin_is_not_replaced(self):
        doubles.ATTENTION_BACKENDS[plugin.NAME] = object
        with self.assertRaisesRegex(RuntimeError, "registered already"):
            plugin.register()

    def test_what_the_engine_must_not_do(self):
        graphs = types.SimpleNamespace
        on, off = graphs(backend="full"), graphs(backend="disabled")
        for change, reason in (
                ({"use_mla_backend": False}, "not MLA"), ({"is_draft_worker": True}, "speculative"),
                ({"speculative_algorithm": "EAGLE"}, "speculative"), ({"tp_size": 2}, "tensor"),
                ({"pp_size": 2}, "pipeline"), ({"enable_dp_attention": True}, "data-parallel"),
                ({"disable_radix_cache": False}, "radix"),
                ({"disable_overlap_schedule": False}, "overlap scheduler"),
                ({"cuda_graph_config": graphs(decode=on, prefill=off)}, "graphs of decoding"),
                ({"cuda_graph_config": graphs(decode=off, prefill=on)}, "graphs of prefill"),
                ({"enable_two_batch_overlap": True}, "two-batch"),
                ({"enable_pdmux": True}, "apart"), ({"disaggregation_mode": "decode"}, "apart"),
                ({"kv_cache_dtype": "fp8_e4m3"}, "quantised"),
                ({"prefill_attention_backend_str": "triton"}, "another backend")):
            with self.assertRaisesRegex(mla_client.Unimplemented, reason):
                backend.RemoteMlaBackend(runner_of(**change))

    def test_options_of_the_environment(self):
        seen = {}

        def connect(**options):
            seen.update(options)
            return mla_client.LocalReference()

        for text in (None, "[]", "unix:/run/mla.sock", '{"model_id": "m"}'):
            with mock.patch.dict(os.environ, {backend.OPTIONS: text} if text else {}):
                if text is None:
                    os.environ.pop(backend.OPTIONS, None)
                with self.assertRaisesRegex(mla_client.InvalidArgument, "must be JSON"):
                    backend.RemoteMlaBackend(runner_of())
        given = {"target": "t", "tenant": "me", "model_id": "m"}
        with mock.patch.dict(os.environ, {backend.OPTIONS: json.dumps(given)}), \
                mock.patch.object(mla_client.Client, "connect", connect):
            made = backend.RemoteMlaBackend(runner_of())
        self.addCleanup(made._requests.close)
        self.assertEqual(seen, {"target": "t", "tenant": "me", "lease_ms": backend.LEASE_MS})
        self.assertEqual(made._model.model_id, "m")


class SignatureTest(unittest.TestCase):
    def test_the_doubles_have_those_of_sglang(self):
        self.assertEqual(sglang_signatures.differences(), [])

    def test_overrides_take_what_sglang_gives(self):
        for name, function in inspect.getmembers(doubles.AttentionBackend, inspect.isfunction):
            own = vars(backend.RemoteMlaBackend).get(name)
            if own is not None:
                self.assertEqual(library_signatures.parameters(own),
                                 library_signatures.parameters(function), name)


if __name__ == "__main__":
    unittest.main()
