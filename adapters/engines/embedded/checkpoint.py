"""Save and load a `CausalLM` in the Hugging Face layout, so that the same directory serves a real vLLM or SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from adapters.engines.embedded.model import CausalLM, LlamaConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["CheckpointError", "load", "load_config", "read_tensors", "save"]

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A directory does not hold a Llama checkpoint that can be loaded; the message names the file and the tensor."""


def save(model: CausalLM, directory: str | Path) -> Path:
    """Write `model` to `directory` as config.json, model.safetensors and a WordLevel tokenizer.

    Each tensor keeps its dtype. The files are written under other names and renamed, the weights last, so that an
    engine never sees half a file; they are new files each time, since overwriting one in place is five times slower.

    Args:
        model: The model; its weights are read, not changed.
        directory: Where to write; it and its parents are created.

    Returns:
        The directory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in model.tensors()}
    dtypes = {tensor.dtype for tensor in tensors.values()}
    config = config_to_json(model.config)
    if len(dtypes) == 1:
        config["dtype"] = config["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
    _write_json(directory / _CONFIG, config)
    _write_json(directory / "tokenizer.json", _tokenizer(model.config.vocab_size))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(model.config))
    partial = directory / f".{_WEIGHTS}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    # safetensors leaves the file to its owner alone, and an engine may be another user.
    partial.chmod((directory / _CONFIG).stat().st_mode & 0o666)
    partial.replace(directory / _WEIGHTS)
    return directory


def load(directory: str | Path, *, dtype: str | None = None) -> CausalLM:
    """Read a `CausalLM` from `directory`.

    Args:
        directory: A directory in the Hugging Face layout, with one safetensors file or an index of several.
        dtype: "float32" or "bfloat16" to convert the weights to; `None` to keep what config.json says.

    Returns:
        The model, in training mode as any new module.

    Raises:
        CheckpointError: If a file is missing or unreadable, the model is no Llama this library runs, a tensor is
            missing or unknown, or a shape disagrees with config.json.
    """
    config = load_config(directory)
    if dtype is not None:
        config = attrs.evolve(config, dtype=dtype)
    model = CausalLM(config, seed=0)
    missing = copy_into(model, read_tensors(directory), source=str(directory))
    if missing:
        raise CheckpointError(f"{directory} lacks {len(missing)} tensors, the first of them {min(missing)!r}")
    return model


def copy_into(model: CausalLM, tensors: Iterator[tuple[str, Tensor]], *, source: str) -> set[str]:
    """Copy `tensors` into the weights of the same names, converting dtypes.

    Args:
        model: The model whose weights are overwritten in place.
        tensors: Pairs of Hugging Face name and tensor.
        source: What an error says the tensors came from.

    Returns:
        The names of the weights that got nothing.

    Raises:
        CheckpointError: At an unknown name or a wrong shape; the tensors before it are in.
    """
    weights = dict(model.tensors())
    missing = set(weights)
    for name, tensor in tensors:
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        weight = weights.get(name)
        if weight is None:
            raise CheckpointError(f"{source} holds {name!r}, which this model does not have")
        if weight.shape != tensor.shape:
            raise CheckpointError(f"{source} holds {name!r} of shape {[*tensor.shape]}, not {[*weight.shape]}")
        weight.copy_(tensor)
        missing.discard(name)
    return missing


def load_config(directory: str | Path) -> LlamaConfig:
    """Read `config.json` of `directory`.

    Raises:
        CheckpointError: If it is missing or unreadable, or describes a model that `CausalLM` cannot run.
    """
    path = Path(directory) / _CONFIG
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return config_from_json(fields, source=str(path))


def config_from_json(fields: dict[str, Any], *, source: str) -> LlamaConfig:
    """Build a `LlamaConfig` from the fields of a config.json, of transformers 4 or 5."""
    if "LlamaForCausalLM" not in (fields.get("architectures") or ()):
        raise CheckpointError(f"{source} describes {fields.get('architectures')}, not LlamaForCausalLM")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise CheckpointError(f"{source} asks for rotary embeddings of type {rope!r}; only the default is supported")
    if fields.get("attention_bias") or fields.get("mlp_bias") or fields.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{source} asks for biases or an activation other than silu")
    known = {attribute.name for attribute in attrs.fields(LlamaConfig)} - {"dtype", "rope_theta"}
    chosen = {name: fields[name] for name in known if fields.get(name) is not None}
    if isinstance(chosen.get("eos_token_id"), list):
        chosen["eos_token_id"] = tuple(chosen["eos_token_id"])
    theta = fields.get("rope_theta") or rope.get("rope_theta") or 10000.0
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    try:
        return LlamaConfig(**chosen, rope_theta=float(theta), dtype=dtype)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source} describes no Llama: {error}") from error


def config_to_json(config: LlamaConfig) -> dict[str, Any]:
    """Return config.json's fields, for transformers 4 and 5 alike."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **attrs.asdict(config),
        "torch_dtype": config.dtype,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "use_cache": True,
    }


def read_tensors(directory: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of every safetensors file of `directory`, one at a time.

    Raises:
        CheckpointError: If there is no such file, or one is truncated or no safetensors file.
    """
    directory = Path(directory)
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _weight_files(directory: Path) -> list[Path]:
    if (directory / _INDEX).exists():
        try:
            shards = json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{directory / _INDEX} cannot be read: {error}") from error
        return [directory / shard for shard in sorted(set(shards))]
    if not (directory / _WEIGHTS).exists():
        raise CheckpointError(f"{directory / _WEIGHTS} does not exist")
    return [directory / _WEIGHTS]


def token_text(token_id: int) -> str:
    """Return the text of a token in the tokenizer that `save` writes."""
    return f"<t{token_id}>"


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return a tokenizer.json (Hugging Face tokenizers' format) of whole words `<t0>`, `<t1>`, ..."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {token_text(token_id): token_id for token_id in range(vocab_size)},
            "unk_token": token_text(0),
        },
    }


def _tokenizer_config(config: LlamaConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "unk_token": token_text(0),
    }
    if config.eos_token_ids:
        fields["eos_token"] = token_text(min(config.eos_token_ids))
    if config.pad_token_id is not None:
        fields["pad_token"] = token_text(config.pad_token_id)
    return fields


def _write_json(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
