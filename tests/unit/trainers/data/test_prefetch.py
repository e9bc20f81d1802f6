"""Copies of batches to a GPU, with fakes in the place of CUDA's streams and torch's meta device in that of the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hpcjobs.trainers.data import EpochOrder, Loader, prefetch
from hpcjobs.trainers.workloads.lm import SyntheticTokens
from hpcjobs.trainers.workloads.matmul import Numbers
from hpcjobs.trainers.workloads.resnet50 import SyntheticImages

GPU, CPU = torch.device("meta"), torch.device("cpu")


class FakeStream:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: FakeStream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")


class FakeCuda:
    """Of torch.cuda what copies need; notes what happens in which order, and on which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.on = self.main = FakeStream("main", self.events)
        copy = torch.Tensor.to

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            self.events.append("pin")
            return tensor

        def to(tensor: torch.Tensor, device: Any, **settings: Any) -> torch.Tensor:
            self.events.append(f"copy {int(tensor[0])} on {self.on.name} {settings}")
            return copy(tensor, device, **settings)

        def record(tensor: torch.Tensor, stream: FakeStream) -> None:
            self.events.append(f"held for {stream.name}")

        for name, fake in (("pin_memory", pin), ("to", to), ("record_stream", record)):
            monkeypatch.setattr(torch.Tensor, name, fake)

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream("side", self.events)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.main

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.on = stream
        yield
        self.on = self.main


def test_the_next_batch_is_copied_on_a_side_stream_from_pinned_memory_before_the_current_one_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    batches = iter([{"x": torch.tensor([number]), "name": number} for number in range(2)])
    for batch in prefetch(batches, GPU, cuda=cuda):
        assert batch["x"].device == GPU
        cuda.events.append(f"step {batch['name']}")
    copy, take = "copy {} on side {{'non_blocking': True}}", ["main waits for side", "held for main"]
    assert cuda.events == [
        *("pin", copy.format(0), *take),
        *("pin", copy.format(1), "step 0"),
        *(*take, "step 1"),
    ]


def test_on_a_cpu_batches_pass_through_untouched_and_none_is_read_ahead() -> None:
    batches = iter([torch.zeros(1)])
    assert prefetch(batches, CPU) is batches
    assert list(prefetch(iter(()), CPU)) == []


def test_an_epoch_without_batches_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    assert list(prefetch(iter(()), GPU, cuda=cuda)) == []
    assert cuda.events == []


@pytest.mark.parametrize(
    "dataset",
    [
        SyntheticTokens(64, length=8, vocabulary=32),
        SyntheticImages(64, side=4, classes=10, channels_last=True),
        SyntheticImages(64, side=4, classes=10, channels_last=False),
    ],
)
def test_synthetic_data_is_made_on_the_gpu_without_workers_or_copies(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    order = EpochOrder(64, 0, 1, 16, 0, 0)
    on_gpu = list(Loader(dataset, device=GPU, workers=4).epoch(order))
    on_cpu = list(Loader(dataset, device=CPU, workers=0).epoch(order))
    assert len(on_gpu) == len(on_cpu) == 4
    for made, read in zip(on_gpu, on_cpu, strict=True):
        assert [(t.device, t.shape, t.dtype, t.stride()) for t in made] == [
            (GPU, t.shape, t.dtype, t.stride()) for t in read
        ]


def test_synthetic_data_on_a_device_has_the_values_of_the_host() -> None:
    for dataset in (
        SyntheticTokens(64, length=8, vocabulary=32),
        SyntheticImages(9, side=4, classes=3, channels_last=True),
    ):
        moved: Any = dataset.on_device(CPU)
        assert all(map(torch.equal, moved.read_batch([5, 3]), dataset.read_batch([5, 3])))


def test_samples_that_are_only_counted_need_no_copy() -> None:
    batches = Loader(Numbers(8), device=GPU, workers=4).epoch(EpochOrder(8, 0, 1, 8, 0, 0))
    assert [len(batch[0]) for batch in batches] == [8]


@pytest.mark.parametrize(
    "dataset",
    [
        SyntheticTokens(64, length=8, vocabulary=32),
        SyntheticImages(64, side=4, classes=10, channels_last=False),
    ],
)
def test_a_batch_made_on_a_gpu_does_not_wait_for_the_step_before(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from memory that is not pinned waits for all that the GPU has been given."""
    made = dataset.on_device(GPU)
    cuda = FakeCuda(monkeypatch)
    first, _ = made.read_batch([3, 1, 2])
    assert first.device == GPU
    assert cuda.events == ["pin", "copy 3 on main {'non_blocking': True}"]
