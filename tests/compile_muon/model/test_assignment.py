"""Who gets Muon, on models nobody here wrote, on overrides, and on everything that must be refused."""

import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim._muon import _adjust_lr

from compile_muon.engine.commit import lr_scale
from compile_muon.errors import ConfigError, MuonZeroError, UnsupportedModelError
from compile_muon.model.assignment import Assignment, assign
from compile_muon.model.support import check_supported


def muon(result):
    return {a.name: a.matrix for a in result.values() if a.algorithm == "muon"}


def check(model, expected, muon_params=None):
    """One decision per parameter, in order, under its canonical name; a matrix exactly for Muon; always a reason.
    ``expected`` has of a parameter its matrix, its algorithm, or another one's reason: no matrix of Muon unless it ends
    with ``...``."""
    result, parameters = assign(model, muon_params), dict(model.named_parameters())
    assert list(result) == list(parameters)
    for name, a in result.items():
        assert a.name == name and a.reason
        assert (a.matrix is not None) == (a.algorithm == "muon")
        assert (a.algorithm == "frozen") == (not parameters[name].requires_grad)
        if a.matrix:
            batch, rows, cols = a.matrix
            assert batch * rows * cols == parameters[name].numel() and parameters[name].ndim >= 2
    for name, value in expected.items():
        if name is not ...:
            assert value in (result[name].matrix, result[name].algorithm, result[name].reason), result[name]
    if ... not in expected:
        assert muon(result).keys() == {
            name for name, value in expected.items() if value == "muon" or type(value) is tuple
        }
    return result


class Block(nn.Module):
    """A hidden layer with names that heads have elsewhere."""

    def __init__(self, d=8):
        super().__init__()
        self.output = nn.Linear(d, d)
        self.fc = nn.Linear(d, d)
        self.classifier = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)


class Tiny(nn.Module):
    """Embedding, blocks, head: the shape of every language model."""

    def __init__(self, head="lm_head", blocks=2, d=8):
        super().__init__()
        self.wte = nn.Embedding(16, d)
        self.pos_embed = nn.Parameter(torch.randn(4, d))
        self.blocks = nn.ModuleList([Block(d) for _ in range(blocks)])
        self.add_module(head, nn.Linear(d, 16, bias=False))


HIDDEN = {f"blocks.{i}.{n}.weight": (1, 8, 8) for i in range(2) for n in ("output", "fc", "classifier")}


def having(model, **children):
    """The model with these for children or parameters."""
    for name, child in children.items():
        setattr(model, name, child)
    return model


