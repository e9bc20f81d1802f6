"""The rows of the screen: folding, order, filter, what each column has, at every width."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace
from snapshots import NOW, make_node, make_progress, make_snapshot, make_task

from hpcjobs.scheduler.base import State
from hpcjobs.top.rows import SORTS, JobRow, Snapshot, View, make_rows
from hpcjobs.top.text import bar, cells, choose_columns, describe, headline, short_number, sparkline, titles


def shown(row: JobRow, width: int) -> dict[str, str]:
    """The row's cells by their column, on a screen of that row alone."""
    columns = choose_columns(width, [row], NOW)
    return {c.title: text.strip() for c, text in zip(columns, cells(row, columns, NOW), strict=True)}


def row_of(job: str, view: View = View(), snapshot: Snapshot | None = None) -> JobRow:  # noqa: B008 # frozen
    (row,) = [row for row in make_rows(snapshot or make_snapshot(), view) if row.job == job]
    return row


def test_running_jobs_come_first_then_those_that_wait_then_those_that_ended() -> None:
    assert [row.job for row in make_rows(make_snapshot(), View())] == ["44", "43", "42", "45", "46", "41"]


def test_an_array_is_one_row_until_it_is_unfolded() -> None:
    row = row_of("44")
    assert row.folds
    assert row.state is State.FAILED
    assert row.share == pytest.approx(0.02)
    assert shown(row, 160)["STATE"] == "1✗ 1R 97P 1✓"
    assert shown(row, 160)["NODES"] == "100 tasks"
    assert shown(row, 160)["NOTE"] == "exit code 3"
    unfolded = make_rows(make_snapshot(), View(unfolded=frozenset({row.key})))
    assert [row.job for row in unfolded[:5]] == ["44", "44_0", "44_1", "44_2", "44_[3-99]"]
    assert len({row.key for row in unfolded}) == len(unfolded)


def test_tasks_of_an_array_stand_in_the_order_of_their_numbers_whatever_their_priority() -> None:
    tasks = tuple(make_task(f"7_{index}", State.RUNNING, array="0-11") for index in (1, "[10-11]", 9, 0))
    key = tasks[0].group.key
    unfolded = make_rows(make_snapshot()._replace(tasks=tasks), View(unfolded=frozenset({key})))
    assert [row.job for row in unfolded] == ["7", "7_0", "7_1", "7_9", "7_[10-11]"]


def test_a_filter_finds_names_states_nodes_and_reasons() -> None:
    def jobs(text: str) -> list[str]:
        return [row.job for row in make_rows(make_snapshot(), View(text=text))]

    assert jobs("TRAIN") == ["42"]
    assert jobs("pending") == ["44", "45"]
    assert jobs("n4") == ["44"]
    assert jobs("resources") == ["45"]
    assert jobs("nothing of this") == []


@pytest.mark.parametrize("sort", SORTS)
def test_every_order_shows_every_job(sort: str) -> None:
    assert {row.job for row in make_rows(make_snapshot(), View(sort=sort))} == {"41", "42", "43", "44", "45", "46"}


def test_rows_can_be_sorted_by_name_progress_and_time_left() -> None:
    def jobs(sort: str) -> list[str]:
        return [row.job for row in make_rows(make_snapshot(), View(sort=sort))]

    assert jobs("newest") == ["46", "45", "44", "43", "42", "41"]
    assert jobs("name") == ["44", "46", "41", "43", "42", "45"]
    assert jobs("progress")[:3] == ["41", "43", "42"]
    assert jobs("time left")[:2] == ["42", "43"]


def test_progress_is_of_the_steps_else_of_the_time_limit() -> None:
    trained, other = row_of("42"), row_of("43")
    assert (trained.share, trained.left_s) == (0.25, 375.0)
    assert (other.share, other.left_s, other.share_of) == (0.25, 2700.0, "limit")
    assert shown(trained, 160)["PROGRESS"] == "██░░░░░░  25%"
    assert shown(other, 160)["PROGRESS"] == "██░░░░░░  25%t"
    assert shown(trained, 160)["LEFT"] == "6m15s"


def test_a_trainer_that_did_not_write_its_steps_has_no_invented_end() -> None:
    task = make_task("50", State.RUNNING, progress=make_progress(10, None))
    row = row_of("50", snapshot=Snapshot((task,), (), NOW))
    assert (row.share, row.left_s) == (None, None)
    assert shown(row, 160)["SPEED"] == "13.9k tokens/s"


def test_the_load_is_the_mean_of_the_nodes_that_measured_it() -> None:
    row = row_of("42")
    assert {name: shown(row, 160)[name] for name in ("GPU", "CPU", "MEMORY")} == {
        "GPU": "81%",
        "CPU": "40%",
        "MEMORY": "3G",
    }
    without = make_task("51", State.RUNNING, nodes=(make_node("n1", None), make_node("n2", 50.0)))
    assert shown(row_of("51", snapshot=Snapshot((without,), (), NOW)), 160)["GPU"] == "50%"


def test_a_job_that_waits_shows_its_reason_and_when_it_may_start() -> None:
    row = row_of("45")
    assert shown(row, 160)["LEFT"].startswith("~")
    assert shown(row, 160)["NOTE"] == "Resources"
    assert describe(row, NOW, 100)[-1] == "Resources: It is next, and waits until enough nodes are free"


