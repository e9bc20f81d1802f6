"""The JSON Schema of a site file and its reference page are those of the types."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from commandline import ok
from jsonschema import Draft202012Validator

from hpcjobs.data import data_folder
from hpcjobs.site.schema import SECTIONS, keys_page, list_keys, site_schema

PAGE = Path(__file__).parents[3] / "docs" / "site_keys.md"


def errors_of(site: Any) -> list[str]:
    return [error.message for error in Draft202012Validator(ok("sites", "schema").json).iter_errors(site)]


@pytest.mark.parametrize("path", sorted(data_folder("site_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_site_file_is_valid_by_the_schema(path: Path) -> None:
    assert errors_of(yaml.safe_load(path.read_text(encoding="utf-8"))) == []


def test_a_mistyped_key_and_a_wrong_type_are_marked_in_every_section() -> None:
    partition = {"nodes": 1, "node": {"cpus": 4}}
    assert errors_of({"partitions": {"a": partition}}) == []
    assert errors_of({"partitons": {"a": partition}})
    assert errors_of({"partitions": {"a": {**partition, "max_tme": "1h"}}})
    assert errors_of({"partitions": {"a": partition}, "defaults": {"tme": "1h"}})
    assert errors_of({"partitions": {"a": partition}, "gpu_request": "gpus"})
    assert errors_of({"partitions": {"a": partition}, "name": "x"}), "the file's stem is the name"


def test_the_schema_has_a_description_for_every_section_and_explained_key() -> None:
    definitions = site_schema()["$defs"]
    assert set(definitions) == {section.__name__ for section in SECTIONS}
    assert definitions["Partition"]["properties"]["max_nodes"]["description"].startswith("Nodes one job may have")
    assert definitions["NodeGroup"]["properties"]["gpu_model"]["description"].startswith("The GRES type")


def test_every_key_of_a_site_file_is_explained() -> None:
    unexplained = [
        f"{section.__name__}.{key.name}" for section in SECTIONS for key in list_keys(section) if not key.text
    ]
    assert unexplained == []


def test_the_reference_page_is_made_from_the_types() -> None:
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(keys_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == keys_page(), "GOLDEN=write pytest"
