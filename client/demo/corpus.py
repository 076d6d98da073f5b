"""The text that the trained model learned from, and the part of it that training never saw.

trained/README.md says where the text is from. It is cut into blocks, of which every twentieth is
held out.
"""

from __future__ import annotations

import bz2
import functools
import pathlib
from typing import List, Tuple

import numpy as np
import numpy.typing as npt

PATH = pathlib.Path(__file__).with_name("trained") / "austen.txt.bz2"
BLOCK_BYTES = 16 << 10
HELD_OUT_EVERY = 20
# Bytes of one window of training and of measuring: the longest context that the model knows.
WINDOW_BYTES = 1024

Text = npt.NDArray[np.uint8]


@functools.lru_cache(maxsize=1)
def _text() -> Text:
    """All of it; read-only."""
    return np.frombuffer(bz2.decompress(PATH.read_bytes()), np.uint8)


def split() -> Tuple[Text, List[Text]]:
    """The text to train on, and the blocks that are held out. The rest after the last whole block
    is in neither."""
    text = _text()
    count = len(text) // BLOCK_BYTES
    blocks = text[:count * BLOCK_BYTES].reshape(count, BLOCK_BYTES)
    held_out = np.arange(count) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return blocks[~held_out].reshape(-1), list(blocks[held_out])


def held_out_windows() -> Text:
    """The held-out text as windows [windows, WINDOW_BYTES]."""
    return np.concatenate([block.reshape(-1, WINDOW_BYTES) for block in split()[1]])


def prompt(length: int) -> List[int]:
    """Held-out text that begins with a paragraph."""
    block = split()[1][0].tobytes()
    begin = block.index(b"\n") + 1
    return list(block[begin:begin + length])
