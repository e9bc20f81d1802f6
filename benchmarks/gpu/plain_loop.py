"""A training loop as one would write it without hpcjobs, to compare with: no metering, checkpoints or evaluation.

python -m gpu.plain_loop WORKLOAD ...  prints one line of JSON: the median time of a step after the warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import cast

import torch

from hpcjobs.trainers.config import Config
from hpcjobs.trainers.workloads import load_workload

WARMUP_STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=("resnet50", "lm"))
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--sequence-length", type=int)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--precision", choices=("bf16", "fp16"), required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), {"bf16": torch.bfloat16, "fp16": torch.float16}[args.precision]
    workload = load_workload(
        Config(
            workload=args.workload, preset=args.preset, sequence_length=args.sequence_length,
            image_size=args.image_size, device=args.device,
        )
    )  # fmt: skip
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = workload.convolutions
    model = workload.build_model().to(device)
    forward = torch.compile(model) if args.compile else model
    if args.workload == "resnet50":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=workload.lr, momentum=0.9, weight_decay=workload.weight_decay, fused=True
        )
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=workload.lr, weight_decay=workload.weight_decay, fused=True
        )
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    batch = [part.to(device) for part in workload.train.read_batch(range(args.batch_size))]

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times_s = []
    for _ in range(args.steps):
        wait()
        began = time.perf_counter()
        with torch.autocast(device.type, dtype):
            loss = cast(torch.Tensor, workload.loss(forward, batch))
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        wait()
        times_s.append(time.perf_counter() - began)
    print(json.dumps({"step_s": statistics.median(times_s[WARMUP_STEPS:] or times_s), "loss": float(loss)}))


if __name__ == "__main__":
    main()
