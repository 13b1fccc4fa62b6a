"""Arguments of other optimizers and wrappers, and their names here: torch.optim.Muon and AdamW, Keller Jordan's Muon
and MuonWithAuxAdam, Moonlight, dion, DeepSpeed, and sharding wrappers."""

from __future__ import annotations

from collections.abc import Mapping


def _each(remedies: Mapping[str, str]) -> dict[str, str]:
    """Split keys of several names: "a b" -> remedy becomes a -> remedy and b -> remedy."""
    return {name: remedy for names, remedy in remedies.items() for name in names.split()}


#: Argument of another optimizer -> what to write here.
OF_OPTIMIZERS = _each(
    {
        "adjust_lr_fn": 'write adjust_lr, "original", "match_rms_adamw" or the factor of the latter',
        "betas beta1": "write adamw_betas; Muon's own factor is momentum",
        "eps epsilon": "write adamw_eps; that of Newton-Schulz is ns_eps",
        "muon_lr": "write lr, which is Muon's alone",
        "adam_lr": "write adamw_lr",
        "mu muon_momentum": "write momentum",
        "wd muon_weight_decay adamw_wd": "write weight_decay, which is Muon's alone, and adamw_weight_decay",
        "cautious_wd cautious_weight_decay": 'write rates={"cautious_decay": True}',
        "beta2 muon_beta2": 'write method="normuon" with rates={"beta2": 0.95}; of AdamW, adamw_betas',
        "params model_parameters": "leave it out: the model holds them",
        "param_groups": "write groups=[...]",
        "adamw_params": 'leave it out: all but muon_params, or write groups=[{"params": [...], "method": "adamw"}]',
        "use_muon": 'write muon_params, or groups=[{"params": [...], "method": "muon"}]',
        "algorithm": "write method, or groups with a method each",
        "backend": "write ns_backend",
        "backend_steps newton_schulz_steps": "write ns_steps",
        "newton_schulz_func": "write ns_coefficients, ns_steps, ns_method or ns_backend",
        "use_polar_express": 'write ns_coefficients="polar_express"',
        "use_gram_newton_schulz": 'write ns_method="gram"',
        "use_triton": 'write ns_backend="triton"',
        "flatten": "write muon_views: what is no matrix is read as one by its first dimension",
        "distributed_mesh device_mesh": "write mesh=DeviceMesh(...), or leave it out for all ranks",
        "process_group": "write mesh, or MuonZero.from_config(model, config, process_group=...)",
        "rank world_size": "leave it out: the process group knows",
        "fused foreach capturable": "leave it out: how AdamW is computed is chosen by device",
        "differentiable": "leave it out: a step is not differentiated",
        "maximize": "leave it out, and negate the loss",
        "amsgrad bias_correction adam_w_mode": "leave it out: there is AdamW, decoupled and bias-corrected, and "
        'auxiliary="lion"',
        "max_grad_norm clip_grad max_norm": "write gradient_clipping",
        "config config_params": "write MuonZero.from_config(model, config), or compile_muon.initialize(model, config)",
        "scheduler": "leave it out, and make one of torch.optim.lr_scheduler; or write it in a config",
        "compile": 'write torch.compile(model, backend="muon_zero") behind it, or use compile_muon.initialize',
        "zero_stage": "write stage",
        "mp_policy mixed_precision": "write param_dtype and reduce_dtype",
        "cpu_offload offload_policy": 'write offload="cpu", or offload_param="cpu" for weights',
        "reshard_after_forward": 'write torch.compile(..., options={"reshard_after_forward": ...})',
    }
)

#: Key of another optimizer's parameter group -> what to write in a group here.
OF_GROUPS = _each(
    {
        "use_muon": 'write "method": "muon" or "adamw", or leave it out: each parameter has one by the rules',
        "algorithm": 'write "method"',
        "adjust_lr_fn": "write adjust_lr, which is one for all groups, beside them",
        "mu": 'write "momentum"',
        "wd": 'write "weight_decay"',
        "epsilon adamw_eps": 'write "eps"',
        "muon_lr adam_lr adamw_lr": 'write "lr"',
        "adamw_betas": 'write "betas"',
        "muon_beta2": 'write "beta2", with "method": "normuon"',
        "cautious_wd": 'write "cautious_decay"',
        "lr_scale": 'write the product as "lr"',
        "param_names": 'leave it out, or give patterns as "params"',
    }
)
