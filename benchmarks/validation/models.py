"""A published model as an ordinary `nn.Module`, with only as many layers as it has kinds of them.

A step of L equal layers costs embedding + L x layer + head, so the module holds one layer of each kind (`layer_kinds`)
and `cut` later multiplies. Its submodules are named after what a cut needs:

    embedding.*    layers.0.*  layers.1.* ...    head.*        layers.i.attention.core is what "selective" recomputes

The module is written as the training stacks compute: fused query-key-value product, a softmax that masks and scales
in its own kernel, experts as grouped products (`autopar.ops.experts`). It lives on the meta device.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar.ops  # noqa: F401  (registers the grouped products)
from benchmarks.validation.runs import Experts, LatentAttention, ModelShape
from benchmarks.validation.state_space import Mamba

DROPOUT = 0.1
"""Megatron's default for attention and hidden states."""

MIXERS = {"M": "mamba", "*": "attention", "-": "dense", "E": "experts"}
"""Kinds of layers by the letters of a hybrid's pattern."""

DTYPES = {"float32": torch.float32, "float16": torch.float16}
"""Of weights and activations; bfloat16 where not named: float8 products have 16-bit operands in the graph and a float8
rate."""


def build_model(
    shape: ModelShape, kinds: tuple[str, ...], *, dtype: str, flash: bool, expert_ranks: int = 1
) -> nn.Module:
    """The module on the meta device, `forward(tokens, labels) -> loss`; one layer per entry of `kinds`.

    tokens and labels are int64 (batch, seq_len); weights and activations have `dtype`; flash: attention is one kernel
    that writes no scores.
    """
    model = EncoderDecoder if shape.family == "t5" else Transformer
    with torch.device("meta"):
        return model(shape, kinds, flash=flash, expert_ranks=expert_ranks).to(DTYPES.get(dtype, torch.bfloat16))


def layer_kinds(shape: ModelShape) -> tuple[tuple[str, int], ...]:
    """(kind of layer, how many of them), in the order in which the model first uses them."""
    sequence = layer_sequence(shape)
    return tuple((kind, sequence.count(kind)) for kind in dict.fromkeys(sequence))


def layer_sequence(shape: ModelShape) -> tuple[str, ...]:
    """The kind of every layer: "dense" or "experts"; an encoder-decoder's: "encoder" or "decoder"; a hybrid's, which
    are a mixer each: also "mamba" or "attention"."""
    experts = shape.experts
    if shape.family == "hybrid":
        return tuple(MIXERS[letter] for letter in shape.pattern)
    if shape.family == "t5":
        return ("encoder",) * (shape.layers if shape.decoder_seq_len else 0) + ("decoder",) * shape.layers
    if experts is None:
        return ("dense",) * shape.layers
    return tuple("experts" if has_experts(experts, layer) else "dense" for layer in range(shape.layers))


def has_experts(experts: Experts, layer: int) -> bool:
    """Whether a layer has experts in place of one dense MLP."""
    return layer >= experts.dense_layers and (layer - experts.dense_layers) % experts.every == 0


def example(shape: ModelShape, batch: int) -> dict[str, Tensor]:
    """The arguments of `forward` for `batch` sequences."""
    tokens = torch.empty(batch, shape.seq_len, dtype=torch.long, device="meta")
    if shape.family == "t5":
        return {"tokens": tokens, "labels": torch.empty(batch, shape.decoder_seq_len, dtype=torch.long, device="meta")}
    return {"tokens": tokens, "labels": tokens}


def without_layers(shape: ModelShape) -> ModelShape:
    """The shape with as few layers as have every kind, so that models of different depth share one capture."""
    sequence = layer_sequence(shape)
    if shape.family == "t5":
        return dataclasses.replace(shape, layers=1)
    needed = 1 + max(sequence.index(kind) for kind in dict.fromkeys(sequence))
    return dataclasses.replace(shape, layers=needed, pattern=shape.pattern[:needed])


class Transformer(nn.Module):
    """Embedding, one layer per kind, head with the loss."""

    def __init__(self, shape: ModelShape, kinds: tuple[str, ...], *, flash: bool, expert_ranks: int) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        layer = MixerLayer if shape.family == "hybrid" else Layer
        self.layers = nn.ModuleList(layer(shape, kind, flash=flash, expert_ranks=expert_ranks) for kind in kinds)
        self.head = Head(shape)
        if shape.tied_embeddings:
            self.head.output.weight = self.embedding.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x, labels)
        return loss


