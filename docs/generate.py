"""Put what the code says into the pages that show it: the state diagram and the transition table.

`python -m docs.generate` rewrites the marked parts; `--check` fails when they are not what the code says now.
"""

import argparse
import sys
from pathlib import Path

from lifecycle.diagram import markdown, mermaid

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "architecture.md", ROOT / "docs" / "index.md")
PARTS = {"diagram": f"```mermaid\n{mermaid()}```\n", "table": markdown()}


def filled(page: str) -> str:
    """Return `page` with every marked part generated anew."""
    for name, part in PARTS.items():
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end of generated part -->"
        before, found, rest = page.partition(begin)
        if found:
            _, closed, after = rest.partition(end)
            if not closed:
                raise SystemExit(f"the part {name!r} has no end")
            page = before + begin + "\n" + part + "\n" + end + after
    return page


def main() -> int:
    """Rewrite or check the pages. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a page is out of step")
    check = parser.parse_args().check
    stale = []
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        if (wanted := filled(page)) != page:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(wanted, encoding="utf-8")
    if stale and check:
        print(f"out of step with the code: {', '.join(map(str, stale))}; run python -m docs.generate", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
