"""The command line: what it prints, and the exit codes by which a script can tell."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import torch
from typer.testing import CliRunner, Result

from adapters.engines.embedded import CausalLM, LlamaConfig, load, save
from adapters.frontends.cli import app
from adapters.frontends.demo.trainer import new_model
from lifecycle import Lifecycle, State
from lifecycle.diagram import markdown, mermaid
from lifecycle.testing import ScriptedEngine, ScriptedTransfer

from .commandline import COMMAND, run, run_python, run_without


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the journal of a lifecycle that paused and continued once."""
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"

    async def play() -> None:
        engines = [ScriptedEngine("E1"), ScriptedEngine("E2")]
        async with Lifecycle(engines, transfer=ScriptedTransfer(), journal=path) as lifecycle:
            await lifecycle.suspend()
            await lifecycle.pause_generation()

    anyio.run(play)
    return path


def invoke(*arguments: str | Path) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})


# -------------------------------------------------------------------------------------------------------------- diagram


@pytest.mark.parametrize(("chosen", "render"), [("mermaid", mermaid), ("markdown", markdown)])
@pytest.mark.parametrize("state", [None, State.PAUSED])
def test_diagram_prints_the_table(chosen: str, render: Callable[..., str], state: State | None) -> None:
    """The table goes to the standard output in the format asked for, and nothing else does."""
    highlight = ("--highlight", state.name.lower()) if state else ()
    result = invoke("diagram", "--format", chosen, *highlight)
    assert (result.exit_code, result.output) == (0, render(highlight=state))


def test_diagram_knows_its_states() -> None:
    """A state that does not exist is bad usage, answered with those that do."""
    result = invoke("diagram", "--highlight", "ASLEEP")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("'ASLEEP' is not a state; states are RUNNING,")
    assert invoke("diagram", "--format", "svg").exit_code == 2


# --------------------------------------------------------------------------------------------------------------- verify


def test_verify_finds_a_sound_journal_sound(journal: Path) -> None:
    """A sound journal is one line of good news and exit code 0."""
    result = invoke("verify", journal)
    assert result.exit_code == 0
    events = len(journal.read_text().splitlines())
    assert result.output == f"sound: {events} events, 2 pauses, 2 continues, none unmatched\n"


def _tampered(journal: Path, path: Path) -> Path:
    lines = journal.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"event":"EngineContinued"' not in line]
    path.write_text("".join(kept))
    return path


def test_verify_names_every_violation(journal: Path, tmp_path: Path) -> None:
    """Each violation is a line with file, line number and rule; the last line counts them, and the exit code is 1."""
    path = _tampered(journal, tmp_path / "tampered.jsonl")
    result = invoke("verify", path)
    *violations, verdict = result.output.splitlines()
    assert result.exit_code == 1
    assert verdict.startswith(f"{len(violations)} violations in ")
    assert all(line.startswith(f"{path}: line ") for line in violations)
    assert any(": one-fact-a-request: " in line for line in violations)
    assert any(": gapless-seq: " in line for line in violations)


