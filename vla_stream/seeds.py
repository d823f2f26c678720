"""Seeds that depend on what is simulated, never on who serves it, in what batch, or how often."""

from __future__ import annotations

import struct

import numpy as np
import xxhash


def derive(purpose: str, run_seed: int, *parts: int) -> int:
    """A 64-bit seed from its arguments, equal on every host and Python version."""
    packed = struct.pack(f"<{1 + len(parts)}q", run_seed, *parts)
    return xxhash.xxh64_intdigest(purpose.encode() + packed)


def noise_keys(run_seed: int, ticket: int, chunk_step: int, rows: int) -> np.ndarray:
    """Sampling-noise keys u64[rows] of one request."""
    return np.array([derive("noise", run_seed, ticket, chunk_step, row) for row in range(rows)], dtype=np.uint64)


def reset_seeds(run_seed: int, ticket: int, chunk_step: int, rows: int, *, shared: bool) -> np.ndarray:
    """Reset seeds u64[rows]; `shared` gives every row the same one (the rows of one group)."""
    keys = [derive("reset", run_seed, ticket, chunk_step, 0 if shared else row) for row in range(rows)]
    return np.array(keys, dtype=np.uint64)
