"""A request in Python: typed, or by keywords; each option of a job declared once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commandline import ok, within
from msgspec.structs import replace

import hpcjobs
from hpcjobs.cli.options import job_flags
from hpcjobs.errors import RequestError
from hpcjobs.job.models import JobSpec, Layer
from hpcjobs.site.models import Resources, Site

EXAMPLES: dict[str, tuple[list[str], object]] = {
    "name": (["mine"], "mine"), "launcher": (["torchrun"], "torchrun"), "env": (["A=1"], {"A": "1"}),
    "template": (["job"], "job"), "chdir": (["."], "."), "retries": (["on"], "on"), "signal_before": (["5m"], "5m"),
    "preflight": ([], True), "spare": (["1"], 1), "min_nodes": (["1"], 1), "container": (["none"], "none"),
    "stage_image": ([], True), "snapshot": ([], True),
    "wrap": (["true"], "true"), "no_check": ([], True), "monitor": ([], True),
    "notify": (["mail"], ("mail",)), "notify_on": (["end"], "end"),
    "sbatch": (["delay-boot=10"], ("delay-boot=10",)),
    "srun": (["cpu-bind=cores"], ("cpu-bind=cores",)), "metric": (["lammps"], ("lammps",)),
}  # fmt: skip


def sandbox() -> Site:
    return replace(hpcjobs.load_site("sandbox"), node_local=())  # a test's folder is in /tmp


def test_a_typed_request_and_keywords_plan_the_same_job(here: Path) -> None:
    request = JobSpec(program=("true", "--lr", "1"), name="mine", resources=Resources(nodes=2, time="2h"))
    typed = hpcjobs.plan(request, sandbox())
    named = hpcjobs.plan("true --lr 1", sandbox(), name="mine", nodes=2, time="2h")
    assert typed.job == named.job
    assert typed.made_by == named.made_by == "hpcjobs.plan: true --lr 1"


def test_keywords_win_over_a_typed_request_and_both_over_a_layer(here: Path) -> None:
    below = Layer("job.yaml", JobSpec(name="below", resources=Resources(nodes=2, time="1h", qos="low")))
    request = JobSpec(program=("true",), name="typed", resources=Resources(nodes=3, time="2h"))
    job = hpcjobs.plan(request, sandbox(), spec=below, nodes=1).job
    assert (job.name, job.nodes, job.resources.time, job.resources.qos) == ("typed", 1, "02:00:00", "low")
    assert (job.sources["qos"], job.sources["time"]) == ("job.yaml", "flag")


def test_a_value_of_another_type_in_a_typed_request_is_refused_by_its_name() -> None:
    wrong: Any = "train.py"
    with pytest.raises(RequestError, match="program: "):
        hpcjobs.plan(JobSpec(program=wrong), "local")
    with pytest.raises(RequestError, match="cpus_per_task: "):
        hpcjobs.plan(JobSpec(program=("true",), resources=Resources(cpus_per_task=wrong)), "local")


def test_a_keyword_that_is_no_option_is_answered_with_the_nearest() -> None:
    with pytest.raises(RequestError) as caught:
        hpcjobs.plan("true", "local", retrys="on")
    assert "retries" in str(caught.value)


def test_the_public_names_are_all_that_the_package_lists() -> None:
    assert dir(hpcjobs) == sorted(hpcjobs.__all__)
    assert {"JobSpec", "Resources", "plan", "submit"} <= set(dir(hpcjobs))


def test_every_option_of_a_job_has_a_flag_from_its_declaration() -> None:
    """A field that is added to JobSpec without one would be out of the command line's reach."""
    assert set(job_flags()) == set(JobSpec.__struct_fields__) - {"program", "resources", "figures"}
    assert set(EXAMPLES) == set(job_flags())


@pytest.mark.parametrize("field", EXAMPLES)
def test_every_option_of_a_job_is_in_help_and_reaches_the_request(
    field: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, value = EXAMPLES[field]
    seen: list[JobSpec] = []

    def plan(request: JobSpec, *rest: Any, **named: Any) -> Any:
        seen.append(request)
        raise RequestError("seen")

    monkeypatch.setattr(hpcjobs, "plan", plan, raising=False)
    flag = "--" + field.replace("_", "-")
    assert within("submit", flag, *arguments, "true").code == 5
    assert seen == [replace(JobSpec(program=("true",)), **{field: value})]
    assert flag in ok("submit", "--help").out


def test_a_switch_that_is_not_given_leaves_a_spec_file_its_say(here: Path) -> None:
    (here / "job.yaml").write_text(json.dumps({"program": ["true"], "snapshot": True}))
    assert json.loads(ok("submit", "--site", "local", "--spec", "job.yaml", "--dry-run", "--json").out)["job"][
        "snapshot"
    ]


@pytest.mark.parametrize("gres", ["gpu:+4", "GPU:4", "gpu : 4", "gpu:4k", "nvme:1,gpu:-1"])
def test_a_request_for_gpus_that_cannot_be_counted_is_refused(here: Path, gres: str) -> None:
    """Ranks are counted by GPUs."""
    (here / "site.yaml").write_text("partitions: {main: {nodes: 2, node: {cpus: 4, gpus: 4}}}\n")
    answer = within("submit", "--site", "./site.yaml", "--dry-run", "--gres", gres, "true")
    assert (answer.code, "is not understood; write gpu:4, or gpu:v100:4 for a model" in answer.err) == (5, True), answer
