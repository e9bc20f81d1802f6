"""Trains ResNet-50 on synthetic images or on a folder of files, the benchmark that most systems publish.

The model is ResNet-50 v1.5 (He et al. 2015; a block's stride is in its 3×3 convolution), for images from 32 pixels.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.workloads.base import Dataset, Workload, classification_score, smoothed_loss
from hpcjobs.trainers.workloads.images import SyntheticImages, open_images

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride of the first
EXPANSION = 4
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, by channel, from 0 to 1


class Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up, around which the input goes unchanged or, where the shape changes, through a 1×1."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, outputs, 1),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        self.way = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu_(self.body(x) + self.way(x))


class ResNet50(nn.Module):
    """Images as bytes [batch, 3, side, side] -> logits [batch, classes].

    Bytes are normalised here, on the device: copying bytes there takes a quarter of the time of floats.
    """

    mean: torch.Tensor
    spread: torch.Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor(MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("spread", 255 * torch.tensor(SPREAD).view(1, 3, 1, 1), persistent=False)
        first = nn.MaxPool2d(3, stride=2, padding=1)
        self.stem = nn.Sequential(*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), first)
        blocks: list[nn.Module] = []
        inputs = 64
        for width, count, stride in STAGES:
            for number in range(count):
                blocks.append(Bottleneck(inputs, width, stride if number == 0 else 1))
                inputs = EXPANSION * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        self.apply(_initial_weights)
        for block in blocks:  # each block begins as the identity (Goyal et al. 2017)
            nn.init.zeros_(block.body[-1].weight)  # type: ignore[index, union-attr]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = ((images - self.mean) / self.spread).to(self.head.weight.dtype)
        x = self.blocks(self.stem(x))
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def _initial_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)


def flops_per_image(side: int, classes: int) -> float:
    """Three times the forward pass, which is two per multiply-add of a convolution or the last layer."""
    side = -(-side // 2)
    multiply_adds = side**2 * 64 * 3 * 49
    side, inputs = -(-side // 2), 64
    for width, count, stride in STAGES:
        for number in range(count):
            before, side = side, -(-side // stride) if number == 0 else side
            outputs = EXPANSION * width
            multiply_adds += before**2 * inputs * width + side**2 * (9 * width**2 + width * outputs)
            if number == 0:
                multiply_adds += side**2 * inputs * outputs
            inputs = outputs
    return 3.0 * 2 * (multiply_adds + inputs * classes)


IMAGENET_CLASSES = 1000
SYNTHETIC_SAMPLES, SYNTHETIC_HELD_OUT = 4096, 64


def resnet50(config: Config) -> Workload:
    train, held_out, classes = _data(config)
    return Workload(
        name="resnet50",
        unit="images",
        units_per_sample=1,
        flops_per_sample=flops_per_image(config.image_size, classes),
        build_model=lambda: _model(classes, channels_last=config.channels_last),
        loss=smoothed_loss(config.label_smoothing),
        evaluate=classification_score,
        train=train,
        held_out=held_out,
        batch_size=32,
        lr=0.0125,  # 0.1 for 256 images (Goyal et al. 2017); --lr-scaling linear goes on from there
        optimizer="sgd",
        weight_decay=5e-5,
        blocks=(Bottleneck,),
        synthetic=None if config.data is not None else lambda count: _synthetic(config, count),
        convolutions=True,
    )


def _model(classes: int, *, channels_last: bool) -> nn.Module:
    model = ResNet50(classes)
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _data(config: Config) -> tuple[Dataset, Dataset, int]:
    if config.data is not None:
        return open_images(
            Path(config.data), side=config.image_size, channels_last=config.channels_last, augment=config.augment
        )
    count = SYNTHETIC_SAMPLES if config.train_samples is None else config.train_samples
    return _synthetic(config, count), _synthetic(config, SYNTHETIC_HELD_OUT), IMAGENET_CLASSES


def _synthetic(config: Config, count: int) -> SyntheticImages:
    return SyntheticImages(count, side=config.image_size, classes=IMAGENET_CLASSES, channels_last=config.channels_last)
