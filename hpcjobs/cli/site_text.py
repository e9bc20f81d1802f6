"""A site as YAML, with the file and the line that each value was read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from hpcjobs.site import rehearsal
from hpcjobs.site.inheritance import Steps, list_origins, read_chain
from hpcjobs.site.models import OF_THE_LOADER, Site


def write_site(site: Site) -> Iterator[str]:
    """The lines of a site file that says what ``site`` says; a value without a comment is the default."""
    yield f"# {site.path}" + (" (rehearsal on the sandbox)" if site.rehearsal else "")
    yield from (f"# extends {path}" for path in site.extended)
    overlay = rehearsal.current() if site.rehearsal else None
    replaced = {*overlay.overlay, "slurm_conf"} if overlay is not None else set[str]()
    read = list_origins(read_chain(Path(site.path)))
    origins = {steps: where for steps, where in read.items() if steps and steps[0] not in replaced}
    origins |= {(key,): "the sandbox" for key in replaced}
    left_out = (
        *OF_THE_LOADER,
        "extends",
        *(("policy",) if site.policy is None else ()),
    )  # a key policy is the centre's
    fields = {key: value for key, value in msgspec.to_builtins(site).items() if key not in left_out}
    yield from _lines(fields, origins, ())


def _lines(tree: Mapping[str, Any], origins: Mapping[Steps, str], steps: Steps) -> Iterator[str]:
    for key, value in tree.items():
        path = (*steps, key)
        start = "  " * len(steps) + f"{_flow(key)}:"
        origin = f"  # {origins[path]}" if path in origins else ""
        if isinstance(value, dict) and value:
            yield start + origin
            yield from _lines(value, origins, path)
        else:
            yield f"{start} {_flow(value)}{origin}"


def _flow(value: object) -> str:
    """``value`` in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("...\n").strip()
