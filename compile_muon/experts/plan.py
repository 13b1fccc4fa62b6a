"""Expert parallelism for Transformers' mixture-of-experts models: the plan, and the cut of the experts.

    plan = plan_experts(model, size=4)        # names everything that will be cut; raises, and changes nothing
    plan.apply(mesh)                          # a 1-D mesh of 4 ranks whose dimension is called "expert"

A rank r keeps the experts ``[r E/size, (r + 1) E/size)`` of every stack, and only the experts' forward is replaced
(:mod:`compile_muon.experts.dispatch`). The model's router hands over ``top_k_index`` and ``top_k_weights``, with its
groups, score-correction bias and scaling. Each rank has tokens of its own.

An experts module reads ``config._experts_implementation``, so it gets a shallow copy of its config that names ours;
the model's config, which ``save_pretrained`` writes and ``set_experts_implementation`` changes, stays. The only global
state is the entry of a stateless function in ``ALL_EXPERTS_FUNCTIONS``; each module has its own
:class:`ExpertDispatch`. Classes and ``forward`` attributes stay, so models can be copied, and equal layers share
compiled code.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from compile_muon.config.checked import Mistakes
from compile_muon.errors import ConfigError, config_error, listed
from compile_muon.experts.dispatch import AXIS, FIELD, IMPLEMENTATION, RECORD, ExpertDispatch


@dataclass(frozen=True)
class ExpertModule:
    """An experts module, with its parameters to cut."""

    path: str  # in the model
    experts: int
    stacks: tuple[str, ...]  # local names of the parameters to cut, biases among them; every rank keeps the others


@dataclass(frozen=True)
class ExpertPlan:
    """The experts of a model to cut; :meth:`apply` changes the model."""

    size: int  # ranks that share the experts
    capacity_factor: float | None  # None is dropless
    modules: tuple[ExpertModule, ...]  # in the model's order
    _model: nn.Module = field(repr=False, compare=False)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Full names of all stacks."""
        return tuple(_joined(module.path, name) for module in self.modules for name in module.stacks)

    def apply(self, mesh: DeviceMesh) -> None:
        """Replace stacks by this rank's experts, as DTensors ``Shard(0)`` over `mesh`, and switch the experts' forward.

        `mesh`: 1-D, its dimension called "expert", of ``size`` ranks with this one among them. No communication: ranks
        must hold equal stacks, or stacks on the meta device, which stay there. Raises a ConfigError, ahead of any
        change, about a stack that is on another device.
        """
        _check_devices(self, mesh)
        rank, group = mesh.get_local_rank(), mesh.get_group().group_name
        own_stacks: dict[nn.Parameter, nn.Parameter] = {}
        configs: dict[int, Any] = {}  # id of a config -> its changed copy
        for planned in self.modules:
            module: Any = self._model.get_submodule(planned.path)
            for name in planned.stacks:
                stack = module._parameters[name]
                if stack not in own_stacks:
                    own_stacks[stack] = _slice(stack, mesh, rank, self.size)
                module._parameters[name] = own_stacks[stack]
            config = module.config
            if id(config) not in configs:
                configs[id(config)] = copy.copy(config)
                # The public property would also change the configs inside, which the shallow copy shares.
                configs[id(config)]._experts_implementation_internal = IMPLEMENTATION
            module.config = configs[id(config)]
            setattr(module, RECORD, ExpertDispatch(group, self.size, planned.experts, self.capacity_factor))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _slice(stack: nn.Parameter, mesh: DeviceMesh, rank: int, size: int) -> nn.Parameter:
    """Return this rank's experts of a stack, copied, so that the stack's memory can be freed."""
    count = stack.shape[0] // size
    rows = stack.detach()[rank * count : (rank + 1) * count]
    local = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device).copy_(rows)
    new = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False), requires_grad=stack.requires_grad)
    vars(new).update(vars(stack))
    return new


def plan_experts(model: nn.Module, size: int, *, capacity_factor: float | None = None) -> ExpertPlan:
    """Plan the cut of all modules whose forward goes through Transformers' experts interface; change nothing. Raises a
    ConfigError about each module and parameter that cannot be cut."""
    mistakes = Mistakes()
    experts_modules = [(path, module) for path, module in model.named_modules() if _interface(module) is not None]
    if not experts_modules:
        raise config_error(FIELD, size, f"the model has {_what_there_is(model)}", _NEEDED)
    holders = _holders(model)
    modules = []
    for path, module in experts_modules:
        errors = _wrong_module(path, module) or [*_wrong_stacks(path, module, size, holders)]
        mistakes.found += errors
        if not errors:
            stacks = _stack_names(module)
            modules.append(ExpertModule(path, getattr(module, stacks[0]).shape[0], stacks))
    mistakes.raise_all()
    return ExpertPlan(size, capacity_factor, tuple(modules), model)


# --------------------------------------------------------------------------------------------------- what is refused

_NEEDED = (
    "take a model of Transformers 5 whose experts are one module under @use_experts_implementation, without "
    f"trust_remote_code, or leave {FIELD} out"
)


