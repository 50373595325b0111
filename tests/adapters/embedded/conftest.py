"""Two checkpoints of one shape, and servers that are ended whatever a test does."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch

from adapters.engines.embedded import CausalLM, EmbeddedServer, EngineOptions, LlamaConfig, save

from .client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Serve(Protocol):
    """Start a server in a thread and return a client of it; `options` are those of `EngineOptions`."""

    def __call__(self, dialect: str, model: Path, **options: Any) -> Client: ...


def make_model(seed: int, **fields: Any) -> CausalLM:
    """A model whose greedy tokens depend on its seed; weights far larger than usual keep the choices apart."""
    shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2}
    return CausalLM(LlamaConfig(**{**shape, "initializer_range": 0.3, **fields}), seed=seed)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Leave the other cores to others."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def old_model() -> CausalLM:
    """The model that engines start with."""
    return make_model(1)


@pytest.fixture(scope="session")
def new_model() -> CausalLM:
    """The model that they are updated to."""
    return make_model(2)


@pytest.fixture(scope="session")
def old(old_model: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of `old_model`."""
    return save(old_model, tmp_path_factory.mktemp("checkpoints") / "old")


@pytest.fixture(scope="session")
def new(new_model: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of `new_model`."""
    return save(new_model, tmp_path_factory.mktemp("checkpoints") / "new")


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that end with the test."""
    with ExitStack() as stack:

        def start(dialect: str, model: Path, **options: Any) -> Client:
            chosen = EngineOptions(**{"pause_poll_seconds": 0.01, "transfer_timeout_seconds": 10.0, **options})
            server = stack.enter_context(EmbeddedServer(dialect=dialect, model=model, options=chosen))
            return stack.enter_context(Client(server.url))

        yield start
