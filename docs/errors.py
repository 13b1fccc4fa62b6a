"""docs/reference/messages.md, the list of errors and warnings, from the sources: `python docs/errors.py` renews it.

A message is what a call to an exception's class, to `config_error`, to `warn_user` or to a logger's `warning` is given,
and what is given to a function that makes an error and is raised; in a file that calls `refuse`, each tuple of five,
and each `Why`; and each `Rule` of a step. What is inserted at run time is "…", one word of several too. Names are
followed to what the function assigns to them on the way there, so that of a message in two forms both are listed.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "messages.md"
FOLDERS = {"compile_muon": "compile_muon", "passes": "compile_muon.passes", "kernels": "compile_muon.kernels"}
WARNING = "warning"
GAP = "…"
WIDTH = 72
#: parts of the package, and the page that tells about what they do; longer names come first
ABOUT = {
    "extensions.pipeline": "how-to/pipeline", "extensions.qk_clip": "how-to/methods",
    "integrations.accelerate": "how-to/accelerate", "integrations.context_parallel": "how-to/sequence",
    "integrations.lightning": "how-to/lightning", "integrations.torchtitan": "how-to/torchtitan",
    "model.views": "how-to/methods", "passes.dynamo.logits": "how-to/methods", "passes.methods": "how-to/methods",
    "weights.adapters": "how-to/peft",
    "agreement": "reference/reliability", "checkpoint": "how-to/checkpoints", "config": "reference/configuration",
    "engine": "why/ledger", "experts": "how-to/meshes", "extensions": "how-to/write-an-extension",
    "files": "how-to/checkpoints", "integrations": "how-to/transformers", "kernels": "reference/kernels",
    "mesh": "how-to/meshes", "model": "reference/limits", "offload": "how-to/offload", "optimizer": "reference/api",
    "passes": "how-to/write-a-pass", "planning": "how-to/planning", "sequence": "how-to/sequence",
    "weights": "how-to/weights", "": "start/troubleshooting",
}  # fmt: skip
_MOST = 6  # forms of a message

#: no message of their own: they end a function, or are caught where they are raised
_SILENT = {"StopIteration", "SystemExit", "KeyboardInterrupt", "_Reached"}


@dataclass(frozen=True, order=True)
class Message:
    """What a user may see.

    Args:
        text: with "…" for what is inserted.
        kind: the class, or "warning".
        module: that makes it.
        line: of the source, from 1.
    """

    text: str
    kind: str
    module: str
    line: int = field(compare=False)


def messages() -> list[Message]:
    """All of them, in the order of their words."""
    found = {message for module, source in sources().items() for message in of_source(source, module)}
    return sorted(found, key=lambda message: (_words(message.text).lower(), message))


@cache
def of_source(source: str, module: str) -> tuple[Message, ...]:
    """Those that one file makes."""
    return tuple(_made(ast.parse(source), module))


def _made(tree: ast.Module, module: str) -> Iterator[Message]:
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    blocks = _blocks(tree, ())
    refuses = any(isinstance(node, ast.Name) and node.id in ("Refusal", "refuse") for node in ast.walk(tree))
    for scope, names in _scopes(tree, _assigned(tree.body)):
        reader = _Reader(names, functions, blocks)
        for node in _own(scope):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and not _kind(node.exc):
                made = node.exc
                name = _name(made.func)
                if name in _SILENT or not made.args:
                    continue
                texts = reader.joined(made.args, ": ")
                yield from (Message(text, "error", module, made.lineno) for text in texts if _words(text))
            elif isinstance(node, ast.Call) and (kind := _kind(node)):
                yield from (Message(text, kind, module, node.lineno) for text in reader.said(node) if _words(text))
            elif refuses and isinstance(node, ast.Tuple) and len(node.elts) == 5:
                texts = reader.joined([node.elts[1], *node.elts[3:]], f" = {GAP}: ", "; ")
                yield from (Message(text, "ConfigError", module, node.lineno) for text in texts if _words(text))


def unlisted(sources: Mapping[str, str]) -> list[str]:
    """Where something new is raised of which no words are listed: module and function.

    What a function returns or raises is listed where that function makes it.

    Args:
        sources: by module.
    """
    trees = {module: ast.parse(source) for module, source in sources.items()}
    functions = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = []
    for module, tree in trees.items():
        listed = {message.line for message in of_source(sources[module], module)}
        for scope, _ in _scopes(tree, {}):
            for node in _own(scope):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.lineno not in listed:
                    name = _name(node.exc.func)
                    if name not in functions | _SILENT and node.exc.args:
                        found.append(f"{module}.{getattr(scope, 'name', '')}")
    return found


def sources() -> dict[str, str]:
    """What is read, by module."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            module = ".".join((package, *(part for part in parts if part != "__init__")))
            found[module] = path.read_text(encoding="utf-8")
    return found


