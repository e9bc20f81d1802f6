"""``python figures.pyz NAME WORLD_SIZE RULES BEGIN RUN_DIR``: reads the log on standard output from byte BEGIN on."""

import json
import sys


def main() -> int:
    if len(sys.argv) != 6:
        sys.exit("usage: python figures.pyz NAME WORLD_SIZE RULES BEGIN RUN_DIR")
    from hpcjobs.node.figures.follow import follow
    from hpcjobs.record.figures import FigureRule

    name, world_size, rules, begin, run_dir = sys.argv[1:]
    return follow(run_dir, [FigureRule(**rule) for rule in json.loads(rules)], name=name, world_size=int(world_size),
                  begin=int(begin))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
