"""W_UQ and W_O of FP8 checkpoints, which go to the server as codes with the scales of their blocks,
and those that cannot. On doubles of vLLM's layers with its own classes of methods, because its
platform for CPUs packs such weights, over servers that hold codes and servers that decode them."""

import pathlib
import sys
import types
import unittest
from unittest import mock

import torch
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

# pylint: disable=wrong-import-position
import mla_client
import server_binary
from mla_client import errors
from mla_client.pytorch.codes import decoded
from mla_client.serving import Admission, Given, Link, Planner
from mla_client.serving.layers import Codes
from mla_client.types import Geometry
from mla_client.vllm import backend, checks, weights
from mla_client.vllm.runtime import runtime
from test_backend import config, space
from test_projected import random, rotary

INPUTS = (".bazel/bin/server/mla-server", "client/python", "tests/engines", "tests/vllm")
ENVIRONMENT = "vllm"
# The rows of the second head begin in the middle of a block, and no dimension but v is a multiple
# of one.
HEADS, LORA, ROPE, NOPE, V, Q_LORA, HIDDEN = 3, 512, 64, 128, 128, 192, 200
ROWS = 5
LAYERS = 2  # of test_backend's configuration
PROJECTED_BYTES = LAYERS * HEADS * ((NOPE + ROPE) * Q_LORA + HIDDEN * V)


