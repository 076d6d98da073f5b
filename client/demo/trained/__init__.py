"""The trained model as a file: int8 weights with a scale a row, read without pickle.

The digest next to the file (sha256sum's format) must match, so that a damaged or incomplete file is
found before it is used.
"""

from __future__ import annotations

import hashlib
import pathlib
from typing import Dict, Tuple

import numpy as np
import numpy.typing as npt
from attention import local_attention
from corpus import Text
from mla_client import bf16
from model import Array, Config, FeedForward, Layer, Model

PATH = pathlib.Path(__file__).with_name("weights.npz")
# All blocks are dense: a router would turn rounding in the cache into jumps between experts, and a
# comparison of cache formats would measure those.
CONFIG = Config(hidden=256, layers=4, dense_layers=4, heads=4, q_lora=128, dense_width=640)
# In 8,192 positions in both profiles the largest difference was 0.16, 0.29 and 1.8, and the median
# 0.02, 0.06 and 0.25; logits have a deviation of 5.4.
NOISE = {"bf16": 0.1, "fp8_row": 0.2, "fp8_tensor": 0.7}
SCALE = ".scale"  # suffix of the scales' names


def shapes(config: Config) -> Dict[str, Tuple[int, ...]]:
    """Names and shapes of all weights, as `forward` of the model uses them."""
    c = config
    layer = {
        "q_down": (c.hidden, c.q_lora),
        "q_up": (c.q_lora, c.heads * (c.nope + c.rope)),
        "kv_down": (c.hidden, c.kv_lora + c.rope),
        "w_uk": (c.heads, c.nope, c.kv_lora),
        "w_uv": (c.heads, c.kv_lora, c.v),
        "out": (c.heads * c.v, c.hidden),
        "gate": (c.hidden, c.dense_width),
        "up": (c.hidden, c.dense_width),
        "down": (c.dense_width, c.hidden),
    }
    return {"embedding": (c.vocab, c.hidden), "head": (c.hidden, c.vocab),
            **{f"{index}.{name}": shape for index in range(c.layers)
               for name, shape in layer.items()}}


def quantise(weights: Array) -> Tuple[npt.NDArray[np.int8], Array]:
    """int8 values and one fp32 scale for each row of the last axis; a row of zeros keeps them."""
    largest = np.abs(weights).max(axis=-1, keepdims=True)
    scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return np.rint(weights / scale).astype(np.int8), scale


def dequantise(values: npt.NDArray[np.int8], scale: Array) -> Array:
    """The weights, representable in bfloat16 like the weights of released checkpoints."""
    return bf16.round_to_bf16(values.astype(np.float32) * scale)


def save(weights: Dict[str, Array], path: pathlib.Path) -> None:
    """Writes the file and its digest."""
    arrays: Dict[str, npt.NDArray] = {}
    for name, array in weights.items():
        arrays[name], arrays[name + SCALE] = quantise(array)
    np.savez_compressed(path, **arrays)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    digest_path(path).write_text(f"{digest}  {path.name}\n")


def digest_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".sha256")


def read(path: pathlib.Path, config: Config) -> Dict[str, Array]:
    """The weights of a file. ValueError if digest, names, dtypes or shapes are not as they must."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != digest_path(path).read_text().split()[0]:
        raise ValueError(f"{path}: digest {digest} is not that of {digest_path(path).name}")
    weights = {}
    with np.load(path, allow_pickle=False) as file:
        for name, shape in shapes(config).items():
            values, scale = file[name], file[name + SCALE]
            if (values.shape, scale.shape) != (shape, (*shape[:-1], 1)):
                raise ValueError(f"{path}: {name} is {values.shape} with scales {scale.shape}, "
                                 f"must be {shape}")
            weights[name] = dequantise(values, scale)
    return weights


def model_of(weights: Dict[str, Array], config: Config) -> Model:
    """The model with weights named as in `shapes`."""
    def layer(index: int) -> Layer:
        own = {name.split(".")[1]: array for name, array in weights.items()
               if name.startswith(f"{index}.")}
        block = FeedForward(own.pop("gate"), own.pop("up"), own.pop("down"))
        return Layer(**own, feed_forward=block)

    return Model(config, weights["embedding"], [layer(index) for index in range(config.layers)],
                 weights["head"], NOISE)


def load(path: pathlib.Path = PATH, config: Config = CONFIG) -> Model:
    """The trained model."""
    return model_of(read(path, config), config)


def logits_of(model: Model, windows: Text) -> Array:
    """Logits [windows, bytes, vocab] of windows [windows, bytes], attention computed here."""
    positions = np.arange(windows.shape[1])
    return np.array([model.forward(window.astype(np.int64), positions, local_attention(model))
                     for window in windows])


def log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    """Natural logarithms of the probabilities."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits, dtype=np.float64).sum(axis=-1, keepdims=True))


def bits_per_byte(logits: Array, windows: Text) -> float:
    """Mean information of the bytes of windows, given the earlier bytes of the window; the first
    byte of each window does not count. Logits are [windows, bytes, vocab] as from logits_of."""
    chosen = np.take_along_axis(log_softmax(logits[:, :-1]),
                                windows[:, 1:, None].astype(np.int64), axis=-1)
    return float(-chosen.mean() / np.log(2))
