"""Shared fixtures: every asynchronous test of the core runs on asyncio and on trio."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the contract suite be run against other engines than the embedded one."""
    parser.addoption(
        "--engines",
        default="embedded-sglang,embedded-vllm",
        help="engines for tests/contract, comma-separated: embedded-sglang, embedded-vllm, sglang, vllm",
    )


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run the test on both backends."""
    return str(request.param)
