"""The golden gate: `python tests/golden --write` stores anew, `--against COMMIT` compares bits with another commit."""

import argparse
import logging
import sys
import warnings
from fnmatch import fnmatch

from against import compare
from captures import CELLS
from stored import PARTS, another_torch, graphs, stored, words, write


def main() -> int:
    """1 where something is different from another commit, else 0."""
    parser = argparse.ArgumentParser(prog="python tests/golden", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--write", action="store_true", help="store graphs, checkpoints and messages, and say what changed"
    )
    what.add_argument(
        "--against", metavar="COMMIT", help="compare weights, states and losses of runs with this commit's"
    )
    parser.add_argument("--cells", metavar="PATTERN", default="*", help="which cells, as 'stage 3*'; default: all")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    if arguments.against:
        return compare(arguments.against, arguments.cells)
    if reason := another_torch():
        if arguments.cells != "*" and stored("graphs"):
            parser.error(f"{reason}: a file has graphs of one torch; leave --cells out")
        print(f"{reason}: all may differ")
    for part, make in PARTS.items():
        old = {key: value for key, value in stored(part).items() if key != "torch"}
        if part == "graphs":
            chosen = {name: cell for name, cell in CELLS.items() if fnmatch(name, arguments.cells)}
            kept = {k: v for k, v in old.items() if (name := k.partition(" | ")[0]) in CELLS and name not in chosen}
            entries = kept | graphs(chosen)
            new = {key: entries[key] for name in CELLS for key in entries if key.partition(" | ")[0] == name}
        else:
            new = make()
        said = words(part, old, new)
        print("\n".join(said) if said else f"{part}: no change")
        write(part, new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
