"""What a site file can say of a cluster's peculiarities, in the script and in what is refused before Slurm sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import ok, within
from scripted_slurm import answer

from hpcjobs.errors import ConfigError, RequestError
from hpcjobs.files import user_name

NODES = "nodes: 4, node: {cpus: 64, mem: 256G"
SITE = f"partitions: {{cpu: {{{NODES}}}}}, gpu: {{{NODES}, gpus: 4, gpu_model: a100}}, PARTITION}}}}\n"


def site(here: Path, keys: str = "", *, partition: str = "max_nodes: 4", text: str = SITE) -> None:
    (here / "mine.yaml").write_text(text.replace("PARTITION", partition) + keys + "\n")


def script(*arguments: str) -> list[str]:
    """The #SBATCH options of a job, and the line that starts its tasks."""
    lines = ok("submit", "--site", "./mine.yaml", "--dry-run", *arguments, "true").out.splitlines()
    return [line.removeprefix("#SBATCH --") for line in lines if line.startswith(("#SBATCH", "srun"))]


def refusal(*arguments: str) -> str:
    refused = within("submit", "--site", "./mine.yaml", "--dry-run", *arguments, "true")
    assert refused.code == RequestError.exit_code, refused
    return refused.err


def test_an_option_that_a_site_or_partition_requires_is_missed_before_slurm_sees_the_job(here: Path) -> None:
    site(here, "required: [account]", partition="required: [qos, time]")
    message = refusal("-p", "gpu")
    assert "account: site mine needs one: use --account" in message
    assert "qos: partition gpu needs one: use --qos" in message
    assert "time: partition gpu needs one" in message
    assert "account=a" in script("-A", "a")
    assert "qos=q" in script("-p", "gpu", "-A", "a", "-q", "q", "-t", "1h")
    site(here, "required: [acount]")
    wrong = within("submit", "--site", "./mine.yaml", "--dry-run", "true")
    assert wrong.code == ConfigError.exit_code
    assert "no option of a job; did you mean 'account'?" in wrong.err


def test_defaults_per_gpu_are_for_jobs_that_have_some(here: Path) -> None:
    site(here, partition="defaults: {cpus_per_gpu: 16, mem_per_gpu: 60G}")
    with_gpus = script("-p", "gpu", "--gpus-per-node", "2")
    assert "cpus-per-task=16" in with_gpus
    assert "mem-per-gpu=60G" in with_gpus
    without = script("-p", "gpu")
    assert not [line for line in without if line.startswith(("cpus-per", "mem-per"))]
    assert "cannot be shared evenly" in refusal("-p", "gpu", "--cpus-per-gpu", "3")
    assert "mem=8G" in script("-p", "gpu", "--gpus-per-node", "2", "--mem", "8G")


MIG = """\
partitions:
  gpu:
    nodes:
      - {count: 2, cpus: 64, gpu_models: [a100:2, 1g.5gb:14]}
      - {count: 1, cpus: 64, gpus: 4, gpu_model: a100}
"""


@pytest.mark.parametrize(
    "arguments", [("--gpus-per-node", "1g.5gb:3"), ("-o", "gres=gpu:1g.5gb:3")], ids=lambda arguments: arguments[0]
)
def test_slices_of_gpus_are_requested_by_their_type_and_counted_by_it(here: Path, arguments: tuple[str, ...]) -> None:
    site(here, "gpu_request: gres", text=MIG)
    lines = script(*arguments)
    assert "gres=gpu:1g.5gb:3" in lines
    assert "ntasks-per-node=3" in lines
    assert "gpus_per_node=1g.5gb:15 (flag): a node of partition gpu has a100:2, 1g.5gb:14 or 4" in refusal(
        "--gpus-per-node", "1g.5gb:15"
    )
    assert "gres=gpu:a100:4" in script("--gpus-per-node", "a100:4")
    assert "partition gpu has 1 nodes with what each node" in refusal("-N", "2", "--gpus-per-node", "a100:4")


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("[a100:2, a100:3]", "a type is named twice"),
        ("[a100]", "gpu_models 'a100' is not understood"),
        ("['4']", "write TYPE:COUNT"),
        ("[a100:2, b:1], gpus: 4", "leave gpus and gpu_model out"),
    ],
)
def test_a_mistake_in_the_types_of_gpus_is_named(here: Path, models: str, message: str) -> None:
    site(here, text=f"partitions: {{gpu: {{nodes: 1, node: {{cpus: 4, gpu_models: {models}}}}}}}\n")
    assert message in within("submit", "--site", "./mine.yaml", "--dry-run", "true").err


