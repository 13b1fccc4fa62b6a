"""The random number generators of a rank: Python's, NumPy's, torch's; their state as values, and back."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from compile_muon.errors import CheckpointError


def random_state() -> dict[str, Any]:
    """Read each generator of this rank: Python's, NumPy's if it was imported, torch's on the CPU and current GPU."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = json.loads(json.dumps(numpy.random.get_state(legacy=False), default=_plain))
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def check_random_state(state: Any) -> None:
    """Give ``state`` to generators that nobody uses; a CheckpointError names one that does not take it."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"random: a {type(state).__name__} is no state of generators")
    for name in state.keys() | {"python", "torch"}:
        try:
            if name == "python":
                random.Random().setstate(state[name])
            elif name == "torch":
                torch.Generator().set_state(state[name])
            elif name == "cuda" and torch.cuda.is_available():
                torch.Generator("cuda").set_state(state[name])
            elif name == "numpy" and (numpy := sys.modules.get("numpy")) is not None:
                generator, numpy_state = _of_numpy(numpy, state[name])
                numpy.random.RandomState(generator).set_state(numpy_state)
        except Exception as error:  # of other people's setters
            raise CheckpointError(f"random.{name}: is no state of it ({type(error).__name__}: {error})") from error


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on from a state that was checked; a generator that is not here is left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        generator, numpy_state = _of_numpy(numpy, state["numpy"])
        if type(generator) is not type(numpy.random.get_bit_generator()):
            numpy.random.set_bit_generator(generator)
        numpy.random.set_state(numpy_state)
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _of_numpy(numpy: Any, state: Any) -> tuple[Any, Any]:
    """Make a bit generator of the kind that has this state, and reverse :func:`_plain` in the state."""
    # Earlier checkpoints hold the state of "MT19937" as a tuple.
    name = state["bit_generator"] if isinstance(state, Mapping) else state[0]
    kinds = {kind.__name__: kind for kind in numpy.random.BitGenerator.__subclasses__()}
    if name not in kinds:
        raise ValueError(f"no bit generator is called {name!r}; import the module that has it")
    arrays = json.loads(
        json.dumps(state),
        object_hook=lambda x: numpy.array(x["items"], dtype=x["dtype"]) if x.keys() == {"dtype", "items"} else x,
    )
    return kinds[name](), arrays


def _plain(value: Any) -> Any:
    """Replace an array or a number of NumPy, which is no value of a checkpoint."""
    return {"dtype": value.dtype.name, "items": value.tolist()} if value.ndim else value.item()
