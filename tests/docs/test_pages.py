"""What the pages show is run, and prints what they say."""

import pytest

from .pages import page, told_and_printed


@pytest.mark.parametrize(("name", "blocks"), [("staleness.md", 6), ("interruption.md", 4), ("rollouts.md", 4)])
def test_the_python_of_a_page_prints_what_the_page_says(name: str, blocks: int) -> None:
    """Every block runs after those before it, and what it prints stands below it."""
    pairs = told_and_printed(page(name))
    assert [printed for _, printed in pairs] == [told for told, _ in pairs]
    assert len(pairs) == page(name).count("```python\n") == blocks
