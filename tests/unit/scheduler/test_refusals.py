"""Each refusal of Slurm's own comes with what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcjobs.scheduler.slurm.client import HINTS, hint_for

TEXTS = [
    line
    for line in (Path(__file__).parents[2] / "data/slurm/submission_refusals.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize("text", TEXTS)
def test_each_of_slurms_own_refusals_has_a_hint(text: str) -> None:
    assert hint_for(f"sbatch: error: Batch job submission failed: {text}")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("Invalid account or account/partition combination specified", "-A ACCOUNT"),
        ("Invalid qos specification", "-q QOS"),
        ("Memory required by task is not available", "MaxMemPerNode"),
        ("Node count specification invalid", "MinNodes and MaxNodes"),
        ("Requested nodes not in this partition", "nodelist"),
        ("Invalid generic resource (gres) specification", "sinfo -o '%G'"),
        ("Duplicate generic resource (gres) specification", "twice"),
        ("Access denied to requested reservation", "scontrol show reservation"),
        ("Time limit specification required, but not provided", "use --time"),
        ("Required partition not available (inactive or drain)", "another -p"),
    ],
)
def test_a_hint_is_about_what_was_refused(text: str, arguments: str) -> None:
    hint = hint_for(text)
    assert hint is not None
    assert arguments in hint


def test_words_of_a_sites_own_plugin_get_no_hint_of_ours() -> None:
    assert hint_for("sbatch: error: please use the portal of your department") is None


def test_no_hint_is_hidden_by_one_before_it() -> None:
    for arguments, hint in HINTS:
        assert hint_for(arguments) == hint
