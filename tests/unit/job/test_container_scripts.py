"""A job in a container: the script as a document, and run with a stub in the place of Apptainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from imagefile import write_image
from msgspec.structs import replace
from scripts_here import ARGUMENTS, TELL, as_recorded, run_here, without_complaint

import hpcjobs
from hpcjobs.containers.images import fingerprint
from hpcjobs.errors import ConfigError, HpcJobsError, RequestError
from hpcjobs.job.models import Plan
from hpcjobs.site.models import Containers, Site

CASES = [
    ("apptainer", "srun"), ("apptainer", "torchrun"), ("apptainer", "horovod-gloo"), ("apptainer", "mpirun"),
    ("pyxis", "srun"), ("pyxis", "torchrun"),
]  # fmt: skip

# Does what is asked of Apptainer but one thing: the program it starts sees this machine, and not an image.
APPTAINER = f"""#!{os.path.realpath(sys.executable)} -IS
import json, os, sys
words, said = sys.argv[1:], []
while words[0].startswith("-") or words[0] == "exec":
    said.append(words.pop(0))
    if said[-1] in ("--bind", "--pwd"):
        said.append(words.pop(0))
image, *command = words
env = {{name: value for name, value in os.environ.items() if not name.startswith("APPTAINERENV_")}}
if "--cleanenv" in said:
    env = {{"PATH": env["PATH"]}}
env["OMP_NUM_THREADS"] = "of the image"
env |= {{name[13:]: value for name, value in os.environ.items() if name.startswith("APPTAINERENV_")}}
with open(os.environ["HPCJOBS_RUN_DIR"] + "/apptainer.jsonl", "a") as file:
    file.write(json.dumps([said, image]) + "\\n")
os.chdir(said[said.index("--pwd") + 1])
os.execvpe(command[0], command, env)
"""

# An srun with NVIDIA's plugin, as its public documentation has the options: it refuses what the plugin would refuse,
# lets values of the image win but those of --container-env, and starts the tasks by the srun that comes next on PATH.
PYXIS = f"""#!{os.path.realpath(sys.executable)} -IS
import json, os, re, sys
TEXT = ("image", "mounts", "workdir", "env", "name", "save")
FLAGS = ("mount-home", "remap-root", "entrypoint", "writable", "readonly")
plugin, others, words = {{}}, [], sys.argv[1:]
while words and words[0].startswith("--"):
    option = words.pop(0)
    name, equals, value = option[2:].partition("=")
    switch = name.removeprefix("no-").removeprefix("container-")
    if "container-" not in name:
        others.append(option)
    elif switch in FLAGS and not equals and switch not in plugin:
        plugin[switch] = not name.startswith("no-")
    elif name == f"container-{{switch}}" and switch in TEXT and value and switch not in plugin:
        plugin[switch] = value
    else:
        sys.exit(f"srun: unrecognized option {{option}}")
assert re.fullmatch(r"/.+|(?:[^/@#]+@)?(?:[^/@#]+#)?[a-z0-9][^@#]*", plugin["image"]), plugin["image"]
targets = []
for mount in plugin["mounts"].split(","):
    source, target, flags = re.fullmatch(r"([./][^:]*):([./][^:]*)(?::([a-z+-]+))?", mount).groups()
    assert os.path.exists(source), f"mount {{source}}"
    assert flags in (None, "ro"), flags
    targets.append(target)
assert any(f"{{plugin['workdir']}}/".startswith(f"{{target}}/") for target in targets), plugin
forwarded = plugin["env"].split(",")
assert all(forwarded)
with open(os.environ["HPCJOBS_RUN_DIR"] + "/pyxis.jsonl", "a") as file:
    file.write(json.dumps(plugin) + "\\n")
