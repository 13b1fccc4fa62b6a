"""Expert parallelism for Transformers' mixture-of-experts models: whose experts a rank holds, and how tokens get there.

    plan = plan_experts(model, size=4)        # names everything that will be cut; raises, and changes nothing
    plan.apply(mesh)                          # a 1-D mesh of 4 ranks whose dimension is called "expert"

Of every stack of experts a rank keeps its own, ``[r E/size, (r + 1) E/size)``, and the experts' forward, nothing else
of the model, becomes ours. The router is the model's own: it hands over ``top_k_index`` and ``top_k_weights``, with
whatever groups, score-correction bias and scaling it has. Each rank has tokens of its own.

Dropless, the default: (token, slot) pairs are sorted by expert, travel to the experts' rank by one all-to-all, go
through grouped products and back by another one; weights are applied and summed over the slots on the token's rank, in
the dtype in which Transformers' ``grouped_mm`` does it. Backward sends the same rows the other way.

With ``capacity_factor`` c shapes are static: of its T tokens a rank keeps at most C = ceil(c T k / E) for each expert,
those with the largest routing weight (among equals the earlier tokens), as Megatron's ``drop_policy="probs"`` does.
What is dropped adds nothing, and its weight gets no gradient. "Probable" means that weight, as the router hands it
over: softmax before or after top-k, a sigmoid, scaled or not. All ranks of the group need the same T; in eager mode
another one is an error on every rank, inside a compiled graph it is not looked for.

Gradients: that of a rank's experts is the sum over the group's losses; what is not a stack (``post_expert_norm``) stays
whole everywhere, and its gradients must be summed over the group as those of all other parameters.

Under ``torch.compile``:

==============  ===================================================================================================
capacity        one graph
dropless        one graph where sizes that depend on data may be traced: ``fullgraph=True``, or
                ``torch.compiler.config.capture_scalar_outputs`` (both are torch's own switches). Otherwise one
                graph break around each experts module, whose forward then runs eagerly; all else compiles.
==============  ===================================================================================================

Seen with torch 2.13, aot_eager, Inductor and ``backend="muon_zero"``, forward and backward. What a dropless graph sends
is not in ``optimizer.traffic``: only the data say how much.

The switch is made through Transformers' own interface: each experts module reads ``config._experts_implementation``,
so it gets a shallow copy of its config that names ours, while the model's config, which ``save_pretrained`` writes and
``set_experts_implementation`` changes, stays as it was. The one thing that is global is the entry of a function without
state in ``ALL_EXPERTS_FUNCTIONS``; what differs between modules is in an :class:`ExpertDispatch` on each. Classes and
``forward`` attributes are left alone: models can still be copied, and equal layers share compiled code.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear

from compile_muon.config.checked import Mistakes
from compile_muon.errors import ConfigError, config_error, listed

__all__ = ["ExpertDispatch", "ExpertModule", "ExpertPlan", "plan_experts"]

AXIS = "expert"
_NAME = "compile_muon_expert_parallel"
_RECORD = "_expert_dispatch"
_FIELD = "expert_parallel"

# ------------------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class ExpertDispatch:
    """How the tokens of one experts module travel; lives on it.

    Args:
        group: name of the process group of the ranks that share the experts.
        size: how many they are.
        experts: of the whole module.
        capacity_factor: None is dropless.
    """

    group: str
    size: int
    experts: int
    capacity_factor: float | None = None


@dataclass(frozen=True)
class ExpertModule:
    """One module of experts.

    Args:
        path: its name in the model.
        experts: how many it holds.
        stacks: its parameters that are cut, by local name; biases included.
        whole: names of its other parameters, which every rank keeps.
    """

    path: str
    experts: int
    stacks: tuple[str, ...]
    whole: tuple[str, ...] = ()


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
            raise config_error(_FIELD, self.size, "the model has changed since the plan was made", "plan again")
        _check_devices(self, mesh)
        rank, group = mesh.get_local_rank(), mesh.get_group().group_name
        cut: dict[nn.Parameter, nn.Parameter] = {}
        configs: dict[int, Any] = {}
        for planned in self.modules:
            module: Any = self._model.get_submodule(planned.path)
            for name in planned.stacks:
                stack = module._parameters[name]
                if stack not in cut:
                    cut[stack] = _slice(stack, mesh, rank, self.size)
                module._parameters[name] = cut[stack]
            config = module.config
            if id(config) not in configs:
                configs[id(config)] = _switched(config)
            module.config = configs[id(config)]
            setattr(module, _RECORD, ExpertDispatch(group, self.size, planned.experts, self.capacity_factor))


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


def _switched(config: Any) -> Any:
    """The same config, with ours as the experts' implementation; what is inside it is shared."""
    ours = copy.copy(config)
    # Not its property: that would change the configs inside, which are the model's own.
    ours._experts_implementation_internal = _NAME
    return ours


