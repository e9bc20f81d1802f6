"""Slurm's host lists."""

from __future__ import annotations

import pytest

from hpcjobs.slurm_commands import hosts_of


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("", ""),
        ("tu01", "tu01"),
        ("tu[01-03]", "tu01 tu02 tu03"),
        ("tu[09-11,7],x1", "tu09 tu10 tu11 tu7 x1"),
        ("r[1-2]n[1-2]-ib", "r1n1-ib r1n2-ib r2n1-ib r2n2-ib"),
    ],
)
def test_every_host_is_named(nodelist: str, hosts: str) -> None:
    assert hosts_of(nodelist) == hosts.split()
