"""Trains ResNet-50 on synthetic images or on a folder of files, the benchmark that most systems publish.

The model is ResNet-50 v1.5 (He et al. 2015; a block's stride is in its 3×3 convolution), for images from 32 pixels.
The images are files, tar shards, a saved dataset, or made up on the spot. Bytes, not floats, go to the model.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hpcjobs.runtime.exits import BadData, MissingData
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.workloads.base import (
    Batch,
    Dataset,
    Workload,
    classification_loss,
    classification_score,
    is_saved_dataset,
    load_package,
    load_saved_dataset,
    move_numbers,
)
from hpcjobs.trainers.workloads.tar_shards import TarShards

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
HELD_OUT_EVERY = 10  # for a folder without a held-out part
TRIALS, AREAS, LOG_RATIO = 10, (0.08, 1.0), math.log(4 / 3)  # of random parts
MARGIN = 8 / 7  # an image's shorter side before its middle is cut out: 256 for 224
DIFFERENT = 64  # made-up images


class SyntheticImages:
    """A few random pictures, repeated, each with a label; reading a batch costs one copy."""

    def __init__(self, count: int, *, side: int, classes: int, channels_last: bool) -> None:
        self.count, self.classes, self.channels_last = count, classes, channels_last
        pixels = torch.Generator().manual_seed(0)
        shape = (min(DIFFERENT, count), side, side, 3)
        self.pictures = torch.randint(0, 256, shape, dtype=torch.uint8, generator=pixels)

    def __len__(self) -> int:
        return self.count

    def on_device(self, device: torch.device) -> SyntheticImages:
        """The same pictures in the memory of a GPU, where batches are then made."""
        moved = copy(self)
        moved.pictures = self.pictures.to(device)
        return moved

    def read_batch(self, indices: Sequence[int]) -> Batch:
        which = move_numbers(indices, self.pictures.device) % len(self.pictures)
        return channels_first(self.pictures[which], self.channels_last), which % self.classes


class ImageSource(Protocol):
    """Images with their labels, by number."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Any, int]:
        """A picture of pillow in RGB, and its label."""

    def name(self, index: int) -> str: ...


@dataclass(frozen=True)
class Images:
    """Batches of pictures, `side` pixels wide: of each the middle, or, augmented, a random part, perhaps mirrored."""

    source: ImageSource
    side: int
    channels_last: bool
    augment: bool = False

    def __len__(self) -> int:
        return len(self.source)

    def read_batch(self, indices: Sequence[int]) -> Batch:
        return self.read_augmented(indices, random.getrandbits(32))

    def read_augmented(self, indices: Sequence[int], seed: int) -> Batch:
        """Read a batch; the part cut from an image depends on the seed and the image's number alone."""
        pairs = [self._read(index, seed) for index in indices]
        pictures = channels_first(torch.stack([picture for picture, _ in pairs]), self.channels_last)
        return pictures, torch.tensor([label for _, label in pairs])

    def _read(self, index: int, seed: int) -> tuple[torch.Tensor, int]:
        """[side, side, 3] bytes, and the label."""
        try:
            picture, label = self.source.read(index)
            if self.augment:
                picture = cut_random(picture, self.side, random.Random(f"{seed} {index}"))
            else:
                picture = cut_middle(picture, self.side)
        except OSError as error:
            raise BadData(f"--data: {self.source.name(index)} can't be read as an image: {error}") from error
        return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(self.side, self.side, 3), label


def cut_middle(picture: Any, side: int) -> Any:
    scale = MARGIN * side / min(picture.size)
    width, height = (max(side, round(scale * length)) for length in picture.size)
    left, top = (width - side) // 2, (height - side) // 2
    resized = picture.resize((width, height), load_pillow().Resampling.BILINEAR)
    return resized.crop((left, top, left + side, top + side))


def cut_random(picture: Any, side: int, draws: random.Random) -> Any:
    """A part of 8 to 100 % of the area with sides of 3:4 to 4:3, scaled to a square, mirrored half the time
    (Szegedy et al. 2015, section 6)."""
    image = load_pillow()
    width, height = picture.size
    box = _draw_box(width, height, draws)
    cut = picture.resize((side, side), image.Resampling.BILINEAR, box=box)
    return cut.transpose(image.Transpose.FLIP_LEFT_RIGHT) if draws.random() < 0.5 else cut


def _draw_box(width: int, height: int, draws: random.Random) -> tuple[int, int, int, int]:
    for _ in range(TRIALS):
        area = width * height * draws.uniform(*AREAS)
        ratio = math.exp(draws.uniform(-LOG_RATIO, LOG_RATIO))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = draws.randint(0, width - across), draws.randint(0, height - down)
            return left, top, left + across, top + down
    length = min(width, height)  # a picture so narrow that hardly any part fits
    left, top = (width - length) // 2, (height - length) // 2
    return left, top, left + length, top + length


def decode(data: Path | bytes) -> Any:
    """A picture of pillow in RGB, of a file or its bytes. Raises OSError."""
    with load_pillow().open(io.BytesIO(data) if isinstance(data, bytes) else data) as file:
        return file.convert("RGB")


@dataclass(frozen=True)
class ImageFiles:
    """Files with their labels."""

    files: Sequence[tuple[Path, int]]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> tuple[Any, int]:
        path, label = self.files[index]
        return decode(path), label

    def name(self, index: int) -> str:
        return str(self.files[index][0])


