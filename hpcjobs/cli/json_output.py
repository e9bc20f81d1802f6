"""Prints values as ``--json`` does: by the verb's type in `json_types`, from which the JSON Schema is made as well."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

from hpcjobs.cli.json_documents import Document, Time
from hpcjobs.cli.json_types import OUTPUTS
from hpcjobs.cli.output import print_json


@cache
def output_type(verb: str) -> Any:
    """The type of what ``hpcjobs VERB --json`` prints."""
    return OUTPUTS[verb]()


def schema(verb: str) -> dict[str, Any]:
    """The JSON Schema of what ``hpcjobs VERB --json`` prints."""
    return msgspec.json.schema(output_type(verb))


def print_as(verb: str, value: object) -> None:
    """Print ``value`` as ``hpcjobs VERB --json`` does."""
    print_json(_convert(value, output_type(verb)))


def _convert(value: Any, kind: Any) -> Any:
    """``value`` for the encoder: documents as mappings of their fields, moments as times."""
    origin, arguments = get_origin(kind), get_args(kind)
    if value is None or kind is Any:
        return value
    if origin in (Union, UnionType):
        kinds = [one for one in arguments if one is not type(None)]
        return _convert(value, kinds[0]) if len(kinds) == 1 else value
    if kind is Time or (origin is Annotated and arguments[0] is datetime):
        return datetime.fromtimestamp(value, timezone.utc)
    if origin in (list, tuple):
        return [_convert(one, arguments[0]) for one in value]
    if origin is dict:
        return {key: _convert(one, arguments[1]) for key, one in value.items()}
    if kind is str:
        return str(getattr(value, "value", value))
    if isinstance(kind, type) and issubclass(kind, Document):
        return {field.name: _convert(_field(value, field), field.type) for field in msgspec.structs.fields(kind)}
    return value


def _field(value: Any, field: msgspec.structs.FieldInfo) -> Any:
    if not isinstance(value, Mapping):
        return getattr(value, field.name)
    return value[field.name] if field.required else value.get(field.name, field.default)
