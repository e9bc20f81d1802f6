"""Type errors of msgspec, in the words of somebody who writes YAML or an option."""

from __future__ import annotations

import re

_TYPES = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping (KEY: VALUE)",
    "null": "nothing",
}
_MISMATCH = re.compile(r"Expected `([a-z| ]+)`, got `([a-z]+)`\Z")
_ENUM = re.compile(r"Invalid enum value (.+)\Z")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`\Z")
_UNQUOTED = ("int", "float", "bool")
"""Types that YAML reads from a value without quotes."""


def in_plain_words(message: str) -> str:
    """``message`` of a `msgspec.ValidationError`, without the names that JSON and Python have for types."""
    if match := _ENUM.match(message):
        return f"{match[1]} is not one of the allowed values"
    if match := _UNKNOWN.match(message):
        return f"{match[1]!r} is not known"
    match = _MISMATCH.match(message)
    if match is None:
        return message
    expected = [_TYPES.get(name, name) for name in match[1].split(" | ") if name != "null"]
    return f"expected {' or '.join(expected)}, got {_TYPES.get(match[2], match[2])}"


def is_unquoted_text(message: str) -> bool:
    """Whether a value must be text and lacks the quotes that make it text to YAML."""
    match = _MISMATCH.match(message)
    return match is not None and "str" in match[1].split(" | ") and match[2] in _UNQUOTED