def test_licences_are_compared_with_those_that_slurm_counts(here: Path) -> None:
    site(here, "licenses: {matlab: 10, fluent@server: 4}")
    assert "licenses=matlab:10,fluent@server" in script("-L", "matlab:10,fluent@server")
    assert "no licence 'matlb'; did you mean 'matlab'?" in refusal("-L", "matlb")
    assert "there are 4 of fluent@server" in refusal("-L", "matlab,fluent@server:5")
    site(here)
    assert "licenses=anything:99" in script("-L", "anything:99")


def test_mail_goes_to_the_domain_of_the_site(here: Path) -> None:
    site(here, "mail_domain: centre.example")
    assert f"mail-user={user_name()}@centre.example" in script("--mail-type", "END")
    assert f"mail-user={user_name()}@centre.example" in script("--notify", "mail")
    assert "mail-user=anna@centre.example" in script("--mail-type", "END", "--mail-user", "anna")
    assert "mail-user=anna@home.example" in script("--mail-type", "END", "--mail-user", "anna@home.example")
    assert not [line for line in script() if line.startswith("mail")]


def test_exclusive_nodes_and_switches_are_defaults_of_a_partition(here: Path) -> None:
    site(here, partition="defaults: {exclusive: true, switches: 1@2h}")
    lines = script("-p", "gpu")
    assert "exclusive" in lines
    assert "switches=1@2h" in lines
    assert "exclusive" not in script()
    assert "exclusive" not in script("-p", "gpu", "-o", "exclusive=")


def test_memory_is_requested_per_cpu_where_the_site_takes_nothing_else(here: Path) -> None:
    site(here, "memory_request: mem-per-cpu")
    lines = script("--mem", "64G", "-n", "4", "-N", "1", "-c", "8")
    assert "mem-per-cpu=2048M" in lines
    assert not [line for line in lines if line.startswith("mem=")]


@pytest.mark.parametrize("mpi", ["cray_shasta", "pmi2", "pmix_v4"])
def test_the_tasks_are_started_by_the_mpi_type_of_the_site(here: Path, mpi: str) -> None:
    site(here, f"mpi: {mpi}")
    assert f" --mpi={mpi} " in script("-N", "2")[-1]


def test_another_cluster_of_a_federation_is_refused_with_what_to_do(here: Path) -> None:
    site(here)
    assert "give that cluster a site with its slurm_conf" in refusal("-o", "clusters=other")


def test_a_site_of_another_cluster_submits_where_the_other_commands_ask_that_cluster_too(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site(here, "sbatch: ['clusters=other']")
    (here / "bin").mkdir()
    answer(here / "bin", "sbatch", "echo '7;other'")
    monkeypatch.setenv("PATH", f"{here}/bin:/usr/bin:/bin")
    refused = within("submit", "--site", "./mine.yaml", "--parsable", "true")
    assert refused.code == RequestError.exit_code
    assert "export SLURM_CLUSTERS=other" in refused.err
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    assert ok("submit", "--site", "./mine.yaml", "--parsable", "true").out.startswith("7")


def test_a_users_variable_for_another_cluster_sends_no_job_to_this_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch goes where SBATCH_CLUSTERS says; hpcjobs hides the variable from it."""
    site(here)
    (here / "bin").mkdir()
    answer(here / "bin", "sbatch", "echo 7")
    monkeypatch.setenv("PATH", f"{here}/bin:/usr/bin:/bin")
    monkeypatch.setenv("SBATCH_CLUSTERS", "other")
    refused = within("submit", "--site", "./mine.yaml", "--parsable", "true")
    assert refused.code == RequestError.exit_code
    assert "SBATCH_CLUSTERS (environment)" in refused.err
    assert not (here / "bin" / "sbatch.asked").exists()
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    assert ok("submit", "--site", "./mine.yaml", "--parsable", "true").out.startswith("7")


def test_a_job_of_several_components_is_refused_with_what_to_do(here: Path) -> None:
    site(here)
    (here / "het.sbatch").write_text("#!/bin/bash\n#SBATCH -n1\n#SBATCH hetjob\n#SBATCH -n2\nsrun true\n")
    refused = within("submit", "--site", "./mine.yaml", "--dry-run", "het.sbatch")
    assert refused.code == RequestError.exit_code
    assert "jobs of several components are not supported" in refused.err
    assert "sbatch" in refused.err
