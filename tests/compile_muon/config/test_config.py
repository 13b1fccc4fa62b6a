"""Configuration: each bad input gets one error with field, value and remedy; all vocabularies end in the same place."""

import ast
import dataclasses
import inspect
import json
import pickle
import re
from pathlib import Path

import pytest
import torch

from compile_muon import errors
from compile_muon.config import (
    ARGUMENTS,
    AdamWConfig,
    CompileConfig,
    CompileOptions,
    Config,
    FrameOptions,
    MeshConfig,
    MuonConfig,
    NSConfig,
    OffloadConfig,
    ZeroConfig,
    config_from_kwargs,
    load_config,
    read_options,
)
from compile_muon.config.groups import GroupConfig
from compile_muon.config.sections import SECTIONS
from compile_muon.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    LedgerError,
    MuonZeroError,
    MuonZeroWarning,
    NonFiniteError,
    OffloadError,
    PassContractError,
    PeerError,
    UnsupportedModelError,
    VerificationError,
    config_error,
    join_errors,
)
from compile_muon.kernels.coefficients import COEFFICIENTS, resolve_coefficients
from compile_muon.optimizer import MuonZero

NAN, INF = float("nan"), float("inf")


def check(error: ConfigError, field: str, *words: str) -> None:
    """The message is exactly "{field} = {value}: {problem}; {remedy}" and says these words."""
    text = str(error)
    assert text == f"{error.field} = {error.shown}: {error.problem}; {error.remedy}"
    assert error.field == field
    assert error.problem
    assert error.remedy
    for word in words:
        assert word in text, text


def params(**kwargs):
    return {"optimizer": {"type": "Muon", "params": kwargs}}


# ------------------------------------------------------------------------------------------- errors


def test_error_has_field_value_and_remedy():
    error = config_error("stage", 5, "is not a ZeRO stage", "use 0, 1, 2 or 3")
    assert str(error) == "stage = 5: is not a ZeRO stage; use 0, 1, 2 or 3"
    assert isinstance(error, ValueError)


def test_error_cuts_long_values_and_survives_pickling():
    error = config_error("x", ["y" * 999, lambda: 0], "is long", "shorten it")
    assert len(str(error)) < 250
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.field == "x"
    assert again.remedy == "shorten it"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (UnsupportedModelError, ValueError),
        (LedgerError, RuntimeError),
        (NonFiniteError, ArithmeticError),
        (CheckpointError, RuntimeError),
        (DamagedError, CheckpointError),
        (PassContractError, Exception),
        (VerificationError, Exception),
    ],
)
def test_every_error_is_ours_and_python_s(kind, builtin):
    assert issubclass(kind, MuonZeroError)
    assert issubclass(kind, builtin)
    assert inspect.getdoc(kind)
    again = pickle.loads(pickle.dumps(kind("text")))
    assert (type(again), str(again)) == (kind, "text")


def test_the_errors_under_test_are_all_there_are():
    defined = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    tested = {ConfigError, UnsupportedModelError, LedgerError, NonFiniteError, PassContractError, VerificationError}
    assert defined == tested | {CheckpointError, DamagedError, MuonZeroError, MuonZeroWarning, OffloadError, PeerError}
    assert not issubclass(MuonZeroError, (RuntimeError, ValueError))


def test_one_mistake_is_its_own_list():
    error = config_error("stage", 5, "is not a ZeRO stage", "use 0, 1, 2 or 3")
    assert error.errors == (error,)
    assert join_errors([error]) is error
    assert ConfigError("as text").errors[0].args == ("as text",)


def test_several_mistakes_are_one_error_of_a_line_each():
    single = [config_error(name, 5, "is bad", "drop it") for name in "abc"]
    error = join_errors(single)
    assert str(error).splitlines() == ["3 settings are wrong:", *(f"  {each}" for each in single)]
    assert error.errors == tuple(single)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert [(e.field, e.shown, e.problem, e.remedy) for e in again.errors] == [
        (name, "5", "is bad", "drop it") for name in "abc"
    ]


# ------------------------------------------------------------------------------------- dataclasses


def test_defaults_are_those_of_the_issue():
    config = Config()
    assert config.muon == MuonConfig(0.02, 0.95, True, 0.1, None, ns=NSConfig(None, "jordan", "auto", "auto", 1e-7))
    assert config.adamw == AdamWConfig(3e-4, (0.9, 0.95), 1e-8, 0.1)
    assert config.zero == ZeroConfig(2, "auto", 1, None, "error", 100, None, None)
    assert config.compile == CompileConfig(
        enabled=False,
        codegen="inductor",
        dump=None,
        nvtx=False,
        bucket_mb=512,
        exchange_mb=512,
        cuda_graphs=False,
        reshard_after_forward=True,
        fullgraph=False,
        dynamic=None,
    )
    assert config.muon_params is None
    assert config.algorithm == "muon"
    assert len(resolve_coefficients(config.muon.ns.coefficients, config.muon.ns.steps).steps) == 5


@pytest.mark.parametrize("config", [NSConfig(), MuonConfig(), AdamWConfig(), ZeroConfig(), CompileConfig(), Config()])
def test_frozen_hashable_and_picklable(config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, 1)
    assert hash(config) == hash(type(config)())
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("auto", "auto"),
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("fp32", "float32"),
        ("float64", "float64"),
        ("torch.bfloat16", "bfloat16"),
        (torch.float16, "float16"),
        (torch.double, "float64"),
    ],
)
def test_ns_dtype_is_canonical(given, canonical):
    assert NSConfig(dtype=given).dtype == canonical


def test_coefficient_names_are_those_of_the_kernels():
    for name, chosen in COEFFICIENTS.items():
        assert NSConfig(steps=len(chosen.steps), coefficients=name).coefficients == name


def test_coefficients_are_normalized_to_tuples_of_floats():
    assert NSConfig(coefficients=[3, -4.5, 2]).coefficients == (3.0, -4.5, 2.0)
    schedule = NSConfig(steps=2, coefficients=[[1, 2, 3], (4, 5, 6)]).coefficients
    assert schedule == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    assert hash(schedule)


TRIPLES = [(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)]


