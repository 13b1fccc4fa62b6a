"""Who gets Muon, on models nobody here wrote, on overrides, and on everything that must be refused."""

import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim._muon import _adjust_lr

from compile_muon.errors import ConfigError, MuonZeroError, UnsupportedModelError
from compile_muon.model.assignment import Assignment, assign, lr_scale
from compile_muon.model.support import check_supported


def muon(result):
    return {a.name: a.matrix for a in result.values() if a.algorithm == "muon"}


def reasons(result, algorithm="adamw"):
    """Why each parameter that looks like a matrix did not become one."""
    return {
        a.name: a.reason for a in result.values() if a.algorithm == algorithm and a.reason not in ("vector", "scalar")
    }


def check_complete(model, result):
    """One decision per parameter, in order, under its canonical name; a matrix exactly for Muon; always a reason."""
    parameters = dict(model.named_parameters())
    assert list(result) == list(parameters)
    for name, a in result.items():
        assert a.name == name
        assert a.reason
        assert (a.matrix is not None) == (a.algorithm == "muon")
        assert (a.algorithm == "frozen") == (not parameters[name].requires_grad)
        if a.matrix:
            batch, rows, cols = a.matrix
            assert batch * rows * cols == parameters[name].numel()
            assert parameters[name].ndim >= 2


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


# --------------------------------------------------------------------------- models nobody here wrote


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def test_gpt2_tied_embeddings_and_conv1d(transformers):
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    result = assign(model)
    check_complete(model, result)
    expected = {}
    for i in range(2):
        h = f"transformer.h.{i}"
        expected[f"{h}.attn.c_attn.weight"] = (1, 16, 48)  # stored [in, out]
        expected[f"{h}.attn.c_proj.weight"] = (1, 16, 16)
        expected[f"{h}.mlp.c_fc.weight"] = (1, 16, 64)
        expected[f"{h}.mlp.c_proj.weight"] = (1, 64, 16)
    assert muon(result) == expected
    assert reasons(result) == {
        "transformer.wte.weight": "embedding table of transformer.wte, tied to lm_head.weight",
        "transformer.wpe.weight": "embedding table of transformer.wpe",
    }


def test_gpt2_untied_head(transformers):
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=8, tie_word_embeddings=False
    )
    result = assign(transformers.GPT2LMHeadModel(config))
    assert result["lm_head.weight"].reason == "output head (get_output_embeddings of GPT2LMHeadModel)"
    assert len(muon(result)) == 4


def test_llama(transformers):
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM(config)
    result = assign(model)
    check_complete(model, result)
    layer = "model.layers.0"
    assert muon(result) == {
        f"{layer}.self_attn.q_proj.weight": (1, 16, 16),
        f"{layer}.self_attn.k_proj.weight": (1, 8, 16),
        f"{layer}.self_attn.v_proj.weight": (1, 8, 16),
        f"{layer}.self_attn.o_proj.weight": (1, 16, 16),
        f"{layer}.mlp.gate_proj.weight": (1, 24, 16),
        f"{layer}.mlp.up_proj.weight": (1, 24, 16),
        f"{layer}.mlp.down_proj.weight": (1, 16, 24),
    }
    assert set(reasons(result)) == {"model.embed_tokens.weight", "lm_head.weight"}


def test_mixtral_experts_are_stacks(transformers):
    config = transformers.MixtralConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        num_local_experts=4,
    )
    model = transformers.MixtralForCausalLM(config)
    result = assign(model)
    check_complete(model, result)
    found = muon(result)
    assert sum(batch for batch, _, _ in found.values() if batch > 1) % 4 == 0
    stacks = {matrix for matrix in found.values() if matrix[0] > 1}
    assert stacks == {(4, 48, 16), (4, 16, 24)}
    assert (1, 4, 16) in found.values()  # the router is a hidden matrix
    assert set(reasons(result)) == {"model.embed_tokens.weight", "lm_head.weight"}


