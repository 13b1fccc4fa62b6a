"""``MuonZero``: Muon for hidden matrices, AdamW for the rest, over ZeRO-sharded parameters.

A façade over ``engine/``: parameter groups, state, and the order of a step. The step itself is in ``step_checks``
(norms, finiteness, which speculations hold), ``step_graph`` (directions), ``commit`` (the writes) and ``resident`` (the
refresh).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from compile_muon.assembly import assemble, warn_of_half_masters
from compile_muon.config import (
    ARGUMENTS,
    AdamWConfig,
    Config,
    MuonConfig,
    NSConfig,
    OffloadConfig,
    ZeroConfig,
    config_from_kwargs,
)
from compile_muon.config.groups import GroupConfig, named_groups
from compile_muon.engine import Engine, Extension
from compile_muon.engine.dtensor_parameter import part_of
from compile_muon.engine.dtensors import ordinary_tensors
from compile_muon.engine.other_holders import refuse_shared
from compile_muon.engine.recorded import StepGraphCache
from compile_muon.engine.resident import start_refresh
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.step import Step
from compile_muon.errors import CheckpointError, MuonZeroError, config_error
from compile_muon.memory import FrameMemory
from compile_muon.mesh import DataPlace, Mesh
from compile_muon.model.groups import Group, state_problems, warn_of_shared_rates
from compile_muon.model.support import check_is_module
from compile_muon.model.unfreezing import agree_on, group_of, plan_unfrozen, take_up
from compile_muon.passes.collectives import Traffic
from compile_muon.summary import Summary, summarize


class MuonZero(Optimizer):
    """Shards ``model`` in place (ZeRO stage 0 to 3) and optimizes it with Muon and AdamW.

    Args:
        model: module with all parameters on one device; becomes sharded. Not yet wrapped by DDP or FSDP.
        lr, momentum, nesterov, weight_decay, adjust_lr, momentum_dtype, qk_clip, qk_clip_alpha: of Muon, fields of
            :class:`~compile_muon.config.MuonConfig`; the prefix ``ns_`` marks those of Newton-Schulz,
            :class:`~compile_muon.config.NSConfig`, ``adamw_`` those of AdamW,
            :class:`~compile_muon.config.AdamWConfig`.
        stage, shard_state_over, offload, offload_param, communicators, param_dtype, reduce_dtype, master_dtype: what is
            sharded, where it is kept and in which dtypes, fields of :class:`~compile_muon.config.ZeroConfig`.
        update, gradient_accumulation_steps, gradient_clipping, nonfinite, max_skipped_steps, checks, check_replicas: of
            a step, fields of the same.
        method, auxiliary, rates, groups, muon_params, muon_views, per_head_muon, split_fused, machine: which method
            trains which parameter, fields of :class:`compile_muon.Config`. docs/reference/configuration.md has a table.
        mesh: ``DeviceMesh`` of one dimension, or of some of ``("replicate", "shard", "expert", "tensor")`` in this
            order (docs/how-to/meshes.md); None for all ranks of the default process group.
        norm_group: group (or 1-D ``DeviceMesh``) of one rank of each pipeline stage (docs/how-to/pipeline.md), this
            rank included: gradient norm, clipping, errors and skipped steps are then of all stages.
        extensions: the user's own features (docs/how-to/write-an-extension.md), objects of
            :class:`compile_muon.Extension`.
        weights: a folder of whole weights (docs/how-to/weights.md), loaded once the model is sharded; a model on the
            meta device needs this or ``init``.
        init: ``init(module)`` gives one module of a model on the meta device
            (docs/how-to/weights.md#from-the-meta-device) its values. A model that has values already is an error.
    Attributes:
        scheduler: the learning rate schedule of the configuration, to be stepped after each step; or None.
    Raises:
        ConfigError: settings are out of range or contradict each other; its ``errors`` has one for each.
        UnsupportedModelError: a parameter cannot be sharded or orthogonalized. Nothing is changed in either case.
    """

    def __init__(
        self,
        model: nn.Module,
        *positional: NoReturn,
        lr: float | Tensor = MuonConfig.lr,
        momentum: float = MuonConfig.momentum,
        nesterov: bool = MuonConfig.nesterov,
        weight_decay: float = MuonConfig.weight_decay,
        adamw_lr: float | Tensor = AdamWConfig.lr,
        adamw_betas: tuple[float, float] = AdamWConfig.betas,
        adamw_eps: float = AdamWConfig.eps,
        adamw_weight_decay: float = AdamWConfig.weight_decay,
        adamw_decay_vectors: bool = AdamWConfig.decay_vectors,
        adjust_lr: str | float | None = MuonConfig.adjust_lr,
        momentum_dtype: str | None = MuonConfig.momentum_dtype,
        qk_clip: float | None = MuonConfig.qk_clip,
        qk_clip_alpha: float = MuonConfig.qk_clip_alpha,
        method: str = Config.method,
        auxiliary: str = Config.auxiliary,
        rates: Mapping[str, Any] | Sequence[Any] = Config.rates,
        groups: Mapping[str, Any] | Sequence[Any] = Config.groups,
        muon_views: Mapping[str, Any] | Sequence[Any] = Config.muon_views,
        per_head_muon: bool = Config.per_head_muon,
        split_fused: bool = Config.split_fused,
        ns_steps: int | None = NSConfig.steps,
        ns_coefficients: str | Sequence[Any] = NSConfig.coefficients,
        ns_method: str = NSConfig.method,
        ns_dtype: str | torch.dtype = NSConfig.dtype,
        ns_eps: float = NSConfig.eps,
        ns_backend: str = NSConfig.backend,
        ns_memory_limit: int | str = NSConfig.memory_limit,
        stage: int = ZeroConfig.stage,
        shard_state_over: str = ZeroConfig.shard_state_over,
        offload: str | Mapping[str, Any] | OffloadConfig | None = ZeroConfig.offload,
        offload_param: str | None = ZeroConfig.offload_param,
        communicators: str = ZeroConfig.communicators,
        update: str = ZeroConfig.update,
        gradient_accumulation_steps: int | None = ZeroConfig.gradient_accumulation_steps,
        gradient_clipping: float | None = ZeroConfig.gradient_clipping,
        nonfinite: str = ZeroConfig.nonfinite,
        max_skipped_steps: int = ZeroConfig.max_skipped_steps,
        checks: str | None = ZeroConfig.checks,
        check_replicas: int | None = ZeroConfig.check_replicas,
        param_dtype: torch.dtype | str | None = ZeroConfig.param_dtype,
        reduce_dtype: torch.dtype | str | None = ZeroConfig.reduce_dtype,
        master_dtype: torch.dtype | str | None = ZeroConfig.master_dtype,
        muon_params: Callable[[str, nn.Parameter], Any] | Sequence[str] | None = Config.muon_params,
        machine: str | None = Config.machine,
        mesh: DeviceMesh | None = None,
        norm_group: dist.ProcessGroup | DeviceMesh | None = None,
        weights: str | os.PathLike | None = None,
        init: Callable[..., Any] | None = None,
        extensions: Sequence[Extension] = (),
        **unknown: NoReturn,
    ) -> None:
        check_is_module(model)
        if positional:
            problem = "has no name, and beside the model every argument needs one"
            raise config_error("MuonZero(model, ...)", positional[0], problem, "write lr=0.02")
        groups = cast("Sequence[Any]", named_groups(groups, model))
        settings = {name: value for name, value in locals().items() if name in ARGUMENTS}
        config = config_from_kwargs(**settings, **unknown)
        self._setup(config, *assemble(model, config, mesh, None, norm_group, weights, init, extensions))

    @classmethod
    def from_config(
        cls,
        model: nn.Module,
        config: Config,
        *,
        mesh: DeviceMesh | Mesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        norm_group: dist.ProcessGroup | DeviceMesh | None = None,
        weights: str | os.PathLike | None = None,
        init: Callable[..., Any] | None = None,
        extensions: Sequence[Extension] = (),
    ) -> MuonZero:
        """Build the optimizer from a resolved :class:`Config`."""
        self = cls.__new__(cls)
        self._setup(config, *assemble(model, config, mesh, process_group, norm_group, weights, init, extensions))
        return self

    #: the interface for checkpoints, plans and integrations
    engine: Engine

    def _setup(self, config: Config, engine: Engine, groups: Sequence[Group]) -> None:
        self.config, self.engine = config, engine
        super().__init__([_param_group(group, engine.params) for group in groups], {})
        # OneCycleLR and CyclicLR cycle the momentum of groups, or else their betas, and check `defaults` for either. It
        # is set here because a default given to Optimizer.__init__ would be added to every group.
        for cycled, has_it in (("momentum", any), ("betas", all)):
            if has_it(cycled in group for group in self.param_groups):
                self.defaults[cycled] = next(group[cycled] for group in self.param_groups if cycled in group)
                break
        # Transformers' schedules with an `lr_end` divide it by `defaults["lr"]`.
        self.defaults["lr"] = self.param_groups[0]["lr"]
        engine.step = step = Step(
            self, config, {group.name: group.method for group in groups}, engine.ledger, engine.group, engine.device,
            engine.compares, engine.ownership.check,
        )  # fmt: skip
        for extension in engine.extensions:
            extension.attach(engine)
        if engine.device.type == "cuda":
            step.recorded = StepGraphCache()
        step.create_state()
        step.sync_momentum()
        engine.ledger.before_backward = step.before_backward
        engine.ledger.memory = FrameMemory(engine)
        refuse_shared(self)  # another optimizer's step would apply a gradient twice
        self.scheduler = None if config.scheduler is None else config.scheduler.build(self)
        self._scheduled: int | None = None  # the scheduler's epoch at the latest step that wrote

    # ------------------------------------------------------------------ reading

    def accumulate(self) -> AbstractContextManager[None]:
        """Enclose every micro-batch of a step but the last, as DDP's ``no_sync``: ``with optimizer.accumulate():``."""
        return self.engine.ledger.accumulate()

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and matrices orthogonalized by this rank since the start, counted from the graphs that ran."""
        return self.engine.ledger.counters.traffic

    @property
    def data_place(self) -> DataPlace:
        """The part of the data that this rank is to load; ranks along ``tensor`` and ``sequence`` load the same.

        ``DistributedSampler(dataset, num_replicas=place.world, rank=place.rank)`` takes it.
        """
        return DataPlace(0, 1) if self.engine.mesh is None else self.engine.mesh.data_place

    @property
    def sequence_place(self) -> DataPlace:
        """The part of each sequence that this rank is to be given where ``sequence_parallel.inputs`` is "sharded"."""
        return DataPlace(0, 1) if self.engine.mesh is None else self.engine.mesh.sequence_place

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradient norm of the latest step, before clipping; 0-dim fp32 on the device, None before the first."""
        return self.engine.step.grad_norm

    def metrics(self) -> dict[str, float]:
        """Return the latest step in plain numbers for a logger, all finite, so that they are JSON.

        The call waits for the device only where checks are read in the next step.

        Returns:
            ``grad_norm`` before clipping; metrics of extensions (with ``qk_clip``, ``max_logit``); and the next step's
            rates, of the first group of each method: ``muon_lr``, ``adamw_lr``. Unknown numbers are left out: before
            the first step, and of a skipped step, whose norm is inf or NaN.
        """
        self.check()
        # Reversed, so that the first group of a method wins.
        rates = {f"{group['algorithm']}_lr": float(group["lr"]) for group in reversed(self.param_groups)}
        numbers = {"grad_norm": self.engine.step.norm}
        for metrics in self.engine.hooks.metrics:
            numbers |= metrics()
        return {name: number for name, number in numbers.items() if math.isfinite(number)} | rates

    def totals(self) -> dict[str, int]:
        """Return what this rank has counted since the start; the call waits as :meth:`metrics` does.

        Returns:
            ``bytes_sent`` (where the mesh has several axes also by axis, ``bytes_sent_shard``),
            ``directions_speculated`` (made in backward), ``directions_used`` and ``directions_discarded`` of them,
            ``directions_in_step`` (made by ``step()``), ``newton_schulz_matrices`` and ``newton_schulz_calls`` (many
            matrices to a call fill a GPU), ``skipped_steps``, ``compiled_graphs``, ``communicators`` (process groups
            of its collectives), and totals of extensions: with offload to a disk ``disk_bytes_read`` and
            ``disk_bytes_written``.
        """
        self.check()
        counters, mesh = self.engine.ledger.counters, self.engine.mesh
        return {
            **counters.numbers(by_axis=mesh is not None and len(mesh.names) > 1),
            "compiled_graphs": counters.graphs + len(self.engine.step.step_graphs),
            "communicators": 0 if mesh is None else mesh.process_groups,
            **{name: number for totals in self.engine.hooks.totals for name, number in totals().items()},
        }

    def check(self) -> None:
        """Read the results of the latest step's checks, if the host has not yet (``checks="next_step"``).

        The next step does so, ``metrics()``, ``totals()`` and ``Checkpointer.save``; with "in_step" nothing is left.

        Raises:
            NonFiniteError, LedgerError: for that step, which has written nothing.
        """
        if self.engine.step.check() is False:
            self._scheduled = None

    def summary(self) -> Summary:
        """Return which parameter gets which algorithm, stage and exchange strategy, and why."""
        engine, step = self.engine, self.engine.step
        decayed = {n for group in self.param_groups if group["weight_decay"] for n in group["param_names"]}
        return summarize(
            engine.params, engine.assignments, self.config, engine.mesh, decayed, step.outside, step.launched,
            [f"{frame}: {words}" for frame, words in engine.ledger.memory.chosen.items()],
        )  # fmt: skip

    def __repr__(self) -> str:
        rates = ("algorithm", "lr", "weight_decay", "momentum", "betas")
        lines = [
            f"  {group['name']}: {len(group['params'])} parameters, "
            + ", ".join(f"{name} {group[name]}" for name in rates if name in group)
            for group in self.param_groups
        ]
        mesh, zero = self.engine.mesh, self.config.zero
        return "\n".join([f"MuonZero(stage {zero.stage}, world {1 if mesh is None else mesh.size}", *lines, ")"])

    # ------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one optimizer step on the gradients in ``.grad``.

        Args:
            closure: re-evaluates the model and returns the loss, as in torch.optim.
        Returns:
            The result of ``closure``, or None.
        Raises:
            NonFiniteError: a gradient, momentum, moment, direction or rate is inf or NaN and ``nonfinite="error"``, or
                ``"skip"`` has left out ``max_skipped_steps`` in a row. Parameters and state are unchanged.
            UnsupportedModelError: the model no longer holds the parameters that were sharded.
            LedgerError: some ranks have a gradient that others lack, other hyperparameters, ran other frames or hold
                other copies, or another rank or pipeline stage refused the step; or at stage 1 a gradient was edited
                between micro-batches. Parameters and state are unchanged. Or an earlier step raised while it wrote what
                nothing puts back: load a checkpoint.
            PeerError: a rank or pipeline stage did not come to the step; the message says where each is.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        status = self.engine.status
        peers = self.engine.hooks.peers
        peers_step = nullcontext() if peers is None else peers.step(status.step)
        range_ = self.engine.ledger.range("step", payload=status.step)
        # Inside torch.inference_mode(), too, state must be tensors that train.
        with ordinary_tensors(), status.at("the optimizer's step"), peers_step, range_:
            self.check()
            if self.scheduler is not None and self.scheduler.last_epoch == self._scheduled:
                # DeepSpeed's engine steps the schedule of its configuration behind each step; here the loop must.
                raise config_error(
                    "scheduler", self.scheduler.last_epoch, "was not stepped since the last optimizer.step()",
                    "call optimizer.scheduler.step() behind it, or set optimizer.scheduler = None",
                )  # fmt: skip
            self._unfreeze()
            for hook in self.engine.hooks.before_step:
                hook()
            if self.engine.step.run():
                self._scheduled = None if self.scheduler is None else self.scheduler.last_epoch
        return loss

    def release(self) -> None:
        """Free all CUDA graphs of this process and their memory, those of other compiled models included.

        Where collectives are in them (``compile.cuda_graphs`` and several ranks), call this on every rank ahead of
        ``torch.distributed.destroy_process_group()``, when no other training step will follow: NCCL waits there for the
        graphs that hold its calls. A later step compiles and records anew.

        Raises:
            LedgerError, NonFiniteError: of the latest step, see :meth:`check`; all is released.
        """
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        try:
            self.check()
        finally:
            self.engine.step.release()
            torch.compiler.reset()  # frees Inductor's CUDA graphs with its compiled code

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients, and the directions made from them."""
        super().zero_grad(set_to_none)
        for sharded in self.engine.params:
            sharded.drop_gradient()

    # ------------------------------------------------------------------ state

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MuonZeroError(
            "MuonZero: an optimizer belongs to the shards of one model, and cannot be copied or pickled; keep "
            "optimizer.state_dict(), save the run with a Checkpointer, or make a MuonZero over a copy.deepcopy(model) "
            "taken inside `with compile_muon.full_parameters(model):`"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train parameters that were frozen when the model was sharded, in a group of their own; on all ranks alike.

        Without this call, parameters that require a gradient by now join groups of the configuration in the next step.

        Args:
            param_group: ``params``, which require a gradient by now, rates that differ from the defaults, and perhaps
                ``name`` and ``method``. Parameters of several methods become several groups, as at the start.
        Raises:
            ConfigError: a tensor is none of the model's or still frozen, a rate is unknown.
            ValueError: a parameter is trained already.
            UnsupportedModelError: other ranks unfreeze other parameters.
            PeerError: other ranks do something else.
        """
        if "algorithm" in param_group:  # made by `_param_group`: from Optimizer.__init__
            return super().add_param_group(param_group)
        with self.engine.status.at("add_param_group"):
            self._unfreeze(*group_of(param_group, self.engine.model, self.param_groups))

    def _unfreeze(self, group_config: GroupConfig | None = None, members: Sequence[str] | None = None) -> None:
        """Make state for parameters that were frozen and require a gradient by now.

        ``group_config``: a group for ``members`` alone; None for all, in the groups of the configuration.
        """
        unfrozen = self.engine.ownership.unfrozen()
        sharded_params = [sharded for sharded in unfrozen if members is None or sharded.name in members]
        if not sharded_params:
            return
        # Not by a collective: a rank that comes alone gets a PeerError in place of a hang.
        self.engine.status.meet("this rank trains what was frozen before: unfreeze it on every rank, in the same step")
        agree_on(sharded_params, self.engine.group if self.engine.compares else None)
        names, partial = [sharded.name for sharded in sharded_params], self.engine.hooks.peers is not None
        assignments, groups = plan_unfrozen(self.engine.model, self.config, names, group_config, partial=partial)
        self.engine.assignments |= assignments
        for group in groups:
            existing = next((existing for existing in self.param_groups if existing["name"] == group.name), None)
            new_members = [sharded for sharded in sharded_params if sharded.name in group.members]
            like = None if existing is None else self.engine.step.sharded_params[existing["params"][0]]
            take_up(new_members, assignments, self.config, self.engine.graph_scalars, like)
            param_group = _param_group(group, self.engine.params)
            if existing is None:
                super().add_param_group(param_group)
            else:
                existing["params"] += [param for _, param in param_group["params"]]
                existing["param_names"] += [name for name, _ in param_group["params"]]
        warn_of_half_masters(sharded_params)
        if group_config is not None:
            warn_of_shared_rates(replace(self.config, groups=()), groups, group_config)
        self.engine.step.take_up(sharded_params, {group.name: group.method for group in groups})
        self.engine.ownership.take_up(sharded_params)

    def state_dict(self) -> dict[str, Any]:
        """Return torch.optim's state dict of this rank's shards, for the same rank to load; pickling it warns so."""
        state_dict = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        state_dict["state"] = {
            key: {name: part_of(params[key], name, value) for name, value in slots.items()}
            if isinstance(key, int)
            else slots
            for key, slots in state_dict["state"].items()
        }
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load momentum, AdamW moments and hyperparameters saved by :meth:`state_dict`.

        Raises:
            CheckpointError: groups differ, in their names, parameters or kinds of values; nothing is loaded.
        """
        self.unfreeze(name for group in state_dict["param_groups"] for name in group.get("param_names", ()))
        problems = state_problems(self.param_groups, state_dict["param_groups"])
        if problems:
            raise CheckpointError(
                f"{len(problems)} things do not fit; make the groups as they were saved:\n  " + "\n  ".join(problems)
            )
        self.engine.step.check_momentum(state_dict["param_groups"])
        super().load_state_dict(state_dict)
        self.loaded()

    def unfreeze(self, names: Iterable[str] | None = None) -> None:
        """Train parameters from now on that were frozen when the model was sharded and require a gradient by now.

        They join the groups of the configuration; on all ranks alike. ``step()`` does so by itself.

        Args:
            names: of the parameters; None for all.
        Raises:
            UnsupportedModelError: other ranks unfroze other parameters.
            PeerError: other ranks do something else.
        """
        with self.engine.status.at("unfreezing"):
            self._unfreeze(members=None if names is None else list(names))

    def loaded(self, steps: int | None = None) -> None:
        """Take up weights or optimizer state written from outside: directions are made anew, replicas gathered anew.

        Args:
            steps: how many steps of training they have behind them, if known; counts in errors alone.
        """
        self.engine.step.pending, self.engine.step.torn = None, False  # checks of a step whose weights are gone
        if steps is not None:
            self.engine.status.step = steps + 1
        for sharded in self.engine.step.muon:
            sharded.speculations.drop()
        self.engine.step.own_momenta()
        for loaded in self.engine.hooks.loaded:
            loaded()
        self.engine.step.sync_momentum()
        self.engine.ledger.count(start_refresh(self.engine.params))


def _param_group(group: Group, sharded_params: Iterable[ShardedParam]) -> dict[str, Any]:
    by_name = {sharded.name: sharded.param for sharded in sharded_params}
    named = [(name, by_name[name]) for name in group.members]
    return {"params": named, "algorithm": group.method.name, "name": group.name, **group.rates}
