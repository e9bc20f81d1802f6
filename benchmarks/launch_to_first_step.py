"""From the start of the job script to the first all-reduce of Horovod, by launcher, against a bare ``srun``.

Needs the sandbox (``hpcjobs sandbox up``, as root) and Horovod; the baseline is an sbatch script of two lines.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from harness import compete, parse_no_arguments, report

import hpcjobs
from hpcjobs.site.machine import current_sandbox

NODES, PER_NODE, ROUNDS = 2, 1, int(os.environ.get("ROUNDS", "11"))
LAUNCHERS = ("srun", "mpirun", "horovod-gloo")
PROGRAM = """
import pathlib, time
import horovod.torch as hvd, torch
hvd.init()
hvd.allreduce(torch.ones(1))
if hvd.rank() == 0:
    assert hvd.size() == {ranks}
    pathlib.Path("first-step").write_text(str(time.time()))
"""
SITE = """
partitions:
  any: {{nodes: {nodes}, node: {{cpus: 8}}}}
defaults: {{time: 5m, partition: null}}
slurm_conf: {slurm_conf}
mpi: pmix
interface: eth0
setup: ['date +%s.%N >begun']
"""
BARE = """#!/bin/bash
date +%s.%N >begun
srun --mpi=pmix --ntasks-per-node={per_node} {python} first.py
"""


def main() -> None:
    parse_no_arguments(__doc__)
    record = current_sandbox()
    if record is None or find_spec("horovod") is None:
        print("not run: it needs `hpcjobs sandbox up` and `make horovod`")
        return
    os.environ["SLURM_CONF"] = record.slurm_conf
    with tempfile.TemporaryDirectory(dir="/var/lib") as folder:  # every host of the sandbox sees it
        os.chdir(folder)
        Path("first.py").write_text(PROGRAM.format(ranks=NODES * PER_NODE))
        Path("bare.sh").write_text(BARE.format(per_node=PER_NODE, python=sys.executable))
        Path("bench.yaml").write_text(SITE.format(nodes=NODES, slurm_conf=record.slurm_conf))
        contestants = {f"hpcjobs, {name}": lambda name=name: by_launcher(name) for name in LAUNCHERS}
        outcome = compete("bare srun", {"bare srun": bare, **contestants}, rounds=ROUNDS)
    report(f"Job script to first all-reduce, {NODES} nodes x {PER_NODE}", outcome, unit="ms")


def by_launcher(name: str) -> float:
    plan = hpcjobs.plan(
        ["first.py"], site="./bench.yaml", launcher=name, nodes=NODES, ntasks_per_node=PER_NODE, made_by="a benchmark"
    )
    handle = hpcjobs.submit(plan)
    handle.wait()
    return took_ms()


def bare() -> float:
    layout = (f"--nodes={NODES}", f"--ntasks-per-node={PER_NODE}", "--output=bare.out")
    subprocess.run(["sbatch", "--wait", *layout, "bare.sh"], check=True, stdout=subprocess.DEVNULL)
    return took_ms()


def took_ms() -> float:
    begun, first = Path("begun"), Path("first-step")
    ms = (float(first.read_text()) - float(begun.read_text())) * 1e3
    begun.unlink()
    first.unlink()
    return ms


if __name__ == "__main__":
    main()
