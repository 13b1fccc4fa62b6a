"""What is given as a configuration, or as arguments: whatever it is, it is taken, or refused in few words and soon."""

import argparse
import dataclasses
import math
import re
import types
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn import HUGE, nested
from torch import nn

from compile_muon import MuonZero, errors, initialize
from compile_muon.config import CompileConfig, Config, ZeroConfig, load_config
from compile_muon.config.elsewhere import OF_GROUPS, OF_OPTIMIZERS
from compile_muon.config.settings import ARGUMENTS
from compile_muon.config.vocabulary import FOREIGN, SECTIONS
from compile_muon.errors import ConfigError, MuonZeroError, MuonZeroWarning, UnsupportedModelError


def deep(levels: int) -> dict:
    whole: dict = {}
    for _ in range(levels):
        whole = {"mesh": whole}
    return whole


def endless() -> dict:
    whole: dict = {}
    whole["optimizer"] = {"params": whole}
    return whole


HOSTILE = {
    "an integer of 400 digits": {"gradient_clipping": HUGE},
    "of 5,000 digits": {"mesh": {"shard": 10**5000}},
    "deep": deep(50_000),
    "endless": endless(),
    "a key that is a number": {3: 4, None: 1, (1, 2): 2, "optimizer": {"params": {7: 1}, "groups": {1: {2: 3}}}},
    "keys of offload": {"zero_optimization": {"offload_optimizer": {"device": "cpu", 3: 4}, "offload_param": {5: 6}}},
    "a NUL": {"compile": {"dump": "a\0b"}, "zero_optimization": {"offload_optimizer": {"nvme_path": "\0"}}},
    "a long key": {"x" * 2**16: 1, "optimizer": {"y" * 2**16: 2, "type": "z" * 2**16}},
    "a long value": {"gradient_clipping": "x" * 2**16, "mesh": ["y"] * 2**16},
    "20,000 keys": {f"optimiser_{i}": i for i in range(20_000)} | {"gradient_clipping": "x"},
    "a group of 2,000": {"optimizer": {"groups": {"*": {f"lr{i}": i for i in range(2000)}}}},
    "a value that cannot be shown": {"gradient_clipping": type("Raising", (), {"__repr__": lambda self: 1 / 0})()},
    "views": {"optimizer": {"params": {"muon_views": {"a": (1, 2), 3: {"heads": 8}}}}},
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_config_is_an_error_of_ours_in_few_words(source) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert len(str(caught.value)) < 40_000
    assert str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"mesh":' * 100_000, '{"gradient_clipping": 1' + "0" * 5000 + "}", "a\0b.json", "/"],
    ids=lambda text: text[:8],
)
def test_a_hostile_text_or_path_is_an_error_of_ours(text, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for source in (text, path):
        with pytest.raises(ConfigError, match="config") as caught:
            load_config(source)
        assert len(str(caught.value)) < 1000


KEYS = sorted({key for own in SECTIONS.values() for key in own} | {path.rpartition(".")[2] for path in FOREIGN})
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([HUGE, -HUGE, math.nan, math.inf, "auto", "none", "cpu", "", "\0", -1, 0, 1, 1.0])
    | st.floats()
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYS, *OF_GROUPS]) | st.text(max_size=8) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(SECTIONS[""]) | st.sampled_from(KEYS) | st.text(max_size=6), VALUES, max_size=5))
def test_any_mapping_is_a_config_or_an_error_of_ours(source) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load_config(source)
        except ConfigError as error:
            assert len(str(error)) < 40_000


STAGE_3 = load_config({"zero_optimization": {"stage": 3}})


Zero = dataclasses.make_dataclass("Zero", ["stage"])
Whole = dataclasses.make_dataclass("Whole", ["zero_optimization"])


class Resolving(Mapping):
    """As OmegaConf's DictConfig: values are made when they are asked for, and some cannot be."""

    def __init__(self, values):
        self.values_ = values

    def __getitem__(self, key):
        value = self.values_[key]
        if value == "???":
            raise RuntimeError(f"Missing mandatory value: {key}\n    full_key: ...")
        return Resolving(value) if isinstance(value, dict) else value

    def __iter__(self):
        return iter(self.values_)

    def __len__(self):
        return len(self.values_)


