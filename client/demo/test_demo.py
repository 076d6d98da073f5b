"""The demo's model and its checks, with attention computed by LocalReference."""

import unittest

import attention
import checks
import generate
import mla_client
import model as models
import numpy as np
import scenes
import server_binary

SMALL = models.Config(hidden=64, layers=3, heads=2, q_lora=32, kv_lora=32, nope=16, rope=8, v=16,
                      dense_width=64, expert_width=32, experts=4)
BOUND = 0.12  # bound of E
PROMPT = list(b"the quick brown fox jumps over the lazy dog, twice")


class ModelTest(unittest.TestCase):
    def setUp(self):
        self.model = models.seeded(SMALL)
        self.local = attention.local_attention(self.model)

    def test_softmax_scale_of_deepseek_v3(self):
        self.assertAlmostEqual(models.Config().softmax_scale, 0.135234, places=6)

    def test_yarn_keeps_fast_pairs_and_stretches_slow_ones(self):
        config = models.Config()
        plain = config.rope_base ** (-np.arange(32) / 32)
        ratio = models.yarn_frequencies(config) / plain
        self.assertEqual(ratio[0], 1.0)
        self.assertAlmostEqual(ratio[-1], 1 / 40)
        self.assertTrue((np.diff(ratio) <= 1e-12).all())
        # Between them a ramp: neither kept nor fully stretched.
        self.assertTrue(((ratio > 0.03) & (ratio < 0.97)).any())

    def test_rotation_is_relative(self):
        frequencies = models.yarn_frequencies(models.Config())
        rng = np.random.default_rng(1)
        q, k = rng.standard_normal((2, 1, 64)).astype(np.float32)

        def score(p, r):
            return float((models.rotate(q, np.array([p]), frequencies) *
                          models.rotate(k, np.array([r]), frequencies)).sum())

        self.assertAlmostEqual(score(5, 3), score(105, 103), places=3)
        self.assertNotAlmostEqual(score(5, 3), score(5, 2), places=3)

    def test_forward_is_causal(self):
        tokens = np.array(PROMPT)
        positions = np.arange(len(tokens))
        logits = self.model.forward(tokens, positions, self.local)
        changed = tokens.copy()
        changed[-1] ^= 1
        other = self.model.forward(changed, positions, self.local)
        np.testing.assert_allclose(other[:-1], logits[:-1], atol=1e-5)
        self.assertGreater(np.abs(other[-1] - logits[-1]).max(), 0.1)

    def test_experts_are_used(self):
        block = self.model.layers[1].feed_forward
        x = np.random.default_rng(2).standard_normal((40, 64)).astype(np.float32)
        scores = models.sigmoid(x @ block.router)
        best = np.argsort(-scores, axis=-1)[:, :2]
        self.assertEqual(set(best.ravel()), {0, 1, 2, 3})
        row, weights = x[:1], np.take(scores[0], best[0])
        want = block.shared(row) + sum(
            weight / weights.sum() * block.routed[index](row)
            for weight, index in zip(weights, best[0]))
        np.testing.assert_allclose(block(x)[:1], want, atol=1e-4)


class Shifted(mla_client.LocalReference):
    """A service with a fault: it leaves out the last key."""

    def _compute(self, opened, model, args, q):
        kept = opened.kv[args.layer].copy()
        opened.kv[args.layer] = np.roll(kept, 1, axis=0)
        try:
            return super()._compute(opened, model, args, q)
        finally:
            opened.kv[args.layer] = kept


def run_scenes(service, count=24):
    """Generation in both profiles; returns (runs, the local model, its lines)."""
    model = models.seeded(SMALL)
    registered = attention.register(service, model, "small")
    local = checks.LocalModel(model)
    said = []
    runs = [scenes.generate(model, service, registered, profile, PROMPT, count, said.append)
            for profile in (mla_client.Profile.EXPANDED, mla_client.Profile.ABSORBED)]
    return runs, local, said


