"""mla_client.vllm on doubles of vLLM: a small engine schedules passes, and hidden states must be
those of whole texts with attention computed here."""

import inspect
import os
import types
import unittest
from unittest import mock

import doubles
import mla_client
import numpy as np
import server_binary
import torch
import vllm_signatures
from torch import nn

doubles.install()

# pylint: disable=wrong-import-position
from mla_client.vllm import connector, layer, plugin, requests
from mla_client.vllm.runtime import layer_of, runtime
from tests import library_signatures

HIDDEN, HEADS, LAYERS, LORA, ROPE, NOPE, V = 24, 2, 2, 32, 8, 16, 12
BLOCK = 4


class Linear(nn.Linear):
    """vLLM's linear layers return their bias as well."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=inputs ** -0.5)

    def forward(self, x):
        return super().forward(x), None


def rotary(positions, q, k):
    """Turns pairs of halves."""
    def turn(x):
        half = x.shape[-1] // 2
        angle = positions[:, None, None] * 100.0 ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    return turn(q), turn(k)


def norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def config(**changes):
    """An engine's configuration."""
    fields = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1,
              "decode_context_parallel_size": 1, "enable_prefix_caching": False,
              "cache_dtype": "auto", "async_scheduling": False, "speculative_config": None,
              "target": "none", "extra": {"prefix_cache": False}, **changes}
    names = types.SimpleNamespace
    return names(
        parallel_config=names(**{name: fields[name] for name in list(fields)[:3]}),
        cache_config=names(enable_prefix_caching=fields["enable_prefix_caching"],
                           cache_dtype=fields["cache_dtype"], block_size=BLOCK),
        scheduler_config=names(async_scheduling=fields["async_scheduling"]),
        speculative_config=fields["speculative_config"],
        model_config=names(model="small", revision=None, dtype=torch.float32, quantization=None),
        kv_transfer_config=names(engine_id="e", kv_connector_extra_config={
            "target": fields["target"], **fields["extra"]}))


