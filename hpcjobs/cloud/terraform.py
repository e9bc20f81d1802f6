"""Terraform (or OpenTofu) as a program: found on PATH, run in a cluster's folder, its output passed on as it comes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcjobs.errors import CommandMissingError, HpcJobsError
from hpcjobs.processes.programs import run, run_in_terminal

_PROGRAMS = ("terraform", "tofu")


def program() -> str:
    """Return ``terraform`` if it is on PATH, otherwise ``tofu``.

    Raises:
        CommandMissingError: neither is installed.
    """
    for name in _PROGRAMS:
        if shutil.which(name):
            return name
    raise CommandMissingError(
        "neither terraform nor tofu is on PATH",
        hint="install one: developer.hashicorp.com/terraform/install or opentofu.org/docs/intro/install",
    )


def stream(folder: Path, *arguments: str) -> None:
    """Run one Terraform command in ``folder`` on this terminal, with progress, questions and colours.

    Files it makes, the state among them, are readable to their owner alone.

    Raises:
        HpcJobsError: it ended with an error, which it has printed.
    """
    before = os.umask(0o077)
    try:
        code = run_in_terminal([program(), *arguments], cwd=str(folder))
    finally:
        os.umask(before)
    if code:
        raise HpcJobsError(f"{program()} {arguments[0]} ended with {code} in {folder}")


def outputs(folder: Path) -> Mapping[str, Any]:
    """Output name -> value of the cluster applied in ``folder``; empty before the first apply.

    Raises:
        HpcJobsError: there is a state, and Terraform cannot read it.
    """
    done = run([program(), "output", "-json", "-no-color"], cwd=str(folder))
    if done.code:
        raise HpcJobsError(f"{program()} output ended with {done.code} in {folder}: {done.err.strip()}")
    return {name: output["value"] for name, output in json.loads(done.out or "{}").items()}


def secure_state(folder: Path) -> None:
    """Make the state files readable by their owner only."""
    for path in folder.glob("*.tfstate*"):
        path.chmod(0o600)
