"""The quality benchmark computes its figures right, and runs against a server."""

import pathlib
import sys
import types
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/bench/quality"))

# pylint: disable=wrong-import-position
import attention
import mla_client
import model as models
import numpy as np
import quality
import server_binary
import trained
from mla_client.gen import tensor_pb2

SMALL = models.Config(hidden=64, layers=2, dense_layers=2, heads=2, q_lora=32, kv_lora=32, nope=16,
                      rope=8, v=16, dense_width=64)
WINDOWS = np.random.default_rng(3).integers(0, 256, (3, 40))
FIGURES = ("mean_dlogit", "kl", "top1", "bits_per_byte", "float32_bits_per_byte")


class CompareTest(unittest.TestCase):
    def test_equal_logits(self):
        logits = np.random.default_rng(1).standard_normal((1, 4, 8)).astype(np.float32)
        row = quality.compare(np.array([[1, 2, 3, 4]]), logits, logits)
        self.assertEqual((row["mean_dlogit"], row["kl"], row["top1"]), (0.0, 0.0, 1.0))
        self.assertEqual(row["bits_per_byte"], row["float32_bits_per_byte"])

    def test_known_figures(self):
        local = np.zeros((1, 2, 2), np.float32)
        remote = local.copy()
        remote[0, 0] = [0.0, np.log(3.0)]  # 1/4 and 3/4
        row = quality.compare(np.array([[0, 1]]), local, remote)
        self.assertAlmostEqual(row["mean_dlogit"], np.log(3.0) / 4, places=6)
        self.assertAlmostEqual(row["kl"], 0.5 * np.log(4 / 3) / 2, places=6)
        self.assertEqual(row["top1"], 0.5)
        self.assertAlmostEqual(row["bits_per_byte"], np.log2(4 / 3), places=6)
        self.assertAlmostEqual(row["float32_bits_per_byte"], 1.0, places=6)


class RemoteTest(unittest.TestCase):
    """The model's logits through a service."""

    def row(self, service, dtype=mla_client.DType.BF16, step_rows=16):
        model = models.seeded(SMALL)
        registered = attention.register(service, model, "small")
        remote = quality.remote_logits(model, registered, service, WINDOWS,
                                       mla_client.Profile.ABSORBED, dtype, step_rows)
        return quality.compare(WINDOWS, trained.logits_of(model, WINDOWS), remote)

    def test_nothing_is_lost_without_rounding(self):
        for step_rows in (1, 16, 40):
            row = self.row(mla_client.LocalReference(exact=True), step_rows=step_rows)
            self.assertLess(row["mean_dlogit"], 1e-5)
            self.assertLess(row["kl"], 1e-8)
            self.assertEqual(row["top1"], 1.0)

    def test_rounding_shows(self):
        rounded = self.row(mla_client.LocalReference())
        finer = self.row(mla_client.LocalReference(), mla_client.DType.F32)
        self.assertGreater(rounded["mean_dlogit"], 1e-4)
        self.assertGreater(rounded["kl"], 1e-9)
        self.assertLess(finer["mean_dlogit"], rounded["mean_dlogit"])

    def test_against_a_server(self):
        server = server_binary.start()
        try:
            with mla_client.Client.connect(server.target, transport="inline") as client:
                rows = list(quality.measure(client, models.seeded(SMALL), WINDOWS))
                off = list(quality.measure(client, models.seeded(SMALL), WINDOWS,
                                           lambda kv_format, q_dtype: q_dtype == "bf16", "off"))
                with self.assertRaises(mla_client.errors.Unimplemented):
                    list(quality.measure(client, models.seeded(SMALL), WINDOWS, fp8_compute="on"))
        finally:
            server.stop()
        self.assertEqual(len({(row["kv_format"], row["q_dtype"], row["profile"], row["step_rows"])
                              for row in rows}), 4 * 12)
        self.assertEqual({(row["kv_format"], row["q_dtype"], row["fp8_compute"]) for row in off},
                         {(name, "bf16", "off") for name in ("fp8_tensor", "fp8_row", "fp8_page")})
        for row in rows:
            self.assertEqual(row["fp8_compute"], "auto")
            eight_bits = row["kv_format"] != "bf16" or row["q_dtype"] == "f8_e4m3"
            self.assertEqual(row["bench"], "quality")
            self.assertLess(row["mean_dlogit"], 0.2 if eight_bits else 0.02, row)
            self.assertGreater(row["top1"], 0.5 if eight_bits else 0.9, row)
            # The rounding to 8 bits is visible, so the format was really in use.
            self.assertEqual(row["mean_dlogit"] > 0.01, eight_bits, row)
            self.assertTrue(all(np.isfinite(row[name]) for name in FIGURES), row)


class ModesTest(unittest.TestCase):
    def test_every_format_is_compared(self):
        info = types.SimpleNamespace(kv_formats=[tensor_pb2.KV_FORMAT_BF16,
                                                 tensor_pb2.KV_FORMAT_FP8_ROW])
        self.assertEqual(quality.formats(info), ["bf16", "fp8_row"])

    def test_every_wire_dtype_is_compared(self):
        info = types.SimpleNamespace(wire_dtypes=[mla_client.DType.BF16.value], capabilities=[])
        self.assertEqual({dtype for dtype, _, _ in quality.modes(info)}, {mla_client.DType.BF16})
        info.capabilities.append("fp8_wire")
        self.assertEqual({dtype for dtype, _, _ in quality.modes(info)},
                         {mla_client.DType.BF16, mla_client.DType.F8_E4M3})


if __name__ == "__main__":
    unittest.main()
