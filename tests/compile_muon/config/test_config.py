"""Configuration: each bad input gets one error with field, value and remedy; all vocabularies end in the same place."""

import dataclasses
import inspect
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from support.drawn import FIELDS, adamw, keywords, nested, params, range_of

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
    convert,
    load_config,
    read_options,
)
from compile_muon.config.vocabulary import SECTIONS
from compile_muon.errors import ConfigError, MuonZeroError, MuonZeroWarning, config_error, join_errors
from compile_muon.kernels.coefficients import COEFFICIENTS, resolve_coefficients
from compile_muon.optimizer import MuonZero

NAN = float("nan")
FEW = settings(max_examples=6, derandomize=True, database=None)


def check(error: ConfigError, field: str, *words: str) -> None:
    """The message is exactly "{field} = {value}: {problem}; {remedy}" and says these words."""
    text = str(error)
    assert text == f"{error.field} = {error.shown}: {error.problem}; {error.remedy}"
    assert error.field == field
    assert error.problem and error.remedy
    for word in words:
        assert word in text, text


def refused(call, field, *words):
    with pytest.raises(ConfigError) as caught:
        call()
    check(caught.value, field, *words)


def test_an_error_has_field_value_and_remedy_is_short_and_survives_pickling():
    error = config_error("stage", 5, "is not a ZeRO stage", "use 0, 1, 2 or 3")
    assert str(error) == "stage = 5: is not a ZeRO stage; use 0, 1, 2 or 3"
    assert error.errors == (error,) and join_errors([error]) is error
    assert ConfigError("as text").errors[0].args == ("as text",)
    long = config_error("x", ["y" * 999, lambda: 0], "is long", "shorten it")
    again = pickle.loads(pickle.dumps(long))
    assert len(str(long)) < 250
    assert (str(again), again.field, again.remedy) == (str(long), "x", "shorten it")


KINDS = {"ConfigError": ValueError, "UnsupportedModelError": ValueError, "LedgerError": RuntimeError}
KINDS |= {"NonFiniteError": ArithmeticError, "CheckpointError": RuntimeError, "DamagedError": errors.CheckpointError}


def test_every_error_is_ours_and_python_s():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MuonZeroError)]
    assert {kind.__name__ for kind in kinds} >= KINDS.keys()
    assert not issubclass(MuonZeroError, (RuntimeError, ValueError))
    for kind in kinds:
        assert issubclass(kind, KINDS.get(kind.__name__, Exception)) and inspect.getdoc(kind)
        again = pickle.loads(pickle.dumps(kind("text")))
        assert (type(again), str(again)) == (kind, "text")


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_a_field_takes_what_it_says_and_refuses_what_it_does_not(kind, name):
    own = range_of(kind, name)

    @FEW
    @given(own.good)
    def taken(value):
        once = kind.checked(name, value, "x")
        assert kind.checked(name, once, "x") == once and isinstance(hash(once), int)
        assert once == value or not isinstance(value, (bool, int, float))

    @settings(FEW, max_examples=12)
    @given(own.bad)
    def refuses(value):
        outside = type(value) in (int, float) and -2 < value < 2**65 and ("integer" not in own.said or value % 1 == 0)
        refused(lambda: kind.checked(name, value, "x"), "x", *([own.said] if outside else []))

    taken()
    if own.holds is not None:
        refuses()


@pytest.mark.parametrize(
    ("given", "canonical"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("torch.bfloat16", "bfloat16"),
     (torch.float16, "float16"), (torch.double, "float64"), ("auto", "auto")],
)  # fmt: skip
def test_values_are_canonical(given, canonical, tmp_path):
    assert NSConfig(dtype=given).dtype == canonical
    if canonical != "auto":
        assert ZeroConfig(param_dtype=given).param_dtype is getattr(torch, canonical)
    assert AdamWConfig(betas=[0, 0.5]).betas == (0.0, 0.5)
    assert NSConfig(coefficients=[3, -4.5, 2]).coefficients == (3.0, -4.5, 2.0)
    assert NSConfig(coefficients=[[1, 2, 3], (4, 5, 6)]).coefficients == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    assert CompileConfig(dump=tmp_path).dump == CompileConfig(dump=str(tmp_path)).dump == tmp_path
    assert {type(MuonConfig(lr=1).lr), type(ZeroConfig(gradient_clipping=1).gradient_clipping)} == {float}


