"""Models whose checkpoint is FP8: W_UQ and W_O go to the server as codes, with block scales.

Layers of the library's own FP8 class hold the projections that the server takes over. The worker
calls none of them, so its GPU kernels are not needed. The right result is that of a model with the
weights that the codes stand for, in bf16.
"""

import itertools
import unittest

import mla_client
import server_binary
import torch
from mla_client import transformers as adapter
from mla_client.pytorch.codes import codes_of, decoded
from mla_client.serving.layers import Codes
from mla_client.transformers import models
from test_adapter import prompts, small
from transformers.integrations.finegrained_fp8 import FP8Linear

INPUTS = (".bazel/bin/server/mla-server", "client/python", "tests/engines", "tests/transformers")
ENVIRONMENT = "transformers"
torch.set_num_threads(1)
# Three heads of 192 rows: the second one begins in the middle of a block. No other dimension that
# the scales are for is a multiple of 128.
FIELDS = {"num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 192,
          "hidden_size": 200, "num_hidden_layers": 2}
TAKEN = ("q_b_proj", "o_proj", "kv_b_proj")
PROJECTED_BYTES = 2 * (3 * 192 * 192 + 200 * 3 * 128)  # weights of W_UQ and W_O in two layers


def layers(model):
    """The attention layers."""
    return [layer.self_attn for layer in model.model.layers]


def fp8(model, names=TAKEN, block=(128, 128), numbers=None, scale_fmt="float"):
    """Puts layers of FP8 in the place of some projections of a model, or of its layers `numbers`.
    The scales differ by up to a factor of eight."""
    generator = torch.Generator().manual_seed(7)
    for number, layer in enumerate(layers(model)):
        for name in names if numbers is None or number in numbers else ():
            weight = getattr(layer, name).weight.detach()
            made = FP8Linear(weight.shape[1], weight.shape[0], block_size=block,
                             scale_fmt=scale_fmt)
            scales = torch.randint(-12, -8, made.weight_scale_inv.shape, generator=generator)
            scales = torch.exp2(scales) * (1 if scale_fmt == "ue8m0" else 1.37)
            made.weight_scale_inv = torch.nn.Parameter(
                scales.to(made.weight_scale_inv.dtype), requires_grad=False)
            each = decoded(torch.ones(weight.shape), scales, block).float()
            made.weight = torch.nn.Parameter(
                (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn), requires_grad=False)
            setattr(layer, name, made)
    return model


def plain(model):
    """The same model with the numbers that its codes stand for, in plain layers."""
    for layer in layers(model):
        for name in TAKEN:
            had = getattr(layer, name)
            if isinstance(had, FP8Linear):
                made = torch.nn.Linear(had.in_features, had.out_features, bias=False)
                made.weight.data = decoded(had.weight, had.weight_scale_inv, had.block_size).float()
                setattr(layer, name, made)
    return model


def logits(model):
    """Of a prompt, and of a token after it."""
    with torch.no_grad():
        first = model(**prompts(2, 7), use_cache=True)
        name = next(name for name in ("cache", "past_key_values") if name in first)
        mask = torch.cat((prompts(2, 7)["attention_mask"], torch.ones(2, 1, dtype=torch.int64)), 1)
        last = model(input_ids=torch.tensor([[3], [5]]), attention_mask=mask,
                     **{name: first[name]})
    return torch.cat((first.logits, last.logits), dim=1)


