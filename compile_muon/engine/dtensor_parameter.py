"""The parameter that users see where it is sharded: a DTensor that counts edits, and refuses a part read as the whole.

PyTorch counts in-place edits of a DTensor, but not edits through ``.data`` or ``torch._foreach_*``, and ignores an
assignment to ``.data``. Loops that swap averaged weights in and out do all three. :class:`ShardedParameter` counts them
(:func:`compile_muon.engine.dtensors.edits_of`), on all ranks alike because DTensor operators run on all of them, so
resident copies of the weight are known to be stale.

Results computed from a sharded parameter are of this class as well, and so is its gradient, also in hooks. Hence the
gradient of ``model(x) + penalty(parameters)`` becomes the plain tensor that the rest of the model expects; a partial
value, such as ``param.grad.norm()``, is not read as the total; and a write to a slice that is a copy, of rows that
other ranks hold, is refused.
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
from compile_muon.passes import torch_private

#: whether a user's gradient hook is running
_in_hook: ContextVar[bool] = ContextVar("in_hook", default=False)

_GRAD: Any = torch.Tensor.grad
#: ``param.grad`` as autograd keeps it. Called some ten times per parameter and step, hence no Python frame around it.
raw_gradient: Callable[[Tensor], Tensor | None] = _GRAD.__get__


class ShardedParameter(DTensor):
    """A sharded parameter, a view of one, or a result computed from one. A DTensor for ``isinstance`` and in files."""

    uncounted_edits: int = 0  # of a parameter and its views, beside those PyTorch counts
    # (name of the parameter, kinds of the warnings that its model has had), also of its views and copies.
    origin: tuple[str, set[str]] | None = None
    # (placements of the ranks' gradients of ``full_tensor()``, divisor of their sum), also of computed results.
    averaging: tuple[Sequence[Placement], int] | None = None
    shown: weakref.ref[ShardedParameter] | None = None  # of a view: the parameter that counts its edits
    copy_of: str | None = None  # of a copy made where plain tensors would give a view: the name of its source

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if func is torch.ops.aten.t.default and args[0].ndim == 2:
            # torch 2.14 and 2.15 copy a matrix with fewer rows than ranks in aten.t, so edits of the result are lost.
            func, args = torch.ops.aten.transpose.int, (*args, 0, 1)
        func, args = torch_private.partial_first(func, args, kwargs)
        if func is torch.ops.aten.fill_.Tensor and type(args[1]) is Tensor:  # `x[:2] = 0`: DTensor lacks it
            func, args = torch.ops.aten.fill_.Scalar, (args[0], args[1].item())
        if func is torch.ops.aten._foreach_copy_.default:  # which DTensor lacks
            for target, source in zip(*args[:2], strict=True):
                target.copy_(source)
            return None
        if func.__name__.startswith("_foreach_") and len(set(has_dtensor := _dtensors_among(args, kwargs))) > 1:
            return _by_kind(func, args, kwargs, has_dtensor)
        if func._schema.is_mutable:
            _note_edits(func, args, kwargs)
        convert = _as_plain if _is_gradient(leaves) else _as_dtensor
        try:
            results = func(*tree_map(convert, args), **tree_map(convert, kwargs))
        except (RuntimeError, AssertionError) as error:
            if func._schema.is_mutable and _made_whole(args[0]):
                return func(*args, **kwargs)
            if (problem := _refused(func, leaves, error)) is None:
                raise
            raise problem from error
        views = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        return tree_map(lambda result: _derived(result, leaves, views=views), results)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register ``hook``, which receives the gradient as ``param.grad`` returns it."""
        return super().register_hook(_OfGradient(hook, self.origin))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the whole as a plain tensor; collective.

        Each rank computes its own loss from it, as in forward, so its gradient is averaged over the ranks; DTensor
        assumes that it is equal on all of them. An explicit ``grad_placements`` keeps DTensor's meaning.
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
        return cast("Tensor", torch.Tensor.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Write ``value``, a DTensor or the whole parameter as a plain tensor; PyTorch would do nothing."""
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
        """Return the tangent of a plain graph output as a plain tensor."""
        if expected_type is Tensor and _is_whole([self]):
            return _as_plain(self)
        return super().__coerce_same_metadata_as_tangent__(flatten_spec, expected_type)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # copy.deepcopy() calls this as well, and writes no file.
        if sys._getframe(1).f_globals.get("__name__") != "copy":
            _tell_of_pickling(self)
        plain = _as_dtensor(self)
        plain.__dict__.update(user_attributes(self))
        return plain.__reduce_ex__(protocol)


class _OfGradient:
    """A user's gradient hook, called with a :class:`ShardedParameter` of the parameter's ``origin``."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None], origin: tuple[str, set[str]] | None) -> None:
        self.hook, self.origin = hook, origin

    def __call__(self, grad: Any) -> Tensor | None:
        token = _in_hook.set(True)
        try:
            return self.hook(_as_gradient(grad, self.origin))
        finally:
            _in_hook.reset(token)


def carry_hooks(before: Tensor, after: Tensor) -> None:
    """Move hooks that were registered before sharding to the parameter ``after``; their handles stay valid."""
    hooks: dict[int, Any] | None = before._backward_hooks
    if hooks:
        if isinstance(after, ShardedParameter):
            hooks.update({key: _OfGradient(hook, after.origin) for key, hook in hooks.items()})
        after._backward_hooks, before._backward_hooks = hooks, None
    post_hooks: Any = getattr(before, "_post_accumulate_grad_hooks", None)
    if post_hooks:
        cast("Any", after)._post_accumulate_grad_hooks = post_hooks


def _dtensors_among(args: Sequence[Any], kwargs: dict[str, Any]) -> list[bool]:
    """Return for each index of an operator's list arguments whether a DTensor is among the values at this index."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    return [any(isinstance(value, DTensor) for value in row) for row in zip(*lists, strict=True)]


def _by_kind(func: Any, args: Sequence[Any], kwargs: dict[str, Any], has_dtensor: Sequence[bool]) -> list[Any] | None:
    """Run an operator on lists twice, on the indices with DTensors and on the others: an average of weights and buffers
    has both. ``has_dtensor``: result of :func:`_dtensors_among`."""
    results: dict[int, Any] = {}
    for dtensors in (True, False):
        at = [i for i, has in enumerate(has_dtensor) if has is dtensors]

        def part(value: Any, at: Sequence[int] = at) -> Any:
            return [value[i] for i in at] if isinstance(value, (list, tuple)) else value

        part_results = func(*map(part, args), **{name: part(value) for name, value in kwargs.items()})
        results.update(zip(at, part_results or (), strict=False))
    return [results[i] for i in range(len(has_dtensor))] if results else None


def _made_whole(value: Any) -> bool:
    """Reduce a partial result (of a norm, say) over the ranks, in place; return whether it was one. Collective."""
    partial = isinstance(value, ShardedParameter) and any(placement.is_partial() for placement in value.placements)
    if partial:
        placements = [Replicate() if placement.is_partial() else placement for placement in value.placements]
        unsharded = _as_dtensor(value).detach().redistribute(placements=placements)
        for name in ("_local_tensor", "_spec"):
            setattr(value, name, getattr(unsharded, name))
    return partial


def _as_gradient(grad: Any, origin: tuple[str, set[str]] | None) -> Any:
    if type(grad) is not DTensor:
        return grad
    gradient = _of_class(grad)
    gradient.origin = None if origin is None else (f"gradient of {origin[0]}", origin[1])
    return gradient


class _Divided(torch.autograd.Function):
    """The identity, whose gradient is divided."""

    @staticmethod
    def forward(ctx: Any, unsharded: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return unsharded.view_as(unsharded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.divisor, None


def meets_plain(names: str, where: str) -> UnsupportedModelError:
    """Return the error for parameters whose shards are computed with as if whole, in an operator or frame ``where``."""
    return UnsupportedModelError(
        f"{names}: a shard meets a plain tensor in {where}; weights are whole as attributes of their modules, inside a "
        "model's forward and in methods that compile_muon.forward_methods(model, name) names; elsewhere compute with "
        ".full_tensor(), on every rank"
    )


def _refused(func: Any, leaves: Sequence[Any], error: Exception) -> UnsupportedModelError | None:
    """Return the error for an operator that DTensor refuses on ``leaves``; None if ``error`` is of another kind."""
    name = next((v.origin[0] for v in leaves if type(v) is ShardedParameter and v.origin), "a parameter")
    shapes = [value.shape for value in leaves if isinstance(value, DTensor)]
    plain = [value for value in leaves if isinstance(value, Tensor) and not isinstance(value, DTensor)]
    if torch_private.meets_plain_tensor(error) or (isinstance(error, AssertionError) and plain):
        if func._schema.is_mutable or " of " in name or any(value.shape in shapes for value in plain):
            return UnsupportedModelError(f"{name}: a shard meets a plain tensor in {func.__name__}; {_ALIKE}")
        return meets_plain(name, func.__name__)
    if torch_private.lacks_sharding(error):
        remedy = _WHOLE if func._schema.is_mutable else "compute with .full_tensor(), on every rank"
        return UnsupportedModelError(f"{name}: {func.__name__} is not done with shards; {remedy}")
    return None


#: the remedy where a plain tensor and a shard meet element by element
_ALIKE = (
    "cut the other, e.g. a mask, alike, on every rank: distribute_tensor(mask, x.device_mesh, x.placements); copies "
    "and averages of weights begin behind MuonZero"
)
#: the remedy for operators that shards lack
_WHOLE = (
    "edit the whole of it, e.g. multiply by a mask of its shape, distribute_tensor(mask, x.device_mesh, x.placements), "
    "or edit weights inside `with compile_muon.full_parameters(model, write=True)`"
)
#: methods through which Python reads values
_READING = ["item", "tolist", "numpy", "__array__", "__format__"]
_READING += ["__float__", "__int__", "__bool__", "__complex__", "__index__"]


def _read_values(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def read(self: ShardedParameter, *args: Any, **kwargs: Any) -> Any:
        divided = [
            placement
            for dim, placement in enumerate(self.placements)
            if not placement.is_replicate() and self.device_mesh.size(dim) > 1
        ]
        if divided:
            what = "rows" if divided[0].is_shard() else f"part of a result over the ranks ({divided[0]})"
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
torch_private.dispatch_through_python(ShardedParameter)


def part_of(param: Tensor, name: str, state: Tensor) -> Tensor:
    """Return ``state``, the state ``name`` of ``param``, as a tensor on the same memory that warns when pickled. A
    state that is no DTensor is returned as it is."""
    if type(state) is not DTensor or not isinstance(param, ShardedParameter) or param.origin is None:
        return state
    part = _of_class(DTensor(state._local_tensor, state._spec, requires_grad=False))
    part.origin = f"{name} of {param.origin[0]}", param.origin[1]
    return cast("Tensor", part)


def _tell_of_pickling(tensor: ShardedParameter) -> None:
    """Warn, once per model, that a pickle holds this rank's rows only."""
    mesh = tensor.device_mesh
    shard_counts = [mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    if tensor.origin is None or max(shard_counts, default=1) == 1 or "pickled" in tensor.origin[1]:
        return
    tensor.origin[1].add("pickled")
    warn_user(
        f"{tensor.origin[0]}: is pickled (torch.save, say) as a shard: the file holds the rows of rank "
        f"{torch.distributed.get_rank()} and no others; save whole weights with full_state_dict(model) or "
        "save_pretrained(model, folder), and a run with a Checkpointer, on all ranks",
        this_rank=True,
    )


def sharded_parameter(values: DTensor, *, requires_grad: bool) -> nn.Parameter:
    """Return a parameter on the memory of ``values``."""
    return _of_class(nn.Parameter(values, requires_grad=requires_grad))


def _of_class(tensor: Any) -> Any:
    # A DTensor subclass keeps its additions in __dict__; PyTorch has no constructor that keeps an existing tensor.
    tensor.__class__ = ShardedParameter
    return tensor


def _as_dtensor(value: Any) -> Any:
    if not isinstance(value, ShardedParameter):
        return value
    return DTensor(value._local_tensor, value._spec, requires_grad=value.requires_grad)


def _as_plain(value: Any) -> Any:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def _is_whole(leaves: Sequence[Any]) -> bool:
    """Return whether no DTensor among ``leaves`` is sharded."""
    return not any(p.is_shard() for value in leaves if isinstance(value, DTensor) for p in value.placements)


def _is_gradient(leaves: Sequence[Any]) -> bool:
    """Return whether an operator of a backward adds a DTensor's part of a gradient to that of plain tensors. A forward
    must not mix them: a plain tensor may differ between ranks there."""
    plain = any(isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim for value in leaves)
    return plain and torch_private.current_backward() >= 0 and _is_whole(leaves)


def _memory(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage()._cdata


def _note_edits(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Count the edits that an operator is about to make, at the parameters whose memory it writes. Raises
    UnsupportedModelError if it would edit a copy, and the parameter would stay as it is."""
    value_of = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for value in tree_leaves(value_of.get(argument.name)):
            if type(value) is ShardedParameter:
                if value.copy_of is not None:
                    raise UnsupportedModelError(
                        f"{value.copy_of}: {func.__name__} edits a slice or view of it that crosses the ranks' shards "
                        f"and is a copy: nothing of it would change; {_WHOLE}"
                    )
                param = value if value.shown is None else value.shown()
                if param is not None and _memory(param) == _memory(value):  # a copy of a view has memory of its own
                    param.uncounted_edits += 1


def _derived(result: Any, leaves: Sequence[Any], *, views: bool) -> Any:
    """Return a result of an operator on ``leaves``, if it is a DTensor, as the view, copy or computed value that it is.
    ``views``: of plain tensors the operator returns a view."""
    if type(result) is not DTensor:
        return result
    memory = _memory(result)
    source = next((v for v in leaves if type(v) is ShardedParameter and _memory(v) == memory), None)
    derived = _of_class(result)
    if source is not None:
        derived.shown = weakref.ref(source) if source.shown is None else source.shown
    inputs = [v for v in leaves if type(v) is ShardedParameter]
    derived.origin = next((v.origin for v in inputs if v.origin and (v is source or v.shape == derived.shape)), None)
    derived.averaging = next((v.averaging for v in inputs if v.averaging), None)
    # In backward, autograd accumulates into views, so a copy must stay writable there, except in a user's hook.
    if views and inputs and (torch_private.current_backward() < 0 or _in_hook.get()):
        copied_name = inputs[0].copy_of if source is None else source.copy_of
        name = inputs[0].origin[0] if inputs[0].origin else "a sharded tensor"
        derived.copy_of = copied_name or (name if source is None else None)
    return derived
