"""What a real bash completes behind options and verbs of `hpcjobs`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcjobs.run import index
from hpcjobs.run.index import Entry

SITE = "{description: x, partitions: {batch: {nodes: 2, node: {cpus: 4, mem: 8G}}, gpu: {nodes: 2, node: {cpus: 4, mem: 8G}}}}\n"  # fmt: skip # noqa: E501

PRESS_TAB = """
eval "$(hpcjobs --show-completion bash)"
read -r _ _ function _ < <(complete -p hpcjobs | sed 's/.*-F/x x/')
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMPREPLY=()
"$function" hpcjobs
printf '%s\\n' "${COMPREPLY[@]}"
"""


def offered(*words: str) -> list[str]:
    """What bash offers for the last of ``words``."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", PRESS_TAB, "bash", *words], capture_output=True, text=True, env=env, timeout=240
    )
    assert done.returncode == 0, done
    return done.stdout.split()


@pytest.fixture(autouse=True)
def site(here: Path) -> None:
    """A site, and a job of it."""
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text(SITE)
    index.add(Entry(job_id="4711", name="resnet", site="mine", scheduler="slurm", run_dir="/r", submitted=1.0))


def test_bash_completes_sites_partitions_and_jobs() -> None:
    assert offered("hpcjobs", "submit", "--site", "mi") == ["mine"]
    assert offered("hpcjobs", "submit", "--site", "mine", "--partition", "") == ["batch", "gpu"]
    assert offered("hpcjobs", "logs", "47") == ["4711"]
    assert offered("hpcjobs", "cancel", "res") == ["resnet"]
