"""The table as a picture and as a page: all of it, and nothing that a renderer would stumble over."""

import re

import pytest

from lifecycle import TRANSITIONS, State
from lifecycle.diagram import markdown, mermaid

_LINES = (
    r"---",
    r"title: [\w ]+",
    r"stateDiagram-v2",
    r"direction LR",
    r"[A-Z]+: [A-Z]+\\n[a-z ]+",
    r"(\[\*\]|[A-Z]+) --> (\[\*\]|[A-Z]+)(: [A-Z_]+(, [A-Z_]+)*)?",
    r"classDef active (?:[a-z-]+:[#\w]+,?)+",
    r"class [A-Z]+ active",
)
"""Every kind of line of a Mermaid state diagram that is used here. A label holds no colon and no semicolon."""


def _edges(diagram: str) -> dict[tuple[str, str], list[str]]:
    arrows = re.findall(r"^ +(\S+) --> (\S+?)(?:: (.+))?$", diagram, re.MULTILINE)
    return {(source, target): labels.split(", ") if labels else [] for source, target, labels in arrows}


def test_the_diagram_is_well_formed() -> None:
    """Every line is one that Mermaid's grammar for state diagrams has, indented within the diagram."""
    lines = mermaid(highlight=State.PAUSED).splitlines()
    assert lines[:4] == ["---", "title: The rollout lifecycle", "---", "stateDiagram-v2"]
    assert [line for line in lines if not any(re.fullmatch(form, line.strip()) for form in _LINES)] == []
    assert all(line.startswith("    ") for line in lines[4:])
    assert mermaid().endswith("\n")


def test_the_diagram_has_every_state() -> None:
    """Each state is declared once, with a few words, and the lifecycle begins and ends in CLOSED."""
    declared = re.findall(r"^ +([A-Z]+): \1\\n.+$", mermaid(), re.MULTILINE)
    assert sorted(declared) == sorted(State.__members__)
    assert ("[*]", "CLOSED") in _edges(mermaid())
    assert ("CLOSED", "[*]") in _edges(mermaid())


def test_the_diagram_has_every_row_and_no_other_edge() -> None:
    """Each row of the table is an arrow from each of its sources; there is no arrow that no row stands for."""
    expected = {("[*]", "CLOSED", ""), ("CLOSED", "[*]", "")} | {
        (source.name, (row.target or source).name, row.trigger.name) for row in TRANSITIONS for source in row.source
    }
    drawn = {(*edge, label) for edge, labels in _edges(mermaid()).items() for label in labels or [""]}
    assert drawn == expected


@pytest.mark.parametrize("state", State)
def test_one_state_is_marked(state: State) -> None:
    """The state asked for is marked as active, and no other; by default none is."""
    assert re.findall(r"^ +class (\w+) active$", mermaid(highlight=state), re.MULTILINE) == [state.name]
    assert "active" not in mermaid()


def _cells(page: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]


def test_the_page_has_every_row() -> None:
    """Each row of the table is a row of the page, in order, with its guards, requests and proofs by name."""
    head, rule, *rows = _cells(markdown())
    assert len({len(row) for row in (head, rule, *rows)}) == 1
    assert set(rule) == {"---"}
    assert [row[0] for row in rows] == [row.trigger.name for row in TRANSITIONS]
    for shown, row in zip(rows, TRANSITIONS, strict=True):
        assert shown[1] == ", ".join(source.name for source in row.source)
        assert shown[2] == (row.target.name if row.target else "(internal)")
        assert shown[3].replace(" ", "_") == ",_".join(guard.__name__ for guard in row.guards)
        assert shown[4] == ", ".join(request.__name__ for request in row.requests)
        assert shown[5].replace(" ", "_") == ",_".join(proof.__name__ for proof in row.proofs)
        assert shown[6]


def test_the_page_marks_what_can_begin() -> None:
    """The triggers that exist in the state asked for are in bold, and no others."""
    _, _, *rows = _cells(markdown(highlight=State.PAUSED))
    bold = [row[0].strip("*") for row in rows if row[0].startswith("**")]
    assert bold == [row.trigger.name for row in TRANSITIONS if State.PAUSED in row.source]
