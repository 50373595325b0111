"""The transition table for people: a Mermaid state diagram and a Markdown table, both generated from the table."""

from collections.abc import Iterable

from .states import State
from .table import TRANSITIONS, OnFailure, Transition

_STATES = {
    State.CLOSED: "no engine is ours",
    State.SUSPENDED: "submission closed",
    State.RUNNING: "rollouts start and generate",
    State.PAUSED: "generation stopped",
    State.UPDATING: "weights move",
    State.FAULTED: "too few engines left",
}


def mermaid(table: Iterable[Transition] = TRANSITIONS, *, highlight: State | None = None) -> str:
    """Return the table as a Mermaid state diagram, with `highlight` marked as the state that is active."""
    table = tuple(table)
    lines = ["---", "title: The rollout lifecycle", "---", "stateDiagram-v2", "    direction LR"]
    lines += [f"    {state.name}: {state.name}\\n{says}" for state, says in _STATES.items()]
    lines.append(f"    [*] --> {State.CLOSED.name}")
    for (source, target), triggers in _edges(table).items():
        lines.append(f"    {source.name} --> {target.name}: {', '.join(triggers)}")
    lines.append(f"    {State.CLOSED.name} --> [*]")
    if highlight is not None:
        lines.append("    classDef active font-weight:bold,stroke-width:3px,stroke:#b45309,fill:#fde68a,color:#111827")
        lines.append(f"    class {highlight.name} active")
    return "\n".join(lines) + "\n"


def markdown(table: Iterable[Transition] = TRANSITIONS, *, highlight: State | None = None) -> str:
    """Return the table as a Markdown table; rows that can begin in `highlight` have their trigger in bold."""
    lines = [
        "| trigger | from | to | guards | requests, in order | proofs | when it fails |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table:
        name = row.trigger.name
        cells = (
            f"**{name}**" if highlight in row.source else name,
            ", ".join(state.name for state in row.source),
            row.target.name if row.target else "(internal)",
            ", ".join(_words(guard.__name__) for guard in row.guards),
            ", ".join(request.__name__ for request in row.requests),
            ", ".join(_words(proof.__name__) for proof in row.proofs),
            _failure(row),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _edges(table: Iterable[Transition]) -> dict[tuple[State, State], list[str]]:
    """Return the labels of each arrow, in the table's order: one arrow a pair of states keeps the picture readable."""
    edges: dict[tuple[State, State], list[str]] = {}
    for row in table:
        for source in row.source:
            names = edges.setdefault((source, row.target or source), [])
            if row.trigger.name not in names:
                names.append(row.trigger.name)
    return edges


def _failure(row: Transition) -> str:
    if row.on_failure is OnFailure.COMPENSATE:
        return ", ".join(request.__name__ for request in row.compensation) + "; stays"
    return str(row.on_failure.value)


def _words(name: str) -> str:
    return name.replace("_", " ")
