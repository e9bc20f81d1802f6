"""Totals of tasks and GPUs, as sbatch takes them, over the nodes of a site."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import ok, within

import hpcjobs
from hpcjobs.errors import RequestError
from hpcjobs.job.models import Job

SITE = """
partitions:
  gpu: {default: true, nodes: 16, node: {cpus: 32, mem: 256G, gpus: 4, gpu_model: a100}, defaults: {gpus_per_node: 4}}
  cpu: {nodes: 8, node: {cpus: 16, mem: 64G}}
defaults: {nodes: 1}
"""


@pytest.fixture
def site(here: Path) -> str:
    (here / "site.yaml").write_text(SITE)
    return "./site.yaml"


def layout(site: str, **stated: object) -> tuple[int, int, int]:
    job = planned(site, **stated)
    return job.nodes, job.ntasks_per_node, job.gpus_per_node


def planned(site: str, **stated: object) -> Job:
    return hpcjobs.plan(["true"], site=site, **stated).job  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"gpus": 8}, (2, 4, 4)),
        ({"gpus": 2}, (1, 2, 2)),
        ({"gpus": 6}, (2, 3, 3)),
        ({"gpus": 8, "nodes": 4}, (4, 2, 2)),
        ({"gpus": 8, "ntasks": 16}, (2, 8, 4)),
        ({"gpus": 8, "gpus_per_task": 2}, (2, 2, 4)),
        ({"ntasks": 8, "gpus_per_task": 1}, (2, 4, 4)),
        ({"ntasks": 8}, (2, 4, 4)),
        ({"ntasks_per_node": 2, "gpus_per_task": 2}, (1, 2, 4)),
        ({"gpus": 4, "ntasks_per_gpu": 2}, (1, 8, 4)),
        ({"ntasks": 32, "partition": "cpu"}, (2, 16, 0)),
        ({"ntasks": 32, "cpus_per_task": 4, "partition": "cpu"}, (8, 4, 0)),
        ({"ntasks": 12, "nodes": 3, "partition": "cpu"}, (3, 4, 0)),
        ({"ntasks": 12, "ntasks_per_node": 4, "partition": "cpu"}, (3, 4, 0)),
        ({"ntasks": 1, "partition": "cpu"}, (1, 1, 0)),
    ],
)
def test_totals_become_numbers_per_node(site: str, stated: dict[str, object], expected: tuple[int, int, int]) -> None:
    assert layout(site, **stated) == expected


def test_cpus_per_gpu_become_cpus_of_each_task(site: str) -> None:
    assert planned(site, gpus=4, cpus_per_gpu=8).resources.cpus_per_task == 8
    assert planned(site, gpus=4, ntasks_per_node=2, cpus_per_gpu=8).resources.cpus_per_task == 16


def test_totals_of_the_flags_win_over_nodes_of_the_site_and_share_those_of_a_spec(site: str) -> None:
    Path("job.yaml").write_text("resources: {nodes: 4}\n")
    assert layout(site, spec="job.yaml", gpus=8) == (4, 2, 2)


@pytest.mark.parametrize(
    ("stated", "text"),
    [
        ({"ntasks": 7, "nodes": 2}, "ntasks=7 (flag): nodes=2 (flag) cannot divide it evenly"),
        ({"gpus": 6, "nodes": 4}, "gpus=6 (flag): nodes=4 (flag) cannot divide it evenly"),
        ({"ntasks": 8, "nodes": 2, "ntasks_per_node": 2}, "is 4 on each of nodes=2 (flag): ntasks_per_node=2 (flag)"),
        ({"ntasks": 8, "nodes": "2-4"}, "is shared by a number of nodes, not by a range"),
        ({"gpus": 7, "gpus_per_task": 2}, "gpus=7 (flag) is no multiple of gpus_per_task=2 (flag)"),
        (
            {"gpus_per_node": 3, "ntasks_per_node": 2, "gpus_per_task": 2},
            "x ntasks_per_node=2 (flag) = 4 GPUs per node",
        ),
        ({"gpus": 0, "cpus_per_gpu": 2}, "the CPUs of 0 GPUs cannot be shared evenly"),
        ({"ntasks": 0}, "ntasks must be positive"),
        ({"gpus": "four"}, "gpus 'four' is not understood"),
        ({"gpus": 4, "gres": "gpu:2"}, "beside gpus=4: GPUs are requested twice"),
        ({"ntasks": 9999}, "partition gpu allows 16"),
    ],
)
def test_what_cannot_be_shared_is_explained(site: str, stated: dict[str, object], text: str) -> None:
    with pytest.raises(RequestError) as caught:
        layout(site, **stated)
    assert text in str(caught.value)


def test_gpus_are_requested_once_whatever_the_site_says_of_them(site: str) -> None:
    """The default of the partition and another spelling must not both reach sbatch."""
    for stated in ({"gpus": "a100:2"}, {"gpus_per_task": 1}, {"gres": "gpu:1"}, {"gpus_per_node": 2}):
        script = hpcjobs.plan(["true"], site=site, **stated).script  # type: ignore[arg-type]
        lines = [line for line in script.splitlines() if line.startswith(("#SBATCH --gpus", "#SBATCH --gres"))]
        assert len(lines) == 1, lines


def test_memory_per_cpu_takes_the_place_of_the_sites_memory_per_node(here: Path) -> None:
    (here / "site.yaml").write_text(SITE.replace("{nodes: 1}", "{nodes: 1, mem: 8G}"))
    script = hpcjobs.plan(["true"], site="./site.yaml", mem_per_cpu="2G").script
    assert "--mem-per-cpu=2G" in script
    assert "--mem=8G" not in script


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"nodelist": "n[1-2]"}, (2, 1, 0)),
        ({"nodelist": "n1,n[1-2]"}, (2, 1, 0)),
        ({"nodelist": "n[1-2]", "ntasks": 4}, (2, 2, 0)),
        ({"nodelist": "n1", "ntasks": 32}, (2, 16, 0)),
        ({"nodelist": "n[1-2]", "nodes": 3}, (3, 1, 0)),
        ({"nodelist": "n[1-3]", "nodes": 2, "spare": 1}, (2, 1, 0)),
        ({"nodelist": "n[1-2]", "nodes": "1-2"}, (1, 1, 0)),
    ],
)
def test_a_job_has_at_least_the_nodes_that_it_names(
    site: str, stated: dict[str, object], expected: tuple[int, int, int]
) -> None:
    """sbatch refuses fewer: ``invalid number of nodes (-N 2-1)``."""
    assert layout(site, partition="cpu", **stated) == expected


@pytest.mark.parametrize("field", ["nodelist", "nodefile"])
@pytest.mark.parametrize(
    ("text", "stated", "expected"),
    [
        ("n1\nn2\nn3\n", {}, (3, 1, 0)),
        ("# ours\nn[1-2], n3 # the last one\n\n", {}, (3, 1, 0)),
        ("n1*2\nn2*2\n", {}, (2, 1, 0)),
        ("n1\nn2\n", {"ntasks": 4}, (2, 2, 0)),
        ("n1\nn2\n", {"nodes": 3}, (3, 1, 0)),
    ],
)
def test_a_job_has_the_nodes_that_stand_in_a_file(
    site: str, field: str, text: str, stated: dict[str, object], expected: tuple[int, int, int]
) -> None:
    Path("hosts.txt").write_text(text)
    name = "hosts.txt" if field == "nodefile" else "./hosts.txt"
    job = planned(site, partition="cpu", **{field: name}, **stated)
    assert (job.nodes, job.ntasks_per_node, job.gpus_per_node) == expected
    assert str(job.resources.nodelist).startswith(("n1,n2", "n1,n1,n2"))


def test_files_of_nodes_are_options_of_sbatch_and_their_mistakes_are_explained(site: str) -> None:
    Path("hosts.txt").write_text("n1\nn2\n")
    Path("odd.txt").write_text("n1\nn[a-b]\n")
    Path("empty.txt").touch()
    submit = ("submit", "--site", site, "--dry-run", "-p", "cpu")
    for option in (("-F", "hosts.txt"), ("-w", "./hosts.txt"), ("-o", "nodefile=hosts.txt")):
        assert "#SBATCH --nodes=2\n" in ok(*submit, *option, "true").out
    for arguments, text in (
        (("-F", "gone"), "nodefile=gone (flag): the file of nodes cannot be read: No such file or directory"),
        (("-w", "./odd.txt"), "nodelist=./odd.txt (flag): line 2, 'n[a-b]': no list of nodes"),
        (("-F", "empty.txt"), "nodefile=empty.txt (flag): the file names no node"),
        (("-F", "hosts.txt", "-w", "n1"), "nodelist=n1 (flag) beside nodefile=hosts.txt (flag): both name the nodes"),
        (("-F", "hosts.txt", "-N", "1"), "names 2 nodes: nodes=1 (flag) contradicts it"),
    ):
        refused = within(*submit, *arguments, "true")
        assert (refused.code, text in refused.err) == (5, True), refused


@pytest.mark.parametrize(
    ("stated", "text"),
    [
        ({"nodelist": "n[1-2]", "nodes": 1}, "nodelist=n[1-2] (flag) names 2 nodes: nodes=1 (flag) contradicts it"),
        ({"nodelist": "n[1-3]", "nodes": "1-2"}, "names 3 nodes: nodes=1-2 (flag) contradicts it"),
        ({"nodelist": "n[1-2]", "ntasks": 1}, "cannot divide it evenly"),
        ({"nodelist": "n[a-b]"}, "nodelist 'n[a-b]': 'a-b' in a host list is no number and no range"),
        ({"nodelist": "n[1-999999999]"}, "is a range of more than 65536 hosts"),
    ],
)
def test_a_list_of_nodes_that_no_job_can_have_is_refused(site: str, stated: dict[str, object], text: str) -> None:
    with pytest.raises(RequestError) as caught:
        layout(site, partition="cpu", **stated)
    assert text in str(caught.value)