def plan_experts(model: nn.Module, size: int, *, capacity_factor: float | None = None) -> ExpertPlan:
    """Find the experts that can be shared by ``size`` ranks; nothing is changed and nothing sent.

    Args:
        model: on any device; all of its modules whose forward goes through Transformers' experts interface are taken.
        size: ranks that share them.
        capacity_factor: of a rank's tokens per expert, see the module's text; None to drop none.
    Raises:
        ConfigError: everything that cannot be done, by module and parameter.
    """
    mistakes = Mistakes()
    mistakes.found += _wrong_settings(size, capacity_factor)
    mistakes.raise_all()
    found = [(path, module) for path, module in model.named_modules() if _interface(module) is not None]
    if not found:
        raise config_error(_FIELD, size, f"the model has {_what_there_is(model)}", _NEEDED)
    holders = _holders(model)
    modules = []
    for path, module in found:
        wrong = _wrong_module(path, module) or [*_wrong_stacks(path, module, size, holders)]
        mistakes.found += wrong
        if not wrong:
            stacks = _stack_names(module)
            whole = tuple(name for name, _ in module.named_parameters() if name not in stacks)
            modules.append(ExpertModule(path, getattr(module, stacks[0]).shape[0], stacks, whole))
    mistakes.raise_all()
    return ExpertPlan(size, capacity_factor, tuple(modules), model)


# --------------------------------------------------------------------------------------------------- what is refused

_NEEDED = (
    "take a model of Transformers 5 whose experts are one module under @use_experts_implementation, without "
    f"trust_remote_code, or leave {_FIELD} out"
)


def _wrong_settings(size: int, capacity_factor: float | None) -> list[ConfigError]:
    errors = []
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        errors.append(config_error(f"{_FIELD}.size", size, "is not a number of ranks", "use a whole number from 1 on"))
    if capacity_factor is not None:
        number = isinstance(capacity_factor, (int, float)) and not isinstance(capacity_factor, bool)
        if not number or not 0 < capacity_factor < math.inf:
            errors.append(
                config_error(
                    f"{_FIELD}.capacity_factor", capacity_factor, "is not a factor",
                    "use a number above 0, 1.25 say, or leave it out to drop no token",
                )
            )  # fmt: skip
    return errors


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
    if hasattr(module, _RECORD):
        return [config_error(path, kind, "has its experts shared already", f"apply {_FIELD} once, to a new model")]
    if module._is_expert_parallel or "forward" in vars(module):
        problem = (
            "has a forward that something else put there (Transformers' own expert or tensor parallelism, hooks of "
        )
        problem += "Accelerate)"
        remedy = f"load the model without it (no ep_size, tp_plan or device_map), or leave {_FIELD} out"
        return [config_error(path, kind, problem, remedy)]
    if _interface(module) is not ALL_EXPERTS_FUNCTIONS:
        return [config_error(path, kind, "holds quantized experts", "load the model without quantization")]
    missing = [name for name in _stack_names(module) if module._parameters.get(name) is None]
    if missing:
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
        yield config_error(f"{_FIELD}.size", size, problem, f"use one of {fitting}")
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
        others = [other for other, holder in holders[param] if _interface(holder) is None]
        if others:
            problem = f'is tied to {listed(others)}, which is not on the axis "{AXIS}"'
            yield config_error(full, shape, problem, "untie it")
    for name, param in module._parameters.items():
        if param is not None and name not in names and param.ndim and param.shape[0] == experts:
            problem = "looks like a stack of experts, and Transformers' experts interface does not read it"
            remedy = f"take a released model of Transformers, or leave {_FIELD} out"
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
            raise config_error(
                name, str(device), f"is not on a {mesh.device_type} device, where the mesh is",
                "move the model there before its experts are shared, or build it on the meta device",
            )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the forward


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What an experts module of Transformers computes, its experts being on several ranks.

    Args:
        hidden_states: [T, H].
        top_k_index: int64 [T, k], each in [0, E).
        top_k_weights: [T, k].
    Returns:
        [T, H], in the dtype of ``hidden_states``.
    """
    dispatch: ExpertDispatch | None = getattr(self, _RECORD, None)
    if dispatch is None:
        raise config_error(
            "experts_implementation", _NAME, f"{type(self).__name__} has its experts to itself",
            f'leave it out, and set "{_FIELD}"',
        )  # fmt: skip
    if dispatch.capacity_factor is not None:
        return _with_capacity(self, dispatch, hidden_states, top_k_index, top_k_weights)
    if torch.compiler.is_compiling() and not _sizes_are_traced():
        return _outside_graphs(self, dispatch, hidden_states, top_k_index, top_k_weights)
    return _dropless(self, dispatch, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)


def _dropless(module: Any, dispatch: ExpertDispatch, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    slots = index.shape[1]
    chosen = index.reshape(-1)
    chosen_sorted, order = torch.sort(chosen)  # as Transformers does: one rank alone has its numbers bit for bit
    rows = hidden[order // slots]
    counts = _counts(chosen, dispatch.experts)
    if dispatch.size == 1:
        out = _grouped(module, dispatch, rows, chosen_sorted, counts)
    else:
        out = _exchanged(module, dispatch, rows, counts)
    out = out[_inverse(order)]
    return _summed(out, weights, hidden)


def _exchanged(module: Any, dispatch: ExpertDispatch, rows: Tensor, counts: Tensor) -> Tensor:
    """The experts' outputs for ``rows``, which are in the order of the experts.

    Nothing here branches on what is in the tensors: a rank without rows does, and records for backward, what the
    others do, so every rank takes part in every exchange, also where a checkpoint is computed again.
    """
    size, group = dispatch.size, dispatch.group
    sent = counts.view(size, -1)
    even = [sent.shape[1]] * size
    received = _all_to_all(counts, even, even, group).view(size, -1)
    # The one synchronization with the host.
    sizes = torch.cat((sent.sum(1), received.sum(1))).tolist()
    for number in sizes:
        torch._check(number >= 0)
    here, there = sizes[:size], sizes[size:]
    torch._check(sum(here) == rows.shape[0])
    total = sum(there)
    rows = _Exchange.apply(rows, there, here, group)
    # They come by rank, and by expert within; they are wanted by expert.
    local = received.shape[1]
    experts = torch.arange(local, device=rows.device).repeat(size)
    experts = experts.repeat_interleave(received.reshape(-1), output_size=total)
    order = torch.argsort(experts, stable=True)
    out = _grouped(module, dispatch, rows[order], experts[order], received.sum(0))
    return _Exchange.apply(out[_inverse(order)], here, there, group)


def _grouped(module: Any, dispatch: ExpertDispatch, rows: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
    """The outputs of this rank's experts, ``counts`` rows for each."""
    offsets = counts.cumsum(0).to(torch.int32)

    def linear(rows: Tensor, name: str) -> Tensor:
        bias = _own(module, dispatch, f"{name}_bias")[experts] if module.has_bias else None
        weight = _own(module, dispatch, name)
        return _grouped_linear(rows, weight, offsets, bias=bias, is_transposed=module.is_transposed)

    return _through(module, rows, linear)


