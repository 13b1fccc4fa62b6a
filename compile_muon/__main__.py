"""Command line: `python -m compile_muon doctor`."""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code; without one, print the usage."""
    parser = argparse.ArgumentParser(prog="python -m compile_muon", description="Muon and ZeRO inside torch.compile.")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    commands.add_parser(
        "doctor", help="say whether this environment can train: versions, devices, compiler, entry point"
    )
    chosen = parser.parse_args(arguments)
    if chosen.command == "doctor":
        from compile_muon.doctor import run

        return run()
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
