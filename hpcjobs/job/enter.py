"""Options of ``enter.sh``, which runs a command in a job's image."""

from __future__ import annotations

from collections.abc import Iterable

from hpcjobs.job.launch.base import Raw
from hpcjobs.job.models import Inside
from hpcjobs.runtime.exits import ExitCode


def enter_options(inside: Inside, env: Iterable[str]) -> tuple[str, ...]:
    """The options for this image; ``env``: names of the job's own variables."""
    variables = list(env)
    return (
        f"--exit-code={int(ExitCode.CONTAINER)}",
        f"--name={inside.name}",
        f"--program={inside.program}",
        f"--prefix={inside.runtime.upper()}",
        f"--image={inside.image}",
        *((f"--fingerprint={inside.fingerprint}",) if inside.fingerprint else ()),
        *(("--staged",) if inside.stage else ()),
        *((f"--driver={inside.driver}",) if inside.driver else ()),
        *(f"--bind={bind.source}:{bind.target}:{bind.mode}" for bind in inside.binds),
        *((Raw(f"--scratch={inside.scratch}"),) if inside.scratch else ()),
        f"--package-path={inside.package_folder}",
        *(("--keep-python-path",) if "PYTHONPATH" in variables else ()),
        *(f"--env={name}" for name in variables),
        *(() if inside.home else ("--no-home",)),
        *(("--option=--cleanenv",) if inside.clean_env else ()),
        *((f"--option=--{inside.gpu}",) if inside.gpu else ()),
        *(f"--option={arg}" for arg in inside.args),
    )