class Dumped:
    def to_dict(self):
        return {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    "source",
    [
        '{"zero_optimization": {"stage": 3}}',
        ' \n{"zero_optimization": {"stage": 3}}',
        argparse.Namespace(zero_optimization={"stage": 3}),
        types.SimpleNamespace(zero_optimization=types.SimpleNamespace(stage=3)),
        Whole(Zero(3)),
        Resolving({"zero_optimization": {"stage": 3}}),
        Dumped(),
        STAGE_3,
    ],
    ids=lambda source: type(source).__name__,
)
def test_what_clearly_stands_for_a_config_is_taken(source) -> None:
    assert load_config(source) == STAGE_3


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "{} for the defaults"),
        (Config, "make one: Config"),
        (ZeroConfig(stage=3), "Config(zero=ZeroConfig"),
        (3, "JSON file, a dict, or a Config"),
        ([("a", 1)], "must be an object, not list"),
        (b"{}", "must be an object, not bytes"),
        (Resolving({"zero_optimization": {"stage": "???"}}), "zero_optimization.stage"),
        (argparse.Namespace(lr=0.1, epochs=3), "is not a known key"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_does_not_is_refused_by_what_to_pass(source, words) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(source)


def test_an_open_file_and_yaml_are_refused_by_what_to_pass(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("zero_optimization:\n  stage: 3\n")
    with pytest.raises(ConfigError, match=r"yaml\.safe_load"):
        load_config(path)
    with path.open() as file, pytest.raises(ConfigError, match="give its path"):
        load_config(file)


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


PARAMETERS = {
    "a generator": lambda model: model.parameters(),
    "named": lambda model: model.named_parameters(),
    "a list": lambda model: list(model.parameters()),
    "a state dict": lambda model: model.state_dict(),
    "one": lambda model: next(iter(model.parameters())),
    "groups": lambda model: [{"params": list(model.parameters()), "use_muon": True, "lr": 0.02}],
    "a group": lambda model: {"params": list(model.parameters()), "lr": 0.02},
    "modules": lambda model: list(model),
    "children": lambda model: model.children(),
    "a class": lambda model: nn.Linear,
    "a name": lambda model: "gpt2",
}


@pytest.mark.parametrize("of", PARAMETERS.values(), ids=PARAMETERS)
def test_what_other_optimizers_are_given_is_one_error_with_the_right_call(of) -> None:
    for call in (
        lambda model: MuonZero(of(model), lr=0.02, betas=(0.9, 0.95)),
        lambda model: initialize(of(model), {}),
    ):
        with pytest.raises(UnsupportedModelError, match=r"^model: is (a|the).*MuonZero\(") as caught:
            call(tiny())
        assert len(str(caught.value).splitlines()) == 1
        assert ("groups=[" in str(caught.value)) == (of in (PARAMETERS["groups"], PARAMETERS["a group"]))
        assert ("ModuleList" in str(caught.value)) == (of in (PARAMETERS["modules"], PARAMETERS["children"]))


@pytest.mark.parametrize("name", OF_OPTIMIZERS)
def test_an_argument_of_another_library_names_ours(name) -> None:
    assert name not in ARGUMENTS
    with pytest.raises(ConfigError) as caught:
        MuonZero(tiny(), **{name: True})
    assert caught.value.field == name and re.match("write|leave it out", caught.value.remedy)
    for named in re.findall(
        r"\b(adamw_\w+|ns_\w+|muon_params|muon_views|weight_decay|gradient_clipping)\b", caught.value.remedy
    ):
        assert named in ARGUMENTS


def test_a_slip_and_an_argument_without_a_name_are_told_as_in_a_config() -> None:
    with pytest.raises(ConfigError, match="did you mean 'momentum'"):
        MuonZero(tiny(), momentun=0.9)
    with pytest.raises(ConfigError, match="write lr=0.02"):
        MuonZero(tiny(), 0.02)
    with pytest.raises(ConfigError, match=r"groups\[0\].use_muon .* write \"method\""):
        model = tiny()
        MuonZero(model, groups=[{"params": list(model.parameters()), "use_muon": True}])


def warned_of_rates(make) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    assert all(warning.category is MuonZeroWarning for warning in caught)
    assert all(warning.filename == __file__ for warning in caught)  # the user's line
    return [text for warning in caught if "lr = " in (text := str(warning.message))]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.norm = nn.Embedding(8, 4), nn.Linear(4, 4, bias=False), nn.LayerNorm(4)


def added_later():
    model = Words()
    model.embed.requires_grad_(False)
    optimizer = MuonZero(model)
    model.embed.requires_grad_(True)
    optimizer.add_param_group({"params": [dict(model.named_parameters())["embed.weight"]], "lr": 0.02})


TOLD = {
    "patterns": lambda: MuonZero(Words(), groups=[{"params": "*.weight", "name": "all", "lr": 0.02}]),
    "by mapping": lambda: MuonZero(Words(), groups={"*": {"lr": 0.02}}),
    "vectors alone": lambda: MuonZero(Words(), groups={"norm.*": {"lr": 0.02}}),
    "a config's groups": lambda: initialize(Words(), nested("optimizer.groups", {"*": {"lr": 0.02}})),
    "a config's rate": lambda: initialize(Words(), nested("optimizer.params.lr", 0.02)),
    "a schedule's": lambda: initialize(Words(), {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02}}}),
    "added": added_later,
}
MEANT = {
    "a method": lambda: MuonZero(Words(), groups={"embed.*": {"lr": 0.02, "method": "adamw"}}),
    "matrices alone": lambda: MuonZero(Words(), groups={"mid.*": {"lr": 0.02}}),
    "small, of vectors": lambda: MuonZero(Words(), groups={"norm.*": {"lr": 1e-3}}),
    "one for both": lambda: MuonZero(Words(), adjust_lr="match_rms_adamw", groups={"*": {"lr": 3e-4}}),
    "arguments": lambda: MuonZero(Words(), lr=0.02, adamw_lr=0.02),
}


