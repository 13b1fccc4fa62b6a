"""Command line: `python -m compile_muon doctor`, `... calibrate`, `... plan`, `... convert` and `... checkpoint`."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import compile_muon


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code; without one, print the usage."""
    parser = argparse.ArgumentParser(prog="python -m compile_muon", description="Muon and ZeRO inside torch.compile.")
    parser.add_argument("--version", action="version", version=f"compile_muon {compile_muon.__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor", help="say whether this environment can train: versions, devices, compiler, entry point, a config"
    )
    doctor.add_argument("--config", type=Path, help="a config to look at: what it says, and which axes it makes")
    # argparse passes a default that is a string through `type`, but only where this command is chosen.
    doctor.add_argument("--world", type=_count, default=os.environ.get("WORLD_SIZE") or "1", help="ranks it is for")
    calibrate = commands.add_parser("calibrate", help="measure this machine for the cost model, and write what it is")
    calibrate.add_argument("--out", type=Path, required=True, help="JSON file to write, for the setting machine")
    calibrate.add_argument("--ranks", type=_count, help="to start; under torchrun there are some already")
    calibrate.add_argument("--quick", action="store_true", help="few and small sizes, to see whether it works here")
    calibrate.add_argument("--base", help="the machine that has what is not measured; on GPUs h100")
    calibrate.add_argument("--disk", type=Path, help="a folder on the disk that offload would use, to measure it too")
    planner = commands.add_parser("plan", help="simulate a training step: memory, bytes and seconds by stage and mesh")
    planner.add_argument("model", metavar="MODEL", help="module:function, or a config of Hugging Face")
    planner.add_argument("--config", type=Path, required=True, help="a config, as initialize() takes it")
    planner.add_argument("--world", type=int, nargs="+", required=True, metavar="N", help="numbers of ranks")
    planner.add_argument("--machine", required=True, help="a name, or a file that calibrate wrote")
    planner.add_argument("--tokens", type=int, required=True, help="of a rank and micro-batch")
    planner.add_argument("--sequence", type=int, help="tokens of a sequence (default: all of them are one)")
    planner.add_argument(
        "--price", type=int, nargs="+", default=[], metavar="TOKENS", help="of a rank and step: Muon's price by these"
    )
    planner.add_argument("--fit", action="store_true", help="print which micro-batches fit, and how fast they are")
    planner.add_argument("--html", type=Path, help="page to write, with charts")
    planner.add_argument("--json", type=Path, help="file to write the numbers to")
    planner.add_argument("--trace", type=Path, help="file to write timelines to, for Perfetto")
    converter = commands.add_parser("convert", help="print a DeepSpeed config in our keys, and what is left to do")
    converter.add_argument("file", type=Path, help="a DeepSpeed config, as JSON")
    _add_checkpoint_commands(commands.add_parser("checkpoint", help="list, verify, inspect or export checkpoints"))
    chosen = parser.parse_args(arguments)
    # Each command imports what it needs: `doctor` must run where something is missing.
    if chosen.command == "doctor":
        from compile_muon.doctor import run

        return run(config=chosen.config, world=chosen.world)
    if chosen.command == "calibrate":
        from compile_muon.planning.machines.calibrate import run as run_calibrate

        return run_calibrate(chosen.out, chosen.ranks, chosen.quick, chosen.disk, base=chosen.base)
    if chosen.command == "plan":
        from compile_muon.planning.command import run as run_plan

        return run_plan(chosen)
    if chosen.command == "convert":
        from compile_muon.config.convert import run as run_convert

        return run_convert(chosen.file)
    if chosen.command == "checkpoint":
        from compile_muon.checkpoint.commands import run as run_checkpoint

        return run_checkpoint(chosen)
    parser.print_help()
    return 0


def _count(text: str) -> int:
    """Parse a number of at least one."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return number


def _add_checkpoint_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", title="commands", metavar="COMMAND", required=True)
    for name, text in (
        ("list", "which checkpoints there are"),
        ("verify", "read every file and compare its checksum; exit code 1 if one is damaged"),
        ("inspect", "what is in a checkpoint"),
        ("export", "whole weights as one Hugging Face-style safetensors folder"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("folder", type=Path, help="the folder of a Checkpointer")
        if name != "list":
            which = "all" if name == "verify" else "the newest"
            command.add_argument("--step", type=int, help=f"default: {which}")
        if name == "export":
            command.add_argument("--out", type=Path, required=True, help="a new folder for the weights")


def _to_the_end() -> int:
    """Run :func:`main` on any terminal: without our characters, with a reader that leaves (``... | head``), Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # the shells' convention: 128 + SIGINT
    except BrokenPipeError:
        # Python flushes stdout at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(_to_the_end())