BERT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT |= {"pad_token_id": 0, "vocab_size": 32}
DECODER = {**BERT, "num_key_value_heads": 1}
GPT2 = {"n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8}
ATTENTION = {f"{name}_proj.weight": (1, 8 if name in "kv" else 16, 16) for name in "qkvo"}
CONV1D = {"attn.c_attn": (1, 16, 48), "attn.c_proj": (1, 16, 16), "mlp.c_fc": (1, 16, 64), "mlp.c_proj": (1, 64, 16)}
#: architecture, configuration, and what is expected
ARCHITECTURES = {
    "GPT2LMHeadModel": ({**GPT2, "n_layer": 2}, {
        **{f"transformer.h.{i}.{name}.weight": shape for i in range(2) for name, shape in CONV1D.items()},  # [in, out]
        "transformer.wte.weight": "embedding table of transformer.wte, tied to lm_head.weight",
        "transformer.wpe.weight": "embedding table of transformer.wpe",
    }),
    "MixtralForCausalLM": ({**DECODER, "num_local_experts": 4}, {
        **{f"model.layers.0.self_attn.{name}": shape for name, shape in ATTENTION.items()},
        "model.layers.0.mlp.experts.gate_up_proj": (4, 48, 16), "model.layers.0.mlp.experts.down_proj": (4, 16, 24),
        "model.layers.0.mlp.gate.weight": (1, 4, 16),  # the router is a hidden matrix
        "model.embed_tokens.weight": "adamw", "lm_head.weight": "adamw",
    }),
    "BertForPreTraining": (BERT, {"cls.seq_relationship.weight": "adamw", "bert.pooler.dense.weight": "muon", ...: ""}),
    "RobertaForSequenceClassification": (
        BERT, {"classifier.out_proj.weight": "adamw", "classifier.dense.weight": "muon", ...: ""}
    ),
}  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers(architecture):
    transformers = pytest.importorskip("transformers")
    config, expected = ARCHITECTURES[architecture]
    kind = getattr(transformers, architecture)
    result = check(kind(kind.config_class(**config)), expected)
    heads = {name for name, a in result.items() if "output head" in a.reason}
    assert heads <= {*expected, "lm_head.weight"}
    for name, a in result.items():
        if "att" in name and name.endswith("weight") and "orm" not in name and name not in expected:
            assert a.algorithm == "muon", name


def tied(one, other):
    one.weight = other.weight
    return one


def conv_net():
    return nn.ModuleDict({
        "stem": nn.Conv2d(3, 8, 3), "bn": nn.BatchNorm2d(8), "grouped": nn.Conv2d(8, 8, 3, groups=2),
        "depthwise": nn.Conv1d(8, 8, 5, groups=8), "pointwise_depthwise": nn.Conv1d(8, 8, 1, groups=8),
        "volume": nn.Conv3d(8, 4, 2), "up": nn.ConvTranspose2d(4, 6, 3), "one": nn.Conv1d(1, 8, 3),
        "fc": nn.Linear(8, 10),
    })  # fmt: skip


class Net(nn.Module):
    def __init__(self, **children):
        super().__init__()
        having(self, **children)


class Declares(Tiny):
    def get_output_embeddings(self):
        return self.prediction_stack


def first_linear_then_table():
    model = Net(first=nn.Linear(8, 16, bias=False), mid=nn.Linear(8, 8), table=nn.Embedding(16, 8))
    model.table.weight = model.first.weight
    return model


def parametrized():
    model = nn.ModuleDict({"mid": nn.Linear(4, 4), "conv": nn.Conv1d(4, 6, 3), "table": nn.Embedding(8, 4)})
    for module in model.values():
        nn.utils.parametrizations.weight_norm(module)
    return model


class ScaledEmbedding(Net):
    def __init__(self):
        super().__init__(mid=nn.Linear(4, 4), weight=nn.Parameter(torch.randn(6, 4)))


class PatchEmbedding(ScaledEmbedding):
    pass


def head(name):
    return f"output head (named {name})"


TOPS = ["lm_head", "head", "output", "classifier", "score", "unembed", "embed_out", "logits", "fc_out", "action_head"]
OTHERS = ["proj", "out_proj", "mixer", "pre_classifier", "headroom"]
DEEP = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), nn.Tanh())
SPARE = {**HIDDEN, "spare.weight": "muon"}
MODELS = {
    "a convolutional net": (conv_net, {
        "stem.weight": (1, 8, 27), "grouped.weight": (1, 8, 36), "depthwise.weight": (1, 8, 5),
        "volume.weight": (1, 4, 64), "up.weight": (1, 4, 54), "one.weight": (1, 8, 3),
        "pointwise_depthwise.weight": "vector in disguise: shape [8, 1, 1]", "fc.weight": head("fc"),
    }),
    "attention": (lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True), {
        "in_proj_weight": (1, 24, 8), "out_proj.weight": (1, 8, 8), "bias_k": "adamw", "bias_v": "adamw",
    }),
    "a bilinear stack": (lambda: nn.Bilinear(3, 4, 5), {"weight": (5, 3, 4)}),
    "a bag and a norm": (
        lambda: nn.ModuleDict({"bag": nn.EmbeddingBag(9, 4), "norm": nn.LayerNorm([4, 4]), "mid": nn.Linear(4, 4)}),
        {"bag.weight": "embedding table of bag", "norm.weight": "elementwise weight of a LayerNorm",
         "norm.bias": "elementwise bias of a LayerNorm", "mid.weight": "muon"},
    ),
    # heads: by name at the top, but not inside blocks
    **{f"head {name}": (lambda name=name: Tiny(name), {**HIDDEN, f"{name}.weight": head(name)}) for name in TOPS},
    **{f"no head {name}": (lambda name=name: Tiny(name), {**HIDDEN, f"{name}.weight": "muon"}) for name in OTHERS},
    "strong names at any depth, weak ones at the top": (
        lambda: nn.ModuleDict({"a": Tiny("lm_head"), "b": Tiny("head")}),
        {"a.lm_head.weight": "adamw", "b.head.weight": "muon", ...: ""},
    ),
    "the last of a head's layers": (
        lambda: having(
            Tiny("spare"), classifier=nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3), nn.Dropout())
        ),
        {**SPARE, "classifier.0.weight": "muon", "classifier.2.weight": head("classifier")},
    ),
    "a pooling head that ends in a hidden block": (
        lambda: having(Tiny("spare"), head=nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "mlp": Block()})),
        {**SPARE, "head.attention.in_proj_weight": "muon", "head.attention.out_proj.weight": "muon",
         **{f"head.mlp.{name}.weight": "muon" for name in ("output", "fc", "classifier")}},
    ),
    "a declared head of several layers": (
        lambda: having(Declares("spare"), prediction_stack=nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 16))),
        {**SPARE, "prediction_stack.0.weight": "muon",
         "prediction_stack.2.weight": "output head (get_output_embeddings of Declares)"},
    ),
    "a decoder of several": (
        lambda: having(Tiny("decoder"), decoder=Block()),
        {**HIDDEN, **{f"decoder.{name}.weight": "muon" for name in ("output", "fc", "classifier")}},
    ),
    "a bare head": (
        lambda: having(Tiny("spare"), lm_head=nn.Parameter(torch.randn(8, 16))), {**SPARE, "lm_head": head("lm_head")}
    ),
    "a Sequential": (lambda: DEEP, {
        "0.weight": "muon", "2.0.weight": "muon", "2.2.weight": "output head (last layer of the nn.Sequential)",
    }),
    "a Sequential with a norm behind": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.LayerNorm(8)),
        {"0.weight": "muon", "1.weight": "muon"},
    ),
    "one linear": (lambda: nn.Linear(4, 3), {"weight": (1, 3, 4)}),
    # tied weights
    **{f"tied {name}": (
        lambda name=name: having(model := Tiny(name), **{name: tied(getattr(model, name), model.wte)}),
        {**HIDDEN, "wte.weight": f"embedding table of wte, tied to {name}.weight"},
    ) for name in ("lm_head", "whatever")},
    "tied, and the linear comes first": (
        first_linear_then_table,
        {"mid.weight": "muon", "first.weight": "embedding table of table, tied to first.weight"},
    ),
    "tied hidden matrices": (
        lambda: nn.ModuleDict({"a": (a := nn.Linear(4, 4)), "b": tied(nn.Linear(4, 4), a)}), {"a.weight": "muon"}
    ),
    # tables, stacks, vectors
    "a table of a class of its own": (ScaledEmbedding, {"weight": "bare table of a ScaledEmbedding", ...: ""}),
    "a patch embedding": (PatchEmbedding, {"weight": "muon", "mid.weight": "muon"}),
    "lists of parameters": (
        lambda: Net(mid=nn.Linear(4, 4), pos_embeds=nn.ParameterList([torch.randn(3, 4)]),
                    factors=nn.ParameterList([torch.randn(3, 4)])),
        {"mid.weight": "muon", "pos_embeds.0": "adamw", "factors.0": "muon"},
    ),
    "parametrized weights": (parametrized, {
        "mid.parametrizations.weight.original1": (1, 4, 4), "conv.parametrizations.weight.original1": (1, 6, 12),
        "table.parametrizations.weight.original1": "embedding table of table",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model(name):
    model, expected = MODELS[name]
    check(model(), expected)


ADAMW = {
    "pos_embed": (6, 4), "position_embeddings": (6, 4), "positional_embedding": (6, 4), "cls_token": (1, 1, 4),
    "mask_token": (1, 4), "register_tokens": (3, 4), "query_embed": (3, 4), "wpe": (6, 4),
    "relative_position_bias_table": (9, 2), "rel_pos_h": (9, 4), "latents": (5, 4), "posEmbed": (5, 4), "A_log": (5, 4),
    "temperature": (4, 1, 1), "gamma": (1, 4, 4), "gate": (1, 4, 4, 4), "bank": (1, 4), "column": (4, 1),
    "expert_bias": (3, 4), "empty": (0, 4),
}  # fmt: skip
MUON = {
    "weight": (1, 6, 4), "kernel": (1, 6, 4), "pos_proj": (1, 6, 4), "text_projection": (1, 6, 4), "lora_A": (1, 2, 4),
    "lora_B": (1, 4, 2), "w1": (3, 6, 4), "composed": (1, 3, 4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        *((name, shape, "adamw") for name, shape in ADAMW.items()),
        *((name, matrix[1:] if matrix[0] == 1 else matrix, matrix) for name, matrix in MUON.items()),
        ("experts_up", (1, 6, 4), (1, 6, 4)),
        ("filters", (2, 3, 4, 5), (1, 2, 60)),
    ],
)
def test_a_bare_parameter(name, shape, expected):
    model = Net(mid=nn.Linear(4, 4), **{name: nn.Parameter(torch.randn(*shape))})
    check(model, {"mid.weight": "muon", name: expected})


def marked(name, value, model=None):
    model = model or Tiny()
    model.get_parameter(name).use_muon = value
    return model


def test_use_muon_overrides_the_rules_and_muon_params():
    model = marked("blocks.0.fc.weight", False, marked("wte.weight", True))
    for muon_params in (None, ["blocks.*"], lambda name, param: "wte" not in name):
        result = assign(model, muon_params)
        assert result["wte.weight"] == Assignment("wte.weight", "muon", "param.use_muon = True", (1, 16, 8))
        assert result["blocks.0.fc.weight"].reason == "param.use_muon = False"
        assert result["blocks.1.fc.weight"].algorithm == "muon"
    check(marked("wte.weight", None), {**HIDDEN, "wte.weight": "adamw"})  # decides nothing
    frozen = marked("blocks.0.fc.weight", True)
    frozen.blocks[0].fc.weight.requires_grad_(False)
    check(frozen, {"blocks.0.fc.weight": "frozen", ...: ""})


def test_patterns_select_exactly_the_muon_matrices():
    expected = {
        "wte.weight": "selected by muon_params pattern 'wte.*'", "blocks.0.fc.bias": "vector",
        "blocks.0.output.weight": "not selected by muon_params", ...: "",
    }  # fmt: skip
    result = check(Tiny(), expected, ["wte.*", "blocks.*.fc.*"])
    assert set(muon(result)) == {"wte.weight", "blocks.0.fc.weight", "blocks.1.fc.weight"}
    model = Tiny()
    model.lm_head.weight = model.wte.weight
    assert list(muon(assign(model, ("lm_head.*",)))) == ["wte.weight"]


def half_frozen():
    model = Tiny()
    model.blocks[1].requires_grad_(False)
    return model


def test_predicate_sees_trainable_matrices_only():
    model, seen = half_frozen(), []

    def predicate(name, param):
        seen.append((name, param))
        return "blocks" in name

    result = assign(model, predicate)
    assert all(param.ndim >= 2 and param.requires_grad for _, param in seen)
    assert {name for name, _ in seen} == {n for n, p in model.named_parameters() if p.ndim >= 2 and p.requires_grad}
    assert set(muon(result)) == {n for n in HIDDEN if n.startswith("blocks.0")}


BAD = [
    *((lambda value=value: marked("wte.weight", value), None, "wte.weight.use_muon", "must be true or false")
      for value in (1, "yes", 0, torch.tensor(True))),
    (lambda: marked("blocks.0.fc.bias", True), None, "blocks.0.fc.bias.use_muon", "shape [8] is not a matrix"),
    (Tiny, ["LM_HEAD.*"], "muon_params", "matches no parameter"),
    (Tiny, ["blocks.*", "block.0.fc.weight"], "muon_params",
     "'block.0.fc.weight': matches no parameter; the nearest names are blocks.0.fc.weight"),
    *((half_frozen, [pattern], "muon_params", "frozen or not matrices")
      for pattern in ("*.bias", "blocks.1.fc.weight")),
    # nothing for Muon
    (lambda: nn.Embedding(4, 4), None, "model", "embedding table"),
    (lambda: nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)), None, "model", "last layer"),
    (lambda: nn.LayerNorm(4), None, "model", "use_muon"),
    (Tiny, lambda name, param: False, "muon_params", "widen"),
    (lambda: Tiny().requires_grad_(False), None, "model", "no trainable parameter"),
    (nn.ReLU, None, "model", "no trainable parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "muon_params", "field", "word"), BAD)
def test_what_decides_nothing_is_an_error(model, muon_params, field, word):
    with pytest.raises(ConfigError) as caught:
        assign(model(), muon_params)
    assert caught.value.field == field and word in str(caught.value)


def holding(value, requires_grad=True):
    return Net(mid=nn.Linear(4, 4), other=nn.Parameter(value, requires_grad))


def of_inference_mode(within):
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        if within:
            check_supported(model)
    return model


def over_one_memory():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight.data = model["a"].weight.data
    return model


def two_tensor():
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4))


