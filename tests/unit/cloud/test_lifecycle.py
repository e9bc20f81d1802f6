"""`hpcjobs cloud` as a person types it: built by a real Terraform without a cloud behind it, remembered, taken down."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from sites import saved, sized
from stub_provider import serving

from hpcjobs.cloud.check import provider_schema
from hpcjobs.cloud.lifecycle import HeadNode, refuse_while_jobs_run, remember_login, variables
from hpcjobs.cloud.section import resolve_cluster
from hpcjobs.errors import RequestError
from hpcjobs.packing import Wheel
from hpcjobs.processes.programs import Result
from hpcjobs.site.library import load_site

needs_terraform = pytest.mark.skipif(shutil.which("terraform") is None, reason="terraform is not installed")


@pytest.fixture(scope="module")
def stubs() -> Iterator[Mapping[str, str]]:
    with tempfile.TemporaryDirectory() as folder, serving([provider_schema("gcp")], Path(folder)) as environment:
        yield environment


class Person:
    """Types commands; their programs are first in PATH."""

    def __init__(self, stubs: Mapping[str, str], programs: Path) -> None:
        programs.mkdir()
        self._programs = programs
        self._env = {**os.environ, **stubs, "TF_CLI_ARGS": "-no-color", "PATH": f"{programs}:{os.environ['PATH']}"}

    def has(self, program: str, body: str) -> None:
        path = self._programs / program
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(0o755)

    def types(
        self, *arguments: str, code: int = 0, answer: str = "", path: str | None = None, project: str | None = None
    ) -> str:
        env = self._env | ({"PATH": path} if path is not None else {})
        env |= {"TF_VAR_project": project} if project is not None else {}
        done = subprocess.run(
            [sys.executable, "-m", "hpcjobs", "cloud", *arguments],
            env=env,
            input=answer,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, f"{arguments}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def person(stubs: Mapping[str, str], tmp_path: Path) -> Person:
    saved(sized("gcp", nodes=2))
    return Person(stubs, tmp_path / "programs")


@needs_terraform
def test_a_cluster_is_built_remembered_and_taken_down(person: Person, here: Path) -> None:
    folder = here.parent / "home" / ".local" / "state" / "hpcjobs" / "cloud" / "rented"
    assert "Plan: " in person.types("plan", "--site", "rented")
    assert not (folder / "terraform.tfstate").exists()
    person.has("scp", 'echo "$@" >copied')
    person.has("ssh", 'echo "$@" >>connected')
    answer = person.types("up", "--site", "rented", "--yes", "--nodes", "2", "--run", "submit --wait 'a b' ddp")
    assert "Apply complete!" in answer
    connections = Path("connected").read_text(encoding="utf-8").splitlines()
    assert connections[-1].endswith(r"hpcjobs submit --wait 'a b' ddp")
    assert f'UserKnownHostsFile="{folder}/known_hosts"' in connections[0]
    assert f"{folder}/hpcjobs-" in Path("copied").read_text(encoding="utf-8")
    assert "2 nodes: rented-1, rented-2" in answer
    assert "2 nodes: " in person.types("up", "--site", "rented", "--yes"), "a change of the site takes no node away"
    login = load_site("rented").login
    assert login is not None
    assert f"first job: ssh {login} hpcjobs submit --site rented --wait" in answer
    assert stat.S_IMODE((folder / "terraform.tfstate").stat().st_mode) == 0o600
    person.has("ssh", 'echo "$@" >asked; echo 7_RUNNING_you_ddp')
    answer = person.types("down", "--site", "rented", "--yes", code=5)
    assert "1 job in the queue: 7_RUNNING_you_ddp" in answer
    assert login in Path("asked").read_text(encoding="utf-8")
    person.has("ssh", "echo unreachable >&2; exit 255")
    assert "--force does it all the same" in person.types("down", "--site", "rented", "-y", code=5)
    person.has("ssh", "exit 0")
    assert "Destroy complete!" in person.types("down", "--site", "rented", "--yes")
    assert json.loads((folder / "terraform.tfstate").read_text(encoding="utf-8"))["resources"] == []


@needs_terraform
def test_nothing_is_built_by_somebody_who_says_no(person: Person) -> None:
    answer = person.types("up", "--site", "rented", "--dir", "mine", answer="no\n", code=3)
    assert "Apply cancelled" in answer
    assert "terraform apply ended with 1" in answer
    assert not Path("mine/terraform.tfstate").exists()
    assert load_site("rented").login == "login.gcp-t4.example"


@needs_terraform
def test_nodes_are_not_taken_away_while_jobs_are_in_the_queue(person: Person) -> None:
    person.has("scp", "exit 0")
    person.has("ssh", "exit 0")
    person.types("up", "--site", "rented", "--yes", "--nodes", "2")
    person.has("ssh", "echo '7_RUNNING_you_my nice train'")
    answer = person.types("up", "--site", "rented", "--yes", "--nodes", "1", code=5)
    assert "1 job in the queue: 7_RUNNING_you_my nice train" in answer
    person.has("ssh", "exit 0")
    assert "1 node: rented-1" in person.types("up", "--site", "rented", "--yes", "--nodes", "1")


@needs_terraform
def test_what_was_given_when_it_was_built_is_known_when_it_is_taken_down(person: Person, here: Path) -> None:
    """Whatever became of the site file, and of the values that a later plan left in the folder."""
    site = sized("gcp", nodes=2)
    del site["cloud"]["project"]
    path = Path(saved(site).path)
    for program in ("scp", "ssh"):
        person.has(program, "exit 0")
    assert "Apply complete!" in person.types("up", "--site", "rented", "--yes", project="given-project")
    folder = here.parent / "home" / ".local" / "state" / "hpcjobs" / "cloud" / "rented"
    values = folder / "terraform.tfvars"
    values.write_text(values.read_text(encoding="utf-8").replace("us-central1-a", "mars-1"), encoding="utf-8")
    path.unlink()
    assert "Destroy complete!" in person.types("down", "--site", "rented", "--yes")
    assert json.loads((folder / "applied.tfvars.json").read_text(encoding="utf-8"))["project"] == "given-project"


@needs_terraform
def test_another_cluster_of_the_same_name_has_a_state_of_its_own_or_none(person: Person, here: Path) -> None:
    for program in ("scp", "ssh"):
        person.has(program, "exit 0")
    person.types("up", "--site", "rented", "--yes")
    values = here.parent / "home" / ".local" / "state" / "hpcjobs" / "cloud" / "rented" / "terraform.tfvars"
    before = values.read_bytes()
    other = sized("gcp", nodes=2)
    other["cloud"]["project"] = "other-project"
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "rented.yaml").write_text(json.dumps(other), encoding="utf-8")
    for verb in (("plan",), ("up", "--yes")):
        answer = person.types(*verb, "--site", "./elsewhere/rented.yaml", code=5)
        assert "project my-project, not other-project; site file" in answer
        assert "--dir names a folder for this one" in answer
    assert values.read_bytes() == before
    assert "Plan: " in person.types("plan", "--site", "./elsewhere/rented.yaml", "--dir", "mine")


@needs_terraform
def test_what_is_not_built_is_not_taken_down(person: Person) -> None:
    assert "nothing is built in" in person.types("down", "--site", "rented", "--yes", code=3)


def test_without_terraform_the_message_says_where_it_is_had(person: Person) -> None:
    answer = person.types("plan", "--site", "rented", path="/nowhere", code=9)
    assert "neither terraform nor tofu is on PATH" in answer


def test_what_the_check_calls_an_error_is_not_built(person: Person) -> None:
    site = sized("gcp", nodes=2)
    site["cloud"]["quota"] = {"gpus": 1}
    saved(site)
    answer = person.types("up", "--site", "rented", "--yes", code=4)
    assert "cannot be built as it is:\n  quota: 2 GPUs are needed" in answer
    assert person.types("check", "--site", "rented", code=4).startswith("LEVEL")


@needs_terraform
def test_at_first_the_fewest_nodes_are_rented_unless_a_number_is_given(person: Person) -> None:
    output = person.types("plan", "--site", "rented")
    assert "worker[0]" in output
    assert "worker[1]" not in output
    assert "worker[1]" in person.types("plan", "--site", "rented", "-N", "2")
    assert "nodes is 3: the site allows 1 to 2" in " ".join(
        person.types("plan", "--site", "rented", "-N", "3", code=3).replace("│", " ").split()
    )


def test_a_folder_is_rendered_where_it_was_asked_for(person: Person) -> None:
    answer = person.types("render", "--site", "rented", "--out", "there")
    assert set(answer.split()) == {str(path) for path in Path("there").iterdir()}
    assert "did you mean" in person.types("render", "--site", "rentd", code=4)


def test_a_folder_that_somebody_changed_is_checked_as_it_is(person: Person) -> None:
    person.types("render", "--site", "rented", "--out", "there")
    path = Path("there/machines.tf")
    path.write_text(path.read_text(encoding="utf-8").replace("enable_vtpm", "enable_tpm"), encoding="utf-8")
    answer = person.types("check", "--site", "rented", "--dir", "there", code=4)
    assert "enable_tpm: no such argument; did you mean 'enable_vtpm'?" in answer
    report = json.loads(person.types("check", "--site", "rented", "--json"))
    assert report["checked_against"] == "hashicorp/google 8.7.0"


def test_the_login_is_written_into_the_users_own_copy_with_all_that_stands_there(here: Path) -> None:
    """A shipped site is copied first; comments stay."""
    cluster = resolve_cluster(load_site("gcp-t4"))
    own = remember_login(cluster, "hpc@198.51.100.7")
    assert own == here.parent / "home" / ".config" / "hpcjobs" / "site_configs" / "gcp-t4.yaml"
    before = Path(cluster.site.path).read_text(encoding="utf-8").splitlines()
    after = own.read_text(encoding="utf-8").splitlines()
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [("login: login.gcp-t4.example", "login: hpc@198.51.100.7")]
    assert load_site("gcp-t4").login == "hpc@198.51.100.7"
    remember_login(resolve_cluster(load_site("gcp-t4")), "hpc@198.51.100.8")
    assert load_site("gcp-t4").login == "hpc@198.51.100.8"


def recorded(answers: list[Result]) -> tuple[HeadNode, list[Sequence[str]]]:
    """A head whose ssh and scp give ``answers`` in turn, and the commands that were run."""
    commands: list[Sequence[str]] = []

    def answer(argv: Sequence[str], **_: object) -> Result:
        commands.append(argv)
        return answers.pop(0)

    return HeadNode("ssh hpc@198.51.100.7", Path("a folder"), runner=answer, pause=lambda _: None), commands


def test_the_queue_is_asked_without_questions_also_of_a_host_nobody_knows() -> None:
    head, commands = recorded([Result(0, "1_PENDING_a_x\n2_RUNNING_b_y\n", "")])
    with pytest.raises(RequestError, match="2 jobs in the queue"):
        refuse_while_jobs_run(head)
    (argv,) = commands
    assert argv[:3] == ["ssh", "-o", "BatchMode=yes"]
    assert "StrictHostKeyChecking=accept-new" in argv
    assert f'UserKnownHostsFile="{Path("a folder").absolute()}/known_hosts"' in argv
    assert argv[-5:] == ["hpc@198.51.100.7", "squeue", "--all", "--noheader", "--format=%i_%T_%u_%j"]


def test_the_wheel_is_copied_as_soon_as_the_head_lets_somebody_in() -> None:
    refused = Result(255, "", "ssh: connect to host 198.51.100.7 port 22: Connection refused")
    head, commands = recorded([refused, refused, Result(0, "", ""), Result(0, "", "")])
    head.deliver(Wheel("hpcjobs-1-py3-none-any.whl", b"", ""), lambda _: None)
    assert [argv[0] for argv in commands] == ["scp", "scp", "scp", "ssh"]
    assert commands[2][-1] == "hpc@198.51.100.7:.hpcjobs-1-py3-none-any.whl.part"
    assert commands[3][-3:] == ["mv", ".hpcjobs-1-py3-none-any.whl.part", "hpcjobs-1-py3-none-any.whl"]


def test_credentials_of_a_service_account_are_taken_from_the_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = resolve_cluster(saved(sized("nebius", nodes=2)))
    assert "service_account=true" not in variables(cluster, here, None)
    monkeypatch.setenv("NB_SA_ID", "serviceaccount-e00")
    assert "service_account=true" in variables(cluster, here, None)
    monkeypatch.setenv("NEBIUS_IAM_TOKEN", "of a person")
    assert "service_account=true" not in variables(cluster, here, None)


@needs_terraform
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        pytest.param('"$real" "$@"; kill -9 $PPID', -9, id="hpcjobs, after the last resource"),
        pytest.param('"$real" "$@" -target=google_compute_network.cluster; kill -9 $PPID $$', -9, id="both, half-way"),
        pytest.param('"$real" "$@" -target=google_compute_network.cluster; kill -9 $$', 3, id="terraform, half-way"),
    ],
)
def test_what_a_killed_up_has_built_is_taken_down(person: Person, here: Path, ending: str, code: int) -> None:
    folder = here.parent / "home" / ".local" / "state" / "hpcjobs" / "cloud" / "rented"
    real = shutil.which("terraform")
    person.has("terraform", f'real={real}; case "$1" in apply) {ending} ;; *) exec "$real" "$@" ;; esac')
    person.types("up", "--site", "rented", "--yes", code=code)
    built = json.loads((folder / "terraform.tfstate").read_text(encoding="utf-8"))["resources"]
    assert "google_compute_network" in {resource["type"] for resource in built}
    assert stat.S_IMODE((folder / "terraform.tfstate").stat().st_mode) == 0o600
    person.has("ssh", "exit 255")
    answer = person.types("down", "--site", "rented", "--yes", "--force")
    assert "Destroy complete!" in answer
    assert json.loads((folder / "terraform.tfstate").read_text(encoding="utf-8"))["resources"] == []
