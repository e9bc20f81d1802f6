"""The screen of ``hpcjobs top``: `look` queries, reads and acts; `rows` and `text` are pure.

`screen` draws with textual.
"""
