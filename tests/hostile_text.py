"""Text that commands a terminal, wherever somebody else can put some."""

from __future__ import annotations

import re

EVIL = "x\x1b]52;c;aGk=\x07\x1b[2Jy\x9b2Jz\u202eabc\u200f\x85\r"
"""Sets the clipboard, clears the screen, turns the direction of text; C0, C1 and marks."""
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
