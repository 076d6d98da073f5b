"""Tokens per second with the library's own attention and with a server's."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import transformers
from mla_client.transformers.attachment import cache_name

CHUNK = 1024
DECODED = 32


def _sync(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


@torch.no_grad()
def _fill(model: Any, cache: Any, context: int, device: str) -> Tuple[Any, float]:
    """Fills the cache in chunks; returns it, and the seconds."""
    drawn = torch.Generator().manual_seed(3)
    tokens = torch.randint(8, 256, (1, context), generator=drawn).to(device)
    _sync(device)
    begin = time.monotonic()
    for at in range(0, context, CHUNK):
        outputs = model(input_ids=tokens[:, at:at + CHUNK], **{cache_name(model): cache},
                        use_cache=True, logits_to_keep=1)
        cache = getattr(outputs, cache_name(model))
    _sync(device)
    return cache, time.monotonic() - begin


@torch.no_grad()
def _decode(model: Any, cache: Any, device: str) -> float:
    """Tokens a second of greedy decoding on a filled cache, after two to warm up."""
    token = torch.full((1, 1), 9, device=device)
    for step in range(DECODED + 2):
        if step == 2:
            _sync(device)
            begin = time.monotonic()
        logits = model(input_ids=token, **{cache_name(model): cache}, use_cache=True).logits
        token = logits[:, -1:].argmax(-1)
    _sync(device)
    return DECODED / (time.monotonic() - begin)


def _try(model: Any, cache: Any, device: str, say: Callable[[str], None]) -> Optional[float]:
    """_decode, and the cache as before; None if it does not fit in the device's memory."""
    length = cache.get_seq_length()
    try:
        return _decode(model, cache, device)
    except torch.OutOfMemoryError as error:
        say(f"does not fit: {str(error)[:90]}")
        torch.cuda.empty_cache()
        return None
    finally:
        cache.crop(length - cache.get_seq_length())


def _row(model: Any, device: str, context: int, remotes: List[Callable],
         say: Callable[[str], None]) -> List[Optional[float]]:
    """Measures one context: prefill by sdpa and each server, decode by eager, sdpa and each server.
    """
    model.set_attn_implementation("sdpa")
    _fill(model, transformers.DynamicCache(config=model.config), min(context, 2 * CHUNK), device)
    cache, seconds = _fill(model, transformers.DynamicCache(config=model.config), context, device)
    sdpa = _try(model, cache, device, say)
    model.set_attn_implementation("eager")
    eager = _try(model, cache, device, say)
    del cache
    filled, decoded = [context / seconds], [eager, sdpa]
    for remote in remotes:
        with remote() as attachment:
            _fill(model, attachment.cache(), min(context, 2 * CHUNK), device)
            remote_cache, seconds = _fill(model, attachment.cache(), context, device)
            filled.append(context / seconds)
            decoded.append(_decode(model, remote_cache, device))
            remote_cache.release()
    return [*filled, *decoded]


def table(model: Any, device: str, contexts: List[int], remotes: Dict[str, Callable],
          say: Callable[[str], None]) -> None:
    """Prints one line per context. `remotes`: contexts with remote attention, by name."""
    say(f"{'':<9}{'prefill, tokens/s':>{12 + 12 * len(remotes)}}"
        f"{'decode, tokens/s':>{24 + 12 * len(remotes)}}")
    say(f"{'context':<9}" + "".join(f"{name:>12}" for name in (
        "sdpa", *remotes, "eager", "sdpa", *remotes)))
    for context in contexts:
        row = _row(model, device, context, list(remotes.values()), say)
        say(f"{context:<9}" + "".join(f"{'no room':>12}" if value is None else f"{value:>12.1f}"
                                      for value in row))