class ServerTest(unittest.TestCase):
    """Servers that hold codes, and servers that decode them, with the numbers of both held."""

    def attached(self, client, model, **options):
        """The logits of a model whose projections are on a server, how that holds them, and the
        bytes that it holds."""
        with adapter.attach(model, client, projected=True, **options) as attached:
            found = logits(model)
            spec = attached.model.spec
            held = client.quota().resources["weight_bytes"].used
        attached.model.unregister()
        return found, spec, held

    def test_the_same_hidden_states_as_of_bf16(self):
        for backend, held in (("reference", "e4m3"), ("cpu", "bf16")):
            with server_binary.start(f"--backend={backend}") as server, \
                    mla_client.Client.connect(server.target) as client:
                for interleaved in (True, False):
                    with self.subTest(backend=backend, interleaved=interleaved):
                        model = fp8(small(**FIELDS, rope_interleave=interleaved))
                        got, spec, bytes_held = self.attached(client, model)
                        forced, other, most = self.attached(client, model, projected_dtype="bf16")
                        want, whole, bytes_whole = self.attached(client, plain(model))
                        self.assertEqual((spec.projected_dtype, other.projected_dtype,
                                          whole.projected_dtype), (held, "bf16", "bf16"))
                        self.assertTrue(torch.equal(got, want))
                        self.assertTrue(torch.equal(forced, want))
                        self.assertEqual(most, bytes_whole)
                        # Codes are half of it; scales are a small part.
                        saved = (bytes_whole - bytes_held) / PROJECTED_BYTES
                        if held == "e4m3":
                            self.assertTrue(0.95 < saved < 1, saved)
                        else:
                            self.assertEqual(saved, 0)

    def test_dimensions_that_scales_of_the_server_do_not_divide(self):
        """Codes go, and the server holds their numbers in bf16."""
        with server_binary.start("--backend=reference") as server, \
                mla_client.Client.connect(server.target) as client:
            model = fp8(small(**{**FIELDS, "v_head_dim": 96}))
            with self.assertLogs("mla_client", "INFO") as logs:
                got, spec, held = self.attached(client, model)
            self.assertIn("v_dim 96, must be multiples of 16 and 64", logs.output[0])
            want, _, whole = self.attached(client, plain(model))
            self.assertEqual((spec.projected_dtype, held), ("bf16", whole))
            self.assertTrue(torch.equal(got, want))

    def test_a_checkpoint_without_codes_is_another_model(self):
        with server_binary.start("--backend=reference") as server, \
                mla_client.Client.connect(server.target) as client:
            model = fp8(small(**FIELDS))
            with adapter.attach(model, client, projected=True, model_id="m"):
                pass
            with self.assertRaisesRegex(mla_client.AlreadyExists, "m: .* layer 0 of this check"):
                adapter.attach(plain(model), client, projected=True, model_id="m")


class LayersTest(unittest.TestCase):
    """Which weights go as codes, and what becomes of others."""

    def setUp(self):
        self.service = mla_client.LocalReference()

    def same(self, model, codes, **options):
        """Attaches a model and compares it with its decoded one. `codes`: of each layer, whether it
        has them."""
        asked = []
        register = self.service.register_model

        def noted(spec, *args, **kwargs):
            asked.append(spec.projected_dtype)
            return register(spec, *args, **kwargs)
        self.service.register_model = noted
        with adapter.attach(model, self.service, projected=True, **options) as attached:
            geometry = attached.model.spec.geometry
            self.assertEqual([isinstance(models.projections_of(layer, geometry)[0], Codes)
                              for layer in layers(model)], codes)
            got = logits(model)
        with adapter.attach(plain(model), self.service, projected=True):
            self.assertTrue(torch.equal(got, logits(model)))
        return asked[-2]

    def test_layers_of_both_kinds_are_held_as_bf16(self):
        with self.assertLogs("mla_client", "INFO") as logs:
            self.assertEqual(self.same(fp8(small(**FIELDS), numbers=[0]), [True, False]), "bf16")
        self.assertIn("layer 1, q_b_proj: torch.float32", logs.output[0])
        model = fp8(small(**FIELDS), ("q_b_proj",))
        with self.assertRaisesRegex(mla_client.Unimplemented, "e4m3: layer 0, o_proj: torch.floa"):
            adapter.attach(model, self.service, projected=True, projected_dtype="e4m3")

    def test_other_blocks_are_decoded(self):
        for block, text in ((None, "no blocks"), ((64, 128), r"blocks \(64, 128\)")):
            with self.subTest(block=block), self.assertLogs("mla_client", "INFO") as logs:
                self.assertEqual(self.same(fp8(small(**FIELDS), block=block), [False, False]),
                                 "bf16")
                self.assertRegex(logs.output[0], f"layer 0, q_b_proj: scales of {text}, must be")

    def test_scales_that_are_powers_of_two(self):
        self.assertEqual(self.same(fp8(small(**FIELDS), scale_fmt="ue8m0"), [True, True]), "e4m3")

    def test_pairs_across_blocks_are_decoded(self):
        """The rotated rows of a head of 96 + 64 rows lie in two blocks."""
        fields = {**FIELDS, "qk_nope_head_dim": 96}
        with self.assertLogs("mla_client", "INFO") as logs:
            self.assertEqual(self.same(fp8(small(**fields)), [False, False]), "bf16")
        self.assertIn("pairs of rotated rows lie in blocks with different", logs.output[0])
        # Without pairs that are taken apart the rows stay where they are.
        self.assertEqual(self.same(fp8(small(**fields, rope_interleave=False)), [True, True]),
                         "e4m3")

    def test_dimensions_that_scales_of_the_server_do_not_divide(self):
        with self.assertLogs("mla_client", "INFO") as logs:
            self.assertEqual(self.same(fp8(small(**{**FIELDS, "v_head_dim": 96})), [True, True]),
                             "bf16")
        self.assertIn("v_dim 96, must be multiples of 16 and 64", logs.output[0])

    def test_a_quantised_pair_alone(self):
        """kv_b_proj is decoded where the server has no projections, too."""
        model = fp8(small(**FIELDS), ("kv_b_proj",))
        geometry = models.layers_of(model).geometry
        pairs = [models.pair_of(layer, geometry) for layer in layers(model)]
        for got, layer in zip(pairs, layers(plain(model))):
            for one, want in zip(got, models.pair_of(layer, geometry)):
                torch.testing.assert_close(one.float(), want, rtol=0, atol=0)

    def test_what_is_refused_is_named(self):
        model = small(**FIELDS)
        for options, text in (({"projected_dtype": "bf16"}, "'bf16' without projected"),
                              ({"projected": True, "projected_dtype": "fp8"}, "got 'fp8', must be"),
                              ({"projected_dtype": 8}, "got 8, must be")):
            with self.assertRaisesRegex(mla_client.InvalidArgument, f"projected_dtype: .*{text}"):
                adapter.attach(model, self.service, **options)
        for name, model_id in itertools.product(TAKEN, ("", "m")):
            other = fp8(small(**FIELDS), (name,))
            module = getattr(layers(other)[1], name)
            module.weight = torch.nn.Parameter(module.weight.view(torch.int8), requires_grad=False)
            with self.assertRaisesRegex(mla_client.Unimplemented, f"{name}: got torch.int8"):
                adapter.attach(other, self.service, projected=True, model_id=model_id)
        for model_id in ("", "m"):
            half = fp8(small(**FIELDS))
            module = layers(half)[1].q_b_proj  # as a rank of two has it
            module.weight = torch.nn.Parameter(module.weight[:288], requires_grad=False)
            module.weight_scale_inv = torch.nn.Parameter(module.weight_scale_inv[:3])
            with self.assertRaisesRegex(mla_client.Unimplemented, r"q_b_proj, .* got \(288, 192\)"):
                adapter.attach(half, self.service, projected=True, model_id=model_id)
        # Nothing was registered: another checkpoint may have the name.
        with adapter.attach(fp8(small(**FIELDS)), self.service, projected=True, model_id="m"):
            pass
        short = fp8(small(**FIELDS))
        layers(short)[0].kv_b_proj.weight_scale_inv.data = torch.ones(3, 3)
        with self.assertRaisesRegex(mla_client.Unimplemented, r"scales \(3, 3\) of a matrix \(768"):
            adapter.attach(short, self.service, projected=True)

    def test_ids_follow_from_codes_and_scales(self):
        ids = set()
        for change in (None, "weight", "weight_scale_inv"):
            model = fp8(small(**FIELDS))
            if change is not None:
                values = getattr(layers(model)[1].o_proj, change).data
                values.view(torch.uint8 if change == "weight" else torch.float32)[0, 0] += 1
            with adapter.attach(model, self.service, projected=True) as attached:
                ids.add(attached.model.spec.model_id)
        self.assertEqual(len(ids), 3)


