"""The sampler of `hpcjobs monitor`: control groups of both versions, processes by their environment, GPUs, its file."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from interpreters import interpreter
from waiting import eventually

from hpcjobs.node.monitor import GpuReader, JobGroup, JobProcesses, NodeSampler
from hpcjobs.packing import pack


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_the_jobs_group_of_version_2_has_memory_without_caches_its_limit_and_cpu_time(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/system.slice/slurmstepd.scope/job_12/step_3/user/task_0\n")
    write(
        tmp_path / "fs/system.slice/slurmstepd.scope/job_12",
        {"memory.stat": "anon 100\nfile 900\nshmem 20\n", "memory.max": "4096\n", "cpu.stat": "usage_usec 2500000\n"},
    )
    group = JobGroup(str(tmp_path / "fs"), str(tmp_path / "own"))
    assert (group.used_bytes(), group.limit_bytes(), group.cpu_s()) == (120, 4096, 2.5)


PARENT = """
import subprocess, sys
burn = "import time\\nend = time.process_time() + {}\\nwhile time.process_time() < end: pass"
exec(burn.format(0.1))
subprocess.run([sys.executable, "-c", burn.format(1)], check=True)
print("ended", flush=True)
input()
"""


def test_the_time_of_a_ranks_child_does_not_arrive_at_once_when_it_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"ended\n"
        own = JobProcesses(ranks={rank.pid: 0}).read().cpu_s
        rank.stdin.close()
    assert 0 < own < 0.9


def test_the_jobs_group_of_version_1_too_and_no_limit_is_none(tmp_path: Path) -> None:
    place = "slurm/uid_0/job_12"
    (tmp_path / "own").write_text(f"4:memory:/{place}/step_0\n3:cpu,cpuacct:/{place}/step_0\n1:name=systemd:/x\n")
    files = {"memory.stat": "total_rss 7\ntotal_shmem 1\n", "memory.limit_in_bytes": f"{(1 << 63) - 4096}\n"}
    write(tmp_path / "fs/memory" / place, files)
    write(tmp_path / "fs/cpu,cpuacct" / place, {"cpuacct.usage": "1500000000\n"})
    group = JobGroup(str(tmp_path / "fs"), str(tmp_path / "own"))
    assert (group.used_bytes(), group.limit_bytes(), group.cpu_s()) == (8, None, 1.5)


@pytest.mark.parametrize(
    ("place", "own", "name", "least"),
    [
        ("", "0::/system.slice/slurmstepd.scope/job_12/step_3\n", "memory.max", "system.slice"),
        ("memory", "4:memory:/slurm/uid_0/job_12/step_0\n", "memory.limit_in_bytes", "slurm/uid_0"),
    ],
    ids=["version 2", "version 1"],
)
def test_the_limit_is_the_least_one_of_the_jobs_group_and_those_it_lies_in(
    tmp_path: Path, place: str, own: str, name: str, least: str
) -> None:
    (tmp_path / "own").write_text(own)
    job = own.split(":")[2].partition("/step")[0].lstrip("/")
    write(tmp_path / "fs" / place / job, {name: "8192\n", "memory.stat": "anon 1\n"})
    (tmp_path / "fs" / place / least / name).write_text("4096\n")
    (tmp_path / "fs" / name).write_text("1\n")  # above the hierarchy: nobody's
    assert JobGroup(str(tmp_path / "fs"), str(tmp_path / "own")).limit_bytes() == 4096


def test_outside_a_group_of_slurms_nothing_is_invented(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/user.slice\n")
    group = JobGroup(str(tmp_path), str(tmp_path / "own"))
    assert (group.used_bytes(), group.limit_bytes(), group.cpu_s()) == (None, None, None)


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two ranks of job 4711 on this machine, and a process of another job."""
    started = [
        subprocess.Popen(["sleep", "600"], env={**os.environ, "HPCJOBS_JOB_ID": job, "RANK": rank})
        for job, rank in (("4711", "0"), ("4711", "1"), ("4712", "0"))
    ]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_memory_that_processes_share_counts_once(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n")
    group = JobGroup(str(tmp_path), str(tmp_path / "own"))
    program = (
        "import os, signal; held = bytearray(b'1') * (100 << 20); [os.fork() for _ in range(2)];"
        f" open('{tmp_path}/ready', 'a').write('x'); signal.pause()"
    )
    held = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "HPCJOBS_JOB_ID": "4713"}, start_new_session=True
    )
    try:
        ready = tmp_path / "ready"
        eventually(lambda: ready.exists() and len(ready.read_text()) == 4)
        sample = NodeSampler(JobProcesses("4713"), group, GpuReader({}, None)).sample()
    finally:
        os.killpg(held.pid, signal.SIGKILL)
        held.wait()
    assert sample["memory_source"] == "pss"
    assert 100 << 20 <= sample["rss_bytes"] < 150 << 20


