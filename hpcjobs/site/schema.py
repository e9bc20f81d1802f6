"""JSON Schema of site files, and the pages of docs/ that are made from it and from the table of options."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from hpcjobs.site import models
from hpcjobs.site.models import (
    OF_THE_LOADER,
    Affinity,
    Containers,
    Environment,
    Jupyter,
    Login,
    NodeGroup,
    NodeShape,
    Partition,
    Policy,
    Prices,
    Resources,
    Site,
    Watts,
)
from hpcjobs.site.resources import FIELDS, OPTIONS, Argument, Sbatch, Treatment

SECTIONS: tuple[type[msgspec.Struct], ...] = (
    *(Site, Partition, NodeShape, NodeGroup, Resources, Environment, Affinity, Containers, Jupyter, Login),
    *(Prices, Watts, Policy),
)
"""Every type of a site file, in the order of the reference page."""
FILE_NAME = "hpcjobs-site.schema.json"


class Key(NamedTuple):
    """One key of a section."""

    name: str
    type: str
    """As the annotation has it."""
    default: str | None
    """The default in Python; ``None``: the key is required, or has no default."""
    required: bool
    text: str


def list_keys(section: type[msgspec.Struct]) -> tuple[Key, ...]:
    """Return the keys of one section of a site file, in the order of its type, base class first."""
    if section is Resources:
        return tuple(_option_key(field, option.help) for field, option in FIELDS.items())
    keys: dict[str, Key] = {}
    for kind in reversed(section.__mro__):
        if kind in (object, msgspec.Struct) or not issubclass(kind, msgspec.Struct):
            continue
        body = _class_body(kind)
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                keys[statement.target.id] = _read_key(statement, statement.target.id, following)
    return tuple(key for key in keys.values() if section is not Site or key.name not in OF_THE_LOADER)


def site_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a site file."""
    schema = msgspec.json.schema(Site)
    names = {section.__name__ for section in SECTIONS}
    definitions = schema["$defs"] = {name: part for name, part in schema["$defs"].items() if name in names}
    for section in SECTIONS:
        definition = definitions[section.__name__]
        definition["description"] = inspect.getdoc(section)
        for name in OF_THE_LOADER if section is Site else ():
            del definition["properties"][name]
        for key in list_keys(section):
            if key.text:
                definition["properties"][key.name]["description"] = key.text
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hpcjobs site file",
        **schema,
    }


def schema_text() -> str:
    """The schema as the text of a file."""
    return msgspec.json.format(msgspec.json.encode(site_schema()), indent=2).decode() + "\n"


def _option_key(field: str, text: str) -> Key:
    """Return the key of an option of sbatch, with type and text from the table of options."""
    parts = [part for part in get_args(get_type_hints(Resources)[field]) if part is not msgspec.UnsetType]
    names = [f"Literal{list(get_args(part))}" if get_origin(part) is Literal else part.__name__ for part in parts]
    kind = " | ".join("None" if name == "NoneType" else name for name in names)
    return Key(name=field, type=kind, default=None, required=False, text=text)


def _class_body(kind: type) -> list[ast.stmt]:
    definition = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(definition, ast.ClassDef)
    return definition.body


def _read_key(statement: ast.AnnAssign, name: str, following: ast.stmt | None) -> Key:
    text = ""
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        text = " ".join(str(following.value.value).split())
    default = None if statement.value is None else ast.unparse(statement.value)
    return Key(
        name=name,
        type=ast.unparse(statement.annotation).replace(" | UnsetType", ""),
        default=None if default in ("None", "UNSET") else default,
        required=statement.value is None,
        text=text,
    )


_KEYS_INTRODUCTION = """\
# Every key of a site file

After reading this page you can look up every key of a site file.

This page is made from the types in `hpcjobs/site/`, as is the JSON Schema that `hpcjobs sites schema` prints.
[Sites and requests](sites.md) explains how the keys work together. A key without a default is optional unless it is
marked as required.
"""
_ALIASES = {
    name: getattr(models, name)
    for name in ("BindTo", "GpuRequest", "LauncherName", "MemoryRequest", "NumaBinding", "Runtime", "SchedulerName")
}
_YAML = {"()": "[]", "True": "true", "False": "false"}
_LITERAL = re.compile(r"Literal\[(.*?)\]")
_TITLES = {"Site": "The file itself", "Resources": "`defaults` of the file and of a partition (`Resources`)"}


def keys_page() -> str:
    """The text of docs/site_keys.md."""
    return _KEYS_INTRODUCTION + "".join(map(_section, SECTIONS))


def _section(section: type[msgspec.Struct]) -> str:
    first = (
        (inspect.getdoc(section) or "").partition("\n")[0]
        if section is not Site
        else "The name of the file, without `.yaml`, is the site's name."
    )
    first = first.replace("``", "`")
    title = _TITLES.get(section.__name__, f"`{section.__name__}`")
    rows = "".join(map(_key_row, list_keys(section)))
    return f"\n## {title}\n\n{first}\n\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}"


def _key_row(key: Key) -> str:
    default = "required" if key.required else _default(key.default)
    text = key.text.replace("``", "`").replace("|", r"\|")
    return f"| `{key.name}` | `{_type(key.type)}` | {default} | {text} |\n"


def _type(annotation: str) -> str:
    """The annotation with the values of its alternatives."""
    for name, alias in _ALIASES.items():
        annotation = annotation.replace(name, f"Literal{list(get_args(alias))}")
    return _LITERAL.sub(lambda match: match[1].replace(", ", " or "), annotation).replace(" | ", " or ")


def _default(code: str | None) -> str:
    """Return the default in YAML; empty for sections that are empty by default."""
    if code is None or code.endswith("s()") or code in ("Environment()", "Jupyter()", "Affinity()"):
        return ""
    return f"`{_YAML.get(code, code)}`"


_SBATCH_INTRODUCTION = """\
# sbatch's options

After reading this page you can say what becomes of each option of sbatch.

Every long option of sbatch from Slurm 22.05 to 25.05, and what becomes of it. This page is made from the table in
`hpcjobs/site/resources.py`, and a test compares the table with the sbatch of the machine that runs it.

- own option: `hpcjobs submit` has it by the same name, as have spec files, site files (`defaults`) and Python, with
  underscores.
- passed through: `--sbatch NAME=VALUE` sends it as it is
  ([for people who know sbatch](sbatch.md#what-hpcjobs-does-not-know)).
- refused: with the reason, and what to use. Of a batch script, `--output` and `--error` are left out, and `--export` is
  passed through.

| option | | on the local queue | |
|---|---|---|---|
"""


def sbatch_page() -> str:
    """The text of docs/sbatch_options.md."""
    return _SBATCH_INTRODUCTION + "".join(map(_option_row, OPTIONS.values()))


def _option_row(option: Sbatch) -> str:
    letter = f", `-{option.short}`" if option.short else ""
    equals = (
        "" if option.argument is Argument.NONE else "[=VALUE]" if option.argument is Argument.OPTIONAL else "=VALUE"
    )
    notes = "; ".join(filter(None, (option.versions, option.reason or option.help)))
    local = option.local.value if option.treatment is Treatment.FIELD else ""
    return f"| `--{option.name}{equals}`{letter} | {option.treatment.value} | {local} | {notes} |\n"