def test_verify_answers_programs(journal: Path, tmp_path: Path) -> None:
    """`--json` prints one object with the verdict and every violation; the exit code is the same as without."""
    sound, violated = (
        invoke("verify", journal, "--json"),
        invoke("verify", _tampered(journal, tmp_path / "t"), "--json"),
    )
    good, bad = json.loads(sound.output), json.loads(violated.output)
    assert (sound.exit_code, violated.exit_code) == (0, 1)
    assert (good["sound"], good["violations"], good["unmatched"]) == (True, [], [])
    assert (good["state"], good["pauses"], good["continues"], good["closed"]) == ("CLOSED", 2, 2, True)
    assert good["verdict"].startswith("sound: ")
    assert bad["sound"] is False
    assert {"line", "rule", "message"} == set(bad["violations"][0])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no event"),
        (b'{"event":"TransitionBegun","se', "holds no event"),
        (b'{"event":\n', "unreadable-line: line 1: not JSON"),
        (bytes(range(256)) * 20, "unreadable-line: line 1: not JSON"),
        (b"no journal at all\n", "unreadable-line: line 1: not JSON"),
    ],
    ids=["empty", "torn", "cut", "binary", "text"],
)
def test_verify_says_what_it_cannot_read(tmp_path: Path, content: bytes, says: str) -> None:
    """A file that is no journal is not a violation: it is unreadable, told in one line, with exit code 2."""
    path = tmp_path / "file"
    path.write_bytes(content)
    result = invoke("verify", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_verify_says_which_line_it_cannot_read(journal: Path, tmp_path: Path) -> None:
    """A journal with a damaged line is unreadable there."""
    lines = journal.read_bytes().splitlines(keepends=True)
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"".join([*lines[:6], lines[6][:9] + b"\n", *lines[7:]]))
    result = invoke("verify", path)
    assert result.exit_code == 2
    assert "unreadable-line: line 7: " in result.stderr


def test_verify_needs_a_file_that_is_there(tmp_path: Path) -> None:
    """A missing file, and a directory, are told in one sentence with exit code 2."""
    for path in (tmp_path / "missing.jsonl", tmp_path):
        result = invoke("verify", path)
        assert result.exit_code == 2
        assert f"{path} cannot be read: " in result.stderr


# ---------------------------------------------------------------------------------------------------- demo and engine


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--steps", "0"), "--steps"),
        (("--engines", "0"), "--engines"),
        (("--dialect", "other"), "--dialect"),
        (("--transfer", "pigeon"), "--transfer"),
        (("--max-staleness", "-1"), "--max-staleness"),
        (("--pause-mode", "keep"), "sglang has no pause mode 'keep'; it has abort, in_place, retract"),
        (
            ("--dialect", "vllm", "--pause-mode", "retract"),
            "vllm has no pause mode 'retract'; it has abort, keep, wait",
        ),
        (("--out", "/dev/null/here"), "/dev/null/here is no place for files"),
        (("--json", "/dev/null/here/summary.json"), "/dev/null/here/summary.json cannot be written"),
        (("--engine", "http://h:1", "--engines", "2"), "--engines starts embedded engines and --engine attaches"),
        (("--engine", "http://h:1", "--engine", "http://a:b@h:1/"), "--engine names h:1 more than once"),
        (("--engine", "ftp://me:hidden-word@host"), "must start with http:// or https://"),
        (("--groups", "0"), "--groups"),
        (("--group-size", "1"), "--group-size"),
    ],
)
def test_demo_refuses_options_that_make_no_sense(options: tuple[str, ...], says: str, tmp_path: Path) -> None:
    """What cannot work is said before anything is started, with exit code 2."""
    out = () if "--out" in options else ("--out", tmp_path)
    result = invoke("demo", *options, *out)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert "hidden-word" not in result.output


def test_demo_model_can_be_served(tmp_path: Path) -> None:
    """It writes the policy of the seed where anybody may read it, names the place, and may do so again."""
    directory = tmp_path / "parent" / "model"
    before = os.umask(0o077)
    try:
        results = [invoke("demo-model", directory, "--seed", str(seed)) for seed in (1, 2)]
    finally:
        os.umask(before)
    assert [(result.exit_code, result.output) for result in results] == [(0, f"{directory}\n")] * 2
    served, policy = load(directory), new_model(seed=2)
    assert served.config == policy.config
    assert all(torch.equal(served.state_dict()[name], weight) for name, weight in policy.state_dict().items())
    assert directory.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in directory.iterdir()} == {0o644}


def test_demo_model_spares_what_is_not_its_own(tmp_path: Path) -> None:
    """A directory with anything else in it, above all another model, is left as it is, with exit code 2."""
    other = save(CausalLM(LlamaConfig(vocab_size=48, hidden_size=16), seed=0), tmp_path / "other")
    weights = (other / "model.safetensors").read_bytes()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "file").touch()
    for directory in (other, tmp_path / "notes", tmp_path / "notes" / "file"):
        result = invoke("demo-model", directory)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert result.stderr.startswith(f"{directory} ")
    assert (other / "model.safetensors").read_bytes() == weights
    assert [file.name for file in (tmp_path / "notes").iterdir()] == ["file"]


