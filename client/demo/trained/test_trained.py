"""The trained model: its text, its file, and what its README says of it."""

import pathlib
import re
import tempfile
import unittest

import attention
import checks
import corpus
import generate
import mla_client
import model as models
import numpy as np
import server_binary
import trained

INPUTS = (".bazel/bin/server/mla-server", "client/demo", "client/python")
FOLDER = trained.PATH.parent
TINY = models.Config(vocab=8, hidden=8, layers=2, dense_layers=2, heads=2, q_lora=4, kv_lora=8,
                     nope=4, rope=4, v=4, dense_width=8)

# Natural logarithms of probabilities, between the profiles.
MOST_DIFFERENCE = 0.02
STEPS = (48, *8 * (1,))


class CorpusTest(unittest.TestCase):
    def test_nothing_is_on_both_sides(self):
        train, held_out = corpus.split()
        self.assertEqual(len(held_out), 12)
        self.assertGreater(len(train), 3_700_000)
        text = train.tobytes()
        for block in held_out:
            for begin in range(0, len(block), 1024):
                self.assertNotIn(block[begin:begin + 64].tobytes(), text)

    def test_windows_are_the_blocks(self):
        windows = corpus.held_out_windows()
        self.assertEqual(windows.shape, (12 * 16, corpus.WINDOW_BYTES))
        np.testing.assert_array_equal(windows[16:32].reshape(-1), corpus.split()[1][1])

    def test_the_prompt_is_held_out(self):
        text = corpus.split()[1][0].tobytes()
        prompt = bytes(corpus.prompt(500))
        self.assertEqual(len(prompt), 500)
        self.assertIn(b"\n" + prompt, text)


class FileTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "weights.npz"
        rng = np.random.default_rng(1)
        self.weights = {name: rng.standard_normal(shape).astype(np.float32)
                        for name, shape in trained.shapes(TINY).items()}
        self.weights["head"][3] = 0

    def test_weights_come_back(self):
        trained.save(self.weights, self.path)
        read = trained.read(self.path, TINY)
        self.assertEqual(list(read), list(self.weights))
        for name, array in self.weights.items():
            largest = np.abs(array).max(axis=-1, keepdims=True)
            # Half a unit of 127 to the row's largest, and bfloat16's rounding.
            bound = largest * (0.5 / 127 + 2.0 ** -8)
            self.assertTrue((np.abs(read[name] - array) <= bound).all(), name)
            np.testing.assert_array_equal(read[name], mla_client.bf16.round_to_bf16(read[name]))
        self.assertFalse(read["head"][3].any())

    def test_the_model_is_made_of_them(self):
        trained.save(self.weights, self.path)
        model = trained.load(self.path, TINY)
        read = trained.read(self.path, TINY)
        self.assertEqual(len(model.layers), 2)
        np.testing.assert_array_equal(model.layers[1].w_uv, read["1.w_uv"])
        np.testing.assert_array_equal(model.layers[0].feed_forward.down, read["0.down"])

    def test_a_damaged_file_is_refused(self):
        trained.save(self.weights, self.path)
        data = bytearray(self.path.read_bytes())
        data[len(data) // 2] ^= 1
        self.path.write_bytes(data)
        with self.assertRaisesRegex(ValueError, "digest"):
            trained.load(self.path, TINY)

    def test_other_shapes_are_refused(self):
        self.weights["1.q_up"] = self.weights["1.q_up"][:, :-1]
        trained.save(self.weights, self.path)
        with self.assertRaisesRegex(ValueError, "1.q_up"):
            trained.load(self.path, TINY)


class MeasureTest(unittest.TestCase):
    def test_bits_per_byte(self):
        windows = np.array([[0, 1, 2, 3]], np.uint8)
        logits = np.zeros((1, 4, 8), np.float32)
        self.assertAlmostEqual(trained.bits_per_byte(logits, windows), 3.0)
        logits[0, np.arange(3), [1, 2, 3]] = 100.0
        self.assertAlmostEqual(trained.bits_per_byte(logits, windows), 0.0)


class TrainedModelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = trained.load()
        cls.readme = (FOLDER / "README.md").read_text(encoding="utf-8")

    def stated(self, pattern):
        """The only number at that place of the README."""
        found = re.findall(pattern, self.readme)
        self.assertEqual(len(found), 1, pattern)
        return float(found[0])

    def test_files_are_small(self):
        self.assertLess(trained.PATH.stat().st_size, 6_000_000)
        self.assertLess(corpus.PATH.stat().st_size, 1_500_000)

    def test_bits_per_byte_are_as_stated(self):
        windows = corpus.held_out_windows()[::64]
        bits = trained.bits_per_byte(trained.logits_of(self.model, windows), windows)
        stated = self.stated(r"windows 0, 64 and 128 of them: \*\*([\d.]+)\*\*")
        self.assertAlmostEqual(bits, stated, delta=0.002)

    def test_the_rule_holds_in_every_format(self):
        """Within each format's own bound; and with 8-bit rows, that they were in force shows."""
        server = server_binary.start()
        prompt = corpus.prompt(192)
        try:
            with mla_client.Client.connect(server.target, transport="inline") as client:
                for kv_format in trained.NOISE:
                    registered = attention.register(client, self.model, kv_format, kv_format)
                    with registered.open_sequence(lease_ms=60_000) as sequence:
                        generator = generate.Generator(self.model, client, sequence,
                                                       mla_client.Profile.ABSORBED)
                        tokens, logits = generator.generate(generator.prefill(prompt), 24)
                    seen = checks.LocalModel(self.model, kv_format).check(prompt, tokens, logits)
                    with self.subTest(kv_format=kv_format):
                        self.assertTrue(seen.ok, seen)
                        self.assertEqual(seen.bound, 4 * trained.NOISE[kv_format])
                        self.assertEqual(seen.error > trained.NOISE["bf16"] / 2,
                                         kv_format != "bf16", seen)
        finally:
            server.stop()

    def test_it_writes_english(self):
        """Nearly every word that it writes is one of the novels', and few are repeated."""
        service = mla_client.LocalReference()
        registered = attention.register(service, self.model, "trained")
        with registered.open_sequence() as sequence:
            generator = generate.Generator(self.model, service, sequence,
                                           mla_client.Profile.ABSORBED)
            tokens, _ = generator.generate(generator.prefill(corpus.prompt(256)), 96)
        text = bytes(tokens).decode("ascii")
        known = set(re.findall(r"[a-z]+", corpus.split()[0].tobytes().decode().lower()))
        words = re.findall(r"[a-z]+", text.lower())[1:-1]  # the first and last may be cut
        self.assertGreater(len(words), 8, text)
        self.assertGreaterEqual(sum(word in known for word in words) / len(words), 0.9, text)
        self.assertGreater(len(set(words)) / len(words), 0.4, text)


def log_probabilities(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class ProjectedTest(unittest.TestCase):
    """The probabilities of the projected profile are those of the expanded one."""

    @classmethod
    def setUpClass(cls):
        cls.model = trained.load()
        cls.text = np.asarray(corpus.prompt(sum(STEPS)), np.int64)

    def expanded(self, service, dtype):
        """Log-probabilities after each row of the text, which is added in STEPS."""
        registered = attention.register(service, self.model, f"expanded-{dtype.name}")

        def forward(step, tokens, positions):
            return self.model.forward(
                tokens, positions,
                attention.StepAttention(self.model, step, mla_client.Profile.EXPANDED, dtype))
        return self.run_steps(service, registered, None, forward)

    def projected(self, service, dtype):
        registered = attention.register_projected(service, self.model, f"projected-{dtype.name}")

        def forward(step, tokens, positions):
            return self.model.forward(
                tokens, positions, None,
                lambda layer, q_lora, row: step.attend(
                    layer, q_lora, row, mla_client.Profile.PROJECTED, dtype=dtype, o_dtype=dtype).o)

        def turns(positions):
            return models.rotations(self.model.config, positions)
        return self.run_steps(service, registered, turns, forward)

    def run_steps(self, service, registered, turns, forward):
        found = []
        with registered.open_sequence(lease_ms=60_000) as sequence:
            for rows in STEPS:
                positions = np.arange(sequence.length, sequence.length + rows)
                options = {} if turns is None else {"rotations": turns(positions)}
                with service.step([(sequence, rows)], lease_ms=30_000, **options) as step:
                    logits = forward(step, self.text[positions], positions)
                found.append(log_probabilities(logits))
        return np.concatenate(found)

    def compare(self, service):
        # In bf16, other roundings on the wire move unlikely bytes by more: by up to 0.06.
        for dtype, likely_alone in ((mla_client.DType.BF16, True), (mla_client.DType.F32, False)):
            with self.subTest(dtype=dtype.name):
                expanded = self.expanded(service, dtype)
                difference = np.abs(expanded - self.projected(service, dtype))
                likely = difference[np.arange(len(expanded)), expanded.argmax(axis=1)]
                self.assertLess(likely.max(), MOST_DIFFERENCE)
                self.assertLess((likely if likely_alone else difference).max(), MOST_DIFFERENCE)
                # The text decides: from row to row the probabilities differ by far more.
                self.assertGreater(np.abs(expanded[1:] - expanded[:-1]).max(), 1)

    def test_in_this_process(self):
        self.compare(mla_client.LocalReference())

    def test_on_a_server(self):
        server = server_binary.start("--backend=cpu")
        try:
            with mla_client.Client.connect(server.target) as client:
                self.compare(client)
        finally:
            server.stop()


if __name__ == "__main__":
    unittest.main()
