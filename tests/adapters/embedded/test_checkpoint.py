"""Checkpoints: what is saved is what is loaded, and what cannot be loaded says why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.engines.embedded import CheckpointError, load, load_config, save

from .conftest import make_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("fields", [{}, {"dtype": "bfloat16"}, {"tie_word_embeddings": True, "eos_token_id": 3}])
def test_a_saved_model_comes_back_bit_for_bit(tmp_path: Path, fields: dict[str, object]) -> None:
    """Every weight keeps its bits and its dtype, the configuration its fields, and parents are created."""
    model = make_model(3, **fields)
    loaded = load(save(model, tmp_path / "some" / "where"))
    assert loaded.config == model.config
    assert {name: tensor.dtype for name, tensor in loaded.tensors()} == {n: t.dtype for n, t in model.tensors()}
    assert all(
        torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(model.tensors(), loaded.tensors(), strict=True)
    )


def test_tensors_keep_the_dtype_that_a_trainer_gave_them(tmp_path: Path) -> None:
    """A model converted by its trainer is saved, and said to be, what it was converted to."""
    save(make_model(3).to(torch.bfloat16), tmp_path)
    assert load_config(tmp_path).dtype == "bfloat16"
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_a_tied_head_is_saved_once_and_loaded_tied(tmp_path: Path) -> None:
    """A tied checkpoint has no head of its own, and the loaded model shares one tensor."""
    save(make_model(3, tie_word_embeddings=True), tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = load(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_every_file_is_readable_by_whom_the_umask_lets(tmp_path: Path) -> None:
    """The weights can be read by an engine that runs as another user, like the files beside them."""
    save(make_model(3), tmp_path)
    assert 1 == len({path.stat().st_mode & 0o777 for path in tmp_path.iterdir()})


def test_the_tokenizer_has_one_word_for_every_token(tmp_path: Path) -> None:
    """tokenizer.json maps `<tN>` to N for the whole vocabulary."""
    save(make_model(3), tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocabulary == {f"<t{token}>": token for token in range(64)}


def test_saving_again_leaves_no_traces_of_the_first_time(tmp_path: Path) -> None:
    """A second save replaces the first and leaves no partial files."""
    save(make_model(3), tmp_path)
    model = make_model(4)
    save(model, tmp_path)
    assert torch.equal(load(tmp_path).lm_head.weight, model.lm_head.weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_sharded_checkpoint_is_read_from_all_its_files(tmp_path: Path) -> None:
    """An index of two files loads like one file."""
    model = make_model(3)
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load(tmp_path).lm_head.weight, model.lm_head.weight)


def test_a_configuration_of_transformers_5_is_understood(tmp_path: Path) -> None:
    """The base of the rotary embedding is found in `rope_parameters`, and dtype under its new name."""
    save(make_model(3), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_theta", "torch_dtype", "rope_scaling"):
        del fields[name]
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 77.0}
    fields["eos_token_id"] = [3, 4]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_config(tmp_path)
    assert (config.rope_theta, config.dtype, config.eos_token_ids) == (77.0, "float32", frozenset({3, 4}))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "not LlamaForCausalLM"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "only the default"),
        ({"attention_bias": True}, "biases"),
        ({"vocab_size": -1}, "describes no Llama"),
    ],
)
def test_a_model_that_cannot_be_run_is_refused(tmp_path: Path, change: dict[str, object], complaint: str) -> None:
    """A configuration of another model raises CheckpointError that says what is wrong."""
    save(make_model(3), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    """A missing config.json or weight file raises CheckpointError with its path."""
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load(tmp_path)
    save(make_model(3), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        load(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    """Half a safetensors file raises CheckpointError with its path."""
    path = save(make_model(3), tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model.norm.weight": None}, "lacks 1 tensors, the first of them 'model.norm.weight'"),
        ({"model.norm.weight": torch.zeros(5)}, r"'model.norm.weight' of shape \[5\], not \[32\]"),
        ({"stranger": torch.zeros(5)}, "'stranger', which this model does not have"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: dict[str, torch.Tensor | None], complaint: str
) -> None:
    """A missing, misshapen or unknown tensor raises CheckpointError with its name."""
    path = save(make_model(3), tmp_path) / "model.safetensors"
    tensors: dict[str, torch.Tensor | None] = {**load_file(path), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path)
