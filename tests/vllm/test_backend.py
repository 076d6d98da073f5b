"""Parts of the adapter that vLLM's CPU platform never calls, on doubles of its configuration: lists
of an indexer, quantised weights, refusals and salts. Classes of vLLM are the real ones."""

import copy
import types
import unittest
from unittest import mock

import msgspec
import torch
from vllm.distributed import kv_events

import server_binary
from mla_client import errors
from mla_client.pages import block_events
from mla_client.serving import (Admission, BatchPlan, Given, Link, PassPlan, Planner,
                                Scheduled)
from mla_client.types import Geometry
from mla_client.vllm import backend, checks, connector, plugin
from mla_client.vllm.runtime import Runtime, runtime
from mla_client.vllm.weights import Layer

INPUTS = (".bazel/bin/server/mla-server", "client/python", "tests/engines", "tests/vllm")
ENVIRONMENT = "vllm"
HEADS, LORA, ROPE, NOPE, V = 4, 512, 64, 16, 16
LAYERS, TOP_K, BLOCK = 2, 8, 4
SCALE = (NOPE + ROPE) ** -0.5
# The server keeps rows in bf16.
TOLERANCE = 2e-2


def space(**parts):
    """A double of a configuration."""
    return types.SimpleNamespace(**parts)


def config(target="unix:/nowhere", top_k=0, **changes):
    """A double of VllmConfig; `changes` are of its parts, as cache_config={"cache_dtype": "x"}."""
    text = space(num_hidden_layers=LAYERS, index_topk=top_k, kv_lora_rank=LORA,
                 qk_rope_head_dim=ROPE, rope_parameters={"rope_type": "default"})
    parts = {
        "model_config": space(hf_text_config=text, model="m", dtype=torch.float32, revision="r",
                              quantization=None, hf_overrides={}),
        "parallel_config": space(rank=0, tensor_parallel_size=1, pipeline_parallel_size=1,
                                 enable_expert_parallel=False),
        "cache_config": space(cache_dtype="auto", kv_cache_memory_bytes=None, block_size=BLOCK),
        "kv_transfer_config": space(kv_connector="MlaServerConnector", engine_id="e",
                                    kv_connector_extra_config={"target": target}),
        "compilation_config": space(mode=0, custom_ops=["none"], backend=""),
        "kernel_config": space(ir_op_priority="native"),
        "device_config": space(device_type="cpu"), "lora_config": None,
        "speculative_config": None, "scheduler_config": space(async_scheduling=False)}
    for name, values in changes.items():
        parts[name] = space(**{**vars(parts[name] or space()), **values})
    return space(**parts)


def projection(layer, seed=0):
    """A kv_b_proj that is not quantised."""
    generator = torch.Generator().manual_seed(100 * seed + layer)
    weight = torch.randn(HEADS * (NOPE + V), LORA, generator=generator) * LORA ** -0.5
    return space(prefix=f"model.layers.{layer}.self_attn.kv_b_proj", weight=weight,
                 quant_method=None)


