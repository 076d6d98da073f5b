"""Trains the demo's model with torch on one GPU and stores it; README.md says how it went.

    python3 client/demo/trained/train.py --out FOLDER [--seconds 400]

Learning ends after --steps or --seconds, whichever comes first: the learning rate falls to zero by
then. With the same seed and number of steps a run sees the same windows; on a GPU sums still differ
in their last digits. At the end the stored file is read back, and the numpy model must find the
same bits per byte as torch did.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import pathlib
import sys
import time
from typing import Callable, ContextManager, Dict, Tuple

DEMO = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(DEMO), str(DEMO.parent / "python")]

import corpus
import numpy as np
import torch
import torch.nn.functional as F
import trained
from model import Config, yarn_frequencies
from torch import Tensor

EVAL_ROWS = 32
WARMUP_STEPS = 200
# Bound of the difference between torch and numpy, in bits: torch multiplies in bfloat16.
AGREEMENT = 0.01
NUMPY_WINDOWS = 4

Weights = Dict[str, Tensor]


def initial(config: Config, device: str) -> Weights:
    """Normal weights that keep the variance; weights that write to the residual stream are smaller,
    so that the sum over layers keeps it too."""
    weights = {}
    for name, shape in trained.shapes(config).items():
        kind = name.split(".")[-1]
        fan_in = shape[-1] if kind == "w_uk" else shape[-2]
        std = fan_in ** -0.5
        if kind in ("out", "down"):
            std *= (2 * config.layers) ** -0.5
        elif kind in ("q_up", "head"):
            std *= 0.5
        elif kind == "embedding":
            std = 1.0
        weights[name] = (torch.randn(shape, device=device) * std).requires_grad_()
    return weights


def rms_norm(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Adjacent pairs of the last axis; x [rows, positions, heads, rope]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def attend(w: Weights, prefix: str, h: Tensor, c: Config, angles: Tuple[Tensor, Tensor]) -> Tensor:
    """Causal attention in the expanded form; h [rows, positions, hidden], normalised."""
    rows, positions, _ = h.shape
    q = (rms_norm(h @ w[prefix + "q_down"]) @ w[prefix + "q_up"]).view(
        rows, positions, c.heads, c.nope + c.rope)
    kv = h @ w[prefix + "kv_down"]
    latent = rms_norm(kv[..., :c.kv_lora])
    k_nope = F.linear(latent, w[prefix + "w_uk"].flatten(0, 1)).unflatten(-1, (c.heads, c.nope))
    v = (latent @ w[prefix + "w_uv"].transpose(0, 1).flatten(1)).unflatten(-1, (c.heads, c.v))
    q_rope = rotate(q[..., c.nope:], *angles)
    k_rope = rotate(kv[..., None, c.kv_lora:], *angles).expand(-1, -1, c.heads, -1)
    q = torch.cat([q[..., :c.nope], q_rope.to(q.dtype)], dim=-1)
    k = torch.cat([k_nope, k_rope.to(k_nope.dtype)], dim=-1)
    v = F.pad(v, (0, q.shape[-1] - c.v))  # the fast kernels want one width
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                       is_causal=True, scale=c.softmax_scale)
    return o[..., :c.v].transpose(1, 2).flatten(2) @ w[prefix + "out"]


def forward(w: Weights, tokens: Tensor, c: Config, angles: Tuple[Tensor, Tensor],
            dropout: float) -> Tensor:
    """Logits [rows, positions, vocab]; the same computation as model.py's."""
    x = F.dropout(F.embedding(tokens, w["embedding"]), dropout, dropout > 0)
    for index in range(c.layers):
        prefix = f"{index}."
        x = x + F.dropout(attend(w, prefix, rms_norm(x), c, angles), dropout, dropout > 0)
        h = rms_norm(x)
        inner = F.silu(h @ w[prefix + "gate"]) * (h @ w[prefix + "up"])
        inner = F.dropout(inner, dropout, dropout > 0)
        x = x + F.dropout(inner @ w[prefix + "down"], dropout, dropout > 0)
    return rms_norm(x) @ w["head"]


