"""Builds a request for a job from options by name, as flags or Python keywords give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args, get_type_hints

import msgspec

from hpcjobs.errors import RequestError, nearest
from hpcjobs.job.models import JobSpec
from hpcjobs.job.program import program_words
from hpcjobs.site.models import Resources
from hpcjobs.site.type_errors import in_plain_words


def make_spec(program: str | Sequence[str], options: Mapping[str, object]) -> JobSpec:
    """The request to run ``program`` with ``options``: fields of `JobSpec` and of `Resources`, converted and checked.

    None says nothing, except for a field of `Resources`, which it clears.

    Raises:
        RequestError: no such option, or a value that it cannot have.
    """
    env = options.get("env")
    if not isinstance(env, Mapping | None):
        raise RequestError(f"env is a mapping from names to values, not {env!r}")
    own = {name: value for name, value in options.items() if name in JobSpec.__struct_fields__}
    fields = {name: value for name, value in own.items() if value is not None}
    if "chdir" in fields:
        fields["chdir"] = str(fields["chdir"])
    resources = {name: value for name, value in options.items() if name not in own}
    return _convert({**fields, "program": program_words(program), "resources": resources})


def checked_spec(spec: JobSpec) -> JobSpec:
    """``spec`` with every value of its declared type: Python checks none when a `JobSpec` is made.

    Raises:
        RequestError: a value of another type.
    """
    try:
        fields = msgspec.to_builtins(spec)
    except (TypeError, ValueError) as error:
        raise RequestError(f"JobSpec: {error}") from error
    return _convert(fields)


def _convert(fields: Mapping[str, object]) -> JobSpec:
    try:
        return msgspec.convert(fields, JobSpec, strict=False)
    except UnicodeEncodeError as error:  # of msgspec, about to quote a value
        raise RequestError(f"{error.object!r} is not UTF-8 text") from error
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`").removeprefix("resources").lstrip(".")
        plain = in_plain_words(message)
        raise RequestError(f"{field}: {plain}" if field else plain, hint=_hint(message, field)) from error


def _hint(message: str, field: str) -> str | None:
    """What to write instead, for an unknown option, or one without its value."""
    if field in Resources.__struct_fields__ and message.endswith("got `bool`"):
        return f"it takes a value: -o {field}=VALUE"
    if message.startswith("Invalid enum value") and field in Resources.__struct_fields__:
        allowed = get_args(get_args(get_type_hints(Resources)[field])[0])
        return f"use {' or '.join(allowed)}"
    if "unknown field" not in message:
        return None
    return nearest(message.split("`")[1], (*Resources.__struct_fields__, *JobSpec.__struct_fields__[2:]))
