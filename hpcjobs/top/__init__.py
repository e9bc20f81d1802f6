"""The screen of ``hpcjobs top``: look asks and reads; snapshot, rows, text are pure; actions are what keys do.

screen, table, dialogs and refresh draw with textual.
"""
