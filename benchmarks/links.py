"""A slow link between ranks of one machine: a network namespace of our own, whose loopback is limited to a rate.

Waiting for it costs no CPU, so what overlaps shows: a hidden byte costs nothing, an exposed one its time on the wire.
The rate is that of all ranks together, and may change between two steps of the same processes.
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
#: bytes that a link that was idle lets through at once; fewer, and a kernel's clock cannot keep up the rate
BURST = 256 * 1024
_INSIDE = "COMPILE_MUON_BENCHMARK_NAMESPACE"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bytes_per_second(link: str) -> float:
    """Of a rate as tc takes it ("1600mbit"); infinite for no limit.

    Raises:
        ValueError: it is neither.
    """
    if link == UNLIMITED:
        return float("inf")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", link)
    if not found or not float(found[1]):
        raise ValueError(f"{link!r} is no rate: give one as 1600mbit, or {UNLIMITED}")
    return float(found[1]) * _UNITS[found[2]] / 8


def problem() -> str | None:
    """What keeps this process from a namespace of its own; None if nothing does."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found; install iproute2 and util-linux"
    tried = subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"{tried.stderr.strip()}; limiting the loopback needs root, and Linux"


def enter(argv: Sequence[str]) -> None:
    """Go on in a network namespace of this command's own: starts it anew there, once."""
    if os.environ.get(_INSIDE) != "1":
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", sys.executable, *argv])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def limit(link: str) -> None:
    """Limit the loopback of this namespace from now on, or no longer."""
    if link == UNLIMITED:
        # Fails where there is no limit to take away.
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], capture_output=True)
        return
    shape = ["tbf", "rate", link, "burst", str(BURST), "latency", "400ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", *shape], check=True)
