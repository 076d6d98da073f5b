"""Windows, entries and sinks as every Service must handle them; a part of service_contract."""

import secrets

import mla_client
import numpy as np
from mla_client import DType, Geometry, ModelSpec

RATIOS = (0, 2)
WINDOW = 3


class WindowContract:
    """Tests for a class with `service` and `close_to`, as ServiceContract is."""

    def window_spec(self, **fields):
        return ModelSpec("w-" + secrets.token_hex(4), Geometry(3, 24, 8), 2, 0.2, 4,
                         **{"attention": "sparse_v4", "window": WINDOW, "ratios": RATIOS,
                            "top_k": 4, **fields})

    def register_window(self):
        rng = np.random.default_rng(8)
        sinks = rng.standard_normal((2, 3)).astype(np.float32)
        sinks[1, 2] = -np.inf
        model = self.service.register_model(self.window_spec(), sinks=sinks)
        self.assertEqual((model.spec.window, model.spec.ratios), (WINDOW, RATIOS))
        return model, sinks, rng

    def window_step(self, sequence, rng, sinks, texts, rows, listed=False, keep=None):
        """A step of `rows` rows of one sequence whose outputs are checked; `texts` has its rows and
        entries by layer."""
        first, dim = sequence.length, sequence.model.spec.geometry.row_dim
        with self.service.step([(sequence, rows)]) as step:
            for layer, (stored, entries) in enumerate(texts):
                kv = mla_client.round_to_bf16(rng.standard_normal((rows, dim)))
                ratio = RATIOS[layer]
                count = (first + rows) // ratio - first // ratio if ratio else 0
                made = mla_client.round_to_bf16(rng.standard_normal((count, dim)))
                stored, entries = np.concatenate([stored, kv]), np.concatenate([entries, made])
                texts[layer] = stored, entries
                q = mla_client.round_to_bf16(rng.standard_normal((rows, 3, dim)))
                lists = None
                if listed and ratio:
                    lists = [rng.permutation((first + row + 1) // ratio)[:3] for row in range(rows)]
                got = step.attend_window(layer, q, kv, made, lists, want_lse=True,
                                         o_dtype=DType.F32)
                for row in range(rows):
                    seen = first + row + 1
                    chosen = np.arange(seen // ratio if ratio else 0)
                    chosen = chosen if lists is None else lists[row]
                    keys = np.concatenate([stored[max(0, seen - WINDOW):seen], entries[chosen]])
                    scores = np.exp(0.2 * (q[row] @ keys.T.astype(np.float64)))
                    total = scores.sum(axis=1)
                    self.close_to(got.lse[row], np.log(total))
                    total = total + np.exp(sinks[layer].astype(np.float64))
                    self.close_to(got.o[row], scores / total[:, None] @ keys)
            if keep is not None:
                step.end([keep])
                for layer, (stored, entries) in enumerate(texts):
                    length = first + keep
                    texts[layer] = (stored[:length],
                                    entries[:length // RATIOS[layer] if RATIOS[layer] else 0])

    def empty_texts(self):
        return [(np.zeros((0, 32), np.float32), np.zeros((0, 32), np.float32)) for _ in RATIOS]

    def test_rows_attend_to_the_window_and_to_entries(self):
        model, sinks, rng = self.register_window()
        with model.open_sequence() as sequence:
            texts = self.empty_texts()
            self.window_step(sequence, rng, sinks, texts, 9)
            for index in range(8):
                self.window_step(sequence, rng, sinks, texts, 3, index % 2 == 0, keep=index % 4)
            self.assertEqual(sequence.length, 9 + 12)
            with sequence.fork() as child:
                own = list(texts)
                self.window_step(child, rng, sinks, own, 4)
            sequence.truncate(sequence.length - 1)
            for layer, (stored, entries) in enumerate(texts):
                texts[layer] = stored[:20], entries[:20 // RATIOS[layer] if RATIOS[layer] else 0]
            self.window_step(sequence, rng, sinks, texts, 5, True)

    def append(self, sequences, rows, keep, tails=None):
        """A step that adds `rows` rows of zeros to each sequence."""
        with self.service.step([(sequence, rows) for sequence in sequences]) as step:
            for layer, ratio in enumerate(RATIOS):
                made = sum((s.length + rows) // ratio - s.length // ratio
                           for s in sequences) if ratio else 0
                step.attend_async(layer, None, np.zeros((rows * len(sequences), 32)),
                                  mla_client.Profile.APPEND_ONLY,
                                  entries=np.zeros((made, 32))).result()
            step.end(keep, tails=tails)

    def test_tails_belong_to_what_was_committed(self):
        model = self.service.register_model(self.window_spec(tail_bytes=5000))
        self.assertEqual(model.spec.tail_bytes, 5000)
        tails = [secrets.token_bytes(5000) for _ in range(3)]
        with model.open_sequence() as first, model.open_sequence() as second:
            with self.assertRaisesRegex(mla_client.NotFound, "no tail"):
                first.read_tail()
            self.append([first, second], 3, [3, 1], {0: tails[0], 1: tails[1]})
            self.assertEqual(first.read_tail(), (3, tails[0]))
            self.assertEqual(second.read_tail(), (1, tails[1]))
            self.assertEqual(first.refresh().tail_position, 3)
            self.append([first, second], 2, [2, 2], {1: tails[2]})
            self.assertEqual(first.read_tail(), (3, tails[0]))  # for an earlier length
            self.assertEqual(second.read_tail(), (3, tails[2]))
            with first.fork() as child, first.fork(3) as at, first.fork(2) as below:
                self.assertEqual(child.read_tail(), (3, tails[0]))
                self.assertEqual(at.read_tail(), (3, tails[0]))
                self.assertIsNone(below.refresh().tail_position)
            second.truncate(2)
            with self.assertRaises(mla_client.NotFound):
                second.read_tail()
            for wrong in ({2: tails[0]}, {0: tails[0][1:]}):
                with self.assertRaisesRegex(mla_client.InvalidArgument, "end.tails"):
                    self.append([first], 1, [1], wrong)

    def test_entries_and_lists_are_checked(self):
        model, _, rng = self.register_window()
        with model.open_sequence() as sequence, self.service.step([(sequence, 4)]) as step:
            kv, q = rng.standard_normal((4, 32)), rng.standard_normal((4, 3, 32))
            for layer, entries in ((1, None), (1, kv[:1]), (0, kv[:1])):
                with self.assertRaisesRegex(mla_client.InvalidArgument, "entries"):
                    step.attend_window(layer, q, kv, entries)
            with self.assertRaisesRegex(mla_client.InvalidArgument, "kv_row_dtype"):
                step.attend_window(1, q, kv, kv[:2], kv_row_dtype=DType.F8_E4M3)
            for lists in ([[0], [], [], []], [[], [], [1], []], [[], [], [], [-2]]):
                with self.assertRaisesRegex(mla_client.InvalidArgument, "index lists"):
                    step.attend_window(1, q, kv, kv[:2], lists)
            step.abort()

    def test_specs_and_sinks_are_checked(self):
        for fields in ({"window": 0}, {"ratios": (2,)}, {"attention": "dense", "top_k": 0},
                       {"ratios": (0, 3)}, {"tail_bytes": 1 << 31}):
            with self.subTest(fields), self.assertRaises(mla_client.InvalidArgument):
                self.service.register_model(self.window_spec(**fields))
        for sinks in (np.zeros((2, 2)), np.full((2, 3), np.nan), np.full((2, 3), np.inf)):
            with self.subTest(sinks), self.assertRaises(mla_client.InvalidArgument):
                self.service.register_model(self.window_spec(), sinks=sinks)

    def test_sinks_may_come_later_and_from_each_rank(self):
        model = self.service.register_model(self.window_spec(needs_sinks=True))
        self.assertTrue(model.spec.needs_sinks)
        rng = np.random.default_rng(9)
        sinks = rng.standard_normal((2, 3)).astype(np.float32)
        sinks[0, 1] = -np.inf
        with model.open_sequence() as sequence:
            with self.assertRaisesRegex(mla_client.FailedPrecondition, "sinks"):
                self.append([sequence], 1, [1])
            self.assertEqual(model.upload_sinks(sinks[:, :2]), [0, 1])
            self.assertEqual(model.upload_sinks(sinks[1:, 2:], layer_begin=1, head_begin=2), [0])
            with self.assertRaisesRegex(mla_client.FailedPrecondition, "sinks"):
                self.append([sequence], 1, [1])
            with self.assertRaises(mla_client.AlreadyExists):
                model.upload_sinks(sinks[:, :2] + 1)
            self.assertEqual(model.upload_sinks(sinks), [])
            self.window_step(sequence, rng, sinks, self.empty_texts(), 5)
            self.assertEqual(model.upload_sinks(sinks), [])
            with self.assertRaises(mla_client.AlreadyExists):
                model.upload_sinks(sinks + 1)
        sinks = sinks + 1
        self.assertEqual(model.upload_sinks(sinks), [])
        with model.open_sequence() as sequence:
            self.window_step(sequence, rng, sinks, self.empty_texts(), 5)

    def test_uploads_of_sinks_are_checked(self):
        model, sinks, _ = self.register_window()
        bad = sinks.copy()
        for value in (np.nan, np.inf):
            bad[1, 0] = value
            with self.assertRaisesRegex(mla_client.InvalidArgument, r"sinks\[3\]"):
                model.upload_sinks(bad)
        for layer, head, field in ((2, 0, "layer_begin"), (0, 3, "head_begin"),
                                   (1, 0, "layer_count"), (0, 1, "head_count")):
            with self.assertRaisesRegex(mla_client.InvalidArgument, field):
                model.upload_sinks(sinks, layer, head)
        with self.assertRaisesRegex(mla_client.InvalidArgument, "shape"):
            model.upload_sinks(sinks[0])
        dense = self.service.register_model(
            ModelSpec("d-" + secrets.token_hex(4), Geometry(3, 24, 8), 2, 0.2, 4))
        with self.assertRaisesRegex(mla_client.InvalidArgument, "sinks"):
            dense.upload_sinks(sinks)
        with self.assertRaisesRegex(mla_client.InvalidArgument, "needs_sinks"):
            self.service.register_model(ModelSpec("d", Geometry(3, 24, 8), 2, 0.2, 4,
                                                  needs_sinks=True))