of_image = {{"OMP_NUM_THREADS": "of the image", "WORD": "of the image", "MASTER_ADDR": "of the image"}}
os.environ.update({{name: value for name, value in of_image.items() if name not in forwarded}})
os.chdir(plugin["workdir"])
own, *later = os.environ["PATH"].split(":")
os.execv(later[0] + "/srun", ["srun", *others, *words])
"""


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")


@pytest.fixture
def image(here: Path) -> Path:
    return write_image(here / "train.sif")


def site(**options: object) -> Site:
    """tu-hpc with this ``containers:`` section, whose Python is that of the tests."""
    section = Containers(**{"runtime": "apptainer", "python": sys.executable, **options})  # type: ignore[arg-type]
    return replace(hpcjobs.load_site("tu-hpc"), node_local=(), launchers=None, containers=section)


def planned(where: Site, launcher: str, *program: str, **options: object) -> Plan:
    layout: dict[str, object] = {"nodes": 2, "ntasks_per_node": 2, "launcher": launcher, **options}
    return hpcjobs.plan(program, site=where, made_by="hpcjobs submit ...", **layout)  # type: ignore[arg-type]


def run(plan: Plan, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The script run with the stub in PATH."""
    stubs = tmp_path / "stubs-of-images"
    stubs.mkdir(exist_ok=True)
    (stubs / "apptainer").write_text(APPTAINER)
    (stubs / "apptainer").chmod(0o755)
    return run_here(plan, tmp_path, PATH=f"{tmp_path}/stubs:{stubs}:{os.environ['PATH']}", **env)


def starts(tmp_path: Path) -> list[tuple[list[str], str]]:
    """Options and image of each start of the stub."""
    return [json.loads(line) for line in (tmp_path / "run folder" / "apptainer.jsonl").read_text().splitlines()]


def recorded_plan(runtime: str, launcher: str, image: Path, here: Path) -> Plan:
    (here / "train.py").touch()
    where = site(runtime=runtime, python="python3", binds=("/data:/data:ro",), args=("--ipc",))
    where = replace(where, scratch="/scratch/$USER/it's")
    return planned(where, launcher, "train.py", "two words", container=str(image), env={"GREETING": "it's"})


@pytest.mark.parametrize(("runtime", "launcher"), CASES)
def test_the_script_is_the_recorded_one(runtime: str, launcher: str, image: Path, here: Path) -> None:
    """As the difference to the same job on the nodes themselves."""
    plan = recorded_plan(runtime, launcher, image, here)
    env, where = {"GREETING": "it's"}, site(runtime=runtime, python="python3")
    bare = planned(where, launcher, "train.py", "two words", container="none", env=env)
    as_recorded(plan, f"containers/{runtime}-{launcher}", bare)


def test_bash_and_shellcheck_have_no_complaint_about_any_script(image: Path, here: Path, tmp_path: Path) -> None:
    without_complaint([recorded_plan(*case, image, here).script for case in CASES], tmp_path)


