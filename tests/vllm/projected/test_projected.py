"""Projections of vLLM's layers on a server: tables of rotations, and weights that kernels have
taken, on doubles of vLLM's layers. Its rotary classes are the real ones."""

import types
import unittest

import torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding import get_rope

from mla_client import errors
from mla_client.types import Geometry
from mla_client.vllm.projected import ProjectedLayer, Projections, whole
from mla_client.vllm.weights import ASKED_COLUMNS, Layer, matrix_of

INPUTS = ("client/python", "tests/engines", "tests/vllm")
ENVIRONMENT = "vllm"
HEADS, LORA, ROPE, NOPE, V, Q_LORA, HIDDEN, POSITIONS = 3, 24, 8, 6, 5, 10, 7, 64
YARN = {"rope_type": "deepseek_yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 0.5}


def random(*shape, seed=0):
    """Elements of about 1."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Method(UnquantizedLinearMethod):
    """Computes with what the kernel has."""

    def apply(self, layer, x, bias=None):
        return x @ layer.matrix.T


class Linear:
    """A linear layer whose weights a kernel has taken, as on CPUs."""

    bias = None

    def __init__(self, matrix):
        self.matrix, self.weight, self.quant_method = matrix, torch.empty(0), Method()

    def __call__(self, x):
        return x @ self.matrix.T, None


def rotary(neox=False, parameters=None):
    """One of vLLM's own."""
    plain = CompilationConfig(mode=0, custom_ops=["none"])
    with set_current_vllm_config(VllmConfig(compilation_config=plain)):
        return get_rope(ROPE, max_position=POSITIONS, is_neox_style=neox, dtype=torch.float32,
                        rope_parameters=parameters or {"rope_type": "default",
                                                       "rope_theta": 10000.0})


def layer(of_rotary, **changes):
    """What a ProjectedLayer has."""
    parts = {"q_lora_rank": Q_LORA, "q_b_proj": Linear(random(HEADS * (NOPE + ROPE), Q_LORA)),
             "o_proj": Linear(random(HIDDEN, HEADS * V, seed=1)), "rotary_emb": of_rotary,
             "g_proj": None, "dcp_q_replicate": False}
    return types.SimpleNamespace(**{**parts, **changes})


GEOMETRY = Geometry(HEADS, LORA, ROPE, NOPE, V, q_lora_rank=Q_LORA, hidden_size=HIDDEN)


class RotationsTest(unittest.TestCase):
    def test_queries_are_rotated_as_the_layer_rotates_them(self):
        for neox in (False, True):
            for parameters in (None, YARN):
                with self.subTest(neox=neox, parameters=parameters):
                    made = layer(rotary(neox, parameters))
                    own = Projections(made, GEOMETRY)
                    self.assertEqual(own.layout, "halves" if neox else "interleaved")
                    given = random(5, Q_LORA, seed=2)
                    plain = made.q_b_proj(given)[0].view(5, HEADS, -1)
                    want, _ = made.rotary_emb(torch.arange(5), plain[..., NOPE:].clone(),
                                              torch.zeros(5, 1, ROPE))
                    got = own.queries(given)
                    torch.testing.assert_close(got[..., NOPE:], want, rtol=1e-4, atol=1e-4)
                    torch.testing.assert_close(got[..., :NOPE], plain[..., :NOPE])
                    self.assertGreater(float((want[1:] - plain[1:, :, NOPE:]).abs().max()), 0.1)

    def test_the_table_has_cosines_and_then_sines(self):
        table = Projections(layer(rotary()), GEOMETRY).table(POSITIONS)
        self.assertEqual((table.shape, str(table.dtype)), ((POSITIONS, ROPE), "float32"))
        angles = 3 * 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
        torch.testing.assert_close(torch.from_numpy(table[3]),
                                   torch.cat((angles.cos(), angles.sin())))

    def test_tables_that_do_not_fit_are_refused(self):
        with self.assertRaisesRegex(errors.Unimplemented, r"\(64, 8\), must be .* at least 65"):
            Projections(layer(rotary()), GEOMETRY).table(POSITIONS + 1)
        wide = Geometry(HEADS, LORA, 2 * ROPE, NOPE, V, q_lora_rank=Q_LORA, hidden_size=HIDDEN)
        with self.assertRaisesRegex(errors.Unimplemented, r"must be \[positions, 16\]"):
            Projections(layer(rotary()), wide).table(1)

    def test_a_layer_that_rotates_otherwise_is_refused(self):
        real = rotary()
        backwards = types.SimpleNamespace(
            cos_sin_cache=real.cos_sin_cache, rotary_dim=ROPE, dtype=torch.float32,
            is_neox_style=True)  # while it rotates neighbours
        with self.assertRaisesRegex(errors.Unimplemented, "rotates otherwise than its cosines"):
            Projections(layer(_Callable(backwards, real)), GEOMETRY).table(POSITIONS)

    def test_all_layers_rotate_alike(self):
        first, same = (Projections(layer(rotary()), GEOMETRY) for _ in range(2))
        self.assertEqual(whole([first, same]), [first, same])
        other = Projections(layer(rotary(parameters=YARN)), GEOMETRY)
        with self.assertRaisesRegex(errors.Unimplemented, "rotate in different ways"):
            whole([first, other])
        with self.assertRaisesRegex(errors.Unimplemented, "none that vLLM lets others replace"):
            whole([first, None])

    def test_what_a_server_does_not_have(self):
        for changes, text in (({"rotary_emb": None}, "without rotated positions"),
                              ({"g_proj": Linear(None)}, "a gate between attention and o_proj"),
                              ({"dcp_q_replicate": True}, "several ranks have alike")):
            with self.assertRaisesRegex(errors.Unimplemented, text):
                Projections(layer(rotary(), **changes), GEOMETRY)


class LayerTest(unittest.TestCase):
    """The layer in vLLM's place, against vLLM's own, whose forward pass it has where the option is
    not given."""

    def forward(self, projected, q_lora_rank):
        """What a layer hands to its attention, and what it returns; `projected`: the option."""
        made = ProjectedLayer.__new__(ProjectedLayer)
        torch.nn.Module.__init__(made)
        rank = q_lora_rank or HIDDEN
        linear = {"fused_qkv_a_proj": Linear(random(rank + LORA + ROPE, HIDDEN, seed=3)),
                  "kv_a_proj_with_mqa": Linear(random(LORA + ROPE, HIDDEN, seed=4)),
                  "o_proj": Linear(random(HIDDEN, HEADS * V, seed=1))}
        queries = Linear(random(HEADS * (NOPE + ROPE), rank))
        given = []

        def attention(q, rows, key, output_shape, **others):
            given.append((q, rows, key))
            return random(*output_shape, seed=5)
        fields = {**linear, "q_b_proj": queries, "q_proj": queries, "q_lora_rank": q_lora_rank,
                  "kv_lora_rank": LORA, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE,
                  "qk_head_dim": NOPE + ROPE, "v_head_dim": V, "num_heads": HEADS,
                  "hidden_size": HIDDEN, "q_a_layernorm": lambda x: x.tanh(),
                  "kv_a_layernorm": lambda x: x.sin(), "rotary_emb": rotary(), "g_proj": None,
                  "indexer": None, "is_sparse": False, "skip_topk": False,
                  "dcp_q_replicate": False, "fuse_qkv_rmsnorm": False, "mla_attn": attention,
                  "_projected": projected}
        made.__dict__.update(fields)
        with torch.no_grad():
            found = made(torch.arange(5), random(5, HIDDEN, seed=6))
        return made, given[0], found

    def test_it_ends_before_the_projections_of_queries(self):
        for rank in (Q_LORA, None):
            with self.subTest(rank=rank):
                own, (q, rows, key), _ = self.forward(False, rank)
                made, (low, others, rotated), found = self.forward(True, rank)
                self.assertEqual((low.shape, found.shape), ((5, 1, rank or HIDDEN), (5, HIDDEN)))
                geometry = Geometry(HEADS, LORA, ROPE, NOPE, V, q_lora_rank=rank or HIDDEN,
                                    hidden_size=HIDDEN)
                torch.testing.assert_close(Projections(made, geometry).queries(low[:, 0]), q,
                                           rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(others, rows)
                torch.testing.assert_close(rotated, key)
                self.assertFalse(own._projected)

    def test_queries_that_are_scaled_are_refused(self):
        made, _, _ = self.forward(True, Q_LORA)
        for positions, scaling in ((torch.arange(5), torch.ones(5)), (torch.zeros(3, 5), None)):
            with self.assertRaisesRegex(errors.Unimplemented, "scaled by their positions"):
                made(positions, random(5, HIDDEN), scaling)


class _Callable:
    """The fields of one, and the rotation of another."""

    def __init__(self, fields, rotation):
        self.__dict__.update(vars(fields))
        self.rotation = rotation

    def __call__(self, *given):
        return self.rotation(*given)


class WeightsTest(unittest.TestCase):
    def test_weights_that_a_kernel_has_taken_are_asked_of_the_layer(self):
        for columns in (3, ASKED_COLUMNS, ASKED_COLUMNS + 5):
            matrix = random(4, columns, seed=columns)
            torch.testing.assert_close(
                matrix_of(Linear(matrix), "o_proj", 4, columns, torch.float32), matrix)

    def test_a_slice_and_a_bias_are_refused_by_name(self):
        with self.assertRaisesRegex(errors.Unimplemented, r"o_proj: got \(4, 6\), must be .*8, 6"):
            matrix_of(Linear(random(4, 6)), "o_proj", 8, 6, torch.float32)
        biased = Linear(random(4, 6))
        biased.bias = torch.zeros(4)
        with self.assertRaisesRegex(errors.Unimplemented, "without a bias"):
            matrix_of(biased, "q_b_proj", 4, 6, torch.float32)

    def test_the_server_gets_both_projections(self):
        kept = Layer(GEOMETRY, Linear(random(HEADS * (NOPE + V), LORA)), torch.float32)
        self.assertEqual(len(kept.uploaded()), 2)
        made = layer(rotary())
        kept.projections = Projections(made, GEOMETRY)
        w_uq, w_o = kept.uploaded()[2:]
        torch.testing.assert_close(w_uq, made.q_b_proj.matrix.view(HEADS, NOPE + ROPE, Q_LORA))
        torch.testing.assert_close(w_o, made.o_proj.matrix.view(HIDDEN, HEADS, V))
        outputs = random(2, HEADS, V, seed=9)
        torch.testing.assert_close(kept.projections.hiddens(outputs),
                                   torch.einsum("rhv,nhv->rn", outputs, w_o))
        made.q_lora_rank, made.q_proj = None, made.q_b_proj
        self.assertIs(Projections(made, GEOMETRY).q_proj, made.q_proj)


if __name__ == "__main__":
    unittest.main()
