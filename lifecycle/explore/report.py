"""What an exploration brought, for people."""

from collections.abc import Sequence

from attrs import frozen

from lifecycle.fleet import EngineFacts
from lifecycle.ledger import Debt

from .truth import Truth


@frozen(kw_only=True)
class TraceStep:
    """One step of a counterexample."""

    move: str
    happenings: tuple[str, ...]
    """What went another way than usual."""
    ending: str
    """How the operation ended; empty for what happens outside."""
    state: str
    """What the machine says afterwards."""
    engines: tuple[str, ...]
    """What is believed of each engine afterwards, and what it is."""

    def __str__(self) -> str:
        ending = f" ({self.ending})" if self.ending not in {"", "done"} else ""
        lines = [f"{self.move} -> {self.state}{ending}"]
        lines += [f"    {happening}" for happening in self.happenings]
        lines += [f"        {engine}" for engine in self.engines]
        return "\n".join(lines)


@frozen(kw_only=True)
class Counterexample:
    """The way to a state in which a predicate does not hold: with the fewest faults, and then in the fewest steps."""

    predicate: str
    reason: str
    faults: int
    steps: tuple[TraceStep, ...]

    def __str__(self) -> str:
        head = f"{self.predicate} does not hold: {self.reason}\nafter {len(self.steps)} steps and {self.faults} faults:"
        return "\n".join([head, *(f"{number}. {step}" for number, step in enumerate(self.steps, 1))])


@frozen(kw_only=True)
class Exploration:
    """What `explore` found."""

    engines: int
    faults: int
    states: int
    """Different states between operations, engines counted as alike."""
    edges: int
    """Ways that lead from one state to another."""
    depth: int
    """Steps to the farthest state, on the way with the fewest faults."""
    seconds: float
    counterexample: Counterexample | None

    @property
    def holds(self) -> bool:
        """Whether every predicate holds in every state."""
        return self.counterexample is None

    def __str__(self) -> str:
        verdict = "every predicate holds" if self.counterexample is None else str(self.counterexample)
        return (
            f"{self.engines} engines, at most {self.faults} faults: {self.states} states, {self.edges} edges, "
            f"depth {self.depth}, {self.seconds:.1f} s\n{verdict}"
        )


def engine_line(name: str, facts: EngineFacts, debt: Debt | None, truth: Truth) -> str:
    """Return what is believed of an engine, and what it is."""
    believed = [facts.standing.name, f"version {facts.version}"]
    believed += ["dirty"] * facts.dirty + ["session"] * facts.session + _paused(facts.paused)
    believed += [] if debt is None else ["owes a continue" if debt.certain else "may owe a continue"]
    return f"{name}: believed {', '.join(believed)}; in truth {_in_truth(truth)}"


def _paused(paused: bool | None) -> list[str]:
    return ["paused perhaps"] if paused is None else ["paused"] * paused


def _in_truth(truth: Truth) -> str:
    if not truth.alive:
        return "dead"
    weights = f"version {truth.holds}" if truth.whole else "partly written"
    more: Sequence[str] = [
        *["labelled otherwise"] * (truth.whole and truth.label != truth.holds),
        *["session"] * truth.session,
        *["paused"] * truth.paused,
        *["a pause under way"] * truth.pause_under_way,
    ]
    return ", ".join([weights, *more])
