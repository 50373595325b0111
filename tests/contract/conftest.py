"""One server of each chosen engine at a time, brought back to the same state after every test.

`--engines` chooses; a test that belongs to one dialect says so by `DIALECT` in its module, one that belongs to some
engines only by `ENGINES`, and one that asks for `mode` runs once for each pause mode of its engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import torch

from adapters.engines.embedded import CausalLM, LlamaConfig, save

from .dialects import wire_to
from .engines.servers import KINDS, Server
from .expectations import MODES
from .wire import PROMPT, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

_EMBEDDED = {"embedded-sglang", "embedded-vllm"}
_COLLECTED = pytest.StashKey[set[str]]()


def _chosen(config: pytest.Config) -> list[str]:
    names = [name.strip() for name in str(config.getoption("--engines")).split(",")]
    if unknown := [name for name in names if name not in KINDS]:
        raise pytest.UsageError(f"--engines: no engine is called {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return names


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test against each chosen engine, and in each mode where it asks for one."""
    if "server" in metafunc.fixturenames:
        metafunc.parametrize("server", _chosen(metafunc.config), indirect=True, scope="session")
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", sorted({mode for modes in MODES.values() for mode in modes}))
    if "keeping" in metafunc.fixturenames:
        metafunc.parametrize("keeping", ["in_place", "keep", "retract"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what makes no sense: tests of another dialect or engine, and modes of another dialect."""
    collected = config.stash.setdefault(_COLLECTED, set())
    chosen = _chosen(config)
    agreeable = all(KINDS[name].agreeable for name in chosen)
    kept = []
    here = Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(here):
            kept.append(item)
            continue
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        kind = KINDS.get(str(parameters.get("server")))
        module = getattr(item.getparent(pytest.Module), "obj", None)
        if not getattr(module, "ENGINES", KINDS.keys()) & ({kind.name} if kind else set(chosen)):
            continue
        if kind is not None:
            if getattr(module, "DIALECT", kind.dialect) != kind.dialect:
                continue
            if parameters.get("mode", parameters.get("keeping", "abort")) not in MODES[kind.dialect]:
                continue
            collected.add(kind.name)
        elif agreeable:
            continue  # above all the test that runs this suite against such engines
        kept.append(item)
    items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was not looked at."""
    collected = config.stash.get(_COLLECTED, set[str]())
    if collected and collected <= _EMBEDDED:
        terminalreporter.write_line(
            "contract suite: embedded engines only; `make test-engines` runs it against real vLLM and SGLang"
        )


@attrs.frozen(kw_only=True)
class Weights:
    """One model, on disk and in memory.

    Args:
        model: In bfloat16.
        path: Its checkpoint.
        tokens: Its greedy tokens after `PROMPT`.
    """

    model: CausalLM
    path: Path
    tokens: list[int]


def make_weights(seed: int, path: Path) -> Weights:
    """Make a Llama that all engines run.

    The seeds that are used give tokens that lead the next likely ones by more than the rounding of bfloat16, in which
    the engines' kernels differ.
    """
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16384,
        initializer_range=0.1,
        dtype="bfloat16",
    )
    model = CausalLM(config, seed=seed).to(torch.bfloat16)
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(8):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return Weights(model=model, path=save(model, path), tokens=tokens[len(PROMPT) :])


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """What every engine holds when a test begins, called "old"."""
    return make_weights(51, tmp_path_factory.mktemp("checkpoints") / "old")


@pytest.fixture(scope="session")
def new(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """What it is updated to."""
    return make_weights(122, tmp_path_factory.mktemp("checkpoints") / "new")


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, old: Weights, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The engine, started by the first test that needs it, and ended after the last."""
    kind = KINDS[request.param]
    server = Server(kind, old.path, tmp_path_factory.mktemp("logs") / f"{kind.name}.log")
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def wire(server: Server, old: Weights) -> Iterator[Wire]:
    """A client of the engine, which is as new: old weights, idle, not paused. A dead one is started again."""
    agreeable = server.kind.agreeable
    if not server.alive:
        server.start()
        if not agreeable:
            with wire_to(server) as client:
                client.restore(old.path)
    with wire_to(server) as client:
        yield client
        client.land()
        if agreeable or not server.alive:
            return
        try:
            client.restore(old.path)
        except Exception:
            # The test has said its own; what it left behind is not the next one's.
            server.kill()
            raise
