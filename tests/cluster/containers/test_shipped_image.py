"""The shipped recipes for CPUs, built (`tools/image`), on a real Slurm: minutes, so `make long` runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commandline import hpcjobs

from hpcjobs.containers.images import folder_of
from hpcjobs.site.library import load_site

pytestmark = pytest.mark.long
IMAGES = folder_of(load_site("local"))  # before a test has a home of its own
MNIST = ("--workload", "mnist", "--steps", "12", "--log-every", "1")
LAYOUT = ("-N", "2", "--ntasks-per-node", "2")


@pytest.fixture
def site(site_file: Callable[..., str]) -> str:
    for name in ("horovod_cpu", "pytorch", "jupyter"):
        if not (IMAGES / f"{name}.sif").is_file():
            pytest.skip(f"{IMAGES}/{name}.sif has not been built (tools/image)")
    return site_file(folder=str(IMAGES), binds=[])


def run(site: str, name: str, *arguments: str) -> tuple[list[float], dict[str, Any]]:
    """Losses and summary of a job that must succeed."""
    ended = hpcjobs("submit", "--site", site, *LAYOUT, "--name", name, "--wait", *arguments, timeout_s=600)
    (folder,) = Path("runs").glob(f"{name}-2*")
    text = "".join(path.read_text(encoding="utf-8") for path in (folder / "logs").iterdir())
    assert ended.code == 0, (ended, text)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"], json.loads((folder / "summary.json").read_text())


@pytest.mark.timeout(3000)
def test_every_way_to_start_gives_the_losses_of_the_host(site: str) -> None:
    host, _ = run(site, "host", "ddp", *MNIST)
    for image, launcher, trainer, backend in (
        ("horovod_cpu", "srun", "horovod", "horovod-mpi"),
        ("horovod_cpu", "mpirun", "horovod", "horovod-mpi"),
        ("horovod_cpu", "horovod-gloo", "horovod", "horovod-gloo"),
        ("pytorch", "srun", "ddp", "gloo"),
        ("pytorch", "torchrun", "ddp", "gloo"),
    ):
        arguments = ("--container", image, "--launcher", launcher, trainer, *MNIST)
        losses, summary = run(site, f"{launcher}-{trainer}", *arguments)
        assert losses == pytest.approx(host, rel=2e-4)
        assert (summary["backend"], summary["world_size"], summary["nnodes"]) == (backend, 4, 2)


@pytest.mark.timeout(1800)
def test_a_job_that_meets_its_time_limit_goes_on_inside_the_image(site: str, workdir: Path) -> None:
    lm = ("--workload", "lm", "--sequence-length", "32", "--batch-size", "4", "--steps", "1500", "--log-every", "50")
    arguments = ("submit", "--site", site, "-N", "2", "-t", "1m", "--retries", "on", "--container", "pytorch")
    ended = hpcjobs(*arguments, "--name", "long", "--wait", "ddp", *lm, timeout_s=1700)
    (folder,) = Path("runs").glob("long-2*")
    assert ended.code == 0, ended
    text = list(map(json.loads, (folder / "attempts.jsonl").read_text(encoding="utf-8").splitlines()))
    assert [line["cause"] for line in text[:-1]] == ["timeout"] * (len(text) - 1)
    assert len(text) > 1
    assert text[-1]["steps"] == 1500


@pytest.mark.timeout(900)
def test_a_staged_image_is_what_the_ranks_run(site: str, workdir: Path) -> None:
    (workdir / "where.py").write_text("import os; print('image', os.environ['APPTAINER_CONTAINER'])", encoding="utf-8")
    arguments = ("submit", "--site", site, *LAYOUT, "--container", "horovod_cpu", "--stage-image", "--name", "staged")
    ended = hpcjobs(*arguments, "--wait", "where.py", timeout_s=600)
    assert ended.code == 0, ended
    (log,) = Path("runs").glob("staged-2*/logs/*")
    text = {line.rpartition(" ")[2] for line in log.read_text(encoding="utf-8").splitlines() if " image " in line}
    (staged,) = text
    assert staged.startswith("/tmp/hpcjobs-")


@pytest.mark.timeout(900)
def test_a_session_in_the_jupyter_image_answers_and_ends(site: str, workdir: Path) -> None:
    ended = hpcjobs(
        "jupyter", "--site", site, "-t", "10m", "--container", "jupyter", "--detach", "--json", timeout_s=600
    )
    assert ended.code == 0, ended
    text = json.loads(ended.out)
    assert text["connection"]["python"] == "python3"  # that of the image
    assert hpcjobs("jupyter", "stop", text["job_id"], timeout_s=120).code == 0
