"""Shared parts of reports: the style of figures, and HTML pages that need no other file."""
