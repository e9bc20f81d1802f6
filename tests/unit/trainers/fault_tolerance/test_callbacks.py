"""Lightning's Trainer and Hugging Face's with our callbacks: stopped by a signal, they go on with the same losses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from free_ports import free_port

from hpcjobs.record.summary import RunSummary
from hpcjobs.runtime import checkpoints
from hpcjobs.runtime.exits import BadCheckpoint

from ..conftest import clean_environment, start_rank

LIGHTNING = """
import logging, os, signal, time, warnings
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import torch
from lightning.pytorch import LightningModule, Trainer
from hpcjobs.callbacks.lightning import RunCallback

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, number):
        step = self.trainer.global_step
        if os.environ.get("TOLD_AT") == f"{self.global_rank}:{step}":
            os.kill(os.getpid(), signal.Signals[os.environ["TOLD_BY"]])
        time.sleep(0.3 if os.environ.get("TOLD_AT") and step >= 14 else 0)
        mine = torch.Generator().manual_seed(2 * step + self.global_rank)
        points = torch.randn(8, 4, generator=mine)
        return ((self.layer(points) - points.sum(1, keepdim=True)) ** 2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

def train():
    torch.manual_seed(0)
    callback = RunCallback(save_every=10)
    data = torch.utils.data.DataLoader(torch.zeros(1000, 1), batch_size=1)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=30, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Module(), data, ckpt_path=callback.find_checkpoint())
"""
HUGGING_FACE = """
import os, signal, time, warnings
warnings.simplefilter("ignore")
import torch
import transformers
from hpcjobs.callbacks.huggingface import RunCallback

transformers.logging.set_verbosity_error()

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 160
    def __getitem__(self, n):
        points = torch.randn(4, generator=torch.Generator().manual_seed(n))
        return {"points": points, "labels": points.sum()}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.calls = 0
    def forward(self, points, labels):
        self.calls += 1
        if os.environ.get("TOLD_AT") == f"{os.environ['RANK']}:{self.calls}":
            os.kill(os.getpid(), signal.Signals[os.environ["TOLD_BY"]])
        time.sleep(0.3 if os.environ.get("TOLD_AT") and self.calls >= 14 else 0)
        return {"loss": ((self.layer(points).squeeze(1) - labels) ** 2).mean()}