def test_gpt_oss_expert_biases_are_vectors(transformers):
    config = transformers.GptOssConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=32,
        num_local_experts=4,
        layer_types=["full_attention"],
        pad_token_id=0,
    )
    result = assign(transformers.GptOssForCausalLM(config))
    experts = {name: a for name, a in result.items() if ".experts." in name}
    assert {name.rpartition(".")[2]: a.algorithm for name, a in experts.items()} == {
        "gate_up_proj": "muon",
        "gate_up_proj_bias": "adamw",
        "down_proj": "muon",
        "down_proj_bias": "adamw",
    }


def test_vit_tokens_positions_patches_and_classifier(transformers):
    config = transformers.ViTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    model = transformers.ViTForImageClassification(config)
    result = assign(model)
    check_complete(model, result)
    assert reasons(result) == {
        "vit.embeddings.cls_token": "bare token or position table cls_token",
        "vit.embeddings.position_embeddings": "bare token or position table position_embeddings",
        "classifier.weight": "output head (named classifier)",
    }
    assert muon(result)["vit.embeddings.patch_embeddings.projection.weight"] == (1, 16, 48)
    assert len(muon(result)) == 7


BERT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


@pytest.mark.parametrize(
    ("family", "task", "heads", "hidden"),
    [
        ("Bert", "Model", set(), ["pooler.dense.weight", "encoder.layer.0.output.dense.weight"]),
        ("Bert", "ForMaskedLM", set(), ["cls.predictions.transform.dense.weight"]),
        ("Bert", "ForPreTraining", {"cls.seq_relationship.weight"}, ["bert.pooler.dense.weight"]),
        ("Bert", "ForSequenceClassification", {"classifier.weight"}, ["bert.encoder.layer.0.output.dense.weight"]),
        ("Roberta", "ForSequenceClassification", {"classifier.out_proj.weight"}, ["classifier.dense.weight"]),
        ("Roberta", "ForMaskedLM", set(), ["lm_head.dense.weight"]),
        ("Roberta", "ForQuestionAnswering", {"qa_outputs.weight"}, []),
    ],
)
def test_bert_family_catches_heads_and_only_heads(transformers, family, task, heads, hidden):
    config = getattr(transformers, f"{family}Config")(**BERT, pad_token_id=0)
    model = getattr(transformers, f"{family}{task}")(config)
    result = assign(model)
    check_complete(model, result)
    assert {name for name, reason in reasons(result).items() if "output head" in reason} == heads
    for name in (*hidden, *(n for n in result if "attention" in n and n.endswith("weight") and "Norm" not in n)):
        assert result[name].algorithm == "muon", name
    others = {name for name, reason in reasons(result).items() if "output head" not in reason}
    assert all("embeddings" in name for name in others)


def test_distilbert_pre_classifier_is_hidden(transformers):
    config = transformers.DistilBertConfig(dim=16, hidden_dim=24, n_layers=1, n_heads=2, vocab_size=32)
    result = assign(transformers.DistilBertForSequenceClassification(config))
    assert result["pre_classifier.weight"].algorithm == "muon"
    assert result["classifier.weight"].algorithm == "adamw"


def test_mamba_state_decay_is_no_linear_map(transformers):
    config = transformers.MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=1, vocab_size=32)
    result = assign(transformers.MambaForCausalLM(config))
    assert result["backbone.layers.0.mixer.A_log"].reason == "elementwise parameter A_log, not a linear map"
    assert result["backbone.layers.0.mixer.conv1d.weight"].matrix == (1, 32, 4)


def test_hugging_face_model_inside_a_trainer_class(transformers):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            config = transformers.LlamaConfig(
                hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
            )
            self.student = transformers.LlamaForSequenceClassification(config)
            self.teacher = transformers.LlamaForCausalLM(config).requires_grad_(False)

    result = assign(Wrapper())
    assert result["student.score.weight"].algorithm == "adamw"
    assert all(a.algorithm == "frozen" for name, a in result.items() if name.startswith("teacher."))
    assert len(muon(result)) == 7