@pytest.mark.parametrize("clean_env", [False, True])
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_ranks_words_and_variables_arrive_inside_unchanged(
    launcher: str, clean_env: bool, image: Path, here: Path, tmp_path: Path
) -> None:
    (here / "tell.py").write_text(TELL)
    env = {"WORD": "".join(ARGUMENTS)}
    plan = planned(
        site(clean_env=clean_env), launcher, "tell.py", *ARGUMENTS, container=str(image), env=env, cpus_per_task=3
    )
    done = run(plan, tmp_path)
    assert done.returncode == 0, done
    for rank in range(4):
        document = json.loads((tmp_path / "run folder" / f"rank{rank}.json").read_text())
        assert document["argv"] == ARGUMENTS
        assert document["WORD"] == env["WORD"]
        assert (document["cwd"], document["OMP_NUM_THREADS"], document["RANK"]) == (str(here), "3", str(rank))
        assert (document["WORLD_SIZE"], document["LOCAL_RANK"]) == ("4", str(rank % 2))
    assert {started for _, started in starts(tmp_path)} == {str(image)}
    assert len(starts(tmp_path)) == 1 + (
        4 if launcher == "srun" else 2
    )  # once to try it; then each rank, or each agent


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_pyxis_understands_every_option_and_the_ranks_get_their_words_and_variables(
    launcher: str, image: Path, here: Path, tmp_path: Path
) -> None:
    (here / "tell.py").write_text(TELL)
    (tmp_path / "data").mkdir()
    env = {"WORD": "of the job"}
    where = site(runtime="pyxis", binds=(f"{tmp_path}/data:/data:ro",))
    plan = planned(where, launcher, "tell.py", *ARGUMENTS, container=str(image), env=env, cpus_per_task=3)
    stubs = tmp_path / "stubs-of-pyxis"
    stubs.mkdir()
    (stubs / "srun").write_text(PYXIS)
    (stubs / "srun").chmod(0o755)
    done = run_here(plan, tmp_path, PATH=f"{stubs}:{tmp_path}/stubs:{os.environ['PATH']}")
    assert done.returncode == 0, done
    for rank in range(4):
        document = json.loads((tmp_path / "run folder" / f"rank{rank}.json").read_text())
        assert (document["argv"], document["WORD"]) == (ARGUMENTS, "of the job")
        assert (document["cwd"], document["OMP_NUM_THREADS"], document["RANK"]) == (str(here), "3", str(rank))
    (started,) = map(json.loads, (tmp_path / "run folder" / "pyxis.jsonl").read_text().splitlines())
    mounts = started["mounts"].split(",")
    assert (started["image"], started["mount-home"], started["workdir"]) == (str(image), False, str(here))
    assert f"{tmp_path}/data:/data:ro" in mounts
    assert f"{here}:{here}" in mounts, "the folder of the code, and of the run"
    assert plan.run_dir.is_relative_to(here)


