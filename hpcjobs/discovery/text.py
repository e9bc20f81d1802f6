"""Formats a draft as commented YAML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import msgspec
import yaml

from hpcjobs.discovery.proposal import PartitionEntry, ProposedSite
from hpcjobs.errors import RequestError
from hpcjobs.site.models import Site
from hpcjobs.site.schema import FILE_NAME

_WIDTH = 116
_PARTITIONS_ORIGIN = (
    "scontrol show partition, scontrol show node: CPUEfctv, RealMemory less MemSpecLimit, Gres, features"
)


def write_text(draft: ProposedSite, *, made: str) -> str:
    """The site file; ``made`` says when and where.

    Raises:
        RequestError: an answer is no value of its key.
    """
    text = "\n".join(_lines(draft, made)) + "\n"
    check_text(text)
    return text


def check_text(text: str) -> None:
    """Refuse a text that is no site file (RequestError)."""
    try:
        msgspec.convert(yaml.safe_load(text), Site)
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        raise RequestError(
            f"the site file would not be valid: {error}",
            hint="is a value of one of the flags wrong? nothing is written",
        ) from error


def _lines(draft: ProposedSite, made: str) -> Iterator[str]:
    yield f"# yaml-language-server: $schema={FILE_NAME}"
    yield from _comment(f"Site {draft.name}: {made}. The comment before a key names the origin of its value.")
    for entry in draft.entries:
        if entry.origin:
            yield ""
            yield from _comment(entry.origin)
        yield f"{entry.key}: {_flow(entry.value)}"
    yield ""
    yield from _comment(_PARTITIONS_ORIGIN)
    yield "partitions:"
    for partition in draft.partitions:
        yield from _partition_lines(partition)
    if draft.omissions:
        yield ""
        yield from _comment("Partitions that are left out, because your jobs cannot use them:")
        for omission in draft.omissions:
            yield from _comment(f"- {omission.partition}: {omission.reason}")
    if draft.notes:
        yield ""
        yield from _comment("Facts that need no key:")
        for note in draft.notes:
            yield from _comment(f"- {note}")
    if draft.questions:
        yield ""
        yield from _comment("What could not be learnt here: question, command that answers it, flag of `sites init`.")
        for question in draft.questions:
            yield from _comment(f"- {question.key}: {question.text}")
            yield f"#     {question.command}"
            yield f"#     {question.flag}"


def _partition_lines(partition: PartitionEntry) -> Iterator[str]:
    for note in partition.notes:
        yield from _comment(note, indent="  ")
    yield f"  {_flow(partition.name)}:"
    for key, value in partition.entries:
        if key == "nodes" and isinstance(value, list):
            yield "    nodes:"
            yield from (f"      - {_flow(group)}" for group in value)
        else:
            yield f"    {key}: {_flow(value)}"


def _flow(value: object) -> str:
    """``value`` in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("...\n").strip()


def _comment(text: str, *, indent: str = "") -> list[str]:
    """``text`` as comment lines: what a cluster prints cannot end the comment."""
    clean = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    continued = f"{indent}#   " if clean.startswith("- ") else f"{indent}# "
    wrap = textwrap.TextWrapper(_WIDTH, initial_indent=f"{indent}# ", subsequent_indent=continued)
    wrap.break_long_words = wrap.break_on_hyphens = False
    return wrap.wrap(clean)
