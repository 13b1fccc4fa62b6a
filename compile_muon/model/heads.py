"""Output heads, which Muon leaves to AdamW: rule 6 of :mod:`compile_muon.model.assignment`."""

from __future__ import annotations

import re

from torch import nn


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


#: Names that mean the output head wherever they stand.
_HEAD_ANYWHERE = word_set("lm_head embed_out unembed unembedding unembedder to_logits output_embeddings vocab_head")
#: Names that mean the output head at the top of a model.
_HEAD_AT_TOP = word_set(
    """head heads output outputs out out_layer output_layer output_proj output_projection classifier cls score logits
    fc fc_out out_fc final final_layer final_proj linear_out readout predictor prediction predictions generator
    decoder proj_out qa_outputs seq_relationship"""
)
#: ... and as the last word of a longer name at the top: `action_head`, `class_labels_classifier`.
_HEAD_LAST_WORD = word_set("head heads classifier logits unembed unembedding")
#: Names of a head only where they are one layer: containers of these names are hidden stacks.
_HEAD_IF_LAYER = word_set("decoder generator output outputs out final fc predictor")


def output_heads(model: nn.Module) -> dict[int, str]:
    """Map the id of each parameter of the output heads of ``model`` to the reason why it belongs to a head."""
    reason_of: dict[int, str] = {}

    def add(module: nn.Module, reason: str) -> None:
        for param in module.parameters():
            reason_of.setdefault(id(param), reason)

    wrapped = [model]
    while (inner := _only_child(wrapped[-1])) is not None:
        wrapped.append(inner)
    # The modules whose children may be heads by a weak name: the model, what it wraps, and Hugging Face models.
    transformers_models = (
        submodule for submodule in model.modules() if callable(getattr(submodule, "get_output_embeddings", None))
    )
    tops = {id(module) for module in (*wrapped, *transformers_models)}
    for name, module in model.named_modules():
        for head in _declared_heads(module):
            add(_last_layer(head, "head") or head, f"output head (get_output_embeddings of {type(module).__name__})")
        top = id(module) in tops
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if child_name in _HEAD_ANYWHERE or (top and _is_head_name(child_name)):
                layer = _last_layer(child, named=child_name)
                if layer is not None:
                    add(layer, f"output head (named {path})")
        for leaf, param in module.named_parameters(recurse=False):
            if leaf in _HEAD_ANYWHERE or (top and _is_head_name(leaf)):
                reason_of.setdefault(id(param), f"output head (named {leaf})")
    layer = _sequential_head(wrapped[-1])
    if layer is not None:
        add(layer, "output head (last layer of the nn.Sequential)")
    return reason_of


def _is_head_name(name: str) -> bool:
    if name in _HEAD_AT_TOP or name in _HEAD_ANYWHERE:
        return True
    parts = words(name)
    return bool(parts) and parts[-1] in _HEAD_LAST_WORD and parts[0] != "pre"  # DistilBert's hidden `pre_classifier`


def _only_child(module: nn.Module) -> nn.Module | None:
    """Return the module that ``module`` merely wraps: its one child with parameters, if it has no parameters itself."""
    parameter = next(module.parameters(recurse=False), None)
    if parameter is not None or isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return None
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    return children[0] if len(children) == 1 else None


def _declared_heads(module: nn.Module) -> list[nn.Module]:
    """Return the modules that a Hugging Face model declares as its output embeddings."""
    getter = getattr(module, "get_output_embeddings", None)
    if not callable(getter):
        return []
    try:
        declared = getter()
    except (NotImplementedError, AttributeError):
        return []
    heads = declared if isinstance(declared, (list, tuple, nn.ModuleList)) else [declared]
    return [head for head in heads if isinstance(head, nn.Module)]


def _last_layer(module: nn.Module, named: str) -> nn.Module | None:
    """Return the layer of a head that makes the output: itself, or the last of a container that is clearly a head."""
    children = [(name, child) for name, child in module.named_children() if _has_matrix(child)]
    if not children:
        return module if _has_matrix(module) and not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else None
    if named in _HEAD_IF_LAYER and not isinstance(module, nn.Sequential):
        return None
    last_name, last = children[-1]
    is_layer = next(last.children(), None) is None
    if is_layer or isinstance(last, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) or _is_head_name(last_name):
        return _last_layer(last, named="head")
    return None


def _sequential_head(module: nn.Module) -> nn.Module | None:
    """Return the last layer of a plain Sequential, if it is a Linear behind other matrices."""
    if type(module) is not nn.Sequential:
        return None
    children = [child for child in module if next(child.parameters(), None) is not None]
    if not children:
        return None
    last, has_earlier_matrix = children[-1], any(_has_matrix(child) for child in children[:-1])
    if type(last) is nn.Sequential:
        return _sequential_head(nn.Sequential(*children[:-1], *last))
    return last if isinstance(last, nn.Linear) and has_earlier_matrix else None


def _has_matrix(module: nn.Module) -> bool:
    return any(param.ndim >= 2 for param in module.parameters())


def words(name: str) -> list[str]:
    """Split a snake_case or CamelCase name into lower-case words."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
