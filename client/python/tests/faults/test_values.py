"""Tensors of every type: right outputs, or InvalidArgument, never patterns taken for numbers."""

import types
import unittest

import mla_client
import numpy as np
from mla_client import DType, Geometry, InvalidArgument, ModelSpec, Profile, arrays, bf16, wire

GEOMETRY = Geometry(2, 16, 8, 4, 4)
ROWS = 3


class Bfloat16:
    """An array as ml_dtypes and JAX have it: of a type that numpy does not know."""

    def __init__(self, patterns):
        self.dtype = types.SimpleNamespace(name="bfloat16")
        self._patterns = patterns

    def __array__(self, *_args, **_options):
        return self._patterns.view("V2")


def accepted(values):
    """The same values in every accepted form, by name. `values` are float32 that bf16 holds.
    """
    patterns = mla_client.to_bf16(values)
    return {
        "float32": values, "float64": values.astype(np.float64), "big-endian": values.astype(">f4"),
        "float16": values.astype(np.float16), "longdouble": values.astype(np.longdouble),
        "list": values.tolist(), "fortran": np.asfortranarray(values),
        "uint16": patterns, "big-endian uint16": patterns.astype(">u2"),
        "strided uint16": np.repeat(patterns, 2, axis=-1)[..., ::2],
        "bfloat16": Bfloat16(patterns),
    }


def refused(values):
    """Refused values, by name."""
    patterns = mla_client.to_bf16(values)
    return {
        "int16": patterns.view(np.int16), "big-endian int16": patterns.view(np.int16).astype(">i2"),
        "bool": values > 0, "int8": np.ones(values.shape, np.int8),
        "uint8": np.ones(values.shape, np.uint8), "int32": np.ones(values.shape, np.int32),
        "int64": np.ones(values.shape, np.int64), "complex": values.astype(complex),
        "masked": np.ma.masked_greater(values, 0), "masked uint16": np.ma.masked_array(patterns),
        "object": values.astype(object), "text": values.astype(str),
        "bytes": patterns.view("V2"), "list of bool": (values > 0).tolist(),
        "ragged": [[1.0], [1.0, 2.0]], "datetime": np.zeros(values.shape, "m8[s]"),
    }


