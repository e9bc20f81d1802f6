"""Names the user who runs this process."""

from __future__ import annotations

import os
import pwd


def user_name() -> str:
    """The user's name, or the number of a user without one, as in many containers."""
    return name_of(os.getuid())


def name_of(uid: int) -> str:
    """The name of a user, or the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
