"""Jobs inside images on a real Slurm, with a real Apptainer: one world, the losses of the host, and what goes wrong."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from commandline import Answer, hpcjobs
from imagefile import THIN
from run_folders import log, losses, run_dir, summary

import hpcjobs as package
from hpcjobs.job.models import Plan
from hpcjobs.run import folder as run_folder
from hpcjobs.sandbox import Sandbox

LM = ("--workload", "lm", "--sequence-length", "32", "--train-samples", "64", "--batch-size", "4", "--log-every", "1")
HOSTILE = ["two words", "", "it's", '"so"', "$(touch x)", "`touch x`", "back\\slash", "new\nline", "a,b", "नमस्ते"]
TELL = """
import json, os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "WORD", "OMP_NUM_THREADS", "PATH")
told = {"argv": sys.argv[1:], "cwd": os.getcwd(), "home": os.path.exists("HOME/secret")}
told |= {name: os.environ.get(name) for name in names}
run_dir = pathlib.Path(os.environ["HPCJOBS_RUN_DIR"])
(run_dir / f"rank{os.environ['RANK']}.json").write_text(json.dumps(told))
"""
SAVES = """
import os, pathlib, time
from hpcjobs.runtime import signals
stop = signals.listen()
again = (pathlib.Path(os.environ["HPCJOBS_CONTROL_DIR"]) / "progress").exists()
(pathlib.Path(os.environ["HPCJOBS_RUN_DIR"]) / "begun").touch()
while not again:
    if stop.requested:
        import wave  # what is read from the image only now is still there
        signals.leave(7)
    time.sleep(0.05)
print("the second time, as", os.getuid())
"""
USER = "games"


def submit(site: str, *arguments: str) -> Answer:
    return hpcjobs("submit", "--site", site, "--wait", *arguments, timeout_s=280)


@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed (make horovod)")
def test_inside_an_image_every_launcher_makes_one_world_with_the_losses_of_the_host(thin: str) -> None:
    layout = ("-N", "2", "--ntasks-per-node", "1")
    ways = {
        "srun": ("horovod", "horovod-mpi"), "horovod-gloo": ("horovod", "horovod-gloo"), "torchrun": ("ddp", "gloo"),
    }  # fmt: skip
    ended = submit(thin, *layout, "--name", "host", "ddp", *LM)
    assert ended.code == 0, (ended, log("host"))
    for launcher, (trainer, backend) in ways.items():
        arguments = ("--container", "thin", "--launcher", launcher, "--name", launcher)
        ended = submit(thin, *layout, *arguments, trainer, *LM)
        assert ended.code == 0, (ended, log(launcher))
        run_summary = summary(launcher)
        assert (run_summary["world_size"], run_summary["nnodes"], run_summary["backend"]) == (2, 2, backend)
        assert losses(launcher) == pytest.approx(losses("host"), rel=2e-4)


def test_words_and_variables_arrive_unchanged_and_the_home_stays_outside(thin: str, workdir: Path) -> None:
    part = "".join(HOSTILE)
    local = ("--site", site_without_slurm(thin), "--ntasks-per-node", "2", "-c", "1", "--env", f"WORD={part}")
    (workdir / "here").mkdir()
    (workdir / "home" / "secret").touch()
    (workdir / "here" / "tell.py").write_text(TELL.replace("HOME", f"{workdir}/home"), encoding="utf-8")
    ended = hpcjobs("submit", *local, "--container", "thin", "--wait", "tell.py", *HOSTILE, cwd=workdir / "here")
    assert ended.code == 0, ended
    for rank in ("0", "1"):
        (path,) = (workdir / "here").glob(f"runs/*/rank{rank}.json")
        document = json.loads(path.read_text(encoding="utf-8"))
        assert (document["argv"], document["WORD"], document["cwd"]) == (HOSTILE, part, str(workdir / "here"))
        assert (document["RANK"], document["WORLD_SIZE"]) == (rank, "2")
        assert document["OMP_NUM_THREADS"] == "1"  # the image says something else
        assert not document["home"]
    assert not list(workdir.rglob("x"))


def site_without_slurm(path: str) -> str:
    site = json.loads(Path(path).read_text(encoding="utf-8"))
    site_values = {"scheduler": "local", "containers": site["containers"]}
    local = Path(path).with_name("here.yaml")
    local.write_text(json.dumps(site_values), encoding="utf-8")
    return str(local)


@pytest.fixture
def ordinary(sandbox: Sandbox, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words before a command that make it that of an ordinary user, whose folder the current one becomes."""
    if not Path("/usr/bin/python3").exists():
        pytest.skip("an ordinary user needs a Python that is not root's")
    monkeypatch.setenv("SLURM_CONF", sandbox.slurm_conf)
    subprocess.run(["sacctmgr", "-i", "-Q", "add", "user", USER, "account=sandbox"], capture_output=True)
    for part in ("", "record", "runtime"):  # a checkout may lie where only root can read
        shutil.copytree(Path(package.__file__).parent / part, workdir / "package" / "hpcjobs" / part,
                        dirs_exist_ok=True, ignore=None if part else lambda folder, names: names[:0] + [
                            name for name in names if (Path(folder) / name).is_dir()])  # fmt: skip
    monkeypatch.setattr(package, "__file__", str(workdir / "package" / "hpcjobs" / "__init__.py"))
    entry = pwd.getpwnam(USER)
    env = ["env", f"HOME={workdir}/home", f"USER={USER}"]
    return ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups", *env]