class ValuesTest(unittest.TestCase):
    def setUp(self):
        rng = np.random.default_rng(1)

        def values(*shape):  # few bits, so that every type holds them
            return (rng.integers(-8, 9, shape) / 8).astype(np.float32)
        self.q, self.kv = values(ROWS, 2, 24), values(ROWS, 24)
        self.w_uk, self.w_uv = values(2, 4, 16), values(2, 16, 4)
        self.service = mla_client.LocalReference()
        self.number = 0

    def register(self, **options):
        self.number += 1
        spec = ModelSpec(f"values-{self.number}", GEOMETRY, 1, 0.1, **options)
        return self.service.register_model(spec)

    def attend(self, model, q, kv, **options):
        with model.open_sequence() as sequence, self.service.step([(sequence, ROWS)]) as step:
            result = step.attend(0, q, kv, Profile.ABSORBED, **options)
            step.abort()
        return result.o

    def test_the_layer_of_a_step(self):
        model = self.register()
        want = self.attend(model, self.q, self.kv)
        for dtype in DType:
            expected = want if dtype != DType.F8_E4M3 else self.attend(model, self.q, self.kv,
                                                                       dtype=dtype)
            for name, q in accepted(self.q).items():
                for other, kv in accepted(self.kv).items():
                    with self.subTest(q=name, kv=other, dtype=dtype):
                        np.testing.assert_array_equal(self.attend(model, q, kv, dtype=dtype),
                                                      expected)
        for field, (q, kv) in (("attend.q", (None, self.kv)), ("attend.kv", (self.q, None))):
            for name, wrong in refused(self.q if q is None else self.kv).items():
                with self.subTest(field=field, name=name), \
                        self.assertRaisesRegex(InvalidArgument, field) as caught:
                    self.attend(model, wrong if q is None else q, wrong if kv is None else kv)
                self.assertEqual(caught.exception.detail.field, field)

    def test_weights(self):
        def expanded(w_uk, w_uv):
            model = self.register()
            model.upload_weights(0, w_uk, w_uv)
            with model.open_sequence() as sequence, self.service.step([(sequence, ROWS)]) as step:
                o = step.attend(0, self.q[..., :12], self.kv).o
                step.abort()
            return o
        want = expanded(self.w_uk, self.w_uv)
        for (name, w_uk), w_uv in zip(accepted(self.w_uk).items(), accepted(self.w_uv).values()):
            with self.subTest(name):
                np.testing.assert_array_equal(expanded(w_uk, w_uv), want)
        model = self.register()
        for name, wrong in refused(self.w_uk).items():
            with self.subTest(name), self.assertRaisesRegex(InvalidArgument, "w_uk"):
                model.upload_weights(0, wrong, self.w_uv)
        for name, wrong in refused(self.w_uv).items():
            with self.subTest(name), self.assertRaisesRegex(InvalidArgument, "w_uv"):
                model.upload_weights(0, self.w_uk, wrong)

    def test_sinks_and_entries(self):
        values = self.kv[:1, :2]
        outputs = []
        for name, sinks in accepted(values).items():
            model = self.register(attention="sparse_v4", window=8, ratios=(3,), page_size=3,
                                  needs_sinks=True)
            model.upload_sinks(sinks)
            for other, entries in accepted(self.kv[:1]).items():
                with model.open_sequence() as sequence, \
                        self.service.step([(sequence, ROWS)]) as step:
                    outputs.append(step.attend_window(0, self.q, self.kv, entries).o)
                    step.abort()
                with self.subTest(sinks=name, entries=other):
                    np.testing.assert_array_equal(outputs[-1], outputs[0])
        for name, wrong in refused(values).items():
            with self.subTest(name), self.assertRaisesRegex(InvalidArgument, "sinks"):
                model.upload_sinks(wrong)
        with model.open_sequence() as sequence, self.service.step([(sequence, ROWS)]) as step:
            for name, wrong in refused(self.kv[:1]).items():
                with self.subTest(name), self.assertRaisesRegex(InvalidArgument, "attend.entries"):
                    step.attend_window(0, self.q, self.kv, wrong)
            step.abort()

    def test_inputs_of_the_indexer(self):
        model = self.register(attention="sparse_v32", top_k=2, index_heads=2, index_dim=4)
        kv = np.concatenate([self.kv, self.kv[:, :4]], axis=1)
        queries, weights = self.q[:, :, :4], self.kv[:, 4:6]

        def lists(queries, weights):
            with model.open_sequence() as sequence, self.service.step([(sequence, ROWS)]) as step:
                result = step.attend_indexed(0, self.q, queries, weights, kv, Profile.ABSORBED,
                                             want_lists=True)
                step.abort()
            return result.lists
        want = lists(queries, weights)
        for (name, some), others in zip(accepted(queries).items(), accepted(weights).values()):
            with self.subTest(name):
                np.testing.assert_array_equal(lists(some, others), want)
        for field, sample in (("index_queries", queries), ("head_weights", weights)):
            for name, wrong in refused(sample).items():
                with self.subTest(field=field, name=name), \
                        self.assertRaisesRegex(InvalidArgument, f"attend.{field}"):
                    lists(*((wrong, weights) if field == "index_queries" else (queries, wrong)))

    def test_index_lists_are_positions(self):
        spec = ModelSpec("lists", GEOMETRY, 1, 0.1, attention="sparse_v32", top_k=2)
        for given in ([[0], [1, 0], []], [np.array([0], np.uint8), np.array([1, 0]), ()],
                      np.array([[0, -1], [1, 0], [-1, -1]])):
            self.assertEqual(wire.index_lists(given, 3, spec).tolist(), [[0, -1], [1, 0], [-1, -1]])
        for wrong in ([True, False], np.array([True, False]), [0.0, 1.0], [2**31], ["0"],
                      np.ma.masked_array([0, 1], [False, True]), [[0]], [0, 1, 2]):
            with self.subTest(wrong=wrong), self.assertRaisesRegex(InvalidArgument, r"lists\[0\]"):
                wire.index_lists([wrong], 1, spec)

    def test_scales(self):
        sent = []
        self.service._upload_scales = lambda model_id, scales: sent.append(scales)
        model = self.register()
        for name, scales in accepted(np.array([0.5, 2.0], np.float32)).items():
            model.upload_scales(scales)
            self.assertEqual(sent[-1], [0.5, 2.0], name)
        with self.assertRaisesRegex(InvalidArgument, "scales"):
            model.upload_scales(np.array([1, 2], np.int16))

    def test_lists_of_whole_numbers_are_numbers(self):
        np.testing.assert_array_equal(arrays.floats("x", [[1, 2]]), np.array([[1, 2]], np.float32))
        self.assertEqual(arrays.floats("x", []).dtype, np.float32)

    def test_conversions(self):
        values = np.array([1.0, -2.5], np.float32)
        patterns = bf16.to_bf16(values)
        for given in (patterns, patterns.astype(">u2"), patterns.view(np.int16), patterns.tolist()):
            np.testing.assert_array_equal(bf16.from_bf16(given), values)
        for given in (values, values.astype(np.float16), patterns.astype(np.int32), values > 0,
                      np.ma.masked_array(patterns)):
            with self.assertRaises(TypeError):
                bf16.from_bf16(given)
        for given in (values.astype(">f8"), values.tolist(), values.astype(np.float16)):
            np.testing.assert_array_equal(bf16.to_bf16(given), patterns)
        np.testing.assert_array_equal(bf16.to_bf16([1, 2]), bf16.to_bf16([1.0, 2.0]))
        for given in (patterns, patterns.view(np.int16), values > 0, values.astype(complex),
                      np.ma.masked_array(values), values.astype(str)):
            with self.assertRaises(TypeError):
                bf16.to_bf16(given)

    def test_counts_of_a_step(self):
        model = self.register()
        sequence = model.open_sequence()
        for wrong in ([], (), np.array([], int), [1, 1], np.array([1, 1]), [True], [False],
                      np.array([True])):
            with self.service.step([(sequence, ROWS)]) as step:
                step.attend(0, self.q, self.kv, Profile.ABSORBED)
                with self.subTest(wrong=wrong), \
                        self.assertRaisesRegex(InvalidArgument, "end.committed"):
                    step.end(wrong)
                step.abort()
            self.assertEqual(sequence.length, 0)
        with self.service.step([(sequence, ROWS)]) as step:
            step.attend(0, self.q, self.kv, Profile.ABSORBED)
            self.assertEqual(step.end([0]), [0])


if __name__ == "__main__":
    unittest.main()
