"""PROJECTED as every Service must handle it; a part of service_contract."""

import secrets

import mla_client
import numpy as np
from mla_client import DType, Geometry, ModelSpec, Profile, bf16

HEADS, LORA, ROPE, NOPE, V, Q_LORA, HIDDEN, LAYERS = 5, 24, 8, 16, 32, 140, 150, 2
SCALE = 0.2
# Cosine distance of a row of hidden states from float64.
BF16_DISTANCE = 1e-5


def rotated(query, rotation, layout):
    """The rotated part of a query, by complex numbers."""
    angle = rotation[:ROPE // 2] + 1j * rotation[ROPE // 2:]
    if layout == "halves":
        turned = (query[:ROPE // 2] + 1j * query[ROPE // 2:]) * angle
        return np.concatenate([turned.real, turned.imag])
    turned = (query[::2] + 1j * query[1::2]) * angle
    return np.stack([turned.real, turned.imag], axis=1).reshape(-1)


class ProjectedContract:
    """Tests for a class with `service`, as ServiceContract is."""

    projected_steps = ((9, DType.BF16), (1, DType.BF16), (1, DType.F32))  # rows, and their type

    def projected_spec(self, rope_layout="halves", **fields):
        geometry = Geometry(HEADS, LORA, ROPE, NOPE, V, q_lora_rank=Q_LORA, hidden_size=HIDDEN)
        return ModelSpec("p-" + secrets.token_hex(4), geometry, LAYERS, SCALE, 4,
                         rope_layout=rope_layout, **fields)

    def projected_weights(self, rng):
        """Weights of each layer, rounded to bf16: W_UK, W_UV, W_UQ, W_O."""
        def values(*shape):
            return mla_client.round_to_bf16(rng.standard_normal(shape) / 6)
        return [(values(HEADS, NOPE, LORA), values(HEADS, LORA, V),
                 values(HEADS, NOPE + ROPE, Q_LORA), values(HIDDEN, HEADS, V))
                for _ in range(LAYERS)]

    def upload_projected(self, model, weights):
        for layer, (w_uk, w_uv, w_uq, w_o) in enumerate(weights):
            self.assertFalse(model.upload_weights(layer, w_uk, w_uv).complete)
            self.assertIn(layer, model.upload_projected(layer, w_uq[:2], w_o[:, :2]).missing_layers)
            status = model.upload_projected(layer, w_uq[2:], w_o[:, 2:].reshape(HIDDEN, -1), 2)
        self.assertTrue(status.complete)

    def hidden(self, weights, query, keys, rotation, layout):
        """One row of hidden states in float64."""
        w_uk, w_uv, w_uq, w_o = (one.astype(np.float64) for one in weights)
        keys, hidden = keys.astype(np.float64), np.zeros(HIDDEN)
        for head in range(HEADS):
            q = w_uq[head] @ query.astype(np.float64)
            q = np.concatenate([q[:NOPE] @ w_uk[head], rotated(q[NOPE:], rotation, layout)])
            scores = keys @ q * SCALE
            chances = np.exp(scores - scores.max())
            latent = chances @ keys[:, :LORA] / chances.sum()
            hidden += w_o[:, head] @ (latent @ w_uv[head])
        return hidden

    def projected_step(self, sequence, weights, rng, seen, rows, layout, **options):
        """A step of one sequence; returns the largest distance. `seen` has its rows by layer."""
        angles = rng.uniform(0, 6.28, (rows, ROPE // 2))
        rotations = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        worst = 0.0
        with self.service.step([(sequence, rows)], rotations=rotations) as step:
            for layer in range(LAYERS):
                kv = mla_client.round_to_bf16(rng.standard_normal((rows, LORA + ROPE)))
                q = mla_client.round_to_bf16(rng.standard_normal((rows, Q_LORA)))
                seen[layer] = np.concatenate([seen[layer], kv])
                got = step.attend(layer, q, kv, Profile.PROJECTED, **options).o
                self.assertEqual(got.shape, (rows, HIDDEN))
                for row in range(rows):
                    want = self.hidden(weights[layer], q[row],
                                       seen[layer][:len(seen[layer]) - rows + row + 1],
                                       rotations[row].astype(np.float64), layout)
                    cosine = got[row] @ want / np.linalg.norm(got[row]) / np.linalg.norm(want)
                    worst = max(worst, 1 - cosine)
        return worst

    def test_projected_rows_agree_with_float64(self):
        for layout in ("interleaved", "halves"):
            with self.subTest(layout=layout):
                rng = np.random.default_rng(4)
                weights = self.projected_weights(rng)
                model = self.service.register_model(self.projected_spec(layout))
                self.assertEqual(model.spec.rope_layout, layout)
                self.upload_projected(model, weights)
                with model.open_sequence() as sequence:
                    seen = [np.zeros((0, LORA + ROPE), np.float32)] * LAYERS
                    for rows, dtype in self.projected_steps:
                        worst = self.projected_step(sequence, weights, rng, seen, rows, layout,
                                                    dtype=dtype, o_dtype=dtype)
                        self.assertLess(worst, BF16_DISTANCE)

    def test_projected_weights_of_8_bits(self):
        rng = np.random.default_rng(5)
        weights = self.projected_weights(rng)
        model = self.service.register_model(self.projected_spec())
        blocks = (-(-HEADS * (NOPE + ROPE) // 128), 2), (2, -(-HEADS * V // 128))
        scales = [rng.uniform(0.001, 0.004, shape).astype(np.float32) for shape in blocks]
        with_scales = dict(w_uq_scales=scales[0], w_o_scales=scales[1])
        for layer, (w_uk, w_uv, w_uq, w_o) in enumerate(weights):
            codes = []
            for matrix, own in ((w_uq.reshape(-1, Q_LORA), scales[0]),
                                (w_o.reshape(HIDDEN, -1), scales[1])):
                each = own.repeat(128, 0).repeat(128, 1)[:len(matrix), :matrix.shape[1]]
                one = np.abs(bf16.numbers_of(np.arange(0x7f, dtype=np.uint8))[:, None]
                             - np.abs(matrix / each).reshape(1, -1)).argmin(axis=0)
                code = np.where(matrix < 0, 0x80, 0).astype(np.uint8) | one.astype(
                    np.uint8).reshape(matrix.shape)
                matrix[...] = mla_client.round_to_bf16(bf16.numbers_of(code) * each)
                codes.append(code)
            weights[layer] = w_uk, w_uv, w_uq, w_o
            model.upload_weights(layer, w_uk, w_uv)
            heads = codes[0].reshape(HEADS, -1, Q_LORA), codes[1].reshape(HIDDEN, HEADS, V)
            # Parts of the heads have the scales of blocks that begin before them.
            for head in range(0, HEADS, 2):
                some = slice(head, head + 2)
                status = model.upload_projected(layer, heads[0][some], heads[1][:, some], head,
                                                **with_scales)
            # As bf16 they are the same weights.
            model.upload_projected(layer, w_uq, w_o)
        self.assertTrue(status.complete)
        with model.open_sequence() as sequence:
            seen = [np.zeros((0, LORA + ROPE), np.float32)] * LAYERS
            self.assertLess(self.projected_step(sequence, weights, rng, seen, 5, "halves"),
                            BF16_DISTANCE)

    def test_projected_dtype(self):
        # Servers that hold no codes register such a model as bf16.
        geometry = Geometry(2, LORA, 16, 16, 64, q_lora_rank=Q_LORA, hidden_size=HIDDEN)
        for dtype, held in (("", ("bf16",)), ("bf16", ("bf16",)), ("e4m3", ("bf16", "e4m3"))):
            spec = ModelSpec("p-" + secrets.token_hex(4), geometry, 1, SCALE, 4,
                             rope_layout="halves", projected_dtype=dtype)
            self.assertIn(self.service.register_model(spec).spec.projected_dtype, held)

    def test_projected_buffers(self):
        rng = np.random.default_rng(6)
        weights = self.projected_weights(rng)
        model = self.service.register_model(self.projected_spec())
        self.upload_projected(model, weights)
        rotations = np.tile(np.r_[np.ones(ROPE // 2), np.zeros(ROPE // 2)], (2, 1))
        with model.open_sequence() as sequence, \
                self.service.buffers(model, 2, Profile.PROJECTED) as buffers:
            with self.service.step([(sequence, 2)], rotations=rotations) as step:
                for layer in range(LAYERS):
                    kv = mla_client.round_to_bf16(rng.standard_normal((2, LORA + ROPE)))
                    q = mla_client.round_to_bf16(rng.standard_normal((2, Q_LORA)))
                    buffers.kv[...] = mla_client.to_bf16(kv)
                    buffers.q[:, 0] = mla_client.to_bf16(q)
                    got = step.attend(layer, buffers.q, buffers.kv, Profile.PROJECTED, out=buffers)
                    want = self.hidden(weights[layer], q[1], kv, rotations[1], "halves")
                    got = mla_client.from_bf16(got.o[1])
                    cosine = got @ want / np.linalg.norm(got) / np.linalg.norm(want)
                    self.assertLess(1 - cosine, BF16_DISTANCE)

    def test_projected_refusals(self):
        model = self.service.register_model(self.projected_spec())
        rows, kv = np.zeros((1, Q_LORA), np.float32), np.zeros((1, LORA + ROPE), np.float32)
        good = np.zeros((1, ROPE), np.float32)
        with model.open_sequence() as sequence:
            for rotations in (good[:, 1:], np.zeros((2, ROPE))):
                with self.assertRaisesRegex(mla_client.InvalidArgument, "step.rotations"):
                    self.service.step([(sequence, 1)], rotations=rotations)
            with self.service.step([(sequence, 1)], rotations=good) as step:
                with self.assertRaisesRegex(mla_client.FailedPrecondition, "weights"):
                    step.attend(0, rows, kv, Profile.PROJECTED)
                for options in (dict(want_lse=True), dict(dtype=DType.F8_E4M3)):
                    with self.assertRaises(mla_client.InvalidArgument):
                        step.attend(0, rows, kv, Profile.PROJECTED, **options)
                step.abort()
            weights = self.projected_weights(np.random.default_rng(1))
            self.upload_projected(model, weights)
            with self.service.step([(sequence, 1)]) as step:
                with self.assertRaisesRegex(mla_client.FailedPrecondition, "rotations"):
                    step.attend(0, rows, kv, Profile.PROJECTED)
                with self.assertRaises(mla_client.FailedPrecondition):
                    step.attend(0, np.zeros((1, HEADS, NOPE + ROPE), np.float32), kv)
                step.abort()
            w_uq, w_o = weights[0][2:]
            with self.assertRaises(mla_client.AlreadyExists):
                model.upload_projected(0, w_uq + 1, w_o)
            for arguments in ((w_uq[:, 1:], w_o), (w_uq, w_o[1:]), (w_uq, w_o, 1)):
                with self.assertRaises(mla_client.InvalidArgument):
                    model.upload_projected(0, *arguments)
        for fields in (dict(rope_layout=""), dict(rope_layout="quarters"),
                       dict(projected_dtype="f32"), dict(projected_dtype="e4m3")):
            with self.assertRaises(mla_client.InvalidArgument):
                self.service.register_model(self.projected_spec(**fields))