def train():
    torch.manual_seed(0)
    callback = RunCallback()
    output_dir = os.environ["HPCJOBS_RUN_DIR"] + "/hf"
    arguments = transformers.TrainingArguments(
        output_dir, max_steps=30, per_device_train_batch_size=8, logging_steps=1, save_steps=10, report_to=[],
        use_cpu=True, disable_tqdm=True, learning_rate=0.05, ddp_backend="gloo",
    )
    trainer = transformers.Trainer(Model(), arguments, train_dataset=Points(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.find_checkpoint(output_dir))
"""


ACCELERATE = """
import os, signal, time, warnings
warnings.simplefilter("ignore")
import torch
from accelerate import Accelerator
import hpcjobs.runtime

def train():
    run = hpcjobs.runtime.start(total_steps=30)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    saved = run.load()
    if saved is not None:
        accelerator.unwrap_model(model).load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(run.step + 1, 31):
        if os.environ.get("TOLD_AT") == f"{run.rank}:{step}":
            os.kill(os.getpid(), signal.Signals[os.environ["TOLD_BY"]])
        time.sleep(0.3 if os.environ.get("TOLD_AT") and step >= 14 else 0)
        points = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + run.rank))
        loss = ((model(points) - points.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        run.log(step, loss=loss, samples=8)
        if run.should_stop() or step % 10 == 0:
            run.save(step, {"model": accelerator.unwrap_model(model).state_dict(), "optimizer": optimizer.state_dict()})
        if run.stopping:
            run.leave()
    run.finish(loss=loss)
"""


STARTS = """
PLACE = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}

def start(name, told_at, restarts, told_by="SIGUSR1"):
    run_dir = os.path.join(os.environ["RUNS"], name)
    os.makedirs(os.path.join(run_dir, "control"), exist_ok=True)
    os.environ.update(  # Lightning removes WORLD_SIZE at the end
        PLACE, HPCJOBS_RUN_DIR=run_dir, HPCJOBS_CONTROL_DIR=os.path.join(run_dir, "control"), TOLD_AT=told_at,
        SLURM_RESTART_COUNT=restarts, TOLD_BY=told_by,
    )
    try:
        train()
    except SystemExit as left:
        print(name, "left with", left.code, flush=True)

"""
THREE_STARTS = f"""{STARTS}
start("alone", "", "9")
start("told", "1:14", "0")
start("told", "", "1")
"""
KILLED = f"""{STARTS}
if os.environ["START"] == "1":
    start("alone", "", "9")
    start("killed", "1:14", "0", "SIGKILL")
else:
    start("killed", "", "1")
"""


def read_losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]


def run_two_ranks(folder: Path, **env: str) -> tuple[list[int], list[tuple[str, str]]]:
    """Exit codes and output of ``script.py`` as a world of two."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = {**place, "RUNS": str(folder), "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", **env}
    ranks = [start_rank(number, 2, ["script"], settings, folder) for number in range(2)]
    try:
        printed = [rank.communicate(timeout=500) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], printed


SCRIPTS = pytest.mark.parametrize(
    "script", [LIGHTNING, HUGGING_FACE, ACCELERATE], ids=["lightning", "huggingface", "accelerate"]
)


@SCRIPTS
def test_a_trainer_one_of_whose_ranks_is_killed_goes_on_from_its_checkpoint_with_the_same_losses(
    tmp_path: Path, script: str
) -> None:
    """SIGKILL at step 14 loses the steps after the checkpoint of step 10; no line is there twice."""
    (tmp_path / "script.py").write_text(script + KILLED)
    codes, printed = run_two_ranks(tmp_path, START="1")
    assert codes[1] == -signal.SIGKILL, printed
    assert codes[0] not in (0, 85), "the other rank loses its peer"
    codes, printed = run_two_ranks(tmp_path, START="2")
    assert codes == [0, 0], printed
    summary = RunSummary.read(tmp_path / "killed")
    assert (summary.status, summary.steps, summary.resumed_from_step) == ("completed", 30, 10)
    losses = read_losses(tmp_path / "killed")
    assert [number for number, _ in losses] == list(range(1, 31))
    assert losses == read_losses(tmp_path / "alone")


@SCRIPTS
def test_a_trainer_that_is_told_to_end_saves_stops_and_goes_on_with_the_same_losses(
    tmp_path: Path, script: str
) -> None:
    (tmp_path / "script.py").write_text(script + THREE_STARTS)  # in one process: each start would load the library anew
    codes, printed = run_two_ranks(tmp_path)
    assert codes == [0, 0], printed
    assert all("told left with 85\n" in out for out, _ in printed), "the signal reaches rank 1, and both stop"
    out, err = printed[0]
    message = re.search(r"stopped by SIGUSR1 after step (\d+), saved at step (\d+)", out)
    assert message is not None, (out, err)
    step = int(message[1])
    assert (14 <= step < 30, message[2]) == (True, message[1]), "ranks agree within a second or two"
    assert int((tmp_path / "told" / "control" / "requeue").read_text()) == step
    losses = read_losses(tmp_path / "told")
    assert [number for number, _ in losses] == list(range(1, 31))
    assert losses == read_losses(tmp_path / "alone")
    summary = RunSummary.read(tmp_path / "told")
    assert (summary.status, summary.steps, summary.resumed_from_step) == ("completed", 30, step)
    if script != HUGGING_FACE:
        newest, *_ = checkpoints.steps(tmp_path / "told" / "checkpoints")
        assert checkpoints.damage(newest) is None
    else:
        from hpcjobs.callbacks.huggingface import find_damage

        place = tmp_path / "told" / "hf" / "checkpoint-30"
        assert find_damage(place) is None
        (place / "trainer_state.json").write_text("{}")
        assert "trainer_state.json has 2 bytes" in str(find_damage(place))


def of_one_rank(script: str) -> str:
    for of_several in ('strategy="ddp", ', ', ddp_backend="gloo"'):
        script = script.replace(of_several, "")
    return script.replace("devices=2", "devices=1") + "\ntrain()\n"


def start_alone(folder: Path, text: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    (folder / "run").mkdir(exist_ok=True)
    settings = {**clean_environment(), "HPCJOBS_RUN_DIR": str(folder / "run"), "PYTHONWARNINGS": "ignore", **env}
    argv = [sys.executable, "train.py"]
    return subprocess.run(argv, env=settings, cwd=folder, capture_output=True, text=True, check=False, timeout=500)


def run_alone(folder: Path, text: str) -> str:
    done = start_alone(folder, text)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", [LIGHTNING, HUGGING_FACE], ids=["lightning", "huggingface"])
def test_the_first_rank_is_killed_and_no_line_of_metrics_before_its_checkpoint_is_missing(
    tmp_path: Path, script: str
) -> None:
    killed = start_alone(tmp_path, of_one_rank(script), TOLD_AT="0:14", TOLD_BY="SIGKILL")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run_alone(tmp_path, of_one_rank(script))
    assert [number for number, _ in read_losses(tmp_path / "run")] == list(range(1, 31))
    assert RunSummary.read(tmp_path / "run").resumed_from_step == 10


def test_a_checkpoint_of_the_trainer_whose_sums_can_not_be_written_costs_this_checkpoint_alone(tmp_path: Path) -> None:
    (tmp_path / "run" / "hf" / "checkpoint-10" / "hpcjobs.sums.json").mkdir(parents=True)
    ended = start_alone(tmp_path, of_one_rank(HUGGING_FACE))
    assert ended.returncode == 0, ended.stderr
    assert "warning: checkpoint of step 10 not completed: " in ended.stderr
    assert RunSummary.read(tmp_path / "run").steps == 30


EVALUATED = f"""{STARTS}
start("run", "", "0")
"""
IN_LIGHTNING = [
    ("    def configure", "    def validation_step(self, batch, number):\n        time.sleep(1.5)\n    def configure"),
    ("Module(), data, ", "Module(), data, torch.utils.data.DataLoader(torch.zeros(2, 1)), "),
    ("max_steps=30, ", "max_steps=30, val_check_interval=10, num_sanity_val_steps=0, "),
]
IN_HUGGING_FACE = [
    ("save_steps=10, ", "save_steps=10, eval_strategy='steps', eval_steps=10, "),
    ("train_dataset=", "eval_dataset=Points(), train_dataset="),
    (
        "        self.calls += 1\n",
        "        self.calls += self.training\n        time.sleep(0 if self.training else 0.25)\n",
    ),
]


@pytest.mark.parametrize(
    ("script", "changes"),
    [(LIGHTNING, IN_LIGHTNING), (HUGGING_FACE, IN_HUGGING_FACE)],
    ids=["lightning", "huggingface"],
)
def test_evaluations_are_no_part_of_the_time_of_steps(
    tmp_path: Path, script: str, changes: list[tuple[str, str]]
) -> None:
    for old, new in changes:
        assert old in script, old
        script = script.replace(old, new, 1)
    (tmp_path / "script.py").write_text(script + EVALUATED)
    codes, printed = run_two_ranks(tmp_path)
    assert codes == [0, 0], printed
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert max(line["step_time_s"] for line in steps[2:]) < 1.25, "an evaluation takes 1.5 s and more"
    assert steps[-1]["time_s"] > 3, "two evaluations lie before the last step"


FULL = f"""
import resource
from lightning.pytorch import Callback

class Disk(Callback):  # no file may grow beyond 200 kB while it is full, and the state has a megabyte
    def on_train_batch_start(self, trainer, module, batch, number):
        first, last = map(int, os.environ["FULL"].split("-"))
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000 if first <= trainer.global_step <= last else most, most))

{STARTS}
start("run", "", "0")
"""


def write_lightning_on_a_disk(folder: Path) -> None:
    large = LIGHTNING.replace(
        "        self.layer", '        self.register_buffer("ballast", torch.zeros(1 << 18))\n        self.layer', 1
    )
    (folder / "script.py").write_text(large.replace("callbacks=[callback]", "callbacks=[Disk(), callback]") + FULL)


def test_lightning_goes_on_where_a_checkpoint_cannot_be_written(tmp_path: Path) -> None:
    write_lightning_on_a_disk(tmp_path)
    codes, printed = run_two_ranks(tmp_path, FULL="5-14")
    assert codes == [0, 0], printed
    assert "checkpoint of step 10 not written: " in printed[0][1]
    assert "File too large; the run goes on" in printed[0][1]
    places = checkpoints.steps(tmp_path / "run" / "checkpoints")
    assert [place.name for place in places] == ["step-00000030", "step-00000020"]
    assert [checkpoints.damage(place) for place in places] == [None, None]


def test_lightning_whose_last_checkpoint_cannot_be_written_ends_on_every_rank(tmp_path: Path) -> None:
    write_lightning_on_a_disk(tmp_path)
    codes, printed = run_two_ranks(tmp_path, FULL="15-30")
    assert codes == [20, 20], printed
    assert "step 30 can't be saved: " in printed[0][1], printed
    (place,) = checkpoints.steps(tmp_path / "run" / "checkpoints")
    assert (place.name, checkpoints.damage(place)) == ("step-00000010", None)


UNEVEN = """
import warnings
warnings.simplefilter("ignore")
import torch
import transformers
from hpcjobs.callbacks.huggingface import RunCallback

transformers.logging.set_verbosity_error()

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 21
    def __getitem__(self, n):
        return {"points": torch.ones(4), "labels": torch.ones(())}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, points, labels):
        return {"loss": ((self.layer(points).squeeze(-1) - labels) ** 2).mean()}

callback, counts = RunCallback(), []
log = callback.run.log
callback.run.log = lambda step, **values: (counts.append(values["samples"]), log(step, **values))
arguments = transformers.TrainingArguments(
    "out", num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=1,
    save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
)
transformers.Trainer(Model(), arguments, train_dataset=Points(), callbacks=[callback]).train()
print("samples", *counts)
"""
ACCUMULATING = LIGHTNING
for old, new in (
    ("        return ((self.layer(points)", "        return 8.0 + 0 * ((self.layer(points)"),
    ("devices=2", "devices=1"),
    ('strategy="ddp", max_steps=30', "max_steps=6, accumulate_grad_batches=4"),
):
    ACCUMULATING = ACCUMULATING.replace(old, new)


def test_the_hugging_face_callback_counts_the_samples_of_a_smaller_last_step(tmp_path: Path) -> None:
    assert "samples 8 8 5 8 8 5" in run_alone(tmp_path, UNEVEN)


def test_lightning_logs_the_loss_itself_while_gradients_are_accumulated(tmp_path: Path) -> None:
    run_alone(tmp_path, f"{ACCUMULATING}\ntrain()\n")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if line["kind"] == "step"] == [8.0] * 6


def test_lightning_that_starts_its_ranks_itself_is_refused_by_what_to_do(tmp_path: Path) -> None:
    """Each process would take itself for the only one, and write over what the other one saves."""
    (tmp_path / "script.py").write_text(f"{LIGHTNING}\ntrain()\n")
    unset = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM", "HPCJOBS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 10, done.stderr
    assert "Lightning has 2 ranks, and this process was started as one of 1" in done.stderr
    assert "torchrun --nproc-per-node 2" in done.stderr
    assert not (tmp_path / "runs" / "script" / "checkpoints").exists()


def test_lightning_does_not_start_over_where_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from hpcjobs.callbacks.lightning import RunCallback

    (tmp_path / "step-00000010").mkdir()
    printed: list[str] = []
    callback = SimpleNamespace(_folder=tmp_path, run=SimpleNamespace(print=printed.append))
    with pytest.raises(BadCheckpoint, match="none of 1 checkpoints"):
        RunCallback.find_checkpoint(callback)  # type: ignore[arg-type]
    assert printed[0].startswith("passing over the damaged checkpoint step-00000010")
