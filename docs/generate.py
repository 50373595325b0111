"""Put what the code says into the pages that show it: diagrams, tables, and what came of a run.

`python -m docs.generate` rewrites the marked parts and the picture; `--check` fails when they are not what the code
says now.
"""

import argparse
import sys
from pathlib import Path

from lifecycle.diagram import markdown, mermaid

from .examples import capacities, moments, policies, rollouts
from .picture import draw
from .timeline import simulate

ROOT = Path(__file__).parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "architecture.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "staleness.md",
)
PICTURE = ROOT / "docs" / "staleness.svg"


def parts() -> tuple[dict[str, str], str]:
    """Return the marked parts by name, and the picture."""
    run = simulate()
    return {
        "diagram": f"```mermaid\n{mermaid()}```\n",
        "table": markdown(),
        "capacities": capacities(),
        "rollouts": rollouts(run),
        "moments": moments(run),
        "policies": policies(),
    }, draw(run)


def filled(page: str, made: dict[str, str]) -> str:
    """Return `page` with every marked part generated anew."""
    for name, part in made.items():
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end of generated part -->"
        before, found, rest = page.partition(begin)
        if found:
            _, closed, after = rest.partition(end)
            if not closed:
                raise SystemExit(f"the part {name!r} has no end")
            page = before + begin + "\n" + part + "\n" + end + after
    return page


def main() -> int:
    """Rewrite or check the pages and the picture. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when something is out of step")
    check = parser.parse_args().check
    made, picture = parts()
    wanted = {path: filled(path.read_text(encoding="utf-8"), made) for path in PAGES} | {PICTURE: picture}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if stale and check:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"out of step with the code: {names}; run python -m docs.generate", file=sys.stderr)
        return 1
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
