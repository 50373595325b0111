"""An engine of each dialect, shared by the tests that look after engines."""

from collections.abc import Iterator

import pytest

from adapters.engines import EmbeddedEngine
from adapters.frontends.demo.checkpoint import write_model
from lifecycle import events

from .patients import asked


@pytest.fixture(scope="package", params=["sglang", "vllm"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    """Yield a server that all tests share."""
    model = tmp_path_factory.mktemp("patient") / "model"
    write_model(model, seed=7)
    with EmbeddedEngine(model=model, dialect=request.param) as running:
        yield running


@pytest.fixture
def patient(server: EmbeddedEngine) -> Iterator[EmbeddedEngine]:
    """Yield an engine that runs, and let it run afterwards."""
    yield server
    asked(server, events.ContinueGeneration())
