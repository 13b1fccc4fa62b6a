"""Views: parts of a parameter that are orthogonalized one by one, as users say or as the model's modules imply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from compile_muon.config import Config
from compile_muon.config.checked import Mistakes
from compile_muon.config.groups import OF_A_VIEW
from compile_muon.errors import config_error
from compile_muon.model.assignment import Assignment
from compile_muon.model.fused import halves_meet, rows_of
from compile_muon.passes.language.views import View

_KEYS = ("split", "heads", "groups", "dim")


class _Said(NamedTuple):
    """A requested view and its reason; ``value`` is None for a parameter that stays whole for that reason."""

    field: str
    value: Mapping[str, Any] | None
    reason: str


def with_views(config: Config, assignments: Mapping[str, Assignment], model: nn.Module) -> dict[str, Assignment]:
    """Return the assignments with the views of matrices in them. ``param.muon_view`` wins over ``muon_views``, and that
    over the views that ``per_head_muon`` and ``split_fused`` read from the model."""
    named, mistakes = dict(model.named_parameters()), Mistakes()
    requests = dict(_of_modules(config, model)) | dict(_of_patterns(config, assignments, mistakes))
    for name, param in named.items():
        if (attribute := getattr(param, "muon_view", None)) is not None:
            requests[name] = _Said(f"{name}.muon_view", attribute, "param.muon_view")
    result = dict(assignments)
    for name, request in requests.items():
        assignment = assignments[name]
        if assignment.matrix is None:
            if request.reason.startswith("param") and assignment.algorithm != "frozen":
                problem = f"is for matrices, and {assignment.algorithm} trains {name} ({assignment.reason})"
                mistakes.add(config_error(request.field, dict(request.value or {}), problem, "leave it out"))
            continue
        if request.value is None and request.field != f"{name}.muon_view":
            result[name] = replace(assignment, reason=f"{assignment.reason}, {request.reason}")
            continue
        with mistakes.collected():
            view = _checked(name, request, tuple(named[name].shape))
            if view.count > 1:
                reason = f"{assignment.reason}, as {view.count} matrices ({request.reason})"
                result[name] = replace(assignment, view=view, reason=reason)
    mistakes.raise_all()
    return result


def _checked(name: str, request: _Said, shape: tuple[int, ...]) -> View:
    value = request.value
    if not isinstance(value, Mapping) or not set(value) <= set(_KEYS) or not value:
        raise config_error(request.field, value, "is no view", OF_A_VIEW)
    if len(shape) != 2:
        problem = f"is for parameters of two dimensions, and {name} is {list(shape)}"
        raise config_error(request.field, dict(value), problem, "leave it out: a stack is one of matrices already")
    try:
        return View.of(shape[1 if value.get("dim") == 1 else 0], **value)
    except (TypeError, ValueError) as error:
        problem = f"does not fit {name}, {list(shape)}: {error}"
        raise config_error(request.field, dict(value), problem, OF_A_VIEW) from None


def _of_patterns(
    config: Config, assignments: Mapping[str, Assignment], mistakes: Mistakes
) -> Iterator[tuple[str, _Said]]:
    for pattern, view in config.muon_views:
        hits = [name for name, a in assignments.items() if a.matrix is not None and fnmatchcase(name, pattern)]
        if not hits:
            problem = "matches no matrix"
            mistakes.add(config_error(f"muon_views[{pattern}]", dict(view), problem, "match one, or leave it out"))
        for name in hits:
            yield name, _Said(f"muon_views[{pattern}]", dict(view), f"muon_views {pattern!r}")


# ------------------------------------------------------------------------------------------- names of projections

#: last parts of names of projections, by the heads in their rows
_QUERIES = ("q_proj", "query", "q_lin", "q", "wq", "to_q")
_KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value", "k_lin", "v_lin", "k", "v", "wk", "wv", "to_k", "to_v")
#: fused projections: q, k and v one behind the other, and interleaved by key head
_FUSED = ("qkv_proj", "Wqkv", "qkv")
_INTERLEAVED = ("query_key_value",)
_GATED = ("gate_up_proj", "gate_up", "w12")
#: left whole, since their parts are not known: multi-head latent attention, and GPTBigCode
_WHOLE = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "c_attn")


def _of_modules(config: Config, model: nn.Module) -> Iterator[tuple[str, _Said]]:
    if not (config.per_head_muon or config.split_fused):
        return
    verified: dict[tuple[Any, ...], bool] = {}  # running a module is slow, and layers are alike
    for name, module in model.named_modules():
        attention = _Heads.of(module, model)
        for child, inner in module.named_children():
            weight = getattr(inner, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.ndim == 2:
                transposed = type(inner).__name__ == "Conv1D"  # Hugging Face's, which keeps [in, out]
                projection = "qkv_proj" if transposed and child == "c_attn" else child
                rows = weight.shape[1 if transposed else 0]
                view = _known(config, projection, attention, rows)
                field, left_whole = f"{name}.{child}.weight".lstrip("."), child in _WHOLE
                if view is not None and "split" in view:
                    key = (*_facts(module), child, rows, *map(str, view.items()))
                    if key not in verified:
                        verified[key] = _is_cut_so(model, name, child, view, rows)
                    if not verified[key]:
                        view, left_whole = None, True
                if view is None and left_whole:
                    yield field, _Said(field, None, "left whole: its parts are not known")
                if view is not None:
                    reason = "per_head_muon" if "heads" in view else "split_fused"
                    if "split" not in view and attention is not None and rows != view["heads"] * attention.size:
                        reason += f", {rows // view['heads']} rows a head of {attention.size}, with what is beside it"
                    view = {**view, "dim": 1} if transposed else view
                    yield field, _Said(f"{reason} of {name}.{child}", view, reason)
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            width, heads = module.embed_dim, module.num_heads
            view = {"split": [width] * 3, **({"heads": heads} if config.per_head_muon else {})}
            yield f"{name}.in_proj_weight".lstrip("."), _Said(f"in_proj of {name}", view, "nn.MultiheadAttention")


def _facts(module: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for modules which split their projections alike: their class and plain attributes."""
    attributes = {
        name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str, tuple))
    }
    return type(module), *(
        f"{name} {value!r}" for name, value in attributes.items() if name not in ("layer_idx", "layer_id")
    )


