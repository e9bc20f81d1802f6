"""GPUs of a check: who is slow or wrong, by measurements; and the measuring program, on processes without GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpcjobs.fabric.check import Failed, HostGroup, measure_gpus, requests_gpus
from hpcjobs.fabric.verdict import Findings, NodeMeasurements, judge_gpus
from hpcjobs.record.fabric import FabricPoint, GpuReport
from hpcjobs.record.values import convert
from hpcjobs.trainers import measure as measuring

FOREIGN = ("SLURM", "PMI", "OMPI", "HPCJOBS", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")


def make_gpus(
    host: str, *, tflops: list[float], name: str = "NVIDIA H100 80GB HBM3", link: float = 370e9
) -> list[GpuReport]:
    """A node whose GPUs reach each other over NVLink."""
    return [
        GpuReport(
            host, index, f"0000:{0x1B + 0x20 * index:02x}:00.0", name, rate * 1e12, 2.9e12,
            peers={str(other): link for other in range(len(tflops)) if other != index},
        )
        for index, rate in enumerate(tflops)
    ]  # fmt: skip


def test_a_slow_gpu_is_named_with_its_index_and_bus_id() -> None:
    gpus = [*make_gpus("n1", tflops=[640, 655, 310, 648]), *make_gpus("n2", tflops=[650, 644, 652, 639])]
    assert judge_gpus(gpus, tolerance=0.3) == {"n1": ["GPU 2 (0000:5b:00.0) computes at 310 TFLOP/s, the others 648"]}


def test_a_wrong_gpu_is_named_and_its_rate_judges_no_other() -> None:
    gpus = make_gpus("n1", tflops=[640, 655, 650, 648])
    broken = GpuReport("n1", 1, "0000:3b:00.0", gpus[1].name, 9e14, 9e12, wrong="computes wrongly: 7 of 64 entries")
    assert judge_gpus([gpus[0], broken, *gpus[2:]], tolerance=0.3) == {
        "n1": ["GPU 1 (0000:3b:00.0) computes wrongly: 7 of 64 entries"]
    }


def test_gpus_are_compared_with_those_of_their_own_model() -> None:
    gpus = [*make_gpus("n1", tflops=[640, 655]), *make_gpus("n2", tflops=[62, 61], name="Tesla T4")]
    assert judge_gpus(gpus, tolerance=0.3) == {}


def test_of_one_slow_link_the_gpu_whose_every_link_is_slow_is_named() -> None:
    """GPU 3 is on PCIe: the others still reach each other."""
    gpus = make_gpus("n1", tflops=[640, 655, 650, 648])
    pcie = {"0": 24e9, "1": 24e9, "2": 24e9}
    slow = [
        GpuReport(gpu.host, gpu.index, gpu.bus_id, gpu.name, gpu.flops, gpu.memory_bytes_per_s, peers=links)
        for gpu, links in zip(gpus, [*({**gpu.peers, "3": 24e9} for gpu in gpus[:3]), pcie], strict=True)
    ]
    assert judge_gpus(slow, tolerance=0.3) == {
        "n1": ["GPU 3 (0000:7b:00.0) copies to its best neighbour at 24 GB/s, the others 370"]
    }


@pytest.mark.parametrize(
    ("variables", "requested"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0"}, True),
        ({"SLURM_JOB_ID": "7"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "0"}, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, False),
    ],
)
def test_gpus_are_measured_where_the_job_has_some(variables: dict[str, str], requested: bool) -> None:
    assert requests_gpus(variables) is requested


def clean_environment(tmp_path: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {**environment, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}


def test_each_process_measures_and_checks_its_own_device_and_all_sum_together(tmp_path: Path) -> None:
    file = tmp_path / "gpus.json"
    command = [sys.executable, "-m", "hpcjobs.trainers.measure"]
    command += ["--json", str(file), "--device", "cpu", "--processes", "2"]
    done = subprocess.run(command, env=clean_environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done
    document = json.loads(file.read_text())
    gpus = convert(document["gpus"], list[GpuReport])
    assert [(gpu.index, gpu.name, gpu.wrong, gpu.bus_id) for gpu in gpus] == [
        (0, "CPU", None, None),
        (1, "CPU", None, None),
    ]
    assert all(gpu.flops > 0 and gpu.memory_bytes_per_s > 0 for gpu in gpus)
    assert list(document["allreduce"]) == ["gloo within nodes"]
    assert [point["bytes"] for point in document["allreduce"]["gloo within nodes"]][:2] == [1024, 4096]


def test_the_check_names_a_bad_gpu_as_its_nodes_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in of the measuring program, with figures as four GPUs of a node give them."""
    figures: list[dict[str, object]] = [
        {"host": "here", "index": index, "bus_id": f"0000:0{index}:00.0", "name": "A100", "flops": rate,
         "memory_bytes_per_s": 1.4e12, "wrong": None, "peers": {}}
        for index, rate in enumerate([2.5e14, 2.6e14, 1.1e14, 2.5e14])
    ]  # fmt: skip
    points = [{"bytes": 1024, "seconds": 2e-5}]

    def answer(command: list[str], *, env: dict[str, str], timeout_s: float) -> None:
        file = Path(command[command.index("--json") + 1])
        file.write_text(json.dumps({"gpus": figures, "allreduce": {"nccl within nodes": points}}))

    monkeypatch.setattr("hpcjobs.fabric.check.run", answer)
    findings = Findings([NodeMeasurements("here")])
    place = HostGroup(("here",), False, None, None, None, "")
    measure_gpus(place, findings.nodes, findings, tmp_path, quick=False, tolerance=0.3, until=float("inf"))
    assert findings.nodes[0].failures == ["GPU 2 (0000:02:00.0) computes at 110 TFLOP/s, the others 250"]
    assert findings.allreduce == {"nccl within nodes": (FabricPoint(1024, 2e-5),)}
    assert [gpu.index for gpu in findings.gpus] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("message", "failure"),
    [
        ("error: on n2: 7 of the job's 8 GPUs are visible", "7 of the job's 8 GPUs are visible"),
        (
            "error: rank 9 on n2.cluster: CUDA error: uncorrectable ECC error encountered. Hint: another node",
            "uncorrectable ECC error encountered",
        ),
        (
            "error: rank 8 on n2: Error 802: system not yet initialized. Hint: another node",
            "system not yet initialized",
        ),
    ],
)
def test_a_node_that_lacks_a_gpu_or_has_a_broken_one_is_bad_and_the_others_are_measured_without_it(
    message: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def answer(command: list[str], *, env: dict[str, str], timeout_s: float) -> None:
        nodes = next(argument for argument in command if argument.startswith("--nodelist="))
        started.append(nodes)
        if "n2" in nodes:
            raise Failed(message)
        figures = [
            {"host": "n1", "index": 0, "bus_id": None, "name": "A100", "flops": 2e14, "memory_bytes_per_s": 1e12}
        ]
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"gpus": figures, "allreduce": {}}))

    monkeypatch.setattr("hpcjobs.fabric.check.run", answer)
    findings = Findings([NodeMeasurements("n1"), NodeMeasurements("n2")])
    place = HostGroup(("n1", "n2"), True, None, None, None, "")
    measure_gpus(place, findings.nodes, findings, tmp_path, quick=True, tolerance=0.3, until=float("inf"))
    assert [node.host for node in findings.nodes if node.failures] == ["n2"]
    assert failure in findings.nodes[1].failures[0]
    assert started == ["--nodelist=n1,n2", "--nodelist=n1"]
    assert [gpu.host for gpu in findings.gpus] == ["n1"]
    assert findings.notes == []


