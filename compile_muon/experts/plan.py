"""Expert parallelism for Transformers' mixture-of-experts models: whose experts a rank holds.

    plan = plan_experts(model, size=4)        # names everything that will be cut; raises, and changes nothing
    plan.apply(mesh)                          # a 1-D mesh of 4 ranks whose dimension is called "expert"

Of every stack of experts a rank keeps its own, ``[r E/size, (r + 1) E/size)``, and the experts' forward, nothing else
of the model, becomes ours (:mod:`compile_muon.experts.dispatch`). The router is the model's own: it hands over
``top_k_index`` and ``top_k_weights``, with whatever groups, score-correction bias and scaling it has. Each rank has
tokens of its own.

The switch is made through Transformers' own interface: each experts module reads ``config._experts_implementation``,
so it gets a shallow copy of its config that names ours, while the model's config, which ``save_pretrained`` writes and
``set_experts_implementation`` changes, stays as it was. The one thing that is global is the entry of a function without
state in ``ALL_EXPERTS_FUNCTIONS``; what differs between modules is in an :class:`ExpertDispatch` on each. Classes and
``forward`` attributes are left alone: models can still be copied, and equal layers share compiled code.
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

__all__ = ["ExpertModule", "ExpertPlan", "plan_experts"]


@dataclass(frozen=True)
class ExpertModule:
    """One module of experts.

    Args:
        path: its name in the model.
        experts: how many it holds.
        stacks: its parameters that are cut, by local name; biases included. Every rank keeps the others.
    """

    path: str
    experts: int
    stacks: tuple[str, ...]


@dataclass(frozen=True)
class ExpertPlan:
    """What will be cut, and how; making one changes nothing.

    Args:
        size: ranks that share the experts.
        capacity_factor: None is dropless.
        modules: of the model, in its order.
    """

    size: int
    capacity_factor: float | None
    modules: tuple[ExpertModule, ...]
    _model: nn.Module = field(repr=False, compare=False)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Full names of the stacks."""
        return tuple(_joined(module.path, name) for module in self.modules for name in module.stacks)

    def apply(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts, as DTensors ``Shard(0)`` over ``mesh``, and switch their forward; sends nothing.

        Every rank must hold the same stacks, or have them on the meta device, where they stay.

        Args:
            mesh: 1-D, its dimension called "expert", of ``size`` ranks with this one among them.
        Raises:
            ConfigError: it is another mesh, or the model has changed since the plan was made; nothing was changed.
        """
        _check_mesh(mesh, self.size)
        if plan_experts(self._model, self.size, capacity_factor=self.capacity_factor) != self:
            raise config_error(FIELD, self.size, "the model has changed since the plan was made", "plan again")
        _check_devices(self, mesh)
        rank, group = mesh.get_local_rank(), mesh.get_group().group_name
        cut: dict[nn.Parameter, nn.Parameter] = {}
        configs: dict[int, Any] = {}  # changed copies, by the identity of the original
        for planned in self.modules:
            module: Any = self._model.get_submodule(planned.path)
            for name in planned.stacks:
                stack = module._parameters[name]
                if stack not in cut:
                    cut[stack] = _slice(stack, mesh, rank, self.size)
                module._parameters[name] = cut[stack]
            config = module.config
            if id(config) not in configs:
                configs[id(config)] = copy.copy(config)  # what is inside it is shared
                # Not its property: that would change the configs inside, which are the model's own.
                configs[id(config)]._experts_implementation_internal = IMPLEMENTATION
            module.config = configs[id(config)]
            setattr(module, RECORD, ExpertDispatch(group, self.size, planned.experts, self.capacity_factor))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _slice(stack: nn.Parameter, mesh: DeviceMesh, rank: int, size: int) -> nn.Parameter:
    """A copy of this rank's experts alone, so that the stack's memory is let go."""
    count = stack.shape[0] // size
    rows = stack.detach()[rank * count : (rank + 1) * count]
    own = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device).copy_(rows)
    new = nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)], run_check=False), requires_grad=stack.requires_grad)
    vars(new).update(vars(stack))
    return new


def plan_experts(model: nn.Module, size: int, *, capacity_factor: float | None = None) -> ExpertPlan:
    """Find the experts that can be shared by ``size`` ranks; nothing is changed and nothing sent.

    Args:
        model: on any device; all of its modules whose forward goes through Transformers' experts interface are taken.
        size, capacity_factor: as of :class:`~compile_muon.config.ExpertParallelConfig`, which has checked them.
    Raises:
        ConfigError: everything that cannot be done, by module and parameter.
    """
    mistakes = Mistakes()
    found = [(path, module) for path, module in model.named_modules() if _interface(module) is not None]
    if not found:
        raise config_error(FIELD, size, f"the model has {_what_there_is(model)}", _NEEDED)
    holders = _holders(model)
    modules = []
    for path, module in found:
        wrong = _wrong_module(path, module) or [*_wrong_stacks(path, module, size, holders)]
        mistakes.found += wrong
        if not wrong:
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
    """The registry through which this module's forward goes; None if through none."""
    forward: Any = type(module).forward
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    if "experts_interface" not in names or not hasattr(module, "has_gate"):
        return None
    return forward.__closure__[names.index("experts_interface")].cell_contents


def _what_there_is(model: nn.Module) -> str:
    """What looks like experts, and why it is not taken."""
    found = []
    for path, module in model.named_modules():
        kind = type(module)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            if "expert" in path.rpartition(".")[2] and len(module):
                inside = type(next(iter(module.children()))).__name__
                found.append(f"{path} ({kind.__name__} of {len(module)} {inside})")
        elif kind.__name__.endswith("Experts"):
            remote = kind.__module__.startswith("transformers_modules")
            found.append(f"{path} ({'remote code, ' * remote}{kind.__name__} of {kind.__module__})")
    if not found:
        return "no experts"
    return f"no experts behind Transformers' experts interface, but {listed(found)}"


def _holders(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """Where each parameter is held, by all of its names."""
    holders: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is not None:
                holders.setdefault(param, []).append((_joined(path, name), module))
    return holders


def _wrong_module(path: str, module: Any) -> list[ConfigError]:
    """What makes the whole module unfit."""
    kind = type(module).__name__
    if hasattr(module, RECORD):
        return [config_error(path, kind, "has its experts shared already", f"apply {FIELD} once, to a new model")]
    if module._is_expert_parallel or "forward" in vars(module):
        others = "Transformers' own expert or tensor parallelism, hooks of Accelerate"
        problem = f"has a forward that something else put there ({others})"
        remedy = f"load the model without it (no ep_size, tp_plan or device_map), or leave {FIELD} out"
        return [config_error(path, kind, problem, remedy)]
    if _interface(module) is not ALL_EXPERTS_FUNCTIONS:
        return [config_error(path, kind, "holds quantized experts", "load the model without quantization")]
    if missing := [name for name in _stack_names(module) if module._parameters.get(name) is None]:
        problem = f"has no parameter {listed(missing)} of its own (a parametrization, an adapter, pruning?)"
        remedy = "share the experts of the model itself, before anything is put around its parameters"
        return [config_error(path, kind, problem, remedy)]
    return []


def _stack_names(module: Any) -> tuple[str, ...]:
    """What the interface's implementations read, and so all that is cut."""
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


def _check_mesh(mesh: DeviceMesh, size: int) -> None:
    names = mesh.mesh_dim_names
    if mesh.ndim != 1 or names != (AXIS,) or mesh.size() != size or mesh.get_coordinate() is None:
        here = "" if mesh.get_coordinate() is not None else ", without this rank"
        raise config_error(
            "mesh", f"{tuple(mesh.mesh.shape)} {names}{here}", f"is not the {size} ranks to share experts",
            f'take the dimension "{AXIS}" of a mesh that has one of that size: mesh["{AXIS}"]',
        )  # fmt: skip


def _check_devices(plan: ExpertPlan, mesh: DeviceMesh) -> None:
    for name in plan.parameters:
        device = plan._model.get_parameter(name).device
        if device.type not in ("meta", mesh.device_type):
            problem = f"is not on a {mesh.device_type} device, where the mesh is"
            remedy = "move the model there before its experts are shared, or build it on the meta device"
            raise config_error(name, str(device), problem, remedy)
