"""The parameter that users see where it is sharded: a DTensor whose edits all count, and which meets plain losses.

PyTorch counts edits in place of a DTensor, but not those through ``.data``, and not those of ``torch._foreach_*``; what
is assigned to its ``.data`` goes nowhere. Loops that swap averages of weights in and out do all three. Here they count,
on all ranks alike, since the operators of a DTensor run on all of them: so whoever keeps a copy of the weight knows
that it is old (:func:`compile_muon.engine.dtensors.edits_of`).

Before torch 2.13 a DTensor's operators never come to a subclass (:data:`_UNSEEN`). There what ``.data`` gives is of a
class that hears of torch's functions instead, and edits by ``torch._foreach_*`` of parameters themselves do not count.

What is computed of a sharded parameter is of this class, too, and so is its gradient, in hooks as well. So the gradient
of ``model(x) + penalty(parameters)`` becomes the plain tensor that the rest of the model expects, a number of which
this rank has a part, as of ``param.grad.norm()``, is not read for the whole, and a write to a slice that is a copy, as
of rows that other ranks hold, is refused.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from compile_muon.engine.dtensors import user_attributes
from compile_muon.errors import MuonZeroError, UnsupportedModelError, warn_user
from compile_muon.passes.torch_private import BEFORE_2_13, current_backward, lacks_sharding, meets_plain_tensor

__all__ = ["ShardedParameter", "carry_hooks", "meets_plain", "part_of", "raw_gradient", "sharded_parameter"]

#: whether a user's hook of a gradient runs
_in_hook: ContextVar[bool] = ContextVar("in_hook", default=False)

_GRAD: Any = torch.Tensor.grad
#: ``param.grad`` as autograd keeps it. Every step asks some ten times a parameter, so no frame of Python is between.
raw_gradient: Callable[[Tensor], Tensor | None] = _GRAD.__get__


class ShardedParameter(DTensor):
    """A sharded parameter, a view of one, or what was computed of one. To ``isinstance``, and in files, a DTensor.

    Attributes:
        uncounted_edits: of a parameter, how often it or a view was edited, beside what PyTorch counts.
        shown: of a view that PyTorch does not know as one (``.data``), the parameter whose memory it shows.
        origin: the parameter's name, and what was told of its model; of a copy and a view, too.
        averaging: placements of the gradients that ranks have of the whole, and the divisor of their sum; of what is
            computed of a parameter, too.
        copy_of: the name of a tensor of which this would be a view, were it not cut, and is a copy.
    """

    uncounted_edits: int = 0
    origin: tuple[str, set[str]] | None = None
    averaging: tuple[Sequence[Placement], int] | None = None
    shown: weakref.ref[ShardedParameter] | None = None
    copy_of: str | None = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        if func is torch.ops.aten.t.default and args[0].ndim == 2:
            # PyTorch (2.14, 2.15) copies a matrix with fewer rows than ranks here, and edits of the copy are lost.
            func, args = torch.ops.aten.transpose.int, (*args, 0, 1)
        if func is torch.ops.aten.fill_.Tensor and type(args[1]) is Tensor:  # of `x[:2] = 0`, which DTensor has not
            func, args = torch.ops.aten.fill_.Scalar, (args[0], args[1].item())
        if func is torch.ops.aten._foreach_copy_.default:  # which DTensor has not
            for target, source in zip(*args[:2], strict=True):
                target.copy_(source)
            return None
        if func.__name__.startswith("_foreach_") and len(set(cut := _cut_rows(args, kwargs))) > 1:
            return _by_kind(func, args, kwargs, cut)
        if func._schema.is_mutable:
            _note_edits(func, args, kwargs)
        change = _as_plain if _is_gradient(given) else _as_dtensor
        try:
            results = func(*tree_map(change, args), **tree_map(change, kwargs))
        except (RuntimeError, AssertionError) as error:
            if func._schema.is_mutable and _made_whole(args[0]):
                return func(*args, **kwargs)
            if (problem := _refused(func, given, error)) is None:
                raise
            raise problem from error
        views = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        return tree_map(lambda result: _derived(result, given, views=views), results)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """As every tensor's; the hook is given a gradient as ``param.grad`` is."""
        return super().register_hook(_OfGradient(hook, self.origin))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole, as a plain tensor; collective.

        What is computed of it is each rank's own, as in forward, so its gradient is averaged over the ranks. (That of a
        DTensor is taken for equal on all of them.)

        Args:
            grad_placements: of the gradient, where it is placed otherwise.
        """
        trained = torch.is_grad_enabled() and self.requires_grad
        if grad_placements is not None or self.averaging is None or not trained:
            return super().full_tensor(grad_placements=grad_placements)
        placements, divisor = self.averaging
        return cast("Tensor", _Divided.apply(super().full_tensor(grad_placements=placements), divisor))

    @property
    def grad(self) -> Tensor | None:
        """The gradient, or None."""
        return cast("Tensor | None", _as_gradient(raw_gradient(self), self.origin))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    @property
    def data(self) -> Tensor:
        """A view that autograd does not know of."""
        view: Any = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return cast("Tensor", _shown(view, self if self.shown is None else self.shown()) if _UNSEEN else view)

    @data.setter
    def data(self, value: Tensor) -> None:
        """Write ``value``, a DTensor or all of the parameter as a plain tensor, where PyTorch would do nothing."""
        if value.shape != self.shape or value.dtype != self.dtype:
            raise UnsupportedModelError(
                f"{self.origin[0] if self.origin else 'parameter'}.data = {value.dtype} {list(value.shape)}: a sharded "
                f"parameter stays {self.dtype} {list(self.shape)}; give a tensor of its dtype and whole shape, or "
                "change the model before MuonZero shards it"
            )
        with torch.no_grad():
            if not isinstance(value, DTensor):
                value = DTensor.from_local(value.to(self.device), self.device_mesh, run_check=False)
            self.copy_(value.redistribute(self.device_mesh, self.placements))

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> DTensor:
        return _of_class(DTensor.__tensor_unflatten__(*args))

    def __coerce_same_metadata_as_tangent__(self, flatten_spec: Any, expected_type: Any = None) -> Any:
        """As the gradient of what a graph returned as a plain tensor."""
        if expected_type is Tensor and _is_whole([self]):
            return _as_plain(self)
        return super().__coerce_same_metadata_as_tangent__(flatten_spec, expected_type)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != "copy":
            _tell_of_pickling(self)
        plain = _as_dtensor(self)
        plain.__dict__.update(user_attributes(self))
        return plain.__reduce_ex__(protocol)


class _OfGradient:
    """A user's hook of a parameter's gradient.

    Args:
        origin: of the parameter.
    """

    def __init__(self, hook: Callable[[Tensor], Tensor | None], origin: tuple[str, set[str]] | None) -> None:
        self.hook, self.origin = hook, origin

    def __call__(self, grad: Any) -> Tensor | None:
        token = _in_hook.set(True)
        try:
            return self.hook(_as_gradient(grad, self.origin))
        finally:
            _in_hook.reset(token)


def carry_hooks(before: Tensor, after: Tensor) -> None:
    """Hooks that were set before sharding are those of what stands for the parameter now; their handles stay good."""
    hooks: dict[int, Any] | None = before._backward_hooks
    if hooks:
        if isinstance(after, ShardedParameter):
            hooks.update({key: _OfGradient(hook, after.origin) for key, hook in hooks.items()})
        after._backward_hooks, before._backward_hooks = hooks, None
    accumulated: Any = getattr(before, "_post_accumulate_grad_hooks", None)
    if accumulated:
        cast("Any", after)._post_accumulate_grad_hooks = accumulated


def _cut_rows(args: Sequence[Any], kwargs: dict[str, Any]) -> list[bool]:
    """Of each place in the lists that an operator is given, whether a DTensor is among what stands there."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    return [any(isinstance(value, DTensor) for value in row) for row in zip(*lists, strict=True)]


