"""bfloat16 rounding: every pattern, ties, specials."""

import doctest
import unittest

import mla_client.bf16
import numpy as np
from mla_client import bf16
from mla_client import from_bf16, round_to_bf16, to_bf16


class Bf16Test(unittest.TestCase):
    def test_every_pattern_survives(self):
        patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
        values = from_bf16(patterns)
        nan = np.isnan(values)
        np.testing.assert_array_equal(to_bf16(values)[~nan], patterns[~nan])
        # NaN stays NaN and keeps its sign; signalling ones become quiet.
        np.testing.assert_array_equal(to_bf16(values)[nan], patterns[nan] | 0x40)

    def test_rounds_to_nearest_even(self):
        for bits, rounded in ((0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81),
                              (0x3F807FFF, 0x3F80), (0x00008000, 0x0000), (0x00018000, 0x0002)):
            for sign in (0, 1):
                value = np.array([bits | sign << 31], np.uint32).view(np.float32)
                self.assertEqual(int(to_bf16(value)[0]), rounded | sign << 15, hex(bits))

    def test_nearest_by_exhaustion(self):
        rng = np.random.default_rng(1)
        values = (rng.standard_normal(2000) * 10.0 ** rng.integers(-20, 20, 2000)).astype("f4")
        error = np.abs(round_to_bf16(values).astype(np.float64) - values)
        patterns = to_bf16(values)
        for step in (-1, 1):
            neighbour = from_bf16((patterns.astype(np.int32) + step).astype(np.uint16))
            self.assertTrue((error <= np.abs(neighbour.astype(np.float64) - values)).all())

    def test_specials(self):
        values = np.array([np.inf, -np.inf, 0.0, -0.0, 3.4e38, np.nan], np.float32)
        rounded = round_to_bf16(values)
        self.assertEqual(rounded[:2].tolist(), [np.inf, -np.inf])
        self.assertEqual(np.signbit(rounded[2:4]).tolist(), [False, True])
        self.assertEqual(rounded[4], np.inf)  # beyond the largest bfloat16
        self.assertTrue(np.isnan(rounded[5]))
        # A NaN whose payload is in the lower half alone must not become an infinity.
        low = np.array([0x7F800001], np.uint32).view(np.float32)
        self.assertTrue(np.isnan(round_to_bf16(low))[0])

    def test_shapes(self):
        self.assertEqual(to_bf16(np.zeros((2, 3, 4))).shape, (2, 3, 4))
        self.assertEqual(to_bf16(np.zeros((0, 4))).shape, (0, 4))
        turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
        np.testing.assert_array_equal(round_to_bf16(turned), turned)

    def test_e4m3_is_the_nearest_code_under_a_power_of_two(self):
        rng = np.random.default_rng(5)
        parts = (24, 8)
        values = rng.standard_normal((40, 32)).astype(np.float32)
        values *= np.exp2(rng.uniform(-90, 60, (40, 1))).astype(np.float32)
        values[3] = 0
        sent = bf16.to_e4m3(values, parts)
        self.assertEqual(sent.nbytes, 40 * (32 + 2 * 4))
        scales = sent[40 * 32:].copy().view("<f4").reshape(40, 2)
        numbers = np.unique(bf16.from_e4m3(
            np.concatenate((np.arange(256, dtype=np.uint8), np.float32([1]).view(np.uint8))),
            (256,)))
        numbers = numbers[~np.isnan(numbers)].astype(np.float64)
        got = bf16.from_e4m3(sent, parts)
        begin = 0
        for part, size in enumerate(parts):
            block = values[:, begin:begin + size].astype(np.float64)
            scale = scales[:, part:part + 1].astype(np.float64)
            np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)
            largest = np.abs(block).max(axis=1, keepdims=True)
            self.assertTrue((largest <= 448 * scale).all())
            self.assertTrue(((largest > 224 * scale) | (largest == 0)).all())
            nearest = np.abs(block[..., None] / scale[..., None] - numbers).min(axis=-1)
            off = np.abs(got[:, begin:begin + size] - block) / scale
            np.testing.assert_allclose(off, nearest, rtol=1e-6, atol=1e-12)
            begin += size

    def test_e4m3_outside_of_its_range(self):
        values = np.array([[np.nan, np.inf, -np.inf, 448, -0.0]], np.float32)
        got = bf16.round_to_e4m3(values, (5,))
        self.assertTrue(np.isnan(got[0, 0]))
        self.assertEqual(got[0, 1:].tolist(), [448.0, -448.0, 448.0, 0.0])
        patterns = bf16.to_bf16(values[:, 3:])
        np.testing.assert_array_equal(bf16.to_e4m3(patterns, (2,)),
                                      bf16.to_e4m3(values[:, 3:], (2,)))

    def test_documented_examples(self):
        self.assertEqual(doctest.testmod(mla_client.bf16).failed, 0)


if __name__ == "__main__":
    unittest.main()
