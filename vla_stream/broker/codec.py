"""Bytes in and out of streams, lanes and pipes: arrays as a msgpack header plus raw little-endian bytes, and sealed
entry fields with a schema number and a digest.

No pickle: it would run whatever a stranger with access to Redis writes. A decoder here allocates nothing before it has
checked every size against the bytes that are really there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import xxhash

from vla_stream.errors import BadMessage

Value = str | bytes | int | float
Piece = bytes | bytearray | memoryview  # the latter of single bytes
Described = tuple[str, np.dtype[Any], tuple[int, ...], int]  # an array's name, dtype, shape, and place in its packet

MAX_PACKET_BYTES = 256 * 1024 * 1024  # half of Redis's own limit for one bulk string (F26)
MAX_HEADER_BYTES = 1024 * 1024
MAX_ARRAYS = 4096
MAX_HEADER_ITEMS = 1 << 14  # in one list of the header: msgpack allocates what a list claims to hold
MAX_DIMENSIONS = 8
ALIGNMENT = 16  # so that a view into the packet is aligned for every dtype and for vector loads

DTYPES = {name: np.dtype(name) for name in ("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8")}
DTYPES |= {name: np.dtype(name) for name in ("<f2", "<f4", "<f8")}
BOOL = DTYPES["|b1"]
KINDS = {dtype: name for name, dtype in DTYPES.items()}
COPIED_BELOW_BYTES = 4096  # a piece of its own costs more than the copy
PIECES_AT_ONCE = 64  # of one system call


def pack(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any] | None = None) -> bytes:
    """One packet: 4 bytes header length, header [[name, dtype, shape]...] and meta (plain
    values that msgpack knows), then the arrays, each aligned."""
    return b"".join(pieces(arrays, meta))


def pieces(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any] | None = None) -> list[Piece]:
    """The same packet in pieces, large arrays uncopied: for whoever writes one piece after the other."""
    described: list[list[Any]] = []
    chunks: list[Piece] = []
    small, position = bytearray(), 0
    for name, array in arrays.items():
        if (kind := KINDS.get(array.dtype)) is None:
            array = array.astype(array.dtype.newbyteorder("<"))  # one of the big-endian dtypes, if any
            if (kind := KINDS.get(array.dtype)) is None:
                expected = ", ".join(DTYPES)
                raise BadMessage(f"array {name}: dtype {array.dtype} cannot travel, expected one of {expected}")
        described.append([name, kind, array.shape])
        padding = -array.nbytes % ALIGNMENT
        if array.nbytes < COPIED_BELOW_BYTES:
            small += array.tobytes() + bytes(padding)
        else:
            chunks += [small, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]
            small = bytearray(padding)
        position += array.nbytes + padding
    header = msgpack.packb([described, dict(meta or {})])
    if len(header) > MAX_HEADER_BYTES or position > MAX_PACKET_BYTES:
        raise BadMessage(f"packet of {position} bytes is too large, expected at most {MAX_PACKET_BYTES}")
    filler = bytes(_arrays_start(len(header)) - 4 - len(header))
    first, *others = [*chunks, small]
    return [len(header).to_bytes(4, "little") + header + filler + first, *others]


def write_all(packet: Sequence[Piece], write: Callable[[list[memoryview], int], int]) -> int:
    """All pieces of a packet; returns how many bytes that is. `write(pieces, so far)` says how many it took."""
    left, done = [memoryview(piece) for piece in packet], 0
    while left:
        taken = write(left[:PIECES_AT_ONCE], done)
        done += taken
        while left and taken >= len(left[0]):
            taken -= len(left.pop(0))
        if taken:
            left[0] = left[0][taken:]
    return done


def unpack(packet: bytes | memoryview) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays (read-only views into `packet`, no copy) and meta. Raises BadMessage."""
    view = memoryview(packet).toreadonly()
    described, meta = layout(view, len(view))
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, shape, position in described:
        if dtype is BOOL:  # another byte than 0 and 1 makes no valid array
            arrays[name] = np.asarray(np.ndarray(shape, np.uint8, view, position) != 0)
            arrays[name].flags.writeable = False
        else:
            arrays[name] = np.ndarray(shape, dtype, view, position)
    return arrays, meta


def layout(head: bytes | memoryview, packet_bytes: int) -> tuple[list[Described], dict[str, Any]]:
    """What a packet of so many bytes holds, and where, by its first bytes: its arrays, one after the other and each
    filled up to ALIGNMENT, then its meta. Raises BadMessage, also when the header does not end in `head`."""
    if not 4 <= packet_bytes <= MAX_PACKET_BYTES + MAX_HEADER_BYTES:
        raise BadMessage(f"packet of {packet_bytes} bytes, expected 4 to {MAX_PACKET_BYTES}")
    header_bytes = int.from_bytes(head[:4], "little")
    if header_bytes > min(MAX_HEADER_BYTES, len(head) - 4):
        raise BadMessage(f"packet header of {header_bytes} bytes, expected at most {len(head) - 4}")
    named, meta = _header(bytes(head[4 : 4 + header_bytes]))
    described: list[Described] = []
    position = _arrays_start(header_bytes)
    for name, dtype, shape in named:
        size = _count(name, shape) * dtype.itemsize
        if size > packet_bytes - position:
            raise BadMessage(f"array {name}: shape {shape} needs {size} bytes, {packet_bytes - position} are left")
        described.append((name, dtype, shape, position))
        position += size + (-size % ALIGNMENT)
    if position != packet_bytes:
        raise BadMessage(f"packet of {packet_bytes} bytes, expected {position} from its header")
    return described, meta


