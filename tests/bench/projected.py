"""Time a layer and bytes a token of EXPANDED and PROJECTED on the CPU backend.

    projected_benchmark [--json FILE] [--batches 1,8,32] [--context N] [--layers N] [--steps N]
                        [--server PROGRAM]

Starts a server on the CPU backend with two models of DeepSeek-V3's attention, of `layers` layers
(default 2) and random weights, and decodes `steps` steps at each batch, after one to warm up: a row
of each of `batch` sequences at context `context` (default 256), in bf16, inline over a unix socket.

For each batch and profile:
    kernel_us        median time of a layer's launch, as the server measures it
    round_trip_us    median time of a layer's attend, from the call to its result
    bytes_a_token    growth of received_bytes and sent_bytes of GetStats over the measured steps,
                     divided by rows and layers: messages of begin and end are included
Exits with 1 if PROJECTED takes more than MOST_BYTES a token and layer.
"""

import argparse
import json
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client/python"))

# pylint: disable=wrong-import-position
import mla_client
import numpy as np
from mla_client import Geometry, ModelSpec, Profile
from mla_client.testing import ServerProcess

SERVER = ROOT / ".bazel/bin/server/mla-server"
HEADS, LORA, ROPE, NOPE, V, Q_LORA, HIDDEN = 128, 512, 64, 128, 128, 1536, 7168
SCALE = 0.135234
MOST_BYTES = 19_000
PREFILL_ROWS = 128


def random_bf16(rng, *shape):
    """bf16 patterns of numbers of magnitude 0.02 at most: what is computed does not matter."""
    return mla_client.to_bf16(rng.random(shape, np.float32) * np.float32(0.04) - np.float32(0.02))


def register(client, profile, layers, rng):
    """A model of the profile with all its weights."""
    projected = profile == Profile.PROJECTED
    geometry = Geometry(HEADS, LORA, ROPE, NOPE, V, q_lora_rank=Q_LORA if projected else 0,
                        hidden_size=HIDDEN if projected else 0)
    model = client.register_model(ModelSpec(profile.name, geometry, layers, SCALE,
                                            rope_layout="interleaved" if projected else ""))
    for layer in range(layers):
        model.upload_weights(layer, random_bf16(rng, HEADS, NOPE, LORA),
                             random_bf16(rng, HEADS, LORA, V))
        if projected:
            model.upload_projected(layer, random_bf16(rng, HEADS, NOPE + ROPE, Q_LORA),
                                   random_bf16(rng, HIDDEN, HEADS, V))
    return model


class Decoder:
    """Steps of a batch of sequences in one profile."""

    def __init__(self, client, model, profile, batch, context, rng):
        self._client, self._profile, self._rng = client, profile, rng
        self._layers = model.spec.layers
        self.sequences = [model.open_sequence(lease_ms=600_000) for _ in range(batch)]
        for sequence in self.sequences:
            while sequence.length < context:
                rows = min(PREFILL_ROWS, context - sequence.length)
                with client.step([(sequence, rows)], lease_ms=60_000) as step:
                    for layer in range(self._layers):
                        step.attend(layer, None, random_bf16(rng, rows, LORA + ROPE),
                                    Profile.APPEND_ONLY)

    def step(self):
        """One row a sequence; returns the timings of each layer."""
        rows, options = len(self.sequences), {}
        if self._profile == Profile.PROJECTED:
            angles = self._rng.uniform(0, 6, (rows, ROPE // 2))
            options["rotations"] = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
            q = random_bf16(self._rng, rows, Q_LORA)
        else:
            q = random_bf16(self._rng, rows, HEADS, NOPE + ROPE)
        kv, timings = random_bf16(self._rng, rows, LORA + ROPE), []
        with self._client.step([(one, 1) for one in self.sequences], lease_ms=60_000,
                               **options) as step:
            for layer in range(self._layers):
                timings += step.attend(layer, q, kv, self._profile).timings
        return timings


def measure(client, model, profile, batch, options, rng):
    """One row of the table."""
    decoder = Decoder(client, model, profile, batch, options.context, rng)
    decoder.step()
    before = client.stats()
    timings = [one for _ in range(options.steps) for one in decoder.step()]
    after = client.stats()
    moved = (after.received_bytes + after.sent_bytes
             - before.received_bytes - before.sent_bytes)
    for sequence in decoder.sequences:
        sequence.release()
    return {"profile": profile.name, "batch": batch, "context": options.context,
            "kernel_us": statistics.median(one.kernel_us for one in timings),
            "round_trip_us": statistics.median(one.round_trip_us for one in timings),
            "bytes_a_token": moved / (options.steps * batch * options.layers)}


def parse():
    parser = argparse.ArgumentParser(description="See the top of this file.")
    parser.add_argument("--json", default="")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--server", default=str(SERVER))
    return parser.parse_args()


def main():
    options, rng, rows = parse(), np.random.default_rng(1), []
    with ServerProcess(options.server, ["--backend=cpu", "--kv-cache-bytes=1GiB",
                                        "--limits-weights-bytes=4GiB"]) as server:
        with mla_client.Client.connect(server.target, transport="inline",
                                       timeout_s=120) as client:
            models = {profile: register(client, profile, options.layers, rng)
                      for profile in (Profile.EXPANDED, Profile.PROJECTED)}
            print(f"{'batch':>5} {'profile':>10} {'kernel us':>11} {'round trip us':>14} "
                  f"{'bytes a token':>14}")
            for batch in map(int, options.batches.split(",")):
                for profile, model in models.items():
                    row = measure(client, model, profile, batch, options, rng)
                    rows.append(row)
                    print(f"{batch:>5} {row['profile']:>10} {row['kernel_us']:>11.0f} "
                          f"{row['round_trip_us']:>14.0f} {row['bytes_a_token']:>14.0f}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    most = max(row["bytes_a_token"] for row in rows if row["profile"] == "PROJECTED")
    return 0 if most <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
