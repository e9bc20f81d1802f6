"""Images to classify: a folder of files, or a small set made up on the spot. Bytes, not floats, leave here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hpcjobs.runtime.exits import BadData, MissingData
from hpcjobs.trainers.workloads.base import Batch

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
HELD_OUT_EVERY = 10  # of a folder that has no part of its own to hold out
MARGIN = 8 / 7  # an image's shorter side before its middle is cut out: 256 for 224
DIFFERENT = 64  # made-up images


class SyntheticImages:
    """A few random pictures over and over, each with its own label: reading them costs one copy."""

    def __init__(self, count: int, *, side: int, classes: int, channels_last: bool) -> None:
        self.count, self.classes, self.channels_last = count, classes, channels_last
        pixels = torch.Generator().manual_seed(0)
        shape = (min(DIFFERENT, count), side, side, 3)
        self.pictures = torch.randint(0, 256, shape, dtype=torch.uint8, generator=pixels)

    def __len__(self) -> int:
        return self.count

    def read_batch(self, indices: Sequence[int]) -> Batch:
        which = torch.as_tensor(indices) % len(self.pictures)
        return channels_first(self.pictures[which], self.channels_last), which % self.classes


class ImageFiles:
    """Files with their labels; the middle square of each, `side` pixels wide. Not augmented."""

    def __init__(self, files: Sequence[tuple[Path, int]], *, side: int, channels_last: bool) -> None:
        self.files, self.side, self.channels_last = files, side, channels_last

    def __len__(self) -> int:
        return len(self.files)

    def read_batch(self, indices: Sequence[int]) -> Batch:
        chosen = [self.files[index] for index in indices]
        pictures = torch.stack([self._picture(path) for path, _ in chosen])
        return channels_first(pictures, self.channels_last), torch.tensor([label for _, label in chosen])

    def _picture(self, path: Path) -> torch.Tensor:
        """[side, side, 3] bytes."""
        image = _pillow()
        try:
            with image.open(path) as file:
                picture = file.convert("RGB")
        except OSError as error:
            raise BadData(f"--data: {path} can't be read as an image: {error}") from error
        scale = MARGIN * self.side / min(picture.size)
        width, height = (max(self.side, round(scale * length)) for length in picture.size)
        left, top = (width - self.side) // 2, (height - self.side) // 2
        cut = picture.resize((width, height), image.Resampling.BILINEAR).crop(
            (left, top, left + self.side, top + self.side)
        )
        return torch.frombuffer(bytearray(cut.tobytes()), dtype=torch.uint8).view(self.side, self.side, 3)


def channels_first(pictures: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """[n, side, side, 3] -> [n, 3, side, side]; with channels last in memory that is another view of the same."""
    turned = pictures.permute(0, 3, 1, 2)
    return turned if channels_last else turned.contiguous()


def image_folder(folder: Path, *, side: int, channels_last: bool) -> tuple[ImageFiles, ImageFiles, tuple[str, ...]]:
    """Training and held-out part, and the classes: `train/CLASS/*` and `val/CLASS/*`, or `CLASS/*` alone."""
    _pillow()
    if not folder.is_dir():
        raise MissingData(f"--data {folder}: no such folder")
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
    parts = (ImageFiles(part, side=side, channels_last=channels_last) for part in (train, held))
    return next(parts), next(parts), classes


def _list_images(root: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """In an order that is the same on every host."""
    return [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((root / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingData("--data of images needs the package pillow", hint="pip install pillow") from error
    return Image
