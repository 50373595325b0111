"""The command line: `rollout-lifecycle`.

Exit codes: 0 fine, 1 a violation or a failed check, 2 bad usage or unreadable input, 130 ended by Ctrl-C.
"""

import json
import sys
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import attrs

from lifecycle import State, errors
from lifecycle.diagram import markdown, mermaid
from lifecycle.states import PauseMode
from lifecycle.trace import verify_file

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as missing:
    sys.stderr.write(f"{missing}; install the command line with: pip install 'rollout-lifecycle[cli]'\n")
    raise SystemExit(2) from missing

from .doctor import doctor
from .exits import FINE, INTERRUPTED, UNREADABLE, VIOLATION, Dialect, clashing, fail
from .guard import guard

app = typer.Typer(
    name="rollout-lifecycle",
    help="Hand new weights to inference engines, safely, while they generate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Transfer(StrEnum):
    """How weights travel."""

    BROADCAST = "broadcast"
    DISK = "disk"


class Format(StrEnum):
    """How the table is shown."""

    MERMAID = "mermaid"
    MARKDOWN = "markdown"


@app.command()
def demo(  # noqa: PLR0917 - typer calls it by name
    engines: Annotated[
        int | None, typer.Option(min=1, max=16, show_default="2", help="Embedded engines, each a process.")
    ] = None,
    engine_urls: Annotated[
        list[str] | None,
        typer.Option(
            "--engine", metavar="URL", show_default="none", help="A running server instead; may be given repeatedly."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps, each with a publication.")] = 60,
    dialect: Annotated[Dialect, typer.Option(help="What the engines speak.")] = Dialect.SGLANG,
    transfer: Annotated[Transfer, typer.Option(help="How weights travel.")] = Transfer.BROADCAST,
    groups: Annotated[
        int | None, typer.Option(min=1, show_default="32, or 16 with --engine", help="Prompts a step.")
    ] = None,
    group_size: Annotated[int, typer.Option(min=2, help="Samples a prompt.")] = 16,
    max_staleness: Annotated[int, typer.Option(min=0, help="Versions a consumed rollout may be behind.")] = 2,
    pause_mode: Annotated[PauseMode, typer.Option(help="What a pause does to requests in flight.")] = PauseMode.ABORT,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Where the journal and the diagram go.")] = Path("run"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the summary there as JSON.")] = None,
) -> None:
    """Train a small policy by asynchronous RL, against embedded engines or running servers, and verify the trace."""
    if engine_urls and engines is not None:
        fail(UNREADABLE, "--engines starts embedded engines and --engine attaches to others: give one of the two")
    _require("torch", "starlette", "uvicorn", "safetensors")
    console = Console()
    try:
        from .demo.options import Options  # noqa: PLC0415 - torch takes a second; others do without
        from .demo.run import DemoFailed, run  # noqa: PLC0415

        options = Options(
            engines=2 if engines is None else engines,
            urls=tuple(engine_urls or ()),
            steps=steps,
            dialect=dialect.value,
            transfer=transfer.value,
            groups=groups,
            group_size=group_size,
            max_staleness=max_staleness,
            pause_mode=pause_mode,
            seed=seed,
            out=out,
        )
        if json_file is not None:
            _make_place(json_file)
        result = run(options, console)
    except KeyboardInterrupt:  # before the demo listens for it
        raise typer.Exit(INTERRUPTED) from None
    except ValueError as error:
        fail(UNREADABLE, str(error))
    except DemoFailed as error:
        fail(VIOLATION, f"the demo ended early: {error}")
    _show(console, result.summary)
    for name in result.died:
        console.print(f"{name} died; the others went on without it", highlight=False, soft_wrap=True)
    console.print(f"journal: {out / 'journal.jsonl'}", highlight=False, soft_wrap=True)
    console.print(f"diagram: {out / 'lifecycle.mmd'}", highlight=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(result.summary, indent=2) + "\n", encoding="utf-8")
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(FINE if result.sound else VIOLATION)


@app.command()
def demo_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it; made where missing.")],
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write the demo's untrained policy, for servers that `demo --engine` attaches to."""
    _require("torch", "safetensors")
    from .demo.checkpoint import write_model  # noqa: PLC0415 - torch takes a second

    try:
        write_model(directory, seed=seed)
    except ValueError as error:
        fail(UNREADABLE, str(error))
    sys.stdout.write(f"{directory}\n")


@app.command()
def diagram(
    format: Annotated[Format, typer.Option(help="Mermaid state diagram or Markdown table.")] = Format.MERMAID,  # noqa: A002
    highlight: Annotated[str | None, typer.Option(help="A state to mark as the active one.")] = None,
) -> None:
    """Print the transition table as a diagram."""
    if highlight is not None and highlight.upper() not in State.__members__:
        fail(UNREADABLE, f"{highlight!r} is not a state; states are {', '.join(State.__members__)}")
    state = State[highlight.upper()] if highlight else None
    render = mermaid if format is Format.MERMAID else markdown
    sys.stdout.write(render(highlight=state))


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A journal.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Replay a journal and report every violation of the transition table and the rules."""
    try:
        verdict = verify_file(file)
    except errors.JournalUnreadable as error:
        fail(UNREADABLE, f"{file}: unreadable-line: {error}")
    except (OSError, UnicodeDecodeError) as error:
        fail(UNREADABLE, f"{file} cannot be read: {error}")
    if verdict.events == 0:
        fail(UNREADABLE, f"{file} holds no event")
    if as_json:
        facts = attrs.asdict(verdict, value_serializer=lambda _, __, value: getattr(value, "value", value))
        sys.stdout.write(json.dumps({"verdict": str(verdict), "sound": verdict.sound, **facts}) + "\n")
    else:
        for violation in verdict.violations:
            sys.stdout.write(f"{file}: {violation}\n")
        sys.stdout.write(f"{verdict}\n")
    raise typer.Exit(FINE if verdict.sound else VIOLATION)


@app.command()
def engine(
    model: Annotated[Path, typer.Option(help="A checkpoint in the Hugging Face Llama layout.")],
    dialect: Annotated[Dialect, typer.Option(help="What the engine speaks.")] = Dialect.SGLANG,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Serve an embedded engine: a real server on CPU that trainers are tested against."""
    _require("torch", "starlette", "uvicorn", "safetensors")
    from adapters.engines.embedded import CheckpointError, serve  # noqa: PLC0415 - torch takes a second

    try:
        status = serve(dialect=dialect.value, port=port, model=model, host=host)
    except (CheckpointError, OSError, ValueError) as error:
        fail(UNREADABLE, str(error))
    raise typer.Exit(status)


app.command()(doctor)
app.command()(guard)


def main() -> int:
    """Run the command line. Returns the exit code."""
    try:
        _warn_of_clash()
        app()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as ended:
        if isinstance(ended.__context__, typer.Abort):  # what typer makes of Ctrl-C; its code means a violation here
            return INTERRUPTED
        return ended.code if isinstance(ended.code, int) else VIOLATION
    return FINE


def _warn_of_clash() -> None:
    """Say so when another project's top-level `adapters` is installed: either may shadow the other's modules."""
    if others := clashing():
        sys.stderr.write(
            f"warning: {', '.join(others)} also installs a top-level package called 'adapters', which clashes with "
            "rollout-lifecycle's: use separate environments\n"
        )


def _require(*modules: str) -> None:
    if missing := [name for name in modules if find_spec(name) is None]:
        fail(UNREADABLE, f"{', '.join(missing)} missing; install with: pip install 'rollout-lifecycle[all]'")


def _make_place(file: Path) -> None:
    """See to it that `file` can be written, before a minute is spent on what goes into it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error}") from error


def _show(console: Console, summary: dict[str, Any]) -> None:
    table = Table(title="summary", show_header=False)
    for name, value in summary.items():
        if name != "verdict":  # a sentence, which has a line of its own
            table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    console.print(f"unmatched {summary['unmatched']}", highlight=False)
    console.print(summary["verdict"], highlight=False, soft_wrap=True)
