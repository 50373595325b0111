"""A causal Llama in plain torch, with the parameter names and the numbers of Hugging Face's `LlamaForCausalLM`.

One model for both sides of a hand-over: a trainer calls it with autograd over a padded batch, the embedded engine runs
it with a key/value cache. Compared once with transformers 5.19 (float32 and bfloat16, tied and untied embeddings,
grouped-query attention, right-padded batches): the logits were equal bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CausalLM", "LlamaConfig"]


def _positive(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value <= 0:
        raise ValueError(f"{attribute.name} must be above 0, not {value}")


def _zero_if_none(value: int | None) -> int:
    return 0 if value is None else value


@attrs.frozen(kw_only=True)
class LlamaConfig:
    """Describe a Llama; the fields are those of a Hugging Face `config.json`.

    Args:
        vocab_size: Number of token ids.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the SwiGLU block; `None` for four times `hidden_size`.
        num_hidden_layers: Number of decoder layers.
        num_attention_heads: Number of query heads.
        num_key_value_heads: Number of key/value heads, a divisor of the query heads; `None` for as many as those.
        head_dim: Width of one head, even; `None` for `hidden_size / num_attention_heads`.
        max_position_embeddings: Longest sequence, in tokens.
        rms_norm_eps: Added to the mean square before the root.
        rope_theta: Base of the rotary embedding (https://arxiv.org/abs/2104.09864).
        tie_word_embeddings: Whether `lm_head.weight` is `model.embed_tokens.weight`.
        initializer_range: Standard deviation of the initial weights.
        bos_token_id: Token that begins a text; `None` for none.
        eos_token_id: Token, or tokens, that end a generation; `None` for none.
        pad_token_id: Token that fills a batch; `None` for none.
        dtype: "float32" or "bfloat16": what the weights are kept in on disk.
    """

    vocab_size: int = attrs.field(validator=_positive)
    hidden_size: int = attrs.field(default=64, validator=_positive)
    intermediate_size: int = attrs.field(default=None, converter=_zero_if_none, validator=attrs.validators.ge(0))
    num_hidden_layers: int = attrs.field(default=2, validator=_positive)
    num_attention_heads: int = attrs.field(default=4, validator=_positive)
    num_key_value_heads: int = attrs.field(default=None, converter=_zero_if_none, validator=attrs.validators.ge(0))
    head_dim: int = attrs.field(default=None, converter=_zero_if_none, validator=attrs.validators.ge(0))
    max_position_embeddings: int = attrs.field(default=2048, validator=_positive)
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    dtype: str = attrs.field(default="float32", validator=attrs.validators.in_(("float32", "bfloat16")))

    def __attrs_post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "intermediate_size", self.intermediate_size or 4 * self.hidden_size)
        set_field(self, "num_key_value_heads", self.num_key_value_heads or self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key/value heads evenly"
            )
        if not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(f"hidden_size {self.hidden_size} is no multiple of {self.num_attention_heads} heads")
            set_field(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a generation."""
        if self.eos_token_id is None:
            return frozenset()
        return frozenset((self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id)


class LayerCache(Protocol):
    """What attention needs of a key/value cache for one layer and the tokens of one call."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Keep `key` and `value`, and return the attention of `query` over all that is kept.

        Args:
            query: Shape `(batch, heads, length, head_dim)`, rotated.
            key: Shape `(batch, kv_heads, length, head_dim)`, rotated.
            value: Shape `(batch, kv_heads, length, head_dim)`.

        Returns:
            Shape `(batch, heads, length, head_dim)`.
        """


class RMSNorm(nn.Module):
    """Divide by the root mean square, computed in float32 as Llama does, then scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension; shape and dtype stay."""
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query self-attention with rotary embeddings."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        """Attend over `x` of shape `(batch, length, hidden_size)`, causally, and over `cache` if there is one."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        query = _rotate(self.q_proj(x).view(heads).transpose(1, 2), rotary)
        key = _rotate(self.k_proj(x).view(heads).transpose(1, 2), rotary)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        mixed = cache.attend(query, key, value) if cache is not None else attend(query, key, value, mask=mask)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return projected


class MLP(nn.Module):
    """The SwiGLU block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map shape `(..., hidden_size)` to the same shape."""
        mapped: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return mapped


class DecoderLayer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        """Map shape `(batch, length, hidden_size)` to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask, cache)
        mapped: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mapped


class LlamaModel(nn.Module):
    """Embeddings, layers and the final norm: what Hugging Face calls `model`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Not buffers: `module.to(torch.bfloat16)` would round the angles, which Llama keeps in float32.
        self._rotary = _rotary_tables(config)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        caches: list[LayerCache] | None = None,
    ) -> Tensor:
        """Return hidden states of shape `(batch, length, hidden_size)`; see `CausalLM.forward` for the arguments."""
        x: Tensor = self.embed_tokens(input_ids)
        rotary = self._angles(input_ids.shape[1], positions, x)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, mask, None if caches is None else caches[index])
        normed: Tensor = self.norm(x)
        return normed

    def _angles(self, length: int, positions: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, `(length, head_dim)` or `(batch, 1, length, head_dim)`, as `like` is kept."""
        cos, sin = self._rotary
        if positions is None:
            cos, sin = cos[:length], sin[:length]
        else:
            positions = positions.to(cos.device)
            cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        return cos.to(like), sin.to(like)


class CausalLM(nn.Module):
    """A Llama with a language-model head; `state_dict()` has Hugging Face's names and shapes.

    Args:
        config: The shape of the model.
        seed: Seed of the initial weights, int ≥ 0; `None` to use torch's global generator.
    """

    def __init__(self, config: LlamaConfig, *, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, config.initializer_range, generator=generator)
                parameter.data = parameter.data.to(config.torch_dtype)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits of every position, with autograd.

        Args:
            input_ids: Token ids, shape `(batch, length)`, int64.
            attention_mask: 1 for a token and 0 for padding, shape `(batch, length)`; padding may stand on either side
                (left-padded rows need `position_ids` that start at 0 with the first token). `None` when nothing is
                padded, or when padding stands on the right and its logits are ignored: a causal model cannot see it.
            lengths: Instead of `attention_mask`, the number of tokens of each right-padded row, shape `(batch,)`.
            position_ids: Positions for the rotary embedding, shape `(batch, length)`; `None` for 0, 1, 2, ...
                Several texts packed into one row need positions that restart *and* a mask of shape
                `(batch, length, length)` that keeps them apart.

        Returns:
            Logits, shape `(batch, length, vocab_size)`, in the dtype of the weights.

        Raises:
            ValueError: If both a mask and lengths are given, or the text is longer than the model allows.
        """
        if input_ids.shape[1] > self.config.max_position_embeddings:
            raise ValueError(f"{input_ids.shape[1]} tokens exceed the {self.config.max_position_embeddings} positions")
        if lengths is not None:
            if attention_mask is not None:
                raise ValueError("give attention_mask or lengths, not both")
            attention_mask = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths.unsqueeze(1)
        mask = None if attention_mask is None else _causal_mask(attention_mask)
        logits: Tensor = self.lm_head(self.model(input_ids, position_ids, mask))
        return logits

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight once, by its Hugging Face name (a tied head is left out, as in a checkpoint)."""
        for name, parameter in self.named_parameters():
            yield name, parameter.detach()


def attend(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> Tensor:
    """Attend causally within one call; `mask` (true = visible) replaces the causal mask when given.

    Query heads share key/value heads; shapes are those of `LayerCache.attend`.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)


def _causal_mask(attention_mask: Tensor) -> Tensor:
    """Return a boolean mask `(batch, 1, length, length)`; every query sees at least itself, so no row is empty."""
    length = attention_mask.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    visible = attention_mask.bool()
    visible = visible if visible.dim() == 3 else visible.unsqueeze(1)
    itself = torch.eye(length, dtype=torch.bool, device=attention_mask.device)
    return (causal & visible | itself).unsqueeze(1)


def _rotary_tables(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines in float32, shape `(max_position_embeddings, head_dim)`."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / torch.pow(torch.tensor(config.rope_theta, dtype=torch.float32), exponents)
    angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `x` of shape `(batch, heads, length, head_dim)`; the halves are paired, as in Hugging Face's layout."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