#: What is said beyond the range.
HINTS = [
    (NSConfig, "coefficients", "jordn", "use one of 'jordan'"),
    (NSConfig, "coefficients", (1.0, NAN, 2.0), "triple of finite"),
    (NSConfig, "coefficients", [(1, 2, 3)] * 100, "100 triples; give at most 99"),
    (NSConfig, "coefficients", [(1, 2, 3), 4.0, 5.0], "triple of finite"),
    (NSConfig, "coefficients", [(1, 2)] * 5, "triple of finite"), (NSConfig, "method", "gramm", "'standard', 'gram'"),
    (MuonConfig, "lr", "auto", "Hugging Face"), (MuonConfig, "lr", torch.tensor([0.1]), "plain number"),
    (MuonConfig, "ns", {"steps": 5}, "NSConfig(...)"), (ZeroConfig, "gradient_clipping", 0.0, "lies outside (0, inf)"),
    (ZeroConfig, "offload_param", "nvme", "'cpu'"), (Config, "machine", "h1000", "use b200"),
    (Config, "muon_params", "blocks.*", '["pattern"'), (Config, "muon_params", [], "leave it out"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "field", "value", "word"), HINTS)
def test_a_bad_field_is_named_as_that_of_its_section(kind, field, value, word):
    refused(lambda: kind(**{field: value}), f"{kind.__name__}.{field}", word)


TRIPLES = [(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)]


@pytest.mark.parametrize(
    ("coefficients", "length"), [*((n, len(c.steps)) for n, c in COEFFICIENTS.items()), ((1, 2, 3), 5), (TRIPLES, 2)]
)
def test_steps_left_out_are_the_length_of_the_coefficients(coefficients, length):
    in_json = {"ns_coefficients": coefficients if isinstance(coefficients, str) else list(coefficients)}
    configs = [
        *(config_from_kwargs(ns_coefficients=coefficients, **steps) for steps in ({}, {"ns_steps": None})),
        config_from_kwargs(ns_coefficients=coefficients, ns_steps=length),
        *(load_config(params(**in_json, **steps)) for steps in ({}, {"ns_steps": None})),
        Config(muon=MuonConfig(ns=NSConfig(coefficients=coefficients))),
    ]
    assert {len(resolve_coefficients(c.muon.ns.coefficients, c.muon.ns.steps).steps) for c in configs} == {length}


#: what else must be said with one
NEEDS = {"offload_param": {"stage": 3}}
SECTION = {MuonConfig: "muon.", NSConfig: "muon.ns.", AdamWConfig: "adamw.", ZeroConfig: "zero.", Config: ""}
PATHS = {name: SECTION[owner] + field for name, (owner, field) in ARGUMENTS.items()}


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


def as_key(name, value):
    """A keyword in a config: rates each by itself, groups beside the parameters."""
    apart = {"rates": nested("optimizer.params", value), "groups": nested("optimizer.groups", value)}
    return apart.get(name, params(**{name: value}))


@pytest.mark.filterwarnings("ignore:optimizer.params.lr = ")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_keyword_and_key_sets_its_field_and_no_other(name):
    """And is written as a key that does."""
    owner, field = ARGUMENTS[name]
    own, needs = range_of(owner, field), NEEDS.get(name, {})
    base = leaves(config_from_kwargs(**needs))

    @FEW
    @given(own.good)
    def sets(value):
        stored = owner.checked(field, value, name)
        expected = {**base, PATHS[name]: stored}
        assert leaves(config_from_kwargs(**{name: value}, **needs)) == expected
        source = as_key(name, value)
        source["optimizer"].setdefault("params", {}).update(needs)
        if name in ("lr", "weight_decay"):  # shared by both halves in DeepSpeed's vocabulary
            expected[f"adamw.{name}"] = stored
        assert leaves(load_config(source)) == expected
        if not callable(value) and not isinstance(value, torch.Tensor):
            written = convert(config_from_kwargs(**{name: value}, **needs))
            assert load_config(json.loads(json.dumps(written))) == config_from_kwargs(**{name: value}, **needs)

    @FEW
    @given(own.bad)
    def refuses(value):
        refused(lambda: config_from_kwargs(**{name: value}), name)
        refused(lambda: load_config(params(**{name: value})), f"optimizer.params.{name}")

    sets()
    if own.holds is not None:
        refuses()


