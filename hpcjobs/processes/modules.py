"""Modules of Python that are started as programs.

With ``-m`` and ``-c`` Python searches the current folder first, and that folder may be anybody's: a ``torch.py`` in it
would run under the user's name.
"""

import sys
from typing import Tuple

LEAVE_FOLDER = "import sys; sys.path = [*filter(None, sys.path)]"
"""First line of code for ``-c``: imports after it take no file of the current folder."""
_RUN = LEAVE_FOLDER + '; import runpy; runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'


def module_words(name: str) -> Tuple[str, ...]:
    """Arguments with which a Python of any version runs module ``name`` as ``-m`` does."""
    return ("-c", _RUN, name)


def own_module_words(name: str) -> Tuple[str, ...]:
    """Arguments for the Python that runs this: ``-P`` from 3.11 on, which also holds for processes that it spawns."""
    return ("-P", "-m", name) if sys.version_info >= (3, 11) else module_words(name)