class ListsTest(unittest.TestCase):
    """Rows that attend to the positions of a list, over a real server."""

    def setUp(self):
        self.server = server_binary.start()
        self.addCleanup(self.server.stop)
        self.config = config(self.server.target, TOP_K)
        patched = mock.patch.object(backend, "get_current_vllm_config", lambda: self.config)
        patched.start()
        self.addCleanup(patched.stop)
        self.addCleanup(runtime.close)
        self.chosen = torch.full((32, TOP_K), -1, dtype=torch.int32)
        self.layers = [backend.MlaServerBackend.get_impl_cls()(
            HEADS, LORA + ROPE, SCALE, 1, None, None, "auto", None, "decoder", None,
            kv_lora_rank=LORA, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V,
            kv_b_proj=projection(layer), indexer=None, topk_indices_buffer=self.chosen)
            for layer in range(LAYERS)]
        runtime.start()
        link = Link(checks.options_of(self.config))
        self.planner = Planner(Admission(link, "s", False), BLOCK)
        self.addCleanup(link.close)
        self.pages = [torch.zeros(16, BLOCK, LORA + ROPE) for _ in range(LAYERS)]
        self.rows = {}  # by request and layer: all rows so far
        self.generator = torch.Generator().manual_seed(7)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def run_pass(self, given, gone=()):
        """A pass with lists of random positions; returns the largest error of an output, and how
        far outputs would be if all positions counted."""
        plan = self.planner.plan(given, gone)
        runtime.bind(plan)
        slots, rows = [], []
        for each in given:
            blocks = self.planner._blocks[each.request]
            rows.append(each.new)
            slots += [blocks[at // BLOCK] * BLOCK + at % BLOCK
                      for at in range(each.computed, each.computed + each.new)]
        metadata = backend.Metadata(
            len(slots), len(rows), len(rows), torch.tensor(slots), rows, BLOCK, None, None,
            max(rows), 0, None)
        worst = dense = 0.0
        for number, (layer, pages) in enumerate(zip(self.layers, self.pages)):
            kv, rope = self.random(len(slots), LORA), self.random(len(slots), 1, ROPE)
            q = self.random(len(slots), HEADS, LORA), self.random(len(slots), HEADS, ROPE)
            layer.do_kv_cache_update(kv, rope, pages, metadata.slots, "auto", None)
            want, every, at = [], [], 0
            for each in given:
                known = self.rows.setdefault((each.request, number), torch.zeros(0, LORA + ROPE))
                known = torch.cat((known[:each.computed], torch.cat(
                    (kv[at:at + each.new], rope[at:at + each.new, 0]), dim=-1)))
                self.rows[each.request, number] = known
                for row in range(each.new):
                    sees = each.computed + row + 1
                    some = torch.randperm(sees, generator=self.generator)[:TOP_K // 2]
                    self.chosen[at + row] = -1
                    self.chosen[at + row, :len(some)] = some
                    mine = torch.cat([part[at + row] for part in q], dim=-1)
                    want.append(self.attention(mine, known[some]))
                    every.append(self.attention(mine, known[:sees]))
                at += each.new
            got, _ = layer.forward_mqa(q, pages, metadata, None)
            worst = max(worst, float((got - torch.stack(want)).abs().max()))
            dense = max(dense, float((torch.stack(every) - torch.stack(want)).abs().max()))
        runtime.finish()
        return worst, dense

    @staticmethod
    def attention(q, rows):
        return ((q @ rows.T) * SCALE).softmax(-1) @ rows[:, :LORA]

    def test_each_row_attends_to_its_positions(self):
        new = [Given("a", 0, 11, (1, 2, 3), begins=True), Given("b", 0, 5, (5, 6), begins=True)]
        for given in (new, [Given("b", 5, 1), Given("a", 11, 1)], [Given("a", 12, 1, (9,))]):
            worst, dense = self.run_pass(given)
            self.assertLess(worst, TOLERANCE)
            self.assertGreater(dense, 20 * TOLERANCE)  # the lists matter
        self.assertEqual(runtime.lost_blocks(), set())

    def test_what_no_worker_can_compute_is_lost(self):
        """Without a server even a first pass counts for nothing: no rows are computed here."""
        self.run_pass([Given("a", 0, 6, (1, 2), begins=True)])
        self.server.kill()
        worst, _ = self.run_pass([Given("b", 0, 6, (4, 5), begins=True)])
        self.assertGreater(worst, TOLERANCE)
        self.assertEqual(runtime.lost_blocks(), {4})

    def test_pages_keep_the_rows_that_are_read_back(self):
        spec = space(head_size=LORA + ROPE)
        self.assertIs(backend.MlaServerBackend.customize_spec(spec), spec)
        self.assertTrue(backend.MlaServerBackend.is_sparse())
        self.config = config(self.server.target)
        self.assertIs(backend.MlaServerBackend.get_impl_cls(), backend.Impl)

    def test_rows_of_padding_are_not_kept(self):
        pages = torch.zeros(2, BLOCK, LORA + ROPE)
        self.layers[0].do_kv_cache_update(torch.ones(2, LORA), torch.ones(2, 1, ROPE), pages,
                                          torch.tensor([5, -1]), "auto", None)
        self.assertEqual(int(pages.flatten(0, 1).sum(-1).count_nonzero()), 1)
        self.assertEqual(float(pages[1, 1].sum()), LORA + ROPE)


class DraftsTest(unittest.TestCase):
    """A draft model is built after the other one, with a configuration of its own."""

    def setUp(self):
        self.server = server_binary.start()
        self.addCleanup(self.server.stop)
        self.addCleanup(runtime.close)

    def build(self, given, layer):
        with mock.patch.object(backend, "get_current_vllm_config", lambda: given):
            return backend.Impl(
                HEADS, LORA + ROPE, SCALE, 1, None, None, "auto", None, "decoder", None,
                kv_lora_rank=LORA, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V,
                kv_b_proj=projection(layer))

    def test_its_layers_are_refused_and_the_models_stay(self):
        for method, layer in (("eagle", LAYERS), ("mtp", LAYERS), ("draft_model", 0)):
            with self.subTest(method=method):
                given = config(self.server.target, speculative_config={"method": method})
                for number in range(LAYERS):
                    self.build(given, number)
                worker, drafts = runtime.worker, copy.copy(given)
                if method == "draft_model":
                    drafts.model_config = copy.copy(given.model_config)
                for one in given, drafts:  # releases before 0.29 have one for both
                    if one is given and method == "draft_model":
                        continue
                    with self.assertRaisesRegex(errors.Unimplemented, "a layer of the draft model"):
                        self.build(one, layer)
                self.assertIs(runtime.worker, worker)
                self.assertEqual(len(runtime.layers), LAYERS)

    def test_another_engine_of_the_process_is_none_of_them(self):
        for _ in range(2):
            self.build(config(self.server.target, speculative_config={"method": "eagle"}), 0)
            self.assertEqual(len(runtime.layers), 1)


class QuantisedTest(unittest.TestCase):
    """Weights of a checkpoint in eight bits, with a scale for each block of them."""

    def setUp(self):
        from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
        generator = torch.Generator().manual_seed(3)
        rows, block = 256, 128
        plain = torch.randn(rows, LORA, generator=generator)
        scales = torch.rand(rows // block, LORA // block, generator=generator) + 0.5
        whole = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
        codes = (plain / whole).to(torch.float8_e4m3fn)
        self.plain = codes.float() * whole
        self.geometry = Geometry(2, LORA, ROPE, 64, 64)

        class Method(Fp8LinearMethod):
            """It computes as a kernel for these weights would, whatever order they lie in."""
            use_marlin = use_deep_gemm = False
            block_quant = True

            def __init__(self, matrix):
                self.matrix = matrix

            def apply(self, layer, x, bias=None):
                scale = x.abs().amax(-1, keepdim=True) / 448
                return ((x / scale).to(torch.float8_e4m3fn).float() * scale) @ self.matrix.T
        self.method = Method
        self.proj = space(weight=codes, weight_scale_inv=scales, weight_block_size=[block, block],
                          quant_method=Method(self.plain), input_size_per_partition=LORA)

    def weights(self):
        w_uk, w_uv = Layer(self.geometry, self.proj, torch.float32).weights()
        return torch.cat((w_uk, w_uv.transpose(1, 2)), dim=1).reshape(256, LORA)

    def test_scales_are_applied(self):
        torch.testing.assert_close(self.weights(), self.plain)

    def test_weights_that_a_kernel_has_packed_are_read_through_the_layer(self):
        self.proj.weight = self.proj.weight.view(32, 8, LORA).transpose(0, 1).reshape(256, LORA)
        torch.testing.assert_close(self.weights(), self.plain, rtol=1e-4, atol=1e-4)

    def test_weights_that_cannot_be_read_are_refused_by_name(self):
        answers = iter((torch.zeros(4, 256), self.plain.T, torch.zeros(4, 256)))
        self.proj.quant_method.apply = lambda layer, x, bias=None: next(answers)
        with self.assertRaisesRegex(errors.Unimplemented, "cannot be read back from Method"):
            self.weights()


class PagesTest(unittest.TestCase):
    def test_pages_are_bounded_where_all_of_them_are_small(self):
        """A draft model's pages have its rows: a bound for pages of a byte would be far too low."""
        worker = space(rows_of_pool=lambda row_dim, layers: 1000)
        for drafts, want in ((None, 1000 * LAYERS + BLOCK * LAYERS),
                             ({"method": "ngram"}, 1000 * LAYERS + BLOCK * LAYERS),
                             ({"method": "mtp"}, None), ({"method": "eagle"}, None)):
            runtime._config = config(**({} if drafts is None else {"speculative_config": drafts}))
            self.addCleanup(runtime.close)
            runtime._bound_pages(worker)
            self.assertEqual(runtime._config.cache_config.kv_cache_memory_bytes, want)
        runtime._config = config(cache_config={"kv_cache_memory_bytes": 5})
        runtime._bound_pages(worker)
        self.assertEqual(runtime._config.cache_config.kv_cache_memory_bytes, 5)


    def test_pages_before_a_draft_models_keep_those_aligned(self):
        """They lie in one buffer, in which a kernel for CPUs reads aligned vectors of 64 bytes."""
        self.addCleanup(runtime.close)
        for drafts, size, want in ((None, 16, 16), ({"method": "ngram"}, 16, 16),
                                   ({"method": "eagle"}, 16, 64), ({"method": "mtp"}, 24, 192),
                                   ({"method": "draft_model"}, 128, 128)):
            runtime._config = config(**({} if drafts is None else {"speculative_config": drafts}))
            self.assertEqual(runtime.token_bytes(size) * size, want, drafts)


class PassesTest(unittest.TestCase):
    def test_a_pass_without_tokens_is_finished_once(self):
        """Some releases never ask for it: what has ended would keep the room others wait for."""
        gone, rows = PassPlan(1, gone=("a",)), PassPlan(2, (Scheduled("b", 0, 1),))
        for plan, asks, want in ((gone, False, 1), (gone, True, 1), (rows, False, 0)):
            with self.subTest(plan=plan, asks=asks):
                worker = mock.Mock(made=None)
                new = Runtime()
                new.worker, new._config = worker, space(
                    scheduler_config=space(async_scheduling=False))
                new.bind(BatchPlan(plan, {}, {}, ()))
                if asks:
                    new.finish()
                new.bind(None)
                self.assertEqual((worker.begin.call_count, worker.end.call_count), (want, want))
                self.assertIsNone(new.plan)


class ChecksTest(unittest.TestCase):
    def test_what_is_refused_is_named(self):
        for changes, text in (
                ({"lora_config": {"target_modules": None}}, "LoRA of kv_b_proj"),
                ({"lora_config": {"target_modules": ["o_proj", "kv_b_proj"]}}, "LoRA of kv_b_proj"),
                ({"cache_config": {"cache_dtype": "fp8"}}, "a quantised KV cache"),
                ({"parallel_config": {"enable_dbo": True}}, "dual-batch overlap"),
                ({"parallel_config": {"decode_context_parallel_size": 2}}, "decode context"),
                ({"parallel_config": {"prefill_context_parallel_size": 2}}, "prefill context"),
                ({"kv_transfer_config": {"kv_connector": "Other"}}, "without the KV connector")):
            with self.assertRaisesRegex(errors.Unimplemented, text):
                checks.check(config(**changes))
        with self.assertRaisesRegex(errors.Unimplemented, "whose indexer chooses positions"):
            checks.check(config(top_k=8, parallel_config={"pipeline_parallel_size": 2}))
        checks.check(config())
        checks.check(config(lora_config={"target_modules": ["q_proj", "o_proj"]}))

    def test_what_is_refused_with_projections_on_the_server(self):
        extra = {"target": "unix:/nowhere", "projected": True}
        for changes, text in (
                ({"parallel_config": {"tensor_parallel_size": 2}}, "with tensor parallelism"),
                ({"top_k": 8}, "whose indexer chooses positions"),
                ({"lora_config": {"target_modules": ["o_proj", "gate"]}}, "LoRA of o_proj, of")):
            checks.check(config(**changes))
            with self.assertRaisesRegex(errors.Unimplemented, f"projected .*{text}"):
                checks.check(config(kv_transfer_config={"kv_connector_extra_config": extra},
                                    **changes))
        checks.check(config(kv_transfer_config={"kv_connector_extra_config": extra}, lora_config={
            "target_modules": ["gate"]}))
        with mock.patch("vllm.version.__version__", "0.25.1"):
            with self.assertRaisesRegex(errors.Unimplemented, "this release of vLLM was not tried"):
                checks.check(config(kv_transfer_config={"kv_connector_extra_config": extra}))

    def test_whatever_changes_a_row_changes_the_salt(self):
        salts = {checks.salt(config(), "0.32.0"), checks.salt(config(), "0.31.0")}
        changes = [
            ("model_config", {"model": "n"}), ("model_config", {"dtype": torch.bfloat16}),
            ("model_config", {"revision": "s"}), ("model_config", {"quantization": "fp8"}),
            ("model_config", {"hf_overrides": {"a": 1}}), ("compilation_config", {"mode": 3}),
            ("compilation_config", {"custom_ops": ["all"]}),
            ("compilation_config", {"backend": "inductor"}),
            ("kernel_config", {"ir_op_priority": "compiled"}),
            ("device_config", {"device_type": "cuda"}),
            ("parallel_config", {"enable_expert_parallel": True})]
        for part, values in changes:
            salts.add(checks.salt(config(**{part: values}), "0.32.0"))
        scaled = config()
        scaled.model_config = copy.deepcopy(scaled.model_config)
        scaled.model_config.hf_text_config.rope_parameters = {"rope_type": "yarn"}
        salts.add(checks.salt(scaled, "0.32.0"))
        self.assertEqual(len(salts), 2 + len(changes) + 1)

    def test_releases_outside_of_the_table(self):
        for version in ("0.25.0", "0.26.0", "0.28.1", "0.33.0"):
            with mock.patch("vllm.version.__version__", version):
                with self.assertRaisesRegex(errors.Unimplemented,
                                            f"vLLM {version}: .* 0.25.1, 0.29.0 to 0.32.0"):
                    plugin.release()


class PublishedTest(unittest.TestCase):
    """Events of cached blocks in vLLM's own structures, as a router reads them."""

    def test_events_are_those_that_vllm_publishes(self):
        blocks = range(7, 7 + 2 * BLOCK)
        sent = [connector._published(event) for event in (
            block_events.Cleared(), block_events.Stored((1, 2**64 - 1), None, (*blocks,), BLOCK),
            block_events.Stored((3,), 2**64 - 1, (9, 9, 9, 9), BLOCK),
            block_events.Removed((3, 1)))]
        batch = kv_events.KVEventBatch(ts=1.5, events=sent, data_parallel_rank=0)
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=kv_events.KVEventBatch)
        self.assertEqual([type(event) for event in read.events], [
            kv_events.AllBlocksCleared, kv_events.BlockStored, kv_events.BlockStored,
            kv_events.BlockRemoved])
        _, first, second, removed = read.events
        self.assertEqual((first.block_hashes, first.parent_block_hash, first.token_ids,
                          first.block_size, first.lora_id), (
                              [1, 2**64 - 1], None, [*blocks], BLOCK, None))
        self.assertEqual(second.parent_block_hash, first.block_hashes[-1])
        self.assertEqual(removed.block_hashes, [3, 1])
        self.assertEqual({getattr(event, "medium", "GPU") for event in read.events}, {"GPU"})


if __name__ == "__main__":
    unittest.main()
