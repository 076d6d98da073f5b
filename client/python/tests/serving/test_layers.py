"""Layers of a process, and their weights as the server takes them."""

import types
import unittest

import numpy as np

from mla_client import Geometry, errors
from mla_client.serving import Layers, Ranks
from mla_client.serving.layers import (Codes, check_pair, dense, id_of, number_of,
                                       projected_dtype_of, rotations_of, split, upload)
from mla_client.serving.plan import Part

SMALL = Geometry(2, 4, 3, 2, 5)  # heads, lora, rope, nope, v


def matrix(seed=0):
    """A kv_b_proj."""
    return np.random.default_rng(seed).standard_normal((2 * (2 + 5), 4), dtype=np.float32)


class LayersTest(unittest.TestCase):
    def test_layers_that_differ_are_refused_by_name(self):
        for other in (Geometry(2, 4, 3, 2, 6), Geometry(4, 4, 3, 2, 5)):
            layers = Layers()
            layers.add("a.0", 0, SMALL, 0.5, "first")
            with self.assertRaisesRegex(errors.Unimplemented, "a.1: it differs from layers before"):
                layers.add("a.1", 1, other, 0.5, "second")
        layers.add("a.1", 1, SMALL, 0.5 + 1e-7, "second")  # one scale, computed on two ways
        with self.assertRaisesRegex(errors.Unimplemented, "scale 0.6"):
            layers.add("a.2", 2, SMALL, 0.6, "third")

    def test_layers_are_numbered_from_nothing(self):
        layers = Layers()
        for number in (3, 1):
            layers.add(f"a.{number}", number, SMALL, 0.5, f"kept {number}")
        self.assertEqual(layers.places, {1: 0, 3: 1})
        self.assertEqual(layers.in_order(), ["kept 1", "kept 3"])
        with self.assertRaisesRegex(errors.Unimplemented, r"layers \[1, 3\]: must be numbered"):
            layers.check_whole()
        layers.add("a.0", 0, SMALL, 0.5, "kept 0")
        layers.add("a.2", 2, SMALL, 0.5, "kept 2")
        layers.check_whole(4)
        with self.assertRaisesRegex(errors.Unimplemented, "from 0 to 4"):
            layers.check_whole(5)

    def test_a_model_has_the_heads_of_all_ranks(self):
        layers = Layers()
        with self.assertRaisesRegex(errors.Unimplemented, "no attention layers that are MLA"):
            layers.spec("m")
        layers.add("a.0", 0, SMALL, 0.5, None)
        spec = layers.spec("m", Ranks(1, 4), 16, kv_format="bf16")
        self.assertEqual((spec.geometry.num_heads, spec.geometry.v_dim, spec.layers,
                          spec.softmax_scale, spec.page_size), (8, 5, 1, 0.5, 16))

    def test_numbers_in_names(self):
        self.assertEqual(number_of("model.layers.13.self_attn.kv_b_proj"), 13)
        for name in ("model.kv_b_proj", "a.1.b.2.c"):
            with self.assertRaisesRegex(errors.Unimplemented, "must have one number"):
                number_of(name)