class Method(Fp8LinearMethod):
    """It computes as a kernel of vLLM's does: with inputs in eight bits, and with the weights that
    it was made for, however they lie in its layer."""

    use_marlin = use_deep_gemm = False
    block_quant = True

    def __init__(self, matrix):
        self.matrix = matrix

    def apply(self, layer, x, bias=None):
        scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-6) / 448
        given = (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
        return (given @ self.matrix.float().T).to(x.dtype)


class Linear:
    """A layer of an FP8 checkpoint; `scale`: the name of its scales."""

    bias = None

    def __init__(self, rows, columns, seed, scale="weight_scale_inv"):
        generator = torch.Generator().manual_seed(seed)
        scales = torch.exp2(torch.randint(-12, -8, (-(-rows // 128), -(-columns // 128)),
                                          generator=generator)) * 1.37
        each = decoded(torch.ones(rows, columns), scales, (128, 128)).float()
        self.weight = (random(rows, columns, seed=seed) * columns ** -0.5 / each).clamp(
            -448, 448).to(torch.float8_e4m3fn)
        self.weight_block_size, self.input_size_per_partition = [128, 128], columns
        setattr(self, scale, scales)
        self.quant_method = Method(decoded(self.weight, scales, (128, 128)))

    def plain(self):
        """A layer with the numbers that the codes stand for."""
        return types.SimpleNamespace(weight=self.quant_method.matrix, quant_method=None, bias=None)


def wrapper(layer, **changes):
    """What vLLM builds around the attention of a layer."""
    parts = {"q_lora_rank": Q_LORA, "rotary_emb": rotary_of_layers, "g_proj": None,
             "dcp_q_replicate": False,
             "q_b_proj": Linear(HEADS * (NOPE + ROPE), Q_LORA, 10 * layer + 1),
             "o_proj": Linear(HIDDEN, HEADS * V, 10 * layer + 2)}
    return types.SimpleNamespace(**{**parts, **changes})


def setUpModule():
    global rotary_of_layers  # pylint: disable=global-statement
    with mock.patch("test_projected.ROPE", ROPE):
        rotary_of_layers = rotary()


def plain(layer):
    return types.SimpleNamespace(**{**vars(layer), "q_b_proj": layer.q_b_proj.plain(),
                                    "o_proj": layer.o_proj.plain()})


class EngineTest(unittest.TestCase):
    """Layers of an engine over a real server."""

    def engine(self, target, layers, **options):
        """Starts layers with these wrappers, runs a pass of one request, and returns its hidden
        states, how the server holds the model, and the bytes that it holds."""
        given = config(target)
        given.model_config.hf_text_config.hidden_size = HIDDEN
        given.model_config.max_model_len = 32
        given.kv_transfer_config.kv_connector_extra_config.update(projected=True, **options)
        self.addCleanup(runtime.close)
        with mock.patch.object(backend, "get_current_vllm_config", lambda: given):
            for number, layer in enumerate(layers):
                kv_b_proj = space(
                    prefix=f"model.layers.{number}.self_attn.kv_b_proj", quant_method=None,
                    weight=random(HEADS * (NOPE + V), LORA, seed=50 + number) * LORA ** -0.5)
                made = backend.Impl(
                    HEADS, LORA + ROPE, (NOPE + ROPE) ** -0.5, 1, None, None, "auto", None,
                    "decoder", None, kv_lora_rank=LORA, qk_nope_head_dim=NOPE,
                    qk_rope_head_dim=ROPE, v_head_dim=V, kv_b_proj=kv_b_proj, q_lora_rank=Q_LORA)
                self.assertTrue(made.add_projections(layer))
            runtime.start()
        link = Link(checks.options_of(given))
        planner = Planner(Admission(link, "s", False), 8)
        runtime.bind(planner.plan([Given("a", 0, ROWS, (1,), begins=True)], ()))
        metadata = backend.Metadata(ROWS, 1, 1, torch.arange(8, 8 + ROWS), [ROWS], 8, None, None,
                                    ROWS, 0, None)
        found = torch.zeros(LAYERS, ROWS, HIDDEN)
        for number in range(LAYERS):
            kv = random(ROWS, LORA, seed=70 + number), random(ROWS, ROPE, seed=80 + number)
            runtime.attend(number, random(ROWS, 1, Q_LORA, seed=90 + number), kv, metadata,
                           found[number])
        runtime.finish()
        self.assertEqual(runtime.lost_blocks(), set())
        client = runtime.worker.link.client
        held = client.models()[0].projected_dtype, client.quota().resources["weight_bytes"].used
        link.close()
        runtime.close()
        return (found, *held)

    def test_the_same_hidden_states_as_of_bf16(self):
        layers = [wrapper(number) for number in range(LAYERS)]
        for name, dtype, saves in (("reference", "e4m3", True), ("cpu", "bf16", False)):
            with self.subTest(name), server_binary.start(f"--backend={name}") as server:
                got, held, some = self.engine(server.target, layers)
                forced, bf16, most = self.engine(server.target, layers, projected_dtype="bf16")
                want, also, whole = self.engine(server.target, [plain(one) for one in layers])
                self.assertEqual((held, bf16, also, most), (dtype, "bf16", "bf16", whole))
                self.assertGreater(float(want.abs().max()), 0.1)
                self.assertTrue(torch.equal(got, want))
                self.assertTrue(torch.equal(forced, want))
                saved = (whole - some) / PROJECTED_BYTES  # scales are a small part
                self.assertTrue(0.95 < saved < 1 if saves else saved == 0, saved)

    def test_layers_of_both_kinds(self):
        layers = [wrapper(0), plain(wrapper(1))]
        with server_binary.start("--backend=reference") as server:
            with self.assertLogs("mla_client", "INFO") as logs:
                got, held, _ = self.engine(server.target, layers)
            self.assertIn("layer 1, q_b_proj: torch.bfloat16", "".join(logs.output))
            self.assertEqual(held, "bf16")
            with self.assertRaisesRegex(errors.Unimplemented, "e4m3: layer 1, q_b_proj: torch.bf"):
                self.engine(server.target, layers, projected_dtype="e4m3")
            runtime.close()
            want, _, _ = self.engine(server.target, [plain(wrapper(0)), layers[1]])
            self.assertTrue(torch.equal(got, want))

    def test_a_checkpoint_of_bf16_takes_the_place_of_one_with_codes(self):
        """As any other checkpoint under the name of a model that was left."""
        layers = [wrapper(number) for number in range(LAYERS)]
        with server_binary.start("--backend=reference") as server:
            for given, dtype in ((layers, "e4m3"), ([plain(one) for one in layers], "bf16")):
                self.assertEqual(self.engine(server.target, given, keep_model=True)[1], dtype)


class WeightsTest(unittest.TestCase):
    """What a layer holds, and whether it is codes."""

    def setUp(self):
        self.linear = Linear(256, Q_LORA, 5)

    def codes(self, rows=256):
        return weights.codes_in(self.linear, "o_proj", rows, Q_LORA, torch.float32)

    def test_codes_with_scales_of_blocks(self):
        linears = [self.linear, *(Linear(256, Q_LORA, 5, scale)
                                  for scale in ("weight_scale", "weight_scale_inv"))]
        # On Hopper scales of DeepGEMM stay where they were.
        linears[2].quant_method.use_deep_gemm = True
        for self.linear in linears:
            codes, reason = self.codes()
            self.assertEqual(reason, "")
            self.assertTrue(torch.equal(codes.codes.view(torch.float8_e4m3fn).float(),
                                        self.linear.weight.float()))

    def refused(self, text, **changes):
        for name, value in changes.items():
            setattr(self.linear, name, value)
        codes, reason = self.codes()
        self.assertIsNone(codes)
        self.assertRegex(reason, f"^o_proj: {text}")

    def test_one_scale_for_all(self):
        self.refused("scales of no blocks", weight_block_size=None,
                     weight_scale_inv=torch.ones(1))

    def test_a_scale_for_each_row(self):
        self.refused("scales of no blocks", weight_block_size=None,
                     weight_scale_inv=torch.ones(256, 1))

    def test_scales_that_deep_gemm_has_packed(self):
        """As it does on Blackwell: exponents of four scales in an integer, in another order."""
        self.refused("scales torch.int32", weight_scale_inv=torch.zeros(
            256, 1, dtype=torch.int32))

    def test_scales_that_lie_otherwise(self):
        for scales in (torch.ones(256, 2), self.linear.weight_scale_inv.T[:1]):
            self.refused("scales ", weight_scale_inv=scales)

    def test_scales_that_are_transposed(self):
        """A square grid of them has the same shape, and they need not differ much."""
        for rows in (384, 320):
            linear = Linear(rows, rows, 6)
            linear.weight_scale_inv = 2.0 ** -9 * (1 + 0.1 * torch.rand(
                3, 3, generator=torch.Generator().manual_seed(1)).triu(1).ceil())
            linear.quant_method = Method(decoded(linear.weight, linear.weight_scale_inv,
                                                 (128, 128)))
            found = [weights.codes_in(linear, "o_proj", rows, rows, dtype)[1]
                     for dtype in (torch.float32, torch.bfloat16)]
            self.assertEqual(found, ["", ""])
            linear.weight_scale_inv = linear.weight_scale_inv.T
            self.assertEqual(weights.codes_in(linear, "o_proj", rows, rows, torch.bfloat16)[1],
                             "o_proj: Method computes with other numbers")

    def test_weights_that_a_kernel_has_packed(self):
        self.refused("Method computes with other numbers", weight=self.linear.weight.view(
            torch.uint8).view(32, 8, Q_LORA).transpose(0, 1).reshape(256, Q_LORA).view(
                torch.float8_e4m3fn))
        self.refused("torch.int32", weight=torch.zeros(16, 768, dtype=torch.int32))
        del self.linear.weight
        self.refused("no matrix of its own")

    def test_four_bits(self):
        self.refused("torch.uint8", weight=torch.zeros(256, Q_LORA // 2, dtype=torch.uint8))

    def test_a_slice_and_a_bias(self):
        codes, reason = self.codes(rows=384)
        self.assertEqual((codes, reason), (None, "o_proj: (256, 192), must be (384, 192)"))
        self.refused("no matrix of its own, or a bias", bias=torch.zeros(256))

    def test_a_layer_whose_other_matrix_has_no_codes_is_decoded(self):
        """By vLLM's own function, which wants dimensions that blocks divide."""
        geometry = Geometry(4, LORA, ROPE, NOPE, V, q_lora_rank=256, hidden_size=256)
        pair = space(weight=random(4 * (NOPE + V), LORA), quant_method=None)
        kept = weights.Layer(geometry, pair, torch.float32)
        q_proj, o_proj = Linear(4 * (NOPE + ROPE), 256, 6), Linear(256, 4 * V, 7)
        kept.projections = types.SimpleNamespace(q_proj=q_proj, o_proj=o_proj)
        self.assertIsInstance(kept.uploaded()[2], Codes)
        o_proj.weight_block_size, o_proj.weight_scale_inv = [64, 64], torch.ones(4, 8)
        o_proj.quant_method = Method(o_proj.weight.float())
        self.assertEqual(kept.codes()[1], "o_proj: scales of blocks (64, 64), must be of 128 x 128")
        w_uq, w_o = kept.uploaded()[2:]
        torch.testing.assert_close(w_uq.flatten(0, 1), q_proj.quant_method.matrix.float(),
                                   rtol=1 / 128, atol=0)
        torch.testing.assert_close(w_o.flatten(1), o_proj.weight.float())


class OptionsTest(unittest.TestCase):
    def test_a_type_that_is_none(self):
        with self.assertRaisesRegex(mla_client.InvalidArgument, "projected_dtype: got 'fp4'"):
            checks.options_of(config(kv_transfer_config={"kv_connector_extra_config": {
                "target": "a", "projected": True, "projected_dtype": "fp4"}}))


if __name__ == "__main__":
    unittest.main()
