"""What a rank costs from its start to its end around a single step, in CPU time, against a script by hand.

Nearly all of it is loading torch, and torch._dynamo, which torch's optimizers load. The script by hand has a model of
the same family, DistributedDataParallel and AdamW; it neither evaluates nor writes a record, as the trainer does.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial

from harness import compete, cpu_ms, parse_no_arguments, report

ROUNDS = int(os.environ.get("ROUNDS", "11"))
BY_HAND = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
model = torch.nn.Sequential(torch.nn.Embedding(256, 64), layer, torch.nn.Linear(64, 256))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(256, (16, 64))
loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
loss.backward()
optimizer.step()
print(loss.item())
dist.destroy_process_group()
"""
COLLECTING = """
import gc, sys
gc.disable = gc.freeze = lambda: None
from hpcjobs.trainers.ddp import main
sys.exit(main())
"""
ONE_STEP = ("--workload", "lm", "--steps", "1")


def main() -> None:
    parse_no_arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        cost = partial(cpu_ms, cwd=folder)
        contestants = {
            "by hand": lambda: cost([sys.executable, "-c", BY_HAND]),
            "hpcjobs.trainers.ddp": lambda: cost([sys.executable, "-m", "hpcjobs.trainers.ddp", *ONE_STEP]),
            "the same, Python's collector left on": lambda: cost([sys.executable, "-c", COLLECTING, *ONE_STEP]),
        }
        outcome = compete("by hand", contestants, rounds=ROUNDS)
    report("One rank, one step, from start to end, CPU time", outcome, unit="ms")


if __name__ == "__main__":
    main()