# ----------------------------------------------------------------------------------- torch's own layers


def test_conv_net():
    class ConvNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3)
            self.bn = nn.BatchNorm2d(8)
            self.grouped = nn.Conv2d(8, 8, 3, groups=2)
            self.depthwise = nn.Conv1d(8, 8, 5, groups=8)
            self.pointwise_depthwise = nn.Conv1d(8, 8, 1, groups=8)
            self.volume = nn.Conv3d(8, 4, 2)
            self.up = nn.ConvTranspose2d(4, 6, 3)
            self.one = nn.Conv1d(1, 8, 3)
            self.fc = nn.Linear(8, 10)

    model = ConvNet()
    result = assign(model)
    check_complete(model, result)
    assert muon(result) == {
        "stem.weight": (1, 8, 27),
        "grouped.weight": (1, 8, 36),
        "depthwise.weight": (1, 8, 5),
        "volume.weight": (1, 4, 64),
        "up.weight": (1, 4, 54),
        "one.weight": (1, 8, 3),
    }
    assert reasons(result) == {
        "pointwise_depthwise.weight": "vector in disguise: shape [8, 1, 1]",
        "fc.weight": "output head (named fc)",
    }
    assert result["stem.weight"].reason == "convolution seen as 8x27 (Conv2d)"


def test_multihead_attention_alone():
    result = assign(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    assert muon(result) == {"in_proj_weight": (1, 24, 8), "out_proj.weight": (1, 8, 8)}
    assert set(reasons(result)) == {"bias_k", "bias_v"}


def test_multihead_attention_with_its_own_dimensions():
    result = assign(nn.MultiheadAttention(8, 2, kdim=4, vdim=6))
    assert muon(result) == {
        "q_proj_weight": (1, 8, 8),
        "k_proj_weight": (1, 8, 4),
        "v_proj_weight": (1, 8, 6),
        "out_proj.weight": (1, 8, 8),
    }


def test_transformer_encoder():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    result = assign(model)
    check_complete(model, result)
    names = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    assert set(muon(result)) == {f"layers.{i}.{n}" for i in range(2) for n in names}
    assert reasons(result) == {}


def test_one_cell_is_fine():
    assert muon(assign(nn.LSTMCell(4, 6))) == {"weight_ih": (1, 24, 4), "weight_hh": (1, 24, 6)}


def test_bilinear_is_a_stack():
    assert muon(assign(nn.Bilinear(3, 4, 5))) == {"weight": (5, 3, 4)}
    assert muon(assign(nn.Bilinear(3, 4, 1))) == {"weight": (1, 3, 4)}


def test_embedding_bag_and_norm_over_several_dimensions():
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(9, 4), "norm": nn.LayerNorm([4, 4]), "mid": nn.Linear(4, 4)})
    result = assign(model)
    assert reasons(result) == {
        "bag.weight": "embedding table of bag",
        "norm.weight": "elementwise weight of a LayerNorm",
        "norm.bias": "elementwise bias of a LayerNorm",
    }


# --------------------------------------------------------------------------------------------- the head


@pytest.mark.parametrize(
    "head",
    ["lm_head", "head", "output", "classifier", "score", "unembed", "embed_out", "logits", "fc_out", "action_head"],
)
def test_head_by_name_at_the_top_but_not_inside_blocks(head):
    result = assign(Tiny(head))
    assert result[f"{head}.weight"].reason == f"output head (named {head})"
    assert muon(result) == HIDDEN


@pytest.mark.parametrize("name", ["proj", "out_proj", "mixer", "pre_classifier", "headroom"])
def test_other_names_at_the_top_are_hidden(name):
    assert assign(Tiny(name))[f"{name}.weight"].algorithm == "muon"


