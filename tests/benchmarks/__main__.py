"""`python -m tests.benchmarks`: how fast it is. Exit codes: 0 every target is met, 1 one is missed.

Contestants take turns, so that a busy moment of the machine hits all of them. A target is met or missed by the best
round; ratios are those of the medians.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import gate, rollouts
from .measuring import Figure, rounds


def main() -> int:
    """Measure, print a table, and say by the exit code whether every target is met."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="how often everything is measured (default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    console = Console()
    load = [os.getloadavg()[0]]
    with console.status("") as status:
        figures = measure(options.rounds, status.update)
    load.append(os.getloadavg()[0])
    console.print(_table(figures, options.rounds))
    console.print(f"{_machine()}; load before {load[0]:.2f}, after {load[1]:.2f}")
    missed = [figure.name.strip() for figure in figures if not figure.met]
    console.print(f"[red]missed: {', '.join(missed)}" if missed else "[green]every target is met")
    if options.json is not None:
        options.json.write_text(json.dumps(_report(figures, load), indent=2) + "\n")
    return 1 if missed else 0


def measure(count: int, tell: Any = lambda _: None) -> list[Figure]:
    """Return every figure, measured `count` times."""
    figures = {**gate.FIGURES, **rollouts.FIGURES}
    rounds({**gate.contest(), **rollouts.contest()}, figures, count, tell)
    return [*figures.values(), gate.linearity(figures), *rollouts.ratios(figures)]


def _machine() -> str:
    return f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"


def _report(figures: list[Figure], load: list[float]) -> dict[str, Any]:
    return {"machine": _machine(), "load": load, "figures": [figure.as_json() for figure in figures]}


def _table(figures: list[Figure], count: int) -> Table:
    table = Table(title=f"{count} rounds")
    for column in ("figure", "unit"):
        table.add_column(column)
    for column in ("median", "best", "target"):
        table.add_column(column, justify="right")
    table.add_column("")
    for figure in figures:
        verdict = "" if not figure.target else "[green]met" if figure.met else "[red]missed"
        table.add_row(figure.name, figure.unit, _short(figure.median), _short(figure.best), figure.target, verdict)
    return table


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