class Engine:
    """Schedules by hand: a pass is what the test says."""

    def __init__(self, service, q_lora=6, **changes):
        torch.manual_seed(3)
        self.embedding = nn.Embedding(50, HIDDEN)
        self.layers = []
        for index in range(LAYERS):
            wide = HEADS * (NOPE + ROPE)
            modules = doubles.MLAModules(
                norm, Linear(LORA, HEADS * (NOPE + V)), rotary, Linear(HEADS * V, HIDDEN),
                Linear(HIDDEN, (q_lora or 0) + LORA + ROPE) if q_lora else None,
                None if q_lora else Linear(HIDDEN, LORA + ROPE), norm if q_lora else None,
                Linear(q_lora, wide) if q_lora else None, None if q_lora else Linear(HIDDEN, wide),
                None, False, None)
            self.layers.append(doubles.MultiHeadLatentAttentionWrapper(
                HIDDEN, HEADS, (NOPE + ROPE) ** -0.5, NOPE, ROPE, V, q_lora, LORA, modules,
                prefix=f"model.layers.{index}.self_attn"))
            self.layers[-1].mla_attn.process_weights_after_loading(torch.float32)
        role = doubles.KVConnectorRole
        self.scheduler = connector.MlaServerConnector(config(**changes), role.SCHEDULER, None)
        self.worker = connector.MlaServerConnector(config(**changes), role.WORKER, None)
        with mock.patch.object(mla_client.Client, "connect", lambda target, **options: service):
            self.worker.register_kv_caches({})
        self.texts, self.computed, self.blocks, self.next_block = {}, {}, {}, 100

    def run(self, rows, finished=(), resumed=(), preempted=None, order=None):
        """A pass of `rows` tokens of each request; hidden states by request."""
        new, cached = [], []
        for request in rows:
            known = request in self.blocks
            if not known or request in resumed:
                self.blocks[request], self.next_block = self.next_block, self.next_block + 7
            (cached if known else new).append(request)
        output = doubles.SchedulerOutput(
            [doubles.NewRequestData(request, None, [], None, None, ([self.blocks[request]],),
                                    self.computed.setdefault(request, 0), None)
             for request in new],
            doubles.CachedRequestData(
                cached, set(resumed), [], {}, [([self.blocks[request]],) if request in resumed
                                               else None for request in cached],
                [self.computed[request] for request in cached], []),
            dict(rows), sum(rows.values()), {}, {}, [], set(finished), [],
            None if preempted is None else set(preempted))
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        order = order or sorted(rows, key=lambda request: rows[request] > 1)  # decodes first
        hidden = self.forward(rows, order)
        self.worker.clear_connector_metadata()
        for request, count in rows.items():
            self.computed[request] += count
        return hidden

    def forward(self, rows, order):
        tokens, positions = [], []
        for request in order:
            begin = self.computed[request]
            tokens += self.texts[request][begin:begin + rows[request]]
            positions += range(begin, begin + rows[request])
        doubles.forward_context.attn_metadata = self.metadata(rows, order)
        self.worker.start_load_kv(doubles.forward_context)
        x = self.embedding(torch.tensor(tokens + [0, 0], dtype=torch.long))  # padded, as for graphs
        at = torch.tensor(positions + [0, 0])
        with torch.no_grad():
            for each in self.layers:
                self.worker.wait_for_layer_load(each.prefix)
                x = x + each(at, x)
                self.worker.save_kv_layer(each.prefix, None, None)
        self.worker.wait_for_save()
        begins = np.cumsum([0] + [rows[request] for request in order])
        return {request: x[begins[index]:begins[index + 1]]
                for index, request in enumerate(order)}

    def metadata(self, rows, order):
        counts = [rows[request] for request in order]
        tables = torch.tensor([[self.blocks[request], 0] for request in order] + [[0, 0]])
        decodes = sum(count == 1 for count in counts)
        metadata = types.SimpleNamespace(
            num_actual_tokens=sum(counts), num_decodes=decodes,
            num_prefills=len(order) - decodes,
            query_start_loc=torch.tensor([0, *np.cumsum(counts), sum(counts)]),
            decode=types.SimpleNamespace(block_table=tables[:decodes]),
            prefill=types.SimpleNamespace(block_table=tables[decodes:]))
        return {f"{each.prefix}.attn": metadata for each in self.layers}

    def whole(self, tokens):
        """Hidden states of a text with attention computed here."""
        x, at = self.embedding(torch.tensor(tokens)), torch.arange(len(tokens))
        with torch.no_grad():
            for each in self.layers:
                remote = each.mla_attn
                with mock.patch.object(type(remote), "forward", lambda *a, e=each, **k:
                                       self.attention(e, *a[1:4])):
                    x = x + each(at, x)
        return x

    @staticmethod
    def attention(each, q, kv, k_pe):
        expanded = each.kv_b_proj(kv)[0].view(len(kv), HEADS, NOPE + V)
        key = torch.cat((expanded[..., :NOPE], k_pe.expand(-1, HEADS, -1)), dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q, key) * (NOPE + ROPE) ** -0.5
        hidden = torch.ones(len(kv), len(kv)).triu(1).bool()
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khv->qhv", weights, expanded[..., NOPE:]).reshape(len(kv), -1)


