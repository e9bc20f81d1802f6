"""Code that runs on the compute node besides the program itself: standard library only.

Nothing here imports the submit side, or a package that is not part of Python, so that it works
inside any container and with any user's environment.

    >>> import hpcjobs.runtime
    >>> run = hpcjobs.runtime.start()

is a script's side of a job: see `Run` and docs/own_scripts.md. The names are loaded when they are first used.
"""

TYPE_CHECKING = False  # for type checkers it is True; typing would take most of the time that a launch needs
if TYPE_CHECKING:
    from hpcjobs.runtime.run import Run, start

__all__ = ["Run", "start"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'hpcjobs.runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("hpcjobs.runtime.run"), name)


def __dir__() -> list[str]:
    return __all__
