"""The way of options from the command line to the script: typed values at each hop (docs/architecture.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commandline import within
from imagefile import write_image
from msgspec.structs import replace

import hpcjobs
from hpcjobs.job.environment import enter_options
from hpcjobs.job.models import JobSpec, Plan
from hpcjobs.job.options import sbatch_options
from hpcjobs.site.models import UNLIMITED, Containers, Retries

ARGUMENTS = ("--nodes", "4", "--time", "2h", "--retries", "node=5", "--container")


@pytest.fixture
def hops(here: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[JobSpec, Plan, Path]:
    """The request that the command line makes, and the plan of it for a site with containers."""
    image = write_image(here / "train.sif")
    requests: list[JobSpec] = []
    plans: list[Plan] = []
    site = replace(hpcjobs.load_site("tu-hpc"), node_local=(), containers=Containers(runtime="apptainer"))
    real = hpcjobs.plan

    def plan(request: JobSpec, *_: Any, **__: Any) -> Plan:
        requests.append(request)
        plans.append(real(request, site))
        return plans[0]

    monkeypatch.setattr(hpcjobs, "plan", plan, raising=False)
    assert within("submit", *ARGUMENTS, str(image), "--dry-run", "true").code == 0
    return requests[0], plans[0], image


def test_options_are_parsed_where_they_enter_and_text_where_they_leave(hops: tuple[JobSpec, Plan, Path]) -> None:
    request, plan, image = hops
    resources = request.resources
    assert (resources.nodes, resources.time) == (4, "02:00:00")
    assert (request.retries, request.container) == ("node=5", str(image))
    job = plan.job
    assert (job.nodes, job.time_limit_s) == (4, 7200)
    assert job.retries == Retries(timeout=UNLIMITED, preempt=UNLIMITED, node=5, error=0)
    assert job.container is not None
    assert job.container.image == str(image)
    options = dict(sbatch_options(job))
    assert (options["nodes"], options["time"], options["requeue"]) == ("4", "02:00:00", None)
    assert f"--image={image}" in enter_options(job.container, job.env)
    lines = plan.script.splitlines()
    assert {"#SBATCH --nodes=4", "#SBATCH --time=02:00:00", "#SBATCH --requeue"} <= set(lines)
    assert "node=5,error=0" in plan.script
    assert f" --image={image} " in plan.script
