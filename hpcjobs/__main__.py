"""``python -m hpcjobs``, as the command ``hpcjobs``: a user's ``array.py`` in the current folder hides no module."""

import os
import sys

try:
    _folder = os.getcwd()
except OSError:  # it was removed
    _folder = ""
if sys.path[0] == _folder and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    sys.path.pop(0)  # -m has put it there

from hpcjobs.cli import main

main()
