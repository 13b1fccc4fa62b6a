"""The files of the golden gate: read, written anew, and compared in words."""

import hashlib
import importlib.util
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from captures import CELLS, Uneven, graphs_of
from digests import differences

from compile_muon import Checkpointer, MuonZero

FOLDER = Path(__file__).parent
WRITE = "python tests/golden --write"
#: of checkpoints: settings by name
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "muon": {},
    "normuon, lion": {"method": "normuon", "auxiliary": "lion"},
    "soap": {"method": "soap"},
    "muown": {"method": "muown"},
    "adamuon, momenta in 8 bits": {"method": "adamuon", "momentum_dtype": "8bit"},
    "masters": {"param_dtype": torch.bfloat16, "offload": {"device": "cpu", "masters": True}},
}

Part = dict[str, Any]


def graphs(cells: Mapping[str, Any] = CELLS) -> Part:
    """Summaries of lowered graphs by cell and graph."""
    return {f"{name} | {title}": entry for name, cell in cells.items() for title, entry in graphs_of(cell).items()}


def checkpoints() -> Part:
    """Names, shapes and dtypes of what a checkpoint holds, its files, and the keys of its manifest."""
    contents = {}
    for name, settings in CHECKPOINTS.items():
        torch.manual_seed(0)
        model = Uneven()
        optimizer = MuonZero(model, ns_dtype="float32", **settings)
        model(torch.arange(10).reshape(2, 5)).square().mean().backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            Checkpointer(folder).save(1, model, optimizer, done=1)
            manifest = json.loads((Path(folder) / "step-1" / "manifest.json").read_text())
        tensors = {key: f"{fact['dtype']}{fact['shape']}" for key, fact in manifest["tensors"].items()}
        files = {f"file {name}": "" for name in manifest["files"]}
        groups = {f"group {group['name']}": sorted(group) for group in optimizer.state_dict()["param_groups"]}
        fields = {"manifest": sorted(manifest), "version": manifest["version"], "algorithms": manifest["algorithms"]}
        contents[name] = {**fields, **files, **groups, **tensors}
    return contents


def messages() -> Part:
    """Number and digest of messages by kind; docs/reference/messages.md has their words."""
    path = FOLDER.parents[1] / "docs" / "errors.py"
    spec = importlib.util.spec_from_file_location("docs_errors", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    kinds = defaultdict(list)
    for message in module.messages():
        kinds[message.kind].append(message.text)
    return {kind: [len(t), hashlib.sha256("\n".join(t).encode()).hexdigest()[:8]] for kind, t in sorted(kinds.items())}


PARTS: dict[str, Callable[[], Part]] = {"graphs": graphs, "checkpoints": checkpoints, "messages": messages}


def stored(part: str) -> Part:
    """The contents of a part's file."""
    path = FOLDER / f"{part}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def another_torch() -> str:
    """The reason why stored graphs say nothing here; "" where they do."""
    writer, here = stored("graphs").get("torch"), torch.__version__.partition("+")[0]
    return "" if writer == here else f"stored graphs are those of torch {writer}, here is {here}"


def write(part: str, values: Part) -> None:
    """Write a part, an entry a line: a diff shows those that changed."""
    if part == "graphs":
        values = {"torch": torch.__version__.partition("+")[0], **values}
    lines = [f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in values.items()]
    (FOLDER / f"{part}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def words(part: str, old: Part, new: Part) -> list[str]:
    """Differences, a line each; graphs of a cell in which the same changed stand together."""
    before, after = ({key.partition(" | ")[0] for key in values} for values in (old, new))
    graphs_by_text: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key in dict.fromkeys([*old, *new]):
        cell, _, graph = key.partition(" | ")
        if key not in old or key not in new:
            whole = cell not in before & after
            graphs_by_text[cell, "is new" if key in new else "is gone"] += [] if whole else [graph]
        elif old[key] != new[key]:
            for text in _SAID[part](old[key], new[key]):
                graphs_by_text[cell, text].append(graph)
    return [f"{', '.join([cell, *filter(None, graphs)])}: {text}" for (cell, text), graphs in graphs_by_text.items()]


def _of_checkpoint(old: Part, new: Part) -> list[str]:
    said = [f"{key}: {new[key]}, not {old[key]}" for key in old if key in new and new[key] != old[key]]
    said += [f"{key} is gone" for key in old if key not in new]
    return said + [f"{key} is new" for key in new if key not in old]


def _of_messages(old: list[Any], new: list[Any]) -> list[str]:
    change = new[0] - old[0]
    return [f"{change:+d} messages" if change else "the words of some of them (python docs/errors.py lists them)"]


_SAID: dict[str, Callable[[Any, Any], list[str]]] = {
    "graphs": differences,
    "checkpoints": _of_checkpoint,
    "messages": _of_messages,
}
