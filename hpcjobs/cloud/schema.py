"""Checks a folder of Terraform against the schemas of its providers, without a network.

Terraform itself drops unknown keys of object-valued arguments in silence, and asks a registry for the rest; here both
are read from the schemas in ``schemas/``, which ``tools/provider-schemas`` took from the providers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcjobs.cloud.section import Provider
from hpcjobs.errors import HpcJobsError, nearest

_META = {"count", "for_each", "depends_on", "lifecycle", "provider", "provisioner", "connection", "timeouts"}
"""Arguments that Terraform itself accepts in every resource."""
_KINDS = {"resource": "resource_schemas", "data": "data_source_schemas"}


def provider_schema(provider: Provider) -> dict[str, Any]:
    """The shipped schema of the resources that the module of ``provider`` uses."""
    path = Path(__file__).parent / "schemas" / f"{provider}.json"
    schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return schema


def problems(files: Mapping[str, str], provider: Provider) -> list[str]:
    """Problems that the provider would find in ``files`` (name -> text; only ``*.tf`` are read).

    Raises:
        HpcJobsError: python-hcl2 is missing.
    """
    schema = provider_schema(provider)
    return [
        f"{name}: {problem}"
        for name, text in sorted(files.items())
        if name.endswith(".tf")
        for problem in _file_problems(text, schema)
    ]


def _file_problems(text: str, schema: Mapping[str, Any]) -> Iterator[str]:
    try:
        import hcl2
    except ImportError as error:
        raise HpcJobsError("python-hcl2 is missing", hint="pip install 'hpcjobs[cloud]'") from error
    try:
        tree = hcl2.load(io.StringIO(text))
    except Exception as error:  # hcl2 passes on the errors of its parser
        yield f"not valid HCL: {str(error).splitlines()[0]}"
        return
    for kind, key in _KINDS.items():
        for typed in tree.get(kind, ()):
            for quoted, named in typed.items():
                for name, body in named.items():
                    where = f"{_bare(quoted)}.{_bare(name)}"
                    if (block := schema[key].get(_bare(quoted))) is None:
                        yield f"{where}: {nearest(_bare(quoted), schema[key])}"
                    else:
                        own = {key: value for key, value in body.items() if key not in _META}
                        yield from _block_problems(where, own, block)


def _block_problems(where: str, body: Mapping[str, Any], block: Mapping[str, Any]) -> Iterator[str]:
    attributes, blocks = block["attributes"], block.get("block_types", {})
    dynamic = {_bare(name): item for group in body.get("dynamic", ()) for name, item in group.items()}
    assigned = {_bare(key) for key in body if not key.startswith("__") and key != "dynamic"}
    settable = {name for name, a in attributes.items() if a.get("required") or a.get("optional")}
    for name in sorted((assigned | set(dynamic)) - settable - set(blocks)):
        yield f"{where}.{name}: no such argument; {nearest(name, settable | set(blocks))}"
    required = {name for name, a in attributes.items() if a.get("required")}
    required |= {name for name, b in blocks.items() if b.get("min_items")}
    for name in sorted(required - assigned - set(dynamic)):
        yield f"{where}.{name}: missing"
    for key, value in body.items():
        name = _bare(key)
        if name in blocks:
            for item in value:
                yield from _block_problems(f"{where}.{name}", item, blocks[name]["block"])
        elif name in settable:
            yield from _value_problems(f"{where}.{name}", value, attributes[name])
    for name, item in dynamic.items():
        for content in item["content"] if name in blocks else ():
            yield from _block_problems(f"{where}.{name}", content, blocks[name]["block"])


def _value_problems(where: str, value: Any, attribute: Mapping[str, Any]) -> Iterator[str]:
    """Yield literal values of the wrong type, and unknown or missing keys of nested objects."""
    nested = attribute.get("nested_type")
    if nested is not None:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from _block_problems(where, item, nested)
        return
    kind = attribute["type"]
    wrong = {
        "number": isinstance(value, bool) or (isinstance(value, str) and value.startswith('"')),
        "bool": not isinstance(value, bool) and not str(value).startswith("${"),
    }
    if isinstance(kind, str) and value is not None and wrong.get(kind):
        yield f"{where}: expected a {kind}, not {value}"


def _bare(name: str) -> str:
    return name.strip('"')
