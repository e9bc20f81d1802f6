"""Reports of a job's end (``--notify``): by Slurm's mail, by a command, by a webhook."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from hpcjobs.errors import RequestError, nearest, reason_of
from hpcjobs.job.layers import Values
from hpcjobs.job.models import JobSpec
from hpcjobs.site.models import Site
from hpcjobs.user import user_name

MAIL_TYPES = {"end": "END", "fail": "FAIL", "requeue": "REQUEUE"}
"""Event of ``--notify-on`` -> what sbatch's ``--mail-type`` calls it."""
_KINDS = ("mail", "command", "webhook")
_ADDRESS = re.compile(r"https://\S+|http://(?:localhost|127\.0\.0\.1|\[::1\])[:/]\S*", re.ASCII)
_SECRET = "its address is a secret: write it to a file that only you can read, and use webhook:FILE or webhook:$NAME"


def events(spec: JobSpec) -> tuple[str, ...]:
    """The events to report; all that there are unless the request names some.

    Raises:
        RequestError: there is no such event, or nothing says how to report it.
    """
    if spec.notify_on is None:
        return tuple(MAIL_TYPES)
    named = tuple(arg for arg in spec.notify_on.split(",") if arg)
    for arg in named:
        if arg not in MAIL_TYPES:
            raise RequestError(f"--notify-on {arg}: no event", hint=nearest(arg, MAIL_TYPES))
    if not spec.notify:
        raise RequestError(
            "--notify-on: nothing says how to report it", hint="add --notify mail, command:… or webhook:…"
        )
    return named


def mail_options(spec: JobSpec, site: Site) -> dict[str, str]:
    """``mail_type`` and ``mail_user`` for Slurm, which sends the mail; empty: no mail is wanted.

    Raises:
        RequestError: the site has no Slurm.
    """
    addresses = [arg.partition(":")[2] for arg in spec.notify if arg.partition(":")[0] == "mail"]
    if not addresses:
        return {}
    if site.scheduler != "slurm":
        raise RequestError(
            f"--notify mail: site {site.name} has no Slurm that sends it",
            hint="--notify 'command:mail -s \"$HPCJOBS_TEXT\" ME </dev/null' uses this machine's own",
        )
    types = ",".join(MAIL_TYPES[event] for event in events(spec))
    return {"mail_type": types} | ({"mail_user": addresses[-1]} if addresses[-1] else {})


def complete_address(values: Values, site: Site) -> None:
    """Have Slurm's mail go to the site's ``mail_domain`` where the job names none."""
    address = values["mail_user"]
    if site.mail_domain is None or site.scheduler != "slurm" or "@" in (address or ""):
        return
    if values["mail_type"] not in (None, "NONE"):
        source = values.sources.get("mail_user", f"site {site.name}: mail_domain")
        values.set("mail_user", f"{address or user_name()}@{site.mail_domain}", source)


def notify_words(spec: JobSpec, site: Site, name: str) -> tuple[str, ...]:
    """The options of ``notify.sh``; empty: the job itself reports nothing.

    Raises:
        RequestError: a report that cannot be made.
    """
    on = ",".join(events(spec))
    targets = tuple(arg for text in spec.notify for arg in _target(text))
    return ("--name", name, "--site", site.name, "--on", on, *targets) if targets else ()


def _target(text: str) -> Iterator[str]:
    kind, _, value = text.partition(":")
    if kind not in _KINDS:
        shown = kind if len(kind) < 20 else "…"
        raise RequestError(f"--notify {shown}: unknown", hint="write mail, mail:ADDRESS, command:TEXT or webhook:FILE")
    if kind == "mail":
        return
    if not value:
        raise RequestError(f"--notify {kind}: it lacks what follows the colon", hint=f"{kind}:" + _EXAMPLES[kind])
    yield f"--{kind}"
    yield value if kind == "command" else _webhook(value)


_EXAMPLES = {"command": "'touch done'", "webhook": "~/.config/hpcjobs/webhook"}


def _webhook(value: str) -> str:
    """Where the node reads the address: ``file:PATH`` or ``env:NAME``; the address is looked at, and never repeated."""
    if "://" in value:
        raise RequestError("--notify webhook: the address itself is on the command line", hint=_SECRET)
    if value.startswith("$"):
        name = value[1:].strip("{}")
        if not os.environ.get(name):
            raise RequestError(f"--notify webhook:{value}: {name} is not set here", hint=f"export {name}=…")
        _check_address(os.environ[name], value)
        return f"env:{name}"
    path = Path(value).expanduser().absolute()
    try:
        address = path.read_text(encoding="utf-8").partition("\n")[0]
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--notify webhook: {path}: {reason_of(error)}") from error
    if mode & 0o077:
        raise RequestError(f"--notify webhook: {path} can be read by others", hint=f"chmod 600 {path}")
    _check_address(address, str(path))
    return f"file:{path}"


def _check_address(address: str, where: str) -> None:
    if not _ADDRESS.fullmatch(address.strip()):
        raise RequestError(f"--notify webhook: {where} holds no https:// address in its first line")