def _arrays_start(header_bytes: int) -> int:
    return 4 + header_bytes + (-(4 + header_bytes) % ALIGNMENT)


def _header(raw: bytes) -> tuple[list[tuple[str, np.dtype[Any], tuple[int, ...]]], dict[str, Any]]:
    try:
        described, meta = msgpack.unpackb(raw, strict_map_key=True, max_ext_len=0, max_array_len=MAX_HEADER_ITEMS)
        if len(described) > MAX_ARRAYS or not isinstance(meta, dict):
            raise BadMessage(f"packet header with {len(described)} arrays, expected at most {MAX_ARRAYS}")
        parsed = [(name, DTYPES[kind], tuple(shape)) for name, kind, shape in described]
    except BadMessage:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as exc:
        raise BadMessage(
            f"packet header does not decode ({type(exc).__name__}), expected [[name, dtype, shape]…]"
        ) from exc
    for name, _, shape in parsed:
        if not isinstance(name, str) or len(shape) > MAX_DIMENSIONS:
            raise BadMessage(f"array {name!r} has {len(shape)} dimensions, expected at most {MAX_DIMENSIONS}")
    return parsed, meta


def _count(name: str, shape: tuple[Any, ...]) -> int:
    count = 1
    for size in shape:
        # The bound per axis counts too: behind an axis of 0 the product says nothing.
        if type(size) is not int or not 0 <= size <= MAX_PACKET_BYTES:
            raise BadMessage(f"array {name}: shape {shape!r}, expected numbers from 0 to {MAX_PACKET_BYTES}")
        count *= size
        if count > MAX_PACKET_BYTES:
            raise BadMessage(f"array {name}: {shape!r} is absurdly large, expected at most {MAX_PACKET_BYTES} elements")
    return count


def seal(schema: int, fields: Mapping[str, Value]) -> dict[bytes, bytes]:
    """Entry fields as bytes, with `schema` and an xxh3 `digest` over all other fields and the schema.

    Both names are taken: a field of the same name would vanish under them, so it raises ValueError.
    """
    if taken := {"schema", "digest"} & set(fields):
        raise ValueError(f"field {min(taken)} is set by seal(); choose another name")
    raw = {name.encode(): _value(value) for name, value in fields.items()}
    raw[b"schema"] = str(schema).encode()
    raw[b"digest"] = _digest(raw)
    return raw


def unseal(schema: int, raw: Mapping[bytes, bytes]) -> Fields:
    """Check schema and digest, and give a typed view. Raises BadMessage."""
    if not raw:
        raise BadMessage("entry has no fields; it was probably trimmed")
    if raw.get(b"schema") != str(schema).encode():
        raise BadMessage(
            f"entry has schema {_short(raw.get(b'schema'))}, expected {schema}; all workers need one release"
        )
    unsigned = dict(raw)
    if unsigned.pop(b"digest", None) != _digest(unsigned):
        raise BadMessage("entry's digest does not match its fields; it was damaged or not written by vla-stream")
    return Fields(raw)


class Fields:
    """Typed access to the raw fields of one entry; each accessor raises BadMessage naming the field."""

    def __init__(self, raw: Mapping[bytes, bytes]) -> None:
        self._raw = raw

    def has(self, name: str) -> bool:
        return name.encode() in self._raw

    def data(self, name: str) -> bytes:
        try:
            return self._raw[name.encode()]
        except KeyError as exc:
            raise BadMessage(f"entry lacks the field {name}") from exc

    def text(self, name: str, max_bytes: int = 4096) -> str:
        raw = self.data(name)
        if len(raw) > max_bytes:
            raise BadMessage(f"field {name} has {len(raw)} bytes, expected at most {max_bytes}")
        try:
            return raw.decode()
        except UnicodeDecodeError as exc:
            raise BadMessage(f"field {name} is {_short(raw)}, expected UTF-8") from exc

    def integer(self, name: str, low: int = 0, high: int = 2**53) -> int:
        try:
            value = int(self.text(name, 24))
        except ValueError as exc:
            raise BadMessage(f"field {name} is {_short(self.data(name))}, expected an integer") from exc
        if not low <= value <= high:
            raise BadMessage(f"field {name} is {value}, expected {low} to {high}")
        return value


def digest_of(*data: Piece) -> str:
    """xxh3 (64 bits) of a payload, or of its pieces, as it stands in references and manifests."""
    state = xxhash.xxh3_64()
    for piece in data:
        state.update(piece)
    return state.hexdigest()


def _digest(raw: Mapping[bytes, bytes]) -> bytes:
    # In msgpack every name and value has its length before it: no byte can move from one to the next.
    return xxhash.xxh3_64_hexdigest(msgpack.packb(sorted(raw.items()))).encode()


def _value(value: Value) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _short(raw: bytes | None) -> str:
    return "missing" if raw is None else repr(raw[:40])