def test_an_alarm_takes_the_place_of_the_note() -> None:
    task = make_task("52", State.RUNNING, alarms=("n2: GPUs idle for 12m",), time_limit_s=60, elapsed_s=20.0)
    row = row_of("52", snapshot=Snapshot((task,), (), NOW))
    assert shown(row, 160)["NOTE"].startswith("! n2: GPUs idle")
    assert "! n2: GPUs idle for 12m" in describe(row, NOW, 100)


def test_80_columns_have_the_loss_and_the_speed_of_a_training_beside_other_jobs() -> None:
    rows = make_rows(make_snapshot(), View())
    columns = choose_columns(78, rows, NOW)
    (training,) = [cells(row, columns, NOW) for row in rows if row.job == "42"]
    texts = {c.title: text.strip() for c, text in zip(columns, training, strict=True)}
    assert (texts["LOSS"], texts["SPEED"], texts["PROGRESS"]) == ("0.54", "13.9k tokens/s", "25%")
    assert texts["NAME"] == "train-lm"
    assert shown(row_of("42"), 78)["LOSS"] == "█▆▅▃▃▂▁▁ 0.54", "alone it has room for the sparkline"


@pytest.mark.parametrize("width", [60, 78, 158])
def test_a_column_that_no_job_fills_gives_its_room_to_the_others(width: int) -> None:
    name = "a-long-name-of-a-simulation"
    task = make_task("60", State.FAILED, name, exit_code=3, elapsed_s=4.0, node_list="n4")
    row = row_of("60", snapshot=Snapshot((task,), (), NOW))
    texts = shown(row, width)
    assert all(texts.values()), texts
    assert texts["NOTE"] == "exit code 3"
    assert width < 78 or texts["NAME"] == f"{name[:25]}…"


def test_a_screen_without_jobs_has_titles() -> None:
    assert [title.strip() for title in titles(choose_columns(78, [], NOW))] == ["JOB", "NAME", "STATE", "NOTE"]


@pytest.mark.parametrize("width", [40, 60, 78, 80, 100, 158, 220])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    rows = make_rows(make_snapshot(), View(unfolded=frozenset({row_of("44").key})))
    columns = choose_columns(width, rows, NOW)
    for row in rows:
        assert sum(len(text) + 1 for text in cells(row, columns, NOW)) <= width
        assert max(map(len, describe(row, NOW, width))) <= width
    assert {title.strip() for title in titles(columns)} >= {"JOB", "NOTE"}


def test_the_chosen_job_is_described_with_its_nodes_and_its_losses() -> None:
    lines = describe(row_of("42"), NOW, 100)
    assert lines[0] == "42  train-lm on tu-hpc  RUNNING for 2m05s of 1h00m  n[1-2]"
    assert lines[1].startswith("step 250 of 1000, epoch 2, 2 steps/s, 13.9k tokens/s, ends about ")
    assert lines[2] == "loss █▇▆▆▅▅▄▄▃▃▃▂▂▂▂▂▁▁▁▁ 0.5403"
    assert lines[3] == "n1          GPU ███████░  91% 18.6G  CPU ███░░░░░  40%  memory 1.5G  (2s ago)"
    assert "OUT_OF_MEMORY for 1m10s  n2  killed by signal 9" in describe(row_of("46"), NOW, 100)[0]


def test_a_loss_that_diverged_hides_behind_no_earlier_one() -> None:
    progress = make_progress(250)
    step = replace(progress.step, loss=math.nan, diverged_at=240)
    task = make_task("53", State.RUNNING, progress=replace(progress, step=step))
    row = row_of("53", snapshot=Snapshot((task,), (), NOW))
    assert shown(row, 160)["LOSS"] == "! nan"
    assert "! loss NaN since step 240" in describe(row, NOW, 100)


def test_bars_sparklines_and_numbers() -> None:
    assert [bar(share, 4) for share in (-1, 0, 0.5, 1, 7)] == ["░░░░", "░░░░", "██░░", "████", "████"]
    assert sparkline([], 8) == ""
    assert sparkline([1.0, 1.0], 8) == "▄▄"
    assert sparkline([float(n) for n in range(100)], 8) == "▁▂▃▄▅▆▇█"
    assert [short_number(value) for value in (0, 7, 0.25, 999, 13892, 2.5e6)] == [
        "0",
        "7",
        "0.25",
        "999",
        "13.9k",
        "2.5M",
    ]


def test_the_first_line_counts_tasks_and_names_the_filter() -> None:
    line = headline(make_snapshot(), sort="name", text="n4", every_s=7.5, width=120)
    assert line.startswith("filter: n4  3 running, 98 pending, 1 failed, 1 out_of_memory, 2 completed  ")
    assert line.endswith("every 7s")
    assert "by name  " in line
    assert {len(headline(make_snapshot(), sort="name", text="", every_s=5, width=w)) for w in (20, 80)} == {20, 80}


def test_a_snapshot_has_changed_when_a_state_has() -> None:
    one = make_snapshot()
    assert one.changes_from(None)
    assert not make_snapshot().changes_from(one)
    assert one._replace(tasks=one.tasks[1:]).changes_from(one)