def _is_cut_so(model: nn.Module, path: str, child: str, view: Mapping[str, Any], rows: int) -> bool:
    """Return whether the module splits its fused projection as ``view`` says, by running it (`fused.py`)."""
    split, groups = view["split"], view.get("groups", 1)
    if child in _GATED:
        return halves_meet(model, path, child, rows)
    if sum(split) != rows or any(part % groups for part in split):
        return False
    expected, start = [], 0
    for part in split:
        width = part // groups
        expected.append({g * (rows // groups) + start + i for g in range(groups) for i in range(width)})
        start += width
    return rows_of(model, path, child, rows) == expected


class _Heads(NamedTuple):
    """Counts of query and key heads of an attention module, and the size of a head."""

    queries: int
    keys: int
    size: int

    @classmethod
    def of(cls, module: nn.Module, model: nn.Module) -> _Heads | None:
        """Read the heads from the module, or from the configuration it was built from; None if not all are there."""
        config = getattr(module, "config", None) or getattr(model, "config", None)

        def read(*names: str) -> int | None:
            for place in (module, config):
                for name in names:
                    value = getattr(place, name, None)
                    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                        return value
            return None

        queries = read("num_attention_heads", "num_heads", "n_heads", "n_head")
        if queries is None:
            return None
        keys = read("num_key_value_heads", "num_kv_heads", "n_kv_heads") or queries
        width = read("hidden_size", "n_embd", "embed_dim", "dim")
        size = read("head_dim") or (None if width is None else width // queries)
        return None if size is None else cls(queries, keys, size)


def _known(config: Config, child: str, heads: _Heads | None, rows: int) -> dict[str, Any] | None:
    """Return the view of a projection of this name with ``rows`` rows; None where its parts are not known."""
    if child in _GATED and config.split_fused and rows % 2 == 0:
        return {"split": [rows // 2] * 2}
    if heads is None:
        return None
    queries, keys, size = heads
    per_head = config.per_head_muon
    if child in _QUERIES and per_head:
        return {"heads": queries}
    if child in _KEYS_AND_VALUES and per_head:
        return {"heads": keys}
    if child in (*_FUSED, *_INTERLEAVED):
        groups = keys if child in _INTERLEAVED else 1
        split = [queries * size, keys * size, keys * size]
        view: dict[str, Any] = {"split": split, "groups": groups}
        return {**view, "heads": [queries, keys, keys]} if per_head else view
    return None
