"""Updates from a checkpoint on disk: what is proven by the answer, and what is not."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Weights
    from .wire import Wire


def test_an_update_from_disk_serves_the_new_weights(wire: Wire, old: Weights, new: Weights) -> None:
    """Greedy tokens are the old model's before, and the new one's after."""
    assert wire.tokens() == old.tokens
    assert wire.load(new.path).status == 200
    assert wire.flush()
    assert wire.tokens() == new.tokens


def test_the_version_does_not_follow_the_weights_by_itself(wire: Wire, new: Weights) -> None:
    """New weights go by the old label until somebody says otherwise; then requests are labelled at once."""
    wire.load(new.path)
    assert wire.flush()
    assert (wire.version(), wire.generate(8).versions) == ("old", [("old", 0, 8)])
    assert wire.tokens() == new.tokens
    wire.label("new")
    assert (wire.version(), wire.generate(8).versions) == ("new", [("new", 0, 8)])


def test_a_path_without_weights_is_refused_and_a_good_one_repairs(wire: Wire, new: Weights, tmp_path: Path) -> None:
    """An error answer; as long as the engine is paused, a good path makes everything right."""
    wire.pause("abort")
    for path in (tmp_path / "nowhere", tmp_path):
        assert wire.load(path).status == {"sglang": 400, "vllm": 500}[wire.dialect]
    assert wire.load(new.path).status == 200
    wire.resume()
    assert wire.flush()
    assert wire.tokens() == new.tokens


def test_a_checkpoint_that_lacks_a_layer_is_mixed_in_silently(
    wire: Wire, old: Weights, new: Weights, tmp_path: Path
) -> None:
    """The answer is a success, and what serves is neither the old model nor the new one: only tokens tell."""
    partial = shutil.copytree(new.path, tmp_path / "partial")
    tensors = load_file(partial / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    save_file(kept, partial / "model.safetensors", metadata={"format": "pt"})
    assert wire.load(partial).status == 200
    assert wire.flush()
    mixed = wire.tokens()
    assert len(mixed) == 8
    assert mixed not in (old.tokens, new.tokens)