def by(arguments: list[str], plan: Plan) -> str:
    """The plan's job, submitted by whoever ``arguments`` make it; its id."""
    run_folder.create(plan, None)
    subprocess.run(["chown", "-R", f"{USER}:", "."], check=True)
    done = subprocess.run([*arguments, *plan.command], capture_output=True, text=True)
    assert done.returncode == 0, done
    return done.stdout.strip().split(";")[0]


def until(condition: Callable[[], bool], describe: Callable[[], str], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.1)


@pytest.mark.timeout(600)
def test_an_ordinary_users_job_saves_when_told_and_goes_on_inside_its_image(
    site_file: Callable[..., str], ordinary: list[str], workdir: Path
) -> None:
    """What serves an image's files to an ordinary user is a process of the step, and is signalled like all others."""
    site = site_file(python="/usr/bin/python3")
    assert hpcjobs("container", "build", str(THIN), "--site", site).code == 0
    (workdir / "saves.py").write_text(SAVES, encoding="utf-8")
    plan = package.plan(["saves.py"], site=site, container="thin", retries="on", name="saves", partition="compute")
    job_id = by(ordinary, plan)
    folder = plan.run_dir

    def read_logs() -> str:
        return "".join(path.read_text(encoding="utf-8") for path in (folder / "logs").iterdir())

    until((folder / "begun").exists, read_logs)
    subprocess.run([*ordinary, "scancel", "--batch", "--signal=USR1", job_id], check=True)
    until(lambda: '"state":"COMPLETED"' in (folder / "state.json").read_text(), read_logs)
    assert f"the second time, as {pwd.getpwnam(USER).pw_uid}" in read_logs()
    first, last = map(json.loads, (folder / "attempts.jsonl").read_text().splitlines())
    assert (first["cause"], first["decision"], first["saved"], last["cause"]) == ("preempt", "requeued", 7, "completed")


@pytest.mark.timeout(600)
def test_what_is_wrong_inside_is_told_by_its_own_name(thin: str, workdir: Path) -> None:
    image = workdir / "images" / "thin.sif"
    complete = image.read_bytes()

    at = complete.index(b"hsqs")
    image.write_bytes(complete[: at + 8] + b"\xff" * 88 + complete[at + 96 :])  # the file system's own header
    ended = submit(thin, "--container", "thin", "--name", "damaged", "true")
    assert ended.code == 21, ended
    assert "container thin cannot be started; why stands above" in log("damaged")
    checked = hpcjobs("container", "check", "thin", "--site", thin)
    assert checked.code == 5, checked
    assert "does not fit" in checked.out

    image.write_bytes(complete)
    answer = hpcjobs("submit", "--site", thin, "--container", "thin", "-o", "hold", "--name", "changed", "true")
    assert answer.code == 0, answer
    assert hpcjobs("container", "build", str(THIN), "--site", thin, "--force").code == 0
    job_id = json.loads((run_dir("changed") / "submitted.json").read_text())["job_id"]
    subprocess.run(["scontrol", "release", job_id], check=True, env={**os.environ, "SLURM_CONF": slurm_conf(thin)})
    assert hpcjobs("wait", job_id).code == 21
    assert "has changed since this job was submitted" in log("changed")


def slurm_conf(site: str) -> str:
    document: str = json.loads(Path(site).read_text(encoding="utf-8"))["slurm_conf"]
    return document


def test_an_mpi_that_srun_does_not_speak_to_is_told_before_anything_is_queued(thin: str, workdir: Path) -> None:
    wrong = Path(thin)
    wrong.write_text(wrong.read_text().replace('"mpi": "pmix"', '"mpi": "pmi2"'), encoding="utf-8")
    checked = hpcjobs("container", "check", "thin", "--site", thin)
    assert checked.code == 5
    assert "srun --mpi=pmi2 of the site does not speak to openmpi" in checked.out
    assert "fix: mpi: pmix in the site file" in checked.out


def test_an_image_is_built_on_a_node_once_and_listed(thin: str, workdir: Path) -> None:
    first = (workdir / "images" / "thin.sif").stat().st_ino
    again = hpcjobs("container", "build", str(THIN), "--site", thin)
    assert "unchanged" in again.out, again
    answer = hpcjobs("container", "build", str(THIN), "--site", thin, "--arg", "omp=3", "--submit")
    assert answer.code == 0, answer
    assert (workdir / "images" / "thin.sif").stat().st_ino != first
    listed = hpcjobs("container", "list", "--site", thin, "--json").json
    (image,) = listed["images"]
    assert (image["name"], image["manifest"]["arguments"]) == ("thin", {"omp": "3"})
    assert image["manifest"]["build_host"].startswith("tu0")
    assert {"pytorch", "horovod_cpu", "pytorch_cuda", "jupyter"} <= set(listed["recipes"])
