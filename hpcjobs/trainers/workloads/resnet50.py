"""ResNet-50 on synthetic images, or on a folder of files; the measure that most systems publish."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.workloads.base import Dataset, Workload, classification_score, smoothed_loss
from hpcjobs.trainers.workloads.images import SyntheticImages, open_images
from hpcjobs.trainers.workloads.resnet import Bottleneck, ResNet50, flops_per_image

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
