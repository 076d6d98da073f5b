"""mla_client.transformers in the library: every feature of generate().

Numbers are compared with the library's own attention, through a LocalReference that rounds
nothing, so they must agree closely. test_features.py has a server in its place.
"""

import gc
import os
import threading
import time
import unittest
from unittest import mock

import mla_client
import numpy as np
import seeded
import torch
import transformers
from mla_client import transformers as adapter
from mla_client.serving.layers import dense
from mla_client.transformers import attachment, models

INPUTS = ("client/python", "tests/engines", "tests/transformers")
ENVIRONMENT = "transformers"
torch.set_num_threads(1)
# The name of a cache in this release, as an argument and in a model's result.
CACHE = attachment.cache_name(transformers.DeepseekV3ForCausalLM.__new__(
    transformers.DeepseekV3ForCausalLM))
# In the oldest release models with an indexer cache expanded keys.
OLDEST = os.environ.get("MLA_TEST_RELEASE") == "5.17"
_SMALL = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
          "q_lora_rank": 32, "qk_nope_head_dim": 128, "v_head_dim": 128,
          "max_position_embeddings": 256, "moe_intermediate_size": 32, "intermediate_size": 64,
          "num_hidden_layers": 3}
_OTHERS = {"glm4_moe_lite": {"mlp_layer_types": ["dense", "dense", "sparse"]},
           "longcat_flash": {"num_layers": 1, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32,
                             "num_hidden_layers": 2}}


def small(kind="deepseek_v3", **fields):
    """A small model with random weights, and its own attention in plain PyTorch."""
    model = seeded.build(kind, seed=4, **{**_SMALL, **_OTHERS.get(kind, {}), **fields})
    model.set_attn_implementation("eager")
    return model


def run(model, inputs, max_new_tokens=8, **options):
    """Runs generate() and returns the logits [rows, vocab] from which each token was chosen, and
    the cache."""
    return model.generate(**inputs, **{
        "max_new_tokens": max_new_tokens, "do_sample": False, "output_logits": True,
        "return_dict_in_generate": True, **options})


def cache_of(output):
    """The cache in the result of a model or of generate()."""
    return getattr(output, CACHE)


