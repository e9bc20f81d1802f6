"""What automation is told: workflows, pre-commit hooks and issue forms name things that are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
GITHUB = REPOSITORY / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PYPROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"(?m)^([\w-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8")))


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def load(path: Path) -> dict[Any, Any]:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict), path
    return loaded


def commands(workflow: Path) -> list[str]:
    """The shell lines of every step."""
    steps = [step for job in load(workflow)["jobs"].values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


def test_there_are_workflows_and_forms() -> None:
    assert names(WORKFLOWS) == ["lint", "release", "test"]
    assert names(FORMS) == ["bug", "feature"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=names(WORKFLOWS))
def test_a_workflow_names_targets_and_files_that_exist(workflow: Path) -> None:
    text = "\n".join(commands(workflow))
    targets = re.findall(r"(?:^|&& )make ([\w-]+)", text, re.MULTILINE)
    assert set(targets) <= TARGETS
    files = re.findall(r"(?<![\w/.-])((?:tools|tests|\.ci|docs|containers)/[\w./-]*|[\w-]+\.(?:txt|toml))", text)
    assert [name for name in files if not (REPOSITORY / name).exists()] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=names(WORKFLOWS))
def test_a_workflow_has_few_rights_and_a_time_limit(workflow: Path) -> None:
    loaded = load(workflow)
    assert loaded["permissions"] == {"contents": "read"}
    assert True in loaded  # `on:`, which YAML 1.1 reads as a boolean
    for name, job in loaded["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 60, name
        assert all("run" in step or "@" in step["uses"] for step in job["steps"]), name
        needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        assert set(needs) <= set(loaded["jobs"]), name


def test_the_tests_run_on_the_pythons_that_the_package_names() -> None:
    tested = load(GITHUB / "workflows" / "test.yml")["jobs"]["unit"]["strategy"]["matrix"]["python-version"]
    assert all(isinstance(version, str) for version in tested)  # 3.10 without quotes is 3.1
    assert tested == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    assert re.findall(r'(?m)^requires-python = ">=(.*)"', PYPROJECT) == [tested[0]]


def test_only_publishing_and_attesting_may_ask_for_an_identity() -> None:
    rights = {
        (workflow.stem, name): job["permissions"]
        for workflow in WORKFLOWS
        for name, job in load(workflow)["jobs"].items()
        if "permissions" in job
    }
    assert set(rights) == {("release", "build"), ("release", "publish")}
    assert "attestations" not in rights["release", "publish"]


def test_pre_commit_runs_the_parts_of_make_lint() -> None:
    (repo,) = load(REPOSITORY / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    (parts,) = re.findall(r"all\) tools/lint (.*) ;;", (REPOSITORY / "tools" / "lint").read_text(encoding="utf-8"))
    assert [hook["entry"] for hook in repo["hooks"]] == [f"tools/lint {part}" for part in parts.split()]
    assert {(hook["language"], hook["pass_filenames"]) for hook in repo["hooks"]} == {("system", False)}


@pytest.mark.parametrize("form", FORMS, ids=names(FORMS))
def test_an_issue_form_is_complete(form: Path) -> None:
    loaded = load(form)
    assert {"name", "description", "body"} <= set(loaded)
    ids = [field["id"] for field in loaded["body"]]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in loaded["body"])
    assert any(field.get("validations", {}).get("required") for field in loaded["body"])