@pytest.mark.parametrize(
    ("coefficients", "length"), [*((n, len(c.steps)) for n, c in COEFFICIENTS.items()), ((1, 2, 3), 5), (TRIPLES, 2)]
)
def test_steps_left_out_are_the_length_of_the_coefficients(coefficients, length):
    in_json = {"ns_coefficients": coefficients if isinstance(coefficients, str) else list(coefficients)}
    configs = [
        config_from_kwargs(ns_coefficients=coefficients),
        config_from_kwargs(ns_coefficients=coefficients, ns_steps=None),
        config_from_kwargs(ns_coefficients=coefficients, ns_steps=length),
        load_config(params(**in_json)),
        load_config(params(**in_json, ns_steps=None)),
        Config(muon=MuonConfig(ns=NSConfig(coefficients=coefficients))),
    ]
    assert {len(resolve_coefficients(c.muon.ns.coefficients, c.muon.ns.steps).steps) for c in configs} == {length}


@pytest.mark.parametrize(
    ("coefficients", "steps", "word"),
    [
        ("deepseek_v4", 5, "10 steps, not 5; set ns_steps=10, or leave ns_steps out"),
        ("deepseek_v4", 11, "not 11"),
        (TRIPLES, 5, "2 triples for 5 steps; set ns_steps=2"),
        (TRIPLES, 1, "2 triples for 1 steps"),
    ],
)
def test_steps_that_do_not_fit_the_coefficients(coefficients, steps, word):
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(ns_coefficients=coefficients, ns_steps=steps)
    check(caught.value, "ns_coefficients", word)


def test_numbers_are_normalized():
    assert type(MuonConfig(lr=1).lr) is float
    assert AdamWConfig(betas=[0, 0.5]).betas == (0.0, 0.5)
    zero = ZeroConfig(gradient_clipping=1, param_dtype="bf16", reduce_dtype="float32")
    assert type(zero.gradient_clipping) is float
    assert (zero.param_dtype, zero.reduce_dtype) == (torch.bfloat16, torch.float32)


BAD_FIELDS = [
    (NSConfig, "steps", 0, "1 to 99"),
    (NSConfig, "steps", 100, "1 to 99"),
    (NSConfig, "steps", True, "integer"),
    (NSConfig, "steps", 5.0, "integer"),
    (NSConfig, "coefficients", "jordn", "did you mean 'jordan'"),
    (NSConfig, "coefficients", (1.0, 2.0), "takes 3"),
    (NSConfig, "coefficients", (1.0, NAN, 2.0), "finite"),
    (NSConfig, "coefficients", [(1, 2, 3)] * 100, "100 triples; give at most 99"),
    (NSConfig, "coefficients", [(1, 2, 3), 4.0, 5.0], "mixes"),
    (NSConfig, "coefficients", [(1, 2)] * 5, "takes 3"),
    (NSConfig, "coefficients", [], "triple"),
    (NSConfig, "coefficients", 3.0, "triple"),
    (NSConfig, "method", "gramm", "did you mean 'gram'"),
    (NSConfig, "method", None, "'standard'"),
    (NSConfig, "dtype", "int8", "bfloat16"),
    (NSConfig, "dtype", torch.int8, "bfloat16"),
    (NSConfig, "dtype", None, "bfloat16"),
    (NSConfig, "eps", -1e-7, "[0, inf)"),
    (MuonConfig, "lr", -0.1, "[0, inf)"),
    (MuonConfig, "lr", NAN, "finite"),
    (MuonConfig, "lr", INF, "finite"),
    (MuonConfig, "lr", True, "bool"),
    (MuonConfig, "lr", "1e-3", "str"),
    (MuonConfig, "lr", "auto", "Hugging Face"),
    (MuonConfig, "lr", None, "NoneType"),
    (MuonConfig, "lr", torch.tensor([0.1]), "plain number"),
    (MuonConfig, "momentum", 1.0, "[0, 1)"),
    (MuonConfig, "momentum", -0.1, "[0, 1)"),
    (MuonConfig, "nesterov", 1, "true or false"),
    (MuonConfig, "weight_decay", -1, "[0, inf)"),
    (MuonConfig, "adjust_lr", "moonshot", "match_rms_adamw"),
    (MuonConfig, "adjust_lr", 0, "(0, inf)"),
    (MuonConfig, "adjust_lr", True, "match_rms_adamw"),
    (NSConfig, "memory_limit", "large", "integer"),
    (NSConfig, "memory_limit", -1, "at least 0"),
    (MuonConfig, "ns", {"steps": 5}, "NSConfig(...)"),
    (AdamWConfig, "lr", -1.0, "[0, inf)"),
    (AdamWConfig, "betas", (0.9, 1.0), "[0, 1)"),
    (AdamWConfig, "betas", (-0.1, 0.9), "[0, 1)"),
    (AdamWConfig, "betas", (0.9,), "pair"),
    (AdamWConfig, "betas", 0.9, "pair"),
    (AdamWConfig, "betas", "ab", "pair"),
    (AdamWConfig, "betas", (0.9, None), "NoneType"),
    (AdamWConfig, "eps", -1e-8, "[0, inf)"),
    (AdamWConfig, "weight_decay", NAN, "finite"),
    (ZeroConfig, "stage", 4, "0 to 3"),
    (ZeroConfig, "stage", -1, "0 to 3"),
    (ZeroConfig, "stage", True, "bool"),
    (ZeroConfig, "stage", "2", "str"),
    (ZeroConfig, "update", "bakward", "did you mean 'backward'"),
    (ZeroConfig, "gradient_accumulation_steps", 0, "at least 1"),
    (ZeroConfig, "gradient_accumulation_steps", 1.5, "integer"),
    (ZeroConfig, "gradient_accumulation_steps", True, "bool"),
    (ZeroConfig, "gradient_clipping", 0.0, "use None"),
    (ZeroConfig, "gradient_clipping", -1.0, "(0, inf)"),
    (ZeroConfig, "gradient_clipping", False, "bool"),
    (ZeroConfig, "gradient_clipping", INF, "finite"),
    (ZeroConfig, "nonfinite", "ignore", "'skip'"),
    (ZeroConfig, "max_skipped_steps", 0, "at least 1"),
    (ZeroConfig, "max_skipped_steps", None, "integer"),
    (ZeroConfig, "check_replicas", 0, "at least 1"),
    (ZeroConfig, "param_dtype", "int8", "bfloat16"),
    (ZeroConfig, "param_dtype", torch.complex64, "bfloat16"),
    (ZeroConfig, "reduce_dtype", "auto", "bfloat16"),
    (ZeroConfig, "shard_state_over", "replicate", "'all'"),
    (ZeroConfig, "communicators", "own", "'separate'"),
    (ZeroConfig, "offload_param", "nvme", "'cpu'"),
    (CompileConfig, "enabled", "yes", "true or false"),
    (CompileConfig, "codegen", "aot_eager", "'inductor'"),
    (CompileConfig, "dump", "", "path"),
    (CompileConfig, "dump", True, "path"),
    (CompileConfig, "nvtx", 1, "true or false"),
    (CompileConfig, "bucket_mb", 0, "(0, inf)"),
    (CompileConfig, "exchange_mb", -1, "(0, inf)"),
    (CompileConfig, "fullgraph", None, "true or false"),
    (CompileConfig, "dynamic", "auto", "true or false"),
    (Config, "muon", {"lr": 1.0}, "MuonConfig(...)"),
    (Config, "adamw", None, "AdamWConfig(...)"),
    (Config, "zero", 2, "ZeroConfig(...)"),
    (Config, "compile", True, "CompileConfig(...)"),
    (Config, "muon_params", "blocks.*", '["pattern"'),
    (Config, "machine", "h1000", "use b200"),
    (Config, "machine", 8, "use one of"),
    (Config, "machine", "", "use one of"),
    (Config, "muon_params", [], "leave it out"),
    (Config, "muon_params", ["a", 3], "3"),
    (Config, "muon_params", [""], "non-empty"),
    (Config, "muon_params", 7, "predicate"),
    (Config, "algorithm", "adamm", "did you mean 'adamw'"),
    (Config, "algorithm", "AdamW", "'adamw'"),
    (Config, "algorithm", None, "'muon'"),
]


