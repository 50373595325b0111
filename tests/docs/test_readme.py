"""What the README shows is run as it stands."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from adapters.engines import EmbeddedEngine
from adapters.engines.embedded import CausalLM, LlamaConfig, save

ROOT = Path(__file__).parents[2]


def python_blocks(page: str) -> list[str]:
    """Return the Python blocks of a Markdown page."""
    return re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def test_the_page_on_testing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """One engine refuses to pause, and the other is continued."""
    block, _ = python_blocks((ROOT / "docs" / "testing.md").read_text(encoding="utf-8"))
    exec(compile(block, "testing.md", "exec"), {})  # noqa: S102 - our own page
    assert capsys.readouterr().out == "did not pause: E2\n[None, None]\n"


def test_lines_to_paste_train_against_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's lines run against a real engine: rollouts are generated and three versions published."""
    policy = CausalLM(LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64), seed=0)
    save(policy, tmp_path)
    (block,) = python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)  # noqa: S102 - our own README
    seen = []

    def optimise(model: CausalLM, batch: list[Any]) -> None:
        model.lm_head.weight.data.add_(0.01)
        seen.append({version for generation in batch for version in generation.versions})

    with EmbeddedEngine(model=tmp_path, dialect="sglang") as engine:
        anyio.run(names["train"], policy, optimise, [engine.url], [[1, 2, 3], [4, 5]])
    assert 3 == len(seen)
    assert all(0 <= trained - made <= 2 for trained, versions in enumerate(seen) for made in versions)
    assert 3 == capsys.readouterr().out.count("paused for")


def test_generated_parts_are_in_step() -> None:
    """The diagram and the table in the pages are what the code says."""
    done = subprocess.run(
        [sys.executable, "-m", "docs.generate", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)
