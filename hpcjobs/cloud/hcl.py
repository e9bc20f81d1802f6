"""Values as HCL, aligned as ``terraform fmt`` aligns them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

Value = str | int | float | bool | None | Sequence[str] | Mapping[str, str]


def literal(value: Value) -> str:
    """``value`` on one line; text is escaped so that HCL reads it unchanged."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("${", "$${").replace("%{", "%%{")
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, Mapping):
        inside = ", ".join(f"{literal(key)} = {literal(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return f"[{', '.join(literal(item) for item in value)}]"


def assignments(values: Mapping[str, Value]) -> str:
    """One line for each of ``values``, their signs of equality below each other."""
    width = max(len(name) for name in values)
    return "".join(f"{name:<{width}} = {literal(value)}\n" for name, value in values.items())
