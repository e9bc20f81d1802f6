"""docs/json.md: the output of each verb with ``--json``, from the types of `json_output`."""

from __future__ import annotations

from typing import Any

from hpcjobs.cli.json_output import ERROR, OUTPUTS, schema

_INTRODUCTION = """\
# What `--json` prints

After reading this page you can use the output of any command in a program.

This page is made from the types in `hpcjobs/cli/json_output.py`; tests compare it, and the output of each command, with
these types. Times are ISO 8601 in UTC, durations are seconds (`_s`), sizes are bytes (`_bytes`), and `null` means "not
known". The id of a job is always `job_id`, its run folder `run_dir`, its site `site`. Fields may be added; no field
changes its meaning. Standard output has only the JSON: notes and warnings go to standard error, and the exit code is
that of the command. `wait --timeout` prints the records also if the time is over.

A command that fails before it has its output prints [Failed](#failed) instead, an object whose only key is `error`:
standard output is one JSON document in any case. A failed job is no error of `wait`: it prints the records and ends
with the job's exit code; `submit --wait` prints [JobSubmitted](#jobsubmitted). Nor is the answer no of a verb that
checks, such as `where` and `sites check`: it prints its output, and its exit code is not 0.
"""
_SITE = ("Job", "Resources", "Site", "Partition")
"""Values that other pages explain: job requests and site files."""


def page() -> str:
    """The text of the page."""
    schemas = {verb: schema(verb) for verb in OUTPUTS}
    values: dict[str, Any] = {}
    for one in (*schemas.values(), schema(ERROR)):
        values |= one.get("$defs", {})
    rows = "".join(f"| {_command(verb)} | {_type(one)} |\n" for verb, one in schemas.items())
    sections = "".join(_section(name, values[name]) for name in sorted(values) if "enum" not in values[name])
    return f"{_INTRODUCTION}\n| command | prints |\n|---|---|\n{rows}\n## Values\n{sections}"


def _command(verb: str) -> str:
    arguments, comma, case = verb.partition(", ")
    return f"`hpcjobs {arguments} --json`{comma}{case}"


def _section(name: str, value: dict[str, Any]) -> str:
    text = " ".join(value.get("description", "").split()).replace("``", "`")
    if name in _SITE:
        return f"\n### {name}\n\n{text}\n\n[Keys of site files](site_keys.md), [options of jobs](sbatch_options.md).\n"
    if "prefixItems" in value:
        return f"\n### {name}\n\n{text}\n\nA {_type(value)}.\n"
    rows = "".join(f"| `{field}` | {_type(kind)} |\n" for field, kind in value["properties"].items())
    return f"\n### {name}\n\n{text}\n\n| field | type |\n|---|---|\n{rows}"


def _type(kind: dict[str, Any]) -> str:
    """The type in words: ``list of [JobLine](#jobline)``."""
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        return "text" if name in ("State", "Kind") else f"[{name}](#{name.lower()})"
    if "anyOf" in kind:
        return " or ".join(dict.fromkeys(map(_type, kind["anyOf"])))
    if "enum" in kind:
        return " or ".join(f"`{value}`" for value in kind["enum"])
    if kind.get("format") == "date-time":
        return "time"
    if "prefixItems" in kind:
        return f"list of {' or '.join(dict.fromkeys(map(_type, kind['prefixItems'])))}"
    if kind.get("type") == "array":
        return f"list of {_type(kind.get('items') or {})}"
    if kind.get("type") == "object":
        return f"mapping to {_type(kind.get('additionalProperties') or {})}"
    names = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "null": "null",
    }
    return names.get(kind.get("type", ""), "any value")
