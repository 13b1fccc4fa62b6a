"""Command line: `python -m compile_muon doctor` and `... checkpoint`."""

import argparse
import sys
from collections.abc import Sequence

from compile_muon.checkpoint.commands import add_commands
from compile_muon.checkpoint.commands import run as run_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code; without one, print the usage."""
    parser = argparse.ArgumentParser(prog="python -m compile_muon", description="Muon and ZeRO inside torch.compile.")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    commands.add_parser(
        "doctor", help="say whether this environment can train: versions, devices, compiler, entry point"
    )
    add_commands(commands.add_parser("checkpoint", help="list, verify, inspect or export checkpoints"))
    chosen = parser.parse_args(arguments)
    if chosen.command == "doctor":
        from compile_muon.doctor import run

        return run()
    if chosen.command == "checkpoint":
        return run_checkpoint(chosen)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
