"""Checks that models of the installed transformers give the same with attention on a server.

    python3 tests/transformers/check.py --server .bazel/bin/server/mla-server [--device cuda]

Small random models in float32, each feature of generate() against local attention (features.py),
then tokens a second (speed.py). Needs torch and transformers 5.17 to 5.24, and what the Python
client needs; with --device cuda the models are on the GPU. The last line says how it went.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
import time
from typing import Dict, List

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client" / "python"))

# pylint: disable=wrong-import-position
import features
import mla_client
import seeded
import speed
import torch
import transformers
from mla_client.testing import ServerProcess

STARTED = time.monotonic()


def say(text: str) -> None:
    """A line of progress."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


def check_device_memory(client: mla_client.Client) -> None:
    """Raises Unavailable, with the reason, if the client cannot use the server's GPU memory. The
    adapter would otherwise use host memory."""
    model = client.register_model(mla_client.ModelSpec(
        "room", mla_client.Geometry(1, 512, 64, 128, 128), layers=1, softmax_scale=0.1))
    client.buffers(model, 1, device="cuda").release()
    model.unregister()


def check_features(kind: str, client: mla_client.Client, device: str) -> bool:
    """All features of one model type."""
    model, assistant = seeded.pair(kind, device=device)
    return features.check(model, assistant, device, features.remote_of(client, model),
                          features.remote_of(client, model, assistant), say)


def check_speed(clients: Dict[str, mla_client.Client], device: str, contexts: List[int],
                heads: int) -> None:
    """The table of one model."""
    model = seeded.build("deepseek_v3", device=device, dtype=torch.bfloat16, hidden_size=1024,
                         num_attention_heads=heads, num_key_value_heads=heads,
                         first_k_dense_replace=4)
    say(f"deepseek_v3, 4 dense layers, {heads} heads, bf16, batch 1:")
    speed.table(model, device, contexts,
                {name: features.remote_of(client, model) for name, client in clients.items()}, say)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="path of the mla-server binary")
    parser.add_argument("--server-arg", action="append", default=[],
                        help="passed on to the server; may be repeated")
    parser.add_argument("--device", default="cpu", help="of the models (default: %(default)s)")
    parser.add_argument("--models", nargs="*", choices=seeded.TYPES, default=seeded.TYPES)
    parser.add_argument("--contexts", nargs="*", type=int, default=[700, 8192, 65536],
                        help="of the table of speed; empty: no table")
    parser.add_argument("--heads", nargs="*", type=int, default=[16, 128])
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--spin-us", type=int, default=20, help="of the client")
    parser.add_argument("--device-mib", type=int, default=0,
                        help="of the server's GPU for tensors: with some, features use it, and the "
                             "table has both kinds of memory")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    say(f"transformers {transformers.__version__}, torch {torch.__version__}, models on "
        + (torch.cuda.get_device_name() if args.device != "cpu" else "the CPU"))
    failed = []
    server_args = ["--kv-cache-bytes=2GiB", *args.server_arg]
    if args.device_mib:
        server_args[1:1] = ["--shm-total-bytes=1GiB", f"--shm-device-bytes={args.device_mib}MiB"]
    with ServerProcess(args.server, server_args) as server, contextlib.ExitStack() as stack:
        clients = {"server" if not mib else "in place": stack.enter_context(
            mla_client.Client.connect(server.target, transport=args.transport, lease_ms=60_000,
                                      spin_us=args.spin_us, device_bytes=mib << 20))
                   for mib in sorted({0, args.device_mib})}
        client = list(clients.values())[-1]
        backend = client.server_info().backend
        say(f"backend {backend.name} on {backend.device}, transport {client.transport}, "
            f"{args.device_mib} MiB of its GPU for tensors")
        if args.device_mib:
            check_device_memory(client)
        failed += [kind for kind in args.models if not check_features(kind, client, args.device)]
        if args.contexts:
            for heads in args.heads:
                check_speed(clients, args.device, args.contexts, heads)
    say(f"check: {'FAILED: ' + ', '.join(failed) if failed else 'ok'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
