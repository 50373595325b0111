"""A stage for each test: the engine, the versions it is brought to, and a journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.contract.conftest import make_weights

from .stage import Stage

if TYPE_CHECKING:
    from pathlib import Path

    from tests.contract.conftest import Weights
    from tests.contract.wire import Wire


@pytest.fixture
def anyio_backend() -> str:
    """Run on one event loop: what is looked at here is the servers."""
    return "asyncio"


@pytest.fixture(scope="session")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """A third model, so that a label which is two versions off is noticed as well."""
    return make_weights(7, tmp_path_factory.mktemp("checkpoints") / "newer")


@pytest.fixture
def stage(wire: Wire, old: Weights, new: Weights, newer: Weights, tmp_path: Path) -> Stage:
    """The engine holds version 0."""
    return Stage(wire, (old, new, newer), tmp_path / "journal.jsonl")