class ScenesTest(unittest.TestCase):
    def test_all_scenes_pass(self):
        runs, local, said = run_scenes(mla_client.LocalReference(exact=True))
        for run in runs:
            result = scenes.check_run(run, local, said.append)
            self.assertTrue(result.ok, result)
            self.assertLess(result.error, 1e-3)
        self.assertEqual(runs[0].tokens, runs[1].tokens)
        self.assertTrue(scenes.fork(runs[0], local, said.append), said)
        self.assertTrue(scenes.speculate(runs[1], local, said.append), said)
        self.assertTrue(all(isinstance(line, str) and line for line in said))

    def test_a_faulty_service_is_found(self):
        runs, local, said = run_scenes(Shifted(exact=True))
        for run in runs:
            self.assertFalse(scenes.check_run(run, local, said.append).ok)
        self.assertFalse(scenes.speculate(runs[0], local, said.append))

    def test_controls_change_the_choice(self):
        runs, local, _ = run_scenes(mla_client.LocalReference(exact=True), 40)
        controls = local.controls(PROMPT, runs[0].tokens)
        self.assertGreater(controls.zeroed, 20)
        self.assertGreater(controls.shifted, 20)

    def test_prefill_in_steps(self):
        service = mla_client.LocalReference(exact=True)
        model = models.seeded(SMALL)
        registered = attention.register(service, model, "small")
        prompt = (PROMPT * 22)[:1100]
        sequence = registered.open_sequence()
        generator = generate.Generator(model, service, sequence, mla_client.Profile.EXPANDED)
        seen = []
        logits = generator.prefill(prompt, seen.append)
        self.assertEqual(seen, [512, 1024, 1100])
        local = checks.LocalModel(model).logits(np.array(prompt), len(prompt) - 1)
        np.testing.assert_allclose(logits, local[0], atol=1e-3)
        self.assertEqual(generator.prefill_phase.rows, 1100)


class TransportsTest(unittest.TestCase):
    """The scenes against a server, over each transport."""

    @classmethod
    def setUpClass(cls):
        cls.server = server_binary.start()

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def test_all_scenes_pass(self):
        tokens = []
        for transport in ("inline", "shm", "ring"):
            with self.subTest(transport=transport), \
                    mla_client.Client.connect(self.server.target, transport=transport,
                                              shared_bytes=4 << 20) as client:
                self.assertEqual(client.transport, transport)
                runs, local, said = run_scenes(client)
                for run in runs:
                    self.assertTrue(scenes.check_run(run, local, said.append).ok, said)
                self.assertTrue(scenes.fork(runs[0], local, said.append), said)
                self.assertTrue(scenes.speculate(runs[1], local, said.append), said)
                tokens.append([run.tokens for run in runs])
                for run in runs:
                    run.generator.sequence.release()
        # The same requests and the same kernels: not a token differs.
        self.assertEqual(tokens, [tokens[0]] * 3)


class LocalModelTest(unittest.TestCase):
    def test_known_beginnings_change_nothing(self):
        model = models.seeded(SMALL)
        text = np.array(PROMPT)
        whole = model.forward(text, np.arange(len(text)), attention.local_attention(model))
        local = checks.LocalModel(model)
        for first in (20, 20, 30, 19, len(text) - 1):
            np.testing.assert_allclose(local.logits(text, first), whole[first:], atol=1e-4)
        other = text.copy()
        other[10] ^= 1
        self.assertGreater(np.abs(local.logits(other, 20) - whole[20:]).max(), 0.1)


class CompareTest(unittest.TestCase):
    def local(self):
        logits = np.zeros((4, 8), np.float32)
        logits[np.arange(4), [1, 2, 3, 4]] = 1.0
        return logits

    def test_equal(self):
        result = checks.compare([1, 2, 3, 4], self.local(), self.local(), BOUND)
        self.assertTrue(result.ok)
        self.assertEqual((result.agree, result.near_ties, result.error), (4, 0, 0.0))

    def test_another_token_without_a_tie(self):
        remote = self.local() + np.float32(0.01)
        result = checks.compare([1, 2, 3, 5], remote, self.local(), BOUND)
        self.assertEqual((result.agree, result.ok), (3, False))

    def test_near_tie(self):
        local = self.local()
        local[3, 5] = 0.995
        remote = local.copy()
        remote[3, 5] += 0.01
        result = checks.compare([1, 2, 3, 5], remote, local, BOUND)
        self.assertEqual((result.agree, result.near_ties, result.ok), (4, 1, True))

    def test_too_many_near_ties(self):
        local = np.zeros((9, 4), np.float32)
        local[:, 0], local[:, 1] = 1.0, 0.999
        result = checks.compare([1] * 9, local + np.float32(0.01), local, BOUND)
        self.assertEqual((result.agree, result.near_ties, result.ok), (9, 9, False))

    def test_noise_beyond_the_bound(self):
        result = checks.compare([1, 2, 3, 4], self.local() * 1.5, self.local(), BOUND)
        self.assertEqual((result.agree, result.ok), (4, False))

    def test_not_a_number(self):
        remote = self.local()
        remote[0, 0] = np.nan
        self.assertFalse(checks.compare([1, 2, 3, 4], remote, self.local(), BOUND).ok)
        self.assertFalse(checks.compare([], remote[:0], remote[:0], BOUND).ok)


if __name__ == "__main__":
    unittest.main()
