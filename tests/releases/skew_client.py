"""A worker that any release's Python client can run; test_skew.py starts it.

    PYTHONPATH=... skew_client.py fill TARGET [TLS_CA TLS_CERT TLS_KEY]
        fills a sequence, checks what it answers, prints its id and waits for a line
    then, after that line: one more step on the same sequence, wherever it is by then; prints "same"
"""

import sys

import numpy as np

import mla_client

LAYERS, HEADS, ROWS = 2, 4, 70  # more than a page of rows
GEOMETRY = mla_client.Geometry(HEADS, 64, 16, 16, 16)


def tensors(seed, rows):
    random = np.random.default_rng(seed)
    queries = random.standard_normal((rows, HEADS, 64 + 16), dtype=np.float32)
    rows_of_kv = random.standard_normal((rows, 64 + 16), dtype=np.float32)
    return mla_client.round_to_bf16(queries), mla_client.round_to_bf16(rows_of_kv)


def step(service, sequence, seed, rows):
    """One step of all layers; its outputs."""
    outputs = []
    with service.step([(sequence, rows)]) as one:
        for layer in range(LAYERS):
            queries, kv = tensors(seed + layer, rows)
            outputs.append(one.attend(layer, queries, kv, mla_client.Profile.ABSORBED).o)
    return np.concatenate(outputs)


def main():
    target, files = sys.argv[2], sys.argv[3:]
    tls = mla_client.Tls(*files) if files else None
    spec = mla_client.ModelSpec("skew", GEOMETRY, layers=LAYERS, softmax_scale=0.2)
    with mla_client.Client.connect(target, tls=tls, follow_moves=bool(files)) as client:
        model = client.register_model(spec)
        local = mla_client.LocalReference()
        expected_model = local.register_model(spec)
        sequence, expected = model.open_sequence(), expected_model.open_sequence()
        for seed, rows in ((1, ROWS), (11, 1)):
            got = step(client, sequence, seed, rows)
            wanted = step(local, expected, seed, rows)
            np.testing.assert_allclose(got, wanted, rtol=0.03, atol=0.03)
        print(f"filled {sequence.id:x}", flush=True)
        sys.stdin.readline()
        got, wanted = step(client, sequence, 21, 1), step(local, expected, 21, 1)
        np.testing.assert_allclose(got, wanted, rtol=0.03, atol=0.03)
        print("same", flush=True)


if __name__ == "__main__":
    main()