def test_of_the_home_nothing_is_seen_and_of_the_machine_what_is_named(image: Path, here: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    where = site(binds=(f"{tmp_path}/data:/data:ro",), gpu="nv", args=("--ipc",))
    assert run(planned(where, "srun", "true", container=str(image)), tmp_path).returncode == 0
    (output, _), *_ = [
        json.loads(line) for line in (tmp_path / "run folder" / "apptainer.jsonl").read_text().splitlines()
    ]
    assert {"--no-home", "--no-eval", "--nv", "--ipc"} <= set(output)
    bound = [output[at + 1] for at, part in enumerate(output) if part == "--bind"]
    package = Path(hpcjobs.__file__).parent
    assert bound == [f"{package}:/opt/hpcjobs/hpcjobs:ro", f"{tmp_path}/data:/data:ro", f"{here}:{here}:rw"]


def test_an_image_that_changed_since_the_submission_ends_the_job_by_name(image: Path, tmp_path: Path) -> None:
    plan = planned(site(), "srun", "true", container=str(image))
    write_image(image, build=b"2")
    done = run(plan, tmp_path)
    assert done.returncode == 21
    assert f"{image} has changed since this job was submitted" in done.stderr
    assert done.stderr.count("has changed") == 1  # before any rank is started


def test_a_bind_that_is_not_there_ends_the_job_by_name(image: Path, tmp_path: Path) -> None:
    done = run(planned(site(binds=("/no/such/data",)), "srun", "true", container=str(image)), tmp_path)
    assert done.returncode == 21
    assert "container " in done.stderr
    assert "there is no /no/such/data to bind" in done.stderr


def test_a_runtime_that_is_not_there_ends_the_job_by_name(image: Path, tmp_path: Path) -> None:
    done = run(planned(site(program="apptainer-of-nowhere"), "srun", "true", container=str(image)), tmp_path)
    assert done.returncode == 21
    assert "no program apptainer-of-nowhere on this node" in done.stderr


def test_an_image_without_the_python_that_is_wanted_fails_once_and_early(image: Path, tmp_path: Path) -> None:
    done = run(planned(site(python="python-of-nowhere"), "srun", "ddp", container=str(image)), tmp_path)
    assert done.returncode == 21
    assert done.stderr.count("cannot be started; why stands above") == 1


@pytest.mark.parametrize(("driver", "code"), [("525.60.13", 0), ("535.1", 0), ("470.82.01", 21), ("", 21)])
def test_a_driver_too_old_for_the_images_cuda_is_named(driver: str, code: int, image: Path, tmp_path: Path) -> None:
    plan = planned(site(gpu="nv"), "srun", "true", container=str(image))
    assert plan.job.container is not None
    inside = replace(plan.job.container, driver="525.60.13")
    script = hpcjobs.job.plan.plan_of(replace(plan.job, container=inside), plan.run_dir, made_by="a test").script
    (tmp_path / "stubs-of-images").mkdir()
    (tmp_path / "stubs-of-images" / "nvidia-smi").write_text(f"#!/bin/sh\necho {driver}\n")
    (tmp_path / "stubs-of-images" / "nvidia-smi").chmod(0o755)
    done = run(plan._replace(script=script), tmp_path)
    assert done.returncode == code, done
    if code:
        assert "its CUDA needs" in done.stderr


def test_names_come_from_the_section_and_from_the_folder(image: Path, here: Path) -> None:
    write_image(here / "built.sif")
    where = site(folder=str(here), images={"named": "train.sif"}, default="named")
    assert (
        planned(where, "srun", "true").job.container == planned(where, "srun", "true", container="named").job.container
    )
    built = planned(where, "srun", "true", container="built").job.container
    assert built is not None
    assert (built.image, built.fingerprint) == (str(here / "built.sif"), fingerprint(here / "built.sif"))
    assert planned(where, "srun", "true", container="none").job.container is None


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (
            "trian",
            {},
            r"container 'trian' \(flag\) is no image of site .*\n.*container build RECIPE.*did you mean 'train'",
        ),
        ("pytorch", {}, r"hint: hpcjobs container build pytorch --site tu-hpc"),
        ("-x", {}, r"hint: hpcjobs container build RECIPE --site tu-hpc"),
        ("/no/such.sif", {}, r"there is no file /no/such.sif\nhint: hpcjobs container build RECIPE\Z"),
        ("train", {"runtime": "none"}, r"says no runtime\nhint: containers: {runtime: apptainer}"),
        ("text.sif", {}, r"text.sif: no SIF file; it begins with b'hello'"),
        ("short.sif", {}, r"short.sif: cut off: 36,864 bytes by its own header, 36,000 are there"),
        ("hollow.sif", {}, r"hollow.sif: damaged: no squashfs"),
    ],
)
def test_what_is_wrong_with_an_image_is_said_before_anything_is_queued(
    settings: str, options: dict[str, str], message: str, image: Path, here: Path
) -> None:
    (here / "text.sif").write_text("hello")
    (here / "short.sif").write_bytes(image.read_bytes()[:36000])
    (here / "hollow.sif").write_bytes(image.read_bytes().replace(b"hsqs", b"\0\0\0\0"))
    with pytest.raises(HpcJobsError, match=message) as caught:
        planned(site(folder=str(here), **options), "srun", "true", container=settings)
    assert isinstance(caught.value, ConfigError | RequestError)
    assert not (here / "runs").exists()


def test_a_launcher_that_leaves_the_image_is_refused(image: Path) -> None:
    with pytest.raises(RequestError, match=r"horovodrun and a container: it starts its tasks by ssh"):
        planned(site(), "horovodrun", "true", container=str(image))
    with pytest.raises(RequestError, match=r"pyxis of site tu-hpc .* works by srun alone\nhint: use --launcher srun"):
        planned(site(runtime="pyxis"), "mpirun", "true", container=str(image))


