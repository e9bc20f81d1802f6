"""A request that does not fit its site names what would take it."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import ok, within

SMALL = "partitions: {batch: {nodes: 2, node: {cpus: 4, mem: 8G}}}\n"
LARGE = "partitions: {batch: {nodes: 64, node: {cpus: 4, mem: 8G}}, wide: {nodes: 99, node: {cpus: 4, mem: 8G}}}\n"


@pytest.fixture(autouse=True)
def _sites() -> None:
    folder = Path("site_configs")
    folder.mkdir()
    (folder / "small.yaml").write_text(SMALL)
    (folder / "large.yaml").write_text(LARGE)
    (folder / "broken.yaml").write_text("partitions: 7\n")


def test_a_request_that_is_too_large_for_its_site_names_the_sites_that_take_it() -> None:
    answer = within("submit", "--site", "small", "-N", "40", "hostname")
    assert answer.code == 5
    assert answer.err.endswith("hint: takes it: --site large\n"), answer.err
    assert "-N 40" not in ok("submit", "--site", "large", "--dry-run", "-N", "40", "hostname").err


def test_a_partition_of_the_same_site_comes_before_other_sites() -> None:
    answer = within("submit", "--site", "large", "-p", "batch", "-N", "70", "hostname")
    assert answer.err.endswith("takes it: -p wide\n")


def test_what_fits_nowhere_names_no_site() -> None:
    assert "takes it" not in within("submit", "--site", "small", "-N", "4000", "hostname").err