def test_engine_needs_a_model(tmp_path: Path) -> None:
    """A directory that holds no model is told in one sentence, with exit code 2."""
    result = invoke("engine", "--model", tmp_path)
    assert (result.exit_code, result.stderr) == (2, f"{tmp_path / 'config.json'} does not exist\n")
    assert invoke("engine").exit_code == 2


# ---------------------------------------------------------------------------------------------------------- as a whole


def test_every_command_explains_itself() -> None:
    """`--help` works for every command; without a command the help is printed, as bad usage."""
    assert invoke().exit_code == 2
    for command in ("demo", "demo-model", "diagram", "verify", "engine", "doctor", "guard"):
        assert command in invoke("--help").output
        result = invoke(command, "--help")
        assert (result.exit_code, "Usage" in result.output) == (0, True)


def test_commands_that_need_no_tensors_do_without_torch(journal: Path) -> None:
    """`diagram`, `verify`, `--help` and those that look after engines import neither torch nor a server."""
    code = (
        "import sys; from adapters.frontends.cli import main; sys.argv = ['rollout-lifecycle', *sys.argv[1:]]; "
        "code = main(); print(code, sorted({'torch', 'starlette', 'uvicorn', 'numpy'} & set(sys.modules)))"
    )
    for command in ("demo", "demo-model", "doctor", "guard"):
        assert run_python(code, command, "--help").stdout.splitlines()[-1] == "0 []"
    for arguments in (["diagram"], ["verify", journal], ["--help"]):
        assert run_python(code, *arguments).stdout.splitlines()[-1] == "0 []"


def test_the_module_and_the_script_are_the_same(journal: Path, tmp_path: Path) -> None:
    """`python -m adapters` passes the exit codes on."""
    assert run("verify", journal).returncode == 0
    assert run("verify", _tampered(journal, tmp_path / "tampered.jsonl")).returncode == 1
    assert run("verify", tmp_path / "missing").returncode == 2
    assert run("nonsense").returncode == 2


def test_ctrl_c_is_no_violation(tmp_path: Path) -> None:
    """A verification that is ended by Ctrl-C says nothing about the journal: exit code 130."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = subprocess.Popen([*COMMAND, "verify", str(pipe)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with pipe.open("w"):  # it reads: opening waits for it
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert (process.returncode, printed) == (130, b"")


def test_a_clash_of_packages_is_said_in_one_sentence(tmp_path: Path) -> None:
    """Another project that installs a top-level `adapters` is named, on the standard error; the command goes on."""
    other = tmp_path / "adapter_hub-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: adapter-hub\nVersion: 1.0\n")
    (other / "top_level.txt").write_text("adapters\n")
    result = run("diagram", python_path=tmp_path)
    assert (result.returncode, result.stdout) == (0, mermaid())
    assert result.stderr == (
        "warning: adapter-hub also installs a top-level package called 'adapters', which clashes with "
        "rollout-lifecycle's: use separate environments\n"
    )
    assert run("diagram").stderr == ""


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("typer", ("diagram",), "rollout-lifecycle[cli]"),
        ("torch", ("demo",), "rollout-lifecycle[all]"),
        ("starlette", ("engine", "--model", "."), "rollout-lifecycle[all]"),
    ],
)
def test_a_missing_dependency_is_said_in_one_sentence(module: str, arguments: tuple[str, ...], extra: str) -> None:
    """What is missing is named with the command that installs it, with exit code 2 and no traceback."""
    result = run_without(module, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert module in result.stderr
    assert f"pip install '{extra}'\n" in result.stderr
    assert result.stderr.count("\n") == 1
