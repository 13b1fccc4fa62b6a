"""Arguments that other libraries have for the same: those of torch.optim.Muon and AdamW, of Keller Jordan's Muon and
MuonWithAuxAdam, of Moonlight, dion and DeepSpeed, and of the wrappers that shard."""

from __future__ import annotations

__all__ = ["OF_GROUPS", "OF_OPTIMIZERS"]

_DECAY = 'write rates={"cautious_decay": True}'
_DIRECTION = "write ns_coefficients, ns_steps, ns_method or ns_backend"
_NEEDLESS = "leave it out: how AdamW is computed is chosen by device"
_MESH = "write mesh=DeviceMesh(...), or leave it out for all ranks"
_NO_ADAM = 'leave it out: there is AdamW, decoupled and bias-corrected, and auxiliary="lion"'
_BETA2 = 'write method="normuon" with rates={"beta2": 0.95}; of AdamW, adamw_betas'

#: Argument of another optimizer -> what to write here.
OF_OPTIMIZERS: dict[str, str] = {
    "adjust_lr_fn": 'write adjust_lr, "original", "match_rms_adamw" or the factor of the latter',
    "betas": "write adamw_betas; Muon's own factor is momentum",
    "eps": "write adamw_eps; that of Newton-Schulz is ns_eps",
    "epsilon": "write adamw_eps; that of Newton-Schulz is ns_eps",
    "muon_lr": "write lr, which is Muon's alone",
    "adam_lr": "write adamw_lr",
    "mu": "write momentum",
    "muon_momentum": "write momentum",
    "wd": "write weight_decay and adamw_weight_decay",
    "muon_weight_decay": "write weight_decay, which is Muon's alone",
    "adamw_wd": "write adamw_weight_decay",
    "cautious_wd": _DECAY,
    "cautious_weight_decay": _DECAY,
    "beta1": "write adamw_betas, or momentum for Muon",
    "beta2": _BETA2,
    "muon_beta2": _BETA2,
    "params": "leave it out: the model holds them",
    "param_groups": "write groups=[...]",
    "model_parameters": "leave it out: the model holds them",
    "adamw_params": 'leave it out: all but muon_params, or write groups=[{"params": [...], "method": "adamw"}]',
    "use_muon": 'write muon_params, or groups=[{"params": [...], "method": "muon"}]',
    "algorithm": "write method, or groups with a method each",
    "backend": "write ns_backend",
    "backend_steps": "write ns_steps",
    "newton_schulz_steps": "write ns_steps",
    "newton_schulz_func": _DIRECTION,
    "use_polar_express": 'write ns_coefficients="polar_express"',
    "use_gram_newton_schulz": 'write ns_method="gram"',
    "use_triton": 'write ns_backend="triton"',
    "flatten": "write muon_views: what is no matrix is read as one by its first dimension",
    "distributed_mesh": _MESH,
    "device_mesh": _MESH,
    "process_group": "write mesh, or MuonZero.from_config(model, config, process_group=...)",
    "rank": "leave it out: the process group knows",
    "world_size": "leave it out: the process group knows",
    "fused": _NEEDLESS,
    "foreach": _NEEDLESS,
    "capturable": _NEEDLESS,
    "differentiable": "leave it out: a step is not differentiated",
    "maximize": "leave it out, and negate the loss",
    "amsgrad": _NO_ADAM,
    "bias_correction": _NO_ADAM,
    "adam_w_mode": _NO_ADAM,
    "max_grad_norm": "write gradient_clipping",
    "clip_grad": "write gradient_clipping",
    "max_norm": "write gradient_clipping",
    "config": "write MuonZero.from_config(model, config), or compile_muon.initialize(model, config)",
    "config_params": "write compile_muon.initialize(model, config)",
    "scheduler": "leave it out, and make one of torch.optim.lr_scheduler; or write it in a config",
    "compile": 'write torch.compile(model, backend="muon_zero") behind it, or use compile_muon.initialize',
    "zero_stage": "write stage",
    "mp_policy": "write param_dtype and reduce_dtype",
    "mixed_precision": "write param_dtype and reduce_dtype",
    "cpu_offload": 'write offload="cpu", or offload_param="cpu" for weights',
    "offload_policy": 'write offload="cpu", or offload_param="cpu" for weights',
    "reshard_after_forward": 'write torch.compile(model, backend="muon_zero", options={"reshard_after_forward": ...})',
}

#: Key of another optimizer's parameter group -> what to write in a group here.
OF_GROUPS: dict[str, str] = {
    "use_muon": 'write "method": "muon" or "adamw", or leave it out: each parameter has one by the rules',
    "algorithm": 'write "method"',
    "adjust_lr_fn": "write adjust_lr, which is one for all groups, beside them",
    "mu": 'write "momentum"',
    "wd": 'write "weight_decay"',
    "epsilon": 'write "eps"',
    "muon_lr": 'write "lr"',
    "adam_lr": 'write "lr"',
    "adamw_lr": 'write "lr"',
    "adamw_betas": 'write "betas"',
    "adamw_eps": 'write "eps"',
    "muon_beta2": 'write "beta2", with "method": "normuon"',
    "cautious_wd": 'write "cautious_decay"',
    "lr_scale": 'write the product as "lr"',
    "param_names": 'leave it out, or give patterns as "params"',
}