def _through(module: Any, rows: Tensor, linear: Callable[[Tensor, str], Tensor]) -> Tensor:
    """As Transformers' implementations compute, but for the products and the routing weights."""
    if module.has_gate:
        rows = module._apply_gate(linear(rows, "gate_up_proj"))
    else:
        rows = module.act_fn(linear(rows, "up_proj"))
    rows = linear(rows, "down_proj")
    return module.post_expert_norm(rows) if module.has_post_expert_norm else rows


def _own(module: Any, dispatch: ExpertDispatch, name: str) -> Tensor:
    """This rank's experts of a stack: [E / size, ...]."""
    stack = getattr(module, name)
    own = stack.to_local() if isinstance(stack, DTensor) else stack
    if own.shape[0] * dispatch.size != dispatch.experts:
        raise config_error(
            name, list(own.shape), f"is not one rank's part of {dispatch.experts} experts on {dispatch.size} ranks",
            "run the model with its experts shared, outside of full_parameters()",
        )  # fmt: skip
    return own


def _summed(out: Tensor, weights: Tensor, hidden: Tensor) -> Tensor:
    """[T, H] from the outputs of all pairs."""
    out = out.view(*weights.shape, out.shape[-1]) * weights.unsqueeze(-1)
    return out.sum(dim=1).to(hidden.dtype)


def _counts(chosen: Tensor, experts: int) -> Tensor:
    """How many pairs each expert gets; unlike ``torch.bincount`` of a size that is known when it is traced."""
    counts = torch.zeros(experts, dtype=torch.long, device=chosen.device)
    return counts.scatter_add(0, chosen, torch.ones_like(chosen))


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


@torch.compiler.assume_constant_result
def _sizes_are_traced() -> bool:
    """Whether the frame that is being compiled may hold sizes that depend on data."""
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    return mode is None or mode.shape_env is None or mode.shape_env.allow_scalar_outputs


_outside_graphs = torch.compiler.disable(_dropless, reason="how many tokens each expert gets depends on data")