def fsdp1():
    class Pretender(importlib.import_module("torch.distributed.fsdp").FullyShardedDataParallel):
        def __init__(self):  # FSDP1 itself asks for an accelerator
            nn.Module.__init__(self)

    model = nn.Sequential(nn.Linear(4, 4))
    model.add_module("1", Pretender())
    return model


def fsdp2():
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    return fully_shard(nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (1,)))


def dtensor():
    tensor, model = importlib.import_module("torch.distributed.tensor"), nn.Linear(4, 4)
    cut = tensor.distribute_tensor(model.weight.data, dist.init_device_mesh("cpu", (1,)), [tensor.Shard(0)])
    return having(model, weight=nn.Parameter(cut))


def ddp():
    return nn.parallel.DistributedDataParallel(nn.Linear(4, 4))


REFUSED = {
    "no module": (lambda: lambda x: x, "not an nn.Module"),
    **{f"nn.{kind.__name__}": (
        lambda kind=kind: nn.ModuleDict({"mid": nn.Linear(4, 4), "core": kind(4, 4)}),
        "core:", "_flat_weights", f"nn.{kind.__name__}Cell",
    ) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    **{f"sparse {kind.__name__}": (
        lambda kind=kind: nn.ModuleDict({"mid": nn.Linear(4, 4), "table": kind(8, 4, sparse=True)}),
        "table.weight:", "sparse=False",
    ) for kind in (nn.Embedding, nn.EmbeddingBag)},
    "sparse": (lambda: holding(torch.eye(4).to_sparse()), "other:", "sparse", "to_dense"),
    **{f"complex {grad}": (
        lambda grad=grad: holding(torch.zeros(4, 4, dtype=torch.complex64), grad), "other:", "complex64", "view_as_real"
    ) for grad in (True, False)},
    "in inference mode": (lambda: of_inference_mode(True), "model:", "outside of it"),
    "of inference mode": (lambda: of_inference_mode(False), "0.weight:", "inference_mode", "build the model outside"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4)), "0.weight:", "forward pass"),
    "meta": (lambda: nn.Linear(4, 4, device="meta"), "weight:", "meta", "weights=folder"),
    "float8": (lambda: holding(torch.zeros(4, 4).to(torch.float8_e4m3fn)), "other:", "float8", "requires_grad=False"),
    "a subclass": (lambda: holding(two_tensor()), "other:", "TwoTensor"),
    "one memory": (over_one_memory, "a.weight", "b.weight", "shares memory"),
    "DDP": (ddp, "model:", "DistributedDataParallel", "before wrapping"),
    "DDP inside": (lambda: nn.ModuleDict({"x": ddp()}), "x:", "DistributedDataParallel"),
    "DataParallel": (lambda: nn.DataParallel(nn.Linear(4, 4)), "DataParallel", "before wrapping"),
    "FSDP1": (fsdp1, "1:", "Pretender"),
    "FSDP2": (fsdp2, "already data-parallel", "FSDP"),
    "DTensor": (dtensor, "weight:", "DTensor", "before it is sharded"),
}  # fmt: skip


