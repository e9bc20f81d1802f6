"""A model and data from outside the package: the files that docs/own_workload.md shows, and variations of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from hpcjobs import trainers
from hpcjobs.runtime.dist import DistEnv
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.data import Stream, TrainingData, adapt_training_data
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.optimization import TrainingPlan, make_schedule
from hpcjobs.trainers.workloads.base import ParameterGroup, Workload, classification_loss

from ..conftest import REPOSITORY, Runs
from ..fsdp_here import runnable
from ..worlds import Points

PAGE = REPOSITORY / "docs" / "own_workload.md"
SPIRALS = ("--workload", "spirals:spirals", "--width", "16", "--steps", "12", "--log-every", "1", "--no-probe")
NAMES = ("ddp", "ddp_scratch", "fsdp", "fsdp_scratch", "lightning ddp", "lightning fsdp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of the page, on the path of this process and of ranks."""
    folder = tmp_path_factory.mktemp("own")
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S):
        (folder / name).write_text(code, encoding="utf-8")
    (folder / "broken.py").write_text(BROKEN, encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def test_the_files_of_the_page_are_as_short_as_it_says(folder: Path) -> None:
    lengths = {
        name: sum(bool(line.strip()) and "import" not in line for line in (folder / name).read_text().splitlines())
        for name in ("spirals.py", "spiral_data.py")
    }
    assert lengths["spirals.py"] <= 30
    assert lengths["spiral_data.py"] <= 20


def test_a_model_and_data_from_outside_have_equal_losses_under_every_strategy_and_world_size(
    folder: Path, tmp_path: Path
) -> None:
    one, two = Runs(tmp_path / "one", 1), Runs(tmp_path / "two", 2)
    for runs in (one, two):
        runs.root.mkdir()
        for name in ("spirals.py", "spiral_data.py"):  # ranks start in this folder
            (runs.root / name).write_text((folder / name).read_text())
    one.run(("ddp", "ddp", (*SPIRALS, "--batch-size", "16")))
    kinds = []
    for name in runnable(NAMES):
        trainer, strategy = name.split()[0], name.split()[1:]
        flags = ("--strategy", *strategy) if strategy else ()
        kinds.append((name, trainer, (*flags, *SPIRALS, "--batch-size", "4", "--accumulate", "2")))
    saving = ("--checkpoint-every", "3", "--checkpoint-keep", "9", "--batch-size", "8")
    chained = runnable(("fsdp_scratch", "fsdp", "ddp_scratch", "fsdp_scratch"))
    kinds += [
        ("chain", name, (*SPIRALS, *saving, "--steps", str(3 * number))) for number, name in enumerate(chained, 1)
    ]
    two.run(*kinds)
    assert two["chain"].losses() == pytest.approx(one["ddp"].losses()[: 3 * len(chained)], rel=2e-4)  # of two groups
    reference = one["ddp"]
    assert len(reference.losses()) == 12
    for name in runnable(NAMES):
        assert two[name].losses() == pytest.approx(reference.losses(), rel=2e-4), name
        own = [line["metrics"] for line in two[name].lines("step")]
        assert own == [pytest.approx(line["metrics"]) for line in reference.lines("step")]
        assert two[name].summary.evaluation is not None
        assert set(two[name].summary.evaluation.metrics) == {"accuracy"}
        assert two[name].summary.config["width"] == 16
        assert two[name].summary.workload == "spirals"


def test_own_flags_are_shown_by_help_with_their_text_and_default(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        trainers.run("ddp", ["--workload", "spirals:spirals", "--help"])
    shown = capsys.readouterr().out
    assert "spirals:spirals:" in shown
    assert re.search(r"--width WIDTH +units per layer \[32\]", shown)


BROKEN = """
import torch
from hpcjobs.trainers.workloads.base import Workload
def nothing(config): return Workload(name="x")
def other(config): return 3
def clash(config, *, seed: int = 1): ...
def odd(config, *, shape: list = ()): ...
def needs(config, *, classes: int): ...
def empty(): ...
def two(config, width): ...
def stream(config):
    from torch import nn
    return Workload(build_model=lambda: nn.Linear(1, 1), loss=print, train=iter(()))
def number(config):
    from torch import nn
    return Workload(build_model=lambda: nn.Linear(1, 1), loss=print, train=3)
def negative(config, *, no_probe: bool = False): ...
def pair(config, *, mixed: bool = True, no_mixed: bool = False): ...
def make(loss=None, *, item=lambda n: (torch.ones(2) * n, n % 2), held_out=None, model=lambda: torch.nn.Linear(2, 2)):
    loss = loss or (lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]))
    train = [item(n) for n in range(8)]
    return Workload(build_model=model, loss=loss, train=train, held_out=held_out, batch_size=4)
def empty_held_out(config): return make(held_out=[])
def no_sample(config): return make(item=lambda n: None)
def no_loss(config): return make(lambda model, batch: None)
def number_loss(config): return make(lambda model, batch: 1.0)
def loss_per_sample(config): return make(lambda model, batch: model(batch[0]).sum(1))
def loss_without_gradient(config): return make(lambda model, batch: torch.tensor(1.0))
def metric_per_sample(config): return make(lambda model, batch: (model(batch[0]).mean(), {"norms": torch.ones(3)}))
def no_model(config): return make(model=lambda: None)
def no_weights(config): return make(model=torch.nn.Identity)
"""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("spirals:spiral", "no function spiral: did you mean spirals?"),
        ("spiralz:spirals", "no module is called 'spiralz'"),
        ("broken:nothing", "missing 3 required keyword-only arguments: 'build_model', 'loss', and 'train'"),
        ("broken:other", "returned a int, not a Workload"),
        ("broken:clash", "its parameter seed has the name of a flag of every trainer, --seed"),
        ("broken:odd", "the parameter shape of odd has the type"),
        ("broken:needs", "the following arguments are required: --classes"),
        ("broken:empty", "empty() takes no config; write def empty(config, *, ...)"),
        ("broken:two", "its parameter width has no default and comes before the *"),
        ("broken:stream", "has no length: --steps N"),
        ("broken:number", "train of the workload number is a int without __len__ and __getitem__"),
        ("broken:negative", "its parameter no_probe has the name of a flag of every trainer, --no-probe"),
        ("broken:pair", "its parameters mixed and no_mixed both make the flag --no-mixed"),
        ("broken:empty_held_out", "held_out of the workload empty_held_out has no samples. Hint: held_out=None"),
        ("broken:no_sample", "samples of the type NoneType cannot be made into a batch"),
        ("broken:no_loss", "the loss of the workload no_loss is a NoneType, expected a tensor of one number"),
        ("broken:number_loss", "the loss of the workload number_loss is a float, expected a tensor of one number"),
        ("broken:loss_per_sample", "the loss of the workload loss_per_sample has the shape (4,), expected one number"),
        ("broken:loss_without_gradient", "the loss of the workload loss_without_gradient does not depend on the model"),
        (
            "broken:metric_per_sample",
            "the metric norms of the workload metric_per_sample has the shape (3,), expected one",
        ),
        ("broken:no_model", "build_model of the workload no_model returned a NoneType, expected a torch.nn.Module"),
        ("broken:no_weights", "the model of the workload no_weights has no weights to train"),
        ("nonsense", "there are lm, matmul, mnist, resnet50"),
    ],
)
def test_an_own_workload_that_cannot_be_used_is_refused_by_what_is_missing(
    folder: Path, name: str, arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainers.run("ddp", ["--workload", name, "--no-probe", "--run-dir", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert arguments in message
    assert message.count("\n") == 1


def test_strings_of_a_batch_are_divided_among_the_passes_of_a_step_as_its_tensors_are(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, list[str]]] = []

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        seen.append((len(batch["point"]), batch["name"]))
        result: torch.Tensor = model(batch["point"]).mean()
        return result

    samples = [{"point": torch.ones(2), "name": f"n{n}"} for n in range(8)]

    def build(config: Config) -> Workload:
        return Workload(build_model=lambda: torch.nn.Linear(2, 2), loss=loss, train=samples, batch_size=4)

    monkeypatch.setattr(sys.modules["broken"], "other", build)
    flags = ["--workload", "broken:other", "--accumulate", "2", "--no-probe", "--run-dir", str(tmp_path)]
    assert trainers.run("ddp", flags) == 0
    assert [(count, len(names)) for count, names in seen] == [(4, 4), (4, 4)]
    assert {name for _, names in seen for name in names} == {sample["name"] for sample in samples}


def test_an_own_optimizer_and_schedule_step_the_groups_at_their_rates(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[list[float]] = []

    class Recording(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            rates.append([group["lr"] for group in self.param_groups])
            super().step(closure)

    def build(config: Config) -> Workload:
        return Workload(
            build_model=lambda: torch.nn.Linear(2, 2), loss=classification_loss, train=Points(64), batch_size=8, lr=0.5,
            optimizer=lambda groups, lr: Recording(groups, lr=lr), schedule=lambda step, steps: 1 - step / steps,
            parameter_group=lambda name, parameter: ParameterGroup(lr_scale=2.0 if name == "bias" else 1.0),
        )  # fmt: skip

    monkeypatch.setattr(sys.modules["broken"], "other", build)
    flags = ["--workload", "broken:other", "--steps", "4", "--warmup-steps", "2", "--run-dir", str(tmp_path)]
    assert trainers.run("ddp_scratch", flags) == 0
    assert rates == [[0.25, 0.5], [0.5, 1.0], [0.5, 1.0], [0.25, 0.5]]


class Numbers(IterableDataset[int]):
    """A shuffled pass over numbers; another order in each pass."""

    def __init__(self, count: int) -> None:
        self.count, self.pass_number = count, 0

    def set_epoch(self, number: int) -> None:
        self.pass_number = number

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.pass_number)
        for number in torch.randperm(self.count, generator=generator).tolist():
            yield 100 * self.pass_number + number


class SizedNumbers(Numbers):
    def __len__(self) -> int:
        return self.count


def read(dataset: object, world_size: int, steps: range, *, workers: int = 0, per_epoch: int = 100) -> list[list[int]]:
    """The samples of all ranks in each step, of a global batch of 8."""
    ranks = []
    for rank in range(world_size):
        env = DistEnv(rank, 0, world_size, 1, rank, "localhost", 1, "test")
        group = RankGroup(env, ("here",) * world_size, torch.device("cpu"), "gloo")
        stream = adapt_training_data(dataset, None, workload="numbers")
        length = per_epoch * 8 if not hasattr(dataset, "__len__") else len(dataset)
        plan = TrainingPlan(
            world_size=world_size,
            batch_size=8 // world_size,
            accumulate=1,
            epochs=9,
            steps_per_epoch=per_epoch,
            total_steps=9 * per_epoch,
            steps_limit=None,
            epochs_limit=9,
            lr=0.1,
            warmup_steps=0,
            epoch_samples=length,
            fill=True,
            schedule=make_schedule("constant", final=1),
        )
        data = TrainingData(stream, Config(workers=workers), group, plan=plan)
        batches = data.epoch(steps.start // per_epoch, steps.start % per_epoch)
        ranks.append([next(batches).tolist() for _ in steps])
    return [sorted(chain.from_iterable(step)) for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (4, 0), (2, 2)])
def test_a_stream_without_length_has_the_same_samples_in_each_step_at_every_world_size_and_after_an_interruption(
    world_size: int, workers: int
) -> None:
    steps = read(Numbers(20), world_size, range(10), workers=workers)
    assert steps == read(Numbers(20), 1, range(10))
    assert steps[6:] == read(Numbers(20), world_size, range(6, 10), workers=workers)
    seen = sorted(chain.from_iterable(steps))
    assert seen == [100 * number + sample for number in range(4) for sample in range(20)]  # 80 samples are 4 passes


def test_a_stream_with_a_length_has_epochs(folder: Path) -> None:
    steps = read(SizedNumbers(16), 2, range(2, 4), per_epoch=2)
    assert sorted(chain.from_iterable(steps)) == list(range(100, 116))


def test_a_stream_that_can_start_anywhere_is_asked_for_a_ranks_samples_alone() -> None:
    class Startable(SizedNumbers):
        def iterate(self, start: int, step: int) -> Iterator[int]:
            return iter(range(start, self.count, step))

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("not all samples are needed")

    steps = read(Startable(24), 2, range(3), per_epoch=3)
    assert list(chain.from_iterable(steps)) == list(range(24))


def test_a_stream_shorter_than_its_length_is_an_error_that_says_so() -> None:
    class Short(SizedNumbers):
        def __len__(self) -> int:
            return 30

    with pytest.raises(Exception, match="ended after 16 samples, but its length says 30"):
        read(Short(16), 2, range(4))


def test_an_object_that_has_nothing_to_read_is_refused() -> None:
    assert isinstance(adapt_training_data(Numbers(3), None, workload="x"), Stream)
    with pytest.raises(Exception, match="train of the workload x is a object without"):
        adapt_training_data(object(), None, workload="x")
