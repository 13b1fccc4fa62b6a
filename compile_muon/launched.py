"""The process group of ranks that torchrun, SLURM or an MPI started, where the program has begun none."""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from compile_muon.errors import config_error

#: variables of a rank, of the number of ranks, of the rank among those of its host, and of their number
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun
    # An MPI's come ahead of SLURM's: under mpirun in a job these are the batch script's.
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Intel MPI, MPICH
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
#: the device of this rank in each group that began here
_devices: WeakKeyDictionary[Any, torch.device] = WeakKeyDictionary()


def begin_group() -> torch.device | None:
    """Begin the process group where a launcher's variables say several ranks and there is none; end it at exit.

    Returns:
        This rank's device; None for one process, and for a group that the program began.
    Raises:
        ConfigError: nothing says which host rank 0 is on.
    """
    for names in _LAUNCHERS if not dist.is_initialized() else ():
        rank, world, local_rank, local_world = map(_number, names)
        if rank < 0 or world < 2 or (names[0] == "SLURM_PROCID" and _without_srun()):
            continue
        known = names[0] == "RANK" and "MASTER_ADDR" in os.environ  # torchrun's ranks share a store
        method = "env://" if known else _address(names[1], world, local_world)
        device, backend = torch.device("cpu"), "gloo"
        if torch.cuda.is_available():
            place = next(each for each in (local_rank, _number("SLURM_LOCALID"), rank) if each >= 0)
            # A rank that sees one GPU alone has it as number 0.
            device, backend = torch.device("cuda", place % torch.cuda.device_count()), "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(device)
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=world)
        _devices[dist.group.WORLD] = device
        at_exit(_end_group)
        break
    return _devices.get(dist.group.WORLD) if dist.is_initialized() else None


def _address(size: str, world: int, local_world: int) -> str:
    hosts = next((os.environ[name] for name in _HOSTS if name in os.environ), "")
    host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if local_world == world else _first_host(hosts))
    if not host:
        problem = f"is not set, and nothing else says which host rank 0 of {size} = {world} is on"
        raise config_error("MASTER_ADDR", None, problem, "set it to that host, and MASTER_PORT to a free port there")
    own_port = 15000 + _number("SLURM_JOB_ID") % 15000  # jobs on one host do not meet
    return f"tcp://{host}:{os.environ.get('MASTER_PORT', own_port)}"


def _end_group() -> None:
    if dist.is_initialized() and dist.group.WORLD in _devices:
        dist.destroy_process_group()


def at_exit(call: Callable[[], object]) -> None:
    """Call a function when the program ends, unless by an error, behind which other ranks may never come."""
    atexit.register(lambda: None if hasattr(sys, "last_value") else call())


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else -1


def _without_srun() -> bool:
    """Whether SLURM's variables are those of a batch script or a shell, which is one process."""
    shell = os.environ.get("ENVIRONMENT") == "BATCH" or os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return shell and "SLURM_STEP_ID" not in os.environ


def _first_host(hosts: str) -> str:
    """Return the first of the hosts as SLURM lists them: ``a[01-03,7],b`` gives ``a01``."""
    first = re.match(r"([^,\[]|\[[^]]*])*", hosts)
    return re.sub(r"\[(\w*)[^]]*]", r"\1", first[0] if first else "")
