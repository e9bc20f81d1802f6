"""A resolved job as options of sbatch, spelled as each site wants them."""

from __future__ import annotations

import pytest

import hpcjobs
from hpcjobs.errors import ConfigError, RequestError

BASE = "partitions: {main: {nodes: 4, node: {cpus: 64, mem: 64G, gpus: 4, gpu_model: a100}}}\n"


def sent(here: object, site: str = "", **options: object) -> list[str]:
    """The ``#SBATCH`` lines, without those every job has."""
    from pathlib import Path

    Path("site.yaml").write_text(BASE + site)
    script = hpcjobs.plan(["true"], site="./site.yaml", **options).script  # type: ignore[arg-type]
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    usual = ("job-name=", "partition=", "nodes=", "ntasks-per-node=", "output=", "open-mode=")
    return [line for line in lines if not line.startswith(usual)]


@pytest.mark.parametrize(
    ("style", "line"),
    [
        ("gres", ["gres=gpu:a100:4"]),
        ("gpus-per-node", ["gpus-per-node=a100:4"]),
        ("gpus-per-task", ["gpus-per-task=a100:2"]),
    ],
)
def test_gpus_are_asked_for_as_the_site_wants(here: object, style: str, line: list[str]) -> None:
    assert sent(here, f"gpu_request: {style}\n", gpus_per_node=4, ntasks_per_node=2) == line
    assert sent(here, f"gpu_request: {style}\n", gpus_per_node=0) == []


def test_gpus_that_tasks_cannot_share_evenly_are_refused(here: object) -> None:
    with pytest.raises(RequestError, match="cannot be shared evenly by ntasks_per_node=3"):
        sent(here, "gpu_request: gpus-per-task\n", gpus_per_node=4, ntasks_per_node=3)


def test_a_site_that_takes_no_gpu_request_says_so(here: object) -> None:
    with pytest.raises(RequestError, match="this site takes no GPU request"):
        sent(here, "gpu_request: none\n", gpus_per_node=1)


@pytest.mark.parametrize(
    ("style", "line"), [("mem", ["mem=60G"]), ("mem-per-cpu", ["mem-per-cpu=10240M"]), ("none", [])]
)
def test_memory_is_asked_for_as_the_site_wants(here: object, style: str, line: list[str]) -> None:
    output = {"mem": "60G", "ntasks_per_node": 3, "cpus_per_task": 2}
    assert sent(here, f"memory_request: {style}\n", **output) == ["cpus-per-task=2", *line]


def test_the_whole_nodes_memory_has_no_share_per_cpu(here: object) -> None:
    assert sent(here, mem="0") == ["mem=0"]
    assert sent(here, "memory_request: mem-per-cpu\n", mem="0") == []


def test_a_site_renames_and_removes_options_and_adds_its_own(here: object) -> None:
    site = (
        'directives: {account: "wckey={value}", time: null, exclusive: exclusive=user}\n'
        "sbatch: [--no-requeue, hint=nomultithread]\n"
    )
    assert sent(here, site, exclusive=True) == ["exclusive=user", "no-requeue", "hint=nomultithread"]
    assert sent(here, site, account="phys", time="2h") == ["wckey=phys", "no-requeue", "hint=nomultithread"]


def test_a_partition_can_be_left_out_for_sites_that_choose_it_themselves(here: object) -> None:
    sent(here, "directives: {partition: null}\n")
    script = hpcjobs.plan(["true"], site="./site.yaml").script
    assert "--partition" not in script


def test_flags_stand_without_a_value_and_false_ones_not_at_all(here: object) -> None:
    assert sent(here, exclusive=True, hold=True, contiguous=False, comment="it's $HOME") == [
        "exclusive", "comment='it'\"'\"'s $HOME'", "hold",
    ]  # fmt: skip


def test_an_array_has_a_log_for_each_task(here: object) -> None:
    assert sent(here, array="0-9%2") == ["array=0-9%2"]
    script = hpcjobs.plan(["true"], site="./site.yaml", array="0-9").script
    assert "/logs/%x_%A_%a.out" in script


def test_a_directive_of_the_site_with_a_newline_never_reaches_a_script(here: object) -> None:
    with pytest.raises((ConfigError, RequestError)):
        sent(here, 'sbatch: ["comment=a\\nrm -rf"]\n')
    with pytest.raises((ConfigError, RequestError)):
        sent(here, 'sbatch: ["a\\nrm -rf"]\n')


def test_other_resources_and_gpus_share_one_gres_line(here: object) -> None:
    """Of two lines Slurm takes the last: the GPUs would be lost in silence."""
    assert sent(here, "gpu_request: gres\n", gpus_per_node=4, gres="nvme:100") == ["gres=gpu:a100:4,nvme:100"]
    site = "gpu_request: gres\nsbatch: ['gres=nvme:100', 'gres=shard:1']\n"
    assert sent(here, site, gpus_per_node=1) == ["gres=gpu:a100:1,nvme:100,shard:1"]


def test_gpus_that_a_site_adds_to_those_of_the_job_are_refused(here: object) -> None:
    with pytest.raises(RequestError, match=r"requested twice: --gres=1 and --gpus-per-node=a100:2"):
        sent(here, "sbatch: ['gres=gpu:1']\n", gpus_per_node=2)
    with pytest.raises(RequestError, match="requested twice"):
        sent(here, "gpu_request: gres\nsbatch: ['gres=gpu:1']\n", gpus_per_node=2)


def test_gpus_named_in_one_layer_replace_those_of_the_site_whatever_the_spelling(here: object) -> None:
    assert sent(here, "defaults: {gres: 'gpu:4,nvme:10'}\n", gpus_per_node=1) == [
        "gpus-per-node=a100:1",
        "gres=nvme:10",
    ]
    assert sent(here, "defaults: {gpus_per_node: 4}\n", gres="gpu:2") == ["gpus-per-node=a100:2"]
