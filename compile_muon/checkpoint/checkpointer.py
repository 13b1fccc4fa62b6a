"""``Checkpointer``: save and load, with a promise.

A checkpoint is there as a whole or not at all; a load changes all of model and optimizer or nothing; and what goes
wrong on one rank is the same error on every rank.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import hashlib
import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from compile_muon.agreement.compare import by_rank, differing, ranks_named
from compile_muon.agreement.together import Ranks
from compile_muon.checkpoint.contents import contents_of, empty_like, fit, fitting_groups, host_copies
from compile_muon.checkpoint.dice import check_random_state, random_state, set_random_state
from compile_muon.checkpoint.folder import STATE, TENSORS, Folder
from compile_muon.checkpoint.manifest import Manifest, describe_file, raise_damage
from compile_muon.checkpoint.values import Values
from compile_muon.config import accept
from compile_muon.engine.dtensors import local_tensor
from compile_muon.errors import CheckpointError, DamagedError, shortened, warn_user
from compile_muon.files.tensors import read_tensors, write_tensors
from compile_muon.optimizer import MuonZero
from compile_muon.passes.language.spec import encode_dtype
from compile_muon.progress import underway

#: further problems of a checkpoint that does not fit are counted, not told
_TOLD = 30
_SHARE = "use a folder that all ranks share"


class Checkpointer:
    """Checkpoints of one training run in one folder, which all ranks must see.

    Args:
        folder: made by the first save; each checkpoint is a folder ``step-N`` in it.
        keep_last: how many to keep; older ones go once a new one is complete. Folders without our manifest stay.
        asynchronous: ``save`` returns when everything is copied to host memory, or beside the file that it is in; a
            thread writes it behind training. One at a time: the next ``save`` waits for it, and raises what went wrong.
    Raises:
        ConfigError: ``keep_last`` or ``asynchronous`` is not what it may be.
    """

    def __init__(self, folder: str | os.PathLike, keep_last: int = 3, asynchronous: bool = False) -> None:
        self._folder = Folder(folder)
        self._keep_last = accept.integer("keep_last", keep_last, low=1)
        self._asynchronous = accept.boolean("asynchronous", asynchronous)
        self._job: Future[None] | None = None
        self._copies: dict[str, Tensor] | None = {} if self._asynchronous else None

    def steps(self) -> list[int]:
        """List the steps of complete checkpoints, ascending; one that is still being written is not among them."""
        return self._folder.steps()

    def wait(self) -> None:
        """Return once nothing is being written any more; call it where training ends.

        Raises:
            CheckpointError: the last ``asynchronous`` save failed; said once.
        """
        if self._job is None:
            return
        error = self._job.exception()
        atexit.unregister(self.wait)
        self._job = None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"a checkpoint was not written: {type(error).__name__}: {error}") from error

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: MuonZero,
        *,
        scheduler: Any = None,
        loader: Any = None,
        **extra: Any,
    ) -> None:
        """Save everything a run needs to go on, bit for bit; collective over the optimizer's ranks.

        Weights and buffers, optimizer state and hyperparameters, every rank's random number generators, and the
        arguments below are saved.

        Args:
            step: names the checkpoint; one of that step is replaced.
            scheduler: ``state_dict()`` of it is saved.
            loader: the same, of each rank's data loader.
            extra: JSON values (tuples, and keys of any JSON type, too) and tensors. What differs between ranks is
                kept for each.
        Raises:
            CheckpointError: on every rank alike, naming the rank and why; checkpoints that were there still are: a rank
                has other parameters or buffers, something of others' is in the way, a disk is full. With
                ``asynchronous`` this may be about the save before.
            NonFiniteError, LedgerError: of the step before, see :meth:`MuonZero.check`; nothing is saved.
        """
        self.wait()
        optimizer.check()
        doing = f"checkpoint of step {shortened(repr(step), 20)} was not saved"
        with optimizer.engine.status.at("Checkpointer.save"), underway(f"saving checkpoint {step}"):
            ranks = _ranks_of(optimizer)
            with ranks.together(doing):
                step = accept.integer("step", step, low=0)
                contents = contents_of(model, optimizer)
                tensors, parts = dict(contents.tensors), {"scheduler": scheduler, "loader": loader}
                named = {f"extra.{name}": value for name, value in extra.items()}
                named |= {name: part.state_dict() for name, part in parts.items() if part is not None}
                named |= {f"module.{name}": value for name, value in contents.module_state.items()}
                named |= {f"group.{name}": group for name, group in contents.groups.items()}
                named |= {"members": contents.members, "random": random_state()}
                for key in contents.buffers:  # of other ranks than the first perhaps of that rank's own batches
                    named[f"buffer.{key}"] = tensors[key] if ranks.rank == 0 else tensors.pop(key)
                values = Values()
                for name, value in named.items():
                    values.put(name, value)
                tensors = host_copies(tensors, contents.folders, ranks, self._copies)
                configuration = json.loads(json.dumps(optimizer.config, default=_described))
                manifest = Manifest(
                    step=step,
                    world=ranks.world,
                    stage=optimizer.config.zero.stage,
                    written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    versions={"compile_muon": _version(), "torch": torch.__version__},
                    configuration=configuration,
                    fingerprint=hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest(),
                    tensors=contents.facts(),
                    algorithms=contents.algorithms,
                    placements=contents.placements(),
                    aliases={alias: first for first, names in contents.names.items() for alias in names[1:]},
                )
                facts = {key: repr(fact) for key, fact in manifest.tensors.items()}
                digests = values.digests()
            everyone = ranks.gather((step, digests, facts))
            with ranks.together(doing):
                if others := sorted({other for other, _, _ in everyone} - {step}):
                    raise CheckpointError(f"step = {step}: other ranks save step {others[0]}")
                for name, said in differing([facts for _, _, facts in everyone], absent="none").items():
                    raise CheckpointError(
                        f"{name.removeprefix('model/')}: ranks hold different ones ({by_rank(said)}); register the "
                        "same parameters and buffers on every rank"
                    )
            for name, digest in digests.items():
                # Rank 0's buffers are among the tensors, its other values stand for all ranks.
                if name.startswith("buffer.") if ranks.rank == 0 else everyone[0][1].get(name) == digest:
                    del values.named[name]
            work = doing, ranks, tensors, values, manifest
            if not self._asynchronous:
                self._write(*work)
                return
            atexit.register(self.wait)
            threads = ThreadPoolExecutor(1, "compile_muon checkpoint")
            ranks.busy = self._job = threads.submit(self._write, *work)
            threads.shutdown(wait=False)  # a program that ends waits all the same, and so for what it saved last

    def _write(self, doing: str, ranks: Ranks, tensors: dict[str, Tensor], values: Values, manifest: Manifest) -> None:
        """Write this rank's share of ``tensors`` (on the CPU), and its values; ``manifest`` has all but the files.
        ``values`` are of rank 0 those that all ranks have, of another one those that differ."""
        folder, step = self._folder, manifest.step
        place = folder.unfinished(step)
        token = ranks.by_first(doing, lambda: folder.begin(step))
        with ranks.together(doing):
            if not (place / token).exists():
                raise CheckpointError(f"{place}: rank 0 made it, and it is not here; {_SHARE}")
        with ranks.together(doing):
            files = write_tensors(place / TENSORS, tensors, ranks)
            files += values.write(place / STATE / f"rank-{ranks.rank:05}")
            facts = {path.relative_to(place).as_posix(): describe_file(path) for path in files}
        everything = ranks.gather(facts)
        with ranks.together(doing):
            if ranks.rank == 0:
                files_of_all = {name: fact for part in everything for name, fact in part.items()}
                for name, fact in files_of_all.items():
                    if os.lstat(place / name).st_size != fact.size:
                        raise CheckpointError(f"{place / name}: has another size than when it was written")
                dataclasses.replace(manifest, files=files_of_all).write(place)
                folder.commit(step, token)
        if ranks.rank != 0:
            return
        try:
            later = [other for other in folder.ours() if other > step]
            folder.prune(self._keep_last, step)
        except (OSError, CheckpointError) as error:  # too many checkpoints are no reason to fail
            warn_user(f"{folder.path}: old checkpoints stay there: {error}")
            return
        if later:
            warn_user(
                f"{folder.path}: step {step} was saved, and step {later[-1]} of another run is there, which load() "
                "would take; remove it, or save into another folder"
            )

    def load(
        self,
        model: nn.Module,
        optimizer: MuonZero,
        *,
        scheduler: Any = None,
        loader: Any = None,
        step: int | None = None,
        strict: bool = True,
    ) -> dict[str, Any] | None:
        """Load the newest whole checkpoint; collective over the optimizer's ranks.

        Another number of ranks may have saved it, at another ZeRO stage. Random number generators go on where they were
        on this rank, and where the checkpoint has no such rank they are left alone, with a warning.

        Args:
            scheduler, loader: what was saved of them goes into their ``load_state_dict()``.
            step: take this one, and no other.
            strict: whether a checkpoint that does not fit is an error; else what fits is loaded, and a warning lists
                the rest.
        Returns:
            The ``extra`` values, tensors on the CPU; None if there is no checkpoint, and then nothing was done.
        Raises:
            CheckpointError: all checkpoints, or that of ``step``, are damaged; or it does not fit: parameters or groups
                that are missing, unexpected or others, other shapes, dtypes or algorithms, all listed. On every rank
                alike; model, optimizer, scheduler and loader are as they were (what was unfrozen by then, and is
                trained in the checkpoint, has joined the optimizer).
        """
        self.wait()
        with optimizer.engine.status.at("Checkpointer.load"):
            ranks = _ranks_of(optimizer)
            manifest = self._choose(ranks, step)
        if manifest is None:
            return None
        optimizer.unfreeze(manifest.trained())
        with optimizer.engine.status.at("Checkpointer.load"), underway(f"loading checkpoint {manifest.step}"):
            return self._load(ranks, manifest, model, optimizer, {"scheduler": scheduler, "loader": loader}, strict)

    def _load(
        self,
        ranks: Ranks,
        manifest: Manifest,
        model: nn.Module,
        optimizer: MuonZero,
        parts: dict[str, Any],
        strict: bool,
    ) -> dict[str, Any]:
        """Read, decode and try out everything on every rank ahead of the first write."""
        doing = f"{self._folder.path}/step-{manifest.step}: was not loaded"
        with ranks.together(doing):
            place = self._folder.at(manifest.step)
            contents = contents_of(model, optimizer)
            fitting, problems = fit(contents, manifest)
            sources = {key: source for key, source in fitting.items() if key in contents.tensors}
            # What all ranks have, and on top of it what this rank had, where there was such a rank. Earlier checkpoints
            # have random numbers in a file of their own.
            values, was_there = Values(), ranks.rank < manifest.world
            for part in ("rank-00000", f"rank-{ranks.rank:05}", f"own-{ranks.rank:05}")[: 3 if was_there else 1]:
                if f"{STATE}/{part}.json" in manifest.files:
                    values.named |= Values.read(place, f"{STATE}/{part}", manifest.files).named
            for name, part in parts.items():
                if part is not None and name not in values:
                    problems.append(f"{name}: none was saved")
                if part is None and name in values:
                    problems.append(f"{name}: one was saved, and load() was given none")
            saved, members = values.under("group."), values.get("members") if "members" in values else {}
            members = {name: members.get(name) for name in saved}
            groups, misfits = fitting_groups(contents.groups, contents.members, saved, members)
            problems += misfits
            if problems and strict:
                raise CheckpointError(_list(problems, "change the model, or load what fits with strict=False"))
            folders = contents.folders
            staged = {new: empty_like(contents.tensors[key], ranks, folders.get(key)) for key, new in sources.items()}
            read_tensors(manifest.reader(place), staged)
            for source in [sources[key] for key in contents.buffers if key in sources]:
                if f"buffer.{source}" in values:
                    buffer = values.get(f"buffer.{source}")
                    if (buffer.shape, buffer.dtype) != (staged[source].shape, staged[source].dtype):
                        raise CheckpointError(f"{source}: has another shape or dtype on this rank than on rank 0")
                    staged[source] = buffer
            contents.check_writable(sources)
            optimizer.engine.step.check_momentum([g | groups.get(g["name"], {}) for g in optimizer.param_groups])
            extra = values.under("extra.")
            generators = values.get("random") if was_there and "random" in values else None
            if generators is not None:
                check_random_state(generators)
        with ExitStack() as undo:
            try:
                with ranks.together(doing):  # other people's code: the last that can fail
                    for name, part in parts.items():
                        if part is not None and name in values:
                            undo.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))
                            part.load_state_dict(values.get(name))
                    modules = {name.replace("_orig_mod.", ""): module for name, module in model.named_modules()}
                    for key, before in contents.module_state.items():
                        if f"module.{key}" in values:
                            module = modules[key.rpartition(".")[0]]
                            undo.callback(module.set_extra_state, copy.deepcopy(before))
                            module.set_extra_state(values.get(f"module.{key}"))
            except CheckpointError as error:
                with ranks.together(f"{error}; and what had taken the checkpoint did not take back what it had"):
                    undo.close()
                raise
            undo.pop_all()
        with torch.no_grad():
            for key, source in sources.items():
                local_tensor(contents.tensors[key]).copy_(local_tensor(staged[source]))
        for group in optimizer.param_groups:
            group.update(groups.get(group["name"], {}))
        optimizer.loaded(manifest.step)
        if problems:
            warn_user(f"{place}: {_list(problems, 'all else was loaded')}")
        if parts["loader"] is not None and manifest.world != ranks.world:
            warn_user(
                f"{place}: world size {manifest.world} when saved, {ranks.world} now: the loader of a rank goes on "
                "where the loader of the same rank was; a rank that is new goes on where rank 0's loader was"
            )
        if generators is not None:
            set_random_state(generators)
        else:
            warn_user(
                f"{place}: holds no random-number state of this rank (world size when saved: {manifest.world}); the "
                "rank keeps its own, and gets rank 0's copy of everything else that differs between ranks",
                this_rank=True,
            )
        return extra

    def _choose(self, ranks: Ranks, step: int | None) -> Manifest | None:
        """Find the newest whole checkpoint, or that of ``step``; all ranks verify it, each a part of its files."""
        if different := ranks.compare({"step": step}):
            steps_by_rank = by_rank(different["step"])
            raise CheckpointError(f"step = {steps_by_rank}: nothing was loaded; load the same step on every rank")
        # Ranks may look at different moments; the first one's view counts, but all or none must see something.
        with ranks.together("nothing was loaded"):
            mine = self.steps()
        present, *_ = views = ranks.gather(mine)
        blind = [rank for rank, view in enumerate(views) if not view]
        if 0 < len(blind) < ranks.world:
            raise CheckpointError(
                f"{self._folder.path}: holds checkpoints for some ranks, and none for {ranks_named(blind)}; {_SHARE}"
            )
        if step is not None and step not in present:
            there = f"there are {', '.join(map(str, present))}" if present else "there is none"
            raise CheckpointError(f"step = {step!r}: {self._folder.path} has no checkpoint of it; {there}")
        damage: list[str] = []
        for candidate in [step] if step is not None else reversed(present):
            try:
                with ranks.together("damaged checkpoint"):
                    place = self._folder.at(candidate)
                    manifest = Manifest.read(place)
                if different := ranks.compare({"manifest": manifest.digest}):
                    digests_by_rank = by_rank(different["manifest"])
                    raise CheckpointError(
                        f"{place}: ranks see different checkpoints of step {candidate} ({digests_by_rank}): nothing "
                        f"was loaded; {_SHARE}, and wait until all of them see what was saved last"
                    )
                with ranks.together("damaged checkpoint"):
                    if manifest.step != candidate:
                        raise DamagedError(f"{place}: holds the checkpoint of step {manifest.step}")
                    raise_damage(manifest.problems(place, ranks.rank, ranks.world))
            except DamagedError as error:
                damage.append(str(error))
                if step is not None:
                    raise
                continue
            if damage:
                warn_user(f"{'; '.join(damage)}; the checkpoint of step {candidate} is loaded instead")
            return manifest
        if damage:
            raise DamagedError(
                f"{self._folder.path}: no checkpoint is whole; repair one, or begin anew in another folder: "
                + "; ".join(damage)
            )
        return None


def _ranks_of(optimizer: MuonZero) -> Ranks:
    """Return the ranks in which all checkpointers of an optimizer meet, once no other writes; collective."""
    if optimizer.engine.meeting is None:
        optimizer.engine.meeting = Ranks(optimizer.engine.group, optimizer.engine.device, optimizer.engine.status)
    optimizer.engine.meeting.settle()
    return optimizer.engine.meeting


def _version() -> str:
    try:
        return version("compile_muon")
    except PackageNotFoundError:  # a source tree on the path
        return "unknown"


def _described(setting: Any) -> Any:
    """Describe a setting that JSON has no word for, to people and fingerprints; nothing is made of it again."""
    if dataclasses.is_dataclass(setting):
        return {field.name: getattr(setting, field.name) for field in dataclasses.fields(setting)}
    if isinstance(setting, torch.dtype):
        return encode_dtype(setting)
    return getattr(setting, "__qualname__", type(setting).__qualname__)


def _list(problems: list[str], remedy: str) -> str:
    listed_problems = problems[:_TOLD] + ([f"and {len(problems) - _TOLD} more"] if len(problems) > _TOLD else [])
    return "\n  ".join((f"{len(problems)} things do not fit; {remedy}:", *listed_problems))
