"""Load for pictures: workers of several tenants that fill sequences and decode until the end."""

import contextlib
import threading

import mla_client
import numpy as np

LAYERS, HEADS = 4, 16
GEOMETRY = mla_client.Geometry(num_heads=HEADS, kv_lora_rank=512, rope_dim=64)
TENANTS = ("default", "research", "chat")
LEASE_MS = 60_000  # of a step: the machine may be busy with other work
PROMPT_ROWS, DECODE_STEPS = 256, 48
KEPT = 6  # sequences that a worker keeps open; it releases the oldest one


def work(target, tenant, seed, stop, faults):
    """One worker: prompts of different lengths, each followed by decode steps."""
    rng = np.random.default_rng(seed)
    rows = PROMPT_ROWS * (1 + seed)
    q = mla_client.to_bf16(rng.standard_normal((rows, HEADS, GEOMETRY.row_dim)))
    kv = mla_client.to_bf16(rng.standard_normal((rows, GEOMETRY.row_dim)))
    try:
        with mla_client.Client.connect(target, tenant=tenant) as client:
            model = client.register_model(mla_client.ModelSpec(
                model_id=f"{tenant}-model", geometry=GEOMETRY, layers=LAYERS, softmax_scale=0.1))
            kept = []
            while not stop.is_set():
                kept.append(model.open_sequence())
                for count in [rows] + [1] * DECODE_STEPS:
                    with client.step([(kept[-1], count)], lease_ms=LEASE_MS) as step:
                        for layer in range(LAYERS):
                            step.attend(layer, q[:count], kv[:count], mla_client.Profile.ABSORBED)
                    if stop.is_set():
                        break
                if len(kept) > KEPT:
                    kept.pop(0).release()
    except Exception as error:  # shown by the thread that made the load
        faults.append(error)
        stop.set()


@contextlib.contextmanager
def load(target):
    """A worker of each tenant for the time of the block. Raises the first worker's error."""
    stop, faults = threading.Event(), []
    workers = [threading.Thread(target=work, args=(target, tenant, seed, stop, faults))
               for seed, tenant in enumerate(TENANTS)]
    for worker in workers:
        worker.start()
    try:
        yield stop
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    if faults:
        raise faults[0]
