"""Recipes, builds and verdicts, with a stub in Apptainer's place: what is decided, recorded and told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from commandline import moment, ok, within
from imagefile import write_image

from hpcjobs.containers.build import settings
from hpcjobs.containers.images import find, read_recipe, recipes, resolve_arguments
from hpcjobs.containers.look import check
from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.processes.programs import Result
from hpcjobs.site.library import load_site
from hpcjobs.site.models import Site

RECIPE = """# For a test.

Bootstrap: {{ bootstrap }}
From: {{ base }}

%arguments
    bootstrap=docker
    base=debian:12-slim
    extra=no

%files
    taken.txt /opt/taken.txt

%post
    echo "{{ extra }}"
"""
FACTS = {"python": "3.11.2", "torch": "2.13.0", "mpi": "openmpi 4.1.4", "pmi": ["pmix"], "pmix": "4.2.2",
         "packages": {"numpy": "2", "psutil": "7"}}  # fmt: skip
# build: notes its words and settings, writes an image file; exec: says what is in it
STUB = """#!{python} -IS
import json, os, sys
words = sys.argv[1:]
note = lambda **said: open("{here}/told.jsonl", "a").write(json.dumps(said) + "\\n")
if words[0] == "--version":
    print("apptainer version 9")
elif words[0] == "build":
    binds = [words[at + 1] for at, word in enumerate(words) if word == "--bind"]
    settings = binds[0].split(":")[0]
    note(words=words, cwd=os.getcwd(), binds=binds, pip=open(settings + "/pip.conf").read(),
         mode=oct(os.stat(settings + "/pip.conf").st_mode)[-3:],
         arguments=open(words[words.index("--build-arg-file") + 1]).read())
    print("INFO:    Starting build...")
    print("+ echo no")
    if os.path.exists("{here}/fail"):
        print("E: no such package")
        sys.exit(255)
    with open("{here}/image", "rb") as source, open(words[-2], "wb") as target:
        target.write(source.read())
else:
    print(json.dumps({facts}))
"""


@pytest.fixture
def site(here: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A site whose runtime is the stub; its file. The recipe `mine` is in ./containers."""
    program = here / "apptainer"
    program.write_text(STUB.format(python=os.path.realpath(sys.executable), here=here, facts=FACTS))
    program.chmod(0o755)
    write_image(here / "image")
    (here / "containers").mkdir()
    (here / "containers" / "mine.def").write_text(RECIPE)
    (here / "containers" / "taken.txt").write_text("one")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    section = {"runtime": "apptainer", "program": str(program), "folder": str(here / "images")}
    text = {"partitions": {"cpu": {"nodes": 1, "node": {"cpus": 1}}}, "mpi": "pmix", "containers": section}
    (here / "mine.yaml").write_text(json.dumps(text))
    return str(here / "mine.yaml")


