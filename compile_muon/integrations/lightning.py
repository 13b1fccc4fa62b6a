"""PyTorch Lightning's ``Trainer`` with ZeRO and Muon.

    trainer = L.Trainer(strategy=MuonZeroStrategy("config.json"), devices=2, gradient_clip_val=1.0)
    trainer.fit(module, loader)

Arguments, callbacks, loggers and loops stay Lightning's. The LightningModule is not wrapped in DDP, but sharded in
place where the optimizer is made, and all ranks take part in a checkpoint, still one file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.callbacks as plc
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compile_muon.agreement.status import RankStatus
from compile_muon.agreement.together import Ranks
from compile_muon.checkpoint.optimizer_state import full_optimizer_state, load_full_optimizer_state
from compile_muon.config import CompileConfig, Config, load_config
from compile_muon.config.checked import Mistakes
from compile_muon.engine import Extension
from compile_muon.engine.dtensors import local_tensor
from compile_muon.errors import CheckpointError, ConfigError, UnsupportedModelError, listed
from compile_muon.initialize import compile_in_place, initialize
from compile_muon.integrations.buffers import take_those_of_rank_0
from compile_muon.integrations.common import WHY, Refusal, Source, Why, contradicting, filled, is_sharded, refuse
from compile_muon.optimizer import MuonZero
from compile_muon.sequence.plan import SequencePlan, plan_of, plan_sequence
from compile_muon.weights import full_state_dict, load_full_state_dict

#: prefix that torch.compile(module) gives the names inside
_COMPILED = "_orig_mod."

_MUON = (
    "return compile_muon.MuonZero(self, ...), or give MuonZeroStrategy a config and return trainer.strategy.muon, "
    "alone or with an lr_scheduler"
)

#: callbacks that a sharded module breaks
_CALLBACKS: dict[type[plc.Callback], Why] = {
    **dict.fromkeys((plc.WeightAveraging, plc.StochasticWeightAveraging), Why(
        "copies the model before it is sharded",
        "average in a callback of your own, with torch.optim.swa_utils.AveragedModel made in on_train_start",
    )),
    plc.ModelPruning: Why("replaces parameters, which no graph would read", "prune before fit"),
    plc.BaseFinetuning: Why(
        "gives what it unfreezes one rate for Muon and AdamW, and replaces the optimizer's groups where a run goes on",
        "unfreeze in a callback of your own: requires_grad_(True) in on_train_epoch_start, and a parameter joins the "
        "group that the config has for it",
    ),
    **dict.fromkeys((plc.BatchSizeFinder, plc.LearningRateFinder), WHY["starts over"]),
}  # fmt: skip


class MuonZeroStrategy(DDPStrategy):
    """A Lightning strategy over a sharded LightningModule and :class:`compile_muon.MuonZero`.

    Launch and process groups are those of Lightning's ``DDPStrategy``; nothing is wrapped in DDP.

    Args:
        config: as ``compile_muon.initialize`` takes it; ``"auto"`` takes the Trainer's setting. Its optimizer is
            :attr:`muon`, to which ``configure_optimizers`` may add a scheduler. None if ``configure_optimizers`` makes
            a ``MuonZero`` itself.
        init: ``init(module)`` initializes the parameters that ``module`` holds itself, for a module built under
            ``trainer.init_module(empty_init=True)``; default: ``module.reset_parameters()``.
        extensions: features of your own, as ``MuonZero(extensions=...)`` takes them.
        process_group_backend: "gloo" or "nccl"; default: that of the device.
        timeout: of the process group's collectives.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in Lightning's own
            strategies; the Trainer fills them in.
    Raises:
        ConfigError: from ``trainer.fit``, ahead of any change: settings that cannot be honoured, all in one error.
    """

    strategy_name = "muon_zero"

    def __init__(
        self,
        config: Source | None = None,
        *,
        init: Callable[[nn.Module], Any] | None = None,
        extensions: Sequence[Extension] = (),
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
            process_group_backend=process_group_backend, timeout=timeout,
        )  # fmt: skip
        self.config = config
        self._init, self._extensions = init, extensions
        self._resolved: Config | None = None
        self._muon: MuonZero | None = None
        self._settings: list[dict[str, Any]] = []

    @property
    def muon(self) -> MuonZero:
        """The optimizer made from ``config``; ahead of ``configure_optimizers`` or without ``config`` a ConfigError."""
        if self._muon is None:
            raise ConfigError(
                "trainer.strategy.muon: is made from MuonZeroStrategy(config) where trainer.fit calls "
                "configure_optimizers; use it there or later, and give the strategy a config"
            )
        return self._muon

    # ------------------------------------------------------------------ processes

    def setup_environment(self) -> None:
        """Refuse settings that cannot be honoured, then create process groups."""
        trainer, mistakes = self.lightning_module.trainer, Mistakes()
        if trainer.state.fn == TrainerFn.FITTING:
            with mistakes.collected():
                refuse(self._refusals(trainer))
            with mistakes.collected():
                self._resolved = self._read(trainer)
        mistakes.raise_all()
        super().setup_environment()

    def setup_distributed(self) -> None:
        """Create a process group, if there is more than one process."""
        reset_seed()
        self.set_world_ranks()
        if self.world_size > 1:
            super().setup_distributed()

    def teardown(self) -> None:
        """Tear down the plugins; the module stays sharded on its device, to fit again, evaluate or save."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ------------------------------------------------------------------ settings

    def _read(self, trainer: pl.Trainer) -> Config | None:
        """Load the configuration, with ``"auto"`` filled in from the Trainer."""
        if self.config is None:
            return None
        clips = trainer.gradient_clip_val if trainer.gradient_clip_algorithm != "value" else None
        automatic = {
            ("gradient_accumulation_steps",): trainer.accumulate_grad_batches,
            ("gradient_clipping",): clips or 0.0,
            ("bf16", "enabled"): str(self.precision_plugin.precision).startswith("bf16"),
        }
        config = load_config(filled(self.config, automatic, defaults={("gradient_accumulation_steps",): None}))
        steps, tensor = config.zero.gradient_accumulation_steps, config.mesh and config.mesh.tensor
        if isinstance(self.config, Config) and steps == 1:  # a Config cannot tell 1 from absent
            steps = None
        count, limit = trainer.accumulate_grad_batches, trainer.gradient_clip_val
        rows = [
            (tensor not in (None, 1), "mesh.tensor", tensor, *WHY["tensor"]),
            contradicting("gradient_accumulation_steps", steps, "Trainer.accumulate_grad_batches", count),
            contradicting("gradient_clipping", config.zero.gradient_clipping, "Trainer.gradient_clip_val", limit),
        ]
        if config.sequence_parallel.size > 1 and not is_sharded(trainer.lightning_module):
            rows.append(_unseen(plan_sequence(trainer.lightning_module, config.sequence_parallel)))
        refuse(rows)
        # Lightning enters block_backward_sync for every micro-batch but the last.
        return replace(config, zero=replace(config.zero, gradient_accumulation_steps=1))

    def _refusals(self, trainer: pl.Trainer) -> list[Refusal]:
        module, plugin, device = trainer.lightning_module, self.precision_plugin, self.root_device.type
        half = type(plugin) is HalfPrecision and plugin.precision == "bf16-true"
        mixed = type(plugin) is MixedPrecision and plugin.scaler is None
        exact = type(plugin) in (Precision, DoublePrecision)
        return [
            (not (exact or half or mixed), "Trainer.precision", getattr(plugin, "precision", type(plugin).__name__),
             "scales the loss, or replaces layers or the step",
             'use "32-true", "bf16-mixed", "bf16-true" or "64-true"'),
            (device not in ("cpu", "cuda"), "Trainer.accelerator", device, "is not supported", "use CPU or CUDA"),
            (self._layer_sync is not None, "Trainer.sync_batchnorm", True,
             "puts collectives of its own between those of the compiled graphs, which has not been tried",
             "leave it out: every rank then has statistics of its own batches"),
            (trainer._detect_anomaly and self.world_size > 1, "Trainer.detect_anomaly", True,
             "fails in PyTorch's DTensor on several ranks",
             "use torch.autograd.set_detect_anomaly(True, check_nan=False), or one rank"),
            *((isinstance(callback, kind), "Trainer.callbacks", type(callback).__name__, *why)
              for callback in trainer.callbacks for kind, why in _CALLBACKS.items()),
            (is_sharded(module) and self._muon is None, "model", type(module).__name__,
             "has been sharded by another strategy, or by an optimizer of its own",
             "fit it again with the Trainer that did, where the strategy has a config; or save a checkpoint, and begin "
             "from load_from_checkpoint"),
        ]  # fmt: skip

    # ------------------------------------------------------------------ model and optimizer

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build on the meta device under ``trainer.init_module(empty_init=True)``; shards are initialized in fit."""
        device_context = torch.device("meta") if empty_init else nullcontext()
        with device_context, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the module and make its optimizer in fit; for evaluation alone, every rank has the whole module."""
        self.accelerator.setup(trainer)
        self.model = module = self.lightning_module
        fits = trainer.state.fn == TrainerFn.FITTING
        if not is_sharded(module):
            self.precision_plugin.convert_module(module)
            if not fits or self._resolved is None:
                _materialize_distributed_module(module, self.root_device)
            if not _is_meta(module):
                self.model_to_device()
            if not fits and dist.is_initialized():
                _sync_module_states(module)  # broadcast rank 0's values, as sharding does
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizer of ``config``, and call ``configure_optimizers`` for schedulers or another MuonZero."""
        module = self.lightning_module
        self._reset_optimizers_and_schedulers()
        if self._muon is not None and is_sharded(module):
            self._begin_anew(self._muon)
        elif self._resolved is not None:
            init = (self._init or _reset_parameters) if _is_meta(module) else None
            _, self._muon = initialize(module, self._resolved, init=init, extensions=self._extensions)
            self._settings = [{k: v for k, v in g.items() if k != "params"} for g in self._muon.param_groups]
            _compile_children(module, self._resolved.compile)
        configure = module.configure_optimizers

        def configured_or_own() -> Any:
            configured = configure()
            none = configured is None and self._muon is None
            problem = "makes no optimizer, and neither does the strategy"
            refuse([(none, "configure_optimizers", None, problem, _MUON)])
            return self._muon if configured is None else configured

        module.configure_optimizers = configured_or_own
        try:
            super().setup_optimizers(trainer)
        finally:
            del module.configure_optimizers
        self._check_optimizers(module)

    def _begin_anew(self, muon: MuonZero) -> None:
        """Reset the optimizer's state and settings, not the weights, as a new optimizer in every fit would."""
        for slots in muon.state.values():
            for value in slots.values():
                local_tensor(value).zero_()
        for group, settings in zip(muon.param_groups, self._settings, strict=True):
            for key in group.keys() - settings.keys() - {"params"}:
                del group[key]
            group.update(settings)
        muon.zero_grad()
        muon.loaded(0)

    def _check_optimizers(self, module: nn.Module) -> None:
        """Refuse foreign optimizers, and trainable parameters in no optimizer."""
        others = [type(each).__name__ for each in self.optimizers if not isinstance(each, MuonZero)]
        trained = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        idle = [name for name, param in module.named_parameters() if param.requires_grad and id(param) not in trained]
        rows: list[Refusal] = [
            (others, "configure_optimizers", ", ".join(others), "is another optimizer than the strategy's", _MUON),
            (not others and idle, "configure_optimizers", listed(idle), "are trainable, and in no optimizer",
             "give MuonZero the whole LightningModule, or set requires_grad=False; where they were frozen when it was "
             "sharded, save a checkpoint, and begin from load_from_checkpoint with them trainable"),
        ]  # fmt: skip
        if (plan := plan_of(module)) is not None:
            rows.append(_unseen(plan))
        refuse(rows)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of Lightning's samplers, by which ranks that share a sequence get equal batches."""
        muon_optimizers = [optimizer for optimizer in self.optimizers if isinstance(optimizer, MuonZero)]
        if not muon_optimizers:
            return super().distributed_sampler_kwargs
        place = muon_optimizers[0].data_place
        return {"num_replicas": place.world, "rank": place.rank}

    def on_validation_start(self) -> None:
        """Broadcast rank 0's buffers (BatchNorm's statistics), which a checkpoint has."""
        take_those_of_rank_0(self.lightning_module)

    on_test_start = on_predict_start = on_validation_start

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without a reduction: every micro-batch of a step but its last."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.accumulate())
            yield

    def post_backward(self, closure_loss: Tensor) -> None:
        """Add unfrozen parameters to their group, before Lightning clips the gradients of all groups."""
        super().post_backward(closure_loss)
        for optimizer in self.optimizers:
            if isinstance(optimizer, MuonZero) and not optimizer.engine.ledger.accumulating:
                optimizer.unfreeze()

    # ------------------------------------------------------------------ checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: whole weights of a checkpoint are loaded into shards."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return ``module.state_dict()``, whole and on the CPU, on rank 0; empty elsewhere."""
        module = self.lightning_module
        if not is_sharded(module):
            return module.state_dict()
        # Names of torch.compile(child) keep the prefix "_orig_mod.", which load_from_checkpoint expects.
        whole = full_state_dict(module)
        return dict(zip(module.state_dict(keep_vars=True), whole.values(), strict=True)) if whole else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state by parameter name, whole and on the CPU, on rank 0; empty elsewhere."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return full_optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one file from rank 0; a failure raises a CheckpointError on every rank."""
        with _ranks().together(f"{filepath}: was not saved"):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the file on every rank; a failure of one rank raises a CheckpointError on every rank."""
        checkpoint: dict[str, Any] = {}
        with _ranks().together(f"{checkpoint_path}: was not loaded"):
            if os.path.isdir(checkpoint_path):
                raise CheckpointError(
                    "it is a folder, as FSDP's and DeepSpeed's sharded checkpoints are; make a file of it with "
                    "`python -m lightning.pytorch.utilities.consolidate_checkpoint`, and begin from its weights"
                )
            if type(self.checkpoint_io) is TorchCheckpointIO and os.path.isfile(checkpoint_path):
                # With mmap the ranks of a node share one copy in memory.
                checkpoint = torch.load(checkpoint_path, map_location="cpu", mmap=True, weights_only=weights_only)
            else:
                checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights into the module; into shards, rank 0's weights."""
        module = self.lightning_module
        if is_sharded(module):
            weights = {name.replace(_COMPILED, ""): value for name, value in checkpoint["state_dict"].items()}
            load_full_state_dict(module, weights, strict=strict)
        else:
            module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states that any number of ranks saved.

        Raises a CheckpointError about states of another strategy, or of another number of optimizers.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"the checkpoint holds the state of {len(states)} optimizers, and there are {len(self.optimizers)}: "
                "give the same, or begin anew from its weights, with load_from_checkpoint"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_full_optimizer_state(optimizer, state)


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Return ``lightning.pytorch.utilities.grad_norm`` of a sharded module; collective.

    The dict has the norm of each parameter's whole gradient, if it has one, and ``grad_{norm_type}_norm_total``.
    """
    norm_type = float(norm_type)
    prefix = f"grad_{norm_type}_norm"
    grads = {name: param.grad.detach() for name, param in module.named_parameters() if param.grad is not None}
    norms = {name: torch.linalg.vector_norm(grad, norm_type) for name, grad in grads.items()}
    by_name = {
        f"{prefix}{group_separator}{name}": norm.full_tensor() if isinstance(norm, DTensor) else norm
        for name, norm in norms.items()
    }
    if by_name:
        by_name[f"{prefix}_total"] = torch.linalg.vector_norm(torch.stack(list(by_name.values())), norm_type)
    return by_name


# ---------------------------------------------------------------------------------------- of a module


def _unseen(plan: SequencePlan) -> Refusal:
    """Refuse sequence parallelism without a causal model, whose hook checks batches: Lightning bypasses ``forward``."""
    problem = "is checked where a causal language model of Transformers is called, and the module has none"
    remedy = "leave it out, or write the loop yourself (docs/how-to/sequence.md)"
    return plan.causal is None, "sequence_parallel.size", plan.size, problem, remedy


def _ranks() -> Ranks:
    group = dist.group.WORLD if dist.is_initialized() else None
    return Ranks(group, torch.device("cpu"), RankStatus(), apart=False)


def _is_meta(module: nn.Module) -> bool:
    return any(param.is_meta for param in module.parameters())


def _reset_parameters(module: nn.Module) -> None:
    """Initialize a module from the meta device, as Lightning does."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    elif module._parameters or module._buffers:
        raise UnsupportedModelError(
            f"{type(module).__name__}: is on the meta device and has no reset_parameters(); write one, or give "
            "MuonZeroStrategy(init=f) with f(module) initializing what a module holds itself"
        )


def _compile_children(module: nn.Module, settings: CompileConfig) -> None:
    """Compile the outermost callable modules with parameters, in place: Lightning does not call `module` itself.

    A ModuleList is not callable, so its children are compiled. If ``training_step`` does call ``self(batch)``, that
    call, which ``initialize`` compiles, is one graph around them.
    """
    for child in module.children() if settings.enabled else ():
        if next(child.parameters(), None) is None:
            continue
        if type(child).forward is nn.Module.forward:
            _compile_children(child, settings)
        elif child._compiled_call_impl is None and not isinstance(child, torch._dynamo.OptimizedModule):
            compile_in_place(child, settings)