def test_a_path_that_no_bind_can_say_is_refused_by_name(image: Path, here: Path) -> None:
    odd = here / "a:b"
    odd.mkdir()
    with pytest.raises(RequestError, match=r"a path with a colon, a comma or a control character"):
        planned(site(), "srun", "true", container=str(image), chdir=odd)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{runtime: apptainer, args: [--writable]}", "an image is shared and stays as it is"),
        ("{runtime: apptainer, binds: ['/a,/b']}", "without commas"),
        ("{runtime: apptainer, binds: ['/a:b']}", "must be an absolute path in the image"),
        ("{runtime: docker}", "'docker' is not one of the allowed values"),
        ("{images: {none: a.sif}}", "and not none"),
    ],
)
def test_a_section_that_cannot_be_right_is_refused_with_its_line(section: str, message: str, here: Path) -> None:
    path = here / "mine.yaml"
    path.write_text(f"partitions: {{cpu: {{nodes: 1, node: {{cpus: 1}}}}}}\ncontainers: {section}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        hpcjobs.load_site(str(path))
    assert f"{path}:2" in str(caught.value)


def test_staging_copies_once_per_node_and_runs_the_copy(image: Path, here: Path, tmp_path: Path) -> None:
    where = site(stage=str(tmp_path / "disk of the node"))
    plan = planned(where, "srun", "true", container=str(image), stage_image=True)
    assert run(plan, tmp_path).returncode == 0
    (copy,) = (tmp_path / "disk of the node").rglob("*.sif")
    assert copy.read_bytes() == image.read_bytes()
    assert {started for _, started in starts(tmp_path)} == {str(copy)}
    left_over, used_lately = copy.with_name("0123456789abcdef.sif"), copy.with_name("fedcba9876543210.sif")
    for path, days in ((left_over, 8), (used_lately, 2), (copy, 30)):
        path.touch()
        os.utime(path, (time.time() - days * 86400,) * 2)
    (tmp_path / "again").mkdir()
    assert run(plan, tmp_path / "again").returncode == 0
    assert set(copy.parent.glob("*.sif")) == {copy, used_lately}, "a copy that no job has used for a week is removed"
    assert time.time() - copy.stat().st_mtime < 600


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("planted", ["folder", "link"])
def test_no_copy_is_made_or_run_where_another_user_took_the_name_of_the_folder(
    image: Path, here: Path, tmp_path: Path, planted: str
) -> None:
    """A link to a folder of mine, or to a file of mine, can lead elsewhere after each look at it."""
    disk, mine = tmp_path / "disk", tmp_path / "mine"
    disk.mkdir()
    mine.mkdir()
    (mine / "own.sif").write_bytes(image.read_bytes())
    folder = disk / f"hpcjobs-{os.getuid()}"
    if planted == "link":
        folder.symlink_to(mine)
    else:
        folder.mkdir()
        (folder / f"{fingerprint(image)}.sif").symlink_to(mine / "own.sif")
    os.chown(folder, 65534, 65534, follow_symlinks=False)
    plan = planned(site(stage=str(disk)), "srun", "true", container=str(image), stage_image=True)
    assert run(plan, tmp_path).returncode == 0
    assert {started for _, started in starts(tmp_path)} == {str(image)}
    assert os.listdir(mine) == ["own.sif"]


def test_paths_of_the_node_stay_outside_and_those_of_env_arrive(
    image: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "tell.py").write_text(
        "import os\nfor n in ('PYTHONPATH', 'LD_LIBRARY_PATH'): os.write(1, f'{n} {os.environ.get(n)}\\n'.encode())\n"
    )
    for env, expected in (
        ({}, {"PYTHONPATH /opt/hpcjobs", "LD_LIBRARY_PATH None"}),
        (
            {"PYTHONPATH": "/own", "LD_LIBRARY_PATH": "/lib/own"},
            {"PYTHONPATH /opt/hpcjobs:/own", "LD_LIBRARY_PATH /lib/own"},
        ),
    ):
        for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
            monkeypatch.delenv(name, raising=False)
        folder = tmp_path / f"with-{len(env)}"
        folder.mkdir()
        done = run(planned(site(clean_env=True), "srun", "tell.py", container=str(image), env=env), folder)
        assert expected <= set(done.stdout.splitlines()), done


@pytest.mark.parametrize("name", ["HOME", "PATH"])
def test_a_variable_that_no_program_in_an_image_can_have_is_refused(name: str, image: Path) -> None:
    with pytest.raises(RequestError, match=rf"env {name} \(flag\): in a container .* sets it"):
        planned(site(), "srun", "hostname", container=str(image), env={name: "/x"})
    assert planned(site(), "srun", "hostname", container="none", env={name: "/x"}).job.env[name] == "/x"
