"""Which code and image a run was made with: what must not differ within a study."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hpcjobs.run.folder import MANIFEST
from hpcjobs.run.provenance import code_state


def code_of(job_dir: Path) -> str | None:
    """The code of a run, from its run folder: ``commit``, or ``commit + patch DIGEST``; None: not known."""
    code = _manifest(job_dir).get("code")
    if code is None:
        return None
    patch = job_dir / "code.patch"
    return _called(code["commit"], patch.read_bytes() if patch.exists() else b"")


def code_now(folder: Path) -> str | None:
    """The code in ``folder`` as it is now, in the same words; None outside a repository."""
    state = code_state(folder)
    return None if state is None else _called(state.commit, state.patch.encode("utf-8", "surrogateescape"))


def image_of(job_dir: Path) -> str | None:
    """The container image of a run; None: it had none."""
    inside = _manifest(job_dir).get("job", {}).get("container")
    return None if inside is None else f"{inside['name']} {inside['fingerprint'] or inside['image']}"


def _manifest(job_dir: Path) -> dict[str, Any]:
    path = job_dir / MANIFEST
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return told


def _called(commit: str | None, patch: bytes) -> str:
    changed = f" + patch {hashlib.sha256(patch).hexdigest()[:8]}" if patch else ""
    return f"{(commit or 'no commit')[:12]}{changed}"
