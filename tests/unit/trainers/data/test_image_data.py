"""Images of folders, of WebDataset's tar shards and of Hugging Face's datasets: what each gives, and in which order."""

from __future__ import annotations

import gc
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcjobs import trainers
from hpcjobs.trainers.data import EpochOrder, Loader
from hpcjobs.trainers.workloads.resnet50 import open_images
from hpcjobs.trainers.workloads.tar_shards import TarShards, read_index

image = pytest.importorskip("PIL.Image")
COUNT, SIDE = 23, 32


def picture(number: int) -> Any:
    """Noise, with its number in the colour: each differs from the others wherever it is cut."""
    draws = random.Random(number)
    pixels = bytes(draws.randrange(256) for _ in range(48 * 40 * 3))
    return image.frombytes("RGB", (48, 40), pixels)


def save_folder(folder: Path) -> Path:
    for number in range(COUNT):
        place = folder / "train" / f"class-{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        picture(number).save(place / f"{number:04d}.png")
    (folder / "val").symlink_to("train")
    return folder


def save_shards(folder: Path) -> Path:
    webdataset = pytest.importorskip("webdataset")
    folder.mkdir()
    for shard, numbers in enumerate((range(9), range(9, COUNT))):
        with webdataset.TarWriter(str(folder / f"train-{shard:03d}.tar")) as writer:
            for number in numbers:
                writer.write(
                    {"__key__": f"{number:04d}", "png": picture(number), "cls": number % 2, "json": {"n": number}}
                )
    return folder


def save_dataset(folder: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["even", "odd"])})
    columns = {"image": [picture(n) for n in range(COUNT)], "label": [n % 2 for n in range(COUNT)]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(folder)
    return folder


SAVE = {"folder": save_folder, "shards": save_shards, "dataset": save_dataset}


def read_epoch(
    data: Any, *, world: int, batch: int, first_sample: int = 0, workers: int = 0
) -> list[tuple[bytes, int]]:
    """Pictures and labels in the order of the global batches of all ranks."""
    dealt = []
    for rank in range(world):
        order = EpochOrder(len(data), rank, world, batch, 0, 3, first_sample=first_sample, fill=False)
        batches = list(Loader(data, device=torch.device("cpu"), workers=workers).epoch(order))
        pairs = [pair for pictures, labels in batches for pair in zip(pictures, labels.tolist(), strict=True)]
        dealt.append([(one.numpy().tobytes(), label) for one, label in pairs])
    return [dealt[n % world][n // world] for n in range(sum(map(len, dealt)))]


@pytest.mark.parametrize("kind", SAVE)
def test_every_world_sees_the_same_augmented_samples_in_the_same_order_also_from_the_middle_on(
    kind: str, tmp_path: Path
) -> None:
    train, _, classes = open_images(SAVE[kind](tmp_path / kind), side=SIDE, channels_last=False, augment=True)
    assert classes == 2
    alone = read_epoch(train, world=1, batch=4)
    assert len(set(alone)) == len(train)
    assert read_epoch(train, world=2, batch=2) == alone
    assert read_epoch(train, world=3, batch=2, first_sample=8) == alone[8:]
    assert read_epoch(train, world=1, batch=4, workers=2) == alone


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_shards_hold_what_webdataset_itself_reads_of_them(tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "shards")
    webdataset = pytest.importorskip("webdataset")
    paths = sorted(folder.glob("*.tar"))
    theirs = list(webdataset.WebDataset([str(path) for path in paths], shardshuffle=False))
    ours = TarShards.open(paths)
    assert [sample["__key__"].decode() for sample in map(ours.__getitem__, range(COUNT))] == [
        one["__key__"] for one in theirs
    ]
    for number, sample in enumerate(theirs):
        assert {name: ours[number][name] for name in ("png", "cls", "json")} == {
            name: sample[name] for name in ("png", "cls", "json")
        }
    assert json.loads(ours[17]["json"]) == {"n": 17}
    del theirs
    gc.collect()  # webdataset leaves its files to the collector, which warns of each


def test_the_index_of_a_shard_is_written_through_no_link_that_lies_there(tmp_path: Path) -> None:
    """Who may write to the folder of the data puts links in the place of all temporary names that can be guessed."""
    shard, own = save_shards(tmp_path / "shards") / "train-000.tar", tmp_path / "own"
    own.write_text("mine")
    (shard.parent / f".{shard.name}.index.{os.getpid()}").symlink_to(own)
    members = read_index(shard)
    assert own.read_text() == "mine"
    assert read_index(shard) == members
    assert not shard.with_name("train-000.tar.index").is_symlink()


def test_the_index_of_a_shard_is_made_once_and_anew_when_the_shard_changes(tmp_path: Path) -> None:
    first = save_shards(tmp_path / "shards") / "train-000.tar"
    members = read_index(first)
    index = first.with_name("train-000.tar.index")
    index.write_text("somebody\twrote\t1\t2\n")
    assert read_index(first) == [("somebody", "wrote", 1, 2)]
    second = first.with_name("train-001.tar").read_bytes()
    first.write_bytes(second)
    assert len(read_index(first)) == 3 * (COUNT - 9) != len(members)


def test_the_same_folder_of_a_dataset_trains_and_holds_out_every_tenth(tmp_path: Path) -> None:
    for kind in ("shards", "dataset"):
        train, held_out, _ = open_images(SAVE[kind](tmp_path / kind), side=SIDE, channels_last=True, augment=True)
        assert (len(train), len(held_out)) == (21, 2)
        first, again = (held_out.read_augmented([1], seed)[0] for seed in (1, 2))
        assert torch.equal(first, again), "what is held out is not augmented"


def test_resnet50_trains_on_shards_with_smoothed_labels(tmp_path: Path) -> None:
    flags = ["--workload", "resnet50", "--image-size", "32", "--batch-size", "4", "--steps", "1", "--no-probe"]
    data = ["--data", str(save_shards(tmp_path / "shards")), "--label-smoothing", "0.1"]
    assert trainers.run("ddp", [*flags, *data, "--run-dir", str(tmp_path / "run")]) == 0


def test_a_compressed_shard_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train-0.tar").write_bytes(b"\x1f\x8b compressed")
    flags = ["--workload", "resnet50", "--data", str(tmp_path), "--run-dir", str(tmp_path / "run")]
    assert trainers.run("ddp", flags) == 15
    assert "train-0.tar can't be read as a tar file" in capsys.readouterr().err
