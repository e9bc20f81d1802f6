"""Reads the code and image that a run was made with, which must not differ within a study."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hpcjobs.run.folder import MANIFEST
from hpcjobs.run.provenance import code_state


def read_code(job_dir: Path) -> str | None:
    """The code of a run, from its run folder: ``commit``, or ``commit + patch DIGEST``; None: not known."""
    code = _manifest(job_dir).get("code")
    if code is None:
        return None
    patch = job_dir / "code.patch"
    return _label(code["commit"], patch.read_bytes() if patch.exists() else b"")


def current_code(folder: Path) -> str | None:
    """The code in ``folder`` as it is now, in the same form; None outside a repository."""
    state = code_state(folder)
    return None if state is None else _label(state.commit, state.patch.encode("utf-8", "surrogateescape"))


def read_image(job_dir: Path) -> str | None:
    """The container image of a run; None: it had none."""
    inside = _manifest(job_dir).get("job", {}).get("container")
    return None if inside is None else f"{inside['name']} {inside['fingerprint'] or inside['image']}"


def _manifest(job_dir: Path) -> dict[str, Any]:
    path = job_dir / MANIFEST
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return manifest


def _label(commit: str | None, patch: bytes) -> str:
    changed = f" + patch {hashlib.sha256(patch).hexdigest()[:8]}" if patch else ""
    return f"{(commit or 'no commit')[:12]}{changed}"
