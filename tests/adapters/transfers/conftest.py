"""Receivers that are ended whatever happens."""

from collections.abc import Callable, Iterator

import pytest
import torch

from .peers import Receiver

torch.set_num_threads(1)


@pytest.fixture
def receivers() -> Iterator[Callable[[Receiver], Receiver]]:
    """Register a receiver, to be ended with the test."""
    started: list[Receiver] = []

    def register(receiver: Receiver) -> Receiver:
        started.append(receiver)
        return receiver

    yield register
    for receiver in started:
        receiver.end()
