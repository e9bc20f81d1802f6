"""Workloads around models written as others write theirs: CLIP, Llama, tied weights, unused weights, BatchNorm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from worlds import points

from hpcjobs.trainers.config import Config
from hpcjobs.trainers.workloads.base import Batch, Workload

WIDTH, VOCABULARY = 16, 24


class Sentences:
    """Tokens that follow each other by a rule, so that there is something to learn."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read_batch(self, indices: Sequence[int]) -> Batch:
        start = torch.as_tensor(indices).unsqueeze(1)
        tokens = (start * 7 + torch.arange(9) * (1 + start % 3)) % VOCABULARY
        return tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wqkv, self.wo = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.wqkv(self.attention_norm(x)).chunk(3, dim=-1)
        if freqs_cis is not None:
            q, k = rotate(q, freqs_cis), rotate(k, freqs_cis)
        x = x + self.wo(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        deep: torch.Tensor = x + self.down(torch.relu(self.up(self.mlp_norm(x))))
        return deep


def rotate(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Llama's rotary embedding, by complex numbers."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis[: x.shape[1]]).flatten(-2).type_as(x)


class Llama(nn.Module):
    """Its rotations are a plain attribute, neither parameter nor buffer, as in the first release."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(16), 100.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH))
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        self.freqs_cis = self.freqs_cis.to(h.device)
        for layer in self.layers:
            h = layer(h, self.freqs_cis)
        logits: torch.Tensor = self.output(self.norm(h))
        return logits


class Tied(nn.Module):
    """GPT-2's head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.h, self.lm_head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList(Block() for _ in range(2)),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.lm_head(x)
        return logits


class UnusedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(WIDTH, WIDTH)  # as BERT's, which language modelling does not use


class Unused(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(UnusedBlock() for _ in range(2))
        self.classifier = nn.Linear(WIDTH, 2)


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv1d(WIDTH, WIDTH, 1, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deep: torch.Tensor = x + torch.relu(self.bn(self.conv(x)))
        return deep


class Normed(nn.Module):
    """BatchNorm in blocks, as in a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*(NormedBlock() for _ in range(4)))
        self.fc = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.layers(self.stem(tokens).transpose(1, 2)).transpose(1, 2))
        return logits


class Clip(nn.Module):
    """Two towers, and a temperature that is a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = Llama(), Llama()
        self.visual.freqs_cis = self.visual.freqs_cis.conj()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        features = [nn.functional.normalize(tower(x).mean(1), dim=-1) for tower, x in
                    ((self.visual, images), (self.text, texts))]  # fmt: skip
        return self.logit_scale.exp() * features[0] @ features[1].t()


def predict(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def contrast(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(*batch).float()
    labels = torch.arange(len(logits))
    return (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.t(), labels)) / 2


def make_workload(model: type[nn.Module], *, loss: Callable[[nn.Module, Batch], torch.Tensor] = predict) -> Workload:
    workload = replace(points(Config()), name=model.__name__, build_model=model, loss=loss, evaluate=None)
    return replace(workload, train=Sentences(256), lr=3e-3)


def llama(config: Config) -> Workload:
    return make_workload(Llama)


def tied(config: Config) -> Workload:
    return make_workload(Tied)


def unused(config: Config) -> Workload:
    return make_workload(Unused)


def normed(config: Config) -> Workload:
    return make_workload(Normed)


def clip(config: Config) -> Workload:
    return make_workload(Clip, loss=contrast)