@settings(FEW, max_examples=25)
@given(keywords())
def test_keywords_and_keys_agree(chosen):
    """And contradict each other alike."""
    chosen = {name: value for name, value in chosen.items() if name not in ("rates", "groups", "lr", "weight_decay")}
    found = []
    for make in (lambda: config_from_kwargs(**chosen), lambda: load_config(params(**chosen))):
        try:
            found.append(leaves(make()))
        except ConfigError as error:
            found.append({each.field.removeprefix("optimizer.params.") for each in error.errors})
    assert found[0] == found[1]


def test_unknown_keyword_far_from_all_lists_them():
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(zzzzzz=1)
    assert set(caught.value.remedy.removeprefix("use one of ").split(", ")) == set(ARGUMENTS)


FULL = {
    "compile": True,
    "optimizer": {
        "type": "Muon",
        "params": {
            "lr": 0.01, "muon_lr": 0.03, "adam_lr": 0.002, "momentum": 0.9, "weight_decay": 0.05, "betas": [0.8, 0.99],
            "eps": 1e-6, "ns_method": "standard", "ns_steps": 6,
        },
    },
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
}  # fmt: skip


def test_the_whole_vocabulary_from_a_file_a_dict_and_a_config(tmp_path):
    source, path = json.loads(json.dumps(FULL)), tmp_path / "config.json"
    config = load_config(source)
    assert source == FULL
    assert config.muon == MuonConfig(0.03, 0.9, True, 0.05, None, ns=NSConfig(6, method="standard"))
    assert config.adamw == AdamWConfig(0.002, (0.8, 0.99), 1e-6, 0.05)
    assert config.zero == ZeroConfig(
        3, gradient_clipping=0.5, gradient_accumulation_steps=4, param_dtype=torch.bfloat16
    )
    assert config.compile == CompileConfig(enabled=True)
    path.write_text(json.dumps(FULL))
    assert load_config(path) == load_config(str(path)) == config
    assert load_config(config) is config


BF16 = {"bf16": {"enabled": True}}
CPU_PARAM = {"stage": 3, "offload_param": "cpu"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        *(({"gradient_clipping": zero}, Config()) for zero in (0, 0.0)),
        (params(gradient_clipping=0), Config()),
        ({"gradient_accumulation_steps": None}, Config(zero=ZeroConfig(gradient_accumulation_steps=None))),
        *(({"optimizer": {"type": kind}}, Config()) for kind in ("Muon", "muon", "MUON")),
        *(({"optimizer": {"type": kind}}, Config(algorithm="adamw")) for kind in ("AdamW", "adamw", "ADAMW")),
        ({"bf16": {"enabled": False}}, Config()),
        ({"bf16": {"enabled": False}, **params(param_dtype="fp32")}, Config(zero=ZeroConfig(param_dtype="fp32"))),
        ({"compile": False}, Config()),
        *(({"compile": on}, Config(compile=CompileConfig(enabled=True))) for on in (True, {})),
        ({"compile": {"codegen": "eager"}}, Config(compile=CompileConfig(enabled=True, codegen="eager"))),
        ({"compile": {"enabled": False, "codegen": "eager"}}, Config(compile=CompileConfig(codegen="eager"))),
        (
            {**params(stage=3, param_dtype=torch.bfloat16, betas=[0.9, 0.9], adamw_betas=(0.9, 0.9)), **BF16,
             "zero_optimization": {"stage": 3}, "gradient_clipping": 0},
            Config(adamw=AdamWConfig(betas=(0.9, 0.9)), zero=ZeroConfig(3, param_dtype=torch.bfloat16)),
        ),  # the same thing twice
        ({"mesh": {"replicate": 2}}, Config(mesh=MeshConfig(2, -1))),
        # rates of both halves, and decays
        (params(), Config(MuonConfig(0.02), AdamWConfig(3e-4))),
        (params(lr=0.5), Config(MuonConfig(0.5), AdamWConfig(0.5))),
        (params(lr=0.5, muon_lr=0.1), Config(MuonConfig(0.1), AdamWConfig(0.5))),
        (params(lr=0.5, adam_lr=0.1), Config(MuonConfig(0.5), AdamWConfig(0.1))),
        (params(adamw_lr=0.1, lr=0.5), Config(MuonConfig(0.5), AdamWConfig(0.1))),
        (params(lr=0.5, muon_lr=0.1, adam_lr=0.2), Config(MuonConfig(0.1), AdamWConfig(0.2))),
        (params(weight_decay=0.5), Config(MuonConfig(weight_decay=0.5), AdamWConfig(weight_decay=0.5))),
        (params(weight_decay=0.5, adamw_weight_decay=0),
         Config(MuonConfig(weight_decay=0.5), AdamWConfig(weight_decay=0.0))),
        (params(adamw_weight_decay=0.3), Config(MuonConfig(weight_decay=0.1), AdamWConfig(weight_decay=0.3))),
    ],
)  # fmt: skip
def test_a_config_is_what_it_says(source, expected):
    assert load_config(source) == expected


