"""One process writes into a folder at a time, and one that dies leaves it to the next."""

import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import compile_muon
from compile_muon import Checkpointer, CheckpointError
from compile_muon.checkpoint.folder import LOCK

HOLDER = """
import fcntl, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.ftruncate(file, 0)
os.write(file, b"process %d on there (since 2026)" % os.getpid())
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def test_a_second_process_is_refused_until_the_first_has_died(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    gc.disable()  # no error that a checkpointer raised may hold it until a collection
    request.addfinalizer(gc.enable)

    def hold(seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(tmp_path / LOCK), str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    model = nn.Linear(3, 2)
    optimizer = compile_muon.MuonZero(model)
    holder = hold(300)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    checkpointer = Checkpointer(tmp_path)
    expected = rf"folder = .*process {holder.pid} on there .since 2026. writes there; end that run, or"
    with pytest.raises(CheckpointError, match=expected):
        checkpointer.save(3, model, optimizer)
    assert checkpointer.steps() == []
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    checkpointer.save(3, model, optimizer)
    Checkpointer(tmp_path).save(4, model, optimizer)  # the same process
    assert "BlockingIOError" in hold(0).communicate()[1]
    checkpointer.save(5, model, optimizer)
    assert checkpointer.steps() == [3, 4, 5]
    del checkpointer
    assert hold(0).communicate()[0] == "held\n"
