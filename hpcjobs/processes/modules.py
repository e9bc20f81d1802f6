"""Modules of Python that are started as programs.

Python puts the current folder before everything else for ``-m`` and ``-c``, and that folder may be anybody's: a
``torch.py`` in it would run under the user's name.
"""

import sys
from typing import Tuple

LEAVE_FOLDER = "import sys; sys.path = [*filter(None, sys.path)]"
"""The first line of code for ``-c``: what it imports comes from no file of the current folder."""
_RUN = LEAVE_FOLDER + '; import runpy; runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'


def module_words(name: str) -> Tuple[str, ...]:
    """The words after any Python, whatever its version, that run module ``name`` as ``-m`` does."""
    return ("-c", _RUN, name)


def own_module_words(name: str) -> Tuple[str, ...]:
    """The same after the Python that runs this: from 3.11 on an option does it, also for processes that it spawns."""
    return ("-P", "-m", name) if sys.version_info >= (3, 11) else module_words(name)