#: source, field, words; contradictions first
BAD = [
    ({**params(stage=1), "zero_optimization": {"stage": 2}}, "optimizer.params.stage", "zero_optimization.stage = 2"),
    ({**params(gradient_clipping=1.0), "gradient_clipping": 0}, "optimizer.params.gradient_clipping", "= None"),
    ({**params(param_dtype="fp32"), **BF16}, "bf16.enabled", "torch.float32"),
    ({**params(param_dtype="bf16"), "bf16": {"enabled": False}}, "bf16.enabled", "optimizer.params.param_dtype"),
    (params(adam_lr=0.1, adamw_lr=0.2), "optimizer.params.adamw_lr", "optimizer.params.adam_lr = 0.1"),
    (params(stage=3, check_replicas=5), "optimizer.params.check_replicas", "= 5", "use stage 2"),
    (params(stage=2, offload_param="cpu"), "optimizer.params.offload_param", "at stage 2", "use stage 3"),
    (params(**CPU_PARAM, shard_state_over="all"), "optimizer.params.offload_param", "copies", '= "shard"'),
    (params(betas=[0.9, 0.9], adamw_betas=[0.9, 0.8]), "optimizer.params.adamw_betas", "contradicts"),
    (params(lr=-1, muon_lr=0.1, adam_lr=0.1), "optimizer.params.lr", "-1"),  # even where it is overridden
    (params(ns_steps=0, ns_coefficients="deepseek_v4"), "optimizer.params.ns_steps", "1 to 99"),  # and no contradiction
    (params(ns_steps=5, ns_coefficients=[[1, 2, 3], [4, 5, 6]]), "optimizer.params.ns_coefficients",
     "2 triples for 5 steps; set ns_steps=2"),
    (params(ns_steps=11, ns_coefficients="deepseek_v4"), "optimizer.params.ns_coefficients",
     "10 triples for 11 steps; set ns_steps=10"),
    # keys
    ({"optimiser": {}}, "optimiser", "did you mean optimizer?"),
    ({"lr": 0.1}, "lr", "did you mean optimizer.params.lr?"),
    ({"stage": 1}, "stage", "zero_optimization.stage"),
    ({"zzz": 1}, "zzz", "known here are compile, optimizer"),
    (params(muon_lrr=1), "optimizer.params.muon_lrr", "did you mean optimizer.params.muon_lr?"),
    (params(bf16=1), "optimizer.params.bf16", "did you mean bf16?"),
    ({"zero_optimization": {"nonfinite": "skip"}}, "zero_optimization.nonfinite", "optimizer.params.nonfinite"),
    ({"bf16": {"enable": True}}, "bf16.enable", "bf16.enabled"),
    ({3: 4}, "3", "known here"),
    # sections, and values of keys that no field has
    (params(betas=[0.9, 1]), "optimizer.params.betas", "[0, 1)"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "0 to 3"),
    ({"optimizer": {"type": "SGD"}}, "optimizer.type", '"Muon" or "AdamW"'),
    ({"gradient_clipping": "auto"}, "gradient_clipping", "Hugging Face"),
    ({"bf16": {"enabled": "auto"}}, "bf16.enabled", "true or false"),
    ({"fp16": {"enabled": True}}, "fp16.enabled", "scales the loss", "bf16", "GradScaler", "param_dtype"),
    ({"compile": {"enabled": 1}}, "compile.enabled", "true or false"),
    (None, "config", "object"),
    ({"mesh": {"replicate": -1, "shard": -1}}, "mesh.replicate", "and shard are both the rest; give the size of one"),
    # keys of DeepSpeed with a remedy of their own
    (nested("compile.offload_parameters", True), "compile.offload_parameters", "remove it", "offload_param are what"),
    (nested("zero_optimization.zero_quantized_weights", True), "zero_optimization.zero_quantized_weights", "ZeRO++"),
    (nested("optimizer.params.max_grad_norm", True), "optimizer.params.max_grad_norm", "gradient_clipping"),
    (nested("bf16.bf16_optimizer_states", True), "bf16.bf16_optimizer_states", "remove it", "not honoured"),
    # AdamW for everything
    (adamw(muon_lr=0.1), "optimizer.params.muon_lr", "use lr"),
    (adamw(momentum=0.95), "optimizer.params.momentum", "belongs to Muon", 'optimizer.type to "Muon"'),  # the default
    (adamw(update="backward"), "optimizer.params.update", "belongs to Muon", 'update="auto"'),
    (adamw(betas=(2, 2)), "optimizer.params.betas", "(2, 2)"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "field", "words"), [(row[0], row[1], row[2:]) for row in BAD])
