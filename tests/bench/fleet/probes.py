"""What probes cost the engine's thread, and the server.

    probes_benchmark [--json FILE] [--probes N] [--server PROGRAM]

A server on the CPU backend has the rows of a prompt of 32,768 tokens. A client asks N times (2,000)
what it has of a prompt, one probe after the other:

    found    all whole pages of the prompt are there
    absent   another prompt of as many tokens, of which nothing is there
    named    all pages are there, and the client sends 16 bytes a page instead of the tokens

Prints processor time as the kernel counts it for the thread `mla-engine` and for all threads of the
server, and the share of the engine's thread that 1,000 probes a second take. Nothing depends on the
clock. Goal: at most 1 %. Exits 1 if it is missed, or if a probe found other rows than it must.
"""

import argparse
import json
import pathlib
import sys

from processes import SERVER

# pylint: disable=wrong-import-position
import mla_client
import numpy as np
from mla_client.cluster.placement import page_names
from mla_client.testing import ServerProcess

TOKENS, PAGE = 32_768, 64
LORA, ROPE = 32, 16
SPEC = mla_client.ModelSpec("probed", mla_client.Geometry(1, LORA, ROPE), 1, 0.25, PAGE)
ROWS_A_STEP = 2048
ENGINE = "mla-engine"
A_SECOND = 1000
MOST_SHARE = 0.01
SALT = b"of the fleet"


def store(client, model, prefix):
    """Leaves the rows of a prefix in the server's cache."""
    sequence = model.open_sequence(prefix=prefix)
    rows = np.zeros((ROWS_A_STEP, LORA + ROPE), np.float32)
    for _ in range(TOKENS // ROWS_A_STEP):
        with client.step([(sequence, ROWS_A_STEP)]) as step:
            step.attend(0, None, rows, mla_client.Profile.APPEND_ONLY)
    sequence.release()


def processor_ns(pid):
    """Nanoseconds on a processor: of the engine's thread, and of all threads."""
    engine = total = 0
    for thread in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            spent = int((thread / "schedstat").read_text().split()[0])
            name = (thread / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended
        total += spent
        if name == ENGINE:
            engine += spent
    if engine == 0:
        raise RuntimeError(f"the server has no thread {ENGINE}")
    return engine, total


def measure(server, client, model, prefix, wanted, count):
    """Nanoseconds a probe, of the engine's thread and of all; and probes that found other rows."""
    wrong = 0
    before = processor_ns(server.pid)
    for _ in range(count):
        wrong += client.probe(model, prefix, timeout_s=60.0).rows != wanted
    after = processor_ns(server.pid)
    return (*((new - old) / count for old, new in zip(before, after)), wrong)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--probes", type=int, default=2000)
    parser.add_argument("--server", default=str(SERVER))
    args = parser.parse_args()
    tokens = list(range(TOKENS))
    names = page_names(tokens, PAGE, SALT)
    prefixes = {"found": (mla_client.Prefix(tokens), TOKENS),
                "absent": (mla_client.Prefix([TOKENS + token for token in tokens]), 0),
                "named": (mla_client.Prefix(page_keys=names), TOKENS)}
    rows, well = [], True
    with ServerProcess(args.server, ["--backend-threads=1", "--kv-cache-bytes=256MiB",
                                     "--log-level=warning"]) as server:
        with mla_client.Client.connect(server.target, timeout_s=60.0) as client:
            model = client.register_model(SPEC)
            for name in ("found", "named"):
                store(client, model, prefixes[name][0])
            for name, (prefix, wanted) in prefixes.items():
                engine, total, wrong = measure(server, client, model, prefix, wanted, args.probes)
                share = engine * A_SECOND / 1e9
                well = well and wrong == 0 and share <= MOST_SHARE
                print(f"{name}: {args.probes} probes of {TOKENS} tokens, {wrong} wrong; a probe "
                      f"takes {engine / 1e3:.2f} us of the engine's thread and "
                      f"{total / 1e3:.0f} us of all threads; {A_SECOND} a second take "
                      f"{100 * share:.3f} % of the engine's thread", flush=True)
                rows.append({"bench": "probes", "shape": name, "engine_us": engine / 1e3,
                             "server_us": total / 1e3, "engine_percent": 100 * share})
    print(f"goal: {100 * MOST_SHARE:g} %: {'met' if well else 'missed'}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