def _kind(call: ast.Call) -> str:
    """The class of what a call makes; "" if it is none of them."""
    name = _name(call.func)
    if name in ("config_error", "contradiction", "Why"):
        return "ConfigError"
    if name == "Rule":
        return "LedgerError"
    if name in ("warn_user", "warn", "warning"):
        return WARNING
    return name if re.fullmatch(r"_?[A-Z]\w*(Error|Warning|Attention)", name) else ""


def _name(called: ast.expr) -> str:
    """The last part of it."""
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _words(text: str) -> str:
    """The fixed words, from the first letter on."""
    return re.sub(r"^[^A-Za-z]+", "", text.replace(GAP, " ")).strip()


# ------------------------------------------------------------------------------------------------------- what is said


class _Reader:
    """Expressions to the texts they may be."""

    def __init__(self, names: Names, functions: Mapping[str, ast.FunctionDef], blocks: Blocks) -> None:
        self._names = names
        self._functions = functions
        self._blocks = blocks
        self._under_way: set[str] = set()

    def said(self, call: ast.Call) -> list[str]:
        """Of an exception, `config_error(field, value, problem, remedy)` or what makes one of fewer arguments."""
        if _name(call.func) == "contradiction":
            return self._about(call.args[0], call.args[1:])
        if _name(call.func) == "Why":
            return [f"{GAP} = {GAP}: {text}" for text in self.joined(call.args, "; ")]
        if _name(call.func) == "Rule":  # a row of the step's table
            texts = self.joined(call.args[2:4], f": nothing was updated in step {GAP}; ")
            return [_tidy(re.sub(r"{\w+}", GAP, text)) for text in texts]
        if _name(call.func) != "config_error":
            texts = (self.texts(arg) for arg in call.args)  # an OSError begins with a number
            return next((found for found in texts if any(map(_words, found))), [])
        values = {keyword.arg: keyword.value for keyword in call.keywords}
        given = [*call.args, *(values[name] for name in ("problem", "remedy") if name in values)]
        if starred := [arg for arg in given if isinstance(arg, ast.Starred)]:
            pairs = [node for arg in starred for node in self._rows(arg.value)]
            return [f"{GAP} = {GAP}: {'; '.join(pair)}" for pair in pairs]
        return self._about(given[0], given[2:]) if len(given) > 2 else []

    def _about(self, field: ast.expr, parts: Sequence[ast.expr]) -> list[str]:
        known = self._facts(self.texts(field)) != [GAP]
        return self.joined([field if known else _UNKNOWN, *parts], f" = {GAP}: ", "; ")

    def joined(self, parts: Sequence[ast.expr], first: str, then: str = ": ") -> list[str]:
        """All combinations of what the parts may be; parts that one statement assigns are chosen together."""
        choices = [self._choices(part) for part in parts]
        rows = [{id(row) for row, _ in each} for each in choices]

        def meet(chosen: tuple[tuple[ast.AST | None, str], ...]) -> bool:
            """Whether no part is of another row than one that assigns it too."""
            own = [id(row) for row, _ in chosen if row is not None]
            return all(row is None or not rows[n].intersection(own) - {id(row)} for n, (row, _) in enumerate(chosen))

        found = []
        for chosen in itertools.islice(filter(meet, itertools.product(*choices)), _MOST):
            text = chosen[0][1]
            for number, (_, part) in enumerate(chosen[1:]):
                text += (first if number == 0 else then) + part
            found.append(_tidy(text))
        return found

    def _choices(self, part: ast.expr) -> list[tuple[ast.AST | None, str]]:
        """The texts of a part, each with the row that assigns it if the part is a name."""
        if not isinstance(part, ast.Name) or part.id in self._under_way:
            return [(None, text) for text in self.texts(part)]
        self._under_way.add(part.id)
        found = [(each.row, text) for each in self._reaching(part) for text in self.texts(each.value)]
        self._under_way.remove(part.id)
        return found or [(None, GAP)]

    def _reaching(self, use: ast.Name, name: str = "") -> list[Assigned]:
        """What a name, or the list called so, may have at `use`: what no later assignment on its way replaces."""
        values = self._names.get(name or use.id, [])
        if inside := [each for each in values if isinstance(each.by, _COMPREHENSIONS) and _within(use, each.by)]:
            return inside
        block = self._blocks[id(use)]
        values = [each for each in values if not isinstance(each.by, _COMPREHENSIONS)]
        before = [each for each in values if _start(each.by) < _start(use) and self._leads(each.by, block)]
        around = [(each.by, self._blocks[id(each.by)]) for each in before]
        sure = [by for by, its in around if its == block[: len(its)]]
        branches = [its[-1] for _, its in around if its and its[:-1] == block[: len(its) - 1]]
        sure += [node for node, branch in branches if branch == "body" and (node, "orelse") in branches]
        if sure and not name:
            last = max(sure, key=_start)
            before = [each for each in before if each.by is last or _start(each.by) > _start(last)]
        return before or values

    def _leads(self, by: ast.AST, to: Block) -> bool:
        """Whether control may go on from a statement to the block: none of its own ends or excludes it."""
        for depth, (node, branch) in enumerate(self._blocks[id(by)]):
            if to[depth : depth + 1] == ((node, branch),):
                continue
            if len(to) > depth and to[depth][0] is node and isinstance(node, ast.If):
                return False
            return not isinstance(getattr(node, branch)[-1], (ast.Raise, ast.Return))
        return True

    @staticmethod
    def _facts(texts: list[str]) -> list[str]:
        """Alternatives that are a word each, as names and places are, count as filled in."""
        return texts if len(texts) < 2 or any(" " in text for text in texts) else [GAP]

    def _rows(self, node: ast.expr) -> list[list[str]]:
        """Problem and remedy of each row of a table that errors are made of."""
        rows = [row for name in self._names.values() for each in name for row in ast.walk(each.value)]
        found = []
        for row in rows:
            if isinstance(row, ast.Tuple) and len(row.elts) >= 3:
                texts = [self.texts(part)[0] for part in row.elts[-2:]]
                if all(_words(text) for text in texts):
                    found.append(texts)
        return found

    def texts(self, node: ast.expr) -> list[str]:
        """What an expression may be, "…" where nothing is known."""
        if isinstance(node, ast.Constant):
            return [node.value if isinstance(node.value, str) else GAP]
        if isinstance(node, ast.JoinedStr):
            return self._all(node.values)
        if isinstance(node, ast.FormattedValue):
            return self._facts([text if _words(text) else GAP for text in self.texts(node.value)])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._all([node.left, node.right])
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body), *self.texts(node.orelse)][:_MOST]
        if isinstance(node, ast.BoolOp):
            return [text for value in node.values for text in self.texts(value)][:_MOST]
        if isinstance(node, ast.Name):
            return self._named(node)
        if isinstance(node, ast.Call):
            return self._called(node)
        return [GAP]

    def _called(self, call: ast.Call) -> list[str]:
        """What a function of the file returns; of `listed(problems)` and `"; ".join(problems)` the elements."""
        made = self._functions.get(_name(call.func))
        if made is not None and not call.args:
            reader = _Reader(_assigned(made.body), {}, self._blocks)
            returned = [node.value for node in _own(made) if isinstance(node, ast.Return) and node.value is not None]
            return [text for value in returned for text in reader.texts(value) if _words(text)] or [GAP]
        lists = [arg for arg in call.args if isinstance(arg, ast.Name)]
        return [text for each in lists for text in self._named(each, f"{each.id}[]") if _words(text)] or [GAP]

    def _named(self, use: ast.Name, name: str = "") -> list[str]:
        if (name or use.id) in self._under_way:
            return [GAP]
        self._under_way.add(name or use.id)
        found = [text for each in self._reaching(use, name) for text in self.texts(each.value)]
        self._under_way.remove(name or use.id)
        return list(dict.fromkeys(found)) or [GAP]

    def _all(self, parts: Iterable[ast.expr]) -> list[str]:
        choices = [self.texts(part) for part in parts]
        return list(dict.fromkeys("".join(chosen) for chosen in itertools.islice(itertools.product(*choices), _MOST)))