# ------------------------------------------------------------------------------------------------------- capacity


def _with_capacity(module: Any, dispatch: ExpertDispatch, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The same in buffers [E, C, H]: their shape, and so the graph, does not depend on what the router chose."""
    tokens, slots = index.shape
    assert dispatch.capacity_factor is not None
    capacity = min(math.ceil(dispatch.capacity_factor * tokens * slots / dispatch.experts), tokens * slots)
    if not torch.compiler.is_compiling():
        _check_tokens(dispatch, tokens, index.device)
    place = _places(index.reshape(-1), weights.detach().reshape(-1), dispatch.experts, capacity)
    # Which pair is at a place: none, at first; of what is dropped, which has the place behind all, nobody looks.
    pairs = torch.full((dispatch.experts * capacity + 1,), tokens * slots, device=index.device)
    pairs = pairs.scatter(0, place, torch.arange(tokens * slots, device=index.device))[:-1]
    rows = _and_zeros(hidden)[pairs // slots]
    rows = _swap(rows, dispatch, to_experts=True)
    linear = partial(_batched, module, dispatch)
    rows = _swap(_through(module, rows, linear), dispatch, to_experts=False)
    return _summed(_and_zeros(rows)[place], weights, hidden)


def _places(chosen: Tensor, weights: Tensor, experts: int, capacity: int) -> Tensor:
    """Where each pair goes in [E * C]; behind all, if it is dropped.

    Args:
        chosen: int64 [T * k], the pairs' experts.
        weights: [T * k].
    """
    # By expert; within, by weight; within, by token: each sort keeps what the one before made.
    order = torch.argsort(weights, descending=True, stable=True)
    order = order[torch.argsort(chosen[order], stable=True)]
    sorted_experts = chosen[order]
    counts = _counts(chosen, experts)
    first = counts.cumsum(0) - counts
    position = torch.arange(chosen.shape[0], device=chosen.device) - first[sorted_experts]
    place = torch.where(position < capacity, sorted_experts * capacity + position, experts * capacity)
    return torch.empty_like(place).scatter(0, order, place)


def _and_zeros(rows: Tensor) -> Tensor:
    return torch.cat((rows, rows.new_zeros(1, rows.shape[1])))


def _swap(rows: Tensor, dispatch: ExpertDispatch, *, to_experts: bool) -> Tensor:
    """[E * C] by expert on the tokens' rank to [E / size * (size * C)] by expert on the experts' rank, and back."""
    size = dispatch.size
    if size == 1:
        return rows
    local, width = dispatch.experts // size, rows.shape[1]
    if not to_experts:
        rows = rows.view(local, size, -1, width).transpose(0, 1).reshape(-1, width)
    even = [rows.shape[0] // size] * size
    rows = _Exchange.apply(rows, even, even, dispatch.group)
    return rows.view(size, local, -1, width).transpose(0, 1).reshape(-1, width) if to_experts else rows


def _batched(module: Any, dispatch: ExpertDispatch, rows: Tensor, name: str) -> Tensor:
    """As many rows for each expert: products of one batch, in the dtype in which grouped products are made."""
    weight = _own(module, dispatch, name)
    weight = weight if module.is_transposed else weight.transpose(1, 2)
    with torch.autocast(rows.device.type, enabled=False):
        out = torch.bmm(rows.to(weight.dtype).view(weight.shape[0], -1, rows.shape[1]), weight)
    if module.has_bias:
        out = out + _own(module, dispatch, f"{name}_bias").unsqueeze(1)
    return out.flatten(0, 1)


def _check_tokens(dispatch: ExpertDispatch, tokens: int, device: torch.device) -> None:
    """Raise, on every rank, where ranks have different numbers of tokens, and so buffers of different sizes."""
    if dispatch.size == 1:
        return
    mine = torch.full((dispatch.size,), tokens, device=device)
    one = [1] * dispatch.size
    found = _all_to_all(mine, one, one, dispatch.group).tolist()
    if len(set(found)) > 1:
        raise config_error(
            f"{_FIELD}.capacity_factor", dispatch.capacity_factor, f"ranks have {found} tokens, and static shapes need "
            "as many on each", "pad batches to one length and drop the last incomplete one, or leave it out",
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the exchange


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    """Rows by rank, for each rank; so many from each, so many for each."""
    out = torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), received, sent, group)
    return torch.ops._c10d_functional.wait_tensor(out)


class _Exchange(torch.autograd.Function):
    """The same, for autograd: gradients travel the other way, and are there when backward goes on."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        ctx.way = received, sent, group
        return _all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        received, sent, group = ctx.way
        return _Exchange.apply(gradient, sent, received, group), None, None, None