def test_head_of_a_model_inside_a_model():
    class Lit(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Tiny("head")
            self.loss = nn.CrossEntropyLoss()

    assert assign(Lit())["net.head.weight"].algorithm == "adamw"


def test_strong_head_names_at_any_depth_weak_ones_only_at_the_top():
    pair = nn.ModuleDict({"a": Tiny("lm_head"), "b": Tiny("head")})
    result = assign(pair)
    assert result["a.lm_head.weight"].algorithm == "adamw"
    assert result["b.head.weight"].algorithm == "muon"


def test_one_block_is_not_mistaken_for_a_model():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block()])

    assert len(muon(assign(Stack()))) == 3


def test_head_of_several_layers_is_its_last():
    model = Tiny("spare")
    model.classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3))
    result = assign(model)
    assert result["classifier.0.weight"].algorithm == "muon"
    assert result["classifier.3.weight"].reason == "output head (named classifier)"


def test_head_nested_in_sequentials_is_the_innermost_last():
    model = Tiny("spare")
    model.head = nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))})
    result = assign(model)
    assert result["head.mlp.0.weight"].algorithm == "muon"
    assert result["head.mlp.1.weight"].algorithm == "adamw"


def test_pooling_head_that_ends_in_a_hidden_block_has_no_output_layer():
    model = Tiny("spare")
    model.head = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "mlp": Block()})
    result = assign(model)
    assert sum(name.startswith("head.") for name in muon(result)) == 5


def test_declared_head_of_several_layers_is_its_last():
    class Declares(Tiny):
        def get_output_embeddings(self):
            return self.prediction_stack

    model = Declares("spare")
    model.prediction_stack = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 16))
    result = assign(model)
    assert result["prediction_stack.0.weight"].algorithm == "muon"
    assert result["prediction_stack.2.weight"].reason == "output head (get_output_embeddings of Declares)"


@pytest.mark.parametrize("error", [NotImplementedError, AttributeError])
def test_a_model_that_declares_no_head(error):
    class Refuses(Tiny):
        def get_output_embeddings(self):
            raise error

    assert muon(assign(Refuses())) == HIDDEN


def test_decoder_is_a_head_only_as_one_layer():
    model = Tiny("decoder")
    assert assign(model)["decoder.weight"].algorithm == "adamw"
    model.decoder = Block()
    result = assign(model)
    assert all(result[f"decoder.{n}.weight"].algorithm == "muon" for n in ("output", "fc", "classifier"))


def test_bare_head_parameter():
    model = Tiny("spare")
    model.lm_head = nn.Parameter(torch.randn(8, 16))
    assert assign(model)["lm_head"].reason == "output head (named lm_head)"


def test_sequential_ends_in_its_head():
    model = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), nn.Tanh()
    )
    result = assign(model)
    assert set(muon(result)) == {"0.weight", "2.0.weight"}
    assert result["2.2.weight"].reason == "output head (last layer of the nn.Sequential)"


def test_sequential_without_a_head():
    assert set(muon(assign(nn.Sequential(nn.Linear(4, 8))))) == {"0.weight"}
    assert set(muon(assign(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.LayerNorm(8))))) == {
        "0.weight",
        "1.weight",
    }
    blocks = nn.Sequential(Block(), Block())
    assert len(muon(assign(blocks))) == 6


def test_sequential_inside_a_wrapper():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    assert set(muon(assign(Net()))) == {"net.1.weight"}


def test_one_linear_is_a_hidden_matrix():
    assert muon(assign(nn.Linear(4, 3))) == {"weight": (1, 3, 4)}


# ------------------------------------------------------------------------------------------ tied weights


@pytest.mark.parametrize("head", ["lm_head", "whatever"])
def test_tied_weight_is_an_embedding_under_any_name(head):
    model = Tiny(head)
    getattr(model, head).weight = model.wte.weight
    result = assign(model)
    assert f"{head}.weight" not in result
    assert result["wte.weight"].reason == f"embedding table of wte, tied to {head}.weight"


