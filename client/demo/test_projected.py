"""The projected profile in the demo's model: its probabilities are those of the expanded one."""

import unittest

import corpus
import mla_client
import numpy as np
import server_binary
import trained
from attention import StepAttention, register, register_projected
from mla_client import DType, Profile
from model import rotations

# Natural logarithms of probabilities, between the profiles.
MOST_DIFFERENCE = 0.02
STEPS = (48, *8 * (1,))


def log_probabilities(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class ProjectedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = trained.load()
        cls.text = np.asarray(corpus.prompt(sum(STEPS)), np.int64)

    def expanded(self, service, dtype):
        """Log-probabilities after each row of the text, which is added in STEPS."""
        registered = register(service, self.model, f"expanded-{dtype.name}")
        return self.run_steps(service, registered, None, lambda step, tokens, positions: (
            self.model.forward(tokens, positions, StepAttention(self.model, step, Profile.EXPANDED,
                                                                dtype))))

    def projected(self, service, dtype):
        registered = register_projected(service, self.model, f"projected-{dtype.name}")

        def forward(step, tokens, positions):
            return self.model.forward(
                tokens, positions, None,
                lambda layer, q_lora, row: step.attend(layer, q_lora, row, Profile.PROJECTED,
                                                       dtype=dtype, o_dtype=dtype).o)
        return self.run_steps(service, registered,
                              lambda positions: rotations(self.model.config, positions), forward)

    def run_steps(self, service, registered, turns, forward):
        found = []
        with registered.open_sequence(lease_ms=60_000) as sequence:
            for rows in STEPS:
                positions = np.arange(sequence.length, sequence.length + rows)
                options = {} if turns is None else {"rotations": turns(positions)}
                with service.step([(sequence, rows)], lease_ms=30_000, **options) as step:
                    logits = forward(step, self.text[positions], positions)
                found.append(log_probabilities(logits))
        return np.concatenate(found)

    def compare(self, service):
        # In bf16, other roundings on the wire move unlikely bytes by more: by up to 0.04.
        for dtype, likely_alone in ((DType.BF16, True), (DType.F32, False)):
            with self.subTest(dtype=dtype.name):
                expanded = self.expanded(service, dtype)
                difference = np.abs(expanded - self.projected(service, dtype))
                likely = difference[np.arange(len(expanded)), expanded.argmax(axis=1)]
                self.assertLess(likely.max(), MOST_DIFFERENCE)
                self.assertLess((likely if likely_alone else difference).max(), MOST_DIFFERENCE)
                # The text decides: from row to row the probabilities differ by far more.
                self.assertGreater(np.abs(expanded[1:] - expanded[:-1]).max(), 1)

    def test_in_this_process(self):
        self.compare(mla_client.LocalReference())

    def test_on_a_server(self):
        server = server_binary.start("--backend=cpu")
        try:
            with mla_client.Client.connect(server.target) as client:
                self.compare(client)
        finally:
            server.stop()


if __name__ == "__main__":
    unittest.main()