class EncoderDecoder(nn.Module):
    """Megatron's T5 (megatron/core/models/T5): learned positions, layer norms, one table of words for both sides."""

    def __init__(self, shape: ModelShape, kinds: tuple[str, ...], *, flash: bool, expert_ranks: int) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        self.layers = nn.ModuleList(Layer(shape, kind, flash=flash, expert_ranks=expert_ranks) for kind in kinds)
        self.head = Head(shape)
        if shape.tied_embeddings:
            self.head.output.weight = self.embedding.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        encoder, decoder = self.layers
        x, y = self.embedding(tokens), self.embedding(labels)
        assert self.embedding.encoded is not None
        encoded = self.embedding.encoded(encoder(x))
        loss: Tensor = self.head(decoder(y, encoded), labels)
        return loss


class Embedding(nn.Module):
    """Words and, for models with learned positions, positions; an encoder-decoder's norm behind its encoder."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocab, shape.hidden)
        has_positions = not uses_rotation(shape) and shape.family != "hybrid"
        self.positions = None if not has_positions else nn.Embedding(shape.seq_len, shape.hidden)
        self.dropout = DROPOUT if shape.dropout else 0.0
        self.encoded = norm(shape) if shape.family == "t5" else None

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.words(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: x.shape[1]]
        return F.dropout(x, self.dropout) if self.dropout else x


class Head(nn.Module):
    """Last norm, product with the vocabulary, loss in float32; BERT transforms its hidden states once more before, and
    tells from a pooled first token whether two sentences follow each other (megatron/core/models/bert)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = norm(shape)
        is_bert = shape.family == "bert"
        self.transform = nn.Linear(shape.hidden, shape.hidden) if is_bert else None
        self.transform_norm = norm(shape) if is_bert else None
        self.pooler = nn.Linear(shape.hidden, shape.hidden) if is_bert else None
        self.binary = nn.Linear(shape.hidden, 2) if is_bert else None
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(x)
        follows: Tensor | None = None
        if self.pooler is not None and self.binary is not None:
            follows = self.binary(torch.tanh(self.pooler(x.narrow(1, 0, 1))))
        if self.transform is not None and self.transform_norm is not None:
            x = self.transform_norm(F.gelu(self.transform(x)))
        logits = self.output(x).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss if follows is None else loss + follows.float().mean()


