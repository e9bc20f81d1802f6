"""What an image costs: the start of 8 ranks, the way to the first all-reduce, and `import torch`, against none.

It needs the sandbox (``hpcjobs sandbox up``, as root), Apptainer (containers/install_apptainer.sh) and an image with
torch: ``IMAGE=horovod_cpu`` (hpcjobs container build) or a file. Files are read from memory, as by the second job of a
day.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from harness import compete, parse_no_arguments, report

import hpcjobs
from hpcjobs.containers.images import find
from hpcjobs.containers.look import program_here
from hpcjobs.errors import HpcJobsError
from hpcjobs.site.library import load_site
from hpcjobs.site.machine import current_sandbox

IMAGE, ROUNDS = os.environ.get("IMAGE", "horovod_cpu"), int(os.environ.get("ROUNDS", "11"))
STAMP = 'date +%s.%N >"$HPCJOBS_RUN_DIR/begun-$RANK"'
FIRST = """
import os, pathlib, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
(pathlib.Path(os.environ["HPCJOBS_RUN_DIR"]) / f"begun-{os.environ['RANK']}").write_text(str(time.time()))
dist.destroy_process_group()
"""
SITE = """
partitions: {{any: {{nodes: 2, node: {{cpus: 8}}}}}}
defaults: {{time: 5m, partition: null}}
slurm_conf: {slurm_conf}
mpi: pmix
interface: eth0
setup: ['date +%s.%N >"$run_dir/script"']
containers: {{runtime: apptainer, program: {program}}}
"""


def main() -> None:
    parse_no_arguments(__doc__)
    record, here = current_sandbox(), load_site("local")
    program = program_here(here)
    try:
        image = find(IMAGE, here, source="IMAGE").path
    except HpcJobsError as error:
        print(f"not run: {error}")
        return
    if record is None or not Path(program).is_absolute():
        print("not run: it needs `hpcjobs sandbox up` and containers/install_apptainer.sh")
        return
    os.environ["SLURM_CONF"] = record.slurm_conf
    with tempfile.TemporaryDirectory(dir="/var/lib") as folder:  # every host of the sandbox sees it
        os.chdir(folder)
        Path("first.py").write_text(FIRST)
        Path("bench.yaml").write_text(SITE.format(slurm_conf=record.slurm_conf, program=program))
        start = ("bash", "-c", STAMP)
        for title, arguments, per_node, unit in (
            ("start of 8 ranks on 2 nodes", start, 4, "start"),
            ("first all-reduce of 2 ranks on 2 nodes", ("first.py",), 1, "first-step"),
        ):
            places = {"on the node": "none", "in an image": image}
            ways = {name: partial(by_job, arguments, per_node, place) for name, place in places.items()}
            outcome = compete("on the node", ways, rounds=ROUNDS, name=unit)
            report(f"Job script to {title}", outcome, unit="ms")
        inside = (program, "--quiet", "exec", "--no-home", image, "python3", "-c", "import torch")
        bare = (sys.executable, "-c", "import torch")
        ways = {"from a folder": partial(took_ms, *bare), "from a SIF": partial(took_ms, *inside)}
        outcome = compete("from a folder", ways, rounds=ROUNDS, name="import")
        report("import torch, one process, with the start of Python and of the image", outcome, unit="ms")


def by_job(arguments: tuple[str, ...], per_node: int, container: str) -> float:
    """Milliseconds from the job script's first lines to the last rank's own stamp."""
    plan = hpcjobs.plan(
        arguments,
        site="./bench.yaml",
        nodes=2,
        ntasks_per_node=per_node,
        container=container,
        name="bench",
        made_by="bench",
    )
    assert hpcjobs.submit(plan).wait() == 0
    stamps = [float(path.read_text()) for path in plan.run_dir.glob("begun-*")]
    assert len(stamps) == 2 * per_node
    return (max(stamps) - float((plan.run_dir / "script").read_text())) * 1e3


def took_ms(*command: str) -> float:
    begun = time.monotonic()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return (time.monotonic() - begun) * 1e3


if __name__ == "__main__":
    main()
