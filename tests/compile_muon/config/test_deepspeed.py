"""DeepSpeed's configs: hints are named once, requests that cannot be met are errors, and `convert` writes the rest."""

import dataclasses
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from support.drawn import keywords, nested

from compile_muon.__main__ import main
from compile_muon.config import (
    AdamWConfig,
    CompileConfig,
    Config,
    ExpertParallelConfig,
    MeshConfig,
    MuonConfig,
    NSConfig,
    OffloadConfig,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    ZeroConfig,
    config_from_kwargs,
    convert,
    load_config,
)
from compile_muon.config.accept import FILLED
from compile_muon.config.deepspeed import read_all
from compile_muon.config.vocabulary import FOREIGN, SECTIONS, refusal
from compile_muon.errors import ConfigError
from compile_muon.integrations.common import filled

ROOT = Path(__file__).parents[3]
SAMPLES = {path.stem: path for path in (Path(__file__).parent / "deepspeed").glob("*.json")}
SECTION = (ROOT / "docs" / "start" / "from-deepspeed.md").read_text(encoding="utf-8")
DOCS = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8") + SECTION


def load_noting(source) -> tuple[Config, list[str]]:
    """The config, and the keys that the one warning names."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_config(source)
    messages = [str(warning.message) for warning in caught]
    hints = [message for message in messages if message.startswith("no effect here: ")]
    sized = [message.partition(": ")[0] for message in messages if message.startswith("train_")]
    known = ("train_", "scheduler.params.", "no effect here: ", "optimizer.params.lr = ")
    known += ("optimizer.params: what is left out", "optimizer: this config has none")
    assert len(hints) <= 1 and all(message.startswith(known) for message in messages), messages
    assert not caught or caught[0].filename == __file__  # at the caller's line, not in ours
    hints = [message.removeprefix("no effect here: ") for message in hints]
    return config, [key for message in sized + hints for key in message.split(", ")]


def decaying_vectors(config: Config) -> Config:
    """As a config of DeepSpeed is read."""
    return dataclasses.replace(config, adamw=dataclasses.replace(config.adamw, decay_vectors=True))


BF16 = {"param_dtype": torch.bfloat16}
#: What the samples that load become.
LOADED = {
    "zero2": Config(
        adamw=AdamWConfig(2e-4, (0.9, 0.99), 1e-8, 0.02), algorithm="adamw",
        zero=ZeroConfig(
            2, gradient_accumulation_steps=4, gradient_clipping=1.0, **BF16, reduce_dtype=torch.float32
        ),
    ),
    "zero3": Config(
        adamw=AdamWConfig(1e-4, (0.9, 0.98), 1e-7, 0.0), algorithm="adamw",
        zero=ZeroConfig(3, gradient_accumulation_steps=2, gradient_clipping=0.5, **BF16),
    ),
    "muon": Config(
        MuonConfig(0.01, 0.9, weight_decay=0.0, ns=NSConfig(method="gram")), AdamWConfig(2e-4, weight_decay=0.0),
        ZeroConfig(3, **BF16),
    ),
    "deepcompile": Config(
        adamw=AdamWConfig(1e-4), zero=ZeroConfig(3, **BF16), compile=CompileConfig(enabled=True), algorithm="adamw"
    ),
    "everything_off": Config(adamw=AdamWConfig(1e-3), zero=ZeroConfig(1), algorithm="adamw"),
    "openrlhf": Config(zero=ZeroConfig(3, gradient_clipping=1.0, **BF16), compile=CompileConfig(enabled=True)),
    "deepspeed_chat": Config(zero=ZeroConfig(2, gradient_clipping=1.0, **BF16)),
    "leaf_modules": Config(
        adamw=AdamWConfig(2e-4), zero=ZeroConfig(3, **BF16), algorithm="adamw",
        scheduler=WarmupCosineLR(
            total_num_steps=500, warmup_num_steps=50, cos_min_ratio=0.01, warmup_type="linear"
        ),
    ),
    "alpaca_numbers": Config(
        adamw=AdamWConfig(3e-5, (0.9, 0.99), 1e-8, 0.0),  # the schedule's rate, not the optimizer's
        zero=ZeroConfig(3, gradient_accumulation_steps=8, gradient_clipping=1.0, **BF16), algorithm="adamw",
        scheduler=WarmupDecayLR(warmup_min_lr=1e-6, warmup_num_steps=40, total_num_steps=1200, warmup_type="linear"),
    ),
}  # fmt: skip

#: The settings of each other sample that have to go.
IN_SCHEDULE = " ".join(f"scheduler.params.warmup_{name}" for name in ("min_lr", "max_lr", "num_steps"))
REFUSED = {
    "zero2_auto": "bf16.enabled optimizer.params.lr optimizer.params.betas optimizer.params.eps "
    f"optimizer.params.weight_decay {IN_SCHEDULE} gradient_accumulation_steps gradient_clipping",
    "zero3_fp16": "fp16.enabled",
    "infinity": "zero_optimization.offload_param",
    "tutorial": "fp16.enabled zero_optimization",
    "llama_factory": "bf16.enabled gradient_accumulation_steps gradient_clipping",
    "axolotl": "gradient_accumulation_steps gradient_clipping",
    "axolotl_compile": "bf16.enabled gradient_accumulation_steps gradient_clipping",
    "accelerate": "fp16.enabled optimizer.params.lr optimizer.params.weight_decay gradient_clipping "
    f"scheduler.params.total_num_steps {IN_SCHEDULE}",
    "alpaca": "bf16.enabled optimizer.params.lr optimizer.params.betas optimizer.params.eps "
    f"optimizer.params.weight_decay {IN_SCHEDULE} scheduler.params.total_num_steps "
    "gradient_accumulation_steps gradient_clipping",
    "swift": "bf16.enabled gradient_accumulation_steps gradient_clipping",
    "one_cycle": "scheduler.params.cycle_momentum",
}


def hints_among(source: dict, section: str = "") -> set[str]:
    """Keys that DeepSpeed alone knows, and sections of which nothing is left to do."""
    found = set()
    for key, value in source.items():
        path = f"{section}.{key}".lstrip(".")
        if path in FOREIGN or key.startswith("_"):
            found.add(path)
        elif isinstance(value, dict):
            found |= hints_among(value, path)
    return found


@pytest.mark.parametrize("name", LOADED)
def test_sample_loads_and_notes_its_hints_once(name):
    config, noted = load_noting(SAMPLES[name])
    sized = {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(noted)
    assert config == (decaying_vectors(LOADED[name]) if sized else LOADED[name])
    assert len(noted) == len(set(noted))
    foreign = hints_among(json.loads(SAMPLES[name].read_text()))
    read = "fp16 scheduler communication_data_type zero_optimization.offload_param zero_optimization.offload_optimizer "
    read += "zero_optimization.save_muon_momentum_buffer_in_memory"
    assert foreign <= set(noted) <= foreign | set(read.split())  # these are off, or what is done anyway


@pytest.mark.parametrize("name", REFUSED)
def test_sample_is_refused_with_all_its_problems_at_once(name):
    with pytest.raises(ConfigError) as caught:
        load_config(SAMPLES[name])
    assert sorted(error.field for error in caught.value.errors) == sorted(REFUSED[name].split())
    for error in caught.value.errors:
        assert error.remedy
        assert ("Trainer" in error.problem) == (error.shown == "'auto'")
        assert ("MuonTrainer" in error.remedy) == (error.shown == "'auto'")


@pytest.mark.parametrize("name", SAMPLES)
def test_all_that_is_auto_and_read_is_filled_in_by_a_trainer(name):
    stand_ins = {"optimizer.params.betas": [0.9, 0.99], "bf16.enabled": True}
    automatic = {tuple(path.split(".")): stand_ins.get(path, 1) for path in FILLED}
    errors = read_all(filled(SAMPLES[name], automatic, defaults={}))[1].mistakes.found
    assert {error.field for error in errors} == set(REFUSED.get(name, "").split()) - set(FILLED)


HINTS = [path for path in FOREIGN if refusal(path, "asked for") is None]


@pytest.mark.parametrize("value", [True, False, None, 0, 5e8, "auto", {"enabled": True}])
def test_a_hint_is_accepted_with_any_value(value):
    for path in HINTS:
        if path.startswith("scheduler."):  # of one schedule, and tested with it
            continue
        source = nested(path, value)
        if path.startswith("compile."):
            source["compile"]["enabled"] = False  # an object means true
        config, noted = load_noting(source)
        sized = path in ("train_batch_size", "train_micro_batch_size_per_gpu")
        assert (config, noted) == (decaying_vectors(Config()) if sized else Config(), [path])


def test_no_key_is_both_read_and_foreign():
    assert not FOREIGN.keys() & {f"{section}.{key}".lstrip(".") for section, own in SECTIONS.items() for key in own}


BF16_ON = {"bf16": {"enabled": True}}
TAKEN = [
    *((nested(path, "as JSON has none"), Config(), path)
      for path in ("_comment", "zero_optimization._comment", "optimizer.params._why")),
    *(({name: value}, Config(), name) for name in ("fp16", "bf16", "bfloat16") for value in (None, False)),
    ({"fp16": {"enabled": "auto"}, **BF16_ON}, Config(zero=ZeroConfig(**BF16)), "fp16.enabled"),
    ({"amp": {"enabled": "auto"}, **BF16_ON}, Config(zero=ZeroConfig(**BF16)), "amp"),
    *(({"compile": {"deepcompile": on, **more}}, Config(compile=CompileConfig(enabled=on)), "")
      for on in (True, False) for more in ({}, {"enabled": on})),
    ({"bfloat16": {"enabled": True}}, Config(zero=ZeroConfig(**BF16)), ""),  # its old name
    ({"bfloat16": {"enabled": True}, **BF16_ON}, Config(zero=ZeroConfig(**BF16)), ""),
    *(({"communication_data_type": name}, Config(zero=ZeroConfig(reduce_dtype=name)), "") for name in ("fp32", "bf16")),
    *(({"data_types": {"grad_accum_dtype": name}}, Config(), "data_types") for name in ("fp32", "float32")),
    ({"bf16": {"enabled": False}, "fp16": {"enabled": False}, "gradient_clipping": 0}, Config(), ""),
    *(({"zero_optimization": {"stage": 3, "offload_param": off}}, Config(zero=ZeroConfig(3)),
       "zero_optimization.offload_param") for off in (False, None, "none", {}, {"device": "none", "pin_memory": True})),
    ({"train_batch_size": 8, **nested("optimizer.params.adamw_decay_vectors", False)}, Config(), "train_batch_size"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "config", "noted"), TAKEN)
def test_what_means_the_same_or_nothing_is_taken(source, config, noted):
    assert load_noting(source) == (config, [noted] if noted else [])


AUTO = "bf16.enabled gradient_clipping gradient_accumulation_steps compile.deepcompile zero_optimization.stage "
AUTO += " ".join(f"optimizer.params.{key}" for key in ("lr", "betas", "momentum", "eps", "weight_decay", "nesterov"))
#: what would change the result
REQUESTS = [
    ("zero_optimization.zero_hpz_partition_size", 8), ("amp", {"enabled": True}),
    ("data_types", {"grad_accum_dtype": "bf16"}), ("tensor_parallel", {"autotp_size": 4}),
    ("tensor_parallel", {"tp": {"tp_size": 2}}),
    *((section, {"enabled": True}) for section in ("elasticity", "data_efficiency", "curriculum_learning")),
    ("compression_training", {"weight_quantization": {"shared_parameters": {"enabled": True}}}),
    ("optimizer.params.bias_correction", False), ("optimizer.params.max_grad_norm", 1.0),
    ("compile.passes", ["z3", "autosp"]), ("compile.kwargs", {"dynamic": True}),
    *((f"compile.{key}", True) for key in ("disable", "offload_parameters")),
    *((path, True) for path in ("expert_parallel.enabled", "bf16.bf16_master_weights_and_grads")),
    ("bfloat16.bf16_optimizer_states", True),
]  # fmt: skip
SHARED_PARAMETERS = "compression_training.weight_quantization.shared_parameters"
NEAR = [
    ("zero_optimization.overlap_com", "zero_optimization.overlap_comm"),
    ("overlap_comm", "zero_optimization.overlap_comm"),
    ("zero_optimization.scheduler", "scheduler"),
    ("fp16.loss_scal", "fp16.loss_scale"),
    ("torch_autocast.enable", "torch_autocast.enabled"),  # in sections that are off, too
    ("tensor_parallel.autotp_sise", "tensor_parallel.autotp_size"),
    (f"{SHARED_PARAMETERS}.enable", f"{SHARED_PARAMETERS}.enabled"),
    ("zero_optimization.offload_param.devise", "'device'"),
    ("zero_optimization.offload_optimizer.devise", "'device'"),
]
SAID = [
    *((nested(path, value), path, "; remove it") for path, value in REQUESTS),
    *((nested(path, True), path, f"; did you mean {near}?") for path, near in NEAR),
    *((nested(path, "auto"), path, "Trainer of Hugging Face Transformers") for path in AUTO.split()),
    *(({name: True}, name, f'; write {{"enabled": {right}}}')
      for name, right in (("fp16", "false"), ("bf16", "true"), ("bfloat16", "true"))),
    *(({"zero_optimization": on}, "zero_optimization", f'; write {{"stage": {int(on)}}}') for on in (True, False)),
    *(({"compile": {"deepcompile": on, "enabled": not on}}, "compile.deepcompile", f"compile.enabled = {not on}")
      for on in (True, False)),
    ({**BF16_ON, "bfloat16": {"enabled": False}}, "bfloat16.enabled", "contradicts bf16.enabled"),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}}, "optimizer.type",
     'use "AdamW", whose decay is decoupled'),
    *(({"communication_data_type": name, **nested("optimizer.params.reduce_dtype", "fp16")}, "communication_data_type",
       "contradicts") for name in ("fp32", "bf16")),
]  # fmt: skip


@pytest.mark.parametrize(("source", "field", "said"), SAID)
def test_what_would_change_the_result_is_refused(source, field, said):
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert caught.value.field == field and said in str(caught.value)
    filled_in = caught.value.remedy.endswith("or use MuonTrainer, which fills it in")
    assert filled_in == ("Trainer of" in caught.value.problem and field in FILLED)


CONFIGS = {
    "the other's rate": Config(MuonConfig(3e-4), AdamWConfig(0.02)),
    "different decays": Config(MuonConfig(weight_decay=0.2), AdamWConfig(weight_decay=0.0)),
    "AdamW with settings": Config(
        adamw=AdamWConfig(0.5, (0.5, 0.5), 1e-3, 0.0), zero=ZeroConfig(3, update="step"), algorithm="adamw"
    ),
    "compiled with options": Config(compile=CompileConfig(enabled=True, dump="graphs", bucket_mb=3, dynamic=False)),
    "options without compiling": Config(compile=CompileConfig(nvtx=True)),
    "schedule": Config(scheduler=WarmupLR(warmup_num_steps=10)),
    "mesh and experts": Config(mesh=MeshConfig(2), expert_parallel=ExpertParallelConfig(4, 1.5)),
}
EXAMPLES = {
    f"documentation {place}": json.loads(text)
    for place, text in enumerate(re.findall(r"```json\n(.*?)```", DOCS, flags=re.DOTALL))
}
SOURCES = (
    CONFIGS | EXAMPLES | {name: SAMPLES[name] for name in LOADED} | {"tutorial": ROOT / "examples" / "config.json"}
)


@pytest.mark.parametrize("name", SOURCES)
def test_converted_is_the_same_config_without_a_notice(name):
    expected, _ = load_noting(SOURCES[name])
    converted = convert(SOURCES[name])
    assert json.loads(json.dumps(converted)) == converted
    assert load_noting(converted) == (expected, [])
    assert convert(converted) == converted


def test_what_is_sharded_is_written_under_zero_optimization():
    source = {"zero_optimization": {"stage": 3, "shard_state_over": "all"}}
    assert convert(source) == convert({"optimizer": {"params": source["zero_optimization"]}}) == source


@settings(max_examples=40, derandomize=True)
@given(keywords())
def test_converted_are_all_settings_that_go_together(chosen):
    chosen = {name: x for name, x in chosen.items() if not callable(x) and not isinstance(x, torch.Tensor)}
    try:
        config = config_from_kwargs(**chosen)
    except ConfigError:  # some contradict each other
        return
    written = convert(config)
    assert load_noting(json.loads(json.dumps(written))) == (config, [])
    assert convert(written) == written


def test_what_only_python_can_say_cannot_be_converted():
    with pytest.raises(ConfigError) as caught:
        convert(config_from_kwargs(muon_params=lambda name, param: True))
    assert caught.value.field == "muon_params"


def test_command_prints_the_config_and_on_stderr_the_hints(capsys):
    assert main(["convert", str(SAMPLES["muon"])]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == convert(SAMPLES["muon"])
    assert printed.err.startswith("no effect here: ")
    hints, sizes = printed.err.splitlines()
    noted = hints.removeprefix("no effect here: ").split(", ") + [sizes.partition(": ")[0]]
    assert set(noted) == set(load_noting(SAMPLES["muon"])[1])


def left_to_do(printed: str) -> list[str]:
    head, *lines = printed.splitlines()
    assert head == "left to do:"
    return [line.removeprefix("  ") for line in lines if line.startswith("  ")]


@pytest.mark.parametrize("name", REFUSED)
def test_command_prints_what_it_can_and_lists_what_is_left(capsys, name):
    assert main(["convert", str(SAMPLES[name])]) == 1
    printed = capsys.readouterr()
    given = read_all(SAMPLES[name])[1]
    assert left_to_do(printed.err) == [str(error) for error in given.mistakes.found]
    assert not given.hints or f"no effect here: {', '.join(given.hints)}" in printed.err.splitlines()
    # What stays is what is left to do as well: "auto" that a trainer fills in, and an optimizer that is none of ours.
    stays = [error for error in given.mistakes.found if error.shown == "'auto'" or error.field == "optimizer.type"]
    again = read_all(json.loads(printed.out))[1]
    assert sorted(map(str, again.mistakes.found)) == sorted(map(str, stays))
    assert not again.hints


WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": "auto"}}
IN_AUTO = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-6}}
CONTRADICTION = {"ns_steps": 3, "ns_coefficients": "deepseek_v4", "momentum": 0.5}
#: what is converted, what comes out, and the fields that are left to do
CONVERTED = [
    ('{"gradient_clipping": 1, "gradient_clipping": 2}', {"gradient_clipping": 2}, "gradient_clipping"),
    (
        {
            "fp16": {"enabled": True},
            "optimizer": {"params": {"lr": 0.1, "adam_lr": -1, "ns_coefficients": "you", "amsgrad": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        },
        {
            "optimizer": {"params": {"muon_lr": 0.1, "adam_lr": 0.1, "ns_coefficients": "you"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
            "zero_optimization": {"stage": 3},
        },
        "fp16.enabled optimizer.params.adam_lr optimizer.params.amsgrad zero_optimization.offload_param",
    ),
    # of a contradiction the rest, and a type that a setting contradicts
    (nested("optimizer.params", CONTRADICTION), {"optimizer": {"params": {"momentum": 0.5, "ns_steps": 3}}},
     "optimizer.params.ns_coefficients"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "update": "backward"}}},
     {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, "optimizer.params.update"),
    # "auto" that a trainer fills in, and an optimizer that is not ours
    (
        {"optimizer": IN_AUTO, "scheduler": WARMUP, **{key: {"enabled": "auto"} for key in ("bf16", "fp16")},
         "gradient_clipping": "auto", "compile": {"dynamic": "auto"}, "train_batch_size": "auto"},
        {"compile": True, "optimizer": {"type": "AdamW", "params": {**IN_AUTO["params"], "adamw_decay_vectors": True}},
         "scheduler": WARMUP, "gradient_clipping": "auto", "bf16": {"enabled": "auto"}},
        "bf16.enabled compile.dynamic gradient_clipping optimizer.params.betas optimizer.params.lr "
        "scheduler.params.warmup_num_steps",
    ),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1, "betas": [0.5, 0.6]}}},
     {"optimizer": {"type": "Adam", "params": {"betas": [0.5, 0.6]}}}, "optimizer.type"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "out", "left"), CONVERTED)
def test_command_takes_over_all_but_what_is_left_to_do(capsys, tmp_path, source, out, left):
    path = tmp_path / "config.json"
    path.write_text(source if isinstance(source, str) else json.dumps(source))
    code = main(["convert", str(path)])
    printed = capsys.readouterr()
    assert json.loads(printed.out) == out
    fields = [re.split(" = |: ", line)[0] for line in left_to_do(printed.err)]
    assert code == 1 and sorted(fields) == left.split()


def test_adam_is_adamw_as_deepspeed_makes_it():
    for params, decay in (({}, 0.0), ({"weight_decay": 0.3, "adam_w_mode": True}, 0.3), ({"adam_w_mode": False}, 0.0)):
        config, _ = load_noting({"optimizer": {"type": "Adam", "params": params}})
        assert (config.algorithm, config.adamw.weight_decay) == ("adamw", decay)


def test_defaults_that_are_not_deepspeeds_are_said():
    source = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    with pytest.warns(
        UserWarning, match=r"left out .* betas = \(0.9, 0.95\), there \(0.9, 0.999\); weight_decay = 0.1, "
    ):
        load_config(source)
    params = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
    load_noting({**source, "optimizer": {"type": "AdamW", "params": params}})


def test_one_rate_for_both_halves_is_said_unless_it_is_meant():
    with pytest.warns(UserWarning, match=r"optimizer.params.lr = 0.02 is AdamW's rate too.* takes 0.0003 .*muon_lr"):
        assert load_config(nested("optimizer.params.lr", 0.02)).adamw.lr == 0.02
    with pytest.warns(
        UserWarning, match=r"optimizer.params.lr = 0.0003 is Muon's rate too, whose default is 0.02.*muon_lr"
    ):
        assert load_config(nested("optimizer.params.lr", 3e-4)).muon.lr == 3e-4
    rms = ({"adjust_lr": "match_rms_adamw"}, {"adjust_lr": 0.18})
    for meant in ({"adam_lr": 0.02}, *rms, {"muon_lr": 0.02, "adamw_lr": 0.1}, {"muon_lr": 0.02, "lr": 3e-4}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_config(nested("optimizer.params", {"lr": 0.02, **meant}))


def test_a_config_of_deepspeed_without_an_optimizer_is_said_to_train_with_muon():
    with pytest.warns(UserWarning, match=r"optimizer: this config has none.* Muon with its default rates"):
        assert load_config({"train_batch_size": 8, "zero_optimization": {"stage": 2}}) == decaying_vectors(Config())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config({"zero_optimization": {"stage": 2}})


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_command_without_anything_to_read(capsys, tmp_path, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    assert main(["convert", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert printed.err == f"{caught.value}\n"


def test_every_key_of_deepspeed_is_documented_as_what_it_is():
    table = SECTION[SECTION.index("| **no effect here**") :]
    parts = table.partition("| **an error**")
    hints, requests = (set(re.findall(r"`([\w.]+)`", part)) for part in (parts[0], parts[2]))
    for path in FOREIGN:
        named = hints if refusal(path, "asked for") is None else requests
        key = path.rpartition(".")[2]
        assert {key, path.replace("bfloat16", "bf16"), key.removeprefix("stage3_")} & named, path


def test_the_example_of_the_page_is_what_convert_makes_of_it():
    before, after = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", SECTION, flags=re.DOTALL))
    (notice,) = re.findall(r"^no effect here: (.*)$", SECTION, flags=re.MULTILINE)
    assert convert(before) == after
    (sizes,) = re.findall(r"^(train_\w+, train_\w+): how large", SECTION, flags=re.MULTILINE)
    assert load_noting(before)[1] == sizes.split(", ") + notice.split(", ")


@pytest.mark.parametrize("stays", [True, False])
def test_momenta_stay_on_the_device_where_deepspeed_keeps_them_there(stays):
    zero = {"offload_optimizer": {"device": "cpu"}, "save_muon_momentum_buffer_in_memory": stays}
    assert load_config({"zero_optimization": zero}).zero.offload == OffloadConfig("cpu", momentum=not stays)