class MatrixTest(unittest.TestCase):
    """Codes of a matrix, whatever engine has it."""

    def test_codes_of_amd(self):
        """They stand for half of the same code's number, and their own NaN is no number of e4m3."""
        codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
        own = torch.full((1, 1), 0.25)
        held, reason = codes_of(codes.view(torch.float8_e4m3fnuz), own, (128, 128))
        self.assertEqual((held, reason[:8]), (None, "codes of"))
        for code in (0x7f, 0xff, 0x80):
            codes[codes == code] = 1
        fnuz = codes.view(torch.float8_e4m3fnuz)
        held, reason = codes_of(fnuz, own, (128, 128))
        self.assertEqual(reason, "")
        again = held.codes.view(torch.float8_e4m3fn).float() * held.scales
        self.assertTrue(torch.equal(again, fnuz.float() * 0.25))
        self.assertTrue(torch.equal(decoded(fnuz, own, (128, 128)).float(), again))

    def test_scales_of_another_shape_or_kind(self):
        weight = torch.zeros(130, 200).to(torch.float8_e4m3fn)
        self.assertEqual(codes_of(weight, torch.ones(2, 2), [128, 128])[1], "")
        for scales in (None, torch.ones(2), torch.ones(1, 2), torch.ones(2, 2, dtype=torch.int32)):
            codes, reason = codes_of(weight, scales, (128, 128))
            self.assertIsNone(codes)
            self.assertIn("must be floats (2, 2)", reason)
        for other in (torch.zeros(130, 200), weight[0]):
            self.assertIn("must be a matrix in", codes_of(other, torch.ones(2, 2), (128, 128))[1])


if __name__ == "__main__":
    unittest.main()
