"""The picture of a run: its numbers are those of the run, and it can be read by everybody."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import combinations
from typing import NamedTuple

import pytest

from docs.picture import draw
from docs.timeline import BATCH_SIZE, MAX_CONCURRENT, MAX_STALENESS, Timeline, simulate
from lifecycle import OnStale

from .pages import ROOT, page

WIDEST = {"12": 6.8, "10.5": 6.8}
"""Pixels that a character takes at most, on average, by the size of the font."""


@pytest.fixture(scope="module")
def run() -> Timeline:
    """Return the run that the page shows."""
    return simulate()


def test_the_run_is_the_same_every_time() -> None:
    """Whatever the order of sets and hashes: the picture is checked byte for byte."""
    code = "from docs.picture import draw; from docs.timeline import simulate; print(draw(simulate()), end='')"
    pictures = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert pictures == {(ROOT / "docs" / "staleness.svg").read_text(encoding="utf-8")}


def test_the_text_speaks_of_the_run(run: Timeline) -> None:
    """What the page says outside its generated parts holds in the run, too."""
    said = " ".join(page("staleness.md").split())
    assert f"Batches of {BATCH_SIZE}, a bound of {MAX_STALENESS} version, and at most {MAX_CONCURRENT} rollouts" in said
    assert "bars over time, three publications, three pauses" in said
    assert (len(run.publications), len(run.pauses)) == (3, 3)
    third, second_batch, third_batch = run.bars[3], run.steps[1][0], run.steps[2][0]
    assert third.finished is not None
    assert second_batch < third.finished < third_batch
    assert [bar.number for bar in run.bars.values() if bar.dropped] == [3]


def test_no_rollout_of_the_run_breaks_the_bound(run: Timeline) -> None:
    """What training takes is within the bound, what is dropped is not, and capacity is what the formula says."""
    assert {(bar.staleness or 0) > MAX_STALENESS for bar in run.bars.values() if bar.left and not bar.dropped} == {
        False
    }
    assert {(bar.staleness or 0) > MAX_STALENESS for bar in run.bars.values() if bar.dropped} == {True}
    for sample in run.samples:
        assert sample.capacity == min(
            MAX_CONCURRENT - sample.running, sample.allowed - (sample.counted + sample.running)
        )


def test_each_policy_does_to_the_old_rollout_what_its_name_says() -> None:
    """Dropped; taken with some of its tokens; taken with all; taken in time, for which training waited."""
    runs = {policy: simulate(policy) for policy in OnStale}
    old = {policy: run.bars[3] for policy, run in runs.items()}
    assert [policy for policy, bar in old.items() if bar.dropped] == [OnStale.DROP]
    assert {policy: bar.staleness for policy, bar in old.items()} == {
        OnStale.DROP: 2,
        OnStale.MASK: 2,
        OnStale.KEEP: 2,
        OnStale.WAIT: 1,
    }
    masked = old[OnStale.MASK]
    assert masked.usable == sum(version is not None and version >= 2 - MAX_STALENESS for version in masked.tokens)
    assert runs[OnStale.WAIT].steps[1][0] == old[OnStale.WAIT].finished


class Text(NamedTuple):
    """A text in the picture: the box that it takes at most."""

    said: str
    left: float
    right: float
    baseline: float


def texts(picture: ET.Element) -> list[Text]:
    """Return every text with its place."""
    found = []
    for element in picture.iter("{http://www.w3.org/2000/svg}text"):
        said, x = element.text or "", float(element.attrib["x"])
        small = element.attrib.get("class") in {"inside", "marked"}
        width = len(said) * WIDEST["10.5" if small else "12"]
        left = x - width * {"end": 1.0, "middle": 0.5}.get(element.attrib.get("text-anchor", ""), 0.0)
        found.append(Text(said, left, left + width, float(element.attrib["y"])))
    return found


def test_no_text_of_the_picture_lies_on_another_or_is_cut_off(run: Timeline) -> None:
    """Also where the reader's font is a wide one."""
    picture = ET.fromstring(draw(run))  # noqa: S314 - our own picture
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    placed = texts(picture)
    assert [text.said for text in placed if text.left < 0 or text.right > width or text.baseline > height] == []
    assert [
        (one.said, other.said)
        for one, other in combinations(placed, 2)
        if abs(one.baseline - other.baseline) < 10 and one.left < other.right and other.left < one.right
    ] == []


def test_the_picture_is_for_everybody(run: Timeline) -> None:
    """It has a title and a description in words, looks after dark pages, needs nothing from elsewhere, and is small."""
    written = draw(run)
    picture = ET.fromstring(written)  # noqa: S314 - our own picture
    title, description = picture[0], picture[1]
    assert picture.attrib["aria-labelledby"].split() == [title.attrib["id"], description.attrib["id"]]
    assert "Rollout 3 is admitted at 0.5 s under version 0 and dropped" in (description.text or "")
    assert "prefers-color-scheme:dark" in written
    assert written.count("http") == written.count('xmlns="http://www.w3.org/2000/svg"') == 1
    assert len(written.encode()) < 60_000
