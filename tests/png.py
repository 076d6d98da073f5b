"""Pictures of a browser as arrays."""

import struct
import zlib

import numpy as np


def read_png(path):
    """The picture as [height, width, 3]; 8 bits a channel, not interlaced, as Chromium writes."""
    data = path.read_bytes()
    at, packed = 8, b""
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at:at + 8])
        body = data[at + 8:at + 8 + size]
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", body[:10])
        if kind == b"IDAT":
            packed += body
        at += size + 12
    assert depth == 8 and color in (2, 6), (depth, color)
    channels = 3 if color == 2 else 4
    lines = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    out = np.zeros((height, width * channels), np.uint8)
    above = np.zeros(width * channels, np.uint8)
    for y in range(height):
        kind, line = lines[y, 0], lines[y, 1:].copy()
        if kind == 1:
            line = np.add.accumulate(line.reshape(width, channels), dtype=np.uint8).reshape(-1)
        elif kind == 2:
            line += above
        elif kind:
            line = _unfilter(kind, line, above, channels)
        out[y] = above = line
    return out.reshape(height, width, channels)[:, :, :3]


def _unfilter(kind, line, above, step):
    """A line of PNG's filters 3 (average) and 4 (Paeth)."""
    changed = np.flatnonzero(line) // step * step
    out, above = line.tolist(), above.tolist()
    i = 0
    while i < len(out):
        # If a byte equals the one above and the pixel before did too, Paeth predicts the byte
        # above.
        if kind == 4 and (i == 0 or out[i - step:i] == above[i - step:i]):
            at = np.searchsorted(changed, i)
            end = int(changed[at]) if at < len(changed) else len(out)
            out[i:end] = above[i:end]
            i = end
        for i in range(i, min(i + step, len(out))):
            left = out[i - step] if i >= step else 0
            corner = above[i - step] if i >= step else 0
            guess = (left + above[i]) // 2
            if kind == 4:
                near = left + above[i] - corner
                guess = min((left, above[i], corner), key=lambda c, near=near: abs(near - c))
            out[i] = (int(line[i]) + guess) & 255
        i += 1
    return np.array(out, np.uint8)
