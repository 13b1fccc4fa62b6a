"""``MuonZero``: Muon for hidden matrices, AdamW for the rest, over ZeRO-sharded parameters.

``step()`` finishes what backward did not: it reduces what stage 1 still holds, checks and clips gradients, sends raw
Muon gradients through the step graph, commits the updates, and refreshes the resident weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from compile_muon.config.settings import Config, config_from_kwargs
from compile_muon.errors import NonFiniteError
from compile_muon.kernels import muon_apply
from compile_muon.model.assignment import assign, lr_scale
from compile_muon.model.sharding import resolve_mesh, shard_model
from compile_muon.passes.collectives import Traffic
from compile_muon.passes.exchange import transfers
from compile_muon.runtime.ledger import Ledger, ParamState, edited_error, like_parameter, local_tensor, samples_differ
from compile_muon.runtime.replicas import refresh_replicas
from compile_muon.runtime.step_graph import StepGraphs
from compile_muon.summary import Summary, summarize

__all__ = ["MuonZero"]


class MuonZero(Optimizer):
    """Shards ``model`` in place (ZeRO stage 0 to 3) and optimizes it with Muon and AdamW.

    Args:
        model: module with all parameters on one device; becomes sharded. Not yet wrapped by DDP or FSDP.
        lr, momentum, nesterov, weight_decay: of the Muon group (momentum is an EMA factor, decay is decoupled).
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: of the AdamW group.
        adjust_lr: "original", "match_rms_adamw" or "spectral" scaling of ``lr`` by the matrix shape.
        ns_steps, ns_coefficients, ns_method, ns_dtype: how Newton-Schulz runs.
        stage: 0 replicates everything, 1 shards optimizer state, 2 also gradients, 3 also parameters.
        update: "backward" updates inside compiled backward graphs, "step" in the step graph, "auto" chooses.
        exchange: "replicate", "owner" or "auto" (cheaper by formula, per matrix).
        gradient_accumulation_steps: backwards per step; None when unknown.
        gradient_clipping: global norm, or None.
        nonfinite: "error" or "skip" on inf or nan gradients.
        param_dtype, reduce_dtype: dtypes of weights in the model and of gradients on the wire.
        muon_params: predicate ``f(name, param)`` or name patterns of the Muon matrices.
        mesh: 1-D data-parallel ``DeviceMesh``; default: all ranks of the default process group.
    Raises:
        ConfigError: a setting is unknown, out of range or contradicts another.
        UnsupportedModelError: a parameter cannot be sharded or orthogonalized. Nothing is changed in either case.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adamw_lr: float = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.1,
        adjust_lr: str = "original",
        ns_steps: int = 5,
        ns_coefficients: str | Sequence[Any] = "jordan",
        ns_method: str = "auto",
        ns_dtype: str | torch.dtype = "auto",
        stage: int = 2,
        update: str = "auto",
        exchange: str = "auto",
        gradient_accumulation_steps: int | None = 1,
        gradient_clipping: float | None = None,
        nonfinite: str = "error",
        param_dtype: torch.dtype | str | None = None,
        reduce_dtype: torch.dtype | str | None = None,
        muon_params: Callable[[str, nn.Parameter], Any] | Sequence[str] | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        settings = {k: v for k, v in locals().items() if k not in ("self", "model", "mesh", "__class__")}
        self._setup(model, config_from_kwargs(**settings), mesh, None)

    @classmethod
    def from_config(
        cls,
        model: nn.Module,
        config: Config,
        *,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> MuonZero:
        """The same from a resolved :class:`Config`."""
        self = cls.__new__(cls)
        self._setup(model, config, mesh, process_group)
        return self

    def _setup(
        self, model: nn.Module, config: Config, mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None
    ) -> None:
        assignments = assign(model, config.muon_params, use_muon=config.algorithm == "muon")
        device = next(model.parameters()).device
        mesh = resolve_mesh(mesh, process_group, device)
        self.config = config
        self.grad_norm: Tensor | None = None
        self._group = None if mesh is None else mesh.get_group()
        self._hyper = torch.empty(2, dtype=torch.float32, device=device)
        self._hyper_momentum: float | None = None
        self._step_graphs = StepGraphs()
        self._ledger = Ledger(
            accumulation_steps=config.zero.gradient_accumulation_steps,
            update_in_backward=config.zero.update != "step" and not config.zero.barriers(),
        )
        states = shard_model(model, assignments, config, mesh, self._ledger, lambda _: self._hyper)
        self._ledger.states = states
        self._ledger.refresh = self._refresh_all
        self._ledger.before_backward = self._sync_momentum
        self._assignments = assignments
        trained = [state for state in states if state.param.requires_grad]
        self._muon = [state for state in trained if state.spec.muon is not None]
        self._adamw = [state for state in trained if state.spec.muon is None]
        self._scales = {
            state.name: lr_scale(config.muon.adjust_lr, muon.rows, muon.cols)
            for state in self._muon
            if (muon := state.spec.muon) is not None
        }
        super().__init__(self._groups(), {})
        # OneCycleLR and CyclicLR look here for what they may cycle; as a default it would enter every group.
        cycled = "momentum" if self._muon else "betas"
        self.defaults[cycled] = self.param_groups[0][cycled]
        self._create_state()
        self._sync_momentum()
        for state in trained:
            updates = self._ledger.update_in_backward and state.spec.muon is not None
            if updates or state.spec.accumulates:
                state.param.register_hook(lambda grad, s=state: self._ledger.arriving(s, grad))
                state.param.register_post_accumulate_grad_hook(lambda _, s=state: self._ledger.delivered(s))

    def _groups(self) -> list[dict[str, Any]]:
        muon, rest = self.config.muon, self.config.adamw
        groups: list[dict[str, Any]] = []
        if self._muon:
            groups.append(
                {
                    "params": [(s.name, s.param) for s in self._muon],
                    "algorithm": "muon",
                    "lr": muon.lr,
                    "momentum": muon.momentum,
                    "weight_decay": muon.weight_decay,
                }
            )
        if self._adamw:
            groups.append(
                {
                    "params": [(s.name, s.param) for s in self._adamw],
                    "algorithm": "adamw",
                    "lr": rest.lr,
                    "betas": rest.betas,
                    "eps": rest.eps,
                    "weight_decay": rest.weight_decay,
                }
            )
        return groups

    def _group_of(self, algorithm: str) -> dict[str, Any]:
        return next(group for group in self.param_groups if group["algorithm"] == algorithm)

    def _create_state(self) -> None:
        """All state exists from the start, so checkpoints and sharding see it before the first step."""
        for state in self._muon:
            self.state[state.param]["momentum_buffer"] = like_parameter(state.param, state.momentum)
        for state in self._adamw:
            zeros = [like_parameter(state.param, torch.zeros_like(state.local)) for _ in range(2)]
            self.state[state.param] = {"step": torch.tensor(0.0), "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}

    def _sync_momentum(self) -> None:
        """Bring the tensor that graphs read in line with ``param_groups`` (schedulers may change the momentum)."""
        if not self._muon:
            return
        momentum = self._group_of("muon")["momentum"]
        if momentum != self._hyper_momentum:
            # .data: graphs saved this tensor for backward; a new value is no reason to refuse their backward.
            self._hyper.data.copy_(torch.tensor([1 - momentum, momentum], dtype=torch.float32))
            self._hyper_momentum = momentum

    # ------------------------------------------------------------------ what users read

    def accumulate(self) -> AbstractContextManager[None]:
        """``with optimizer.accumulate():`` around every micro-batch but the last of a step (DDP's ``no_sync``)."""
        return self._ledger.accumulate()

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and orthogonalized since the start, counted from the graphs that ran."""
        return self._ledger.traffic

    def summary(self) -> Summary:
        """Which parameter gets which algorithm, stage and exchange strategy, and why."""
        return summarize(self._ledger.states, self._assignments, self.config)

    # ------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step.

        Args:
            closure: re-evaluates the model and returns the loss, as in torch.optim.
        Raises:
            LedgerError: a Muon direction in ``.grad`` was edited.
            NonFiniteError: a gradient is not finite and ``nonfinite="error"``; parameters and state are unchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._sync_momentum()
        for state in self._muon:
            self._ledger.check_untouched(state)
            self._ledger.check_fresh(state)
        self._reduce_leftovers()
        updated, raw = self._split_by_kind()
        if self._measure(updated, raw):
            self._update(updated, raw)
        self._ledger.close()
        return loss

    def _reduce_leftovers(self) -> None:
        """Stage 1: a boundary that backward could not see leaves unreduced sums, dropped with ``.grad``."""
        for state in self._ledger.states:
            if state.unreduced is not None and state.param.grad is not None:
                self._ledger.add_gradient(state, transfers.reduce_grad(state.unreduced, state.spec))
            state.unreduced = None

    def _split_by_kind(self) -> tuple[list[ParamState], list[ParamState]]:
        """Parameters whose ``.grad`` is a direction already, and those whose ``.grad`` is a raw gradient."""
        updated, raw = [], []
        for state in (*self._muon, *self._adamw):
            if state.param.grad is None:
                state.pending = None  # like torch: no gradient, no update
            elif state.pending is not None:
                updated.append(state)
            else:
                raw.append(state)
        return updated, raw

    def _measure(self, updated: Sequence[ParamState], raw: Sequence[ParamState]) -> bool:
        """Global norm, finiteness and clipping; returns whether to go on with the step."""
        squares = dict.fromkeys((s.name for s in (*self._muon, *self._adamw)), self._hyper.new_zeros(()))
        for state in updated:
            squares[state.name] = state.pending.norm_squared  # type: ignore[union-attr]
        gradients = [state.local_grad for state in raw]
        if gradients:
            for state, norm in zip(raw, torch._foreach_norm(gradients), strict=True):
                squares[state.name] = norm.float().square()
        sampled = [state for state in updated if state.pending and state.pending.sample is not None]
        edited = samples_differ(sampled).float() if sampled else self._hyper.new_zeros(())
        vector, edited = self._sum_over_ranks(torch.stack(list(squares.values())), edited)
        self.grad_norm = vector.sum().sqrt()
        if not bool(torch.isfinite(vector).all() & (edited == 0)):  # the step's one wait for the device
            if not bool(torch.isfinite(vector).all()):
                return self._refuse_nonfinite(list(squares), vector)
            raise edited_error(next((s for s in sampled if samples_differ([s])), sampled[0]).name)
        limit = self.config.zero.gradient_clipping
        if limit is not None and gradients:
            torch._foreach_mul_(gradients, (limit / (self.grad_norm + 1e-6)).clamp(max=1.0))
        return True

    def _sum_over_ranks(self, squares: Tensor, edited: Tensor) -> tuple[Tensor, Tensor]:
        states = (*self._muon, *self._adamw)
        if self._group is None or not any(state.spec.sharded for state in states):
            return squares, edited
        # What every rank holds whole would be counted once per rank.
        shares = [1.0 if state.spec.sharded else 1.0 / state.spec.world for state in states]
        both = torch.cat([squares * torch.tensor(shares, device=squares.device), edited[None]])
        dist.all_reduce(both, group=self._group)
        return both[:-1], both[-1]

    def _refuse_nonfinite(self, names: list[str], squares: Tensor) -> bool:
        if self.config.zero.nonfinite == "skip":
            for state in self._muon:
                if state.pending is not None:
                    state.note_direction()
            return False
        bad = [name for name, value in zip(names, squares.tolist(), strict=True) if not value < float("inf")]
        shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise NonFiniteError(
            f"gradient of {shown} = inf or nan: nothing was updated; lower the learning rate, look at the batch, or "
            "set nonfinite='skip' to leave such steps out"
        )

    def _update(self, updated: Sequence[ParamState], raw: Sequence[ParamState]) -> None:
        raw_muon = [state for state in raw if state.spec.muon is not None]
        raw_adamw = [state for state in raw if state.spec.muon is None]
        directions = {state.name: state.local_grad for state in updated}
        momenta = {state.name: state.pending.momentum for state in updated if state.pending is not None}
        if raw_muon:
            results, new_momenta, traffic = self._step_graphs.orthogonalize(
                raw_muon, [state.local_grad for state in raw_muon], self._ledger.options
            )
            self._ledger.count(traffic)
            directions.update(zip((s.name for s in raw_muon), results, strict=True))
            momenta.update(zip((s.name for s in raw_muon), new_momenta, strict=True))
        self._commit_muon([s for s in self._muon if s.name in directions], directions, momenta)
        if raw_adamw:
            self._step_adamw(raw_adamw)
        for state in updated:
            state.note_direction()
        changed = [s for s in (*self._muon, *self._adamw) if s.name in directions or s in raw_adamw]
        self._refresh(changed)

    def _commit_muon(
        self, states: Sequence[ParamState], directions: dict[str, Tensor], momenta: dict[str, Tensor]
    ) -> None:
        if not states:
            return
        torch._foreach_copy_([s.momentum for s in states], [momenta[s.name] for s in states])
        group = self._group_of("muon")
        muon_apply(
            [state.local.detach() for state in states],
            [directions[state.name] for state in states],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            scale=[self._scales[state.name] for state in states],
        )

    def _step_adamw(self, states: Sequence[ParamState]) -> None:
        group = self._group_of("adamw")
        rows = [self.state[state.param] for state in states]
        adamw(
            [state.local.detach() for state in states],
            [state.local_grad for state in states],
            [local_tensor(row["exp_avg"]) for row in rows],
            [local_tensor(row["exp_avg_sq"]) for row in rows],
            [],
            [row["step"] for row in rows],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _refresh(self, states: Sequence[ParamState]) -> None:
        self._ledger.count(refresh_replicas(states))

    def _refresh_all(self) -> None:
        self._refresh(self._ledger.states)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients; visits still owed are closed."""
        super().zero_grad(set_to_none)
        self._ledger.close()

    # ------------------------------------------------------------------ state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only the constructor adds parameters: a group from outside would be neither sharded nor in any graph."""
        if "algorithm" not in param_group:
            raise NotImplementedError(
                "add_param_group: MuonZero owns the parameters of one model; "
                "build a new MuonZero over the changed model instead"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load momentum, AdamW moments and hyperparameters saved by :meth:`state_dict`."""
        super().load_state_dict(state_dict)
        for state in self._muon:
            loaded = local_tensor(self.state[state.param]["momentum_buffer"])
            with torch.no_grad():
                state.momentum.copy_(loaded)
            self.state[state.param]["momentum_buffer"] = like_parameter(state.param, state.momentum)
        self.loaded()

    def loaded(self) -> None:
        """Weights or optimizer state were written from outside: forget the step under way, refresh the replicas."""
        self._ledger.close()
        self._sync_momentum()
        self._refresh_all()
