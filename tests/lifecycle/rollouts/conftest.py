"""Every test here runs on both backends, each on a virtual clock."""

from typing import Any

import pytest

from tests.virtual_time import on_virtual_clock

pytest.register_assert_rewrite("tests.lifecycle.rollouts.rollouts_rig", "tests.lifecycle.rollouts.world")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run the test on both backends."""
    return request.param, on_virtual_clock(request.param)
