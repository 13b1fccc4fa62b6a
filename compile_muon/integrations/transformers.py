"""Hugging Face's ``Trainer`` with ZeRO and Muon.

    trainer = MuonTrainer(model=model, args=args, train_dataset=data, muon_config="config.json")
    trainer.train()

Arguments, callbacks, schedulers, logs and folders stay the ``Trainer``'s. The model is not wrapped in DDP, but sharded
where the optimizer is made; all ranks together save whole weights, and :class:`compile_muon.Checkpointer` saves
optimizer state, so that a run may resume on another number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from compile_muon.checkpoint import Checkpointer
from compile_muon.config import AdamWConfig, Config, load_config
from compile_muon.config.checked import Mistakes
from compile_muon.engine import Extension
from compile_muon.errors import listed
from compile_muon.initialize import initialize
from compile_muon.integrations.accelerate import refused_settings
from compile_muon.integrations.buffers import take_those_of_rank_0
from compile_muon.integrations.common import WHY, Refusal, Source, Why, contradicting, filled, is_sharded, refuse
from compile_muon.integrations.same_batches import give_same_batches
from compile_muon.mesh import axis_sizes, data_places
from compile_muon.optimizer import MuonZero
from compile_muon.sequence.plan import plan_of
from compile_muon.weights.pretrained import save_by_class

_FOLDER = "muon_zero"

#: path of a config -> function from TrainingArguments to the value of "auto" there
_AUTO = {
    ("gradient_accumulation_steps",): lambda args: args.gradient_accumulation_steps,
    ("gradient_clipping",): lambda args: args.max_grad_norm,
    ("bf16", "enabled"): lambda args: args.bf16,
    ("optimizer", "params", "lr"): lambda args: args.learning_rate,
    ("optimizer", "params", "weight_decay"): lambda args: args.weight_decay,
    ("optimizer", "params", "betas"): lambda args: [args.adam_beta1, args.adam_beta2],
    ("optimizer", "params", "eps"): lambda args: args.adam_epsilon,
    ("scheduler", "params", "warmup_min_lr"): lambda args: 0.0,
    ("scheduler", "params", "warmup_max_lr"): lambda args: args.learning_rate,
}


def _read(source: Source, args: TrainingArguments, steps: int = 1) -> Config:
    """Load the configuration, with ``"auto"`` and defaults filled in from `args`.

    `steps`: optimizer steps of the run, for the schedule; 1 while unknown.
    """
    automatic = {path: value(args) for path, value in _AUTO.items()}
    automatic["scheduler", "params", "total_num_steps"] = steps
    automatic["scheduler", "params", "warmup_num_steps"] = max(1, args.get_warmup_steps(steps))
    count = args.gradient_accumulation_steps
    # Vectors do not decay by default, even in a config of DeepSpeed: the Trainer's groups exempt them too.
    decay_vectors = "optimizer", "params", "adamw_decay_vectors"
    defaults = {("gradient_accumulation_steps",): count, decay_vectors: AdamWConfig.decay_vectors}
    config = load_config(filled(source, automatic, defaults=defaults))
    zero, name = config.zero, "gradient_accumulation_steps"
    limit = args.max_grad_norm if 0 < (args.max_grad_norm or 0) < math.inf else None
    refuse([
        contradicting(name, zero.gradient_accumulation_steps, f"TrainingArguments.{name}", count),
        contradicting("gradient_clipping", zero.gradient_clipping, "TrainingArguments.max_grad_norm", limit),
    ])  # fmt: skip
    # The Trainer enters accelerator.no_sync for every micro-batch but the last; an epoch's last step may have fewer.
    zero = dataclasses.replace(zero, gradient_accumulation_steps=1, gradient_clipping=zero.gradient_clipping or limit)
    return dataclasses.replace(config, zero=zero)


#: TrainingArguments that would train or save something else than they promise
_REFUSED: dict[str, Why] = {
    **dict.fromkeys(("deepspeed", "fsdp"), WHY["shards"]),
    **dict.fromkeys(("fp16", "fp16_full_eval", "bf16_full_eval"), WHY["casts"]),
    **dict.fromkeys(("optim_args", "optim_target_modules"), WHY["other"]),
    "torch_compile": WHY["compiles"],
    "auto_find_batch_size": WHY["starts over"],
    "save_on_each_node": Why("would leave folders without weights", "share output_dir"),
}

#: TrainingArguments of the optimizer -> (key in optimizer.params, function from a Config to its values)
_SETTINGS = {
    "learning_rate": ("lr", lambda config: (config.muon.lr, config.adamw.lr)),
    "weight_decay": ("weight_decay", lambda config: (config.muon.weight_decay, config.adamw.weight_decay)),
    "adam_beta1": ("betas", lambda config: (config.adamw.betas[0],)),
    "adam_beta2": ("betas", lambda config: (config.adamw.betas[1],)),
    "adam_epsilon": ("eps", lambda config: (config.adamw.eps,)),
}


def _refusals(args: TrainingArguments, trainer_kwargs: Mapping[str, Any]) -> list[Refusal]:
    """Return refusals of `args`, and of `trainer_kwargs`, the Trainer's keyword arguments."""
    optim, several = getattr(args.optim, "value", args.optim), args.world_size > 1
    uneven = not args.accelerator_config.even_batches
    trainer_kwargs = {
        name: trainer_kwargs.get(name) or (None, None) for name in ("optimizers", "optimizer_cls_and_kwargs")
    }
    rows: list[Refusal] = [
        *((getattr(args, name), name, getattr(args, name), *why) for name, why in _REFUSED.items()),
        (optim not in ("adamw_torch", "adamw_torch_fused"), "optim", optim, *WHY["other"]),  # the defaults
        (args.n_gpu > 1, "n_gpu", args.n_gpu, "is DataParallel", "start one process per GPU with torchrun"),
        (several and args.enable_jit_checkpoint, "enable_jit_checkpoint", True,
         "saves on a rank by itself, and weights take all", "use save_steps"),
        (several and uneven, "accelerator_config", "even_batches=False",
         "gives ranks different numbers of batches, and weights take all", "leave it out"),
    ]  # fmt: skip
    return [(so, f"TrainingArguments.{name}", *row) for so, name, *row in rows] + [
        (other != (None, None), name, type(other[0]).__name__, *WHY["other"]) for name, other in trainer_kwargs.items()
    ]


