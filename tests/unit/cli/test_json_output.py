"""What `--json` prints follows the types of `hpcjobs.cli.json_output`, of which docs/json.md is made."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import typer
from commandline import Answer, ok, within
from sample_cluster import SampleCluster
from test_golden_output import verbs
from verb_cases import bad_node, drill, fabric, image, no_wheel, samples, sandbox_up, session, study, sweep

from hpcjobs.cli import app
from hpcjobs.cli.json_output import OUTPUTS, json_page, output_type, print_as, schema
from hpcjobs.cli.output import print_json

PAGE = Path(__file__).parents[3] / "docs" / "json.md"
Prepare = Callable[[SampleCluster, pytest.MonkeyPatch], None]


def nothing(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    """The jobs of the cluster are enough."""


CASES: dict[str, tuple[str, Prepare]] = {
    "submit": ("submit --json train.py", nothing),
    "submit --dry-run": ("submit --dry-run --json -N 2 train.py", nothing),
    "submit --explain": ("submit --explain --json -N 2 --env A=1 train.py", nothing),
    "submit --test-only": ("submit --test-only --json train.py", nothing),
    "submit -N auto --dry-run, before its trials": ("submit -N auto -t 10h --dry-run --json train.py", nothing),
    "ps": ("ps --json", nothing),
    "show": ("show 42 --json", nothing),
    "logs": ("logs 42 --json", nothing),
    "why": ("why 42 --json", nothing),
    "why, of a job that waits": ("why 45 --json", nothing),
    "why, of a job that has not failed": ("why 41 --json", nothing),
    "diff": ("diff 41 42 --json", nothing),
    "where": ("where --site mine --json -N 2 train.py", nothing),
    "rerun": ("rerun 41 --json", nothing),
    "wait": ("wait 42 --json", nothing),
    "cancel": ("cancel 41 44 --json", nothing),
    "cancel --signal": ("cancel 44 --signal USR1 --json", nothing),
    "hold": ("hold 45 --json", nothing),
    "release": ("release 45 --json", nothing),
    "requeue": ("requeue 44 --json", nothing),
    "update": ("update 45 time=2h --json", nothing),
    "prune": ("prune --older-than 30m --json", nothing),
    "archive": ("archive 41 --json", nothing),
    "drill": ("drill kill-rank --json", drill),
    "sweep run": ("sweep run --set lr=1,2 --name grid --json train.py", nothing),
    "sweep run --dry-run": ("sweep run --set lr=1,2 --name grid --dry-run --json train.py", nothing),
    "sweep status": ("sweep status lr --json", sweep),
    "sweep resume": ("sweep resume lr --json", sweep),
    "sweep results": ("sweep results lr --json", sweep),
    "sweep results --min": ("sweep results lr --min loss --json", sweep),
    "sweep cancel": ("sweep cancel lr --json", sweep),
    "scale": ("scale -N 1,2 --repeats 1 --name speed --json train.py", nothing),
    "jupyter": ("jupyter --detach --json", session),
    "jupyter --dry-run": ("jupyter --dry-run --json", nothing),
    "jupyter --no-wait": ("jupyter --no-wait --json", session),
    "jupyter list": ("jupyter list --json", session),
    "jupyter open": ("jupyter open --json", session),
    "jupyter stop": ("jupyter stop --all --json", nothing),
    "report jobs": ("report jobs --json", nothing),
    "report jobs --by": ("report jobs --by state --json", nothing),
    "report scaling": ("report scaling speed --json", study),
    "report load": ("report load 42 --json", samples),
    "report sweep": ("report sweep lr --json", sweep),
    "report advise": ("report advise 41 43_0 --json", nothing),
    "fabric": ("fabric --json", fabric),
    "nodes": ("nodes --json", bad_node),
    "container build": ("container build pytorch --json", image),
    "container list": ("container list --json", image),
    "container check": ("container check x.sif --json", image),
    "sites": ("sites --json", nothing),
    "sites show": ("sites show mine --json", nothing),
    "cloud check": ("cloud check --site gcp-t4 --json", no_wheel),
    "sandbox up": ("sandbox up --json", sandbox_up),
    "sandbox status": ("sandbox status --json", nothing),
}
ELSEWHERE = {"sites check": "tests/unit/discovery", "sites init": "tests/unit/discovery"}


@pytest.mark.parametrize("verb", CASES)
def test_what_a_verb_prints_is_valid_by_its_schema(
    verb: str, cluster: SampleCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, prepare = CASES[verb]
    prepare(cluster, monkeypatch)
    (cluster.commands / "next").write_text("47")
    answer = within(*line.split())
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.validate(answer.json, schema(verb), jsonschema.Draft202012Validator, format_checker=checker)


def assert_is_error(answer: Answer, code: int) -> None:
    assert answer.code == code, answer
    jsonschema.validate(answer.json, schema("error"), jsonschema.Draft202012Validator)
    assert answer.json["error"]["exit_code"] == code
    assert answer.json["error"]["message"].splitlines()[0] in answer.err


@pytest.mark.parametrize("verb", CASES)
def test_an_error_of_usage_is_one_json_document(verb: str, cluster: SampleCluster) -> None:
    arguments = CASES[verb][0].split()
    at = arguments.index("--json")
    assert_is_error(within(*arguments[:at], "--no-such-option", *arguments[at:]), 2)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("submit --json nothing.py", 5),
        ("submit --dry-run --json -N 99 train.py", 5),
        ("submit --json --site nowhere train.py", 4),
        ("ps --json --site nowhere", 4),
        ("show --json 9999", 6),
        ("logs --json 9999", 6),
        ("why --json 9999", 6),
        ("diff --json 41 9999", 6),
        ("where --json --site nowhere train.py", 4),
        ("rerun --json 9999", 6),
        ("wait --json 9999", 6),
        ("cancel --json 9999", 6),
        ("hold --json 41", 5),
        ("release --json 9999", 6),
        ("requeue --json 9999", 6),
        ("update --json 45 colour=red", 5),
        ("prune --json --older-than soon", 5),
        ("archive --json 9999", 6),
        ("sweep run --json --set lr=1,2 nothing.py", 5),
        ("sweep status --json nothing", 6),
        ("sweep results --json nothing", 6),
        ("sweep cancel --json nothing", 6),
        ("scale --json -N 1,99 --name speed train.py", 5),
        ("jupyter stop --json 9999", 6),
        ("report scaling --json nothing", 4),
        ("sites show --json nowhere", 4),
        ("sites check --json nowhere", 4),
        ("container check --json nothing.sif", 5),
        ("cloud check --json --site mine", 4),
    ],
)
def test_an_error_is_one_json_document_with_message_and_exit_code(line: str, code: int, cluster: SampleCluster) -> None:
    assert_is_error(within(*line.split()), code)


def test_json_of_the_program_is_no_json_of_hpcjobs(cluster: SampleCluster) -> None:
    assert within("submit", "--site", "nowhere", "train.py", "--json").out == ""


def test_every_output_has_a_case_and_every_verb_with_json_an_output() -> None:
    assert {*CASES, *ELSEWHERE} == {*OUTPUTS}
    described = {re.split(r",| --", output)[0] for output in OUTPUTS}
    for arguments in verbs(typer.main.get_command(app)):
        if "--json" in within(*arguments, "--help").out:
            assert " ".join(arguments) in described or arguments[0] in described, arguments


def test_moments_are_times_with_a_zone_and_a_field_that_is_missing_is_an_error(cluster: SampleCluster) -> None:
    (row,) = (row for row in ok("ps", "--json").json if row["record"]["job_id"] == "44")
    assert row["record"]["started"] == "2027-01-15T07:40:00Z"
    assert ok("show", "41", "--json").json["entry"]["submitted"] == "2027-01-15T05:55:00Z"
    assert output_type("ps") is output_type("ps")
    with pytest.raises(KeyError, match="job_id"):
        print_as("update", {"changed": []})


def test_waiting_prints_json_when_its_time_is_over_too(cluster: SampleCluster) -> None:
    answer = within("wait", "44", "--timeout", "0", "--json")
    assert (answer.code, [record["state"] for record in answer.json]) == (3, ["RUNNING"])
    assert "job 44 has not ended after 0 s" in answer.err
    assert within("wait", "41", "--timeout", "1m", "--json").json[0]["state"] == "COMPLETED"
    refused = within("wait", "44", "--timeout", "soon")
    assert (refused.code, "--timeout soon: " in refused.err) == (5, True)


def test_every_link_of_the_page_leads_to_a_value() -> None:
    text = json_page()
    links = set(re.findall(r"\]\(#([a-z]+)\)", text))
    assert links <= {name.lower() for name in re.findall(r"(?m)^### (\w+)$", text)}


def test_the_page_is_made_from_the_types() -> None:
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(json_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == json_page(), "GOLDEN=write makes it anew"


def test_a_path_that_is_not_utf8_is_printed_with_question_marks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"path": "a\udcff", "paths": ["\udcfe/b"], "rate": float("nan")})
    assert json.loads(capsys.readouterr().out) == {"path": "a?", "paths": ["?/b"], "rate": None}