def _by_kind(func: Any, args: Sequence[Any], kwargs: dict[str, Any], cut: Sequence[bool]) -> list[Any] | None:
    """An operator on lists, by itself for shards and for plain tensors, as an average of weights and buffers has both.

    Args:
        cut: of each place in the lists, which of the two stand there.
    """
    results: dict[int, Any] = {}
    for kind in (True, False):
        at = [i for i, of_kind in enumerate(cut) if of_kind is kind]

        def part(value: Any, at: Sequence[int] = at) -> Any:
            return [value[i] for i in at] if isinstance(value, (list, tuple)) else value

        made = func(*map(part, args), **{name: part(value) for name, value in kwargs.items()})
        results.update(zip(at, made or (), strict=False))
    return [results[i] for i in range(len(cut))] if results else None


def _made_whole(value: Any) -> bool:
    """Whether ``value`` was part of a result over the ranks, as a norm is, and is the result now; collective."""
    partial = isinstance(value, ShardedParameter) and any(place.is_partial() for place in value.placements)
    if partial:
        places = [Replicate() if place.is_partial() else place for place in value.placements]
        whole = _as_dtensor(value).detach().redistribute(placements=places)
        for name in ("_local_tensor", "_spec"):
            setattr(value, name, getattr(whole, name))
    return partial


