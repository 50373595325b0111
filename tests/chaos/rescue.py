"""Who comes after a killed trainer: doctor or guard, then a new lifecycle; and what must be so afterwards."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from attrs import define, field, frozen

from adapters.frontends.demo.trainer import new_model
from adapters.frontends.examination import SPEAKS
from adapters.transfers import ModuleSource
from lifecycle import State, events
from lifecycle.errors import LifecycleError
from lifecycle.fleet import EngineFacts
from lifecycle.history import History, Remembered
from lifecycle.journal import read
from lifecycle.trace import verify_file
from tests.adapters.frontends.commandline import COMMAND, run

from .trainer import REQUEST, Life

_SECONDS = 30.0


@frozen(kw_only=True)
class Scene:
    """What the journal of a killed trainer tells."""

    engines: dict[str, Remembered]
    addresses: dict[str, str]
    version: int | None
    paused: bool
    """It died between hold and release."""
    updating: bool
    """It died between begin and commit, or abandon."""

    @property
    def dirty(self) -> set[str]:
        """Names of the engines whose weights may be partly written."""
        return {name for name, known in self.engines.items() if known.dirty}

    @property
    def owed(self) -> set[str]:
        """Names of the clean engines that a continue is owed to."""
        return {name for name, known in self.engines.items() if known.debt} - self.dirty


def scene_of(life: Life) -> Scene:
    """Look at what a killed trainer has left."""
    history, paused, updating = History(), False, False
    for _, event in read(life.journal):
        history.note(event)
        if isinstance(event, events.GenerationHeld | events.GenerationReleased):
            paused = isinstance(event, events.GenerationHeld)
        if isinstance(event, events.BeginUpdate | events.VersionAdvanced | events.TransitionRolledBack):
            updating = isinstance(event, events.BeginUpdate)
    return Scene(
        engines=dict(history.engines),
        addresses=dict(history.addresses),
        version=history.version,
        paused=paused,
        updating=updating,
    )


@define
class Rescue:
    """What the one who came has done."""

    code: int = -1
    said: str = ""
    left: dict[str, str] = field(factory=dict)
    """Why, by engine."""


@contextmanager
def guarding(life: Life, pid: int, rescue: Rescue) -> Iterator[None]:
    """Let a guard watch over the trainer; leaving waits for what it does."""
    command = [*COMMAND, "guard", "--journal", str(life.journal), "--pid", str(pid)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        if not (first := process.stdout.readline()).startswith("guarding "):
            raise RuntimeError(f"the guard does not watch: {first}")
        yield
        rescue.said, _ = process.communicate(timeout=2 * _SECONDS)
        rescue.code = process.returncode
    finally:
        process.kill()
        process.communicate()
    # Names are host:port, without a blank after the colon.
    told = [line.split(": ", 2) for line in rescue.said.splitlines()]
    rescue.left = {words[0]: words[2] for words in told if words[1:2] == ["left"]}


def call_doctor(life: Life, rescue: Rescue) -> None:
    """Call the doctor to a trainer that is dead."""
    result = run("doctor", "--journal", life.journal, "--release", "--json")
    rescue.code, rescue.said = result.returncode, result.stdout + result.stderr
    answer = json.loads(result.stdout)
    rescue.left = {each["name"]: each["reason"] for each in answer["engines"] if each["verdict"] == "left"}


async def complaints(life: Life, scene: Scene, rescue: Rescue) -> list[str]:
    """Return what is not as it must be after a rescue: every clean engine generates, every dirty one is refused.

    Cancellation: nothing is left.
    """
    wrong = [f"{name} is dirty, and was not refused" for name in scene.dirty - rescue.left.keys()]
    wrong += [f"{name} was left: {rescue.left[name]}" for name in rescue.left.keys() - scene.dirty]
    wrong += [f"{name} has no reason" for name, reason in rescue.left.items() if "partly written" not in reason]
    if rescue.code != bool(scene.dirty):
        wrong.append(f"exit code {rescue.code}, and {len(scene.dirty)} are dirty: {rescue.said}")
    for name, address in scene.addresses.items():
        paused, tokens = await _state_of(life, address, generates=name not in scene.dirty)
        if paused is not (name in scene.dirty):
            wrong.append(f"{name} is {'' if paused else 'not '}paused")
        if name not in scene.dirty and tokens != REQUEST.max_new_tokens:
            wrong.append(f"{name} made {tokens} tokens")
    return wrong


async def cure(life: Life) -> list[str]:
    """Let a new lifecycle over the same journal publish; return what is not as it must be then.

    Cancellation: the lifecycle is closed.
    """
    lifecycle = life.lifecycle()
    await lifecycle.attach()
    try:
        version = (lifecycle.version or 0) + 1
        report = await lifecycle.publish(ModuleSource(new_model(seed=0)), version=version)
        wrong = [f"{name} was not cured: {reason}" for name, reason in report.fenced.items()]
        if lifecycle.state is not State.RUNNING:
            await lifecycle.resume()
    finally:
        await lifecycle.close()
    for url in life.urls:
        paused, tokens = await _state_of(life, url, generates=True)
        if paused is not False or tokens != REQUEST.max_new_tokens:
            wrong.append(f"{url} is cured, and paused: {paused}, and made {tokens} tokens")
    verdict = verify_file(life.journal)
    if not verdict.sound or verdict.unmatched:
        wrong += [str(verdict), *map(str, verdict.violations[:3])]
    return wrong


async def _state_of(life: Life, url: str, *, generates: bool) -> tuple[bool | None, int]:
    """Return whether an engine says that it is paused, and how many tokens it makes."""
    engine = SPEAKS[life.dialect](url)
    try:
        answer = await engine.perform(events.ProbeEngine(), EngineFacts(name=engine.name), timeout=_SECONDS)
        paused = answer.report.paused if answer.report else None
        if not generates:
            return paused, 0
        segment = await engine.generate(REQUEST, timeout=_SECONDS)
        return paused, len(segment.output_ids)
    except (LifecycleError, TimeoutError) as error:
        return None, -len(str(error))
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()
