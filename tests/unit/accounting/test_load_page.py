"""`hpcjobs report load`: the samples of a job's nodes on one page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import hpcjobs, ok


def write_samples(folder: Path, *, gpus: bool) -> None:
    """1,500 samples of each of two nodes, of which the second begins a minute later."""
    folder.mkdir()
    for number, name in enumerate(("monitor", "monitor-1")):
        lines: list[dict[str, object]] = [
            {"kind": "monitor", "host": f"n{number}", "interval_s": 5, "started_at": 60 * number}
        ]
        lines += [
            {"kind": "sample", "time_s": 5 * n, "cpu_percent": 20 + 60 * number, "rss_bytes": n << 20,
             "gpu_percent": 90 if gpus else None, "memory_limit_bytes": 4 << 30} for n in range(1500)
        ]  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in [*lines, {"kind": "end"}])
        (folder / f"{name}.jsonl").write_text(text)


@pytest.mark.parametrize("gpus", [True, False])
def test_the_page_has_a_picture_of_each_quantity_with_a_line_for_each_node(here: Path, gpus: bool) -> None:
    write_samples(here / "monitor-4711", gpus=gpus)
    out = ok("report", "load", "monitor-4711").out
    assert out.splitlines()[2].split() == ["n0", "1500", *(["90", "%"] if gpus else ["-"]), "20", "%", "1.46", "GiB"]
    folder = here / "monitor-4711-load"
    page = (folder / "index.html").read_text()
    pictures = ["cpu", *(["gpu"] if gpus else []), "memory"]
    assert sorted(path.stem for path in folder.glob("*.svg")) == pictures
    assert page.count("<svg") == len(pictures)
    assert (">n0<" in page, ">n1<" in page, "minutes since the first sample" in page) == (True, True, True)
    assert len(page) < 400_000
    loads = ok("report", "load", "monitor-4711", "--json").json["nodes"]
    assert [load["cpu_percent"] for load in loads] == [20, 80]


def test_a_job_without_samples_is_an_error_that_says_how_to_take_some(here: Path) -> None:
    ok("submit", "--site", "local", "--wait", "--name", "plain", "true")
    answer = hpcjobs("report", "load", "plain")
    assert answer.code == 5
    assert "has no samples of its nodes" in answer.err
    assert "hpcjobs submit --monitor" in answer.err
