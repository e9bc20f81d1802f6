"""``python -m hpcjobs``, as the command ``hpcjobs``: a user's ``array.py`` in the current folder hides no module."""

import sys

if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    sys.path.pop(0)  # the current folder, which -m puts first

from hpcjobs.cli import main

main()
