"""What griffe, which reads the sources for mkdocstrings, is told of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

API = Path(__file__).parent / "reference" / "api.md"


class Names(griffe.Extension):
    """A function hides the module of its name, as in the package: `compile_muon.initialize` is to be called."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Put the functions in place of the modules."""
        for name, module in list(pkg.modules.items()):
            if not module.is_alias:
                self.on_package(pkg=module)
            if name in module.functions:
                pkg.set_member(name, griffe.Alias(name, module.functions[name], parent=pkg))


class Roles(griffe.Extension):
    """Roles of Sphinx as Markdown: :class:`Config` is a link to what the page on the API has, and code otherwise."""

    _ROLE = re.compile(r":(?:attr|class|func|meth|mod):`~?([^`]+)`")

    def __init__(self) -> None:
        names = re.findall(r"^::: (\S+)$", API.read_text(encoding="utf-8"), re.MULTILINE)
        self.known = {name.rpartition(".")[2]: name for name in names}

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = self._ROLE.sub(self._markdown, obj.docstring.value)

    def _markdown(self, found: re.Match[str]) -> str:
        known = self.known.get(found[1].rpartition(".")[2])
        return f"`{found[1]}`" if known is None else f"[`{found[1]}`][{known}]"
