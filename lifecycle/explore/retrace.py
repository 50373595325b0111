"""Walk to a state again, and tell what happens on the way."""

import itertools
from collections.abc import Sequence

from .moves import Move, Step
from .report import Counterexample, TraceStep, engine_line
from .search import CLOSED, Node, Search


async def retrace(search: Search, node: Node) -> Counterexample:
    """Return the way to `node`, in which engines keep their names.

    Cancellation: nothing is left.
    """
    way = [node]
    while way[-1].parent >= 0:
        way.append(search.nodes[way[-1].parent])
    way.reverse()
    names: Sequence[str] = search.stage.names
    steps = []
    for before, after in itertools.pairwise(way):
        step, names = await _retrace(search, before, after, names)
        steps.append(step)
    predicate, _, reason = (node.breach or "").partition(": ")
    reason = _called(reason, search.stage.names, names)
    return Counterexample(predicate=predicate, reason=reason, faults=node.faults, steps=tuple(steps))


async def _retrace(search: Search, before: Node, after: Node, names: Sequence[str]) -> tuple[TraceStep, Sequence[str]]:
    """Make one step. `names`: what the engines at each position are called. Returns also what they are called then."""
    stage, step = search.stage, after.step
    if step is None:
        raise ValueError("the beginning has nothing before it")
    stage.load(before.key)
    story: list[str] = []
    stage.world.story = story
    stage.oracle.begin(step.answers, after.faults - before.faults)
    stage.world.known = lambda: False
    if isinstance(step.move, Move):
        move, ending = step.move.name, await step.move.make(stage) or ""
    else:
        move, ending = _outside(search, step, names), ""
    stage.world.story = None
    engines = tuple(
        engine_line(called, stage.cohort.fleet[name], stage.cohort.ledger.owed(name), stage.world.truths[name])
        for called, name in sorted(zip(names, stage.names, strict=True))
    )
    told = TraceStep(
        move=move,
        happenings=tuple(_called(sentence, stage.names, names) for sentence in story),
        ending=_called(ending, stage.names, names),
        state=stage.machine.state.name,
        engines=engines,
    )
    if after.key == CLOSED or after.breach is not None:
        return told, names
    _, order = stage.save()
    return told, [names[position] for position in order]


def _outside(search: Search, step: Step, names: Sequence[str]) -> str:
    stage, name = search.stage, step.engine
    if isinstance(step.move, Move):
        raise TypeError("an operation is none of what happens outside")
    stage.world.truths[name] = step.move.change(stage.world.truths[name], stage.world.base)
    return f"{names[stage.names.index(name)]} {step.move.name}"


def _called(sentence: str, positions: Sequence[str], names: Sequence[str]) -> str:
    """Return `sentence` with engines called by their names instead of by their positions."""
    words = dict(zip(positions, names, strict=True))
    for position in positions:
        sentence = sentence.replace(position, f"\0{position}\0")
    return "".join(words.get(piece, piece) for piece in sentence.split("\0"))
