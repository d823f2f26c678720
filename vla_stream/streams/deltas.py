"""What changed between two versions of the weights, bit for bit: bf16 weights change in few places per step.

Both versions are safetensors bytes with the same header. Elements are compared as unsigned integers of their width,
in blocks; a block is a head (_HEAD), the gaps between changed elements, and their differences, both deflated:

    gaps         one byte each, 255 for "255 more, go on"; mostly small where one element in twenty has changed
    differences  new − old, zigzag (0, −1, 1, −2 … as 0, 1, 2, 3 …), first all lowest bytes, then the next …: an update
                 moves most elements by one unit in the last place, so that these are mostly 1, 2, and zeros

Measured for bf16 with Adam at a learning rate of 1e-5: `vla-stream bench weights`.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_stream.errors import BadMessage

Data = bytes | bytearray | memoryview

MAX_SHARE = 0.25  # of the full bytes: above it a delta saves less than it costs to make and apply
_BLOCK = 1 << 24  # elements compared at once, so that what is needed beside the weights is bounded
_HEAD = struct.Struct("<III")  # changed elements, bytes of their gaps, bytes of their differences
_SAMPLE = 101  # every so many elements are looked at first: most weights that change everywhere cost nothing more
_MAX_HEADER_BYTES = 100_000_000  # as in safetensors


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Where one tensor lies: data[start:stop]. dtype: in safetensors' words, for example BF16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def layout(data: Data) -> list[TensorBytes]:
    """The tensors of safetensors bytes, by their place. Raises BadMessage."""
    view, first = memoryview(data), _first(data)
    try:
        header: dict[str, Any] = json.loads(bytes(view[8:first]))
        header.pop("__metadata__", None)
        tensors = [
            TensorBytes(name, str(item["dtype"]), tuple(map(int, item["shape"])), first + int(start), first + int(stop))
            for name, item in header.items()
            for start, stop in [item["data_offsets"]]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise BadMessage(f"weights whose header does not decode ({type(exc).__name__}), expected safetensors") from exc
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    position = first
    for tensor in tensors:
        if tensor.start != position or not tensor.start <= tensor.stop <= len(view):
            raise BadMessage(f"weights whose tensor {tensor.name} is not where the one before it ends")
        position = tensor.stop
    return tensors


def encode(previous: Data, current: Data) -> bytes | None:
    """What turns `previous` into `current`; None when they are not the same tensors, or it would not be worth it."""
    first = _first(current)
    if len(previous) != len(current) or memoryview(previous)[:first] != memoryview(current)[:first]:
        return None
    looked = changed = 0
    for old, new in zip(_blocks(previous), _blocks(current), strict=True):
        looked += len(old[::_SAMPLE])
        changed += int(np.count_nonzero(old[::_SAMPLE] != new[::_SAMPLE]))
    if changed > looked / 2:
        return None
    parts, size = [], 0
    for old, new in zip(_blocks(previous), _blocks(current), strict=True):
        parts.append(_encode_block(old, new))
        size += len(parts[-1])
        if size > MAX_SHARE * len(current):
            return None
    return b"".join(parts)


def apply(data: bytearray | memoryview, delta: Data) -> None:
    """Turn `data` into the version that `delta` leads to, in place. Raises BadMessage, and then it is
    neither of them."""
    view, position = memoryview(delta), 0
    for block in _blocks(data):
        if len(view) - position < _HEAD.size:
            raise BadMessage(f"delta of {len(view)} bytes ends too early")
        count, gap_bytes, difference_bytes = _HEAD.unpack_from(view, position)
        position += _HEAD.size
        middle, end = position + gap_bytes, position + gap_bytes + difference_bytes
        if count > len(block) or end > len(view):
            raise BadMessage(f"delta changes {count} of {len(block)} elements by {end - position} bytes, it has less")
        if count:
            _apply_block(block, count, view[position:middle], view[middle:end])
        position = end
    if position != len(view):
        raise BadMessage(f"delta of {len(view)} bytes, expected {position}")


def _encode_block(old: np.ndarray, new: np.ndarray) -> bytes:
    places = np.flatnonzero(old != new)
    if not len(places):
        return _HEAD.pack(0, 0, 0)
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // 255 + 1) - 1
    gap_bytes = np.full(ends[-1] + 1, 255, dtype=np.uint8)
    gap_bytes[ends] = gaps % 255
    width = old.dtype.itemsize
    difference = (new[places] - old[places]).view(f"<i{width}")
    zigzag = (difference << 1) ^ (difference >> (8 * width - 1))
    planes = np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, width).T)
    deflated = _deflate(gap_bytes), _deflate(planes)
    return b"".join([_HEAD.pack(len(places), len(deflated[0]), len(deflated[1])), *deflated])


def _apply_block(block: np.ndarray, count: int, gaps: memoryview, differences: memoryview) -> None:
    gap_bytes = np.frombuffer(_inflate(gaps, count + len(block) // 255 + 1), dtype=np.uint8)
    ends = np.flatnonzero(gap_bytes != 255)
    width = block.dtype.itemsize
    planes = np.frombuffer(_inflate(differences, count * width), dtype=np.uint8)
    if len(ends) != count or len(planes) != count * width:
        raise BadMessage(f"delta of {count} elements has {len(ends)} places and {len(planes)} bytes for them")
    places = np.cumsum(gap_bytes, dtype=np.int64)[ends] + np.arange(count)
    if places[-1] >= len(block):
        raise BadMessage(f"delta changes element {places[-1]} of {len(block)}")
    zigzag = np.ascontiguousarray(planes.reshape(width, count).T).view(block.dtype).reshape(-1)
    block[places] += (zigzag >> 1) ^ (0 - (zigzag & 1))


def _blocks(data: Data) -> Iterator[np.ndarray]:
    """All elements as unsigned integers of their width: views into `data`, in its order."""
    regions: list[tuple[int, int, int]] = []
    for tensor in layout(data):
        elements, size = math.prod(tensor.shape), tensor.stop - tensor.start
        width = size // elements if elements and size in (elements * w for w in (1, 2, 4, 8)) else 1
        if regions and regions[-1][2] == width:
            regions[-1] = (regions[-1][0], tensor.stop, width)
        else:
            regions.append((tensor.start, tensor.stop, width))
    for start, stop, width in regions:
        region: np.ndarray = np.frombuffer(data, dtype=f"<u{width}", count=(stop - start) // width, offset=start)
        for index in range(0, len(region), _BLOCK):
            yield region[index : index + _BLOCK]


def _first(data: Data) -> int:
    """Where the tensors begin: behind eight bytes of the header's length, and the header."""
    size = int.from_bytes(bytes(memoryview(data)[:8]), "little")
    if len(data) < 8 or size > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise BadMessage(f"weights of {len(data)} bytes with a header of {size}, expected safetensors")
    return 8 + size


def _deflate(array: np.ndarray) -> bytes:
    # Runs and single bytes are all there is to find; looking for repeated sequences took longer and found less.
    compressor = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    return compressor.compress(array.data) + compressor.flush()


def _inflate(data: memoryview, limit: int) -> bytes:
    decompressor = zlib.decompressobj(-15)
    try:
        raw = decompressor.decompress(data, limit + 1)
    except zlib.error as exc:
        raise BadMessage("delta does not inflate; it was damaged or not written by vla-stream") from exc
    if len(raw) > limit or not decompressor.eof:
        raise BadMessage(f"delta inflates to more than {limit} bytes, or ends too early")
    return raw
