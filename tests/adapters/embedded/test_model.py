"""The model computes what Llama is defined to compute."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from adapters.engines.embedded import CausalLM, LlamaConfig

from .conftest import make_model

if TYPE_CHECKING:
    from torch import Tensor


def reference_logits(model: CausalLM, tokens: list[int]) -> Tensor:
    """Llama written down once more, one position and one head at a time, from its published definition.

    `CausalLM` was also compared by hand with transformers 5.19's `LlamaForCausalLM`, in float32 and bfloat16, with
    tied and untied embeddings and grouped-query attention: the logits were equal bit for bit.
    """
    config, w = model.config, {name: tensor.double() for name, tensor in model.state_dict().items()}
    group = config.num_attention_heads // config.num_key_value_heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x**2).mean() + config.rms_norm_eps) * weight

    def rotate(x: Tensor, position: int) -> Tensor:
        half, turned = config.head_dim // 2, torch.empty_like(x)
        for i in range(half):
            angle = position / config.rope_theta ** (2 * i / config.head_dim)
            turned[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            turned[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return turned

    states = [w["model.embed_tokens.weight"][token] for token in tokens]
    for layer in range(config.num_hidden_layers):
        p = f"model.layers.{layer}."
        normed = [norm(x, w[p + "input_layernorm.weight"]) for x in states]
        q, k, v = ([w[f"{p}self_attn.{n}_proj.weight"] @ x for x in normed] for n in "qkv")

        def head(vectors: list[Tensor], position: int, index: int) -> Tensor:
            return vectors[position][index * config.head_dim : (index + 1) * config.head_dim]

        for position in range(len(tokens)):
            mixed = []
            for index in range(config.num_attention_heads):
                query = rotate(head(q, position, index), position)
                keys = [rotate(head(k, at, index // group), at) for at in range(position + 1)]
                scores = torch.stack([query @ key for key in keys]) / math.sqrt(config.head_dim)
                values = torch.stack([head(v, at, index // group) for at in range(position + 1)])
                mixed.append(scores.softmax(0) @ values)
            states[position] = states[position] + w[p + "self_attn.o_proj.weight"] @ torch.cat(mixed)
        for position, x in enumerate(states):
            y = norm(x, w[p + "post_attention_layernorm.weight"])
            gate = w[p + "mlp.gate_proj.weight"] @ y
            up = w[p + "mlp.up_proj.weight"] @ y
            states[position] = x + w[p + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    return torch.stack([w["lm_head.weight"] @ norm(x, w["model.norm.weight"]) for x in states])


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}, {"head_dim": 10, "rope_theta": 500.0}])
def test_logits_are_those_of_the_definition_of_llama(fields: dict[str, object]) -> None:
    """Logits agree with an independent implementation, with shared heads, tied embeddings and odd head sizes."""
    model = make_model(3, **fields)
    tokens = [5, 9, 0, 63, 5]
    torch.testing.assert_close(
        model(torch.tensor([tokens]))[0].double(), reference_logits(model, tokens), atol=1e-4, rtol=1e-4
    )


def test_padding_on_the_right_does_not_change_a_row() -> None:
    """A short row in a padded batch gets the logits that it gets alone, by mask and by lengths."""
    model = make_model(3)
    batch = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    alone = model(batch[1:, :2])[0]
    torch.testing.assert_close(model(batch, mask)[1, :2], alone)
    torch.testing.assert_close(model(batch, lengths=torch.tensor([4, 2]))[1, :2], alone)


def test_left_padding_works_with_positions_that_start_at_the_text() -> None:
    """A left-padded row with its own positions gets the logits of the bare text."""
    model = make_model(3)
    row, mask, positions = torch.tensor([[0, 0, 5, 6]]), torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 0, 0, 1]])
    padded = model(row, mask, position_ids=positions)[0, 2:]
    torch.testing.assert_close(padded, model(torch.tensor([[5, 6]]))[0])


def test_packed_texts_do_not_see_each_other() -> None:
    """Two texts packed into one row, kept apart by a block mask, get the logits that they get alone."""
    model = make_model(3)
    text = torch.tensor([0, 0, 1, 1, 1])
    block = (text.unsqueeze(0) == text.unsqueeze(1)).unsqueeze(0)
    packed = model(torch.tensor([[5, 6, 7, 8, 9]]), block, position_ids=torch.tensor([[0, 1, 0, 1, 2]]))[0]
    torch.testing.assert_close(packed[2:], model(torch.tensor([[7, 8, 9]]))[0])


def test_every_weight_gets_a_gradient() -> None:
    """A loss over the logits reaches every parameter."""
    model = make_model(3)
    model(torch.tensor([[1, 2, 3]])).logsumexp(-1).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_weights_have_the_names_of_hugging_face() -> None:
    """The state dict of one layer has the names that `LlamaForCausalLM` has."""
    layer = "model.layers.0."
    expected = {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    expected |= {f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"}
    expected |= {f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    expected |= {f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"}
    assert set(make_model(3, num_hidden_layers=1).state_dict()) == expected


def test_angles_stay_exact_when_a_model_is_converted() -> None:
    """Converting a model to bfloat16 rounds its weights but not its rotary angles."""
    converted = make_model(3).to(torch.bfloat16)
    torch.testing.assert_close(
        converted(torch.arange(60).unsqueeze(0)), make_model(3, dtype="bfloat16")(torch.arange(60).unsqueeze(0))
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_size": 0},
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        {"hidden_size": 30, "num_attention_heads": 4},
        {"head_dim": 7},
        {"dtype": "float16"},
    ],
)
def test_shapes_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    """A configuration that no Llama can have raises ValueError."""
    with pytest.raises(ValueError, match=r".+"):
        LlamaConfig(**{"vocab_size": 8, **fields})


def test_a_text_longer_than_the_model_allows_is_refused() -> None:
    """More tokens than positions raise ValueError, as do a mask and lengths together."""
    model = make_model(3, max_position_embeddings=4)
    with pytest.raises(ValueError, match="5 tokens exceed the 4 positions"):
        model(torch.zeros(1, 5, dtype=torch.int64))
    ones = torch.ones(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="not both"):
        model(ones, ones, lengths=torch.tensor([2]))
