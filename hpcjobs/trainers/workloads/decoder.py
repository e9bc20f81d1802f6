"""A GPT-style decoder: pre-norm blocks of causal attention and a four-fold MLP, tied output layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention


@dataclass(frozen=True)
class DecoderShape:
    layers: int
    width: int
    heads: int
    sequence_length: int
    vocabulary: int


class Attention(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class Block(nn.Module):
    """The unit that sharding and activation checkpointing wrap."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        hidden: torch.Tensor = x + self.down(gelu(self.up(self.norm2(x)), approximate="tanh"))
        return hidden


class Decoder(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.sequence_length, shape.width)
        blocks = [Block(shape) for _ in range(shape.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_small_weights)
        for block in blocks:  # keeps the residual stream's variance independent of depth
            for layer in (block.attention.out, block.down):
                nn.init.normal_(layer.weight, std=0.02 / (2 * shape.layers) ** 0.5)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _small_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def flops_per_token(shape: DecoderShape) -> float:
    """6 per weight of a matrix product (forward 2, backward 4), and 12·layers·width·length for attention."""
    weights = shape.layers * 12 * shape.width**2 + shape.vocabulary * shape.width
    return 6.0 * weights + 12.0 * shape.layers * shape.width * shape.sequence_length
