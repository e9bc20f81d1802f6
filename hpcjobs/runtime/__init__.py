"""What runs on the compute node besides the program itself: standard library only.

Nothing here imports the submit side, or a package that is not part of Python, so that it works
inside any container and with any user's environment.
"""
