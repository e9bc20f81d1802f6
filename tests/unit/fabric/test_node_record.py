"""What is remembered of nodes: appended, decaying, forgiving."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from commandline import ok, within

from hpcjobs.fabric.verdict import (
    BAD,
    CLEARED,
    GOOD,
    HALF_LIFE_S,
    NodeVerdict,
    append,
    find_avoided,
    read,
    record_path,
)

DAY = 86400.0


def seen(path: Path, *verdicts: tuple[str, float]) -> list[str]:
    """The nodes avoided at time 0, after these verdicts on one node, so many days ago."""
    append(path, [NodeVerdict("n1", verdict, -days * DAY, "why") for verdict, days in verdicts])
    return list(find_avoided(path, 0.0))


@pytest.mark.parametrize(
    ("verdicts", "avoids"),
    [
        ([(BAD, 0.1)], True),
        ([(BAD, 1.9)], True),
        ([(BAD, 2.1)], False),
        ([(BAD, 3), (BAD, 2.5)], True),  # the second counts on top of what is left of the first
        ([(BAD, 1), (GOOD, 0.5)], False),
        ([(BAD, 1), (CLEARED, 0.5)], False),
        ([(GOOD, 1), (GOOD, 0.5)], False),
        ([(GOOD, 1), (BAD, 0.5)], True),
    ],
)
def test_a_bad_verdict_counts_for_a_half_life_and_a_good_one_takes_it_back(
    tmp_path: Path, verdicts: list[tuple[str, float]], avoids: bool
) -> None:
    assert bool(seen(tmp_path / "record", *verdicts)) is avoids


def test_a_line_that_a_full_disk_cut_off_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record"
    append(path, [NodeVerdict("n1", BAD, 1.0)])
    (log,) = path.iterdir()
    with log.open("a") as file:
        file.write('{"node": "n2", "verd\n')
    append(path, [NodeVerdict("n3", BAD, 2.0, 'said "so", नमस्ते')])
    assert [verdict.node for verdict in read(path)] == ["n1", "n3"]
    assert read(path)[1].reason == 'said "so", नमस्ते'
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_user_sees_the_record_and_clears_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "state"))
    assert "no verdicts" in ok("nodes", "--site", "tu-hpc").out
    append(
        record_path("tu-hpc"), [NodeVerdict("tu03", BAD, time.time() - HALF_LIFE_S / 4, "interface eth0 is down", "7")]
    )
    assert "interface eth0 is down" in ok("nodes", "--site", "tu-hpc").out
    (shown,) = ok("nodes", "--site", "tu-hpc", "--json").json["nodes"]
    assert (shown["node"], shown["left_out_until"] is None) == ("tu03", False)
    refused = within("nodes", "--site", "tu-hpc", "--clear", "tu99")
    assert (refused.code, "node 'tu99' has no record" in refused.err) == (6, True)
    ok("nodes", "--site", "tu-hpc", "--clear", "tu03")
    assert ok("nodes", "--site", "tu-hpc", "--json").json["nodes"][0]["left_out_until"] is None


@pytest.fixture
def tu03_is_bad(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "state"))
    (here / "site_configs").mkdir()
    for name in ("mine", "other"):
        (here / "site_configs" / f"{name}.yaml").write_text("partitions: {all: {nodes: 8, node: {cpus: 4}}}")
    append(record_path("mine"), [NodeVerdict("tu03", BAD, time.time(), "interface eth0 is down", "7")])


LEFT_OUT = "leaves out tu03: interface eth0 is down (job 7, "


@pytest.mark.usefixtures("tu03_is_bad")
def test_a_submission_leaves_a_bad_node_out_beside_those_the_user_excludes_and_says_so() -> None:
    shown = ok("submit", "--site", "mine", "--dry-run", "-N", "2", "-o", "exclude=tu07", "true")
    assert "#SBATCH --exclude=tu07,tu03\n" in shown.out
    assert f"# {LEFT_OUT}" in shown.out
    assert f"hpcjobs: {LEFT_OUT}" in shown.err


@pytest.mark.usefixtures("tu03_is_bad")
@pytest.mark.parametrize("arguments", [("-o", "exclude="), ("-o", "nodelist=tu[02-03]"), ("-N", "8")])
def test_it_does_not_where_the_user_says_so_names_the_node_or_would_have_too_few(arguments: tuple[str, ...]) -> None:
    shown = ok("submit", "--site", "mine", "--dry-run", *arguments, "true")
    assert "--exclude" not in shown.out
    assert "leaves out" not in shown.out


@pytest.mark.usefixtures("tu03_is_bad")
def test_another_site_has_a_record_of_its_own() -> None:
    assert "--exclude" not in ok("submit", "--site", "other", "--dry-run", "true").out