def test_tied_weight_is_an_embedding_also_when_the_linear_comes_first():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 16, bias=False)
            self.mid = nn.Linear(8, 8)
            self.table = nn.Embedding(16, 8)
            self.table.weight = self.first.weight

    result = assign(Net())
    assert list(muon(result)) == ["mid.weight"]
    assert result["first.weight"].reason == "embedding table of table, tied to first.weight"


def test_tied_hidden_matrices_are_one():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    assert list(muon(assign(model))) == ["a.weight"]


# -------------------------------------------------------------------------------- tables, stacks, vectors


class Bare(nn.Module):
    def __init__(self, name, *shape):
        super().__init__()
        self.mid = nn.Linear(4, 4)
        self.register_parameter(name, nn.Parameter(torch.randn(*shape)))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("pos_embed", (6, 4)),
        ("position_embeddings", (6, 4)),
        ("positional_embedding", (6, 4)),
        ("cls_token", (1, 1, 4)),
        ("mask_token", (1, 4)),
        ("register_tokens", (3, 4)),
        ("query_embed", (3, 4)),
        ("wpe", (6, 4)),
        ("relative_position_bias_table", (9, 2)),
        ("rel_pos_h", (9, 4)),
        ("latents", (5, 4)),
        ("posEmbed", (5, 4)),
        ("A_log", (5, 4)),
        ("temperature", (4, 1, 1)),
        ("gamma", (1, 4, 4)),
        ("gate", (1, 4, 4, 4)),
        ("bank", (1, 4)),
        ("column", (4, 1)),
        ("expert_bias", (3, 4)),
        ("empty", (0, 4)),
    ],
)
def test_bare_tables_and_vectors_go_to_adamw(name, shape):
    result = assign(Bare(name, *shape))
    assert result[name].algorithm == "adamw"
    assert list(muon(result)) == ["mid.weight"]


@pytest.mark.parametrize(
    ("name", "shape", "matrix"),
    [
        ("weight", (6, 4), (1, 6, 4)),
        ("kernel", (6, 4), (1, 6, 4)),
        ("pos_proj", (6, 4), (1, 6, 4)),
        ("text_projection", (6, 4), (1, 6, 4)),
        ("lora_A", (2, 4), (1, 2, 4)),
        ("lora_B", (4, 2), (1, 4, 2)),
        ("w1", (3, 6, 4), (3, 6, 4)),
        ("experts_up", (1, 6, 4), (1, 6, 4)),
        ("filters", (2, 3, 4, 5), (1, 2, 60)),
        ("composed", (3, 4), (1, 3, 4)),
    ],
)
def test_bare_matrices_get_muon(name, shape, matrix):
    assert muon(assign(Bare(name, *shape)))[name] == matrix


def test_custom_embedding_class_is_a_table_but_a_patch_embedding_is_not():
    class ScaledEmbedding(Bare):
        pass

    class PatchEmbedding(Bare):
        pass

    assert assign(ScaledEmbedding("weight", 6, 4))["weight"].reason == "bare table of a ScaledEmbedding"
    assert assign(PatchEmbedding("weight", 6, 4))["weight"].algorithm == "muon"


def test_parameter_list_is_named_by_the_list():
    model = nn.ModuleDict({"mid": nn.Linear(4, 4)})
    model.pos_embeds = nn.ParameterList([torch.randn(3, 4)])
    model.factors = nn.ParameterList([torch.randn(3, 4)])
    result = assign(model)
    assert result["pos_embeds.0"].algorithm == "adamw"
    assert result["factors.0"].algorithm == "muon"


def test_parametrized_weights_keep_their_owner():
    model = nn.ModuleDict({"mid": nn.Linear(4, 4), "conv": nn.Conv1d(4, 6, 3), "table": nn.Embedding(8, 4)})
    for module in model.values():
        nn.utils.parametrizations.weight_norm(module)
    result = assign(model)
    assert muon(result) == {
        "mid.parametrizations.weight.original1": (1, 4, 4),
        "conv.parametrizations.weight.original1": (1, 6, 12),
    }
    assert result["table.parametrizations.weight.original1"].reason == "embedding table of table"


