"""The processes of this machine, and how programs are started: standard library only."""