def prompts(rows=3, length=9):
    """Left-padded: row r has 2 r padding positions."""
    ids = torch.randint(8, 64, (rows, length), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, :2 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def repeating():
    """A prompt in which drafts are found."""
    return {"input_ids": torch.tensor([[9, 8, 7, 9, 8, 7, 9, 8, 7, 9]])}


class Counting(mla_client.LocalReference):
    """Counts the calls of the service."""

    def __init__(self):
        super().__init__(exact=True)
        self.calls = {}

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if name in ("_open", "_fork", "_truncate", "_begin", "_end", "_abort", "_attend"):
            self.calls[name] = self.calls.get(name, 0) + 1
        return value


class GenerateTest(unittest.TestCase):
    """Compares tokens and logits with those from local attention."""

    def setUp(self):
        self.service = Counting()

    def compare(self, model, inputs, tolerance=1e-3, projected=False, **options):
        torch.manual_seed(6)
        want = run(model, inputs, **options)
        with adapter.attach(model, self.service, projected=projected) as attached:
            self.service.calls.clear()
            torch.manual_seed(6)
            got = run(model, inputs, **options)
            self.assertIsInstance(cache_of(got), adapter.RemoteCache)
            self.sequences = cache_of(got).rows.batch.sequences
            self.assertIs(cache_of(got).rows.model, attached.model)
        np.testing.assert_array_equal(want.sequences, got.sequences)
        self.assertEqual(len(want.logits), len(got.logits))
        for a, b in zip(want.logits, got.logits):
            np.testing.assert_allclose(a, b, atol=tolerance)
        self.assertEqual(self.service._sequences, {})  # detaching has released all
        return got

    def test_greedy(self):
        self.compare(small(), prompts(1))
        self.assertEqual(self.service.calls["_open"], 1)
        self.assertNotIn("_fork", self.service.calls)

    def test_projections_on_the_server(self):
        model = small()
        forward = type(model.model.layers[0].self_attn).forward
        for inputs in (prompts(1), prompts(3)):
            self.compare(model, inputs, projected=True)
        # Beams fork sequences, and equal prompts share one.
        self.compare(model, prompts(2), projected=True, num_beams=2, max_new_tokens=5)
        self.assertIs(model.model.layers[0].self_attn.forward.__func__, forward)
        self.compare(model, prompts(1))  # as before
        self.compare(small(rope_interleave=False), prompts(2), projected=True)

    def test_models_whose_projections_stay(self):
        for model in (small("youtu"), small(q_lora_rank=None)):
            with self.assertRaisesRegex(mla_client.Unimplemented, "projected"):
                adapter.attach(model, self.service, projected=True)
        model = small(attention_bias=True)
        with self.assertRaisesRegex(mla_client.Unimplemented, "o_proj: it has a bias"):
            adapter.attach(model, self.service, projected=True)

    def test_every_model_type(self):
        for kind in ("deepseek_v2", "glm4_moe_lite", "youtu", "longcat_flash"):
            with self.subTest(kind=kind):
                self.compare(small(kind), prompts(2), max_new_tokens=4)

    def test_queries_without_low_rank(self):
        self.compare(small("deepseek_v2", q_lora_rank=None), prompts(2), max_new_tokens=4)

    def test_left_padding(self):
        self.compare(small(), prompts(3))
        # Padding is not sent: 9 + 7 + 5 rows of the prompts, then 7 rows for each row.
        self.assertEqual(self.sequences, 3)

    def test_padding_is_not_sent(self):
        model = small()
        with adapter.attach(model, self.service):
            with torch.no_grad():
                cache = cache_of(model(**prompts(3)))
            cache.crop(0)
            self.assertEqual(sorted(sequence.length for sequence in
                                    self.service._sequences.values()), [5, 7, 9])

    def test_sampled(self):
        self.compare(small(), prompts(3), do_sample=True)

    def test_rows_that_end_early(self):
        model = small()
        ends = int(run(model, prompts(3)).sequences[1, 11])
        got = self.compare(model, prompts(3), eos_token_id=ends, pad_token_id=0, max_new_tokens=10)
        self.assertEqual(int(got.sequences[1, -1]), 0)

    def test_a_prompt_in_chunks(self):
        self.compare(small(), prompts(3), prefill_chunk_size=2)

    def test_return_sequences_share_the_prompt(self):
        self.compare(small(), prompts(2), do_sample=True, num_return_sequences=3)
        # The rows share one prompt; the others are forked where they differ.
        self.assertEqual(self.service.calls["_open"], 2)
        self.assertEqual(self.service.calls["_fork"], self.sequences - 2)

    def test_beams(self):
        got = self.compare(small(), prompts(2), num_beams=3, max_new_tokens=10)
        moves = got.beam_indices.T  # by step, for the rows that were returned
        self.assertTrue(any(a != b for a, b in zip(moves[0].tolist(), moves[-1].tolist())))
        self.assertLessEqual(self.sequences, 6)
        self.assertNotIn("_truncate", self.service.calls)

    def test_drafts_are_verified(self):
        got = self.compare(small(), repeating(), prompt_lookup_num_tokens=4, max_new_tokens=24)
        self.assertEqual(len(got.logits), 24)
        # Refused tokens were never committed.
        self.assertNotIn("_truncate", self.service.calls)
        self.assertLess(self.service.calls["_begin"], 24)

    def test_sparse(self):
        """Rows attend to the few positions that the model's indexer chooses, padding aside."""
        for kind in ("deepseek_v32", "glm_moe_dsa"):
            model = small(kind, index_topk=5, index_n_heads=2, mlp_layer_types=["dense"] * 3,
                          **({"indexer_types": ["full", "shared", "full"]}
                             if kind == "glm_moe_dsa" else {}))
            if OLDEST:
                with self.assertRaisesRegex(mla_client.Unimplemented, "caches others"):
                    adapter.attach(model, self.service)
                continue
            for options in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2},
                            {"prefill_chunk_size": 4}):
                with self.subTest(kind=kind, **options):
                    self.compare(model, prompts(2), **options)
            with self.subTest(kind=kind, drafts=True):
                self.compare(model, repeating(), prompt_lookup_num_tokens=4, max_new_tokens=16)

    def test_bfloat16(self):
        model = small().to(torch.bfloat16)
        with adapter.attach(model, self.service), torch.no_grad():
            got = model(**prompts(2)).logits
        self.assertEqual(got.dtype, torch.bfloat16)
        with torch.no_grad():
            want = small()(**prompts(2)).logits
        real = prompts(2)["attention_mask"].bool()
        self.assertLess(float((got[real].float() - want[real]).abs().max()), 0.5)


