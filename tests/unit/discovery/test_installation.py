"""``hpcjobs doctor``: what it finds, and what it keeps to itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import ok, within

from hpcjobs.discovery.installation import examine
from hpcjobs.errors import CommandMissingError
from hpcjobs.processes.programs import Result


@pytest.fixture
def cluster(here: Path) -> str:
    path = here / "ours.yaml"
    partition = "{default: true, nodes: 2, node: {cpus: 4, mem: 8G}}"
    path.write_text(f"scheduler: slurm\npartitions: {{cpu: {partition}}}\nrun_root: {here}/runs\n")
    return str(path)


def findings(site: str, answers: dict[str, Result]) -> dict[str, tuple[str, str]]:
    def runner(argv: tuple[str, ...], **_: object) -> Result:
        if argv[0] not in answers:
            raise CommandMissingError(f"{argv[0]} is not on PATH")
        return answers[argv[0]]

    return {finding.subject: (finding.verdict, finding.text) for finding in examine(site, runner=runner)}  # type: ignore[arg-type]


def test_a_controller_that_does_not_answer_and_a_missing_program_are_wrong(cluster: str) -> None:
    seen = findings(cluster, {"scontrol": Result(1, "", "unable to contact slurm controller")})
    assert seen["controller"][0] == seen["accounting"][0] == "wrong"
    assert "unable to contact slurm controller" in seen["controller"][1]
    assert "sacctmgr is not on PATH" in seen["accounting"][1]


def test_a_cluster_that_answers_is_ok(cluster: str) -> None:
    seen = findings(cluster, {"scontrol": Result(0, "slurm 24.11.5\n", ""), "sacctmgr": Result(0, "ours\n", "")})
    assert seen["Slurm"][0] == seen["accounting"][0] == seen["clock"][0] == "ok"
    assert "slurm 24.11.5" in seen["Slurm"][1]


def test_the_node_of_a_job_is_examined_on_request(here: Path) -> None:
    lines = ok("doctor", "--site", "local", "--run").out.splitlines()
    (node,) = (line for line in lines if line.startswith("node"))
    assert node.split()[1] == "ok"
    assert "Python 3." in node
    assert "torch" in node
    assert "the clock of the node differs by +0.0 s" in node


def test_a_site_that_cannot_be_read_is_wrong_and_named(here: Path) -> None:
    Path("bad.yaml").write_text("partitons: {}\n")
    answer = within("doctor", "--site", "./bad.yaml")
    assert answer.code == 1
    assert "bad.yaml:1" in answer.out


def test_the_report_has_neither_the_users_name_nor_the_home_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setenv("WANDB_API_KEY", "secret-value")
    monkeypatch.setattr("hpcjobs.discovery.installation.user_name", lambda: "anna7")
    (here / "anna7").mkdir()
    monkeypatch.chdir(here / "anna7")
    out = ok("doctor", "--site", "local").out
    assert str(here) not in out
    assert "anna7" not in out
    assert "secret-value" not in out
    assert "~/USER" in out