def recorded_calls(here: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (here / "told.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["mine.log", ".mine.sif.lock"])
def test_a_build_writes_through_no_link_in_the_folder_of_images(site: str, here: Path, name: str) -> None:
    """Whoever may write to the folder, which users share, can put a link to a file of the user there."""
    own = here / "own"
    if name.endswith("log"):
        own.write_text("mine")
    (here / "images").mkdir()
    (here / "images" / name).symlink_to(own)
    answer = within("container", "build", "containers/mine.def", "--site", site)
    assert answer.code in (0, 5), answer
    assert not own.exists() or own.read_text() == "mine"


def test_a_build_is_recorded_and_not_done_again_until_something_changes(site: str, here: Path) -> None:
    built = ok("container", "build", "containers/mine.def", "--site", site, "--json").json
    assert (built["new"], built["path"]) == (True, str(here / "images" / "mine.sif"))
    manifest = json.loads((here / "images" / "mine.sif.json").read_text())
    assert {**manifest, "built": None} == {**built["manifest"], "built": None}
    assert moment(built["manifest"]["built"]) == pytest.approx(manifest["built"])
    assert (manifest["base"], manifest["runtime"], manifest["facts"]["mpi"]) == (
        "docker:debian:12-slim", "apptainer version 9", "openmpi 4.1.4",
    )  # fmt: skip
    assert sorted(p.name for p in (here / "images").iterdir() if not p.name.startswith(".")) == [
        "mine.log", "mine.sif", "mine.sif.json",
    ]  # fmt: skip
    assert "unchanged" in ok("container", "build", "containers/mine.def", "--site", site).out
    for change in (
        lambda: (here / "containers" / "taken.txt").write_text("two"),
        lambda: (here / "containers" / "mine.def").write_text(RECIPE + "\n"),
        lambda: (here / "image").write_bytes(write_image(here / "other", build=b"2").read_bytes()),
    ):
        change()
        args = ("--arg", "extra=yes") if (here / "other").exists() else ()
        assert "built" in ok("container", "build", "containers/mine.def", "--site", site, *args).out
    assert "extra=yes\n" in str(recorded_calls(here)[-1]["arguments"])
    assert "built" in ok("container", "build", "containers/mine.def", "--site", site, *args, "--force").out
    assert len(recorded_calls(here)) == 5


def test_progress_is_told_and_a_failure_ends_with_the_builds_last_lines(site: str, here: Path) -> None:
    (here / "fail").touch()
    answer = within("container", "build", "containers/mine.def", "--site", site)
    assert answer.code == 3
    assert "Starting build..." in answer.err
    assert "E: no such package" in answer.err
    assert f"all of it is in {here}/images/mine.log" in answer.err
    assert not (here / "images" / "mine.sif").exists()


def test_a_base_is_dockers_a_scheme_or_a_file_whose_bytes_count(site: str, here: Path) -> None:
    base = write_image(here / "base.sif")
    for part, expected in (
        ("ubuntu:24.04", "bootstrap=docker\nbase=ubuntu:24.04\n"),
        ("oras://ghcr.io/a/b:1", "bootstrap=oras\nbase=ghcr.io/a/b:1\n"),
        (str(base), f"bootstrap=localimage\nbase={base}\n"),
    ):
        ok("container", "build", "containers/mine.def", "--site", site, "--base", part)
        assert str(recorded_calls(here)[-1]["arguments"]).startswith(expected)
    assert "unchanged" in ok("container", "build", "containers/mine.def", "--site", site, "--base", str(base)).out
    write_image(base, build=b"2")
    assert "built" in ok("container", "build", "containers/mine.def", "--site", site, "--base", str(base)).out
    assert within("container", "build", "containers/mine.def", "--site", site, "--base", "./none.sif").code == 5


def test_pips_settings_reach_the_build_by_a_private_file_and_no_password_by_the_command(
    site: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "wheels").mkdir()
    (here / "index" / "simple").mkdir(parents=True)
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:secret@mirror.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", str(here / "wheels"))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"file://{here}/index/simple")
    ok("container", "build", "containers/mine.def", "--site", site)
    (build,) = recorded_calls(here)
    assert "index-url = https://me:secret@mirror.example/simple\n" in str(build["pip"])
    assert "find-links = /mnt/find-links0\n" in str(build["pip"])
    assert "extra-index-url = file:///mnt/extra-index-url0/simple\n" in str(build["pip"])
    assert build["mode"] == "600"
    assert "secret" not in str(build["words"]) + str(build["arguments"])
    assert f"{here}/wheels:/mnt/find-links0" in build["binds"]  # type: ignore[operator]
    assert "secret" not in (here / "images" / "mine.sif.json").read_text()


def test_the_users_pip_file_is_read_below_the_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = here / "pip.conf"
    conf.write_text("[global]\nindex-url = https://a.example\ntimeout = 9\n")
    environment = settings({"HOME": "/none", "PIP_CONFIG_FILE": str(conf), "PIP_INDEX_URL": "https://b.example"})
    assert (environment["index-url"], environment["timeout"]) == (["https://b.example"], ["9"])


def test_what_a_recipe_does_not_have_is_refused_with_what_it_has(site: str) -> None:
    answer = within("container", "build", "containers/mine.def", "--site", site, "--arg", "exta=1")
    assert answer.code == 5
    assert "no argument 'exta'\nhint: did you mean 'extra'?" in answer.err
    assert "did you mean 'mine'" in within("container", "build", "mien", "--site", site).err
    with pytest.raises(RequestError, match="neither control characters nor braces"):
        resolve_arguments(read_recipe("mine"), {"extra": "{{ base }}"})


@pytest.mark.parametrize("name", ["pytorch", "horovod_cpu", "pytorch_cuda", "jupyter"])
def test_each_shipped_recipe_says_what_it_is_for_and_names_what_it_can_be_told(name: str) -> None:
    recipe = read_recipe(str(recipes()[name]))
    assert len(recipe.about) > 40
    assert {"bootstrap", "base"} <= set(recipe.arguments)
    assert all(path.is_file() for path in recipe.files)
    used = {part.split("}}")[0].strip() for part in recipe.text.split("{{")[1:]}
    assert used <= set(recipe.arguments)


def verdict_with(site: Site, image: Path, **changed: object) -> dict[str, str]:
    """What `check` finds, by level and subject, of an image with these facts, on a machine with these programs."""
    driver, types = changed.pop("driver", None), changed.pop("types", "pmix pmi2 none")

    def runner(argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        if argv[0] == "nvidia-smi":
            return Result(0, f"{driver}\n" if driver else "", "")
        if "srun" in argv:
            return Result(0, "MPI plugin types are...\n" + "".join(f"\t{kind}\n" for kind in str(types).split()), "")
        return Result(0, json.dumps(FACTS | changed), "")

    result = check(find(str(image), site, source="a test"), site, runner=runner).findings
    return {f"{finding.level} {finding.about}": finding.text for finding in result}


@pytest.mark.parametrize(
    ("changed", "about", "text"),
    [
        ({}, "good mpi", "openmpi 4.1.4, PMIx 4.2.2 and srun --mpi=pmix"),
        ({"mpi": "mpich 4.2.0", "pmi": ["pmi2"]}, "error mpi", "srun --mpi=pmix of the site does not speak to mpich"),
        ({"types": "pmi2 none"}, "error mpi", "srun here has no type pmix: it has none, pmi2"),
        ({"python": "3.8.1"}, "error python", "Python 3.8.1"),
        ({"torch": None}, "warning torch", "no torch"),
        ({"packages": {}}, "error torch", "the trainers need numpy too"),
        (
            {"cuda": "12.4", "driver": "470.82.01"},
            "error cuda",
            "driver 525.60.13 or later; this machine has 470",
        ),
        ({"cuda": "12.4", "driver": "550.54.15"}, "good cuda", "CUDA 12.4 and driver 550.54.15"),
        ({"cuda": "13.0", "driver": None}, "warning cuda", "needs driver 580.65.06 or later; this machine has none"),
    ],
)
def test_the_verdict_names_what_would_fail(
    changed: dict[str, object], about: str, text: str, site: str, here: Path
) -> None:
    result = verdict_with(load_site(site), here / "image", **changed)
    assert text in result[about]


def test_an_image_whose_bytes_have_changed_since_it_was_built_does_not_fit(site: str, here: Path) -> None:
    (here / "image").write_bytes((here / "image").read_bytes() + b"0" * 100_000)
    ok("container", "build", "containers/mine.def", "--site", site)
    assert "as built on" in ok("container", "check", "mine", "--site", site).out
    image = here / "images" / "mine.sif"
    image.write_bytes(image.read_bytes()[:-1] + b"1")  # far behind what a submission looks at
    answer = within("container", "check", "mine", "--site", site)
    assert answer.code == 5
    assert "damaged: its bytes are not those that were built" in answer.out


def test_an_image_is_listed_with_what_is_in_it(site: str, here: Path) -> None:
    ok("container", "build", "containers/mine.def", "--site", site)
    write_image(here / "images" / "copied.sif")
    shown = ok("container", "list", "--site", site).out
    assert "openmpi 4.1.4" in next(line for line in shown.splitlines() if line.startswith("mine"))
    assert any(line.startswith("copied") for line in shown.splitlines())
    assert "For a test." in shown


def test_a_build_in_a_job_is_the_same_command_on_a_node(site: str, here: Path) -> None:
    args = ("container", "build", "containers/mine.def", "--site", site, "--arg", "extra=it's")
    script = ok(*args, "-o", "time=2h", "--dry-run").out
    assert "#SBATCH --time=02:00:00" in script
    launched = next(line for line in script.splitlines() if line.startswith("srun "))
    assert f"-m hpcjobs container build containers/mine.def --site {site} --arg 'extra=it'\"'\"'s' " in launched
    assert "time=2h" not in launched
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_runtime_that_is_not_here_is_named(site: str, here: Path) -> None:
    (here / "apptainer").unlink()
    answer = within("container", "build", "containers/mine.def", "--site", site)
    assert answer.code == 9
    assert "not found here" in answer.err
    with pytest.raises(HpcJobsError, match="not found here"):
        check(find(str(here / "image"), load_site(site), source="a test"), load_site(site))
