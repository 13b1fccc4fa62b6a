"""What a method may be: pure functions of what they are given. A number that they hold would be burnt into a graph."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from compile_muon.passes.methods import METHODS, ElementMethod, MatrixMethod, Method, Piece, State, WholeInputs
from compile_muon.passes.methods.method import MOMENTUM, STEP
from compile_muon.passes.methods.muon import MUON

SHAPES = ((1, 6, 4), (2, 3, 5))


def numbers(method: Method, step: int) -> dict[str, Any]:
    given = {rate.name: 0.5 if rate.default is None else rate.default for rate in method.rates}
    return (
        given | ({"step": step} if method.has(STEP.name) else {}) | ({"betas": (0.9, 0.99)} if "betas" in given else {})
    )


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def twice(what: str, function: Callable[..., Any], *given: Any) -> Iterator[str]:
    """The same again of the same, which it leaves as it was."""
    before = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, given)
    results = [tree_flatten(_plain(function(*given)))[0] for _ in range(12)]
    if not all(_equal(results[0], other) for other in results[1:]):
        yield f"{what}: gives something else the next time"
    if not _equal(tree_flatten(_plain(before))[0], tree_flatten(_plain(given))[0]):
        yield f"{what}: writes what it is given"


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _equal(left: list[Any], right: list[Any]) -> bool:
    same = (torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(left, right, strict=True))
    return len(left) == len(right) and all(same)


def seen_of(method: MatrixMethod, step: int) -> list[WholeInputs]:
    now = numbers(method, step)
    rates = {name: torch.tensor(float(now[name])) for name in (*method.graph_rates, MOMENTUM.name) if name in now}
    phase = None if method.phase is None else method.phase(now)
    return [
        WholeInputs(
            rates, {s.name: torch.eye(*s.shape(r, c)).expand(n, *s.shape(r, c)).clone() for s in method.owned}, phase
        )
        for n, r, c in SHAPES
    ]


def traced(method: MatrixMethod, step: int) -> str:
    names = list(seen_of(method, step)[0].rates)

    def run(matrices: list[Tensor], rates: list[Tensor], states: list[dict[str, Tensor]]) -> Any:
        seen = seen_of(method, step)
        seen = [
            replace(s, rates=dict(zip(names, rates, strict=True)), states=own)
            for s, own in zip(seen, states, strict=True)
        ]
        return _plain(method.whole(matrices, lambda xs: [x.clone() for x in xs], seen))

    own = seen_of(method, step)
    given = [random(*shape) for shape in SHAPES], list(own[0].rates.values()), [dict(each.states) for each in own]
    return str(make_fx(run, tracing_mode="fake")(*given).code)


def piece_of(method: MatrixMethod, shape: tuple[int, int, int]) -> Piece:
    n, r, c = shape
    sizes = {"element": (n, r, c), "row": (n, r, 1)}
    states = {state.name: random(*sizes[state.each]).abs() for state in method.states if not state.at_owner}
    now = {**numbers(method, 3), "step": torch.tensor(3.0)}
    sums = None if method.row_sums is None else method.row_sums(random(n, r, c), random(n, r, c))
    projected = None if method.project_sums is None else method.project_sums(random(n, r, c), random(n, r, c))
    found = Piece(random(n, r, c), random(n, r, c), random(n, r, c), states, sums, now, r, c)
    return replace(found, projected=projected)


class NoNumbers(TorchDispatchMode):
    """No tensor becomes a number: a host would wait for it, and a CUDA graph would keep it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a number is asked for")
        return func(*args, **(kwargs or {}))


def of_tensors(what: str, method: Method, function: Callable[[Mapping[str, Any]], Any]) -> Iterator[str]:
    """The bits are the same where rates, which ``function`` takes, are on the device, as CUDA graphs have them."""
    odd = {"lr": 0.0137, "weight_decay": 0.073, "momentum": 0.937}
    rates = numbers(method, 3) | {name: value for name, value in odd.items() if method.has(name)}
    if method.has(STEP.name):
        rates["step"] = torch.tensor(3.0)
    moving = [name for name in odd if name in rates and name not in method.constants]
    expected = tree_flatten(_plain(function(rates)))[0]
    try:
        with NoNumbers():
            found = function(rates | {name: torch.tensor(rates[name], dtype=torch.float64) for name in moving})
    except RuntimeError as error:
        yield f"{what}: does not take tensors ({error})"
        return
    if not _equal(expected, tree_flatten(_plain(found))[0]):
        yield f"{what}: gives something else of tensors"


