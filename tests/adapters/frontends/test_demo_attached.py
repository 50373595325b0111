"""The demo against engines that it did not start: trained and left running, or refused before a byte is written."""

import json
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from adapters.engines import EmbeddedEngine
from adapters.engines.embedded import CausalLM, LlamaConfig, save
from adapters.frontends.demo import fleet
from adapters.frontends.demo.checkpoint import write_model
from adapters.frontends.demo.options import Options
from lifecycle import Deadlines, FleetPolicy, Lifecycle, PauseMode, events
from lifecycle.trace import verify_file

from .demos import KEYS, demo
from .patients import asked, report_of

SMALL = ("--groups", "4", "--group-size", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of the demo, of another seed than the trainer's."""
    directory = tmp_path_factory.mktemp("model") / "demo"
    write_model(directory, seed=7)
    return directory


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[EmbeddedEngine]:
    """Yield an engine of each dialect that is somebody else's."""
    with EmbeddedEngine(model=model, dialect=request.param) as running:
        yield running


@pytest.fixture(scope="module")
def of_another_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    """Yield an engine that serves a vocabulary which is not the demo's."""
    other = CausalLM(LlamaConfig(vocab_size=512, hidden_size=16, num_hidden_layers=1, num_attention_heads=2), seed=0)
    with EmbeddedEngine(model=save(other, tmp_path_factory.mktemp("model") / "other")) as running:
        yield running


def dialect_of(engine: EmbeddedEngine) -> str:
    """Return what it speaks."""
    return engine.engine.dialect.kind


def attach(*engines: EmbeddedEngine, urls: tuple[str, ...] = (), dialect: str) -> None:
    """Attach to engines and to further URLs, and leave them alone again."""

    async def work() -> None:
        clients = fleet.at([*(engine.url for engine in engines), *urls], dialect=dialect)
        impatient = Deadlines(attach=0.5, probe=0.4)
        policy = FleetPolicy(min_engines=1)
        async with AsyncExitStack() as stack:
            lifecycle = Lifecycle(clients, initial_version=None, deadlines=impatient, policy=policy)
            await fleet.attach(stack, lifecycle, clients, dialect=dialect)

    anyio.run(work)


# ------------------------------------------------------------------------------------------------------------- training


def test_the_demo_trains_engines_that_it_did_not_start(engine: EmbeddedEngine, model: Path, tmp_path: Path) -> None:
    """Two that run already get the first weights and every version; they go on afterwards, with the last one."""
    with EmbeddedEngine(model=model, dialect=dialect_of(engine)) as second:
        urls = [running.url.replace("http://", "http://me:hidden-word@") for running in (engine, second)]
        options = ["--engine", urls[0], "--engine", urls[1], "--dialect", dialect_of(engine), "--steps", "3", *SMALL]
        with demo(tmp_path, *options, "--json", str(tmp_path / "summary.json")) as running:
            code, printed = running.ended()
        assert code == 0, printed
        reports = [report_of(engine), report_of(second)]
    summary, journal = json.loads((tmp_path / "summary.json").read_text()), (tmp_path / "journal.jsonl").read_text()
    run = json.loads(journal.splitlines()[0])["name"]
    assert run.startswith("demo-")  # and a word of its own: the engines outlive the run, and so do their labels
    assert [(report.paused, report.label) for report in reports] == [(False, f"{run}:3")] * 2
    assert list(summary) == KEYS
    assert (summary["steps"], summary["version"], summary["unmatched"]) == (3, 3, 0)
    assert summary["pauses"] == summary["continues"] == 2 * 4
    assert 0 <= summary["reward_first"] <= 1
    assert 0 <= summary["reward_last"] <= 1
    assert (tmp_path / "engines.json").read_text() == "[]\n"
    assert "hidden-word" not in printed + journal
    assert verify_file(tmp_path / "journal.jsonl").sound


def test_ctrl_c_leaves_the_engine_running_and_continued(engine: EmbeddedEngine, tmp_path: Path) -> None:
    """Ended in the middle of a publication, the demo finishes that first: exit code 130, and the engine generates."""
    options = ("--engine", engine.url, "--dialect", dialect_of(engine), "--steps", "99", *SMALL)
    with demo(tmp_path, *options) as running:
        running.until("TransitionBegun", trigger="BEGIN_UPDATE", version=2)
        running.process.send_signal(signal.SIGINT)
        code, printed = running.ended()
    assert code == 130, printed
    assert engine.running
    verdict, report = verify_file(tmp_path / "journal.jsonl"), report_of(engine)
    assert report.paused is False
    assert str(report.label).endswith(f":{verdict.version}")
    assert asked(engine, events.Canary()).done
    assert (verdict.sound, verdict.closed, verdict.unmatched) == (True, True, ())


# ------------------------------------------------------------------------------------------------------------- refusals


def test_an_engine_of_another_model_is_refused(of_another_model: EmbeddedEngine, tmp_path: Path) -> None:
    """One sentence and exit code 1, and the engine is as it was: not paused, its weights and their label untouched."""
    before = report_of(of_another_model)
    with demo(tmp_path, "--engine", of_another_model.url, "--steps", "1") as running:
        code, printed = running.ended()
    assert code == 1
    said = " ".join(printed.splitlines()[1:])
    assert said.startswith(f"the demo ended early: {of_another_model.engine.name} serves another model: it generated ")
    assert said.endswith("; start it from what `rollout-lifecycle demo-model` writes")
    assert report_of(of_another_model) == before
    assert '"event":"BeginUpdate"' not in (tmp_path / "journal.jsonl").read_text()


def test_a_server_that_does_not_answer_is_refused(engine: EmbeddedEngine) -> None:
    """One of two is enough to be told, by name."""
    with pytest.raises(fleet.Unsuitable, match=f"^127.0.0.1:1 does not answer as {dialect_of(engine)}: "):
        attach(urls=("http://127.0.0.1:1",), dialect=dialect_of(engine))
    with pytest.raises(fleet.Unsuitable, match=f"^127.0.0.1:1 does not answer as {dialect_of(engine)}: "):
        attach(engine, urls=("http://127.0.0.1:1",), dialect=dialect_of(engine))


def test_a_server_of_the_other_dialect_is_refused(engine: EmbeddedEngine) -> None:
    """What it was taken for is in the sentence."""
    other = "vllm" if dialect_of(engine) == "sglang" else "sglang"
    with pytest.raises(fleet.Unsuitable, match=f"^{engine.engine.name} does not answer as {other}: HTTP 404"):
        attach(engine, dialect=other)


def test_a_paused_engine_is_refused(engine: EmbeddedEngine) -> None:
    """Another trainer may be at work on it: it stays paused."""
    asked(engine, events.PauseGeneration(mode=PauseMode.ABORT))
    try:
        with pytest.raises(fleet.Unsuitable, match=f"^{engine.engine.name} is paused, perhaps by a trainer"):
            attach(engine, dialect=dialect_of(engine))
        assert report_of(engine).paused
    finally:
        asked(engine, events.ContinueGeneration())


# ------------------------------------------------------------------------------------------------------- what is chosen


def test_remote_engines_are_told_an_address_that_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of this machine on the way to a remote engine; loopback where there is none, or none is found."""
    known = {"local": "127.0.0.1", "remote": "192.0.2.7"}

    class Route:
        def __init__(self, *_: object) -> None:
            self.target = ""

        def __enter__(self) -> "Route":
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, target: tuple[str, int]) -> None:
            self.target = target[0]

        def getsockname(self) -> tuple[str, int]:
            return known[self.target], 1

    def resolved(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise OSError("not found")
        return [(0, 0, 0, "", (host, port))]

    monkeypatch.setattr("socket.socket", Route)
    monkeypatch.setattr("socket.getaddrinfo", resolved)
    assert fleet.own_address(["http://local:1", "http://remote:1"]) == "192.0.2.7"
    assert fleet.own_address(["http://local:1"]) == "127.0.0.1"
    assert fleet.own_address(["http://nowhere:1"]) == "127.0.0.1"


def test_servers_of_others_get_smaller_steps() -> None:
    """Half the prompts, and no more rollouts in flight than they run at once; what is asked for holds anyway."""
    assert (Options().groups_a_step, Options().max_concurrent) == (32, 1024)
    attached = Options(urls=("http://a:1", "http://b:1"))
    assert (attached.groups_a_step, attached.max_concurrent) == (16, 128)
    assert Options(urls=("http://a:1",), groups=5).groups_a_step == 5
