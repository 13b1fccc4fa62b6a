"""What a sharded model holds, each tensor once, by the name it has in a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compile_muon.agreement.compare import by_rank, compare
from compile_muon.agreement.status import RankStatus
from compile_muon.agreement.together import Ranks
from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.errors import CheckpointError, UnsupportedModelError, listed
from compile_muon.model.readers import sharded_params_of
from compile_muon.passes.language.spec import ParamSpec, encode_dtype

__all__ = ["Entry", "Weights", "check_alike", "named_state", "shared_params", "weights_of"]

_EXTRA_STATE = "_extra_state"  # nn.Module's name for the value of get_extra_state()


@dataclass(frozen=True)
class Entry:
    """One tensor of a model.

    Args:
        tensor: the parameter (its shard's DTensor) or buffer itself.
        sharded: of a parameter; None for a buffer, of which every rank has its own and rank 0's counts.
        holder: the only rank that has it, elsewhere ``tensor`` is on the meta device; None for one as above.
    """

    tensor: Tensor
    sharded: ShardedParam | None
    holder: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.tensor.shape)

    @property
    def local(self) -> Tensor:
        """This rank's part."""
        return local_tensor(self.tensor).detach()

    @property
    def spec(self) -> ParamSpec | None:
        """How the tensor is cut; None where every rank holds all of it."""
        if self.sharded is None:
            return None
        spec = self.sharded.spec
        if self.shape != spec.layout.whole:  # a state with one number a row: ranks with other columns have the same
            columns = spec.layout.tensor_dim is not None and self.shape[spec.layout.tensor_dim] == 1
            dim = None if columns else spec.layout.tensor_dim
            spec = replace(spec, layout=replace(spec.layout, whole=self.shape, tensor_dim=dim))
        return spec if spec.layout.sharded or spec.layout.parted else None


@dataclass
class Weights:
    """Live references to all of a model's parameters and persistent buffers.

    Args:
        module: that holds them, without torch.compile's wrapper.
        entries: by name, in the order of ``state_dict()``; tied ones by their first name.
        names: all names of each entry.
        others: values in ``state_dict()`` that are no tensors.
        sharded_params: of the parameters.
        group: the process group that shares them; None for one process.
        status: of their optimizer, for errors.
        device: of the parameters.
    """

    module: nn.Module
    entries: dict[str, Entry]
    names: dict[str, list[str]]
    others: dict[str, Any]
    sharded_params: list[ShardedParam]
    group: dist.ProcessGroup | None
    status: RankStatus
    device: torch.device

    def meet(self, doing: str, *facts: object) -> Ranks:
        """Return the ranks, once all have come to do the same with the same model; collective.

        Raises:
            CheckpointError: they do different things, or hold different models.
        """
        ranks = Ranks(self.group, self.device, self.status, apart=False)
        held = [(name, entry.shape, encode_dtype(entry.tensor.dtype)) for name, entry in self.entries.items()]
        digest = hashlib.sha256(repr((held, sorted(self.others), facts)).encode()).hexdigest()
        different = ranks.compare({"function": doing, "digest": digest[:16]})
        if "function" in different:
            said = by_rank(different["function"])
            raise CheckpointError(f"ranks call different functions: {said}; call one on every rank")
        if different:
            raise CheckpointError(
                f"{doing}: ranks hold different models or give different arguments ({by_rank(different['digest'])}); "
                "give the same on every rank"
            )
        return ranks

    def check_live(self) -> None:
        """Refuse a model into which nothing can be loaded in place.

        Raises:
            CheckpointError: a tensor of ``state_dict()`` is neither a parameter nor a buffer.
        """
        live = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        if made := [name for name, entry in self.entries.items() if id(entry.tensor) not in live]:
            raise CheckpointError(
                f"{listed(made)}: in model.state_dict(), and neither a parameter nor a buffer: nothing could be loaded "
                "into it"
            )


def named_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, list[str]], dict[str, Any]]:
    """Sort ``module.state_dict()``, live, by the names it has without torch.compile.

    Returns:
        Each tensor by its first name, all names by the first one, and what is no tensor.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[str, list[str]] = {}
    others: dict[str, Any] = {}
    first: dict[int, str] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        name = key.replace("_orig_mod.", "")
        if not isinstance(value, Tensor) or name.rpartition(".")[2] == _EXTRA_STATE:
            others[name] = value
        else:
            tensors.setdefault(first.setdefault(id(value), name), value)
            names.setdefault(first[id(value)], []).append(name)
    return tensors, names, others


def check_alike(buffers: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Compare names, shapes and dtypes of buffers ahead of collectives on each; collective.

    Raises:
        UnsupportedModelError: a rank has others; on all of them.
    """
    facts = {name: f"{encode_dtype(buffer.dtype)} {list(buffer.shape)}" for name, buffer in buffers.items()}
    for name, said in compare(facts, group, absent="none").items():
        raise UnsupportedModelError(
            f"{name}: ranks have different buffers of that name ({by_rank(said)}); register the same on every rank"
        )


def shared_params(module: nn.Module) -> tuple[list[ShardedParam], dist.ProcessGroup | None]:
    """Find all sharded parameters, each once, and the group of ranks that shares them; None for one process.

    Raises:
        UnsupportedModelError: nothing in the model is sharded, it is inside a ``full_parameters`` block, or its
            parameters are shared by different groups of ranks.
    """
    sharded_params = list({id(a): a for inner in module.modules() for a in sharded_params_of(inner).values()}.values())
    if not sharded_params:
        raise UnsupportedModelError(
            f"model: {type(module).__name__} holds no parameter that MuonZero sharded; give the sharded model, outside "
            "of full_parameters(), or use state_dict() and load_state_dict() of a plain one"
        )
    if whole := sorted({name for sharded in sharded_params for name in sharded.ledger.whole}):
        raise UnsupportedModelError(f"{listed(whole)}: whole inside a full_parameters block; leave the block first")
    groups = {sharded.group for sharded in sharded_params}
    if len(groups) > 1:
        raise UnsupportedModelError(
            f"model: its parameters are shared by {len(groups)} different groups of ranks; save and load each part by "
            "itself"
        )
    return sharded_params, groups.pop()


def weights_of(model: nn.Module) -> Weights:
    """Gather references; nothing is copied or sent.

    Raises:
        UnsupportedModelError: see :func:`shared_params`; or ``state_dict()`` has tensors made of sharded ones.
    """
    module = getattr(model, "_orig_mod", model)  # torch.compile(model)
    sharded_params, group = shared_params(module)
    by_id = {id(sharded.param): sharded for sharded in sharded_params}
    tensors, names, others = named_state(module)
    for name, value in tensors.items():
        if isinstance(value, DTensor) and id(value) not in by_id:
            raise UnsupportedModelError(f"{name}: is a DTensor that MuonZero did not make; save and load it by itself")
    entries = {name: Entry(value, by_id.get(id(value))) for name, value in tensors.items()}
    status, device = sharded_params[0].ledger.status, sharded_params[0].hyper.device
    return Weights(module, entries, names, others, sharded_params, group, status, device)
