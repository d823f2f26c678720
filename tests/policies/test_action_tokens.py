"""Actions as tokens, against tables written from the definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from vla_stream.policies import action_tokens as tokens

LLAMA = 32064 - 64  # the text vocabulary without its padding


@pytest.mark.parametrize(
    ("token", "action"),
    [
        (31999, -1 + 1 / 255),
        (31998, -1 + 3 / 255),
        (31872, -1 / 255 + 1 / 255),  # the 128th of 255 intervals is the one in the middle
        (31871, 2 / 255),
        (31746, 1 - 3 / 255),
        (31745, 1 - 1 / 255),
        (31744, 1 - 1 / 255),  # one more token than there are intervals
    ],
)
def test_a_token_stands_for_the_middle_of_its_interval(token: int, action: float) -> None:
    assert float(tokens.actions_of(tokens.tokens_of(torch.tensor(token), LLAMA))) == pytest.approx(action, abs=1e-12)


def test_all_ids_say_what_the_published_arithmetic_says() -> None:
    edges = [-1 + 2 * step / 255 for step in range(256)]
    centres = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    ids = list(range(31744, 32000))
    expected = [centres[min(max(LLAMA - token - 1, 0), 254)] for token in ids]
    np.testing.assert_allclose(tokens.actions_of(tokens.tokens_of(torch.tensor(ids), LLAMA)), expected, atol=1e-12)


def test_an_action_becomes_the_token_of_the_interval_that_it_lies_in() -> None:
    actions = [-7.0, -1.0, -1 + 1e-6, -1 + 2 / 255 + 1e-6, 0.0, 0.3, 1 - 1e-6, 1.0, 2.0]
    # As numpy counts intervals from 1, and OpenVLA subtracts that from V.
    expected = LLAMA - np.digitize(np.clip(actions, -1, 1), np.linspace(-1, 1, 256))
    got = tokens.tokens_of(tokens.bins_of(torch.tensor(actions, dtype=torch.float64)), LLAMA)
    assert got.tolist() == expected.tolist()
    assert expected.tolist()[:2] == [31999, 31999] and expected.tolist()[-2:] == [31744, 31744]


def test_the_middle_of_an_interval_comes_back_as_its_token() -> None:
    bins = torch.arange(255)
    assert torch.equal(tokens.bins_of(tokens.actions_of(bins)), bins)
    assert torch.equal(tokens.bins_of(tokens.actions_of(bins).float()), bins)


def test_bins_are_drawn_as_often_as_the_softmax_at_the_temperature_says() -> None:
    logits = torch.tensor([0.0, 1.0, -math.inf, 2.0])
    weights = np.array([1, math.exp(0.5), 0, math.exp(1)])
    log_probabilities = tokens.log_softmax(logits.expand(20_000, 4), temperature=2.0)
    np.testing.assert_allclose(log_probabilities[0].exp(), weights / weights.sum(), atol=1e-6)
    normal = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    counts = np.bincount(tokens.draw(log_probabilities, normal), minlength=4)
    np.testing.assert_allclose(counts / 20_000, weights / weights.sum(), atol=0.015)
    assert counts[2] == 0


def test_what_was_chosen_has_its_log_probability_and_all_together_their_entropy() -> None:
    log_probabilities = tokens.log_softmax(torch.tensor([[0.0, math.log(3)], [5.0, 5.0]]), temperature=1.0)
    got = tokens.chosen(log_probabilities, torch.tensor([1, 0]))
    np.testing.assert_allclose(got, np.log([3 / 4, 1 / 2]), atol=1e-6)
    expected = [-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), math.log(2)]
    np.testing.assert_allclose(tokens.entropy(log_probabilities), expected, atol=1e-6)


def test_the_ends_of_the_noise_draw_the_outermost_bins_that_are_possible() -> None:
    log_probabilities = tokens.log_softmax(torch.tensor([-math.inf, 0.0, 0.0, -math.inf]), 1.0).expand(2, 4)
    assert tokens.draw(log_probabilities, torch.tensor([-40.0, 40.0])).tolist() == [1, 2]