@pytest.mark.parametrize("make", TOLD.values(), ids=TOLD)
def test_a_rate_of_muon_for_what_adamw_trains_is_told_on_every_path(make) -> None:
    (said,) = warned_of_rates(make)
    assert "adamw" in said.lower() and "0.0003" in said


@pytest.mark.parametrize("make", MEANT.values(), ids=MEANT)
def test_a_rate_that_is_meant_is_not(make) -> None:
    assert not warned_of_rates(make)


def test_a_rate_may_be_a_tensor_wherever_it_is_given() -> None:
    rate = torch.tensor(0.01)
    optimizer = MuonZero(Words(), lr=rate, adamw_lr=torch.tensor(1e-3))
    by_method = {group["algorithm"]: group["lr"] for group in optimizer.param_groups}
    assert by_method["muon"] is rate and optimizer.metrics()["adamw_lr"] == pytest.approx(1e-3)
    for wrong in (torch.tensor([0.1]), torch.tensor(-1.0), torch.tensor(math.nan), torch.tensor(1j)):
        for call in (lambda lr: MuonZero(Words(), lr=lr), lambda lr: MuonZero(Words(), groups={"*": {"lr": lr}})):
            with pytest.raises(ConfigError, match=r"lr = "):
                call(wrong)


def test_cuda_graphs_on_a_cpu_are_told() -> None:
    with pytest.warns(MuonZeroWarning, match="there are none on a CPU"):
        initialize(tiny(), Config(compile=CompileConfig(cuda_graphs=True)))


def test_a_warning_is_of_a_category_of_ours_at_the_users_line_and_of_rank_0(monkeypatch) -> None:
    assert issubclass(MuonZeroWarning, UserWarning) and not issubclass(MuonZeroWarning, MuonZeroError)
    scope = {"__name__": "compile_muonitor.train", "warn": errors.warn_user}  # whose name begins as ours does
    with pytest.warns(MuonZeroWarning, match="^text$") as caught:
        exec(compile("\n\nwarn('text')", "train.py", "exec"), scope)
    assert (caught[0].filename, caught[0].lineno) == ("train.py", 3)
    monkeypatch.setenv("RANK", "1")  # ahead of the process group, as torchrun says
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errors.warn_user("text")
        with pytest.raises(MuonZeroWarning):
            errors.warn_user("text", this_rank=True)
