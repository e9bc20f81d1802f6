"""Chooses the path of a new site file, and writes it."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml

from hpcjobs.discovery.facts import ClusterFacts
from hpcjobs.discovery.partitions import is_name
from hpcjobs.discovery.proposal import PartitionEntry, ProposedSite
from hpcjobs.errors import ConfigError, RequestError, reason_of
from hpcjobs.files import config_dir, write_beside
from hpcjobs.site.models import Site
from hpcjobs.site.schema import FILE_NAME, schema_text


def default_name(cluster: ClusterFacts) -> str:
    """ClusterName, in characters that the name of a site can have.

    Raises:
        RequestError: the cluster has no name.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", cluster.config.cluster or "")
    if not is_name(name):
        raise RequestError("scontrol show config names no ClusterName", hint="use hpcjobs sites init NAME")
    return name


def choose_path(name: str | None, file: Path | None, *, force: bool) -> Path:
    """The file to write: ``file``, or ``NAME.yaml`` among the user's site files.

    Raises:
        RequestError: neither can be the name of a site, or the file exists and ``force`` is not given.
    """
    path = (config_dir() / "site_configs" / f"{name}.yaml") if file is None else file.expanduser().absolute()
    if file is not None and path.suffix != ".yaml":
        raise RequestError(f"--file {file}: a site file is called NAME.yaml")
    if file is not None and name is not None and path.stem != name:
        raise RequestError(
            f"site {name!r} and --file {file}: the name of the file is the site's name", hint=f"--file {name}.yaml"
        )
    if not is_name(name if file is None and name is not None else path.stem):
        raise RequestError(
            f"site name {name if name is not None else path.stem!r}: use letters, digits, '_', '.', '-', "
            "and start with a letter or digit"
        )
    _refuse_existing(path, force=force)
    return path


def save_text(path: Path, text: str, *, force: bool) -> None:
    """Write the file atomically, and the schema for editors that its first line names.

    Raises:
        RequestError: it exists and ``force`` is not given. ConfigError: it cannot be written.
    """
    _refuse_existing(path, force=force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_beside(path.parent / FILE_NAME, schema_text(), mode=None)
        write_beside(path, text, mode=None)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {reason_of(error)}") from error


def _refuse_existing(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise RequestError(f"{path} is a folder")
    if os.path.lexists(path) and not force:
        raise RequestError(
            f"{path} exists", hint="--force replaces it, --dry-run prints the new file, NAME chooses another"
        )


_WIDTH = 116
_PARTITIONS_ORIGIN = (
    "scontrol show partition, scontrol show node: CPUEfctv, RealMemory less MemSpecLimit, Gres, features"
)


def write_text(draft: ProposedSite, *, made: str) -> str:
    """The site file; ``made`` says when and where.

    Raises:
        RequestError: an answer is not a value of its key.
    """
    text = "\n".join(_lines(draft, made)) + "\n"
    check_text(text)
    return text


def check_text(text: str) -> None:
    """Refuse an invalid site file (RequestError)."""
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
    """``text`` as comment lines; text of the cluster cannot end the comment."""
    clean = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    continued = f"{indent}#   " if clean.startswith("- ") else f"{indent}# "
    wrap = textwrap.TextWrapper(_WIDTH, initial_indent=f"{indent}# ", subsequent_indent=continued)
    wrap.break_long_words = wrap.break_on_hyphens = False
    return wrap.wrap(clean)