def test_an_error_of_the_program_is_a_note_and_no_fault_of_the_node_that_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(command: list[str], *, env: dict[str, str], timeout_s: float) -> None:
        raise Failed("error: rank 0 on n1: CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr("hpcjobs.fabric.check.run", answer)
    findings = Findings([NodeMeasurements("n1")])
    place = HostGroup(("n1",), True, None, None, None, "")
    measure_gpus(place, findings.nodes, findings, tmp_path, quick=True, tolerance=0.3, until=float("inf"))
    assert findings.nodes[0].failures == []
    assert "insufficient" in findings.notes[0]


@pytest.mark.parametrize(
    ("visible", "variables", "code"),
    [
        (7, {"SLURM_GPUS_ON_NODE": "8"}, 22),
        (1, {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "MIG-1a2b,MIG-3c4d"}, 0),  # CUDA shows one slice
        (8, {"SLURM_GPUS_ON_NODE": "8"}, 0),
        (4, {}, 0),
    ],
)
def test_a_node_that_shows_fewer_gpus_than_the_job_has_there_says_so(
    visible: int, variables: dict[str, str], code: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    for name in ("SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(measuring, "start_ranks", lambda flags, count: 0)
    assert measuring.main(["--json", str(tmp_path / "gpus.json")]) == code
    complaint = capsys.readouterr().err
    assert (": 7 of the job's 8 GPUs are visible" in complaint) == (code == 22)


@pytest.mark.parametrize(("least_s", "rounds"), [(0.0, 6), (0.3, 40)])
def test_products_are_timed_until_the_clocks_are_up_and_copies_are_not(
    least_s: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies from each of 8 GPUs to each other one would take a quarter of a minute."""
    clock = iter(number / 128 for number in range(200))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(clock))
    calls: list[None] = []
    assert measuring.best_time(lambda: calls.append(None), torch.device("cpu"), least_s=least_s) == 1 / 128
    assert len(calls) == rounds


def test_where_a_gpu_admits_one_process_only_its_links_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute mode Exclusive_Process: a copy to a neighbour would need a second process on it."""

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "zeros_like", refuse)
    message = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    assert measuring.copy_to_peers(torch.device("cpu"), 64) == ({}, None)
    message = "CUDA error: uncorrectable NVLink error detected during the execution"
    with pytest.raises(RuntimeError, match="NVLink"):
        measuring.copy_to_peers(torch.device("cpu"), 64)


def test_where_gpus_cannot_be_measured_the_report_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(variable, "")
    findings = Findings([NodeMeasurements("here")])
    place = HostGroup(("here",), False, None, None, None, "")
    measure_gpus(place, findings.nodes, findings, tmp_path, quick=False, tolerance=0.3, until=float("inf"))
    assert findings.nodes[0].failures == []
    assert findings.notes == ["GPUs not measured: error: no GPU is visible here"]