def _tidy(text: str) -> str:
    return re.sub(rf"{GAP}(?:\s*{GAP})+", GAP, re.sub(r"\s+", " ", text)).strip()


# ------------------------------------------------------------------------------------------------------- names


class Assigned(NamedTuple):
    """A value of a name."""

    value: ast.expr
    row: ast.AST  # that assigns this name, and perhaps others, together
    by: ast.AST  # the statement or comprehension


Names = dict[str, list[Assigned]]
#: the branches around a node, from the outermost: what branches, and the field with the statements
Block = tuple[tuple[ast.AST, str], ...]
Blocks = dict[int, Block]
_UNKNOWN = ast.Constant(None)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


def _blocks(node: ast.AST, block: Block) -> Blocks:
    """The block of each node, by its id."""
    found = {id(node): block}
    for name, value in ast.iter_fields(node):
        children = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)]
        inner = (*block, (node, name)) if children and isinstance(children[0], ast.stmt) else block
        for child in children:
            found |= _blocks(child, inner)
    return found


def _start(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _within(node: Any, outer: Any) -> bool:
    return _start(outer) <= _start(node) < (outer.end_lineno, outer.end_col_offset)


def _scopes(tree: ast.Module, outer: Names) -> Iterator[tuple[ast.AST, Names]]:
    """The module and its functions, each with what names are assigned there and around it."""
    yield tree, outer
    waiting: list[tuple[ast.AST, Names]] = [(tree, outer)]
    while waiting:
        scope, names = waiting.pop()
        for node in _own(scope, into=(ast.FunctionDef, ast.AsyncFunctionDef)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = {each.arg for each in (*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs)}
                own = {name: values for name, values in names.items() if name not in arguments}
                own |= _assigned(node.body)
                yield node, own
                waiting.append((node, own))


def _own(scope: ast.AST, into: tuple[type[ast.AST], ...] = ()) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it, which come alone if they are asked for."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if into:
                yield child
            continue
        yield child
        yield from _own(child, into)


def _assigned(body: Sequence[ast.stmt]) -> Names:
    """Name -> the expressions that are assigned to it, also as a part of a tuple or of rows that are looped over.

    At "name[]" are those that a list of that name gets.
    """
    found: Names = {}

    def note(target: ast.expr, value: ast.expr, by: ast.AST, row: ast.AST | None = None) -> None:
        row = row or value
        if isinstance(target, ast.Name):
            found.setdefault(target.id, []).append(Assigned(value, row, by))
            elements = [value.elt] if isinstance(value, (ast.ListComp, ast.GeneratorExp)) else []
            for each in value.elts if isinstance(value, ast.List) else elements:
                found.setdefault(f"{target.id}[]", []).append(Assigned(each, row, by))
        elif isinstance(target, ast.Tuple):
            alike = isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)
            for one, other in zip(target.elts, value.elts if alike else [_UNKNOWN] * len(target.elts), strict=True):
                note(one, other, by, row)

    within = [statement for statement in body if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for node in itertools.chain.from_iterable((statement, *_own(statement)) for statement in within):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                note(target, node.value, node)
        elif isinstance(node, ast.AugAssign):
            before = found.get(ast.unparse(node.target), [])
            if before and not isinstance(node.value, (ast.List, ast.ListComp)):
                before[-1] = before[-1]._replace(value=ast.BinOp(before[-1].value, ast.Add(), node.value))
            else:
                note(node.target, node.value, node)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            note(node.target, node.value, node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            if isinstance(node.func.value, ast.Name):
                found.setdefault(f"{node.func.value.id}[]", []).extend(Assigned(arg, arg, node) for arg in node.args)
        elif isinstance(node, (ast.For, *_COMPREHENSIONS)):
            for loop in [node] if isinstance(node, ast.For) else node.generators:
                rows = loop.iter.elts if isinstance(loop.iter, (ast.Tuple, ast.List)) else [_UNKNOWN]
                for row in rows:
                    note(loop.target, row, node)
                found.setdefault("", []).append(Assigned(loop.iter, loop.iter, node))
    return found


# ------------------------------------------------------------------------------------------------------- the page


def page() -> str:
    """The page, as the sources have it."""
    found = messages()
    lines = [
        "# Messages",
        "",
        "What does an error or a warning say, and which page tells more?",
        "",
        f"{len({message.text for message in found})} messages, in the order of their first fixed words; … stands for "
        "names, values and what follows. Search for some words of yours. Settings have the names that you wrote: `lr` "
        "here is `optimizer.params.lr` in an error about a config. `python docs/errors.py` makes this page from the "
        "sources. By symptom: [troubleshooting](../start/troubleshooting.md).",
    ]
    for letter, group in itertools.groupby(found, key=lambda message: _words(message.text)[0].upper()):
        lines += ["", f"## {letter}", "", "| message | kind | more |", "|---|---|---|"]
        rows = dict.fromkeys((_cut(m.text), m.kind, _about(m.module.removeprefix("compile_muon."))) for m in group)
        lines += [f"| {_code(text)} | {kind} | {more} |" for text, kind, more in rows]
    return "\n".join(lines) + "\n"


def _about(module: str) -> str:
    """Return a link to the page about a part of the package."""
    page = next(page for part, page in ABOUT.items() if not part or f"{module}.".startswith(f"{part}."))
    folder, _, name = page.partition("/")
    return f"[{name.replace('-', ' ')}]({'' if folder == 'reference' else f'../{folder}/'}{name}.md)"


def _cut(text: str) -> str:
    """Return the first words, with no command in part."""
    if len(text) <= WIDTH:
        return text
    first = text[:WIDTH].rpartition(" ")[0]
    return f"{first if first.count('`') % 2 == 0 else first.rpartition('`')[0].rstrip()} {GAP}"


def _code(text: str) -> str:
    marks = "``" if "`" in text else "`"
    room = " " if text[0] == "`" or text[-1] == "`" else ""
    return f"{marks}{room}{text}{room}{marks}".replace("|", "\\|")


def main() -> int:
    """Renew the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