def _as_gradient(grad: Any, origin: tuple[str, set[str]] | None) -> Any:
    if type(grad) is not DTensor:
        return grad
    found = _of_class(grad)
    found.origin = None if origin is None else (f"gradient of {origin[0]}", origin[1])
    return found


class _Divided(torch.autograd.Function):
    """The same, whose gradient is divided."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.divisor, None


def meets_plain(names: str, where: str) -> UnsupportedModelError:
    """For shards that are computed with as if they were whole.

    Args:
        names: of the parameters.
        where: the operator, or the frame.
    """
    return UnsupportedModelError(
        f"{names}: a shard meets a plain tensor in {where}; weights are whole as attributes of their modules, inside a "
        "model's forward and in methods that compile_muon.forward_methods(model, name) names; elsewhere compute with "
        ".full_tensor(), on every rank"
    )


def _refused(func: Any, given: Sequence[Any], error: Exception) -> UnsupportedModelError | None:
    """Why DTensor does not do an operator on ``given``, if that is known."""
    name = next((v.origin[0] for v in given if type(v) is ShardedParameter and v.origin), "a parameter")
    shapes = [value.shape for value in given if isinstance(value, DTensor)]
    plain = [value for value in given if isinstance(value, Tensor) and not isinstance(value, DTensor)]
    if meets_plain_tensor(error) or (isinstance(error, AssertionError) and plain):
        if func._schema.is_mutable or " of " in name or any(value.shape in shapes for value in plain):
            return UnsupportedModelError(f"{name}: a shard meets a plain tensor in {func.__name__}; {_ALIKE}")
        return meets_plain(name, func.__name__)
    if lacks_sharding(error):
        remedy = _WHOLE if func._schema.is_mutable else "compute with .full_tensor(), on every rank"
        return UnsupportedModelError(f"{name}: {func.__name__} is not done with shards; {remedy}")
    return None


#: how a plain tensor and a shard meet element by element
_ALIKE = (
    "cut the other, e.g. a mask, alike, on every rank: distribute_tensor(mask, x.device_mesh, x.placements); copies "
    "and averages of weights begin behind MuonZero"
)
#: what to do instead of an operator that shards have not
_WHOLE = (
    "edit the whole of it, e.g. multiply by a mask of its shape, distribute_tensor(mask, x.device_mesh, x.placements), "
    "or edit weights inside `with compile_muon.full_parameters(model, write=True)`"
)
#: through which Python reads values
_READING = ["item", "tolist", "numpy", "__array__", "__format__"]
_READING += ["__float__", "__int__", "__bool__", "__complex__", "__index__"]


def _read_values(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def read(self: ShardedParameter, *args: Any, **kwargs: Any) -> Any:
        parts = [
            place
            for dim, place in enumerate(self.placements)
            if not place.is_replicate() and self.device_mesh.size(dim) > 1
        ]
        if parts:
            what = "rows" if parts[0].is_shard() else f"part of a result over the ranks ({parts[0]})"
            raise MuonZeroError(
                f"{name.strip('_')}() of a sharded tensor: this rank has its own {what}, not the whole; call "
                f".full_tensor() first, on every rank (compile_muon.parameter_norms(model) gives all norms at once)"
            )
        return method(self.to_local(), *args, **kwargs)

    read.__name__, read.__doc__ = (
        name,
        f"``Tensor.{name}`` of the whole.\n\nRaises:\n    MuonZeroError: this rank has a part.",
    )
    return read


for _name in _READING:
    setattr(ShardedParameter, _name, _read_values(_name))


def part_of(param: Tensor, name: str, state: Tensor) -> Tensor:
    """A state of a parameter, or what is kept of it, as a tensor that says so where it is pickled; the same memory.

    Args:
        name: of the state.
        state: a tensor of any kind; one that is no DTensor comes back as it is.
    """
    if type(state) is not DTensor or not isinstance(param, ShardedParameter) or param.origin is None:
        return state
    found = _of_class(DTensor(state._local_tensor, state._spec, requires_grad=False))
    found.origin = f"{name} of {param.origin[0]}", param.origin[1]
    return cast("Tensor", found)


def _tell_of_pickling(tensor: ShardedParameter) -> None:
    """Say once for a model that a file gets this rank's rows, where it does not hold all of them."""
    mesh = tensor.device_mesh
    parts = [mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    if tensor.origin is None or max(parts, default=1) == 1 or "pickled" in tensor.origin[1]:
        return
    tensor.origin[1].add("pickled")
    warn_user(
        f"{tensor.origin[0]}: is pickled (torch.save, say) as a shard: the file holds the rows of rank "
        f"{torch.distributed.get_rank()} and no others; save whole weights with full_state_dict(model) or "
        "save_pretrained(model, folder), and a run with a Checkpointer, on all ranks",
        own=True,
    )


class _Shown(ShardedParameter):
    """What ``.data`` of one gives, or a view of that, where operators do not come to a subclass."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if (name.endswith("_") and not name.endswith("__")) or name in _WRITING:
            for value in tree_leaves(args[:1]):
                param = value.shown() if type(value) is _Shown and value.shown is not None else None
                if param is not None:
                    param.uncounted_edits += 1
        with torch._C.DisableTorchFunctionSubclass():
            results = func(*args, **(kwargs or {}))
        sources = {_memory(value): value for value in tree_leaves(args) if type(value) is _Shown}
        return tree_map(lambda result: _view_of(result, sources), results)


#: whether operators of a DTensor pass by ``__torch_dispatch__`` of a subclass
_UNSEEN = BEFORE_2_13
_WRITING = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


def _shown(view: Any, param: ShardedParameter | None) -> Any:
    if type(view) is not DTensor or param is None:
        return view
    found: Any = view
    found.__class__ = _Shown
    found.shown = weakref.ref(param)
    return found


def _view_of(result: Any, sources: dict[int, Any]) -> Any:
    source = sources.get(_memory(result)) if type(result) is DTensor else None
    return result if source is None else _shown(result, source.shown())


def sharded_parameter(values: DTensor, *, requires_grad: bool) -> nn.Parameter:
    """A parameter of these values, which stay where they are."""
    return _of_class(nn.Parameter(values, requires_grad=requires_grad))


def _of_class(tensor: Any) -> Any:
    # What a subclass of DTensor adds is in its dictionary; PyTorch has no constructor that keeps an existing tensor.
    tensor.__class__ = ShardedParameter
    return tensor


def _as_dtensor(value: Any) -> Any:
    if not isinstance(value, ShardedParameter):
        return value
    return DTensor(value._local_tensor, value._spec, requires_grad=value.requires_grad)


def _as_plain(value: Any) -> Any:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def _is_whole(given: Sequence[Any]) -> bool:
    """Whether no DTensor among these is cut."""
    return not any(place.is_shard() for value in given if isinstance(value, DTensor) for place in value.placements)


def _is_gradient(given: Sequence[Any]) -> bool:
    """Whether a backward pass has come from a DTensor's part of a loss to that of plain tensors.

    In a forward pass the two do not meet: what is plain there may be another on each rank.
    """
    plain = any(isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim for value in given)
    return plain and current_backward() >= 0 and _is_whole(given)


def _memory(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage()._cdata


def _note_edits(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Note what an operator is about to edit, in the parameters whose memory that is.

    Raises:
        UnsupportedModelError: it would edit a copy, and not what that is a part of.
    """
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for value in tree_leaves(given.get(argument.name)):
            if type(value) is ShardedParameter:
                if value.copy_of is not None:
                    raise UnsupportedModelError(
                        f"{value.copy_of}: {func.__name__} edits a slice or view of it that crosses the ranks' shards "
                        f"and is a copy: nothing of it would change; {_WHOLE}"
                    )
                param = value if value.shown is None else value.shown()
                if param is not None and _memory(param) == _memory(value):  # not of a copy of a view
                    param.uncounted_edits += 1


def _derived(result: Any, given: Sequence[Any], *, views: bool) -> Any:
    """A result of an operator on ``given``, as what it is.

    Args:
        views: of plain tensors it would be a view of one of these.
    """
    if type(result) is not DTensor:
        return result
    memory = _memory(result)
    source = next((v for v in given if type(v) is ShardedParameter and _memory(v) == memory), None)
    found = _of_class(result)
    if source is not None:
        found.shown = weakref.ref(source) if source.shown is None else source.shown
    known = [v for v in given if type(v) is ShardedParameter]
    found.origin = next((v.origin for v in known if v.origin and (v is source or v.shape == found.shape)), None)
    found.averaging = next((v.averaging for v in known if v.averaging), None)
    # Autograd adds gradients up in what views give it.
    if views and known and (current_backward() < 0 or _in_hook.get()):
        copied = known[0].copy_of if source is None else source.copy_of
        name = known[0].origin[0] if known[0].origin else "a sharded tensor"
        found.copy_of = copied or (name if source is None else None)
    return found