class WeightsTest(unittest.TestCase):
    def test_each_head_is_cut_into_its_two_parts(self):
        whole, latent = matrix(), np.arange(4, dtype=np.float32)
        w_uk, w_uv = split(whole, SMALL)
        expanded = (whole @ latent).reshape(2, 7)
        np.testing.assert_allclose(w_uk @ latent, expanded[:, :2], rtol=1e-6)
        np.testing.assert_allclose(latent @ w_uv, expanded[:, 2:], rtol=1e-6)
        for part in dense((w_uk, w_uv)):
            self.assertTrue(part.flags["C_CONTIGUOUS"])

    def test_a_matrix_of_another_shape_is_packed_or_a_slice(self):
        for wrong in (matrix()[:7], matrix().T, matrix().reshape(-1)):
            with self.assertRaisesRegex(errors.Unimplemented, "neither quantised nor split"):
                split(wrong, SMALL)

    def test_weights_that_an_engine_has_cut_are_checked(self):
        pair = split(matrix(), SMALL)
        check_pair("layer 0", pair, SMALL)
        for wrong in ((None, pair[1]), (pair[0][:1], pair[1]), pair[::-1]):
            with self.assertRaisesRegex(errors.Unimplemented, "layer 0: W_UK and W_UV are"):
                check_pair("layer 0", wrong, SMALL)

    def test_an_id_follows_from_every_weight(self):
        first, other = split(matrix(), SMALL), split(matrix(1), SMALL)
        ids = {id_of("kind", pairs) for pairs in (
            [first, other], [other, first], [first], [first, first])}
        self.assertEqual(len(ids), 4)
        self.assertEqual(id_of("kind", [first]), id_of("kind", [split(matrix(), SMALL)]))
        self.assertNotEqual(id_of("kind", [first]), id_of("sort", [first]))

    def test_an_upload_that_is_not_complete_is_told(self):
        calls = []

        def status(layer, w_uk, w_uv, head_begin):
            calls.append((layer, head_begin))
            return types.SimpleNamespace(complete=False)
        spec = types.SimpleNamespace(geometry=SMALL, layers=2, model_id="m")
        model = types.SimpleNamespace(spec=spec, upload_weights=status)
        with self.assertRaisesRegex(errors.Internal, "model m: weights are not complete"):
            upload(model, lambda layer: (None, None))
        upload(model, lambda layer: (None, None), Ranks(1, 2))  # other ranks bring the rest
        self.assertEqual(calls, [(0, 0), (1, 0), (0, 1), (1, 1)])

    def test_other_projections_are_uploaded_with_the_pair(self):
        calls = []

        def note(what):
            return lambda *given, head_begin, **scales: calls.append(
                (what, *given, head_begin, *scales.items())) or (
                    types.SimpleNamespace(complete=what == "pair"))
        spec = types.SimpleNamespace(geometry=SMALL, layers=2, model_id="m",
                                     projected_dtype="bf16")
        model = types.SimpleNamespace(spec=spec, upload_weights=note("pair"),
                                      upload_projected=note("projections"))
        upload(model, lambda layer: ("uk", "uv", "uq", f"o{layer}"))
        self.assertEqual(calls, [
            ("projections", 0, "uq", "o0", 0), ("pair", 0, "uk", "uv", 0),
            ("projections", 1, "uq", "o1", 0), ("pair", 1, "uk", "uv", 0)])
        self.assertEqual(len(dense(tuple(map(np.ones, (1, 2, 3, 4))))), 4)
        # Codes go as codes, however the server holds the model.
        calls.clear()
        upload(model, lambda layer: ("uk", "uv", Codes("uq", "scales of uq"),
                                     Codes(f"o{layer}", "scales of o")), Ranks(0, 2))
        self.assertEqual(calls[0], ("projections", 0, "uq", "o0", 0,
                                    ("w_uq_scales", "scales of uq"), ("w_o_scales", "scales of o")))
        spec.projected_dtype = "e4m3"
        with self.assertRaisesRegex(errors.AlreadyExists, "model m: .* layer 0 of this checkpoint"):
            upload(model, lambda layer: ("uk", "uv", "uq", "o"))

    def test_codes_stay_codes(self):
        codes, scales = np.arange(6, dtype=np.uint8).reshape(2, 3).T, np.ones((1, 1), np.float64)
        made, plain = dense((Codes(codes, scales), codes))
        self.assertEqual([one.dtype for one in (made.codes, made.scales, plain)],
                         [np.uint8, np.float32, np.float32])
        self.assertTrue(made.codes.flags["C_CONTIGUOUS"])
        np.testing.assert_array_equal(made.codes, codes)
        ids = {id_of("kind", [(one,)]) for one in (
            Codes(codes, scales), Codes(codes, scales + 1), Codes(codes + 1, scales))}
        self.assertEqual(len(ids), 3)

    def test_how_a_server_is_to_hold_projections(self):
        good, odd = (Geometry(2, 4, 64, 128, v, q_lora_rank=8, hidden_size=8) for v in (128, 96))
        for asked, reasons, geometry, want in (
                ("", ("", ""), good, "e4m3"), ("", ("", "q: why"), good, "bf16"),
                ("", ("",), odd, "bf16"), ("bf16", ("",), good, "bf16"),
                ("e4m3", ("",), good, "e4m3")):
            self.assertEqual(projected_dtype_of(asked, reasons, geometry), want)
        for reasons, geometry, text in ((("", "q: why", "o"), good, "e4m3: layer 1, q: why"),
                                        (("",), odd, "v_dim 96, must be multiples of 16 and 64")):
            with self.assertRaisesRegex(errors.Unimplemented, text):
                projected_dtype_of("e4m3", reasons, geometry)
        # With it no layer is looked at.
        self.assertEqual(projected_dtype_of("bf16", (1 / 0 for _ in "a"), good), "bf16")


class RotationsTest(unittest.TestCase):
    def test_rows_are_rotated_by_their_positions(self):
        table = np.arange(20).reshape(10, 2)
        parts = [Part("a", 0, 1, 7), Part("b", 1, 4, 0), Part("c", 4, 6, 3)]
        np.testing.assert_array_equal(rotations_of(table, parts)[:, 0] // 2, [7, 0, 1, 2, 3, 4])
        np.testing.assert_array_equal(rotations_of(table, parts[:1]), [[14, 15]])
        self.assertIsNone(rotations_of(None, parts))


if __name__ == "__main__":
    unittest.main()
