"""Seeds follow from what is simulated: pinned, so that a run repeats on every host, release and Python version."""

from __future__ import annotations

import numpy as np

from vla_stream.config import MAX_SEED
from vla_stream.seeds import derive, noise_keys, reset_seeds


def test_seeds_are_pinned() -> None:
    assert derive("noise", 0, 1, 2, 3) == 14415916643951804310
    assert noise_keys(7, ticket=17, chunk_step=3, rows=2).tolist() == [12112104724331341493, 13183244711627232142]
    assert reset_seeds(7, ticket=17, chunk_step=3, rows=2, shared=False).tolist() == [
        14963404378794077772,
        12145392922311427083,
    ]


def test_every_argument_counts() -> None:
    variants = [
        derive("noise", 0, 1, 2, 3),
        derive("reset", 0, 1, 2, 3),
        derive("noise", 1, 1, 2, 3),
        derive("noise", 0, 2, 2, 3),
        derive("noise", 0, 1, 3, 3),
        derive("noise", 0, 1, 2, 4),
        derive("noise", 0, 1, 2),
        derive("noise", 0, 2, 1, 3),
    ]
    assert len(set(variants)) == len(variants)


def test_a_rows_key_does_not_depend_on_how_many_rows_travel_with_it() -> None:
    assert np.array_equal(noise_keys(7, 17, 3, rows=8)[:2], noise_keys(7, 17, 3, rows=2))
    many = reset_seeds(7, 17, 3, 8, shared=False)
    assert np.array_equal(many[:2], reset_seeds(7, 17, 3, 2, shared=False))


def test_rows_of_one_request_have_different_noise() -> None:
    keys = noise_keys(7, 17, 3, rows=64)
    assert keys.dtype == np.uint64 and keys.shape == (64,)
    assert len(set(keys.tolist())) == 64


def test_rows_of_a_group_share_their_reset_seed_and_others_do_not() -> None:
    shared = reset_seeds(7, 17, 0, 8, shared=True)
    own = reset_seeds(7, 17, 0, 8, shared=False)
    assert shared.dtype == own.dtype == np.uint64
    assert set(shared.tolist()) == {int(own[0])}
    assert len(set(own.tolist())) == 8


def test_resets_and_noise_of_one_place_are_unrelated() -> None:
    assert not set(reset_seeds(7, 17, 3, 8, shared=False).tolist()) & set(noise_keys(7, 17, 3, 8).tolist())


def test_the_largest_seed_that_a_config_takes_works() -> None:
    assert 0 <= derive("noise", MAX_SEED, 10**18, 10**9, 4096) < 2**64
