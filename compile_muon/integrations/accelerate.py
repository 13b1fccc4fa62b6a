"""Hugging Face Accelerate with ZeRO and Muon.

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = compile_muon.initialize(model.to(accelerator.device), "config.json")
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)

Loop, loaders, schedulers, trackers, folders and plain models stay Accelerate's. A sharded model is not wrapped in DDP;
``accumulate`` keeps gradients on their rank; and methods that read or write the whole model (``get_state_dict``,
``save_model``, ``save_state``, ``load_state``, ``clip_grad_norm_`` for its norm) handle shards.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compile_muon.checkpoint import Checkpointer
from compile_muon.checkpoint.manifest import describe_file
from compile_muon.errors import CheckpointError, listed
from compile_muon.files.disk import open_plain, write_bytes
from compile_muon.integrations.common import WHY, Refusal, is_sharded, refuse
from compile_muon.integrations.same_batches import give_same_batches
from compile_muon.optimizer import MuonZero
from compile_muon.summary import Summary
from compile_muon.weights import full_state_dict, save_pretrained
from compile_muon.weights.adapters import has_adapters
from compile_muon.weights.full import weights_of

_FOLDER = "muon_zero"

#: names of Accelerate's files in the folder of a state
_STATE_FILE = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict|random_states|custom_checkpoint)(_\d+)?"
    r"\.(safetensors|bin|pkl)"
)

#: arguments of Accelerator by which something else shards the model
_SHARDERS = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")


class AcceleratedMuonZero(AcceleratedOptimizer):
    """Accelerate's wrapper of an optimizer: steps and drops gradients only where an accumulation ends.

    ``optimizer`` is the wrapped MuonZero, ``model`` the sharded model that it trains.
    """

    optimizer: MuonZero

    def __init__(self, optimizer: MuonZero, model: nn.Module) -> None:
        super().__init__(optimizer, device_placement=False)
        self.model = model
        self._is_accelerate_prepared = True  # else Accelerator.prepare_optimizer would wrap it again

    def metrics(self) -> dict[str, float]:
        """See :meth:`MuonZero.metrics`; for ``accelerator.log``."""
        return self.optimizer.metrics()

    def totals(self) -> dict[str, int]:
        """See :meth:`MuonZero.totals`."""
        return self.optimizer.totals()

    def summary(self) -> Summary:
        """See :meth:`MuonZero.summary`."""
        return self.optimizer.summary()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """See :meth:`MuonZero.step`. A step that ``nonfinite="skip"`` skips counts as skipped: no scheduler steps."""
        if self.optimizer.config.zero.nonfinite == "error":  # no step is skipped; totals() would wait for the device
            super().step(closure)
            return
        skipped = self.totals()["skipped_steps"]
        super().step(closure)
        self._is_overflow = self.totals()["skipped_steps"] > skipped


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """Prepare sharded models and their optimizers, and other objects, as ``accelerator.prepare`` does.

    Args:
        accelerator: made before the model was sharded. Its ``accumulate``, ``clip_grad_norm_``, ``get_state_dict``,
            ``save_model``, ``save_state`` and ``load_state`` handle the sharded model afterwards.
        objects: in any order, one or several pairs that ``compile_muon.initialize`` returned, and arguments of
            ``accelerator.prepare``: data loaders, schedulers, plain models and their optimizers.
    Returns:
        The prepared objects in their order: the same model, the optimizer as :class:`AcceleratedMuonZero`.
    Raises:
        ConfigError: settings that cannot be honoured, all in one error; nothing was prepared.
    """
    is_patched = isinstance(getattr(accelerator, "_muon_zero", None), _Sharded)
    pairs = _pairs(objects, needed=not is_patched)
    others = [each for each in objects if isinstance(each, torch.optim.Optimizer) and not isinstance(each, MuonZero)]
    remedy = "leave it out: MuonZero trains all parameters of its model"
    rival_kinds = [type(other).__name__ for other in others if any(_trains(other, model) for model, _ in pairs)]
    refuse([
        *refused_settings(accelerator),
        *(row for pair in pairs for row in _refused_pair(accelerator, *pair)),
        *((True, "optimizer", kind, "trains a sharded model too", remedy) for kind in rival_kinds),
    ])  # fmt: skip
    if not is_patched:
        accelerator._muon_zero = _Sharded(accelerator)
    if (mesh := pairs[0][1].engine.mesh if pairs else None) is not None:
        give_same_batches(accelerator, mesh.data_places)
    prepared: dict[int, Any] = {}
    for model, optimizer in pairs:
        # Accelerate wraps models in DDP for training, but not for evaluation.
        accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        # accelerator.no_sync() and accumulate() call model.no_sync. A function, since copy.deepcopy of the model would
        # copy the optimizer of a bound method.
        model.no_sync = lambda optimizer=optimizer: optimizer.accumulate()
        prepared[id(model)] = model
        prepared[id(optimizer)] = accelerator.prepare_optimizer(AcceleratedMuonZero(optimizer, model))
    rest = [thing for thing in objects if id(thing) not in prepared]
    results = accelerator.prepare(*rest) if rest else ()
    prepared |= {id(thing): new for thing, new in zip(rest, results if len(rest) > 1 else [results], strict=False)}
    return tuple(prepared[id(thing)] for thing in objects)


# ------------------------------------------------------------------------------------------- what cannot be honoured


def _pairs(objects: tuple[Any, ...], needed: bool) -> list[tuple[Any, MuonZero]]:
    """Return the (model, MuonZero) pairs among `objects`; a pair that lacks one is refused.

    `needed`: whether there must be a pair; a later call may bring loaders and schedulers alone.
    """
    remedy = "give prepare() both that compile_muon.initialize(model, config) returned"
    modules = [thing for thing in objects if is_sharded(thing)]
    optimizers = [thing for thing in objects if isinstance(thing, MuonZero)]
    models = [next((model for model in modules if _trains(optimizer, model)), None) for optimizer in optimizers]
    unpaired = [model for model in modules if not any(model is other for other in models)]
    kinds = ", ".join(type(thing).__name__ for thing in objects)
    lonely = [("optimizer", "MuonZero") for model in models if model is None]
    lonely += [("model", type(model).__name__) for model in unpaired]
    refuse([
        *((True, field, kind, "comes without its other half", remedy) for field, kind in lonely),
        (needed and not modules + optimizers, "objects", kinds, "come without a sharded model", remedy),
    ])  # fmt: skip
    return list(zip(models, optimizers, strict=True))


def _trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return any(id(param) in trained for param in model.parameters())


def refused_settings(accelerator: Accelerator) -> list[Refusal]:
    """Return refusals of settings of the accelerator, its plugins and the environment."""
    kind, precision = accelerator.distributed_type.value.lower(), accelerator.mixed_precision
    sharders = set() if accelerator.parallelism_config is None else {"parallelism_config"}
    for plugin in _SHARDERS:
        name = plugin.removesuffix("_plugin")
        # On a CPU Accelerate drops its plugins, but keeps these flags.
        if name == kind or os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() == "true":
            sharders.add(plugin)
    dynamo = accelerator.state.dynamo_plugin.backend.value
    hook = getattr(getattr(accelerator.ddp_handler, "comm_hook", None), "value", "no")
    remedy = "leave it out, and set reduce_dtype (communication_data_type) in the config"
    return [
        *((True, f"Accelerator({plugin}=...)", plugin, *WHY["shards"]) for plugin in sorted(sharders)),
        (precision not in ("no", "bf16"), "mixed_precision", precision, *WHY["casts"]),
        (dynamo != "NO", "dynamo_backend", dynamo, *WHY["compiles"]),
        (hook != "no", "DistributedDataParallelKwargs.comm_hook", hook, "there is no DDP to hook", remedy),
    ]


def _refused_pair(accelerator: Accelerator, model: nn.Module, optimizer: MuonZero) -> list[Refusal]:
    steps, engine = optimizer.config.zero.gradient_accumulation_steps, optimizer.engine
    device, home = next(model.parameters()).device, accelerator.device
    is_elsewhere = device.type != home.type or device.index not in (home.index, None)
    tensor = 1 if engine.mesh is None else engine.mesh.axis("tensor").size
    world, processes = 1 if engine.group is None else engine.group.size(), accelerator.num_processes
    is_prepared = any(wrapped.optimizer is optimizer for wrapped in _optimizers(accelerator))
    return [
        (steps not in (None, 1), "gradient_accumulation_steps", steps,
         "is the accelerator's to say, which may end an accumulation early",
         "leave it out of the config: Accelerator(gradient_accumulation_steps=...) and accumulate(model) say it"),
        (tensor != 1, "mesh.tensor", tensor, *WHY["tensor"]),
        (accelerator.device_placement and is_elsewhere, "model", type(model).__name__,
         f"is on {device}, where batches of the accelerator are on {home}",
         "shard model.to(accelerator.device): what is sharded cannot be moved"),
        (world != processes, "optimizer", "MuonZero",
         f"is sharded over {world} of the accelerator's {processes} processes",
         "make the Accelerator first, without a GPU Accelerator(cpu=True), which else sees one process, and shard over "
         "all of its processes (no mesh=, no process_group=)"),
        (is_prepared, "optimizer", "MuonZero", "is prepared already", "prepare it once"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------- the accelerator's methods


def _optimizers(accelerator: Accelerator) -> list[AcceleratedMuonZero]:
    """Return the prepared optimizers, the same on every rank; ``accelerator.free_memory()`` drops them."""
    return [optimizer for optimizer in accelerator._optimizers if isinstance(optimizer, AcceleratedMuonZero)]


class _Sharded:
    """Replacements of methods of one accelerator; the class and other accelerators keep theirs."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._plain: dict[str, Callable[..., Any]] = {}
        for name in [name for name in vars(_Sharded) if not name.startswith("_")]:
            self._plain[name] = getattr(accelerator, name)
            setattr(accelerator, name, getattr(self, name))
        self._loading: list[AcceleratedMuonZero] = []
        self._step = 0
        # Only the hook gets the folder that automatic_checkpoint_naming chooses.
        accelerator.register_load_state_pre_hook(lambda models, folder: self._load(Path(folder)))

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Clip, and return the norm as a plain tensor on every rank."""
        norm = self._plain["clip_grad_norm_"](*args, **kwargs)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce plain tensors; shards are refused, since ranks hold different rows."""
        problem = "is sharded: LocalSGD and averages by hand want a copy on each rank"
        remedy = "leave it out (LocalSGD(enabled=False)), or average what tensor.full_tensor() gives"
        refuse([(isinstance(tensor, DTensor), "accelerator.reduce", "DTensor", problem, remedy)])
        return self._plain["reduce"](tensor, *args, **kwargs)

    def join_uneven_inputs(self, joinables: Any, *args: Any, **kwargs: Any) -> Any:
        """Join uneven inputs of plain models; sharded models are refused."""
        sharded, problem = any(map(is_sharded, joinables)), "a rank without a batch gathers nothing for any"
        remedy = "leave it out: prepared loaders give every rank as many batches (even_batches)"
        refuse([(sharded, "accelerator.join_uneven_inputs", "a sharded model", problem, remedy)])
        return self._plain["join_uneven_inputs"](joinables, *args, **kwargs)

    # ------------------------------------------------------------------ whole weights

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return whole weights on rank 0, an empty dict elsewhere; collective."""
        if is_sharded(model):
            return full_state_dict(self._accelerator.unwrap_model(model, keep_torch_compile=False))
        return self._plain["get_state_dict"](model, unwrap)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save whole weights, streamed by all ranks; with adapters or pickle files, gather them on rank 0."""
        bare = self._accelerator.unwrap_model(model, keep_torch_compile=False)
        if is_sharded(model) and safe_serialization and not has_adapters(bare):
            save_pretrained(bare, save_directory, max_shard_size=max_shard_size)
        else:
            self._plain["save_model"](model, save_directory, max_shard_size, safe_serialization)

    # ------------------------------------------------------------------ the state of a run

    @contextlib.contextmanager
    def _plain_ones(self) -> Iterator[list[AcceleratedMuonZero]]:
        """Hide sharded models and their optimizers from Accelerate, which would save rank 0's rows."""
        accelerator, muon_optimizers = self._accelerator, _optimizers(self._accelerator)
        hidden = {id(thing) for optimizer in muon_optimizers for thing in (optimizer, optimizer.model)}
        models, optimizers = accelerator._models, accelerator._optimizers
        accelerator._models = [model for model in models if id(model) not in hidden]
        accelerator._optimizers = [optimizer for optimizer in optimizers if id(optimizer) not in hidden]
        try:
            yield muon_optimizers
        finally:
            accelerator._models, accelerator._optimizers = models, optimizers

    def save_state(self, *args: Any, **kwargs: Any) -> Path:
        """Save Accelerate's files, then a checkpoint, whose commit makes the whole state valid; collective.

        Raises a CheckpointError if files cannot be written, or gradients of micro-batches would be lost.
        """
        with_grad = [p for o in _optimizers(self._accelerator) for p in o.model.parameters() if p.grad is not None]
        if with_grad and not self._accelerator.sync_gradients:
            raise CheckpointError(
                "save_state: gradients of the micro-batches since the last step would be lost; call it where "
                "accelerator.sync_gradients is true, after optimizer.zero_grad()"
            )
        with self._plain_ones() as muon_optimizers:
            state = Path(self._plain["save_state"](*args, **kwargs))
        for folder, wrapped in _folders(state, muon_optimizers).items():
            ranks = weights_of(wrapped.model).meet("save_state")
            optimizer = wrapped.optimizer
            step = optimizer.engine.status.step - 1  # status counts the running step
            with ranks.together(f"{folder}: was not saved"):
                if ranks.rank == 0:
                    # A state saved over another has files of both: the record says which belong to this step.
                    record = {"step": self._accelerator.step, "files": _digests(state)}
                    folder.mkdir(parents=True, exist_ok=True)
                    staged = folder / f"{_record(folder, step).name}.tmp"
                    write_bytes(staged, json.dumps(record, indent=2).encode(), replace=True)
                    os.replace(staged, _record(folder, step))
            save_pretrained(wrapped.model, folder)
            Checkpointer(folder, keep_last=1).save(step, wrapped.model, optimizer)
            if ranks.rank == 0:
                for old in set(folder.glob("accelerate-*.json")) - {_record(folder, step)}:
                    if re.fullmatch(r"accelerate-[0-9]+\.json", old.name) and not old.is_symlink() and old.is_file():
                        old.unlink()
        return state

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load the checkpoint, then Accelerate's files; collective, on any number of ranks.

        Raises a CheckpointError if the state is missing, damaged (then nothing is loaded), or does not fit.
        """
        with self._plain_ones() as muon_optimizers:
            self._loading = muon_optimizers
            try:
                self._plain["load_state"](*args, **kwargs)
            finally:
                self._loading = []
        # Accelerate stores a step per rank, so a new rank has none. States are saved at the end of an accumulation.
        self._accelerator.step = self._step - self._step % self._accelerator.gradient_accumulation_steps

    def _load(self, state: Path) -> None:
        folders = _folders(state, self._loading)
        step_of = {}
        for folder, wrapped in folders.items():
            with weights_of(wrapped.model).meet("load_state").together(f"{state}: nothing was loaded"):
                stored = {path for path in state.glob(f"{_FOLDER}*") if path.is_dir()}
                if surplus := sorted(path.name for path in stored - folders.keys()):
                    problem = "is of a model that is not prepared; prepare as many as were saved"
                    raise CheckpointError(f"{listed(surplus)}: {problem}")
                step_of[folder], self._step = _choose(state, folder)
        for folder, wrapped in folders.items():
            Checkpointer(folder).load(wrapped.model, wrapped.optimizer, step=step_of[folder])


# ------------------------------------------------------------------------------------------- the record of a state


def _folders(state: Path, ours: list[AcceleratedMuonZero]) -> dict[Path, AcceleratedMuonZero]:
    return {state / (f"{_FOLDER}_{i}" if i else _FOLDER): wrapped for i, wrapped in enumerate(ours)}


def _digests(state: Path) -> dict[str, str]:
    """Return file name -> SHA-256 of Accelerate's files in `state`."""
    files = sorted(path for path in state.iterdir() if path.is_file() and _STATE_FILE.fullmatch(path.name))
    return {path.name: describe_file(path).sha256 for path in files}


def _record(folder: Path, step: int) -> Path:
    return folder / f"accelerate-{step}.json"


def _choose(state: Path, folder: Path) -> tuple[int, int]:
    """Return the checkpoint's step that Accelerate's files in `state` belong to, and the accelerator's step."""
    steps = Checkpointer(folder).steps()
    if not steps:
        raise CheckpointError(
            f"{folder.name}: has no checkpoint of MuonZero; load a state that was saved after prepare() of "
            "compile_muon.integrations.accelerate and not cut off, or begin anew from whole weights"
        )
    digests, problems = _digests(state), []
    for step in reversed(steps):
        try:
            with open_plain(_record(folder, step)) as file:
                record = json.loads(file.read())
            misfits = [name for name, digest in record["files"].items() if digests.get(name) != digest]
        except (OSError, CheckpointError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"step {step}: {_record(folder, step).name}: {error}")
            continue
        if not misfits:
            return step, record["step"]
        problems.append(f"step {step}: {listed(misfits)}: is damaged, missing, or of another save")
    raise CheckpointError(f"{'; '.join(problems)}; load the state before")