class Layer(nn.Module):
    """Pre-norm attention and MLP, each added to its input; a decoder's also attends to the encoder's output between."""

    def __init__(self, shape: ModelShape, kind: str, *, flash: bool, expert_ranks: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(shape), norm(shape)
        attention = shape.latent
        self.attention = (
            Attention(shape, flash=flash, causal=is_causal(shape, kind))
            if attention is None
            else Latent(shape, attention, flash=flash)
        )
        if kind == "experts":
            assert shape.experts is not None
            self.mlp: nn.Module = MixtureOfExperts(shape, shape.experts, expert_ranks)
        else:
            self.mlp = Mlp(shape, shape.ffn)
        self.norm3 = norm(shape) if kind == "decoder" else None
        self.cross = CrossAttention(shape, flash=flash) if kind == "decoder" else None
        self.dropout = DROPOUT if shape.dropout else 0.0

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        x = x + self._dropped(self.attention(self.norm1(x)))
        if self.cross is not None and self.norm3 is not None:
            x = x + self._dropped(self.cross(self.norm3(x), encoded))
        return x + self._dropped(self.mlp(self.norm2(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class MixerLayer(nn.Module):
    """A hybrid's layer: one mixer behind one norm, added to its input (megatron/core/ssm/mamba_block.py)."""

    def __init__(self, shape: ModelShape, kind: str, *, flash: bool, expert_ranks: int) -> None:
        super().__init__()
        self.norm1 = norm(shape)
        if kind == "mamba":
            assert shape.state_space is not None
            self.mamba: nn.Module = Mamba(shape.hidden, shape.state_space)
        elif kind == "attention":
            self.attention = Attention(shape, flash=flash, causal=True)
        elif kind == "experts":
            assert shape.experts is not None
            self.mlp: nn.Module = MixtureOfExperts(shape, shape.experts, expert_ranks)
        else:
            self.mlp = Mlp(shape, shape.ffn)
        (self.mixer_name,) = (name for name, _ in self.named_children() if name != "norm1")
        self.dropout = DROPOUT if shape.dropout else 0.0

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = getattr(self, self.mixer_name)(self.norm1(x))
        return x + (F.dropout(mixed, self.dropout) if self.dropout else mixed)


class CrossAttention(nn.Module):
    """Queries of the decoder on keys and values of the encoder's output, which come from one product."""

    def __init__(self, shape: ModelShape, *, flash: bool) -> None:
        super().__init__()
        self.head_dim = shape.head_dim or shape.hidden // shape.heads
        width, bias = shape.heads * self.head_dim, has_biases(shape)
        self.query = nn.Linear(shape.hidden, width, bias=bias)
        self.kv = nn.Linear(shape.hidden, 2 * width, bias=bias)
        self.core = Core(DROPOUT if shape.dropout else 0.0, flash=flash, causal=False)
        self.out = nn.Linear(width, shape.hidden, bias=bias)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        query = self.query(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        pairs = self.kv(encoded).view(batch, encoded.shape[1], -1, 2 * self.head_dim)
        key, value = (part.transpose(1, 2) for part in torch.split(pairs, self.head_dim, dim=-1))
        attended = self.core(query, key, value)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(batch, seq, -1))
        return out


class Core(nn.Module):
    """Attention over (B, H, S, D); without flash its scores are written, as two batched products and a softmax."""

    def __init__(self, dropout: float, *, flash: bool, causal: bool = True) -> None:
        super().__init__()
        self.dropout, self.flash, self.causal = dropout, flash, causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.flash:
            return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=self.causal)
        scores = query @ key.transpose(-1, -2)  # masked and scaled by the kernel of the softmax
        weights = torch.softmax(scores, dim=-1)
        return (F.dropout(weights, self.dropout) if self.dropout else weights) @ value


class Attention(nn.Module):
    """Self-attention whose query, key and value come from one product, grouped by key-value heads as Megatron does."""

    def __init__(self, shape: ModelShape, *, flash: bool, causal: bool) -> None:
        super().__init__()
        self.head_dim = shape.head_dim or shape.hidden // shape.heads
        self.groups, self.queries = shape.kv_heads, shape.heads // shape.kv_heads
        bias = has_biases(shape)
        width = self.groups * (self.queries + 2) * self.head_dim
        self.qkv = nn.Linear(shape.hidden, width, bias=bias)
        self.core = Core(DROPOUT if shape.dropout else 0.0, flash=flash, causal=causal)
        self.out = nn.Linear(shape.heads * self.head_dim, shape.hidden, bias=bias)
        self.rotation = Rotation(shape.seq_len, self.head_dim) if uses_rotation(shape) else None

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        grouped = self.qkv(x).view(batch, seq, self.groups, (self.queries + 2) * self.head_dim)
        sizes = [self.queries * self.head_dim, self.head_dim, self.head_dim]
        query, key, value = torch.split(grouped, sizes, dim=-1)
        query = query.reshape(batch, seq, self.groups * self.queries, self.head_dim).transpose(1, 2)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        if self.rotation is not None:
            query, key = self.rotation(query), self.rotation(key)
        if self.queries > 1:
            key, value = (
                t.unsqueeze(2).expand(-1, -1, self.queries, -1, -1).reshape(query.shape) for t in (key, value)
            )
        attended = self.core(query, key, value)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(batch, seq, -1))
        return out


class Latent(nn.Module):
    """Multi-head latent attention: queries, keys and values pass through narrow products (DeepSeek-V2, section 2.1)."""

    def __init__(self, shape: ModelShape, latent: LatentAttention, *, flash: bool) -> None:
        super().__init__()
        self.heads, self.latent = shape.heads, latent
        query_width = shape.heads * (latent.nope_head + latent.rope_head)
        if latent.query_rank:
            self.query_down = nn.Linear(shape.hidden, latent.query_rank, bias=False)
            self.query_norm = nn.RMSNorm(latent.query_rank)
        self.query_up = nn.Linear(latent.query_rank or shape.hidden, query_width, bias=False)
        self.kv_down = nn.Linear(shape.hidden, latent.key_value_rank + latent.rope_head, bias=False)
        self.kv_norm = nn.RMSNorm(latent.key_value_rank)
        self.kv_up = nn.Linear(latent.key_value_rank, shape.heads * (latent.nope_head + latent.value_head), bias=False)
        self.rotation = Rotation(shape.seq_len, latent.rope_head)
        self.core = Core(DROPOUT if shape.dropout else 0.0, flash=flash)
        self.out = nn.Linear(shape.heads * latent.value_head, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        sizes = self.latent
        down = self.query_norm(self.query_down(x)) if sizes.query_rank else x
        query = self.query_up(down).view(batch, seq, self.heads, -1).transpose(1, 2)
        plain, turned = torch.split(query, [sizes.nope_head, sizes.rope_head], dim=-1)
        narrow, key_turned = torch.split(self.kv_down(x), [sizes.key_value_rank, sizes.rope_head], dim=-1)
        wide = self.kv_up(self.kv_norm(narrow)).view(batch, seq, self.heads, -1).transpose(1, 2)
        key, value = torch.split(wide, [sizes.nope_head, sizes.value_head], dim=-1)
        shared = self.rotation(key_turned.unsqueeze(1)).expand(-1, self.heads, -1, -1)
        query = torch.cat([plain, self.rotation(turned)], dim=-1)
        attended = self.core(query, torch.cat([key, shared], dim=-1), value)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(batch, seq, -1))
        return out


class Rotation(nn.Module):
    """Rotary positions over (B, H, S, D)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seq_len: int, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(seq_len, head_dim))
        self.register_buffer("sin", torch.empty(seq_len, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * self.cos + turned * self.sin


class Mlp(nn.Module):
    """Two products around GELU, or three around a SiLU gate."""

    def __init__(self, shape: ModelShape, width: int) -> None:
        super().__init__()
        self.gated = is_gated(shape)
        bias = has_biases(shape)
        self.up = nn.Linear(shape.hidden, width * (2 if self.gated else 1), bias=bias)
        self.down = nn.Linear(width, shape.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        if self.gated:
            # gate and value lie side by side per column, so that tensor parallelism splits both alike
            gate, value = wide.unflatten(-1, (-1, 2)).unbind(-1)
            wide = F.silu(gate) * value
        else:
            wide = F.gelu(wide, approximate="tanh")
        out: Tensor = self.down(wide)
        return out


class MixtureOfExperts(nn.Module):
    """A router, grouped products over the chosen experts, and experts that every token passes."""

    def __init__(self, shape: ModelShape, experts: Experts, expert_ranks: int) -> None:
        super().__init__()
        self.experts, self.gated = experts, is_gated(shape)
        self.router = nn.Linear(shape.hidden, experts.count, bias=False)
        width = experts.hidden * (2 if self.gated else 1)
        held = max(1, experts.count // expert_ranks)
        self.gate_up = nn.Parameter(torch.empty(held, shape.hidden, width))
        self.down = nn.Parameter(torch.empty(held, experts.hidden, shape.hidden))
        self.shared = Mlp(shape, experts.shared_hidden) if experts.shared_hidden else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = torch.softmax(self.router(tokens).float(), dim=-1)
        weights, chosen = weights.topk(self.experts.per_token, dim=-1)
        ids = chosen.reshape(-1)
        rows = tokens.unsqueeze(1).expand(-1, self.experts.per_token, -1).reshape(len(ids), -1)
        wide = torch.ops.autopar.expert_linear(rows, self.gate_up, ids, False)
        if self.gated:
            gate, value = wide.unflatten(-1, (-1, 2)).unbind(-1)
            wide = F.silu(gate) * value
        else:
            wide = F.gelu(wide, approximate="tanh")
        rows = torch.ops.autopar.expert_linear(wide, self.down, ids, False)
        weighted = rows * weights.reshape(-1, 1).to(rows.dtype)
        mixed: Tensor = weighted.view(len(tokens), self.experts.per_token, -1).sum(dim=1).view_as(x)
        shared: Tensor | None = None if self.shared is None else self.shared(x)
        return mixed if shared is None else mixed + shared


def uses_rotation(shape: ModelShape) -> bool:
    """Whether positions are rotary; else learned."""
    return shape.family in ("llama", "moe")


def has_biases(shape: ModelShape) -> bool:
    """Whether linear layers have biases."""
    return shape.biases and shape.family in ("gpt", "bert", "t5")


def is_causal(shape: ModelShape, kind: str) -> bool:
    """Whether a position attends to those before it only: not in BERT and in encoders."""
    return shape.family != "bert" and kind != "encoder"


def is_gated(shape: ModelShape) -> bool:
    """Whether the MLP has a gate."""
    return shape.gated or shape.family in ("llama", "moe")


def norm(shape: ModelShape) -> nn.Module:
    """RMS norm for hybrids and models with rotary positions, else layer norm."""
    is_plain = uses_rotation(shape) or shape.family == "hybrid"
    return nn.RMSNorm(shape.hidden) if is_plain else nn.LayerNorm(shape.hidden)
