"""The screen of ``hpcjobs top``: `look` queries and reads; `rows` and `text` are pure; `actions` are the keys.

`screen` draws with textual.
"""
