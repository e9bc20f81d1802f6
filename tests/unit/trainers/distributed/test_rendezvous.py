"""The world forms or says why not; one rank speaks for all."""

from __future__ import annotations

import json
import socket

from torch._C._distributed_c10d import HashStore

from hpcjobs.trainers import distributed

from ..conftest import World, worlds_path


def test_two_ranks_train_together_and_every_rank_says_where_it_runs(world: World) -> None:
    environment = {"HPCJOBS_NTASKS": "2", "HPCJOBS_NNODES": "1"}
    ended = world(2, "ddp", "--steps", "12", "--log-every", "5", env=environment, copied=False)
    host = socket.gethostname()
    assert ended.codes == [0, 0]
    assert ended.complaints == []
    assert [f"rank {rank} of 2 on {host}" in out for rank, out in enumerate(ended.out)] == [True, True]
    assert ended.summary.hosts == (host, host)
    assert (ended.summary.world_size, ended.summary.steps, ended.summary.backend) == (2, 12, "gloo")
    assert [line["step"] for line in ended.lines("step")] == [5, 10, 12]
    assert ended.summary.evaluation is not None
    assert ended.summary.evaluation.predictions == 1000
    assert (ended.summary.bytes_moved_per_step, ended.summary.collectives_per_step) == (4 * 215722, 1)


def test_fewer_hosts_than_the_job_asked_for_are_refused_by_one_line(world: World) -> None:
    ended = world(2, "ddp", "--steps", "1", env={"HPCJOBS_NNODES": "2"})
    assert ended.codes == [10, 10]
    assert len(ended.complaints) == 1
    assert "asked for 2 nodes (HPCJOBS_NNODES), but its 2 ranks run on 1" in ended.complaints[0]


def test_a_rank_that_never_comes_is_named(world: World) -> None:
    ended = world(2, "ddp", "--rendezvous-timeout-s", "6", env={"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"})
    assert ended.codes == [11, 11]
    assert len(ended.complaints) == 1
    assert "1 of 3 ranks did not arrive" in ended.complaints[0]
    assert "rank 2; arrived: " in ended.complaints[0]


def test_a_first_host_that_does_not_answer_is_named_with_the_reason(world: World) -> None:
    ended = world(
        1, "ddp", "--rendezvous-timeout-s", "1", env={"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    )
    assert ended.codes == [11]
    assert "rank 1" in ended.complaints[0]
    assert "Connection refused" in ended.complaints[0]


def test_two_processes_with_one_rank_are_noticed(world: World) -> None:
    ended = world(3, "ddp", "--rendezvous-timeout-s", "4", env_of={2: {"RANK": "1"}})
    assert sorted(ended.codes) == [10, 11, 11]
    assert any("2 processes call themselves rank 1" in line for line in ended.complaints)


def test_ranks_whose_agents_count_their_restarts_differently_meet(world: World) -> None:
    """An agent counts the failures of its own ranks, and not the restarts for a node that joined or left."""
    counts = {rank: {"TORCHELASTIC_RESTART_COUNT": str(rank)} for rank in range(2)}
    ended = world(2, "ddp", "--steps", "1", "--rendezvous-timeout-s", "6", env_of=counts)
    assert ended.codes == [0, 0], ended.err


def test_the_rank_that_fails_speaks_and_its_peers_keep_quiet(world: World) -> None:
    ended = world(2, "ddp", "--workload", "worlds:full_on_rank_1", env={"PYTHONPATH": worlds_path()})
    assert ended.codes == [12, 12]
    assert len(ended.complaints) == 1
    assert "rank 1 ran out of memory" in ended.complaints[0]
    assert "--accumulate" in ended.complaints[0]
    assert (ended.summary.status, ended.summary.exit_code) == ("failed", 12)
    assert ended.summary.error == ended.complaints[0].removeprefix("error: ")


def test_ranks_with_different_data_are_refused_by_name(world: World) -> None:
    ended = world(2, "ddp", "--workload", "worlds:more_on_rank_1", env={"PYTHONPATH": worlds_path()})
    assert ended.codes == [16, 16]
    assert len(ended.complaints) == 1
    assert "(64, 0) training and held-out samples, rank 1" in ended.complaints[0]


def test_ranks_have_the_names_of_slurms_nodes_unless_a_launcher_sent_the_first_ones_to_all() -> None:
    by_slurm = claims(["cn-a.site", "n1"], ["cn-b.site", "n2"])
    sent_to_all = claims(["cn-a.site", "n1"], ["cn-b.site", "n1"])
    several_on_one_machine = claims(["machine", "n1"], ["machine", "n2"])
    assert distributed.node_names(by_slurm, ["0", "1"]) == ["n1", "n2"]
    assert distributed.node_names(sent_to_all, ["0", "1"]) == ["cn-a.site", "cn-b.site"]
    assert distributed.node_names(several_on_one_machine, ["0", "1"]) == ["n1", "n2"]


def claims(*hosts_and_nodes: list[str]) -> HashStore:
    store = HashStore()
    for rank, claim in enumerate(hosts_and_nodes):
        store.set(str(rank), json.dumps(claim))
    return store
