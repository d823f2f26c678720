"""The order of a GPU's two streams, as far as a machine without one can tell: which calls are made, and when."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from vla_stream.learning.beside import Beside
from vla_stream.policies.transfer import to_device


def test_on_the_host_passes_are_made_where_they_are() -> None:
    beside = Beside(torch.device("cpu"))
    beside.weights_moved()
    with beside.passes():
        assert torch.ones(2).sum() == 2


def test_on_a_gpu_passes_wait_for_the_newest_weights_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def wait_event(self, event: str) -> None:
            calls.append(("wait", event))

        def record_event(self) -> str:
            calls.append("record")
            return f"event {calls.count('record')}"

    @contextlib.contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        calls.append("enter")
        yield
        calls.append("leave")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    beside = Beside(torch.device("cuda"))
    beside.weights_moved()
    beside.weights_moved()
    for _ in range(2):
        with beside.passes():
            calls.append("pass")
    assert calls == ["record", "record", *(("wait", "event 2"), "enter", "pass", "leave") * 2]


def test_an_array_that_is_contiguous_is_not_copied_to_the_host_itself() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = to_device(array, torch.device("cpu"))
    array[0, 0] = 7
    assert tensor[0, 0] == 7
    assert torch.equal(to_device(array.T, torch.device("cpu")), torch.from_numpy(array.T.copy()))