def problems(method: Method) -> list[str]:
    """Why a method is not pure."""
    found = list[str]()
    if isinstance(method, ElementMethod):
        states = [{s.name: torch.ones(()) if s.each == "parameter" else torch.ones(4) for s in method.states}]

        def step(params: list[Tensor], grads: list[Tensor], kept: list[dict[str, Tensor]]) -> Any:
            own = tree_map(torch.clone, (params, kept))
            method.step(own[0], grads, own[1], numbers(method, 3), None)
            return own

        found += twice("step", step, [random(4)], [random(4)], states)
        for dtype in () if method.withholds else (torch.float32, torch.bfloat16):  # a kernel, which has no twin here

            def of(rates: Mapping[str, Any], dtype: torch.dtype = dtype) -> Any:
                own = tree_map(lambda x: x.to(dtype, copy=True), ([random(64)], [{s: random(64) for s in states[0]}]))
                method.step(own[0], [random(65)[:64].to(dtype)], own[1], rates, None)
                return own

            found += of_tensors("step", method, of)
        return found
    momentum = random(6, 4) if method.keeps_momentum else torch.empty(0)
    beta = torch.tensor(0.1), torch.tensor(0.9)
    found += twice("before", method.update, random(6, 4), momentum, beta, True, torch.float32)
    for name in ("phase", "joined"):
        if (function := getattr(method, name)) is not None:
            found += twice(name, function, numbers(method, 3))
    if method.whole is not None:
        by_phase: dict[Any, set[str]] = {}
        for number in range(1, 12):
            try:
                by_phase.setdefault(seen_of(method, number)[0].phase, set()).add(traced(method, number))
            except Exception as error:
                found.append(f"whole: is not traced ({type(error).__name__})")
                break
        if any(len(graphs) > 1 for graphs in by_phase.values()):
            found.append("whole: steps of one phase have several graphs")
        plain, calls = [random(*shape) for shape in SHAPES], list[int]()

        def copies(matrices: list[Tensor]) -> list[Tensor]:
            calls.append(len(matrices))
            return [x.clone() for x in matrices]

        found += twice("whole", method.whole, plain, copies, seen_of(method, 3))
        if bool(calls) != method.orthogonalizes:
            found.append(
                f"orthogonalizes: is {method.orthogonalizes}, and whole called newton_schulz {len(calls)} times"
            )
    if method.project is not None:
        for shape in SHAPES:
            piece = piece_of(method, shape)
            found += twice("project", method.project, replace(piece, sums=piece.projected))
    if method.after is not None:
        after = method.after
        found += [p for shape in SHAPES for p in twice("after", after, piece_of(method, shape))]
        found += of_tensors("after", method, lambda rates: after(replace(piece_of(method, SHAPES[0]), rates=rates)))
    if method.finish is not None:
        for n, r, c in SHAPES:
            piece = piece_of(method, (n, r, c))
            facts = random(n, method.facts).abs() if method.facts else None
            found += twice("finish", method.finish, facts, 0.99, -0.01, piece)

            def finish(rates: Mapping[str, Any], facts: Tensor | None = facts, piece: Piece = piece) -> Any:
                own, lr = replace(piece, rates=rates), rates["lr"]
                keep, move = method.finish(facts, 1 - lr * rates.get("weight_decay", 0.0), -lr, own)
                keep, move = (x[:, None, None] if getattr(x, "ndim", 0) == 1 else x for x in (keep, move))
                return own.weight * keep, own.direction * move

            found += of_tensors("finish", method, finish)
    if method.advance is not None:

        def advance(momenta: list[Tensor], grads: list[Tensor], directions: list[Tensor]) -> Any:
            own = [x.clone() for x in momenta]
            method.advance(own, grads, directions, numbers(method, 3))
            return own

        found += twice("advance", advance, [random(6, 4)], [random(6, 4)], [random(6, 4)])
        for dtype in (torch.float32, torch.bfloat16):

            def advanced(rates: Mapping[str, Any], dtype: torch.dtype = dtype) -> Any:
                own = [random(64, 4).to(dtype)]
                method.advance(own, [random(64, 5)[:, :4].to(dtype)], [random(64, 4)], rates)
                return own

            found += of_tensors("advance", method, advanced)
    return found


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_methods_are_pure(method: Method) -> None:
    assert problems(method) == []


def test_kinds_of_states_are_known() -> None:
    with pytest.raises(ValueError, match="'side': use one of 'element', 'row', 'parameter'"):
        State("x", "x", each="side")
    assert State("x", "x", "rows×rows", most=5).shape(6, 4) == (0, 0)
    assert State("x", "x", "cols×cols", most=5).shape(6, 4) == (4, 4)
    with pytest.raises(ValueError, match="want whole="):
        replace(MUON, states=(State("x", "x", "rows×rows"),))
    with pytest.raises(ValueError, match="is for methods that work element by element"):
        replace(MUON, states=(State("x", "x", "parameter"),))
