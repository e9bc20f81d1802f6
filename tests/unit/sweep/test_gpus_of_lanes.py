"""GPUs of an array task that runs several cells at a time: each lane has its own."""

from __future__ import annotations

import subprocess

import pytest

from hpcjobs.data import data_folder

NAMES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def share(lanes: int, environment: dict[str, str]) -> list[list[str]]:
    """By lane, its values of NAMES."""
    shown = " ".join(f'"${{{name}-unset}}"' for name in NAMES)
    script = (
        f'. "$0" && for lane in {" ".join(map(str, range(lanes)))}; do (_hj_share_gpus "$lane"; echo {shown}); done'
    )
    command = ["bash", "-euc", script, str(data_folder("templates") / "shell/sweep.bash")]
    done = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", "HPCJOBS_LANES": str(lanes), **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("given", "lanes", "of_lanes"),
    [
        ("0,1,2,3", 4, ["0", "1", "2", "3"]),
        ("0,1,2,3", 2, ["0,1", "2,3"]),
        ("4,6", 4, ["4", "6", "4", "6"]),
        ("0,1,2", 2, ["0", "1"]),
        ("GPU-8932f937", 2, ["GPU-8932f937", "GPU-8932f937"]),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_each_lane_has_its_own_gpus_and_lanes_share_them_where_they_are_fewer(
    given: str, lanes: int, of_lanes: list[str], name: str
) -> None:
    column = NAMES.index(name)
    assert [values[column] for values in share(lanes, {name: given})] == of_lanes


def test_of_two_lists_the_inner_one_is_divided() -> None:
    both = {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0,1"}
    assert share(2, both) == [["unset", "0", "4,5"], ["unset", "1", "4,5"]]


def test_a_task_without_gpus_stays_without() -> None:
    assert share(2, {}) == [["unset"] * 3] * 2
    assert share(2, {"CUDA_VISIBLE_DEVICES": ""}) == [["unset", "unset"]] * 2
