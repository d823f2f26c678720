"""What all policies share: noise that depends on its key alone."""

from __future__ import annotations

import numpy as np

from vla_stream.policies.protocol import row_noise


def test_the_noise_of_a_row_is_that_of_a_generator_made_by_its_key_whatever_its_neighbours() -> None:
    keys = np.array([5, 0, 2**64 - 1, 5, 2**63], dtype=np.uint64)
    for size in (1, 7, 70):
        alone = [
            np.random.Generator(np.random.Philox(key=int(key))).standard_normal(size, dtype=np.float32) for key in keys
        ]
        np.testing.assert_array_equal(row_noise(keys, size), np.stack(alone))
    assert row_noise(keys[:0], 3).shape == (0, 3)