class EngineTest(unittest.TestCase):
    def setUp(self):
        self.service = self.make_service()
        with mock.patch.dict(os.environ, {plugin.SWITCH: "1"}):
            plugin.register()
            plugin.register()  # every process calls it, maybe more than once
        self.addCleanup(doubles.op_registry_oot.clear)
        self.addCleanup(runtime.close)

    def make_service(self):
        return mla_client.LocalReference(exact=True)

    def engine(self, **changes):
        engine = Engine(self.service, **changes)
        engine.texts = {name: list(range(first, first + 12))
                        for name, first in (("a", 1), ("b", 20), ("c", 33))}
        return engine

    def check(self, engine, hidden, tolerance=1e-4):
        """Hidden states of the last pass."""
        for request, states in hidden.items():
            end = engine.computed[request]
            want = engine.whole(engine.texts[request][:end])[end - len(states):]
            np.testing.assert_allclose(states, want, atol=tolerance)

    def sequences(self):
        return sorted(sequence.length for sequence in self.service._sequences.values())

    def test_prompts_pieces_and_tokens_together(self):
        engine = self.engine()
        self.check(engine, engine.run({"a": 5}))
        self.check(engine, engine.run({"b": 3, "a": 1}))           # a decodes, b begins
        self.check(engine, engine.run({"b": 4, "c": 6, "a": 1}))   # b goes on with its prompt
        self.check(engine, engine.run({"a": 1, "b": 1, "c": 1}, order=["c", "a", "b"]))
        self.assertEqual(self.sequences(), [7, 8, 8])

    def test_queries_without_low_rank(self):
        engine = self.engine(q_lora=None)
        self.check(engine, engine.run({"a": 4, "b": 1}))

    def test_a_finished_request_is_released(self):
        engine = self.engine()
        engine.run({"a": 5, "b": 2})
        self.check(engine, engine.run({"b": 1}, finished=["a"]))
        self.assertEqual(self.sequences(), [3])
        engine.run({}, finished=["b"])
        self.assertEqual(self.sequences(), [])

    def test_a_preempted_request_begins_again(self):
        for preempted in (None, ["a"]):  # older engines do not say so
            with self.subTest(preempted=preempted):
                engine = self.engine()
                engine.run({"a": 5, "b": 2})
                engine.run({"b": 1}, preempted=preempted)
                self.assertEqual(self.sequences(), [3] if preempted else [3, 5])
                engine.computed["a"] = 0
                self.check(engine, engine.run({"a": 6}, resumed=["a"]))
                runtime.close()
                self.service = self.make_service()

    def test_drafts_are_verified_with_the_next_plan(self):
        engine = self.engine(speculative_config=object())
        engine.run({"a": 4, "b": 3})
        engine.texts["a"][5:8] = [40, 41, 42]        # three drafts behind a token
        engine.run({"a": 4, "b": 1})
        engine.texts["a"][5:8] = [40, 6, 7]          # the first was right
        engine.computed["a"] = 6
        with mock.patch.object(self.service, "_truncate") as truncate:
            self.check(engine, engine.run({"a": 2, "b": 1}))
        truncate.assert_not_called()
        engine.computed["a"] = 6                     # neither was right, and it has to wait
        self.check(engine, engine.run({"b": 1}))
        self.check(engine, engine.run({"a": 1}))

    def test_a_pass_without_requests_computes_nothing(self):
        engine = self.engine()
        engine.run({"a": 2})
        for metadata in (None, engine.metadata({"a": 2}, ["a"])):  # to measure, to warm up
            doubles.forward_context.attn_metadata = metadata
            q = torch.ones(2, HEADS, NOPE + ROPE)
            out = engine.layers[0].mla_attn(q, torch.ones(2, LORA), torch.ones(2, 1, ROPE),
                                            output_shape=(2, HEADS * V))
            self.assertFalse(out.any())

    def test_pages_are_one_byte_a_token(self):
        spec = self.engine().layers[0].mla_attn.get_kv_cache_spec(config())
        self.assertEqual((spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype),
                         (BLOCK, 1, 1, torch.uint8))

    def test_compiled_graphs_call_the_operator(self):
        engine = self.engine()
        calls = []
        for each in engine.layers:
            each.mla_attn.use_direct_call = False

        def operator(q, kv_c_normed, k_pe, output, layer_name):
            calls.append(layer_name)
            metadata = doubles.forward_context.attn_metadata[layer_name]
            doubles.static_forward_context[layer_name].forward_impl(
                q, kv_c_normed, k_pe, None, metadata, output=output)

        space = types.SimpleNamespace(unified_mla_attention_with_output=operator)
        with mock.patch.object(torch, "ops", types.SimpleNamespace(vllm=space)):
            hidden = engine.run({"a": 3})
        self.check(engine, hidden)
        self.assertEqual(calls, ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"])

    def test_prefix_hits_of_the_engine_are_refused(self):
        engine = self.engine()
        engine.computed["a"] = 4
        with self.assertRaisesRegex(mla_client.FailedPrecondition, "prefix caching"):
            engine.run({"a": 2})

    def test_a_batch_that_is_not_the_plan_is_refused(self):
        engine = self.engine()
        engine.run({"a": 2})
        engine.blocks["b"] = 1
        with self.assertRaisesRegex(mla_client.Internal, "the plan"):
            requests.PassPlan((requests.Planned("b", 0, 3, 1),)).in_order([1], [2])

    def test_a_pass_that_failed_is_aborted(self):
        engine = self.engine()
        engine.run({"a": 2})
        with mock.patch.object(engine.layers[1].mla_attn, "forward_impl",
                               side_effect=RuntimeError("full")):
            with self.assertRaisesRegex(RuntimeError, "full"):
                engine.run({"a": 1})
        with self.assertRaisesRegex(mla_client.FailedPrecondition, "1 of 2 layers"):
            engine.run({"a": 1})
        self.check(engine, engine.run({"a": 1}))

    def test_what_the_engine_must_not_do(self):
        for change, reason in (({"tensor_parallel_size": 2}, "tensor parallelism"),
                               ({"pipeline_parallel_size": 2}, "pipeline"),
                               ({"decode_context_parallel_size": 2}, "context parallelism"),
                               ({"enable_prefix_caching": True}, "prefix caching"),
                               ({"async_scheduling": True}, "asynchronous"),
                               ({"cache_dtype": "fp8"}, "quantised KV cache")):
            with self.assertRaisesRegex(mla_client.Unimplemented, reason):
                connector.MlaServerConnector(config(**change), doubles.KVConnectorRole.WORKER, None)

    def test_layers_that_do_not_fit(self):
        engine = self.engine()
        attention = engine.layers[0].mla_attn
        with self.assertRaisesRegex(mla_client.Unimplemented, "quantised outputs"):
            attention.forward_impl(None, None, None, None, None, None, output_scale=1)
        with self.assertRaisesRegex(mla_client.Unimplemented, "AITER"):
            with mock.patch.object(doubles.MLAAttention, "process_weights_after_loading"):
                attention.process_weights_after_loading(torch.float32)
        with self.assertRaisesRegex(mla_client.Unimplemented, "sparse"):
            layer.RemoteMLAAttention(1, 1.0, 1, 1, 1, None, 1, None, use_sparse=True)
        self.assertEqual(layer_of("model.layers.13.self_attn.attn"), 13)
        with self.assertRaisesRegex(mla_client.Unimplemented, "one number"):
            layer_of("model.layers.1.parts.2.attn")

    def test_nothing_is_cached_by_the_connector(self):
        engine = self.engine()
        request = types.SimpleNamespace(lora_request=1)
        self.assertEqual(engine.scheduler.get_num_new_matched_tokens(request, 0), (0, False))
        self.assertTrue(engine.worker.requires_piecewise_for_cudagraph({}))
        engine.run({"a": 2})
        engine.scheduler.shutdown()
        self.assertEqual(self.sequences(), [2])
        with mock.patch.object(self.service, "close"):
            engine.worker.shutdown()
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


class PluginTest(unittest.TestCase):
    def test_an_installed_package_changes_nothing(self):
        with mock.patch.dict(os.environ):
            os.environ.pop(plugin.SWITCH, None)
            plugin.register()
        self.assertEqual(doubles.op_registry_oot, {})

    def test_another_plugin_is_not_replaced(self):
        self.addCleanup(doubles.op_registry_oot.clear)
        doubles.op_registry_oot["MultiHeadLatentAttentionWrapper"] = object
        with mock.patch.dict(os.environ, {plugin.SWITCH: "1"}):
            with self.assertRaisesRegex(RuntimeError, "replaced already"):
                plugin.register()


class SignatureTest(unittest.TestCase):
    def test_the_doubles_have_those_of_vllm(self):
        self.assertEqual(vllm_signatures.differences(), [])

    def test_overrides_take_what_vllm_gives(self):
        for mine, base in ((layer.RemoteMLAAttention, doubles.MLAAttention),
                           (layer.RemoteMlaWrapper, doubles.MultiHeadLatentAttentionWrapper),
                           (connector.MlaServerConnector, doubles.KVConnectorBase_V1)):
            for name, function in inspect.getmembers(base, inspect.isfunction):
                own = vars(mine).get(name)
                if own is None or library_signatures.parameters(own) == ["*args", "**kwargs"]:
                    continue
                self.assertEqual(library_signatures.parameters(own),
                                 library_signatures.parameters(function), f"{mine}.{name}")


if __name__ == "__main__":
    unittest.main()
