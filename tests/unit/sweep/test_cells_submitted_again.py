"""A task that starts once more leaves the cells that `sweep resume` has submitted meanwhile."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcjobs.data import data_folder

RUN = """
. "$0"
_hj_write_state() { :; }
_hj_finish() { :; }
_hj_await_step() { wait "$1"; _hj_code=$?; }
_hj_launch_cell() { echo "runs $HPCJOBS_CELL" & }
_hj_figures=()
_hj_run_cell "$1" 1
"""


@pytest.mark.parametrize("pack", [1, 2])
@pytest.mark.parametrize(
    ("restarts", "later", "cells", "owner", "runs"),
    [
        (0, "0002", "ab", None, True),  # its first start
        (1, "0002", "ab", None, False),
        (1, "0002", "ab", "12", False),
        (1, "10000", "ab", None, False),
        (1, "0002", "ab", "nobody", True),  # given up: no job has it
        (1, "0002", "abc", None, True),  # another cell
        (1, "0000", "ab", "3", True),  # an earlier attempt
        (1, "2[$(touch made)]", "ab", None, True),  # no chunk
    ],
)
def test_a_cell_that_was_submitted_again_is_left_to_that_job(
    tmp_path: Path, pack: int, restarts: int, later: str, cells: str, owner: str | None, runs: bool
) -> None:
    sweep, chunk = tmp_path / "sweep", tmp_path / "sweep" / "chunks" / "0001"
    for folder, cell in ((chunk, "ab"), (sweep / "chunks" / later, cells)):
        (folder / "0").mkdir(parents=True)
        (folder / "cells.sh").write_text(f"export HPCJOBS_CELL={cell} LR=1; set -- python train.py\n")
    (chunk / "owner").symlink_to("7")
    if owner is not None:
        (sweep / "chunks" / later / "owner").symlink_to(owner)
    env = {
        "PATH": "/usr/bin:/bin", "HPCJOBS_SWEEP": str(sweep), "HPCJOBS_RUN_DIR": str(chunk / "0"),
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "0", "SLURM_RESTART_COUNT": str(restarts), "HPCJOBS_PACK": str(pack),
    }  # fmt: skip
    command = ["bash", "-uc", RUN, str(data_folder("templates") / "shell/sweep.bash"), str(chunk)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    log = sweep / "cells" / "ab" / "output.log"
    output = done.stdout + (log.read_text() if log.exists() else "")
    assert output == ("runs ab\n" if runs else ""), done.stderr
    assert not (tmp_path / "made").exists()
    assert ("submitted again" in done.stderr) is not runs