def _refused_beside(config: Config, args: TrainingArguments) -> Iterator[Refusal]:
    """Yield refusals of `config`, and of optimizer settings in `args` that are neither defaults nor in `config`."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, (key, values_of) in _SETTINGS.items():
        value, config_values = getattr(args, name), values_of(config)
        said = " and ".join(dict.fromkeys(map(str, config_values)))
        problem = f"is not what muon_config says, {said}, and has no effect"
        remedy = f'write "{key}": "auto" in optimizer.params of muon_config, or leave this out'
        yield value not in (defaults[name], *config_values), f"TrainingArguments.{name}", value, problem, remedy
    tensor, inputs = config.mesh and config.mesh.tensor, config.sequence_parallel.inputs
    whole_batches = "cannot be: loaders here give ranks whole batches"
    yield tensor not in (None, 1), "mesh.tensor", tensor, *WHY["tensor"]
    yield inputs == "sharded", "sequence_parallel.inputs", inputs, whole_batches, "leave it out"


class MuonTrainer(Trainer):
    """``transformers.Trainer`` over a sharded model and :class:`compile_muon.MuonZero`.

    Args:
        muon_config: as ``compile_muon.initialize`` takes it; ``"auto"`` takes the TrainingArguments' value.
        muon_groups: parameters with rates of their own, as ``MuonZero(groups=...)`` takes them, or a function from the
            model to such groups; replaces an override of ``create_optimizer``.
        muon_extensions: features of your own, as ``MuonZero(extensions=...)`` takes them.
        args, kwargs: the Trainer's own.
    Raises:
        ConfigError: settings that cannot be honoured, all in one error.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        muon_config: Source,
        muon_groups: Any = None,
        muon_extensions: Sequence[Extension] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._muon_source, self._muon_groups, self._muon_extensions = muon_config, muon_groups, muon_extensions
        mistakes = Mistakes()
        with mistakes.collected():
            refuse(_refusals(self.args, kwargs))
            refuse(refused_settings(self.accelerator))  # also of `accelerate launch`, which no argument shows
        with mistakes.collected():
            self.muon_config = _read(muon_config, self.args)
            refuse(_refused_beside(self.muon_config, self.args))
            places = data_places(axis_sizes(self.muon_config, self.args.world_size))
        mistakes.raise_all()
        # Accelerate wraps models in DDP for training, but not for evaluation.
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = lambda model, device_placement=None, evaluation_mode=False: prepare(
            model, device_placement=device_placement, evaluation_mode=True
        )
        give_same_batches(self.accelerator, places)
        self.accelerator.no_sync = lambda model=None: self.muon.accumulate()

    @property
    def muon(self) -> MuonZero:
        """The optimizer inside all wrappers of Accelerate."""
        optimizer = self.optimizer
        while not isinstance(optimizer, MuonZero):
            optimizer = optimizer.optimizer
        return optimizer

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Shard the model in place, compile it if so configured, and make its optimizer, once."""
        if self.optimizer is None:
            model = self.model if model is None else model
            refuse([
                (is_sharded(model), "MuonTrainer.model", type(model).__name__,
                 "is sharded, and trained by the MuonZero of the trainer that did it",
                 "call train() of that trainer once more, or give this one a whole copy: "
                 "`with compile_muon.full_parameters(model): model = copy.deepcopy(model)`, on all ranks"),
            ])  # fmt: skip
            decayed = set(self.get_decay_parameter_names(model))
            for name, param in model.named_parameters():
                if name not in decayed and not self.muon_config.adamw.decay_vectors:
                    setattr(param, "_no_weight_decay", True)  # noqa: B010 - an attribute that no type declares
            groups = self._muon_groups(model) if callable(self._muon_groups) else self._muon_groups
            more: dict[str, Any] = {"groups": groups, "extensions": self._muon_extensions, "dist_init_required": False}
            self.model, self.optimizer = initialize(model, self.muon_config, **more)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Build the schedule of ``muon_config``, if it has one, in place of ``lr_scheduler_type``."""
        if self.lr_scheduler is None and self.muon_config.scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the first read has warned already
                schedule = _read(self._muon_source, self.args, num_training_steps).scheduler
            assert schedule is not None
            self.lr_scheduler = self.muon.scheduler = schedule.build(self.muon)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _clip_grad_norm(self, model: torch.nn.Module) -> None:
        """Do nothing: the optimizer clips in its own step, where it accounts for directions made in backward."""

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> None:
        """Return None: the norm is known after the step, see :meth:`_maybe_log_save_evaluate`."""

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> Any:
        # metrics() waits for the device, so call it only if this step is logged.
        norm = self.muon.metrics().get("grad_norm") if self.control.should_log else None
        return super()._maybe_log_save_evaluate(tr_loss, norm, *args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; ``resume_from_checkpoint=True`` takes the newest checkpoint that was not cut off."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_whole()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _newest_whole(self) -> str | bool:
        """Return the newest complete checkpoint, or True, for the Trainer's own error, if there is no checkpoint.

        The Trainer's state is the last file that a checkpoint gets. If all checkpoints lack it, raise a ConfigError.
        """
        folders = {folder.name: folder for folder in Path(self.args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
        steps = {int(step): folder for name, folder in folders.items() if (step := name.rpartition("-")[2]).isdigit()}
        complete = [step for step, folder in steps.items() if (folder / TRAINER_STATE_NAME).is_file()]
        problem = f"saving {listed(sorted(folders))} was cut off, and there is no other"
        remedy = f"begin anew: remove it from {self.args.output_dir}, or leave resume_from_checkpoint out"
        refuse([(steps and not complete, "resume_from_checkpoint", True, problem, remedy)])
        return str(steps[max(complete)]) if complete else True

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a ConfigError: trials cannot share a sharded model."""
        refuse([(True, "hyperparameter_search", kwargs, *WHY["starts over"])])

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with rank 0's buffers (BatchNorm's statistics) on every rank, as a checkpoint has them."""
        if self.args.ddp_broadcast_buffers is not False:
            take_those_of_rank_0(self.model)
        if self._sharing > 1:  # as patched; Seq2SeqTrainer's own is `gather`, for differing lengths
            self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)

    # ------------------------------------------------------------------ ranks that share a sequence

    @property
    def _sharing(self) -> int:
        """Number of ranks that get the same batches."""
        return self.muon_config.sequence_parallel.size

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **kwargs: Any
    ) -> Any:
        """Predict with joined positions; a loss alone needs only this rank's."""
        plan = None if prediction_loss_only else plan_of(self.model)
        with contextlib.nullcontext() if plan is None else plan.wanting("joined"):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **kwargs)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples in a step, those of a group of ranks once."""
        return super().get_total_train_batch_size(args) // self._sharing

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count each token once: the Trainer sums over all ranks."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self._sharing

    # ------------------------------------------------------------------ logs

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add ``optimizer.metrics()`` and ``totals()`` to the Trainer's training logs."""
        if "loss" in logs and self.optimizer is not None:
            metrics = {**self.muon.metrics(), **self.muon.totals()}
            logs = {**logs, **{f"muon_zero/{name}": value for name, value in metrics.items() if name != "grad_norm"}}
        super().log(logs, *args, **kwargs)

    # ------------------------------------------------------------------ saving and loading

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Write whole weights by all ranks together, and other files by one."""
        if self.optimizer is None:  # nothing is sharded yet
            return super()._save(output_dir, state_dict)
        folder = output_dir if output_dir is not None else self.args.output_dir
        save_by_class(self.accelerator.unwrap_model(self.model, keep_torch_compile=False), folder)
        if not self.args.should_save:
            return
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpointer = Checkpointer(os.path.join(output_dir, _FOLDER), keep_last=1)
        checkpointer.save(self.state.global_step, self.model, self.muon, scheduler=self.lr_scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save every rank's state."""
        super()._save_rng_state(output_dir)
        # All ranks' files exist before the Trainer's state marks the checkpoint as complete.
        if self.args.world_size > 1:
            dist.barrier()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = os.path.join(checkpoint, _FOLDER)
        contents = Checkpointer(folder).load(self.model, self.muon, scheduler=self.lr_scheduler)
        problem = "has no optimizer state of MuonZero in it"
        remedy = "resume from one saved with save_only_model=False, or begin anew from its weights with from_pretrained"
        refuse([(contents is None, "resume_from_checkpoint", checkpoint, problem, remedy)])


class MuonSeq2SeqTrainer(MuonTrainer, Seq2SeqTrainer):
    """:class:`MuonTrainer` over ``transformers.Seq2SeqTrainer``; at stage 3 all ranks generate the longest length."""

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **gen_kwargs: Any
    ) -> Any:
        """Predict; at stage 3 every token gathers weights, so ranks generate in step."""
        generate_kwargs = gen_kwargs or dict(getattr(self, "_gen_kwargs", {}))
        if self.muon_config.zero.stage == 3:
            generate_kwargs.setdefault("synced_gpus", self.args.world_size > 1)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **generate_kwargs)
