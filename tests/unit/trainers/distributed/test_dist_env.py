"""Who am I: read from the environment of every launcher, and refused where it contradicts itself."""

from __future__ import annotations

import pytest

from hpcjobs.runtime.dist import DistEnv, first_host
from hpcjobs.runtime.exits import UsageError, WorldMismatch

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "c[07-08]",
}


def test_torchrun_variables_are_read_whole() -> None:
    env = DistEnv.from_environ(TORCHRUN)
    assert env == DistEnv(5, 1, 8, 2, 2, "n1", 29500, "torchrun")


def test_plain_srun_needs_no_other_variables() -> None:
    env = DistEnv.from_environ(SRUN)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size, env.node_rank) == (3, 5, 0, 2, 1)
    assert env.master_addr == "c07"


def test_all_tasks_of_a_step_agree_on_the_port_and_another_step_has_another() -> None:
    ports = [DistEnv.from_environ({**SRUN, "SLURM_PROCID": str(rank)}).master_port for rank in range(3)]
    other = DistEnv.from_environ({**SRUN, "SLURM_STEP_ID": "1"}).master_port
    assert len(set(ports)) == 1
    assert other not in ports


def test_mpirun_on_one_host_meets_on_loopback() -> None:
    names = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    env = DistEnv.from_environ(
        {**{f"OMPI_COMM_WORLD_{key}": value for key, value in names.items()}, "PMIX_NAMESPACE": "123@1"}
    )
    assert (env.rank, env.world_size, env.master_addr, env.launcher) == (1, 4, "127.0.0.1", "mpirun")


def test_mpirun_on_several_hosts_without_a_master_is_refused_with_the_flag_that_helps() -> None:
    names = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    with pytest.raises(UsageError, match=r"MASTER_ADDR is not set.*mpirun -x MASTER_ADDR"):
        DistEnv.from_environ({f"OMPI_COMM_WORLD_{key}": value for key, value in names.items()})


ORTED = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "PMIX_NAMESPACE": "123@1",
}
"""What the daemon that mpirun starts on the second node has of the step it runs in."""


@pytest.mark.parametrize(
    "place",
    [
        {f"OMPI_COMM_WORLD_{key}": value for key, value in
         {"RANK": "2", "SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items()},
        {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
        {"PMI_RANK": "2", "PMI_SIZE": "4"},
    ],
)  # fmt: skip
def test_the_step_of_the_daemon_that_mpirun_starts_says_nothing_about_the_ranks(place: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="MASTER_ADDR is not set"):
        DistEnv.from_environ({**ORTED, **place})
    first = {**place, **{key: value.replace("2", "0") for key, value in place.items() if key.endswith("_RANK")}}
    meeting = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    both = [DistEnv.from_environ({**meeting, **first}), DistEnv.from_environ({**meeting, **ORTED, **place})]
    assert [(env.rank, env.world_size) for env in both] == [(0, 4), (2, 4)]


def test_all_ranks_of_an_mpirun_agree_on_the_port_whatever_step_their_daemon_runs_in() -> None:
    names = {"RANK": "0", "SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    place = {f"OMPI_COMM_WORLD_{key}": value for key, value in names.items()}
    head = {"SLURM_JOB_ID": "77", "PMIX_NAMESPACE": "123@1", "MASTER_ADDR": "n1"}
    ports = [DistEnv.from_environ({**place, **outside, "MASTER_ADDR": "n1"}).master_port for outside in (head, ORTED)]
    assert ports[0] == ports[1]


def test_ranks_that_srun_started_by_pmi_meet_on_the_first_node_of_their_step() -> None:
    env = DistEnv.from_environ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "5"})
    assert (env.master_addr, env.local_rank, env.local_world_size, env.node_rank) == ("c07", 0, 2, 1)
    assert env.master_port == DistEnv.from_environ(SRUN).master_port


def test_a_program_started_by_hand_in_the_shell_of_salloc_does_not_train_alone() -> None:
    interactive = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}
    with pytest.raises(WorldMismatch, match=r"SLURM_NTASKS=8.*srun"):
        DistEnv.from_environ(interactive)


def test_a_step_of_one_task_within_a_larger_job_is_a_world_of_one() -> None:
    env = DistEnv.from_environ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"})
    assert (env.rank, env.world_size) == (0, 1)


def test_horovod_variables_are_read() -> None:
    names = {"RANK": "2", "SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "CROSS_RANK": "1"}
    place = {f"HOROVOD_{key}": value for key, value in names.items()}
    env = DistEnv.from_environ({**place, "MASTER_ADDR": "h", "MASTER_PORT": "4000"})
    assert (env.rank, env.node_rank, env.launcher) == (2, 1, "horovod")


def test_a_process_alone_is_a_world_of_one() -> None:
    env = DistEnv.from_environ({})
    assert (env.rank, env.world_size, env.master_port) == (0, 1, None)


def test_a_task_of_a_larger_job_outside_srun_does_not_train_alone() -> None:
    with pytest.raises(WorldMismatch, match=r"SLURM_NTASKS=8.*srun"):
        DistEnv.from_environ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"})


def test_a_rank_exported_once_for_all_tasks_is_noticed() -> None:
    with pytest.raises(UsageError, match=r"RANK=0 but SLURM_PROCID=3 of 5 tasks.*per task"):
        DistEnv.from_environ({**TORCHRUN, **SRUN, "RANK": "0", "WORLD_SIZE": "5", "LOCAL_RANK": "0"})


def test_a_world_of_one_inside_a_larger_step_is_refused() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(WorldMismatch, match=r"WORLD_SIZE=1 but SLURM_STEP_NUM_TASKS=5"):
        DistEnv.from_environ({**SRUN, **place})


def test_torchruns_own_ranks_need_not_match_sruns_counter() -> None:
    agent = {"TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}
    assert DistEnv.from_environ({**TORCHRUN, **agent}).rank == 5


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        ({"RANK": "8"}, "RANK=8 does not fit WORLD_SIZE=8"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 does not fit LOCAL_WORLD_SIZE=2"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not a number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port"),
    ],
)
def test_contradictions_name_the_variables_and_their_values(change: dict[str, str], settings: str) -> None:
    with pytest.raises(UsageError, match=settings):
        DistEnv.from_environ({**TORCHRUN, **change})


def test_the_device_is_the_local_rank_among_those_the_task_can_see() -> None:
    env = DistEnv.from_environ(TORCHRUN)
    assert env.device_index(2) == 1
    assert env.device_index(1) == 0  # Slurm shows each task only its own GPU


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n[003-007,9],x1", "n003"),
        ("gpu-1,gpu-2", "gpu-1"),
        ("a[1,3]-ib", "a1-ib"),
        ("solo", "solo"),
        ("rack[1-2]-gpu[01-02]", "rack1-gpu01"),
        ("rack[2,1]-gpu[04-05]-ib", "rack2-gpu04-ib"),
    ],
)
def test_the_first_host_of_a_slurm_list_is_found(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first