def test_a_bad_config_is_one_error(source, field, words):
    refused(lambda: load_config(source), field, *words)


def mistakes(call) -> dict[str, ConfigError]:
    """Field -> error, of a call that raises one ConfigError about several settings; each has the shape of a single."""
    with pytest.raises(ConfigError) as caught:
        call()
    found = {error.field: error for error in caught.value.errors}
    assert len(found) == len(caught.value.errors) > 1, str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
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
    in_params = "lr muon_lr muon_lrr amsgrad adamw_betas ns_coefficients max_skipped_steps"
    # momentum, twice: while a file is parsed nobody knows in which section
    fields = "zzz scheduler.type momentum optimizer.typ zero_optimization.stage zero_optimization.zenflow "
    fields += "gradient_clipping gradient_accumulation_steps compile.nvtx compile.bucket_mb compile.deepcompile "
    fields += "bf16.enabled bf16.enable fp16.enabled"
    assert mistakes(lambda: load_config(path)).keys() == {
        *fields.split(), *(f"optimizer.params.{key}" for key in in_params.split())
    }  # fmt: skip


OPTIONS = {"codegn": 1, "dump": 2, "bucket_mb": "x", "nvtx": 0}
KEYWORDS = {"lr": -1, "adamw_betas": (2, 2), "stage": 9, "ns_coefficients": "deepseek_v4"}


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (lambda: load_config({"optimizer": 1, "zero_optimization": 2, "bf16": True, "fp16": [], "compile": "yes"}),
         "optimizer zero_optimization bf16 fp16 compile"),
        (lambda: load_config({**adamw(momentum=0.9, muon_lr=0.1, lr=-1, update="backward"),
                              "zero_optimization": {"stage": 9}}),
         "optimizer.params.momentum optimizer.params.muon_lr optimizer.params.lr optimizer.params.update "
         "zero_optimization.stage"),
        (lambda: config_from_kwargs(**KEYWORDS, ns_steps=3), " ".join(KEYWORDS)),
        (lambda: read_options(OPTIONS), " ".join(f"options[{key!r}]" for key in OPTIONS)),
        (lambda: NSConfig(steps=5, coefficients="deepseek_v4", method="x", eps=-1),
         "NSConfig.coefficients NSConfig.method NSConfig.eps"),
        (lambda: Config(MuonConfig(lr=1.0), zero=3, muon_params=["a"], algorithm="adamw"),
         "Config.muon Config.zero Config.muon_params"),
    ],
)  # fmt: skip
def test_all_mistakes_of_whatever_it_is_in_one_error(call, fields):
    assert mistakes(call).keys() == set(fields.split())


@pytest.mark.parametrize("prefix", ["", "adamw_"])
def test_adamw_takes_lr_decay_betas_and_eps_and_keeps_the_engine(prefix):
    own = {"lr": 0.5, "betas": [0.1, 0.2], "eps": 0.3, "weight_decay": 0.4}
    config = load_config(adamw(**{prefix + key: value for key, value in own.items()}))
    assert config == Config(adamw=AdamWConfig(0.5, (0.1, 0.2), 0.3, 0.4), algorithm="adamw")
    engine = {"compile": True, "zero_optimization": {"stage": 3}, "gradient_clipping": 1.0, **BF16}
    params_ = {"reduce_dtype": "fp32", "update": "step"}
    config, muon = load_config({**engine, **adamw(**params_)}), load_config({**engine, **params(**params_)})
    assert dataclasses.replace(config, algorithm="muon") == muon
    assert (config.zero.stage, config.zero.param_dtype) == (3, torch.bfloat16)
    assert load_config(adamw(lr=0.1, adam_lr=0.1)).adamw.lr == 0.1


