"""docs/site_keys.md: every key of a site file as a page."""

from __future__ import annotations

import inspect
import re
from typing import get_args

import msgspec

from hpcjobs.site.affinity import BindTo, NumaBinding
from hpcjobs.site.containers import Runtime
from hpcjobs.site.models import GpuRequest, LauncherName, MemoryRequest, Site
from hpcjobs.site.schema import SECTIONS, Key, list_keys

_INTRODUCTION = """\
# Every key of a site file

After reading this page you can look up every key of a site file.

This page is made from the types in `hpcjobs/site/`, as is the JSON Schema that `hpcjobs sites schema` prints.
[Sites and requests](sites.md) explains how the keys work together. A key without a default is optional unless it is
marked as required.
"""
_ALIASES = {"GpuRequest": GpuRequest, "MemoryRequest": MemoryRequest, "LauncherName": LauncherName, "Runtime": Runtime}
_ALIASES |= {"NumaBinding": NumaBinding, "BindTo": BindTo}
_YAML = {"()": "[]", "True": "true", "False": "false"}
_LITERAL = re.compile(r"Literal\[(.*?)\]")
_TITLES = {"Site": "The file itself", "Resources": "`defaults` of the file and of a partition (`Resources`)"}


def page() -> str:
    """The text of the page."""
    return _INTRODUCTION + "".join(map(_section, SECTIONS))


def _section(section: type[msgspec.Struct]) -> str:
    first = (
        (inspect.getdoc(section) or "").partition("\n")[0]
        if section is not Site
        else "The name of the file, without `.yaml`, is the site's name."
    )
    first = first.replace("``", "`")
    title = _TITLES.get(section.__name__, f"`{section.__name__}`")
    rows = "".join(map(_row, list_keys(section)))
    return f"\n## {title}\n\n{first}\n\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}"


def _row(key: Key) -> str:
    default = "required" if key.required else _default(key.default)
    text = key.text.replace("``", "`").replace("|", r"\|")
    return f"| `{key.name}` | `{_type(key.type)}` | {default} | {text} |\n"


def _type(annotation: str) -> str:
    """The annotation with the values of its alternatives."""
    for name, alias in _ALIASES.items():
        annotation = annotation.replace(name, f"Literal{list(get_args(alias))}")
    return _LITERAL.sub(lambda match: match[1].replace(", ", " or "), annotation).replace(" | ", " or ")


def _default(code: str | None) -> str:
    """The default as YAML has it; sections that are empty by default have none."""
    if code is None or code.endswith("s()") or code in ("Environment()", "Jupyter()", "Affinity()"):
        return ""
    return f"`{_YAML.get(code, code)}`"
