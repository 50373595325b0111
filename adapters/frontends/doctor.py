"""`rollout-lifecycle doctor`: how engines stand, and a continue for those that a dead trainer left paused."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

from lifecycle import errors

from .evidence import Evidence
from .examination import Examined, Options, examine, nowhere
from .exits import FINE, UNREADABLE, VIOLATION, Dialect, clashing, fail

_DialectOption = Annotated[
    Dialect | None, typer.Option(help="What the engines speak.", show_default="found out by asking")
]
_KeyOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Environment variable that holds the servers' API key.")
]


def doctor(  # noqa: PLR0917 - typer calls it by name
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="Engines; those of the journal where left out.")
    ] = None,
    journal: Annotated[Path | None, typer.Option(help="Of their trainer: tells which are dirty, and in debt.")] = None,
    release: Annotated[
        bool, typer.Option("--release", help="Continue those that are paused and proven whole. Of a dead trainer only!")
    ] = False,
    trust_paused: Annotated[
        bool, typer.Option("--trust-paused", help="Take paused engines for whole where the journal does not say no.")
    ] = False,
    dialect: _DialectOption = None,
    api_key_env: _KeyOption = None,
    patience: Annotated[float, typer.Option(min=0.1, help="Seconds that an engine may take to answer.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Tell how engines stand, and what their trainer's journal knows of them; release what a dead trainer left."""
    evidence = None if journal is None else read_evidence(journal, must_exist=True)
    if not urls and evidence is None:
        fail(UNREADABLE, "no engine to look at: give URLs, or the --journal of their trainer")
    options = Options(
        dialect=dialect,
        api_key=key_of(api_key_env),
        patience=patience,
        release=release,
        trust_paused=trust_paused,
    )
    try:
        examined = anyio.run(_examined, urls or [], evidence, options)
    except ValueError as error:
        fail(UNREADABLE, str(error))
    if not examined:
        fail(UNREADABLE, f"{journal} names no engine: give URLs")
    sys.stdout.write(_as_json(examined, evidence) if as_json else _as_text(examined, evidence))
    raise typer.Exit(FINE if all(each.finding.ruling.verdict.good for each in examined) else VIOLATION)


def read_evidence(journal: Path, *, must_exist: bool) -> Evidence:
    """Read a journal, or end the command with what is wrong with it."""
    try:
        evidence = Evidence.of(journal)
    except errors.JournalUnreadable as error:
        fail(UNREADABLE, f"{journal}: unreadable-line: {error}")
    except OSError as error:
        fail(UNREADABLE, f"{journal} cannot be read: {error}")
    if must_exist and evidence.mark is None:
        fail(UNREADABLE, f"{journal} does not exist")
    return evidence


def key_of(variable: str | None) -> str | None:
    """Return the API key that an environment variable holds, or end the command where it holds none."""
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        fail(UNREADABLE, f"the environment variable {variable} holds no API key")
    return key


async def _examined(urls: list[str], evidence: Evidence | None, options: Options) -> tuple[Examined, ...]:
    if urls or evidence is None:
        return await examine(dict.fromkeys(urls), evidence, options)
    addresses = evidence.history.addresses
    places = {addresses[name]: name for name in evidence.engines if name in addresses}
    return await examine(places, evidence, options) + nowhere(evidence, evidence.engines)


# ------------------------------------------------------------------------------------------------------------- showing


def _as_text(examined: tuple[Examined, ...], evidence: Evidence | None) -> str:
    lines = []
    if evidence is not None:
        history = evidence.history
        end = "closed" if history.closed else "not closed: it runs, or was killed"
        lines.append(f"journal: run {history.run!r}, version {history.version}, {end}")
    for each in examined:
        lines.append(f"{each.name}: {_standing(each)}")
        if (known := _remembered(each)) is not None:
            lines.append(f"    journal: {known}")
    return "\n".join(lines) + "\n"


def _standing(examined: Examined) -> str:
    """Return how an engine stands, in a line."""
    ruling, report = examined.finding.ruling, examined.finding.report
    told = []
    if report is not None:
        told.append(f"{report.kind} {report.server_version or 'of unknown version'}")
        told.append({True: "paused", False: "runs", None: "does not tell whether it is paused"}[report.paused])
        told += ["asleep"] * report.asleep + ["mid-update"] * (report.whole is False)
        told.append(f"labelled {report.label}" if report.label else "not labelled")
    verdict = ruling.verdict.value.upper() + (f": {ruling.reason}" if ruling.reason else "")
    return ", ".join([*told, verdict])


def _remembered(examined: Examined) -> str | None:
    """Return what the journal knows of an engine, in a line."""
    if (known := examined.case.known) is None:
        return None
    certain = "" if known.debt is None or known.debt.certain else " that may or may not have happened"
    told = [f"in debt of a pause ({known.debt.mode.value}){certain}" if known.debt else "in no debt"]
    told.append("dirty" if known.dirty else "whole")
    told += [known.unfit] * bool(known.unfit)
    told.append({True: "this process", False: "another process", None: "perhaps this process"}[_same(examined)])
    return ", ".join(told)


def _as_json(examined: tuple[Examined, ...], evidence: Evidence | None) -> str:
    journal = None
    if evidence is not None:
        history = evidence.history
        journal = {"run": history.run, "version": history.version, "closed": history.closed}
    fine = all(each.finding.ruling.verdict.good for each in examined)
    answer = {"fine": fine, "engines": [_fields(each) for each in examined], "journal": journal, "clash": clashing()}
    return json.dumps(answer) + "\n"


def _fields(examined: Examined) -> dict[str, Any]:
    report, known = examined.finding.report, examined.case.known
    fields: dict[str, Any] = {
        "name": examined.name,
        "address": examined.address,
        "verdict": examined.finding.ruling.verdict.value,
        "reason": examined.finding.ruling.reason,
    }
    for name in ("kind", "server_version", "incarnation", "paused", "asleep", "label"):
        fields[name] = getattr(report, name, None)
    fields["mid_update"] = None if report is None or report.whole is None else not report.whole
    fields["journal"] = known and {
        "dirty": known.dirty,
        "debt": known.debt and known.debt.mode.value,
        "certain": known.debt and known.debt.certain,
        "unfit": known.unfit,
        "same_process": _same(examined),
    }
    return fields


def _same(examined: Examined) -> bool | None:
    report = examined.finding.report
    return None if report is None else examined.case.same_process(report)
