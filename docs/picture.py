"""Draws a `Timeline` as SVG: readable in light and dark, without scripts and without fonts of its own."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from .timeline import BATCH_SIZE, MAX_CONCURRENT, MAX_STALENESS, Bar, Sample, Timeline, instants

WIDTH, GUTTER, MARGIN = 900, 104, 22
"""Pixels: of the picture, left of the plot, and right of it."""
ROW, BAR = 23, 15
TOP = 88
COLOURS = ("#0072b2", "#c25200", "#00805d", "#a8467f")
"""By version; told apart also by who sees few colours, and on both backgrounds."""
STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1f2328}
.soft{fill:#57606a}.inside{fill:#fff;font-size:10.5px;font-weight:600}.back{fill:#fff}
.mark{fill:#1f2328}.marked{fill:#fff;font-size:10.5px;font-weight:700}.grid{stroke:#d8dee4}.ink{stroke:#1f2328}
.hatch{stroke:#fff;stroke-width:2.6}.band{fill:#6e7781;fill-opacity:.17}.train{fill:#6e7781}
.counted{fill:#8c959f}.running{fill:#c6cdd5}.allowed{stroke:#cf222e}.step{fill:#cf222e;fill-opacity:.75}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}.soft{fill:#9da7b3}.inside{fill:#fff}.back{fill:#161b22}.mark{fill:#e6edf3}.marked{fill:#161b22}
.grid{stroke:#30363d}.ink{stroke:#e6edf3}.hatch{stroke:#161b22}.band{fill:#9da7b3;fill-opacity:.2}.train{fill:#7d8590}
.counted{fill:#7d8590}.running{fill:#484f58}.allowed{stroke:#ff7b72}.step{fill:#ff7b72}}
"""


def draw(timeline: Timeline) -> str:
    """Return the picture."""
    return Picture(timeline).svg()


