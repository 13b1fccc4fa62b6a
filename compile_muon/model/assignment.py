"""Assignment of each parameter to Muon, AdamW or "frozen", with a reason. The first rule that matches decides:

1. A parameter that needs no gradient is "frozen".
2. ``param.use_muon = True | False``, set on the parameter itself.
3. ``muon_params``: a predicate ``f(name, param)`` or fnmatch patterns. They choose among trainable parameters of two or
   more dimensions; all others go to AdamW, and the rules below are not consulted.
4. Vectors and scalars: AdamW. So do vectors in disguise: matrices with a single row or column, biases of a stack of
   experts, scales of a norm over several dimensions, and the ``A_log`` of state space models.
5. The weight of an ``nn.Embedding`` or ``nn.EmbeddingBag``, wherever else it is tied: AdamW.
6. The output head: AdamW. A head is the result of ``get_output_embeddings()`` (Hugging Face), or a module named like a
   head. ``lm_head``, ``unembed``, ``embed_out`` ... name a head at any depth; ``head``, ``classifier``, ``score``,
   ``fc``, ``output`` ... only at the top of the model (or of a Hugging Face model inside it), because BERT's blocks
   hold an ``output`` too. Inside a head made of several modules only the last layer is the head. The last layer of a
   plain ``nn.Sequential`` model is the head where other matrices come before it.
7. Bare token and position tables: parameters held directly by a module that is no linear layer, convolution or
   attention, and named like a table (``pos_embed``, ``cls_token``, ``relative_position_bias_table``) or with a leading
   dimension of 1: AdamW.
8. Everything else is a hidden matrix: Muon. LoRA factors and the routers of mixtures of experts are among them.

Matrix shapes: convolutions are [dim 0, the rest] (out channels first; in channels first for transposed ones), other 3-D
parameters one matrix per index of dim 0, other parameters of more dimensions [dim 0, the rest].
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from compile_muon.config import accept
from compile_muon.errors import config_error
from compile_muon.model.heads import output_heads, word_set, words
from compile_muon.passes.language.views import View
from compile_muon.passes.methods import MatrixMethod, Method

MuonParams = Callable[[str, nn.Parameter], Any] | Sequence[str] | None

#: Words in the name of a bare parameter that say it is a table of vectors.
_TABLE_WORDS = word_set(
    """pos position positions positional embed embeds embedding embeddings emb wpe wte token tokens cls register
    registers latent latents codebook table prompt prompts probe"""
)
#: Last words of a name that mark a weight although a word of `_TABLE_WORDS` is in it, e.g. `pos_proj`.
_WEIGHT_WORDS = word_set("weight weights proj projection kernel matrix down up gate")
#: Elementwise parameters that only look like matrices (the state decay of state space models).
_ELEMENTWISE_NAMES = frozenset({"A_log"})


@dataclass(frozen=True)
class Assignment:
    """The method that trains one parameter, and why."""

    name: str  # canonical, as in `model.named_parameters()`
    algorithm: str  # name of the method, or "frozen"
    reason: str  # one line for people
    matrix: tuple[int, int, int] | None  # (batch, rows, cols) for Newton-Schulz and the lr scale; matrix methods only
    vector: bool = False  # weight decay counts it as a vector: norms, biases, vectors in disguise
    undecayed: bool = False  # `param._no_weight_decay = True`, as state space models set it
    view: View | None = None  # cuts the matrix into parts that are orthogonalized one by one; None for all of it
    fetched: bool = False  # graphs fetch the momentum, which is not resident
    master_offloaded: bool = False  # the master weight is offloaded, if the parameter computes in a lower dtype

    def decays(self, *, vectors: bool) -> bool:
        """Return whether weight decay applies; `vectors`: whether vectors that are no matrices decay."""
        return not self.undecayed and (self.matrix is not None or vectors or not self.vector)


@dataclass(frozen=True)
class _Use:
    """A module that holds a parameter; with a parametrization between the two, the parametrized module."""

    name: str
    module_name: str
    module: nn.Module

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


def assign(
    model: nn.Module,
    muon_params: MuonParams = None,
    *,
    use_muon: bool = True,
    partial: bool = False,
    chosen: Mapping[str, tuple[Method, str]] | None = None,
    methods: tuple[str, str] = ("muon", "adamw"),
) -> dict[str, Assignment]:
    """Decide for every parameter of ``model``, in the order and under the names of ``model.named_parameters()``.

    Tied parameters appear once; every module that holds them is examined. The model is not changed. ``use_muon=False``
    gives everything trainable to AdamW. ``partial`` allows a model without a matrix for Muon, such as a pipeline stage;
    another one raises. ``chosen`` maps names to a method and its reason, ahead of all rules but the first; ``methods``
    replaces Muon and AdamW in the result of the rules.

    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> [(a.name, a.algorithm) for a in assign(model).values() if a.algorithm == "muon"]
    [('1.weight', 'muon')]
    """
    uses_by_id = _uses(model)
    parameters = dict(model.named_parameters())
    if use_muon:
        selected, heads = _choose(parameters, uses_by_id, muon_params), output_heads(model)
        result = {
            name: _decide(name, param, uses_by_id[id(param)], heads, selected) for name, param in parameters.items()
        }
    else:
        frozen, trained_by = ("frozen", "requires_grad is False"), ("adamw", "optimizer.type is AdamW")
        result = {
            name: Assignment(name, *(trained_by if param.requires_grad else frozen), None)
            for name, param in parameters.items()
        }
    for name, (method, reason) in (chosen or {}).items():
        result[name] = _by_group(name, parameters[name], uses_by_id[id(parameters[name])], method, reason)
    for name, param in parameters.items():
        undecayed, uses = bool(getattr(param, "_no_weight_decay", False)), uses_by_id[id(param)]
        vector = param.ndim < 2 or bool(_elementwise(uses) or _vector(param, _matrix(param, uses)))
        result[name] = replace(result[name], vector=vector, undecayed=undecayed)
    trained = [a for a in result.values() if a.algorithm != "frozen"]
    # No error while frozen matrices remain: a backbone may be unfrozen once its new head is trained.
    may_unfreeze = muon_params is None and any(
        a.algorithm == "frozen" and parameters[a.name].ndim > 1 for a in result.values()
    )
    if use_muon and not any(a.matrix for a in trained) and not (trained and (partial or may_unfreeze)):
        _raise_no_muon(result, muon_params)
    by_rule = dict(zip(("muon", "adamw"), methods, strict=True))
    return {
        name: a if chosen and name in chosen else replace(a, algorithm=by_rule.get(a.algorithm, a.algorithm))
        for name, a in result.items()
    }


def _by_group(name: str, param: nn.Parameter, uses: Sequence[_Use], method: Method, reason: str) -> Assignment:
    if not isinstance(method, MatrixMethod):
        return Assignment(name, method.name, reason, None)
    if param.ndim < 2 or not param.numel():
        problem = f"is for matrices, and {reason} holds {name}, {list(param.shape)}"
        raise config_error("method", method.name, problem, "leave it out of the group")
    return Assignment(name, method.name, reason, _matrix(param, uses))


# -------------------------------------------------------------------------------------- the decision


def _decide(
    name: str, param: nn.Parameter, uses: Sequence[_Use], heads: Mapping[int, str], chosen: Mapping[str, str] | None
) -> Assignment:
    """Apply the rules of the module docstring in their order."""

    def adamw(reason: str) -> Assignment:
        return Assignment(name, "adamw", reason, None)

    if not param.requires_grad:
        return Assignment(name, "frozen", "needs no gradient (requires_grad=False)", None)
    override = _use_muon(name, param)
    if override is not None:
        if not override:
            return adamw("param.use_muon = False")
        return Assignment(name, "muon", "param.use_muon = True", _matrix(param, uses))
    if param.ndim < 2:
        return adamw("vector" if param.ndim else "scalar")
    if chosen is not None:
        if name in chosen:
            return Assignment(name, "muon", chosen[name], _matrix(param, uses))
        return adamw("not selected by muon_params")

    matrix = _matrix(param, uses)
    reasons = (_elementwise(uses), _embedding(uses), heads.get(id(param)), _table(param, uses), _vector(param, matrix))
    if reason := next(filter(None, reasons), None):
        return adamw(reason)
    return Assignment(name, "muon", _hidden(matrix, uses), matrix)


def _use_muon(name: str, param: nn.Parameter) -> bool | None:
    override = getattr(param, "use_muon", None)
    if override is None:
        return None
    if accept.boolean(f"{name}.use_muon", override) and (param.ndim < 2 or not param.numel()):
        shape = list(param.shape)
        raise config_error(f"{name}.use_muon", override, f"shape {shape} is not a matrix", "leave it to AdamW")
    return bool(override)


def _matrix(param: nn.Parameter, uses: Sequence[_Use]) -> tuple[int, int, int]:
    if param.ndim == 2:
        return (1, param.shape[0], param.shape[1])
    if param.ndim == 3 and not any(_is_conv(use.module) for use in uses):
        return (param.shape[0], param.shape[1], param.shape[2])
    return (1, param.shape[0], math.prod(param.shape[1:]))


def _elementwise(uses: Sequence[_Use]) -> str | None:
    for use in uses:
        # A norm by its class: torch's, or any SomethingNorm, SomethingNorm2d.
        if type(use.module).__name__.rstrip("123d").lower().endswith("norm"):
            return f"elementwise {use.leaf} of a {type(use.module).__name__}"
        if words(use.leaf)[-1:] in (["bias"], ["biases"]):
            return f"bias vectors {use.leaf}"
        if use.leaf in _ELEMENTWISE_NAMES:
            return f"elementwise parameter {use.leaf}, not a linear map"
    return None


def _vector(param: nn.Parameter, matrix: tuple[int, int, int]) -> str | None:
    shape = list(param.shape)
    if not param.numel():
        return f"empty: shape {shape}"
    return f"vector in disguise: shape {shape}" if min(matrix[1:]) == 1 else None


def _embedding(uses: Sequence[_Use]) -> str | None:
    for use in uses:
        if isinstance(use.module, (nn.Embedding, nn.EmbeddingBag)):
            others = ", ".join(other.name for other in uses if other is not use)
            return f"embedding table of {use.module_name or 'the model'}" + (f", tied to {others}" if others else "")
    return None


def _table(param: nn.Parameter, uses: Sequence[_Use]) -> str | None:
    for use in uses:
        if isinstance(use.module, (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear)):
            continue  # a weight by the module's type, whatever its name
        parts = words(use.leaf)
        if isinstance(use.module, (nn.ParameterList, nn.ParameterDict)):  # pos_embeds.0 is named by its list
            parts = words(use.module_name.rpartition(".")[2])
        if use.leaf == "weight":  # class ScaledEmbedding(nn.Module): self.weight = nn.Parameter(...)
            kind = set(words(type(use.module).__name__))
            if kind & {"embed", "embedding", "embeddings"} and "patch" not in kind:
                return f"bare table of a {type(use.module).__name__}"
        elif set(parts) & _TABLE_WORDS and parts[-1] not in _WEIGHT_WORDS:
            return f"bare token or position table {use.leaf}"
        if param.ndim >= 3 and param.shape[0] == 1 and "expert" not in use.name.lower():
            return f"bare table: leading dimension of 1 in shape {list(param.shape)}"
    return None


def _hidden(matrix: tuple[int, int, int], uses: Sequence[_Use]) -> str:
    use = uses[0]
    kind = type(use.module).__name__
    batch, rows, cols = matrix
    if batch > 1:
        return f"stack of {batch} hidden {rows}x{cols} matrices ({kind})"
    if _is_conv(use.module):
        return f"convolution seen as {rows}x{cols} ({kind})"
    return f"hidden {rows}x{cols} matrix ({kind})"


def _raise_no_muon(result: Mapping[str, Assignment], muon_params: MuonParams) -> None:
    if all(a.algorithm == "frozen" for a in result.values()):
        raise config_error(
            "model", sorted(result)[:4], "has no trainable parameter", "set requires_grad, before compile_muon sees it"
        )
    matrices = {
        a.name: a.reason for a in result.values() if a.algorithm != "frozen" and a.reason not in ("vector", "scalar")
    }
    field, value = ("model", matrices) if muon_params is None else ("muon_params", muon_params)
    remedy = "set param.use_muon = True on a matrix, widen muon_params, or use torch.optim.AdamW"
    raise config_error(field, value, "no parameter would be trained by Muon", remedy)


# ----------------------------------------------------------------------------------------- selection


def _choose(
    parameters: Mapping[str, nn.Parameter], uses: Mapping[int, Sequence[_Use]], muon_params: MuonParams
) -> dict[str, str] | None:
    """Return the names that ``muon_params`` selects, each with its reason; None without ``muon_params``."""
    if muon_params is None:
        return None
    matrices = {n: p for n, p in parameters.items() if p.requires_grad and p.ndim >= 2 and p.numel()}
    if callable(muon_params):
        return {name: "selected by muon_params" for name, param in matrices.items() if muon_params(name, param)}
    chosen: dict[str, str] = {}
    for pattern in muon_params:
        hits = [n for n, p in matrices.items() if any(fnmatchcase(u.name, pattern) for u in uses[id(p)])]
        if not hits:
            raise _unmatched(pattern, parameters, matrices)
        for name in hits:
            chosen.setdefault(name, f"selected by muon_params pattern {pattern!r}")
    return chosen


def _unmatched(pattern: str, parameters: Mapping[str, nn.Parameter], matrices: Iterable[str]) -> Exception:
    untrained_matches = [name for name in parameters if fnmatchcase(name, pattern)]
    if untrained_matches:
        return config_error(
            "muon_params",
            pattern,
            f"matches only parameters that are frozen or not matrices ({', '.join(untrained_matches[:3])})",
            "match a trainable matrix or drop the pattern",
        )
    nearest = difflib.get_close_matches(pattern, list(matrices), n=3, cutoff=0.0)
    return config_error("muon_params", pattern, "matches no parameter", f"the nearest names are {', '.join(nearest)}")


# ------------------------------------------------------------------------------------- reading a model


def _uses(model: nn.Module) -> dict[int, list[_Use]]:
    """Map the id of each parameter to the modules that hold it, the one with the canonical name first."""
    modules = dict(model.named_modules())
    uses: dict[int, list[_Use]] = {}
    for name, module in modules.items():
        owner_name, owner = name, module
        if isinstance(module, ParametrizationList):  # emb.parametrizations.weight.original belongs to emb
            owner_name = name.rpartition(".parametrizations.")[0] if ".parametrizations." in name else ""
            owner = modules[owner_name]
        for leaf, param in module._parameters.items():
            if param is not None:
                param_name = f"{name}.{leaf}" if name else leaf
                uses.setdefault(id(param), []).append(_Use(param_name, owner_name, owner))
    return uses


def _is_conv(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)
