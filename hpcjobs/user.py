"""Names the user who runs this process."""

from __future__ import annotations

import os
import pwd


def user_name() -> str:
    """The user's name, or the number of a user without one, as in many containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
