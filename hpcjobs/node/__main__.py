"""``python3 node.pyz attempts ...`` runs a job; ``aftermath`` concludes a job after its process was killed."""

import sys

from hpcjobs.node.conclude import parse
from hpcjobs.node.supervisor import conclude_killed, supervise


def main() -> int:
    verb, arguments = sys.argv[1], sys.argv[2:]
    if verb == "attempts":
        return supervise(parse(arguments))
    if verb == "aftermath":
        return conclude_killed(*arguments)
    raise SystemExit(f"hpcjobs: node.pyz knows attempts and aftermath, not {verb!r}")


if __name__ == "__main__":
    sys.exit(main())
