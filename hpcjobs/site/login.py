"""The ``login:`` section of a site: the host that laptops reach by ssh."""

from __future__ import annotations

import re

from hpcjobs.site.checks import check_line
from hpcjobs.site.frozen import Frozen

_HIGHEST_PORT = 65535


class Login(Frozen, frozen=True):
    """The login host, for the same commands from a laptop; its name alone, `user@host`, will do for most."""

    host: str
    """A host name, or the name of a `Host` in ~/.ssh/config."""
    user: str | None = None
    """``None``: as ~/.ssh/config has it, else the user's name on the laptop."""
    port: int | None = None
    """``None``: as ~/.ssh/config has it, else 22."""
    command: str | None = None
    """How hpcjobs is called there, words of bash; ``None``: the laptop's own version, installed there once."""
    python: str | None = None
    """Python 3.10 or newer there, to install it with; ``None``: the newest one on PATH of a login shell."""
    code: str = "~/hpcjobs-code"
    """Folder there for copies of the laptop's code, which the nodes must see; ``$VARIABLES`` are expanded there."""

    def __post_init__(self) -> None:
        for field in ("host", "user", "command", "python", "code"):
            value = getattr(self, field)
            if value is not None:
                check_line(value, f"login.{field}")
        for field in ("host", "user"):
            value = getattr(self, field)
            if value is not None and (value.startswith("-") or re.search(r"\s", value)):
                raise ValueError(f"login.{field} {value!r}: no name begins with '-' or has a space")
        if self.port is not None and not 0 < self.port <= _HIGHEST_PORT:
            raise ValueError(f"login.port must be between 1 and {_HIGHEST_PORT}, not {self.port}")

    @property
    def destination(self) -> str:
        """What ssh takes as its destination."""
        target = self.host if self.user is None else f"{self.user}@{self.host}"
        return target if self.port is None else f"ssh://{target}:{self.port}"
