"""The table of `hpcjobs ps`: folded arrays, narrow terminals, colours on terminals only."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from commandline import ok, start, within, within_streams
from terminal import on_terminal, screen

from hpcjobs.cli.jobs import make_lines, print_lines
from hpcjobs.cli.json_output import schema
from hpcjobs.run.listing import ListedJob
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.top.text import COLUMNS


def rows() -> list[ListedJob]:
    def row(job_id: str, state: State, name: str, *, code: int | None = None, reason: str | None = None) -> ListedJob:
        record = JobRecord(
            job_id, state, source="squeue", node_list="n[1-2]", elapsed_s=90.0, exit_code=code, reason=reason
        )
        return ListedJob(record, name, "mine", f"/runs/{name}")

    return [
        row("42_0", State.COMPLETED, "sweep", code=0),
        row("42_1", State.FAILED, "sweep", code=3),
        row("42_[2-4]", State.PENDING, "sweep", reason="QOSMaxJobsPerUserLimit"),
        row("43", State.RUNNING, "a-long-name-of-a-job"),
    ]


def test_an_array_is_one_line_with_the_number_of_tasks_in_each_state() -> None:
    array, single = make_lines(rows(), tasks=False)
    assert array.cells[0] == "42"
    assert array.cells[3:5] == ("1 COMPLETED, 1 FAILED, 3 PENDING", "5 tasks")
    assert array.cells[8:10] == ("3", "QOSMaxJobsPerUserLimit")
    assert array.state is State.FAILED
    assert single.cells[:4] == ("43", "a-long-name-of-a-job", "mine", "RUNNING")
    assert [line.cells[0] for line in make_lines(rows(), tasks=True)] == ["42_0", "42_1", "42_[2-4]", "43"]


def test_a_running_job_that_writes_metrics_shows_its_step_and_the_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"kind": "run", "total_steps": 1000},
        {"kind": "step", "step": 110, "time_s": 10.0},
        {"kind": "step", "step": 120, "time_s": 12.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_dir = str(tmp_path)
    states = {"7": State.RUNNING, "8": State.PENDING}
    known = [
        ListedJob(JobRecord(job, state, source="squeue"), "train", "mine", run_dir) for job, state in states.items()
    ]
    print_lines(make_lines(known, tasks=False)[:1], folders=False)
    assert "120/1000, 3m40s left" in capsys.readouterr().out
    print_lines(make_lines(known[1:], tasks=False), folders=False)
    assert "PROGRESS" not in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_every_width_shows_each_job_in_one_line_with_its_state(width: int) -> None:
    with screen(width) as seen:
        print_lines(make_lines(rows(), tasks=True), folders=False)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", seen.text).splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) <= width
    for job, state in (("42_[2-4]", "PENDING"), ("42_1", "FAILED"), ("43", "RUNNING")):
        assert any(line.startswith(job) and state in line for line in lines)


def test_states_have_colours_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    ok("submit", "--site", "local", "--wait", "true")
    assert "\x1b[32mCOMPLETED" in on_terminal("ps", columns=60).out
    with screen(60) as plain_screen:
        monkeypatch.setenv("NO_COLOR", "1")
        within_streams("ps")
    plain = plain_screen.text
    assert "COMPLETED" in plain
    assert "\x1b[3" not in plain
    assert "\x1b" not in ok("ps").out + ok("ps", "--json").out


def test_watching_prints_the_table_until_it_is_interrupted() -> None:
    ok("submit", "--site", "local", "--wait", "true")
    watching = start("ps", "--watch", start_new_session=True)
    assert watching.stdout is not None
    watching.stdout.readline()
    assert watching.stdout.readline().startswith("JOB ")
    watching.stdout.readline()
    assert "COMPLETED" in watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    err = watching.communicate(timeout=240)[1]
    assert (watching.returncode, "Traceback" in err) == (130, False)


def test_every_column_that_names_a_field_has_it_in_json() -> None:
    values = schema("ps")["$defs"]
    fields = {f"record.{name}" for name in values["JobRecord"]["properties"]} | {*values["JobLine"]["properties"]}
    assert {column.json for column in COLUMNS if column.json} <= fields
    assert all(column.ps or column.top for column in COLUMNS)


def test_watching_is_not_for_programs() -> None:
    answered = within("ps", "--watch", "--json")
    assert answered.code == 5
    assert "--watch and --json exclude each other" in answered.json["error"]["message"]