@pytest.mark.parametrize(("kind", "field", "value", "word"), BAD_FIELDS)
def test_bad_field_names_field_value_and_remedy(kind, field, value, word):
    with pytest.raises(ConfigError) as caught:
        kind(**{field: value})
    check(caught.value, f"{kind.__name__}.{field}", word)


@pytest.mark.parametrize("update", ["auto", "backward", "step"])
@pytest.mark.parametrize(
    "setting", [{"gradient_clipping": 1.0}, {"gradient_accumulation_steps": None}, {"nonfinite": "skip"}]
)
def test_nothing_contradicts_when_directions_are_made(update, setting):
    assert config_from_kwargs(update=update, **setting).zero == ZeroConfig(update=update, **setting)


def test_compile_options_are_the_non_defaults():
    assert CompileConfig(enabled=True).options() == {}
    assert CompileConfig(enabled=True, fullgraph=True, dynamic=False).options() == {}
    given = {"codegen": "eager", "dump": Path("graphs"), "nvtx": True, "bucket_mb": 5, "exchange_mb": 9}
    given |= {"cuda_graphs": True, "reshard_after_forward": False}
    assert given.keys() == {field.name for field in dataclasses.fields(CompileOptions)}
    assert CompileConfig(enabled=True, **given).options() == given


def test_compile_dump_takes_a_path(tmp_path):
    assert CompileConfig(dump=tmp_path).dump == CompileConfig(dump=str(tmp_path)).dump == tmp_path


# ------------------------------------------------------------------------- MuonZero keyword arguments

KWARGS = {
    "lr": (0.5, "muon.lr", 0.5),
    "momentum": (0.5, "muon.momentum", 0.5),
    "nesterov": (False, "muon.nesterov", False),
    "weight_decay": (0.5, "muon.weight_decay", 0.5),
    "adamw_lr": (0.5, "adamw.lr", 0.5),
    "adamw_betas": ([0.1, 0.2], "adamw.betas", (0.1, 0.2)),
    "adamw_eps": (0.5, "adamw.eps", 0.5),
    "adamw_weight_decay": (0.5, "adamw.weight_decay", 0.5),
    "adamw_decay_vectors": (True, "adamw.decay_vectors", True),
    "adjust_lr": ("spectral", "muon.adjust_lr", "spectral"),
    "ns_steps": (7, "muon.ns.steps", 7),
    "ns_coefficients": ("you", "muon.ns.coefficients", "you"),
    "ns_method": ("gram", "muon.ns.method", "gram"),
    "ns_dtype": ("fp32", "muon.ns.dtype", "float32"),
    "ns_eps": (1e-20, "muon.ns.eps", 1e-20),
    "ns_backend": ("aten", "muon.ns.backend", "aten"),
    "ns_memory_limit": (2**20, "muon.ns.memory_limit", 2**20),
    "stage": (3, "zero.stage", 3),
    "update": ("step", "zero.update", "step"),
    "gradient_accumulation_steps": (4, "zero.gradient_accumulation_steps", 4),
    "gradient_clipping": (0.5, "zero.gradient_clipping", 0.5),
    "nonfinite": ("skip", "zero.nonfinite", "skip"),
    "max_skipped_steps": (7, "zero.max_skipped_steps", 7),
    "checks": ("next_step", "zero.checks", "next_step"),
    "check_replicas": (10, "zero.check_replicas", 10),
    "param_dtype": ("bf16", "zero.param_dtype", torch.bfloat16),
    "reduce_dtype": ("fp32", "zero.reduce_dtype", torch.float32),
    "master_dtype": ("bf16", "zero.master_dtype", torch.bfloat16),
    "shard_state_over": ("all", "zero.shard_state_over", "all"),
    "offload_param": ({"device": "cpu"}, "zero.offload_param", "cpu"),
    "communicators": ("separate", "zero.communicators", "separate"),
    "muon_params": (["a.*"], "muon_params", ("a.*",)),
    "machine": ("h200", "machine", "h200"),
    "momentum_dtype": ("8bit", "muon.momentum_dtype", "8bit"),
    "offload": ("cpu", "zero.offload", OffloadConfig("cpu")),
    "qk_clip": (100, "muon.qk_clip", 100.0),
    "qk_clip_alpha": (0.3, "muon.qk_clip_alpha", 0.3),
    "method": ("normuon", "method", "normuon"),
    "auxiliary": ("lion", "auxiliary", "lion"),
    "rates": ({"beta2": 0.9}, "rates", (("beta2", 0.9),)),
    "muon_views": ({"*.q": {"split": [8, 4]}}, "muon_views", (("*.q", (("split", (8, 4)),)),)),
    "per_head_muon": (True, "per_head_muon", True),
    "split_fused": (True, "split_fused", True),
    "groups": ({"*.q": {"lr": 0.5}}, "groups", (GroupConfig("*.q", ("*.q",), None, (("lr", 0.5),)),)),
}
#: what else must be said with one
NEEDS = {"offload_param": {"stage": 3}}