def test_single_output_linear_is_a_vector():
    model = nn.ModuleDict({"mid": nn.Linear(4, 4), "value": nn.Linear(4, 1)})
    assert assign(model)["value.weight"].reason == "vector in disguise: shape [1, 4]"


def test_lora_on_a_frozen_base():
    class LoRA(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(8, 8).requires_grad_(False)
            self.lora_A = nn.Linear(8, 2, bias=False)
            self.lora_B = nn.Linear(2, 8, bias=False)

    model = nn.ModuleDict({"q_proj": LoRA(), "v_proj": LoRA()})
    result = assign(model)
    check_complete(model, result)
    assert set(muon(result).values()) == {(1, 2, 8), (1, 8, 2)}
    assert {n for n, a in result.items() if a.algorithm == "frozen"} == {
        f"{q}.base_layer.{p}" for q in ("q_proj", "v_proj") for p in ("weight", "bias")
    }


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_frozen_parameters_may_have_any_real_dtype(dtype):
    model = Bare("table_q", 4, 4)
    model.table_q = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)
    assert assign(model)["table_q"].algorithm == "frozen"


# --------------------------------------------------------------------------------------------- overrides


def test_use_muon_overrides_the_rules_and_muon_params():
    model = Tiny()
    model.wte.weight.use_muon = True
    model.blocks[0].fc.weight.use_muon = False
    for muon_params in (None, ["blocks.*"], lambda name, param: "wte" not in name):
        result = assign(model, muon_params)
        assert result["wte.weight"] == Assignment("wte.weight", "muon", "param.use_muon = True", (1, 16, 8))
        assert result["blocks.0.fc.weight"].reason == "param.use_muon = False"
        assert result["blocks.1.fc.weight"].algorithm == "muon"


def test_use_muon_none_decides_nothing():
    model = Tiny()
    model.wte.weight.use_muon = None
    assert assign(model)["wte.weight"].algorithm == "adamw"


def test_use_muon_does_not_thaw():
    model = Tiny()
    model.blocks[0].fc.weight.use_muon = True
    model.blocks[0].fc.weight.requires_grad_(False)
    assert assign(model)["blocks.0.fc.weight"].algorithm == "frozen"


@pytest.mark.parametrize("value", [1, "yes", 0, torch.tensor(True)])
def test_use_muon_must_be_a_bool(value):
    model = Tiny()
    model.wte.weight.use_muon = value
    with pytest.raises(ConfigError, match=r"wte\.weight\.use_muon = .*must be True or False"):
        assign(model)


def test_use_muon_on_a_vector():
    model = Tiny()
    model.blocks[0].fc.bias.use_muon = True
    with pytest.raises(ConfigError, match=r"blocks\.0\.fc\.bias\.use_muon = True: shape \[8\] is not a matrix"):
        assign(model)


def test_patterns_select_exactly_the_muon_matrices():
    result = assign(Tiny(), ["wte.*", "blocks.*.fc.*"])
    assert set(muon(result)) == {"wte.weight", "blocks.0.fc.weight", "blocks.1.fc.weight"}
    assert result["wte.weight"].reason == "selected by muon_params pattern 'wte.*'"
    assert result["blocks.0.output.weight"].reason == "not selected by muon_params"
    assert result["blocks.0.fc.bias"].reason == "vector"


def test_patterns_are_case_sensitive_and_know_tied_names():
    model = Tiny()
    model.lm_head.weight = model.wte.weight
    assert list(muon(assign(model, ("lm_head.*",)))) == ["wte.weight"]
    with pytest.raises(ConfigError, match="matches no parameter"):
        assign(model, ["LM_HEAD.*"])


def test_predicate_sees_trainable_matrices_only():
    model = Tiny()
    model.blocks[1].requires_grad_(False)
    seen = []

    def predicate(name, param):
        seen.append((name, param))
        return "blocks" in name

    result = assign(model, predicate)
    assert all(param.ndim >= 2 and param.requires_grad for _, param in seen)
    assert {name for name, _ in seen} == {n for n, p in model.named_parameters() if p.ndim >= 2 and p.requires_grad}
    assert set(muon(result)) == {n for n in HIDDEN if n.startswith("blocks.0")}


