"""Images to classify: files, tar shards, a saved dataset, or made up on the spot. Bytes, not floats, leave here."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hpcjobs.runtime.exits import BadData, MissingData
from hpcjobs.trainers.workloads.base import Batch, move_numbers
from hpcjobs.trainers.workloads.saved_dataset import is_saved_dataset, load_saved_dataset
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
    return (
        Images(train, side, channels_last, augment),
        Images(held_out, side, channels_last),
        classes,
    )


def _open_dataset(folder: Path) -> tuple[ImageSource, ImageSource, int]:
    parts = load_saved_dataset(folder, option="--data", columns=("image", "label"), held_out_every=HELD_OUT_EVERY)
    label = parts.train.features["label"]
    classes = getattr(label, "num_classes", None) or 1 + max(parts.train["label"])
    return DatasetImages(parts.train, folder), DatasetImages(parts.held_out, folder), classes


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
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingData("--data of images needs the package pillow", hint="pip install 'hpcjobs[images]'") from error
    return Image