def _interface(module: nn.Module) -> Any:
    """Return the registry of experts functions that the forward of `module` uses, or None."""
    forward: Any = type(module).forward
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    if "experts_interface" not in names or not hasattr(module, "has_gate"):
        return None
    return forward.__closure__[names.index("experts_interface")].cell_contents


def _what_there_is(model: nn.Module) -> str:
    """Return a clause, for an error, about modules that look like experts but do not use the interface."""
    lookalikes = []
    for path, module in model.named_modules():
        kind = type(module)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            if "expert" in path.rpartition(".")[2] and len(module):
                child_kind = type(next(iter(module.children()))).__name__
                lookalikes.append(f"{path} ({kind.__name__} of {len(module)} {child_kind})")
        elif kind.__name__.endswith("Experts"):
            remote = kind.__module__.startswith("transformers_modules")
            lookalikes.append(f"{path} ({'remote code, ' * remote}{kind.__name__} of {kind.__module__})")
    if not lookalikes:
        return "no experts"
    return f"no experts behind Transformers' experts interface, but {listed(lookalikes)}"


def _holders(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """Return parameter -> (full name, module) of every place that holds the parameter."""
    holders: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is not None:
                holders.setdefault(param, []).append((_joined(path, name), module))
    return holders


def _wrong_module(path: str, module: Any) -> list[ConfigError]:
    """Return the error that rules out the whole module, if there is one."""
    kind = type(module).__name__
    if hasattr(module, RECORD):
        return [config_error(path, kind, "has its experts shared already", f"apply {FIELD} once, to a new model")]
    if module._is_expert_parallel or "forward" in vars(module):
        others = "Transformers' own expert or tensor parallelism, hooks of Accelerate"
        problem = f"has a forward that something else put there ({others})"
        remedy = f"load the model without it (no ep_size, tp_plan or device_map), or leave {FIELD} out"
        return [config_error(path, kind, problem, remedy)]
    if _interface(module) is not ALL_EXPERTS_FUNCTIONS:
        return [config_error(path, kind, "is quantized", "load the model without quantization")]
    if missing := [name for name in _stack_names(module) if module._parameters.get(name) is None]:
        problem = f"has no parameter {listed(missing)} of its own (a parametrization, an adapter, pruning?)"
        remedy = "share the experts of the model itself, before anything is put around its parameters"
        return [config_error(path, kind, problem, remedy)]
    return []


def _stack_names(module: Any) -> tuple[str, ...]:
    """Return the names of the stacks, which are all parameters that the interface's implementations read."""
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    return tuple(names + [f"{name}_bias" for name in names] * bool(module.has_bias))


def _wrong_stacks(
    path: str, module: Any, size: int, holders: dict[nn.Parameter, list[tuple[str, nn.Module]]]
) -> Iterator[ConfigError]:
    names = _stack_names(module)
    experts = getattr(module, "num_experts", None) or module._parameters[names[0]].shape[0]
    if experts % size:
        fitting = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        problem = f'{path}: {experts} experts cannot be divided among {size} ranks on the axis "{AXIS}"'
        yield config_error(f"{FIELD}.size", size, problem, f"use one of {fitting}")
    for name in names:
        param = module._parameters[name]
        full, shape = _joined(path, name), list(param.shape)
        if isinstance(param, DTensor):
            axes = ", ".join(map(str, param.device_mesh.mesh_dim_names or ("an axis without a name",)))
            problem = f'is placed on other ranks already and cannot be Shard(0) on the axis "{AXIS}" too'
            remedy = "leave the experts out of the other plan (tensor, sequence or data parallel)"
            yield config_error(full, f"{list(param.placements)} on {axes}", problem, remedy)
            continue
        if not param.dtype.is_floating_point or param.dtype.itemsize < 2:
            yield config_error(full, param.dtype, "is quantized", "load the model without quantization")
        elif param.shape[0] != experts:
            yield config_error(full, shape, f"is no stack of {experts} experts", "share the experts of a whole model")
        if others := [other for other, holder in holders[param] if _interface(holder) is None]:
            problem = f'is tied to {listed(others)}, which is not on the axis "{AXIS}"'
            yield config_error(full, shape, problem, "untie it")
    for name, param in module._parameters.items():
        if param is not None and name not in names and param.ndim and param.shape[0] == experts:
            problem = "looks like a stack of experts, and Transformers' experts interface does not read it"
            remedy = f"take a released model of Transformers, or leave {FIELD} out"
            yield config_error(_joined(path, name), list(param.shape), problem, remedy)
            break


def _check_devices(plan: ExpertPlan, mesh: DeviceMesh) -> None:
    for name in plan.parameters:
        device = plan._model.get_parameter(name).device
        if device.type not in ("meta", mesh.device_type):
            problem = f"is not on a {mesh.device_type} device, where the mesh is"
            remedy = "move the model there before its experts are shared, or build it on the meta device"
            raise config_error(name, str(device), problem, remedy)
