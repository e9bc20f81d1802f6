"""Ranks that share cores are told of."""

from __future__ import annotations

from hpcjobs.trainers.distributed import describe_shared_cores, format_cores


def test_cores_are_written_as_taskset_takes_them() -> None:
    assert format_cores({0, 1, 2, 5, 8, 9}) == "0-2,5,8-9"


def test_a_host_with_more_threads_than_cores_is_named() -> None:
    ranks = [(2, {0, 1, 2, 3}), (2, {0, 1, 2, 3}), (2, {0, 1}), (2, {0, 1})]
    (line,) = describe_shared_cores(["a", "a", "b", "b"], ranks)
    assert line.startswith("warning: 2 ranks on b share cores: 4 threads on 2 (0-1); ")


def test_ranks_with_cores_of_their_own_are_no_news() -> None:
    assert not list(describe_shared_cores(["a", "a"], [(2, {0, 1}), (2, {2, 3})]))
