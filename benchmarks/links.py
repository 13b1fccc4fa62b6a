"""A slow link between ranks of one machine: a separate network namespace, whose loopback is limited to a rate.

Waiting for the link costs no CPU, so overlap shows: a hidden byte costs nothing, an exposed one its time on the wire.
All ranks share the rate, which may change between two steps of the same processes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["BURST", "UNLIMITED", "bytes_per_second", "enter", "limit", "problem"]

UNLIMITED = "unlimited"
#: bytes that an idle link lets through at once; with fewer the kernel's clock could not keep up the rate
BURST = 256 * 1024
_INSIDE = "COMPILE_MUON_BENCHMARK_NAMESPACE"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bytes_per_second(link: str) -> float:
    """Convert a rate as tc takes it ("1600mbit"), or ``UNLIMITED`` to infinity; a ValueError for anything else."""
    if link == UNLIMITED:
        return float("inf")
    rate = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", link)
    if not rate or not float(rate[1]):
        raise ValueError(f"{link!r} is no rate: give one as 1600mbit, or {UNLIMITED}")
    return float(rate[1]) * _UNITS[rate[2]] / 8


def problem() -> str | None:
    """Return why this process cannot have a network namespace of its own; None if it can."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found; install iproute2 and util-linux"
    trial = subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    return None if trial.returncode == 0 else f"{trial.stderr.strip()}; limiting the loopback needs root, and Linux"


def enter(argv: Sequence[str]) -> None:
    """Restart this command, once, in a network namespace of its own."""
    if os.environ.get(_INSIDE) != "1":
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", sys.executable, *argv])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def limit(link: str) -> None:
    """Limit this namespace's loopback to a rate, or with ``UNLIMITED`` remove the limit."""
    if link == UNLIMITED:
        # Fails if there is no limit to remove, which is fine.
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], capture_output=True)
        return
    shape = ["tbf", "rate", link, "burst", str(BURST), "latency", "400ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", *shape], check=True)
