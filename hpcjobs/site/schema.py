"""The site file's keys: JSON Schema for editors, and the text that stands beside each field of the types."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from hpcjobs.site.affinity import Affinity
from hpcjobs.site.containers import Containers
from hpcjobs.site.jupyter import Jupyter
from hpcjobs.site.login import Login
from hpcjobs.site.models import (
    OF_THE_LOADER,
    Environment,
    NodeGroup,
    NodeShape,
    Partition,
    Prices,
    Resources,
    Site,
    Watts,
)
from hpcjobs.site.policy import Policy
from hpcjobs.site.resources import FIELDS

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
    """As the code has it; ``None``: the key is required, or nothing is the default."""
    required: bool
    text: str


def list_keys(section: type[msgspec.Struct]) -> tuple[Key, ...]:
    """The keys of one section of a site file, in the order of its type; those of its base come first."""
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
    """The key of an option of sbatch, whose type and text are in the table of options."""
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