@pytest.fixture(scope="module")
def group():
    """A group of one in this process."""
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("needs to start its own process group")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused(group, name):
    model, *words = REFUSED[name]
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported(model())
    text = str(caught.value)
    assert all(word in text for word in words) and "; " in text, text  # a remedy
    assert isinstance(caught.value, MuonZeroError)


def test_what_can_be_sharded_is_not():
    """A frozen table that is sparse, frozen numbers of any real dtype, and views that share no element."""
    check_supported(nn.Embedding(8, 4, sparse=True).requires_grad_(False))
    for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        check_supported(holding(torch.zeros(4, 4).to(dtype), requires_grad=False))
    for halves in (torch.randn(8, 4).chunk(2), torch.randn(4, 8).chunk(2, dim=1)):
        check_supported(nn.ParameterList(halves))


SHAPES = [(1, 1), (3, 7), (7, 3), (768, 768), (3072, 768), (768, 3072), (64, 27), (5, 10**6)]


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_lr_scale_is_bitwise_that_of_torch(rule):
    for shape in SHAPES:
        for lr in (0.02, 1.0, 1 / 3):
            assert lr * lr_scale(rule, *shape) == _adjust_lr(lr, rule, torch.Size(shape))


def test_lr_scales_that_torch_does_not_have():
    assert lr_scale(0.18, 4, 100) == 0.18 * 10
    assert (lr_scale("spectral", 4, 16), lr_scale("spectral", 16, 4)) == (0.5, 2.0)
