"""A step over three real servers answers what one server answers for all of its sequences: with
8-bit floats, index lists, an indexer, and a window."""

import unittest

import numpy as np
from mla_client import Client, Geometry, ModelSpec
from mla_client.types import DType, Profile

import real
import server_binary

GEOMETRY = Geometry(4, 32, 8)
OWNERS = (0, 1, 0, 2, 2)
STEPS = ((7, 3, 4, 2, 9), (1, 1, 1, 1, 1), (4, 5, 1, 6, 2), (1, 2, 1, 1, 3))
TOP_K, WINDOW, RATIO = 3, 6, 4


class DividedStepsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.addresses = []
        for _ in range(4):
            server, address = server_binary.start_on_tcp()
            cls.addClassCleanup(server.stop)
            cls.addresses.append(address)

    def run_both(self, name, make, **spec):
        """Runs STEPS in both ways; `make(layer, starts, rows)` has the arguments of a call."""
        spec = ModelSpec(name, GEOMETRY, 2, 0.25, 4, **spec)
        fleet = Client.connect(",".join(self.addresses[:3]), timeout_s=real.TIMEOUT_S,
                               cluster={"subset": 0})
        one = Client.connect(self.addresses[3], timeout_s=real.TIMEOUT_S)
        self.addCleanup(fleet.close)
        self.addCleanup(one.close)
        model, whole = fleet.register_model(spec), one.register_model(spec)
        divided = [fleet.model_at(self.addresses[owner], model).open_sequence()
                   for owner in OWNERS]
        undivided = [whole.open_sequence() for _ in OWNERS]
        for rows in STEPS:
            with fleet.step(list(zip(divided, rows))) as parts, \
                    one.step(list(zip(undivided, rows))) as step:
                self.assertEqual(parts.owners, 3)
                for layer in range(spec.layers):
                    starts = [sequence.length for sequence in undivided]
                    for begin, end in ((0, sum(rows) // 3), (sum(rows) // 3, sum(rows))):
                        if begin == end:
                            continue
                        arguments = make(layer, starts, rows, begin, end)
                        got, want = (way.attend_async(
                            layer, profile=Profile.ABSORBED, row_begin=begin, want_lse=True,
                            o_dtype=DType.F32, **arguments).result() for way in (parts, step))
                        np.testing.assert_allclose(got.o, want.o, atol=1e-5)
                        np.testing.assert_allclose(got.lse, want.lse, atol=1e-4)
                        self.assertTrue(np.any(want.o != 0))
                        if want.lists is not None:
                            np.testing.assert_array_equal(got.lists, want.lists)
            self.assertEqual([sequence.length for sequence in divided],
                             [sequence.length for sequence in undivided])

    def setUp(self):
        self.random = np.random.default_rng(5)

    def values(self, *shape):
        return self.random.uniform(-0.5, 0.5, shape).astype(np.float32)

    def tensors(self, begin, end, index=0):
        return {"q": self.values(end - begin, GEOMETRY.num_heads, GEOMETRY.row_dim),
                "kv": self.values(end - begin, GEOMETRY.row_dim + index)}

    def lists(self, starts, rows, begin, end, ratio=1):
        """Of different lengths, of what each row sees."""
        seen = [(start + own + 1) // ratio for start, count in zip(starts, rows)
                for own in range(count)]
        return [sorted(self.random.choice(count, min(count, 1 + place % TOP_K),
                                          replace=False).tolist())
                for place, count in enumerate(seen[begin:end])]

    def test_8_bit_floats(self):
        self.run_both("fp8", lambda layer, starts, rows, begin, end: {
            **self.tensors(begin, end), "dtype": DType.F8_E4M3, "kv_row_dtype": DType.F8_E4M3})

    def test_lists(self):
        self.run_both("lists", lambda layer, starts, rows, begin, end: {
            **self.tensors(begin, end), "lists": self.lists(starts, rows, begin, end)},
            attention="sparse_v32", top_k=TOP_K)

    def test_an_indexer(self):
        self.run_both("indexer", lambda layer, starts, rows, begin, end: {
            **self.tensors(begin, end, 16), "want_lists": True,
            "index": (self.values(end - begin, 2, 16), self.values(end - begin, 2))},
            attention="sparse_v32", top_k=TOP_K, index_heads=2, index_dim=16)

    def windows(self, listed):
        def make(layer, starts, rows, begin, end):
            before, made = 0, [0]  # entries that the rows before each row complete
            for start, count in zip(starts, rows):
                for own in range(count):
                    made.append(before + (start + own + 1) // RATIO - start // RATIO)
                before = made[-1]
            count = made[end] - made[begin] if layer else 0
            arguments = {**self.tensors(begin, end),
                         "entries": self.values(count, GEOMETRY.row_dim)}
            if listed and layer:
                arguments["lists"] = self.lists(starts, rows, begin, end, RATIO)
            return arguments
        return make

    def test_a_window(self):
        for name, listed in (("window", False), ("window-lists", True)):
            with self.subTest(name):
                self.run_both(name, self.windows(listed), attention="sparse_v4", top_k=8,
                              window=WINDOW, ratios=(0, RATIO))


if __name__ == "__main__":
    unittest.main()