class CacheTest(unittest.TestCase):
    """Caches across calls, and their rows on the server."""

    def setUp(self):
        self.service = Counting()
        self.model = small()
        self.attached = adapter.attach(self.model, self.service)
        self.addCleanup(self.attached.detach)
        self.service.calls.clear()

    def logits(self, cache, tokens, **options):
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([tokens]), **{CACHE: cache},
                              **options).logits[0]

    def local(self, tokens):
        model = small()
        with torch.no_grad():
            return model(input_ids=torch.tensor([tokens])).logits[0]

    def wait(self, condition):
        deadline = time.monotonic() + 10
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertTrue(condition())

    def test_a_dropped_cache_is_released(self):
        run(self.model, prompts(2))
        gc.collect()
        self.wait(lambda: not self.service._sequences)

    def test_release_empties_it(self):
        cache = self.attached.cache()
        self.logits(cache, [3, 4, 5])
        cache.release()
        self.assertEqual((cache.get_seq_length(), len(self.service._sequences)), (0, 0))
        np.testing.assert_allclose(self.logits(cache, [6, 7]), self.local([6, 7]), atol=1e-3)

    def test_a_second_call_goes_on(self):
        cache = self.attached.cache()
        first = run(self.model, prompts(1), **{CACHE: cache})
        second = run(self.model, {"input_ids": first.sequences}, **{CACHE: cache})
        whole = run(small(), prompts(1), max_new_tokens=16)
        np.testing.assert_array_equal(second.sequences, whole.sequences)
        self.assertEqual(self.service.calls["_open"], 1)

    def test_crop_within_the_step_commits_a_prefix(self):
        cache = self.attached.cache()
        self.logits(cache, [3, 4, 5, 6])
        cache.crop(-3)
        self.assertEqual(cache.get_seq_length(), 1)
        self.assertNotIn("_truncate", self.service.calls)
        np.testing.assert_allclose(self.logits(cache, [9]), self.local([3, 9])[1:], atol=1e-3)

    def test_crop_of_a_whole_pass_and_more(self):
        cache = self.attached.cache()
        self.logits(cache, [3, 4, 5, 6])
        self.logits(cache, [7])
        cache.crop(-3)
        self.assertEqual(self.service.calls["_truncate"], 1)
        np.testing.assert_allclose(self.logits(cache, [9]), self.local([3, 4, 9])[2:], atol=1e-3)

    def test_crop_to_a_length(self):
        cache = self.attached.cache()
        self.logits(cache, [3, 4, 5, 6])
        cache.crop(7)
        self.assertEqual(cache.get_seq_length(), 4)
        cache.crop(2)
        self.assertEqual(cache.get_seq_length(), 2)
        with self.assertRaisesRegex(mla_client.InvalidArgument, "2 positions"):
            cache.crop(-3)

    def test_a_step_that_nothing_follows_is_ended(self):
        with mock.patch.object(attachment, "IDLE_S", 0.02):
            other = adapter.attach(small(), self.service, model_id="other")
        self.addCleanup(other.detach)
        cache = other.cache()
        with torch.no_grad():
            other._torch_model(input_ids=torch.tensor([[3, 4, 5]]), **{CACHE: cache})
        self.wait(lambda: not self.service._steps)
        cache.crop(-2)  # the cache now accepts a truncation
        self.assertEqual(self.service.calls["_truncate"], 1)
        with torch.no_grad():
            got = other._torch_model(input_ids=torch.tensor([[9]]), **{CACHE: cache}).logits
        np.testing.assert_allclose(got[0], self.local([3, 9])[1:], atol=1e-3)

    def test_a_step_lost_while_idle_is_reported(self):
        cache = self.attached.cache()
        self.logits(cache, [3, 4])
        for step in list(self.service._steps.values()):
            self.service._drop(step)  # as if the sequence's lease had ended
        cache.rows.batch.end_if_idle(0.0)
        with self.assertRaises(mla_client.NotFound):
            self.logits(cache, [5])
        with self.assertRaisesRegex(mla_client.FailedPrecondition, "not kept"):
            self.logits(cache, [5])

    def test_a_pass_that_failed_cannot_be_continued(self):
        cache = self.attached.cache()
        self.logits(cache, [3, 4])
        with mock.patch.object(self.model.model.layers[1].mlp, "forward",
                               side_effect=RuntimeError("full")):
            with self.assertRaisesRegex(RuntimeError, "full"):
                self.logits(cache, [5])
        with self.assertRaisesRegex(mla_client.FailedPrecondition, "after 2 of 3 layers"):
            self.logits(cache, [5])

    def test_rows_are_repeated_and_selected(self):
        cache = self.attached.cache()
        self.logits(cache, [3, 4])
        cache.batch_repeat_interleave(3)
        tokens = torch.tensor([[5], [6], [5]])
        with torch.no_grad():
            got = self.model(input_ids=tokens, **{CACHE: cache}).logits
        self.assertEqual(self.service.calls["_fork"], 1)  # two rows got the same token
        cache.batch_select_indices(torch.tensor([1]))
        np.testing.assert_allclose(got[1], self.local([3, 4, 6])[2:], atol=1e-3)
        np.testing.assert_allclose(self.logits(cache, [7]), self.local([3, 4, 6, 7])[3:], atol=1e-3)
        self.assertEqual(cache.rows.batch.sequences, 1)

    def test_threads_have_caches_of_their_own(self):
        results = {}

        def work(index):
            results[index] = run(self.model, {"input_ids": torch.tensor([[index + 3, 4, 5]])})

        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(3):
            want = run(small(), {"input_ids": torch.tensor([[index + 3, 4, 5]])})
            np.testing.assert_array_equal(results[index].sequences, want.sequences)


class RegistrationTest(unittest.TestCase):
    def test_the_id_follows_from_the_weights(self):
        service = mla_client.LocalReference()
        ids = set()
        for change in (0.0, 0.0, 0.01):
            model = small()
            model.model.layers[0].self_attn.kv_b_proj.weight.data += change
            with adapter.attach(model, service) as attached:
                ids.add(attached.model.spec.model_id)
        self.assertEqual(len(ids), 2)

    def test_weights_are_cut_by_head(self):
        model = small()
        layers = models.layers_of(model)
        module, geometry, scale = layers.in_order()[0], layers.geometry, layers.scale
        w_uk, w_uv = dense(models.pair_of(module, geometry))
        latent = torch.randn(512)
        expanded = module.kv_b_proj(latent).view(4, 256).detach().numpy()
        np.testing.assert_allclose(w_uk @ latent.numpy(), expanded[:, :128], atol=1e-4)
        np.testing.assert_allclose(latent.numpy() @ w_uv, expanded[:, 128:], atol=1e-4)
        self.assertAlmostEqual(scale, 192 ** -0.5)


if __name__ == "__main__":
    unittest.main()
