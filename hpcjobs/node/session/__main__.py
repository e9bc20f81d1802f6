"""``python session.pyz serve|relay|carry RUN_DIR``: checks the Python first, in words that an old one reads too."""

import sys

OLDEST = (3, 9)
if sys.version_info < OLDEST:
    problem = " ".join((sys.executable, "is", sys.version.split()[0]))
    sys.exit("hpcjobs: a session needs Python 3.9, and " + problem + ": name another in the site file (jupyter.python)")


def main():  # type: () -> int
    if len(sys.argv) != 3 or sys.argv[1] not in ("serve", "relay", "carry"):
        sys.exit("usage: python session.pyz serve|relay|carry RUN_DIR")
    from pathlib import Path

    run_dir = Path(sys.argv[2])
    if sys.argv[1] == "serve":
        from hpcjobs.node.session.agent import serve

        return serve(run_dir)
    from hpcjobs.node.session import relay

    return relay.relay(run_dir) if sys.argv[1] == "relay" else relay.carry(run_dir)


if __name__ == "__main__":
    sys.exit(main())
