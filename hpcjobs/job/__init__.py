"""Turns a request for a job and a site into the script and command lines that run it."""