def test_pattern_that_matches_nothing_names_the_nearest():
    with pytest.raises(ConfigError) as caught:
        assign(Tiny(), ["blocks.*", "block.0.fc.weight"])
    assert caught.value.field == "muon_params"
    assert "'block.0.fc.weight': matches no parameter; the nearest names are blocks.0.fc.weight" in str(caught.value)


@pytest.mark.parametrize("pattern", ["*.bias", "blocks.1.fc.weight"])
def test_pattern_that_matches_only_vectors_or_frozen_parameters(pattern):
    model = Tiny()
    model.blocks[1].requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen or not matrices"):
        assign(model, [pattern])


def test_pattern_string_instead_of_a_list():
    with pytest.raises(ConfigError, match='write \\["pattern"\\]'):
        assign(Tiny(), "blocks.*")


@pytest.mark.parametrize(
    ("model", "muon_params", "field", "word"),
    [
        (lambda: nn.Embedding(4, 4), None, "model", "embedding table"),
        (lambda: nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)), None, "model", "last layer"),
        (lambda: nn.LayerNorm(4), None, "model", "use_muon"),
        (lambda: Tiny(), lambda name, param: False, "muon_params", "widen"),
        (lambda: Tiny().requires_grad_(False), None, "model", "no trainable parameter"),
        (lambda: nn.ReLU(), None, "model", "no trainable parameter"),
    ],
)
def test_nothing_for_muon_is_an_error(model, muon_params, field, word):
    with pytest.raises(ConfigError) as caught:
        assign(model(), muon_params)
    assert caught.value.field == field
    assert word in str(caught.value)


# -------------------------------------------------------------------------------------- what is refused


def refused(model, *words):
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported(model)
    text = str(caught.value)
    for word in words:
        assert word in text, text
    assert "; " in text  # a remedy
    assert isinstance(caught.value, MuonZeroError)


def test_not_a_module():
    refused(lambda x: x, "not an nn.Module")


@pytest.mark.parametrize(("kind", "cell"), [(nn.LSTM, "nn.LSTMCell"), (nn.GRU, "nn.GRUCell"), (nn.RNN, "nn.RNNCell")])
def test_recurrent_layers_hold_their_own_references(kind, cell):
    refused(nn.ModuleDict({"mid": nn.Linear(4, 4), "core": kind(4, 4)}), "core:", "_flat_weights", cell)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients(kind):
    model = nn.ModuleDict({"mid": nn.Linear(4, 4), "table": kind(8, 4, sparse=True)})
    refused(model, "table.weight:", "sparse=False")
    model["table"].requires_grad_(False)
    assert assign(model)["table.weight"].algorithm == "frozen"


def test_sparse_parameter():
    model = Bare("other", 4, 4)
    model.other = nn.Parameter(torch.eye(4).to_sparse())
    refused(model, "other:", "sparse", "to_dense")


@pytest.mark.parametrize("requires_grad", [True, False])
def test_complex_parameter(requires_grad):
    model = Bare("other", 4, 4)
    model.other = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64), requires_grad)
    refused(model, "other:", "complex64", "view_as_real")


def test_what_is_built_or_sharded_inside_inference_mode():
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        refused(nn.Sequential(nn.Linear(4, 4)), "model:", "outside of it")
    refused(model, "0.weight:", "inference_mode", "build the model outside it")


def test_lazy_parameter():
    refused(nn.Sequential(nn.LazyLinear(4)), "0.weight:", "forward pass")


def test_meta_parameter():
    refused(nn.Linear(4, 4, device="meta"), "weight:", "meta", "weights=folder")


def test_trainable_float8():
    model = Bare("other", 4, 4)
    model.other = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn))
    refused(model, "other:", "float8_e4m3fn", "requires_grad=False")