@dataclass(frozen=True)
class ShardedImages:
    """Samples of tar shards, each with a picture and a file `.cls` with the number of its class."""

    shards: TarShards

    def __len__(self) -> int:
        return len(self.shards)

    def read(self, index: int) -> tuple[Any, int]:
        sample = self.shards[index]
        pictures = [value for name, value in sample.items() if f".{name}".lower() in SUFFIXES]
        if len(pictures) != 1 or "cls" not in sample:
            parts = ", ".join(f".{name}" for name in sample if not name.startswith("_"))
            raise BadData(
                f"--data: {self.name(index)} has {parts}", hint="a picture, such as .jpg, and .cls: its class"
            )
        try:
            return decode(pictures[0]), int(sample["cls"])
        except ValueError as error:
            raise BadData(f"--data: {self.name(index)}: .cls has no number of a class: {error}") from error

    def name(self, index: int) -> str:
        return self.shards.name(index)


@dataclass(frozen=True)
class DatasetImages:
    """A dataset of Hugging Face with the columns `image` and `label`."""

    dataset: Any
    folder: Path

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[Any, int]:
        row = self.dataset[int(index)]
        return row["image"].convert("RGB"), row["label"]

    def name(self, index: int) -> str:
        return f"image {index} of {self.folder}"


def channels_first(pictures: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """[n, side, side, 3] -> [n, 3, side, side]; with channels last in memory that is another view of the same."""
    turned = pictures.permute(0, 3, 1, 2)
    return turned if channels_last else turned.contiguous()


def open_images(folder: Path, *, side: int, channels_last: bool, augment: bool) -> tuple[Images, Images, int]:
    """Return the training and held-out images of a folder, and the number of classes."""
    load_pillow()
    if not folder.is_dir():
        raise MissingData(f"--data {folder}: no such folder")
    if is_saved_dataset(folder):
        train, held_out, classes = _open_dataset(folder)
    elif any(folder.glob("*.tar")):
        train, held_out, classes = _open_shards(folder)
    else:
        train, held_out, classes = _open_files(folder)
    return (Images(train, side, channels_last, augment), Images(held_out, side, channels_last), classes)


def _open_dataset(folder: Path) -> tuple[ImageSource, ImageSource, int]:
    train, held_out = load_saved_dataset(
        folder, option="--data", columns=("image", "label"), held_out_every=HELD_OUT_EVERY
    )
    classes = getattr(train.features["label"], "num_classes", None) or 1 + max(train["label"])
    return DatasetImages(train, folder), DatasetImages(held_out, folder), classes


def _open_shards(folder: Path) -> tuple[ImageSource, ImageSource, int]:
    """Hold out `val*.tar`, or every tenth sample. Without classes.txt (a class per line), read all labels."""
    paths = sorted(folder.glob("*.tar"))
    held_paths = [path for path in paths if path.name.startswith("val")]
    train = TarShards.open([path for path in paths if path not in held_paths])
    held = TarShards.open(held_paths)
    if not held_paths:
        numbers = range(len(train))
        held = train.choose([n for n in numbers if (n + 1) % HELD_OUT_EVERY == 0])
        train = train.choose([n for n in numbers if (n + 1) % HELD_OUT_EVERY])
    if not len(train) or not len(held):
        raise MissingData(f"--data {folder}: {len(train)} images to train on, {len(held)} held out")
    names = folder / "classes.txt"
    if names.exists():
        classes = len(names.read_text(encoding="utf-8").splitlines())
    else:
        classes = 1 + max(int(part) for shards in (train, held) for part in shards.read_parts("cls"))
    return ShardedImages(train), ShardedImages(held), classes


def _open_files(folder: Path) -> tuple[ImageSource, ImageSource, int]:
    """`train/CLASS/*` and `val/CLASS/*`, or `CLASS/*` alone."""
    split = (folder / "train").is_dir() and (folder / "val").is_dir()
    root = folder / "train" if split else folder
    classes = tuple(sorted(path.name for path in root.iterdir() if path.is_dir()))
    if not classes:
        raise MissingData(f"--data {folder}: no folder per class", hint="train/CLASS/*.jpg and val/CLASS/*.jpg")
    images = _list_images(root, classes)
    held = _list_images(folder / "val", classes) if split else images[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = images if split else [one for n, one in enumerate(images, 1) if n % HELD_OUT_EVERY]
    if not train or not held:
        raise MissingData(f"--data {folder}: {len(train)} images to train on, {len(held)} held out")
    return ImageFiles(train), ImageFiles(held), len(classes)


def _list_images(root: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """List the images in the same order on every host."""
    return [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((root / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]


def load_pillow() -> Any:
    return load_package("PIL.Image", "--data of images", package="pillow", extra="images")


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
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    return Workload(
        name="resnet50",
        unit="images",
        units_per_sample=1,
        flops_per_sample=flops_per_image(config.image_size, classes),
        build_model=lambda: ResNet50(classes).to(memory_format=layout),  # type: ignore[call-overload]
        loss=partial(classification_loss, smoothing=config.label_smoothing),
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


def _data(config: Config) -> tuple[Dataset, Dataset, int]:
    if config.data is not None:
        return open_images(
            Path(config.data), side=config.image_size, channels_last=config.channels_last, augment=config.augment
        )
    count = SYNTHETIC_SAMPLES if config.train_samples is None else config.train_samples
    return _synthetic(config, count), _synthetic(config, SYNTHETIC_HELD_OUT), IMAGENET_CLASSES


def _synthetic(config: Config, count: int) -> SyntheticImages:
    return SyntheticImages(count, side=config.image_size, classes=IMAGENET_CLASSES, channels_last=config.channels_last)