def leaves(config, prefix=""):
    """Every setting of a config as {dotted path: value}."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, OffloadConfig):
            found |= leaves(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value
    return found


@pytest.mark.parametrize("name", KWARGS)
def test_each_keyword_sets_its_field_and_no_other(name):
    value, path, stored = KWARGS[name]
    needs = NEEDS.get(name, {})
    assert leaves(config_from_kwargs(**{name: value}, **needs)) == {**leaves(config_from_kwargs(**needs)), path: stored}


@pytest.mark.parametrize("name", KWARGS)
def test_each_keyword_is_an_optimizer_param(name):
    value, path, stored = KWARGS[name]
    needs = NEEDS.get(name, {})
    expected = {**leaves(config_from_kwargs(**needs)), path: stored}
    if name in ("rates", "groups"):  # each rate by itself, and a key beside params
        given = {"optimizer": {"params": value} if name == "rates" else {"groups": value}}
        assert leaves(load_config(given)) == expected
        return
    if name in ("lr", "weight_decay"):  # shared by both halves in DeepSpeed's vocabulary
        expected[f"adamw.{name}"] = stored
    assert leaves(load_config(params(**{name: value}, **needs))) == expected


def test_no_keywords_is_the_default():
    assert config_from_kwargs() == Config()
    assert load_config({}) == Config()


def test_predicate_is_kept():
    def predicate(name, param):
        return True

    assert config_from_kwargs(muon_params=predicate).muon_params is predicate


def test_keyword_errors_name_the_keyword():
    for name, bad in [("ns_steps", 0), ("adamw_betas", (2, 2)), ("stage", 9), ("lr", -1), ("muon_params", "x")]:
        with pytest.raises(ConfigError) as caught:
            config_from_kwargs(**{name: bad})
        check(caught.value, name, repr(bad))


@pytest.mark.parametrize(("name", "near"), [("adamw_beta", "adamw_betas"), ("stge", "stage"), ("ns_step", "ns_steps")])
def test_unknown_keyword_names_the_nearest(name, near):
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(**{name: 1})
    check(caught.value, name, repr(near))


def test_unknown_keyword_far_from_all_lists_them():
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(zzzzzz=1)
    assert set(caught.value.remedy.removeprefix("use one of ").split(", ")) == set(KWARGS)


# --------------------------------------------------------------------------- DeepSpeed's vocabulary

FULL = {
    "compile": True,
    "optimizer": {
        "type": "Muon",
        "params": {
            "lr": 0.01,
            "muon_lr": 0.03,
            "adam_lr": 0.002,
            "momentum": 0.9,
            "weight_decay": 0.05,
            "betas": [0.8, 0.99],
            "eps": 1e-6,
            "ns_method": "standard",
            "ns_steps": 6,
        },
    },
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
}


def test_the_whole_vocabulary():
    config = load_config(FULL)
    assert config.muon == MuonConfig(0.03, 0.9, True, 0.05, None, ns=NSConfig(6, method="standard"))
    assert config.adamw == AdamWConfig(0.002, (0.8, 0.99), 1e-6, 0.05)
    assert config.zero == ZeroConfig(
        3, gradient_clipping=0.5, gradient_accumulation_steps=4, param_dtype=torch.bfloat16
    )
    assert config.compile == CompileConfig(enabled=True)


def test_load_from_file_dict_and_config_agree(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FULL))
    config = load_config(FULL)
    assert load_config(path) == config
    assert load_config(str(path)) == config
    assert load_config(config) is config


def test_load_does_not_change_its_source():
    source = json.loads(json.dumps(FULL))
    load_config(source)
    assert source == FULL


@pytest.mark.parametrize(
    ("given", "muon", "adamw"),
    [
        ({}, 0.02, 3e-4),
        ({"lr": 0.5}, 0.5, 0.5),
        ({"lr": 0.5, "muon_lr": 0.1}, 0.1, 0.5),
        ({"lr": 0.5, "adam_lr": 0.1}, 0.5, 0.1),
        ({"adamw_lr": 0.1, "lr": 0.5}, 0.5, 0.1),
        ({"muon_lr": 0.1}, 0.1, 3e-4),
        ({"adam_lr": 0.1}, 0.02, 0.1),
        ({"lr": 0.5, "muon_lr": 0.1, "adam_lr": 0.2}, 0.1, 0.2),
    ],
)
def test_lr_rule(given, muon, adamw):
    config = load_config(params(**given))
    assert (config.muon.lr, config.adamw.lr) == (muon, adamw)


@pytest.mark.parametrize(
    ("given", "muon", "adamw"),
    [
        ({"weight_decay": 0.5}, 0.5, 0.5),
        ({"weight_decay": 0.5, "adamw_weight_decay": 0}, 0.5, 0.0),
        ({"adamw_weight_decay": 0.3}, 0.1, 0.3),
    ],
)
def test_weight_decay_rule(given, muon, adamw):
    config = load_config(params(**given))
    assert (config.muon.weight_decay, config.adamw.weight_decay) == (muon, adamw)


def test_a_wrong_shared_rate_is_an_error_even_where_overridden():
    with pytest.raises(ConfigError) as caught:
        load_config(params(lr=-1, muon_lr=0.1, adam_lr=0.1))
    check(caught.value, "optimizer.params.lr", "-1")


@pytest.mark.parametrize("zero", [0, 0.0])
def test_clipping_by_zero_is_off(zero):
    assert load_config({"gradient_clipping": zero}).zero.gradient_clipping is None
    assert load_config(params(gradient_clipping=zero)).zero.gradient_clipping is None


def test_null_accumulation_is_unknown():
    assert load_config({"gradient_accumulation_steps": None}).zero.gradient_accumulation_steps is None


@pytest.mark.parametrize("kind", ["Muon", "muon", "MUON"])
def test_optimizer_type_ignores_case(kind):
    assert load_config({"optimizer": {"type": kind}}) == Config()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (False, CompileConfig()),
        (True, CompileConfig(enabled=True)),
        ({}, CompileConfig(enabled=True)),
        ({"codegen": "eager"}, CompileConfig(enabled=True, codegen="eager")),
        ({"enabled": False, "codegen": "eager"}, CompileConfig(codegen="eager")),
        ({"cuda_graphs": True}, CompileConfig(enabled=True, cuda_graphs=True)),
        ({"reshard_after_forward": False}, CompileConfig(enabled=True, reshard_after_forward=False)),
        (
            {"fullgraph": True, "dynamic": False, "dump": "d", "nvtx": True},
            CompileConfig(enabled=True, dump="d", nvtx=True, fullgraph=True, dynamic=False),
        ),
    ],
)
def test_compile_is_a_bool_or_an_object(value, expected):
    assert load_config({"compile": value}).compile == expected


def test_bf16_disabled_leaves_the_dtype_alone():
    assert load_config({"bf16": {"enabled": False}}).zero.param_dtype is None
    assert load_config({"bf16": {"enabled": False}, **params(param_dtype="fp32")}).zero.param_dtype is torch.float32


def test_saying_the_same_thing_twice_is_fine():
    source = {
        **params(stage=3, param_dtype=torch.bfloat16, betas=[0.9, 0.9], adamw_betas=(0.9, 0.9), gradient_clipping=None),
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "gradient_clipping": 0,
    }
    config = load_config(source)
    assert (config.zero.stage, config.zero.param_dtype) == (3, torch.bfloat16)


@pytest.mark.parametrize(
    ("source", "field", "words"),
    [
        (
            {**params(stage=1), "zero_optimization": {"stage": 2}},
            "zero_optimization.stage",
            ["optimizer.params.stage = 1"],
        ),
        ({**params(stage=1), "zero_optimization": {"stage": True}}, "zero_optimization.stage", ["bool"]),
        ({**params(gradient_clipping=1.0), "gradient_clipping": 2.0}, "gradient_clipping", ["= 1.0", "= 2.0"]),
        ({**params(gradient_clipping=1.0), "gradient_clipping": 0}, "gradient_clipping", ["= 1.0"]),
        (
            {**params(gradient_accumulation_steps=1), "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps",
            ["keep one"],
        ),
        ({**params(param_dtype="fp32"), "bf16": {"enabled": True}}, "bf16.enabled", ["torch.float32"]),
        ({**params(param_dtype="bf16"), "bf16": {"enabled": False}}, "bf16.enabled", ["optimizer.params.param_dtype"]),
        (params(adam_lr=0.1, adamw_lr=0.2), "optimizer.params.adamw_lr", ["optimizer.params.adam_lr = 0.1"]),
        (params(stage=3, check_replicas=5), "optimizer.params.check_replicas", ["= 5", "use stage 2"]),
        (params(stage=2, offload_param="cpu"), "optimizer.params.offload_param", ["at stage 2", "use stage 3"]),
        (
            params(stage=3, offload_param="cpu", shard_state_over="all"),
            "optimizer.params.offload_param",
            ["keeps copies", 'shard_state_over = "shard"'],
        ),
        (params(betas=[0.9, 0.9], adamw_betas=[0.9, 0.8]), "optimizer.params.adamw_betas", ["contradicts"]),
        (params(eps=1e-8, adamw_eps=1e-6), "optimizer.params.adamw_eps", ["contradicts"]),
    ],
)
def test_contradictions(source, field, words):
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    check(caught.value, field, *words)


@pytest.mark.parametrize(
    ("source", "field", "words"),
    [
        ({"optimiser": {}}, "optimiser", ["did you mean optimizer?"]),
        ({"lr": 0.1}, "lr", ["did you mean optimizer.params.lr?"]),
        ({"stage": 1}, "stage", ["zero_optimization.stage"]),
        ({"zzz": 1}, "zzz", ["known here are compile, optimizer"]),
        (params(muon_lrr=1), "optimizer.params.muon_lrr", ["did you mean optimizer.params.muon_lr?"]),
        (params(bf16=1), "optimizer.params.bf16", ["did you mean bf16?"]),
        ({"optimizer": {"typ": "Muon"}}, "optimizer.typ", ["optimizer.type"]),
        ({"zero_optimization": {"stag": 1}}, "zero_optimization.stag", ["zero_optimization.stage"]),
        ({"zero_optimization": {"nonfinite": "skip"}}, "zero_optimization.nonfinite", ["optimizer.params.nonfinite"]),
        ({"bf16": {"enable": True}}, "bf16.enable", ["bf16.enabled"]),
        ({"compile": {"code_gen": "eager"}}, "compile.code_gen", ["compile.codegen"]),
        ({"compile": {"zzz": 1}}, "compile.zzz", ["known here"]),
        ({3: 4}, "3", ["known here"]),
        (params(lr="0.1"), "optimizer.params.lr", ["'0.1'", "str"]),
        (params(muon_lr=-1), "optimizer.params.muon_lr", ["-1"]),
        (params(adam_lr=NAN), "optimizer.params.adam_lr", ["finite"]),
        (params(betas=[0.9, 1]), "optimizer.params.betas", ["[0, 1)"]),
        (params(eps="x"), "optimizer.params.eps", ["str"]),
        (params(weight_decay=-1), "optimizer.params.weight_decay", ["[0, inf)"]),
        (params(ns_method="grm"), "optimizer.params.ns_method", ["'gram'"]),
        (params(param_dtype="int4"), "optimizer.params.param_dtype", ["int4"]),
        (params(muon_params="x"), "optimizer.params.muon_params", ["pattern"]),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", ["0 to 3"]),
        ({"zero_optimization": 2}, "zero_optimization", ["object"]),
        ({"optimizer": "Muon"}, "optimizer", ["object"]),
        ({"optimizer": {"type": "SGD"}}, "optimizer.type", ['"Muon" or "AdamW"']),
        ({"optimizer": {"type": None}}, "optimizer.type", ['"Muon"']),
        ({"optimizer": {"params": [1]}}, "optimizer.params", ["object"]),
        ({"gradient_clipping": "auto"}, "gradient_clipping", ["Hugging Face"]),
        ({"gradient_clipping": False}, "gradient_clipping", ["bool"]),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps", ["at least 1"]),
        ({"bf16": True}, "bf16", ['{"enabled": true}']),
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled", ["true or false"]),
        ({"fp16": {"enabled": True}}, "fp16.enabled", ["scales the loss", "bf16", "GradScaler", "param_dtype"]),
        ({"compile": "yes"}, "compile", ['"compile": true']),
        ({"compile": {"codegen": "aot"}}, "compile.codegen", ["'inductor'"]),
        ({"compile": {"enabled": 1}}, "compile.enabled", ["true or false"]),
        ({"compile": {"reshard_after_forward": 8}}, "compile.reshard_after_forward", ["true or false"]),
        ([1], "config", ["object"]),
        (None, "config", ["object"]),
    ],
)
def test_bad_configs(source, field, words):
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    check(caught.value, field, *words)


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("gradient_allreduce_op", "averaged"),
        ("torch_autocast", "bf16"),
        ("compile.offload_parameters", "offload_optimizer and offload_param are what there is"),
        ("zero_optimization.zero_quantized_weights", "ZeRO++"),
        ("optimizer.params.amsgrad", "AdamW"),
        ("optimizer.params.max_grad_norm", "gradient_clipping"),
        ("bf16.bf16_optimizer_states", "not honoured"),
    ],
)
def test_deepspeed_keys_are_refused_with_their_own_remedy(path, word):
    source = True
    for key in reversed(path.split(".")):
        source = {key: source}
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    check(caught.value, path, "remove it", word)


# ------------------------------------------------------------------------------------- many at once


def mistakes(call) -> dict[str, ConfigError]:
    """Field -> error, of a call that raises one ConfigError about several settings; each has the shape of a single."""
    with pytest.raises(ConfigError) as caught:
        call()
    found = {error.field: error for error in caught.value.errors}
    assert len(found) == len(caught.value.errors) > 1, str(caught.value)
    assert str(caught.value).splitlines()[1:] == [f"  {error}" for error in caught.value.errors]
    for field, error in found.items():
        check(error, field)
    return found


def test_all_mistakes_of_a_config_in_one_error(tmp_path):
    text = """{
        "zzz": 1,
        "train_batch_size": 8,
        "scheduler": {"type": "WarmupLRR"},
        "optimizer": {
            "typ": 0,
            "params": {
                "lr": -1, "muon_lr": "x", "muon_lrr": 2, "amsgrad": true, "momentum": 0.9, "momentum": 0.9,
                "betas": [0.9, 0.9], "adamw_betas": [0.9, 0.8],
                "ns_steps": 5, "ns_coefficients": "deepseek_v4", "max_skipped_steps": 0
            }
        },
        "zero_optimization": {"stage": 4, "overlap_comm": true, "zenflow": true},
        "gradient_clipping": -1,
        "gradient_accumulation_steps": 0,
        "compile": {"nvtx": 1, "bucket_mb": 0, "deepcompile": 1},
        "bf16": {"enabled": 1, "enable": true},
        "fp16": {"enabled": true, "loss_scale": 0}
    }"""
    path = tmp_path / "config.json"
    path.write_text(text)
    found = mistakes(lambda: load_config(path))
    in_params = "lr muon_lr muon_lrr amsgrad adamw_betas ns_coefficients max_skipped_steps"
    fields = {f"optimizer.params.{key}" for key in in_params.split()} | {
        "zzz",
        "scheduler.type",
        "momentum",  # twice; while a file is parsed nobody knows in which section
        "optimizer.typ",
        "zero_optimization.stage",
        "zero_optimization.zenflow",
        "gradient_clipping",
        "gradient_accumulation_steps",
        *(f"compile.{key}" for key in ("nvtx", "bucket_mb", "deepcompile")),
        *(f"bf16.{key}" for key in ("enabled", "enable")),
        "fp16.enabled",
    }
    assert found.keys() == fields


def test_all_sections_that_are_no_objects_in_one_error():
    source = {"optimizer": 1, "zero_optimization": 2, "bf16": True, "fp16": [], "compile": "yes"}
    assert mistakes(lambda: load_config(source)).keys() == source.keys()


def test_mistakes_of_adamw_are_collected_too():
    source = {**adamw(momentum=0.9, muon_lr=0.1, lr=-1, update="backward"), "zero_optimization": {"stage": 9}}
    found = mistakes(lambda: load_config(source))
    expected = {f"optimizer.params.{key}" for key in ("momentum", "muon_lr", "lr", "update")}
    assert found.keys() == expected | {"zero_optimization.stage"}


@pytest.mark.parametrize("make", [config_from_kwargs, lambda **kwargs: MuonZero(torch.nn.Linear(2, 2), **kwargs)])
def test_all_mistakes_of_the_keywords_in_one_error(make):
    given = {"lr": -1, "adamw_betas": (2, 2), "stage": 9, "ns_steps": 3, "ns_coefficients": "deepseek_v4"}
    assert mistakes(lambda: make(**given)).keys() == given.keys() - {"ns_steps"}


def test_unknown_keywords_are_collected_too():
    assert mistakes(lambda: config_from_kwargs(stge=1, stage=9, zzzz=1)).keys() == {"stge", "stage", "zzzz"}


def test_all_mistakes_of_compile_options_in_one_error():
    found = mistakes(lambda: read_options({"codegn": 1, "dump": 2, "bucket_mb": "x", "nvtx": 0}))
    assert found.keys() == {f"options[{key!r}]" for key in ("codegn", "dump", "bucket_mb", "nvtx")}


def test_all_mistakes_of_a_dataclass_in_one_error():
    found = mistakes(lambda: NSConfig(steps=5, coefficients="deepseek_v4", method="x", eps=-1))
    assert found.keys() == {"NSConfig.coefficients", "NSConfig.method", "NSConfig.eps"}
    found = mistakes(lambda: Config(MuonConfig(lr=1.0), zero=3, muon_params=["a"], algorithm="adamw"))
    assert found.keys() == {"Config.muon", "Config.zero", "Config.muon_params"}


def test_a_bad_value_contradicts_nothing():
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(ns_steps=0, ns_coefficients="deepseek_v4")
    check(caught.value, "ns_steps", "1 to 99")


# ------------------------------------------------------------------------------------ AdamW for everything


def adamw(**kwargs):
    return {"optimizer": {"type": "AdamW", "params": kwargs}}


@pytest.mark.parametrize("kind", ["AdamW", "adamw", "ADAMW"])
def test_adamw_type_ignores_case(kind):
    assert load_config({"optimizer": {"type": kind}}) == Config(algorithm="adamw")


@pytest.mark.parametrize("prefix", ["", "adamw_"])
def test_adamw_takes_lr_decay_betas_and_eps(prefix):
    given = {"lr": 0.5, "betas": [0.1, 0.2], "eps": 0.3, "weight_decay": 0.4}
    config = load_config(adamw(**{prefix + key: value for key, value in given.items()}))
    assert config == Config(adamw=AdamWConfig(0.5, (0.1, 0.2), 0.3, 0.4), algorithm="adamw")


def test_adamw_keeps_the_engine():
    engine = {
        "compile": True,
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
    }
    given = {"reduce_dtype": "fp32", "update": "step"}
    config, muon = load_config({**engine, **adamw(**given)}), load_config({**engine, **params(**given)})
    assert dataclasses.replace(config, algorithm="muon") == muon
    assert (config.zero.stage, config.zero.param_dtype) == (3, torch.bfloat16)


MUON_KEYS = {key: value for key, (value, path, _) in KWARGS.items() if path.startswith("muon")} | {
    "muon_lr": 0.02,  # a default given explicitly is refused as well
    "ns_steps": 5,
    "method": "normuon",
    "per_head_muon": True,
    "split_fused": True,
}


@pytest.mark.parametrize("key", sorted(MUON_KEYS.keys() - {"lr", "weight_decay"}))
def test_keys_of_muon_are_refused_with_adamw(key):
    with pytest.raises(ConfigError) as caught:
        load_config(adamw(lr=0.1, **{key: MUON_KEYS[key]}))
    check(caught.value, f"optimizer.params.{key}", "belongs to Muon", 'optimizer.type to "Muon"')


def test_muon_keys_under_test_are_all_there_are():
    expected = "momentum nesterov adjust_lr muon_params muon_lr ns_steps ns_coefficients ns_method ns_dtype ns_eps"
    expected += " ns_backend ns_memory_limit method momentum_dtype qk_clip qk_clip_alpha muon_views per_head_muon"
    expected += " split_fused"
    assert MUON_KEYS.keys() - {"lr", "weight_decay"} == set(expected.split())


def test_muon_rate_with_adamw_points_to_lr():
    with pytest.raises(ConfigError) as caught:
        load_config(adamw(muon_lr=0.1))
    check(caught.value, "optimizer.params.muon_lr", "use lr")


def test_adamw_has_one_rate():
    with pytest.raises(ConfigError) as caught:
        load_config(adamw(lr=0.1, adam_lr=0.2))
    check(caught.value, "optimizer.params.adam_lr", "contradicts optimizer.params.lr = 0.1")
    assert load_config(adamw(lr=0.1, adam_lr=0.1)).adamw.lr == 0.1


def test_adamw_values_are_checked_under_their_own_name():
    for key, bad in [("lr", -1), ("weight_decay", "x"), ("betas", (2, 2)), ("eps", -1)]:
        with pytest.raises(ConfigError) as caught:
            load_config(adamw(**{key: bad}))
        check(caught.value, f"optimizer.params.{key}", repr(bad))


def test_adamw_does_not_update_in_backward():
    with pytest.raises(ConfigError) as caught:
        load_config(adamw(update="backward"))
    check(caught.value, "optimizer.params.update", "belongs to Muon", 'update="auto"')


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ({"muon": MuonConfig(lr=1.0)}, "Config.muon"),
        ({"muon": MuonConfig(ns=NSConfig(6))}, "Config.muon"),
        ({"muon_params": ["a.*"]}, "Config.muon_params"),
        ({"zero": ZeroConfig(update="backward")}, "ZeroConfig.update"),
    ],
)
def test_adamw_config_built_by_hand_refuses_muon_settings(setting, field):
    with pytest.raises(ConfigError) as caught:
        Config(algorithm="adamw", **setting)
    check(caught.value, field, "belongs to Muon")
    assert Config(**setting)


# --------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("text", "field", "word"),
    [
        ("{", "config", "line 1"),
        ("", "config", "not JSON"),
        ("[]", "config", "object"),
        ('{"gradient_clipping": 1, "gradient_clipping": 2}', "gradient_clipping", "twice"),
        ('{"gradient_clipping": NaN}', "gradient_clipping", "finite"),
        ('{"optimizer": {"params": {"muon_lrr": 1}}}', "optimizer.params.muon_lrr", "muon_lr?"),
    ],
)
def test_bad_files(tmp_path, text, field, word):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    check(caught.value, field, word)


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        check(caught.value, "config", str(path), "cannot be read")


def test_binary_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    check(caught.value, "config", "not JSON")


# ----------------------------------------------------------------------------------------------- docs

DOCS = (Path(__file__).parents[3] / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")


def documented() -> dict[str, list[str]]:
    """First cell -> the other cells, of every table row whose first cell is names in backticks."""
    found = {}
    for line in DOCS.splitlines():
        if line.startswith("| `"):
            names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            for name in re.findall(r"`([^`]+)`", names):
                found.setdefault(name, cells)
    return found


SIGNATURE = {
    name: parameter.default
    for name, parameter in inspect.signature(MuonZero.__init__).parameters.items()
    if name not in ("self", "model") and parameter.annotation != "NoReturn"
}


def test_signature_dataclasses_and_json_have_the_same_settings():
    objects = {"mesh", "norm_group", "weights", "init", "extensions"}
    assert SIGNATURE.keys() - objects == ARGUMENTS.keys() == KWARGS.keys()
    own = {"muon_lr", "adam_lr", "betas", "eps", "cautious_decay", "beta1", "beta2", "fraction", "period"}
    own |= {"block_lr_factor", "basis_every"}
    assert set(SECTIONS["optimizer.params"]) - ARGUMENTS.keys() == own
    # by keyword; what is under `compile` belongs to initialize
    unreachable = {
        "algorithm",
        "mesh",
        "scheduler",
        "expert_parallel.size",
        "expert_parallel.capacity_factor",
        "sequence_parallel.size",
        "sequence_parallel.blocks",
        "sequence_parallel.joined",
        "sequence_parallel.attention",
        "sequence_parallel.check",
        "sequence_parallel.inputs",
    }
    reachable = {path for path in leaves(Config()) if not path.startswith("compile.")} - unreachable
    assert {path for _, path, _ in KWARGS.values()} == reachable


@pytest.mark.parametrize("name", KWARGS)
def test_signature_and_dataclass_have_the_same_default(name):
    owner, field = ARGUMENTS[name]
    assert SIGNATURE[name] == getattr(owner(), field) == leaves(Config())[KWARGS[name][1]]


@pytest.mark.parametrize("name", SIGNATURE)
def test_every_argument_of_muonzero_is_documented_with_its_default(name):
    assert ast.literal_eval(documented()[name][0].strip("`")) == SIGNATURE[name]


@pytest.mark.parametrize(
    ("key", "argument"),
    [
        ("optimizer.params.muon_lr", "lr"),
        ("optimizer.params.adam_lr", "adamw_lr"),
        ("optimizer.params.weight_decay", "weight_decay"),
        ("zero_optimization.stage", "stage"),
        ("zero_optimization.shard_state_over", "shard_state_over"),
    ],
)
def test_keys_with_another_name_are_documented_with_its_default(key, argument):
    assert json.loads(documented()[key][0].strip("`")) == SIGNATURE[argument]


def test_no_table_of_arguments_documents_what_is_no_argument():
    section = DOCS[DOCS.index("## Arguments of MuonZero") : DOCS.index("## Keys of a config")]
    assert set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)) == SIGNATURE.keys()


def test_every_option_of_torch_compile_is_a_key_with_its_default():
    values = {field.name: field.default for field in dataclasses.fields(CompileConfig)}
    assert values.keys() | {"deepcompile"} == set(SECTIONS["compile"])
    for name in values.keys() - {"enabled", "fullgraph", "dynamic"}:
        assert json.loads(documented()[f"compile.{name}"][0].strip("`")) == values[name]
    assert load_config({"compile": values}).compile == CompileConfig()
    assert {field.name for field in dataclasses.fields(CompileConfig)} - {"enabled", "fullgraph", "dynamic"} == {
        field.name for field in dataclasses.fields(CompileOptions)
    }


def test_options_of_torch_compile_reach_the_frame():
    assert read_options(None) == read_options({}) == FrameOptions()
    assert read_options(CompileOptions().options()) == FrameOptions()
    default = {field.name: field.default for field in dataclasses.fields(CompileOptions)}
    assert read_options(default) == FrameOptions()
    given = {
        "codegen": "eager",
        "dump": "graphs",
        "nvtx": True,
        "bucket_mb": 0.5,
        "exchange_mb": 2,
        "cuda_graphs": True,
        "reshard_after_forward": False,
    }
    assert read_options(given) == FrameOptions(
        codegen="eager",
        dump=Path("graphs"),
        nvtx=True,
        bucket_bytes=2**19,
        exchange_bytes=2**21,
        cuda_graphs=True,
        reshard_after_forward=False,
    )


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_keyword_and_json_agree_on_each_coefficient_set(name):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    config = load_config(params(ns_coefficients=name, muon_params=["0.weight"]))
    optimizer = MuonZero(model, ns_coefficients=name, muon_params=["0.weight"], ns_dtype="auto")
    assert optimizer.config == config == config_from_kwargs(ns_coefficients=name, muon_params=["0.weight"])


def test_every_key_is_documented():
    for section, keys in SECTIONS.items():
        for key in keys:
            path = f"{section}.{key}" if section else key
            if key in KWARGS or (key in SECTIONS and not section):
                continue
            assert path in documented() or key in documented(), path


@pytest.mark.filterwarnings("ignore:no effect here")
def test_examples_in_the_documentation_load():
    examples = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", DOCS, flags=re.DOTALL)]
    loaded = [load_config(example) for example in examples]
    assert {config.algorithm for config in loaded} == {"muon", "adamw"}


def test_public_things_have_docstrings():
    for kind in (NSConfig, MuonConfig, AdamWConfig, ZeroConfig, CompileConfig, Config, config_from_kwargs, load_config):
        assert inspect.getdoc(kind)
        assert not inspect.getdoc(kind).startswith(f"{kind.__name__}(")  # dataclass makes one up


def described(kind):
    """The names that a docstring lists."""
    return {
        name for row in re.findall(r"^    ([\w, ]+): ", inspect.getdoc(kind), re.MULTILINE) for name in row.split(", ")
    }


def test_an_argument_is_described_where_its_setting_is_and_named_where_it_is_given():
    """Of MuonZero's docstring, which sends readers there."""
    named = described(MuonZero)
    for argument, (owner, field) in ARGUMENTS.items():
        assert field in described(owner), (owner, field)
        assert argument in named or argument.startswith(("ns_", "adamw_")), argument


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"replicate": -1, "shard": -1}, "mesh.replicate = -1: and shard are both the rest; give the size of one"),
        ({"replicate": 0}, "mesh.replicate = 0: "),
        ({"shard": "all"}, "mesh.shard = 'all': "),
        ({"replicat": 2}, "mesh.replicat = 2: is not a known key; did you mean mesh.replicate?"),
        ([2, 4], r"mesh = \[2, 4\]: must be an object"),
        ({"shard": -1, "tensor": -1}, "mesh.shard = -1: and tensor are both the rest"),
    ],
)
def test_sizes_of_a_mesh(mesh, said):
    with pytest.raises(ConfigError, match=said):
        load_config({"mesh": mesh})
    assert load_config({"mesh": {"replicate": 2}}).mesh == MeshConfig(2, -1)