def test_processes_are_the_jobs_by_their_environment_and_a_rank_that_ends_is_named(
    ranks: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    (tmp_path / "own").write_text("0::/\n")
    processes = JobProcesses("4711")
    eventually(lambda: processes.read().ranks == {0, 1})
    now = [100.0]
    group = JobGroup(str(tmp_path), str(tmp_path / "own"))
    sampler = NodeSampler(processes, group, GpuReader({}, None), clock=lambda: now[0])
    now[0] += 5
    first = sampler.sample()
    assert (first["ranks"], first["ended_ranks"], first["ended_s"]) == (2, [], None)
    assert first["rss_bytes"] > 100_000
    assert first["idle_s"] == 5.0
    ranks[1].kill()
    ranks[1].wait()
    for _ in range(2):
        now[0] += 30
        last = sampler.sample()
    assert (last["ranks"], last["ended_ranks"], last["ended_s"]) == (1, [1], 30.0)


@pytest.mark.parametrize(
    ("variables", "limit_bytes"),
    [
        ({"SLURM_MEM_PER_NODE": "64"}, 64 << 20),
        ({"SLURM_MEM_PER_CPU": "32", "SLURM_CPUS_ON_NODE": "4"}, 128 << 20),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({}, None),
    ],
)
def test_where_no_control_group_limits_the_memory_the_limit_is_what_the_job_asked_for(
    tmp_path: Path, variables: dict[str, str], limit_bytes: int | None
) -> None:
    (tmp_path / "own").write_text("0::/user.slice\n")
    job = subprocess.Popen(["sleep", "600"], env={**os.environ, "SLURM_JOB_ID": "4711", **variables})
    try:
        processes = JobProcesses("4711")
        eventually(lambda: processes.read().cores)
        group = JobGroup(str(tmp_path), str(tmp_path / "own"))
        assert NodeSampler(processes, group, GpuReader({}, None)).sample()["memory_limit_bytes"] == limit_bytes
    finally:
        job.kill()
        job.wait()


def test_the_cpu_time_of_short_programs_counts_once_they_have_ended(tmp_path: Path) -> None:
    burn = f"{sys.executable} -c 'import time\nwhile time.process_time() < 0.4: pass'"
    program = f"read; {burn}; {burn}; touch done; read; ({burn}); exit 0"
    env = {**os.environ, "HPCJOBS_JOB_ID": "4711"}
    job = subprocess.Popen(["bash", "-c", program], stdin=subprocess.PIPE, env=env, cwd=tmp_path)
    assert job.stdin is not None
    try:
        processes = JobProcesses("4711")
        eventually(lambda: processes.read().cores)
        before = processes.read().cpu_s
        job.stdin.write(b"\n")
        job.stdin.flush()
        eventually((tmp_path / "done").exists)
        between = processes.read().cpu_s
        assert 0.7 < between - before < 3
        job.stdin.write(b"\n")
        job.stdin.close()
        assert job.wait() == 0
        assert processes.read().cpu_s >= between
    finally:
        job.kill()
        job.wait()


class Library:
    """NVIDIA's management library as far as it is called: two GPUs, of which the second is a part of one."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0 if index.value < 2 else 6

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 2
        return 0 if uuid == b"GPU-b" else 6

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, value: Any) -> int:
        value._obj.gpu = 80
        return 3 if handle.value == 2 else 0  # not supported

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, value: Any) -> int:
        value._obj.used = 1000 * (handle.value or 0)
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: ctypes.c_void_p, value: Any) -> int:
        value._obj.value = 250_000
        return 0

    def nvmlDeviceGetTemperature(self, handle: ctypes.c_void_p, sensor: int, value: Any) -> int:
        value._obj.value = 40 + (handle.value or 0)
        return 0


def test_gpus_are_those_that_the_job_holds() -> None:
    values = {
        "gpu_percent": 80.0,
        "gpu_memory_bytes": 3000.0,
        "gpu_power_w": 500.0,
        "gpu_temperature_c": 42.0,
    }
    assert GpuReader({}, Library()).read() == values
    assert len(GpuReader({"CUDA_VISIBLE_DEVICES": "1"}, Library())) == 1
    assert GpuReader({"CUDA_VISIBLE_DEVICES": "GPU-b"}, Library()).read()["gpu_percent"] is None
    assert len(GpuReader({"CUDA_VISIBLE_DEVICES": ""}, Library())) == 0
    assert set(GpuReader({}, None).read().values()) == {None}


class FallenLibrary(Library):
    """The second GPU has fallen off the bus: it has a handle and answers nothing, and is not counted as 0 W."""

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, value: Any) -> int:
        return 15 if handle.value == 2 else super().nvmlDeviceGetMemoryInfo(handle, value)

    def nvmlDeviceGetPowerUsage(self, handle: ctypes.c_void_p, value: Any) -> int:
        return 15 if handle.value == 2 else super().nvmlDeviceGetPowerUsage(handle, value)


@pytest.mark.parametrize(
    ("held", "library", "watts"),
    [
        ("0,1", Library(), 500.0),
        ("0,1", FallenLibrary(), None),
        ("0,7", Library(), None),
        ("0", FallenLibrary(), 250.0),
    ],
    ids=["both answer", "one is lost", "one has no handle", "the lost one is another job's"],
)
def test_a_sum_over_gpus_of_which_one_does_not_answer_is_unknown(
    held: str, library: Library, watts: float | None
) -> None:
    values = GpuReader({"CUDA_VISIBLE_DEVICES": held}, library).read()
    assert (values["gpu_power_w"], values["gpu_memory_bytes"] is None) == (watts, watts is None)
    assert values["gpu_percent"] == 80.0


@pytest.mark.parametrize(
    "environ",
    [{"CUDA_VISIBLE_DEVICES": "GPU-b"}, {"CUDA_VISIBLE_DEVICES": "MIG-1"}, {"ROCR_VISIBLE_DEVICES": "0"}],
    ids=["no utilisation of its own", "not known to the library", "another vendor's"],
)
def test_a_job_whose_gpus_cannot_be_read_is_never_called_idle(environ: dict[str, str], tmp_path: Path) -> None:
    group = JobGroup(str(tmp_path), str(tmp_path / "own"))
    library = None if "ROCR_VISIBLE_DEVICES" in environ else Library()
    sample = NodeSampler(JobProcesses("4711"), group, GpuReader(environ, library)).sample()
    assert (sample["busy_percent"], sample["idle_s"]) == (None, None)


@pytest.mark.parametrize("held", ["", "-1", "NoDevFiles"])
def test_without_gpus_the_cores_count(held: str, tmp_path: Path) -> None:
    group = JobGroup(str(tmp_path), str(tmp_path / "own"))
    sample = NodeSampler(JobProcesses("4711"), group, GpuReader({"CUDA_VISIBLE_DEVICES": held}, Library())).sample()
    assert sample["gpus"] is None
    assert sample["idle_s"] is not None


@contextmanager
def start_sampler(argv: list[str], **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """It is killed in the end, if it still runs then."""
    with subprocess.Popen(argv, env={**os.environ, **env}) as sampler:
        try:
            yield sampler
        finally:
            sampler.kill()


@pytest.mark.parametrize("version", ["3.6", "this"])
def test_the_packed_sampler_writes_until_it_is_ended_and_ignores_signals_for_the_program(
    ranks: list[subprocess.Popen[bytes]], tmp_path: Path, version: str
) -> None:
    python = sys.executable if version == "this" else interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    program = tmp_path / "monitor.pyz"
    program.write_bytes(pack("hpcjobs.node.monitor"))
    arguments = [python, "-I", str(program), str(tmp_path), "4711", "0.2"]
    path = tmp_path / "monitor-3.jsonl"
    with start_sampler(arguments, SLURM_NODEID="3", SLURMD_NODENAME="n3") as sampler:
        eventually(lambda: len(read(path)) > 2)
        sampler.send_signal(signal.SIGUSR1)
        count = len(read(path))
        eventually(lambda: len(read(path)) > count + 1)
        second = subprocess.run(arguments, env={**os.environ, "SLURM_NODEID": "3"}, capture_output=True, text=True)
        assert second.returncode == 0
        assert "n3 samples" in second.stderr
        sampler.terminate()
        assert sampler.wait() == 0
    head, *samples, end = read(path)
    assert end == {"kind": "end"}
    assert (head["kind"], head["host"], head["schema"]) == ("monitor", "n3", "hpcjobs.monitor/1")
    assert {sample["ranks"] for sample in samples} == {2}
    # It has ended, so that another one may begin at once: the job's next attempt.
    with start_sampler(arguments, SLURM_NODEID="3", SLURMD_NODENAME="n4") as third:
        # For a moment the file is empty.
        eventually(lambda: len(lines := read(path)) > 1 and lines[0]["host"] == "n4")
        third.terminate()
        assert third.wait() == 0


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """The start of the sampler's command: all but job and interval."""
    path = tmp_path / "monitor.pyz"
    path.write_bytes(pack("hpcjobs.node.monitor"))
    return [sys.executable, "-I", str(path), str(tmp_path)]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_sampler_that_stands_still_keeps_its_file_and_another_job_is_refused(
    program: list[str], tmp_path: Path
) -> None:
    path, env = tmp_path / "monitor.jsonl", {**os.environ, "SLURMD_NODENAME": "n3"}
    first = subprocess.Popen([*program, "4711", "0.2"], env=env)
    try:
        eventually(lambda: len(read(path)) > 1)
        first.send_signal(signal.SIGSTOP)
        lines = read(path)
        os.utime(path, (1, 1))
        same, other = (
            subprocess.run([*program, job, "0.2"], env=env, capture_output=True, text=True) for job in ("4711", "4712")
        )
        assert read(path) == lines
        assert (same.returncode, other.returncode) == (0, 1)
        assert "already" in same.stderr
        assert "already" in other.stderr
    finally:
        first.kill()
        first.wait()


def test_samples_of_the_same_job_and_node_are_continued_also_behind_half_a_line(
    program: list[str], tmp_path: Path
) -> None:
    path, env = tmp_path / "monitor.jsonl", {**os.environ, "SLURMD_NODENAME": "n3"}
    text = ""
    for _ in range(2):
        sampler = subprocess.Popen([*program, "4711", "0.2"], env=env)
        before = text.count("\n")
        eventually(lambda before=before: path.exists() and path.read_text().count("\n") > before + 2)  # type: ignore[misc]
        sampler.kill()
        sampler.wait()
        with path.open("a") as file:
            file.write('{"kind": "sam')
        assert path.read_text().startswith(text)
        text = path.read_text()
    times = [json.loads(line).get("time_s", 0.0) for line in path.read_text().splitlines() if line[-1] == "}"]
    assert path.read_text().count('"monitor"') == 1
    assert times == sorted(times)
    assert len(times) > 4


def test_a_line_that_is_being_written_is_a_sign_of_another_sampler(program: list[str], tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl"
    path.write_text('{"kind": "monitor", "host": "n3", "started_at": 1e9, "interval_s": 5}\n{"kind": "sam')
    with subprocess.Popen([*program, "4711", "0.2"], stderr=subprocess.PIPE, text=True) as second:
        assert second.stderr is not None
        while second.poll() is None:
            with path.open("a") as file:
                file.write("p")
        assert "n3 samples" in second.stderr.read()
    assert path.read_text().startswith('{"kind": "monitor", "host": "n3"')
