"""Tensors of PyTorch as they are: right outputs, or InvalidArgument."""

import unittest

import mla_client
import numpy as np
import torch
from mla_client import Geometry, InvalidArgument, ModelSpec, Profile, arrays

INPUTS = ("client/python",)
ENVIRONMENT = "transformers"
ROWS = 3


class TorchTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        # Few bits, so that every type holds them.
        self.q = torch.randint(-8, 9, (ROWS, 2, 24)) / 8.0
        self.kv = torch.randint(-8, 9, (ROWS, 24)) / 8.0
        self.service = mla_client.LocalReference()
        self.model = self.service.register_model(
            ModelSpec("torch", Geometry(2, 16, 8, 4, 4), 1, 0.1))

    @staticmethod
    def accepted(tensor):
        return {
            "float32": tensor, "bfloat16": tensor.bfloat16(), "float16": tensor.half(),
            "float64": tensor.double(), "with gradient": tensor.bfloat16().requires_grad_(),
            "parameter": torch.nn.Parameter(tensor),
            "transposed": tensor.bfloat16().mT.contiguous().mT,
            "sliced": tensor.bfloat16().repeat_interleave(2, -1)[..., ::2],
            "patterns": tensor.bfloat16().view(torch.int16).numpy().view(np.uint16),
        }

    @staticmethod
    def refused(tensor):
        return {
            "int16": tensor.bfloat16().view(torch.int16), "bool": tensor > 0,
            "int64": tensor.long(),
            "uint8": tensor.byte(), "complex": tensor.cfloat(), "sparse": tensor.to_sparse(),
            "of no memory": torch.empty(tensor.shape, device="meta"),
            "sparse bfloat16": tensor.bfloat16().to_sparse(),
        }

    def attend(self, q, kv):
        with self.model.open_sequence() as sequence, \
                self.service.step([(sequence, ROWS)]) as step:
            o = step.attend(0, q, kv, Profile.ABSORBED).o
            step.abort()
        return o

    def test_what_is_taken(self):
        want = self.attend(self.q.numpy(), self.kv.numpy())
        for name, q in self.accepted(self.q).items():
            for other, kv in self.accepted(self.kv).items():
                with self.subTest(q=name, kv=other):
                    np.testing.assert_array_equal(self.attend(q, kv), want)
        w_uk, w_uv = (torch.full((2, *shape), 0.5, dtype=torch.bfloat16)
                      for shape in ((4, 16), (16, 4)))
        self.assertTrue(self.model.upload_weights(0, w_uk, w_uv).complete)
        with self.model.open_sequence() as sequence, self.service.step([(sequence, 1)]) as step:
            o = step.attend(0, torch.ones(1, 2, 12), torch.ones(1, 24)).o
            step.abort()
        np.testing.assert_array_equal(o, np.full((1, 2, 4), 8.0))

    def test_what_is_refused(self):
        for name, wrong in self.refused(self.q).items():
            with self.subTest(name), self.assertRaisesRegex(InvalidArgument, "attend.q"):
                self.attend(wrong, self.kv)

    def test_memory_is_shared_where_it_can_be(self):
        tensor = torch.ones(4, dtype=torch.bfloat16)
        patterns = arrays.floats("x", tensor)
        patterns[0] = 0
        self.assertEqual((patterns.dtype, tensor[0].item()), (np.uint16, 0.0))

    def test_positions(self):
        model = self.service.register_model(ModelSpec(
            "lists", Geometry(2, 16, 8), 1, 0.1, attention="sparse_v32", top_k=2))
        with model.open_sequence() as sequence, self.service.step([(sequence, ROWS)]) as step:
            lists = torch.tensor([[0, -1], [1, 0], [2, 1]])
            got = step.attend_sparse(0, self.q, lists, self.kv, Profile.ABSORBED).o
            want = step.attend_sparse(0, self.q, lists.tolist(), None, Profile.ABSORBED).o
            np.testing.assert_array_equal(got, want)
            with self.assertRaisesRegex(InvalidArgument, "attend.lists"):
                step.attend_sparse(0, self.q, lists > 0, None, Profile.ABSORBED)
            step.abort()


if __name__ == "__main__":
    unittest.main()
