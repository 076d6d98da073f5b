"""mla_client.transformers refuses unsupported models and caches with a reason."""

import tempfile
import unittest
from unittest import mock

import mla_client
import numpy as np
import torch
import transformers
from mla_client import transformers as adapter
from mla_client.transformers import probe
from test_adapter import CACHE, cache_of, prompts, run, small

INPUTS = ("client/python", "tests/engines", "tests/transformers")
ENVIRONMENT = "transformers"


class RefusalTest(unittest.TestCase):
    """Unsupported features are refused with a reason."""

    def setUp(self):
        self.service = mla_client.LocalReference(exact=True)
        self.model = small()
        self.inputs = prompts(1)

    def refuses(self, reason, **options):
        with adapter.attach(self.model, self.service), torch.no_grad():
            with self.assertRaisesRegex(mla_client.Unimplemented, reason):
                self.model(**{**self.inputs, **options})

    def test_attention_weights(self):
        self.refuses("output_attentions", output_attentions=True)

    def test_no_cache(self):
        self.refuses("use_cache=False", use_cache=False)

    def test_a_local_cache(self):
        cache = transformers.DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(**self.inputs, **{CACHE: cache})
        self.refuses("filled locally", **{CACHE: cache})

    def test_offloading(self):
        with mock.patch.object(torch, "Stream"):  # needs a GPU
            cache = transformers.DynamicCache(offloading=True)
        self.refuses("cache_implementation", **{CACHE: cache})

    def test_continuous_batching(self):
        """The library takes no names of attention but its own there. Were it to use another one, it
        would hand over its own cache, which is refused."""
        with adapter.attach(self.model, self.service), torch.no_grad():
            with self.assertRaisesRegex(ValueError, "mla_server"):
                self.model.generate_batch([[3, 1, 4]], transformers.GenerationConfig(
                    max_new_tokens=2, do_sample=False, eos_token_id=1))

            class PagedAttentionCache:
                """It has the rows of all requests."""
            with self.assertRaisesRegex(mla_client.Unimplemented, "got PagedAttentionCache"):
                self.model(**self.inputs, **{CACHE: PagedAttentionCache()})

    def test_the_librarys_own_server(self):
        """`transformers serve` takes no names of attention but its own."""
        from transformers.cli.serving import model_manager
        with self.assertRaisesRegex(ValueError, "Unsupported attention implementation: 'mla_serv"):
            model_manager.ModelManager(attn_implementation="mla_server")

    def test_a_mask_of_four_dimensions(self):
        self.refuses(r"must be \[batch, positions\]", attention_mask=torch.zeros(1, 1, 9, 9))

    def test_a_mask_that_changes(self):
        with adapter.attach(self.model, self.service), torch.no_grad():
            cache = cache_of(self.model(**self.inputs))
            mask = torch.ones(1, 10)
            mask[0, 3] = 0
            with self.assertRaisesRegex(mla_client.Unimplemented, "cannot mask any more"):
                self.model(input_ids=torch.tensor([[5]]), attention_mask=mask, **{CACHE: cache})
            with self.assertRaisesRegex(mla_client.InvalidArgument, "must be"):
                self.model(input_ids=torch.tensor([[5]]), attention_mask=torch.ones(1, 9),
                           **{CACHE: cache})

    def test_gradients(self):
        with adapter.attach(self.model, self.service):
            with self.assertRaisesRegex(mla_client.Unimplemented, "gradients"):
                self.model(**self.inputs)

    def test_a_cache_of_another_model(self):
        with adapter.attach(self.model, self.service), \
                adapter.attach(small("youtu"), self.service) as other, torch.no_grad():
            with self.assertRaisesRegex(mla_client.InvalidArgument, "another model"):
                self.model(**self.inputs, **{CACHE: other.cache()})

    def test_a_layer_of_the_cache(self):
        with adapter.attach(self.model, self.service) as attached:
            layer = attached.cache().layers[0]
            for call in (layer.offload, layer.prefetch, layer.reset, lambda: layer.crop(-1),
                         lambda: layer.reorder_cache(None),
                         lambda: layer.batch_repeat_interleave(2),
                         lambda: layer.batch_select_indices(None)):
                with self.assertRaisesRegex(mla_client.Unimplemented, "call the cache"):
                    call()

    def test_model_types(self):
        for kind, reason in (("kimi_linear", "linear attention"), ("llama", "not known"),
                             ("mistral4", "kv_lora_rank 512")):
            with mock.patch.object(type(self.model.config), "model_type", kind):
                with self.assertRaisesRegex(mla_client.Unimplemented, reason):
                    adapter.attach(self.model, self.service)

    def test_split_weights(self):
        projection = self.model.model.layers[1].self_attn.kv_b_proj
        projection.weight = torch.nn.Parameter(projection.weight[:512])
        with self.assertRaisesRegex(mla_client.Unimplemented, "neither quantised nor split"):
            adapter.attach(self.model, self.service)

    def test_releases_that_were_not_tested(self):
        for release in ("5.16.2", "5.25.0", "6.0.0"):
            with mock.patch.object(transformers, "__version__", release):
                with self.assertRaisesRegex(mla_client.Unimplemented,
                                            f"transformers {release}: .* 5.17 to 5.24;"):
                    adapter.attach(self.model, self.service)

    def test_two_caches(self):
        with adapter.attach(self.model, self.service) as attached, torch.no_grad():
            caches = dict.fromkeys(("cache", "past_key_values"), attached.cache())
            with self.assertRaisesRegex(mla_client.InvalidArgument, "must be one of them"):
                self.model(**self.inputs, **caches)

    def test_a_release_that_caches_expanded_rows(self):
        class Other(transformers.DeepseekV3ForCausalLM):
            """This attention expands latents before the cache."""

            def __init__(self, config):
                super().__init__(config)
                for layer in self.model.layers:
                    inner = layer.self_attn.forward
                    layer.self_attn.forward = lambda *args, inner=inner, **kwargs: inner(
                        *args, **{**kwargs, CACHE: Expanding(kwargs[CACHE])})

        class Expanding:
            """This cache gets keys of all heads."""

            def __init__(self, cache):
                self._cache = cache

            def update(self, keys, values, layer, **kwargs):
                keys, values = self._cache.update(keys.repeat(1, 2, 1, 1), values, layer)
                return keys[:, :1], values

        model = Other(self.model.config)
        with self.assertRaisesRegex(mla_client.Unimplemented, "caches others"):
            adapter.attach(model, self.service)
        self.assertNotIn((Other, True), probe._passed)

    def test_wrong_numbers_of_the_library(self):
        class Other(transformers.DeepseekV3ForCausalLM):
            """Pretends to be another release."""

        with mock.patch.object(probe, "TOLERANCE", 0.0):
            with self.assertRaisesRegex(mla_client.Unimplemented, "differs by"):
                adapter.attach(Other(self.model.config), self.service)

    def test_a_second_attachment(self):
        with adapter.attach(self.model, self.service):
            with self.assertRaisesRegex(mla_client.FailedPrecondition, "attached already"):
                adapter.attach(self.model, self.service)

    def test_a_model_that_was_loaded_with_the_name(self):
        """The model cannot run before it is attached, and runs afterwards like any other."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="mla_server").eval()
        with self.assertRaisesRegex(mla_client.FailedPrecondition, "that was attached"):
            run(model, self.inputs)
        want = run(self.model, self.inputs)
        with adapter.attach(model, self.service):
            got = run(model, self.inputs)
        np.testing.assert_array_equal(got.sequences, want.sequences)
        np.testing.assert_array_equal(run(model, self.inputs).sequences, want.sequences)

    def test_detached_it_computes_itself(self):
        before = run(self.model, self.inputs).sequences
        attached = adapter.attach(self.model, self.service)
        attached.detach()
        attached.detach()
        self.assertEqual(self.model.config._attn_implementation, "eager")
        np.testing.assert_array_equal(run(self.model, self.inputs).sequences, before)


if __name__ == "__main__":
    unittest.main()
