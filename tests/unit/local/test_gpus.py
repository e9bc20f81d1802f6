"""Which GPUs this machine has, from a tree of files in the place of /dev and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcjobs.scheduler.local.queue import assign_gpus, user_choice, visible_gpus

# As the driver of a node with one CPU and two MI250X writes them, of which each has two dies.
CPU = "cpu_cores_count 64\nsimd_count 0\nmem_banks_count 1\n"
DIE = "cpu_cores_count 0\nsimd_count 440\nmem_banks_count 1\ngfx_target_version 90010\n"


@pytest.fixture
def amd(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    for number, text in enumerate((CPU, DIE, DIE, DIE, DIE)):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(text)
    return tmp_path


def test_amds_gpus_are_the_nodes_of_the_topology_that_have_simd_units(amd: Path) -> None:
    assert visible_gpus({}, count=None, root=amd) == ("0", "1", "2", "3")


def test_without_the_device_file_of_the_driver_amds_gpus_cannot_be_used(amd: Path) -> None:
    (amd / "dev/kfd").unlink()
    assert visible_gpus({}, count=None, root=amd) == ()


def test_nvidias_are_numbered_from_0_as_cuda_does_whatever_their_device_files_are_called(tmp_path: Path) -> None:
    """A container with the fourth GPU of its host has /dev/nvidia3 alone, which CUDA calls 0; so does a lost GPU."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus({}, count=None, root=tmp_path) == ("0",)
    for name in ("nvidia0", "nvidia10"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus({}, count=None, root=tmp_path) == ("0", "1", "2")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,0"}, count=None, root=tmp_path) == ("2", "0")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,10,0"}, count=None, root=tmp_path) == ("2",)


def test_choices_of_the_user_hold_on_amd_too_and_the_runtimes_own_list_numbers_anew(amd: Path) -> None:
    assert visible_gpus({"HIP_VISIBLE_DEVICES": "3,1"}, count=None, root=amd) == ("3", "1")
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "2,3"}, count=None, root=amd) == ("0", "1")
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, count=None, root=amd) == ("1",)
    assert user_choice({"HIP_VISIBLE_DEVICES": "1"}) == "HIP_VISIBLE_DEVICES=1"


def test_a_job_is_shown_its_gpus_by_the_variable_that_its_user_has_set_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    assert assign_gpus(("1", "3")) == {"CUDA_VISIBLE_DEVICES": "1,3"}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,3")
    assert assign_gpus(("3",)) == {"CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3"}
