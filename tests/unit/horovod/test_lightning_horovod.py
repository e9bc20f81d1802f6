"""Lightning over Horovod gives the losses of Lightning's own DDP, whatever the loop does."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch", exc_type=ImportError)
if find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)

from conftest import ranks_by_hand
from free_ports import free_port

# Ranks begin with different weights; the windows of 3 batches leave a rest; gradients are clipped; the rate falls.
PROGRAM = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch, torchmetrics
from torch import nn
import lightning.pytorch as pl

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.metric, self.seen = torchmetrics.MeanMetric(), []

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])

    def training_step(self, batch, number):
        loss = self.loss(batch)
        self.seen.append(float(self.all_gather(loss.detach()).mean()))
        return loss

    def validation_step(self, batch, number):
        loss = self.loss(batch)
        self.metric.update(loss)
        self.log("held out", loss, sync_dist=True)

    def on_validation_epoch_end(self):
        self.seen.append(float(self.metric.compute()))
        self.metric.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

def fit(name, epochs, accumulate, precision="32-true", start=None):
    torch.manual_seed(7)
    x = torch.randn(64, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1).sin())
    torch.manual_seed(1 if name == "ddp" or os.environ["RANK"] == "0" else 99)
    if name == "ddp":
        strategy, devices = pl.strategies.DDPStrategy(process_group_backend="gloo"), 2
    else:
        from hpcjobs.trainers.strategies.lightning_horovod import HorovodStrategy
        strategy, devices = HorovodStrategy(), 1
    model = Net()
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=epochs, accumulate_grad_batches=accumulate,
        gradient_clip_val=0.05, precision=precision, logger=False, default_root_dir=name, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(model, loader, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=start)
    trainer.save_checkpoint(f"{name}.ckpt")
    return [*model.seen, float(trainer.callback_metrics["held out"]), float(sum(p.sum() for p in model.parameters()))]

name = sys.argv[1]
seen = {"plain": fit(name, 2, 1), "taken up": fit(name, 3, 1, start=f"{name}.ckpt"),
        "accumulated": fit(name, 2, 3), "bf16": fit(name, 1, 1, "bf16-mixed")}
if os.environ["RANK"] == "0":
    open(f"{name}.json", "w").write(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    root: Path = tmp_path_factory.mktemp("lightning")
    (root / "program.py").write_text(PROGRAM, encoding="utf-8")
    for name in ("ddp", "horovod"):
        agent = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "MASTER_PORT": str(free_port())}
        ended = ranks_by_hand(2, [sys.executable, "program.py", name], root, agent)
        assert ended.codes == [0, 0], ended
    return {name: json.loads((root / f"{name}.json").read_text(encoding="utf-8")) for name in ("ddp", "horovod")}


@pytest.mark.parametrize("case", ["plain", "accumulated", "bf16", "taken up"])
def test_losses_metrics_and_weights_are_those_of_lightnings_ddp(
    case: str, seen: dict[str, dict[str, list[float]]]
) -> None:
    assert seen["horovod"][case] == pytest.approx(seen["ddp"][case], rel=1e-5)