def test_tensor_subclass():
    from torch.testing._internal.two_tensor import TwoTensor

    model = Bare("other", 4, 4)
    model.other = nn.Parameter(TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4)))
    refused(model, "other:", "TwoTensor")


def test_two_parameters_over_one_memory():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight.data = model["a"].weight.data
    refused(model, "a.weight", "b.weight", "shares memory")


def test_views_that_share_no_element_are_fine():
    buffer = torch.randn(8, 4)
    model = nn.Module()
    model.a, model.b = nn.Parameter(buffer[:4]), nn.Parameter(buffer[4:])
    columns = torch.randn(4, 8)
    model.c, model.d = nn.Parameter(columns[:, :4]), nn.Parameter(columns[:, 4:])
    assert set(muon(assign(model))) == set("abcd")


@pytest.fixture(scope="module")
def group():
    """A group of one in this process."""
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("needs to start its own process group")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp(group):
    refused(
        nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), "model:", "DistributedDataParallel", "before wrapping"
    )
    refused(nn.ModuleDict({"x": nn.parallel.DistributedDataParallel(nn.Linear(4, 4))}), "x:", "DistributedDataParallel")


def test_data_parallel():
    refused(nn.DataParallel(nn.Linear(4, 4)), "DataParallel", "before wrapping")


def test_fsdp2(group):
    fsdp = importlib.import_module("torch.distributed.fsdp")
    mesh = dist.init_device_mesh("cpu", (1,))
    refused(fsdp.fully_shard(nn.Linear(4, 4), mesh=mesh), "already data-parallel", "FSDP")


def test_fsdp1():
    fsdp = importlib.import_module("torch.distributed.fsdp")

    class Pretender(fsdp.FullyShardedDataParallel):  # FSDP1 itself asks for an accelerator
        def __init__(self):
            nn.Module.__init__(self)

    model = nn.Sequential(nn.Linear(4, 4))
    model.add_module("1", Pretender())
    refused(model, "1:", "Pretender")


def test_dtensor_parameter(group):
    tensor = importlib.import_module("torch.distributed.tensor")
    mesh = dist.init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(tensor.distribute_tensor(model.weight.data, mesh, [tensor.Shard(0)]))
    refused(model, "weight:", "DTensor", "before it is sharded")


def test_assign_changes_nothing():
    model = Tiny()
    before = {name: param.clone() for name, param in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    assign(model)
    assert [type(module) for module in model.modules()] == kinds
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
        assert not hasattr(param, "use_muon")


# --------------------------------------------------------------------------------------------- lr scale

SHAPES = [(1, 1), (3, 7), (7, 3), (768, 768), (3072, 768), (768, 3072), (64, 27), (5, 10**6)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_lr_scale_is_bitwise_that_of_torch(rule, shape):
    for lr in (0.02, 1.0, 1 / 3):
        assert lr * lr_scale(rule, *shape) == _adjust_lr(lr, rule, torch.Size(shape))


def test_lr_scale_values():
    assert lr_scale("original", 16, 4) == 2.0
    assert lr_scale("original", 4, 16) == 1.0
    assert lr_scale("match_rms_adamw", 4, 100) == 0.2 * 10
    assert lr_scale(0.18, 4, 100) == 0.18 * 10
    assert lr_scale("spectral", 4, 16) == 0.5
    assert lr_scale("spectral", 16, 4) == 2.0


def test_lr_scale_of_a_conv_uses_the_view_not_the_kernel():
    matrix = assign(nn.Conv2d(2, 36, 2))["weight"].matrix
    assert matrix == (1, 36, 8)
    assert lr_scale("spectral", *matrix[1:]) == (36 / 8) ** 0.5


def test_unknown_lr_scale():
    with pytest.raises(ConfigError, match=r"adjust_lr = 'moonshot': is not a known scale; use \"original\""):
        lr_scale("moonshot", 2, 2)
