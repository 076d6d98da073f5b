"""Checks on a real GPU that ranks which share the heads of a model may chain their calls.

    MLA_CLIENT_LIBRARY=libmla_client.so.0 \\
    python3 tests/integration/device_memory/check_ranks_on_gpu.py
        --server .bazel/bin/server/mla-server [--ranks 2] [--server-arg=ARG ...]

Processes on one GPU run prompts and decode passes as an engine's ranks do, each with its part of the
heads, from host memory and from the server's GPU memory. The outputs of chained passes must be
those of awaited ones up to a rounding (the server cuts requests by the time that launches took),
and all rows must be kept. A rank may be late by some milliseconds at any layer. Run it under MPS.
The last line gives the result.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import List, Tuple

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "client" / "python"))

# pylint: disable=wrong-import-position
import torch
from mla_client import Geometry, ModelSpec
from mla_client.pytorch import Sender, gpu_arguments
from mla_client.pytorch.exchange import Exchange
from mla_client.serving import Options, PassPlan, Ranks, Scheduled, Worker
from mla_client.testing import ServerProcess

HEADS, LAYERS, BATCH, PROMPT, PASSES = 128, 6, 4, 40, 12
ROUNDING = 2.0 ** -7  # of the largest output
LATE_S = 0.003
ENDS_S = 240


def weights(layer: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """W_UK and W_UV of a layer, of all heads."""
    generator = torch.Generator().manual_seed(layer)
    uk, uv = (torch.randn(shape, generator=generator) / 23
              for shape in ((HEADS, 128, 512), (HEADS, 512, 128)))
    return uk.to(torch.bfloat16), uv.to(torch.bfloat16)


def run(worker: Worker, rank: int, ranks: int, turn: int, chained: bool) -> torch.Tensor:
    """The outputs of all passes of some requests, of this rank's heads."""
    assert worker.exchange is not None
    mine = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
    generator = torch.Generator(device="cuda").manual_seed(7)
    late = random.Random(rank)
    found: List[torch.Tensor] = []
    for number in range(PASSES):
        new, computed = (1, PROMPT + number - 1) if number else (PROMPT, 0)
        plan = PassPlan(turn * PASSES + number + 1, tuple(
            Scheduled(f"{turn}.{each}", computed, new) for each in range(BATCH)))
        torch.cuda.current_stream().synchronize()  # as an engine has had the pass before
        torch.distributed.barrier()
        made = worker.begin(plan)
        for layer in range(LAYERS):
            q, kv = (torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)
                     for shape in ((BATCH * new, HEADS, 192), (BATCH * new, 576)))
            output = torch.zeros(BATCH * new, HEADS // ranks * 128, device="cuda",
                                 dtype=torch.bfloat16)
            if late.random() < 0.2:
                time.sleep(LATE_S)
            worker.exchange.attend(made, layer, q[:, mine].contiguous(),
                                   (kv[:, :512], kv[:, 512:]), output)
            found.append(output)
        if not made.whole or made.chained != chained:
            raise SystemExit(f"pass {number}: whole {made.whole}, chained {made.chained}")
        worker.end(ahead=True)
    worker.begin(PassPlan((turn + 1) * PASSES, gone=tuple(f"{turn}.{i}" for i in range(BATCH))))
    worker.end()
    return torch.cat(found)


def rank_main(flags: argparse.Namespace) -> None:
    """One rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{flags.meet}",
                                         rank=flags.rank, world_size=flags.ranks)
    ranks = Ranks(flags.rank, flags.ranks)
    for device_bytes in (0, 64 << 20):
        options = Options.of({"target": flags.target, "timeout_s": 20.0,
                              "device_bytes": device_bytes}, f"ranks{device_bytes}", "check")
        worker = Worker(options.with_defaults(gpu_arguments()), ranks)
        spec = ModelSpec(f"ranks{device_bytes}", Geometry(HEADS, 512, 64, 128, 128), LAYERS,
                         0.0721687)
        first, count = ranks.heads(HEADS)
        worker.start(spec, lambda layer, a=first, b=count: tuple(
            each[a:a + b] for each in weights(layer)),  # type: ignore[arg-type,return-value]
                     lambda passes, of=spec: Exchange.of(passes, ranks, of, weights))
        real = Sender.attend_chained
        Sender.attend_chained = lambda *_: False  # type: ignore[method-assign]
        want = run(worker, flags.rank, flags.ranks, 0, False)
        Sender.attend_chained = real  # type: ignore[method-assign]
        for turn in (1, 2):
            got = run(worker, flags.rank, flags.ranks, turn, True)
            off, most = float((got - want).abs().max()), float(want.abs().max())
            print(f"rank {flags.rank}, {'GPU' if device_bytes else 'host'} memory, turn {turn}: "
                  f"greatest difference {off} of {most}", flush=True)
            if not off <= ROUNDING * most or not most > 0:
                raise SystemExit("outputs of chained passes are others")
        worker.close()
        torch.distributed.barrier()


def main() -> None:
    """Starts a server and the ranks."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server")
    parser.add_argument("--server-arg", action="append", default=[])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank >= 0:
        rank_main(flags)
        return
    with tempfile.TemporaryDirectory() as folder, ServerProcess(
            flags.server, ["--backend=cuda", "--kv-cache-bytes=4GiB",
                           "--limits-weights-bytes=2GiB", "--shm-device-bytes=1GiB",
                           "--shm-total-bytes=2GiB", *flags.server_arg]) as server:
        ranks = [subprocess.Popen([sys.executable, __file__, "--ranks", str(flags.ranks), "--rank",
                                   str(rank), "--target", server.target, "--meet",
                                   f"{folder}/meet"]) for rank in range(flags.ranks)]
        try:
            failed = [rank.wait(ENDS_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    print("check: ok" if not any(failed) else f"check: FAILED: status {failed}", flush=True)
    sys.exit(any(failed))


if __name__ == "__main__":
    main()
