"""``initialize`` begins the process group of ranks that a launcher started, and ends it."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import compile_muon
from compile_muon.errors import ConfigError
from compile_muon.launched import begin_group

RANK = """
    CONFIG = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}

    def train(launcher):
        @atexit.register  # behind what initialize registers
        def _():
            pathlib.Path(f"{launcher}-{found['rank']}").write_text(json.dumps(found | {"left": dist.is_initialized()}))

        torch.manual_seed(0)
        model, optimizer = compile_muon.initialize(torch.nn.Linear(4, 6), CONFIG)
        place, found = optimizer.data_place, {"world": dist.get_world_size(), "rank": dist.get_rank()}
        assert (place.world, place.rank) == (found["world"], found["rank"])
        found["weight"] = model.weight.full_tensor().detach().sum().item()
        compile_muon.initialize(torch.nn.Linear(4, 6), CONFIG)  # another model, in the same group
"""
PROGRAM = "import atexit, json, os, pathlib, sys, torch, torch.distributed as dist, compile_muon\n" + textwrap.dedent(
    RANK
)
BY_HAND = PROGRAM + textwrap.dedent("""
    compile_muon.initialize(torch.nn.Linear(4, 6), CONFIG)  # what every rank imports
    launchers = json.loads(sys.argv[1])
    for launcher, variables in launchers.items():
        for rank in range(2):
            if not os.fork():
                os.environ |= {name: value.replace("RANK", str(rank)) for name, value in variables.items()}
                train(launcher)
                atexit._run_exitfuncs()
                os._exit(0)  # tearing down a copy of the interpreter takes longer than all before
    assert not any(os.wait()[1] for _ in range(2 * len(launchers)))
""")


def free_ports(count: int) -> list[str]:
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(count)]
    return [str(store.port) for store in stores]


def ran(program: str, folder: Path, *before: str, arguments: tuple[str, ...] = ()) -> dict[str, list[dict[str, Any]]]:
    """What each launcher's ranks found, by launcher."""
    (folder / "program.py").write_text(program)
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *before, "program.py", *arguments]
    subprocess.run(command, cwd=folder, env=os.environ | environment, check=True, timeout=120)
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*-?")):
        found.setdefault(path.name[:-2], []).append(json.loads(path.read_text()))
    return found


def check(found: dict[str, list[dict[str, Any]]], launchers: set[str]) -> None:
    assert found.keys() == launchers
    for ranks in found.values():
        assert ranks == [{"world": 2, "rank": rank, "weight": ranks[0]["weight"], "left": False} for rank in range(2)]