class Picture:
    """The timeline's rows and, on the same scale below them, the budget and its capacity."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.bottom = TOP + ROW * (len(timeline.bars) + 1)
        """Of the rows."""
        self.floor = self.bottom + 164
        """Of the budget."""
        self.base = self.floor + 76
        """Of the capacity."""
        self.scale = (WIDTH - GUTTER - MARGIN) / timeline.end

    def svg(self) -> str:
        """Return it as a whole, one element a line."""
        size = f"0 0 {WIDTH} {self.base + 44}"
        body = "\n".join(line for part in self._parts() for line in part)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-labelledby="title desc">\n'
            f'<title id="title">Rollouts, publications and the staleness budget over time</title>\n'
            f'<desc id="desc">{escape(self._description())}</desc>\n<style>{STYLE}</style>\n'
            '<defs><pattern id="dropped" width="8" height="8" patternUnits="userSpaceOnUse">'
            '<path class="hatch" d="M-2 2l4-4M0 8L8 0M6 10l4-4"/></pattern></defs>\n'
            f"{body}\n</svg>\n"
        )

    def _parts(self) -> Iterator[Iterator[str]]:
        yield iter([tag("rect", width=WIDTH, height=self.base + 44, cls="back")])
        yield self._legend()
        yield self._grid()
        yield self._trainer()
        for row, bar in enumerate(self.timeline.bars.values(), 1):
            yield self._rollout(TOP + row * ROW, bar)
        yield self._budget()
        yield self._capacity()
        yield self._publications()
        yield self._heading()

    def x(self, seconds: float) -> float:
        """Return where an instant is."""
        return GUTTER + seconds * self.scale

    # ------------------------------------------------------------------------------------------------------------ rows

    def _legend(self) -> Iterator[str]:
        yield label(16, 24, "running, by version at admission", "soft")
        for version in range(len(self.timeline.publications) + 1):
            yield box(250 + 36 * version, 13, 30, BAR, fill=COLOURS[version])
            yield label(265 + 36 * version, 24.5, f"v{version}", "inside", "middle")
        yield box(416, 17.5, 30, 6, fill=COLOURS[0], fill_opacity=0.45)
        yield label(454, 24, "finished, waits to be taken", "soft")
        yield from self._disc(666, 20, "1")
        yield label(680, 24, "taken, so many versions old", "soft")
        yield box(16, 37, 30, BAR, fill=COLOURS[0])
        yield box(16, 37, 30, BAR, fill="url(#dropped)")
        yield from self._cross(57, 44.5)
        yield label(72, 48.5, "dropped: older than the bound", "soft")
        yield box(416, 37, 30, BAR, cls="band")
        yield label(454, 48.5, "pause: nothing is generated", "soft")
        yield tag("path", d="M666 37v15", cls="ink", stroke_width=1.5, stroke_dasharray="4 3")
        yield label(680, 48.5, "a version is published", "soft")

    def _grid(self) -> Iterator[str]:
        for second in range(int(self.timeline.end) + 1):
            at = num(self.x(second))
            yield tag("path", d=f"M{at} {TOP}V{self.bottom}M{at} {self.bottom + 24}V{self.base}", cls="grid")
            if second % 2 == 0:
                yield label(self.x(second), self.base + 17, str(second), "soft", "middle")
        yield label(WIDTH - MARGIN, self.base + 34, "seconds", "soft", "end")
        for begin, end in self.timeline.pauses:
            yield box(self.x(begin), TOP, (end - begin) * self.scale, self.base - TOP, cls="band")

    def _trainer(self) -> Iterator[str]:
        yield label(GUTTER - 10, TOP + 15, "trainer", anchor="end")
        for number, (begin, end) in enumerate(self.timeline.steps, 1):
            width = (end - begin) * self.scale
            yield box(self.x(begin), TOP + 4, width, BAR, cls="train")
            yield label(self.x(begin) + width / 2, TOP + 15, f"step {number}", "inside", "middle")

    def _rollout(self, y: float, bar: Bar) -> Iterator[str]:
        end = self.timeline.end
        finished, left = bar.finished or end, bar.left or end
        begin, colour = self.x(bar.admitted), COLOURS[bar.version]
        yield label(GUTTER - 10, y + 15, f"rollout {bar.number}", anchor="end")
        yield box(begin, y + 4, (finished - bar.admitted) * self.scale, BAR, fill=colour)
        if left > finished:
            yield box(self.x(finished), y + 8.5, (left - finished) * self.scale, 6, fill=colour, fill_opacity=0.45)
        if bar.dropped:
            yield box(begin, y + 4, (finished - bar.admitted) * self.scale, BAR, fill="url(#dropped)")
            yield box(begin, y + 4, 22, BAR, fill=colour)
            yield from self._cross(self.x(left), y + 11.5)
            yield label(self.x(left) + 13, y + 15.5, f"{bar.staleness} versions old")
        elif bar.left is not None:
            yield from self._disc(self.x(left), y + 11.5, str(bar.staleness))
        else:
            yield tag("path", d=f"M{num(self.x(end) + 3)} {num(y + 6)}l7 5.5l-7 5.5z", fill=colour)
        yield label(begin + 5, y + 15.2, f"v{bar.version}", "inside")

    def _publications(self) -> Iterator[str]:
        for at, version in self.timeline.publications:
            x = num(self.x(at))
            yield tag("path", d=f"M{x} {TOP - 6}V{self.base}", cls="ink", stroke_width=1.5, stroke_dasharray="4 3")
            yield label(self.x(at), TOP - 12, f"version {version}", anchor="middle")

    def _disc(self, x: float, y: float, text: str) -> Iterator[str]:
        yield tag("circle", cx=num(x), cy=num(y), r=7.5, cls="mark")
        yield label(x, y + 3.8, text, "marked", "middle")

    def _cross(self, x: float, y: float) -> Iterator[str]:
        yield tag("path", d=f"M{num(x - 5)} {num(y - 5)}l10 10m0-10l-10 10", cls="ink", stroke_width=2.5)

    # ---------------------------------------------------------------------------------------------------- the budget

    def _budget(self) -> Iterator[str]:
        top = max(sample.allowed for sample in self.timeline.samples)
        unit = 116 / top

        def height(rollouts: int) -> float:
            return self.floor - rollouts * unit

        yield self._area("running", lambda sample: height(sample.counted + sample.running))
        yield self._area("counted", lambda sample: height(sample.counted))
        line = "L".join(self._steps(lambda sample: height(sample.allowed)))
        yield tag("path", d=f"M{line}", cls="allowed", stroke_width=2, fill="none")
        for rollouts in range(0, top + 1, 2):
            yield label(GUTTER - 10, height(rollouts) + 4, str(rollouts), "soft", "end")

    def _heading(self) -> Iterator[str]:
        yield tag("rect", x=GUTTER, y=self.bottom + 2, width=WIDTH - GUTTER, height=22, cls="back")
        y = self.bottom + 18
        yield label(16, y, "budget, in rollouts")
        for x, cls, text in ((166, "counted", "accepted, without those dropped"), (424, "running", "running")):
            yield box(x, y - 10, 14, 11, cls=cls)
            yield label(x + 20, y, text, "soft")
        yield tag("path", d=f"M518 {y - 4}h22", cls="allowed", stroke_width=2)
        yield label(546, y, f"allowed: ({MAX_STALENESS} + version + 1) · {BATCH_SIZE}", "soft")

    def _capacity(self) -> Iterator[str]:
        yield label(16, self.base - 16, "capacity")
        yield self._area("step", lambda sample: self.base - 11 * max(0, sample.capacity), self.base)
        for rollouts in (0, MAX_CONCURRENT):
            yield label(GUTTER - 10, self.base - 11 * rollouts + 4, str(rollouts), "soft", "end")
        for number, (sample, _) in enumerate(instants(self.timeline), 1):
            x = self.x(sample.at)
            yield from self._disc(x + 11, self.base - 46, chr(ord("a") + number - 1))
            yield tag("path", d=f"M{num(x)} {self.base - 54}V{self.base}", cls="ink")

    def _area(self, cls: str, height: Callable[[Sample], float], floor: float | None = None) -> str:
        floor = self.floor if floor is None else floor
        begin, end = num(self.x(0)), num(self.x(self.timeline.end))
        return tag("path", d=f"M{begin} {num(floor)}L{'L'.join(self._steps(height))}L{end} {num(floor)}z", cls=cls)

    def _steps(self, height: Callable[[Sample], float]) -> Sequence[str]:
        """Return the corners of what is constant from one instant to the next."""
        lasting = {sample.at: height(sample) for sample in self.timeline.samples}  # the last of each instant
        corners: list[str] = []
        for (at, level), (until, _) in pairwise([*lasting.items(), (self.timeline.end, 0.0)]):
            corners += [f"{num(self.x(at))} {num(level)}", f"{num(self.x(until))} {num(level)}"]
        return corners

    def _description(self) -> str:
        told = [
            f"Rollout {bar.number} is admitted at {num(bar.admitted)} s under version {bar.version}"
            + (f" and {'dropped' if bar.dropped else 'taken'} at {num(bar.left)} s" if bar.left is not None else "")
            + (f", {bar.staleness} versions old" if bar.left is not None else "")
            for bar in self.timeline.bars.values()
        ]
        published = [f"Version {version} is published at {num(at)} s" for at, version in self.timeline.publications]
        return ". ".join([*told, *published]) + "."


def num(value: float) -> str:
    """Write a number as short as it can be."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def tag(name: str, text: str = "", *, cls: str = "", **attributes: Any) -> str:
    """Return an element."""
    given = (
        {"class": cls, **{key.replace("_", "-"): value for key, value in attributes.items()}}
        if cls
        else {key.replace("_", "-"): value for key, value in attributes.items()}
    )
    written = "".join(f' {key}="{escape(str(value))}"' for key, value in given.items())
    return f"<{name}{written}>{escape(text)}</{name}>" if text else f"<{name}{written}/>"


def box(x: float, y: float, width: float, height: float, **attributes: Any) -> str:
    """Return a rectangle."""
    return tag("rect", x=num(x), y=num(y), width=num(width), height=num(height), rx=2, **attributes)


def label(x: float, y: float, text: str, cls: str = "", anchor: str = "") -> str:
    """Return a text."""
    return tag("text", text, cls=cls, x=num(x), y=num(y), **({"text_anchor": anchor} if anchor else {}))