@pytest.mark.parametrize(
    ("text", "field", "word"),
    [
        ("{", "config", "line 1"), ("\udcff\udcfe\0", "config", "cannot be read"), ("[]", "config", "object"),
        ('{"gradient_clipping": 1, "gradient_clipping": 2}', "gradient_clipping", "twice"),
        ('{"gradient_clipping": NaN}', "gradient_clipping", "finite"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, text, field, word):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    refused(lambda: load_config(path), field, word)
    for absent in (tmp_path / "nowhere.json", tmp_path):
        refused(lambda absent=absent: load_config(absent), "config", str(absent), "cannot be read")


DOCS = (Path(__file__).parents[3] / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
SIGNATURE = {
    name: parameter.default
    for name, parameter in inspect.signature(MuonZero.__init__).parameters.items()
    if name not in ("self", "model") and parameter.annotation != "NoReturn"
}


def test_signature_dataclasses_and_json_have_the_same_settings_and_defaults():
    """What each means, and which values it takes, is in tables of the docs, which ``docs/settings.py`` makes."""
    objects = {"mesh", "norm_group", "weights", "init", "extensions"}
    assert SIGNATURE.keys() - objects == ARGUMENTS.keys()
    own = {"muon_lr", "adam_lr", "betas", "eps", "cautious_decay", "beta1", "beta2", "fraction", "period"}
    own |= {"block_lr_factor", "basis_every"}
    assert set(SECTIONS["optimizer.params"]) - ARGUMENTS.keys() == own
    # by keyword; what is under `compile` belongs to initialize, and parallel axes have sections of their own
    apart = re.compile(r"compile\.|(expert|sequence)_parallel\.|(algorithm|mesh|scheduler)$")
    assert set(PATHS.values()) == {path for path in leaves(Config()) if not apart.match(path)}
    named = re.findall(r"^    ([\w, ]+): ", inspect.getdoc(MuonZero), re.MULTILINE)
    described = {name for row in named for name in row.split(", ")}
    for name, (owner, field) in ARGUMENTS.items():
        assert SIGNATURE[name] == getattr(owner(), field) == leaves(Config())[PATHS[name]]
        assert name in described or name.startswith(("ns_", "adamw_")), name


def test_every_option_of_torch_compile_is_a_key_and_reaches_the_frame():
    values = {field.name: field.default for field in dataclasses.fields(CompileConfig)}
    assert values.keys() | {"deepcompile"} == set(SECTIONS["compile"])
    assert load_config({"compile": values}).compile == CompileConfig()
    default = {field.name: field.default for field in dataclasses.fields(CompileOptions)}
    assert values.keys() - {"enabled", "fullgraph", "dynamic"} == default.keys()
    for nothing in (None, {}, CompileOptions().options(), default):
        assert read_options(nothing) == FrameOptions()
    chosen = {"codegen": "eager", "dump": "graphs", "nvtx": True, "bucket_mb": 0.5}
    chosen |= {"cuda_graphs": True, "reshard_after_forward": False}
    written = CompileConfig(enabled=True, fullgraph=True, dynamic=False, **chosen).options()
    assert written == chosen | {"dump": Path("graphs")}
    assert read_options(chosen) == FrameOptions(
        codegen="eager", dump=Path("graphs"), nvtx=True, bucket_bytes=2**19, cuda_graphs=True,
        reshard_after_forward=False,
    )  # fmt: skip


def test_a_former_option_has_no_effect_and_is_told():
    with pytest.warns(MuonZeroWarning, match=r"^no effect here: options\['exchange_mb'\]$"):
        assert read_options({"exchange_mb": 2}) == FrameOptions()
    with pytest.warns(MuonZeroWarning, match=r"^no effect here: compile.exchange_mb$"):
        assert load_config({"compile": {"exchange_mb": 2}}).compile == CompileConfig(enabled=True)


def test_every_key_is_documented():
    """Those that stand for another setting, too, which no field has."""
    rows = [line.strip("|").split("|")[0] for line in DOCS.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    for section, keys in SECTIONS.items():
        for key in keys:
            path = f"{section}.{key}" if section else key
            assert key in ARGUMENTS or (key in SECTIONS and not section) or {path, key} & documented, path
