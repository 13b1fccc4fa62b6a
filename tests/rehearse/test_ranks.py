"""Collectives of the rehearsal between processes: what they carry, and what they refuse. Needs a C++ compiler."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "rehearse"

#: of NCCL's header, what the meeting of ranks knows
HEADER = """
#pragma once
struct ncclComm;
typedef ncclComm* ncclComm_t;
typedef enum { ncclInt8, ncclUint8, ncclInt32, ncclInt64, ncclFloat32, ncclFloat64 } ncclDataType_t;
typedef enum { ncclSum, ncclMax, ncclMin } ncclRedOp_t;
"""

#: program FAULT RANK; exits with 0 where all is as it should be
PROGRAM = """
#include "ranks.hpp"
int main(int, char** given) {
  std::string fault = given[1];
  auto c = new ncclComm{atoi(given[2]), 2, 0};
  c->key = "pair";
  ranks::join(c);
  if (fault == "alone" && c->rank) return 0;
  int64_t own[2] = {10 + c->rank, 20 + c->rank}, all[4], sum[2], swapped[2];
  auto ask = [&](const char* name, void* to, size_t received, ncclRedOp_t op, int root) {
    return ranks::post(c, {name, (char*)own, (char*)to, sizeof own, received, ncclInt64, op, root});
  };
  auto gathered = ask("ncclAllGather", all, sizeof all, ncclSum, 0);
  if (fault == "alone") return ranks::done(gathered) ? 1 : 0;
  if (fault == "other" && c->rank) ask("ncclBroadcast", sum, sizeof sum, ncclSum, 0);
  ranks::Needs needs = ask("ncclAllReduce", sum, sizeof sum, ncclMax, 0);
  ranks::need(needs, ask("ncclAlltoAll", swapped, sizeof swapped, ncclSum, 0));
  ranks::need(needs, ranks::post(c, true, 1 - c->rank, 8));
  ranks::need(needs, ranks::post(c, false, 1 - c->rank, fault == "size" ? 16 : 8));
  ranks::await(needs);
  bool right = all[0] == 10 && all[1] == 20 && all[2] == 11 && all[3] == 21 && sum[0] == 11 && sum[1] == 21;
  right = right && swapped[0] == (c->rank ? 20 : 10) && swapped[1] == (c->rank ? 21 : 11);
  return right ? 0 : 2;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "nccl.h").write_text(HEADER)
    (folder / "program.cpp").write_text(PROGRAM)
    include = ["-I", str(folder), "-I", str(FOLDER)]
    subprocess.run(["g++", "-std=c++17", *include, folder / "program.cpp", "-o", folder / "program"], check=True)
    return folder / "program"


@pytest.mark.parametrize(
    ("fault", "ended", "said"),
    [
        ("none", {0}, ""),
        (
            "other",
            {66},
            "ranks ask for different collectives: collective 1 of communicator pair: rank 1 asked for ncclBro",
        ),
        ("size", {66}, " bytes, rank "),
    ],
)
def test_two_processes_meet(program: Path, tmp_path: Path, fault: str, ended: set[int], said: str) -> None:
    environment = os.environ | {"REHEARSE_RANKS": str(tmp_path)}
    both = [
        subprocess.Popen([program, fault, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    written = "".join(process.communicate(timeout=60)[1] for process in both)
    assert {process.returncode for process in both} == ended and said in written


def test_a_collective_is_not_complete_before_the_other_has_asked(program: Path, tmp_path: Path) -> None:
    environment = os.environ | {"REHEARSE_RANKS": str(tmp_path)}
    both = [subprocess.Popen([program, "alone", str(rank)], env=environment) for rank in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
