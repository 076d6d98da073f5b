"""LocalReference keeps the contract."""

import dataclasses
import unittest

import mla_client
import numpy as np
from mla_client import Profile
from service_contract import LAYERS, ServiceContract, Worker


class LocalReferenceTest(ServiceContract, unittest.TestCase):
    def make_service(self):
        return mla_client.LocalReference()

    def test_queries_need_the_rows_that_they_see(self):
        with self.model.open_sequence() as sequence:
            with self.service.step([(sequence, 3)]) as step:
                q = self.worker.queries(1, Profile.ABSORBED)
                with self.assertRaisesRegex(mla_client.FailedPrecondition, r"\[0, 1\]"):
                    step.attend(0, q, self.worker.kv(1), Profile.ABSORBED, row_begin=2)
                step.abort()

    def test_rows_are_bf16(self):
        spec = dataclasses.replace(self.model.spec, model_id="fp8", kv_format="fp8_row")
        with self.assertRaisesRegex(mla_client.Unimplemented, "fp8_row"):
            self.service.register_model(spec)
        with self.assertRaises(mla_client.FailedPrecondition):
            self.model.upload_scales([1.0] * LAYERS)
        self.assertEqual(self.model.spec.kv_format, "bf16")

    def test_exact_mode_rounds_nothing(self):
        worker = Worker(5)
        with mla_client.LocalReference(exact=True) as service:
            model = service.register_model(self.model.spec)
            with model.open_sequence() as sequence, service.step([(sequence, 4)]) as step:
                for layer in range(LAYERS):
                    kv = worker.rng.standard_normal((4, worker.geometry.row_dim)).astype("f4")
                    q = worker.rng.standard_normal((4, 3, worker.geometry.row_dim)).astype("f4")
                    o = step.attend(layer, q, kv, Profile.ABSORBED).o
                    want, _ = worker.expected(layer, q, kv, Profile.ABSORBED)
                    np.testing.assert_allclose(o, want, atol=1e-6)


if __name__ == "__main__":
    unittest.main()
