"""Shared fixtures: every asynchronous test of the core runs on asyncio and on trio."""

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run the test on both backends."""
    return str(request.param)