class Trainer:
    """Weights, data and the loss on one device."""

    def __init__(self, args: argparse.Namespace, config: Config):
        torch.manual_seed(args.seed)
        self.args = args
        self.config = config
        self.device = args.device
        train, _ = corpus.split()
        self.train = torch.from_numpy(train.copy()).to(self.device)
        self.held_out = torch.from_numpy(corpus.held_out_windows()).to(self.device).long()
        self.weights = initial(config, self.device)
        angle = (torch.arange(corpus.WINDOW_BYTES)[:, None]
                 * torch.from_numpy(yarn_frequencies(config)))
        self.angles = tuple(part.float()[:, None].to(self.device)
                            for part in (torch.cos(angle), torch.sin(angle)))
        self.loss: Callable[..., Tensor] = self._loss
        if args.compile:
            self.loss = torch.compile(self._loss)

    def _loss(self, weights: Weights, windows: Tensor, dropout: float) -> Tensor:
        """Mean loss in nats; windows [rows, bytes]."""
        cos, sin = (part[:windows.shape[1] - 1] for part in self.angles)
        logits = forward(weights, windows[:, :-1], self.config, (cos, sin), dropout)
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    def low_precision(self) -> ContextManager:
        """Products in bfloat16 on a GPU."""
        if self.device == "cpu":
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16)

    def batch(self) -> Tensor:
        """Windows at random places of the training text."""
        starts = torch.randint(len(self.train) - corpus.WINDOW_BYTES + 1, (self.args.batch, 1),
                               device=self.device)
        return self.train[starts + torch.arange(corpus.WINDOW_BYTES, device=self.device)].long()

    @torch.no_grad()
    def held_out_bits(self, weights: Weights) -> float:
        """Bits per byte of the held-out text."""
        windows = self.held_out[:self.args.eval_windows or None]
        total = 0.0
        with self.low_precision():
            for part in windows.split(EVAL_ROWS):
                total += float(self._loss(weights, part, 0.0)) * len(part)
        return total / len(windows) / math.log(2)

    def run(self) -> None:
        """Learns until the steps or the time are used up."""
        args = self.args
        optimizer = torch.optim.AdamW(self.weights.values(), lr=args.rate, betas=(0.9, 0.98),
                                      weight_decay=args.decay)
        begin = time.monotonic()
        recent = torch.zeros((), device=self.device)
        for step in range(args.steps + 1):
            elapsed = time.monotonic() - begin
            progress = max(step / args.steps, elapsed / args.seconds)
            if step % args.report == 0 or progress >= 1:
                since = min(step, step % args.report or args.report)
                train_bits = float(recent) / max(since, 1) / math.log(2)
                print(f"step {step}, {time.monotonic() - begin:.1f} s, "
                      f"{step * args.batch * corpus.WINDOW_BYTES / 1e6:.0f} MB seen: "
                      f"train {train_bits:.4f}, "
                      f"held out {self.held_out_bits(self.weights):.4f} bits per byte", flush=True)
                recent.zero_()
            if progress >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = args.rate * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - progress)
            with self.low_precision():
                loss = self.loss(self.weights, self.batch(), args.dropout)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
            optimizer.step()
            recent += loss.detach()


def store(trainer: Trainer, path: pathlib.Path) -> bool:
    """Writes the weights, reads them back and measures them; False if numpy disagrees."""
    path.parent.mkdir(parents=True, exist_ok=True)
    trained.save({name: weight.detach().float().cpu().numpy()
                  for name, weight in trainer.weights.items()}, path)
    weights = trained.read(path, trainer.config)
    stored = {name: torch.from_numpy(array).to(trainer.device) for name, array in weights.items()}
    bits = trainer.held_out_bits(stored)
    model = trained.model_of(weights, trainer.config)
    windows = corpus.held_out_windows()[:NUMPY_WINDOWS]
    in_numpy = trained.bits_per_byte(trained.logits_of(model, windows), windows)
    trainer.held_out = trainer.held_out[:NUMPY_WINDOWS]
    in_torch = trainer.held_out_bits(stored)
    print(f"stored: {path.stat().st_size} bytes, held out {bits:.4f} bits per byte; the first "
          f"{NUMPY_WINDOWS} windows {in_torch:.4f}, in numpy {in_numpy:.4f}")
    return abs(in_torch - in_numpy) < AGREEMENT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of weights.npz")
    parser.add_argument("--steps", type=int, default=10000, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=math.inf, help="default: no limit")
    parser.add_argument("--batch", type=int, default=64, help="windows a step; %(default)s")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate; %(default)s")
    parser.add_argument("--decay", type=float, default=0.1, help="of weights; %(default)s")
    parser.add_argument("--dropout", type=float, default=0.2, help="default: %(default)s")
    parser.add_argument("--report", type=int, default=250, help="steps between reports")
    parser.add_argument("--eval-windows", type=int, default=0, help="held out; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    args = parser.parse_args()
    trainer = Trainer(args, trained.CONFIG)
    trainer.run()
    return 0 if store(trainer, args.out / trained.PATH.name) else 1


if __name__ == "__main__":
    sys.exit(main())