def test_ranks_of_each_launcher_meet_and_part(tmp_path: Path) -> None:
    ports = iter(free_ports(3))
    launchers = {
        "torchrun": {"RANK": "RANK", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": next(ports)},
        "slurm": {"SLURM_PROCID": "RANK", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost,other[1-2]"},
        "open": {"OMPI_COMM_WORLD_RANK": "RANK", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        "mpich": {"PMI_RANK": "RANK", "PMI_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "SLURM_PROCID": "0"},
    }
    launchers["slurm"]["SLURM_JOB_ID"] = str(os.getpid())  # the port is of the job
    for name in ("open", "mpich"):
        launchers[name]["MASTER_PORT"] = next(ports)
    check(ran(BY_HAND, tmp_path, arguments=(json.dumps(launchers),)), {*launchers})


@pytest.mark.full
def test_torchrun_starts_ranks_that_meet_and_part(tmp_path: Path) -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    check(ran(PROGRAM + "train('torchrun')\n", tmp_path, *command), {"torchrun"})


SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "30007"}


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """What ``init_process_group`` was called with, on a machine with four GPUs."""
    begin = dist.init_process_group

    def fake(backend: str, *, init_method: str, rank: int, world_size: int) -> None:
        begin("fake", rank=rank, world_size=world_size, store=FakeStore())

    called = mock.Mock(side_effect=fake)
    monkeypatch.setattr(dist, "init_process_group", called)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", mock.Mock())
    yield called
    if dist.is_initialized():
        dist.destroy_process_group()


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "MPI_", "MASTER_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "method", "gpu"),
    [
        ({**SLURM, "SLURM_JOB_NODELIST": "gpu[07-09,12],big1"}, "tcp://gpu07:15007", 1),
        ({**SLURM, "SLURM_JOB_NODELIST": "a", "SLURM_STEP_NODELIST": "r[2-3]n[1,4]-ib"}, "tcp://r2n1-ib:15007", 1),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "8"}, "tcp://127.0.0.1:15007", 1),
        ({**SLURM, "MASTER_ADDR": "here", "MASTER_PORT": "7", "ENVIRONMENT": "BATCH", "SLURM_STEP_ID": "0"},
         "tcp://here:7", 1),
        # mpirun in a job of SLURM; and srun that starts an MPI's ranks
        ({**SLURM, "SLURM_JOB_NODELIST": "a", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "6",
          "OMPI_COMM_WORLD_LOCAL_RANK": "7"}, "tcp://a:15007", 3),
        ({**SLURM, "SLURM_NODELIST": "a", "PMI_RANK": "5", "PMI_SIZE": "8"}, "tcp://a:15007", 1),
        ({**SLURM, "RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, "env://", 1),
        ({"RANK": "6", "WORLD_SIZE": "8", "MASTER_ADDR": "a"}, "env://", 2),  # one rank on each host
    ],
)  # fmt: skip
def test_each_launcher_says_where_the_ranks_meet(
    monkeypatch: pytest.MonkeyPatch, begun: mock.Mock, variables: dict[str, str], method: str, gpu: int
) -> None:
    set_variables(monkeypatch, variables)
    device = torch.device("cuda", gpu)
    assert begin_group() == begin_group() == device
    assert begun.call_args.args == ("cpu:gloo,cuda:nccl",) and begun.call_args.kwargs["init_method"] == method
    assert torch.cuda.set_device.call_args_list == [mock.call(device)]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"},
        {**SLURM, "SLURM_JOB_NODELIST": "a", "ENVIRONMENT": "BATCH"},  # a batch script without srun
        {**SLURM, "SLURM_JOB_NODELIST": "a", "SLURM_JOB_NAME": "interactive"},
        {"WORLD_SIZE": "2"},
    ],
)
def test_one_process_begins_no_group(
    monkeypatch: pytest.MonkeyPatch, begun: mock.Mock, variables: dict[str, str]
) -> None:
    set_variables(monkeypatch, variables)
    assert begin_group() is None and not begun.called


def test_a_host_that_nothing_names_is_asked_for(monkeypatch: pytest.MonkeyPatch, begun: mock.Mock) -> None:
    for variables, size in ((SLURM, "SLURM_NTASKS = 8"), ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_SIZE = 2")):
        set_variables(monkeypatch, variables)
        with pytest.raises(ConfigError, match=f"MASTER_ADDR = None: .* rank 0 of {size} is on; set it to that host"):
            compile_muon.initialize(nn.Linear(2, 2), {})
    assert not begun.called


def test_the_trainer_leaves_the_group_to_accelerate(
    monkeypatch: pytest.MonkeyPatch, begun: mock.Mock, tmp_path: Path
) -> None:
    """Which knows torchrun alone: each other process would train on the same batches."""
    transformers = pytest.importorskip("transformers")
    from compile_muon.integrations.transformers import MuonTrainer

    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = MuonTrainer(nn.Linear(2, 2), arguments, muon_config={})
    set_variables(monkeypatch, {"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "a"})
    with pytest.raises(ConfigError, match="PMI_SIZE = '2': says several processes"):
        trainer.create_optimizer()
    assert not begun.called


def test_a_model_moves_to_its_ranks_gpu(monkeypatch: pytest.MonkeyPatch, begun: mock.Mock) -> None:
    set_variables(monkeypatch, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"})
    move = mock.Mock(side_effect=RuntimeError("moved"))
    monkeypatch.setattr(nn.Module, "to", move)
    with pytest.raises(RuntimeError, match="moved"):
        compile_muon.initialize(nn.Linear(2, 2), {})
    move.assert_called_once_with(torch.device("cuda", 1))
