"""Sequence parallelism: ranks that share a sequence train as one that has all of it."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.harness import on_ranks
from support.reference import DEVICE, full, hidden_matrices, train, world_and_rank
from support.zoo import ZOO
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import compile_muon
from compile_muon import ConfigError, MuonZero, NonFiniteError, check_sequence
from compile_muon.config import Config, ExpertParallelConfig, SequenceParallelConfig, config_from_kwargs
from compile_muon.passes.torch_private import group_named
from compile_muon.sequence import SharedSequences, plan_sequence
from compile_muon.sequence.plan import plan_of

VOCABULARY = 61
EXCLUDED = ("embed", "head", "wte", "wpe", "positions", "norm", "bias", "gamma", "class", "cls", "pooler")


def built(kind: str, **settings: Any) -> nn.Module:
    """A tiny model of Transformers, two layers of four heads."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
    }  # fmt: skip
    undropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes |= {
        "Gemma3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "GptOss": {
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "attn_implementation": "eager",
        },
        "GPT2": undropped, "GPTBigCode": undropped,
        "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "DeepseekV3": {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "n_group": 1,
            "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1,
            "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1,
        },
    }.get(kind, {}) | settings  # fmt: skip
    kinds = {"Gemma3": "Gemma3Text", "ModernBert": "ModernBert"}
    config = getattr(transformers, f"{kinds.get(kind, kind)}Config")(**sizes)
    suffix = {"ModernBert": "ForMaskedLM", "GPT2": "LMHeadModel"}.get(kind, "ForCausalLM")
    return getattr(transformers, kind + suffix)(config)


def batch(
    step: int, micro: int, place: int, *, length: int, masked: bool, packed: bool, rows: int = 2
) -> dict[str, Tensor]:
    """Ids, and labels of which the first half of one row does not count: valid tokens are uneven over the ranks."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + place)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 2 + 1] = -100
    found = {"input_ids": ids, "labels": labels}
    if masked:
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][1, length - 3 :] = 0
        labels[1, length - 3 :] = -100
    if packed:
        third = length // 3
        found["position_ids"] = torch.cat([torch.arange(third), torch.arange(length - third)]).repeat(2, 1)
    return found


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).loss


def loss_of_parts(model: nn.Module, inputs: dict[str, Tensor], *, by_hand: bool = False) -> Tensor:
    """As loops of those write whose loaders cut; ``by_hand`` as DeepSpeed's guide to ALST does."""
    plan = plan_of(model)
    if plan is None or plan.place is None:
        return loss_of(model, inputs)
    place = plan.place
    own: Any = {name: x.chunk(place.size, 1)[place.index] for name, x in inputs.items()}
    if not by_hand:
        return loss_of(model, own)
    del own["labels"]
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].chunk(place.size, 1)[place.index]
    bare: Any = getattr(model, "_orig_mod", model)
    loss = bare.loss_function(logits=model(**own).logits, labels=None, shift_labels=shifted, vocab_size=VOCABULARY)
    # DeepSpeed's loss is of a rank's own tokens, ours of all already: so weighed it is the same.
    losses = torch.stack(torch.distributed.nn.functional.all_gather(loss, group=group_named(place.group)))
    tokens = torch.stack(
        torch.distributed.nn.functional.all_gather((shifted != -100).sum().float(), group=group_named(place.group))
    )
    return (losses * tokens).sum() / tokens.sum()


def sliced(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    layer = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    layer |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    layer |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    return parallelize_module(model, mesh, {f"model.layers.*.{name}": style for name, style in layer.items()})


def beside(
    model: nn.Module, whole: nn.Module, matrices: Any, loss: Any, data: Any, sequence: SequenceParallelConfig,
    compiled: bool = False, fullgraph: bool = False, steps: int = 2, **settings: Any,
) -> None:  # fmt: skip
    """Train a few steps beside the unsharded reference."""

    def run(model: Any) -> Any:
        options = {"codegen": "eager"}
        return torch.compile(model, backend="muon_zero", options=options, fullgraph=fullgraph) if compiled else model

    report = train(
        model, matrices, loss, data, steps=steps, unsharded=whole, compiled=run, sequence=sequence, **settings
    )
    torch._dynamo.reset()
    report.check()


def trained(
    kind: str, *, size: int = 2, length: int = 16, masked: bool = False, packed: bool = False, inputs: str = "whole",
    attention: str = "heads", checkpointed: bool = False, regional: bool = False, experts: int = 1,
    model: dict[str, Any] | None = None, axis: str = "", rows: Sequence[int] = (2,), **settings: Any,
) -> None:  # fmt: skip
    """A model of Transformers; ``axis`` is another axis of two ranks, on four in all; batches have ``rows`` in turn."""
    own = built(kind, **(model or {}))
    whole = copy.deepcopy(own)
    if axis:
        names = tuple(name for name in ("replicate", "sequence", "tensor") if name in (axis, "sequence"))
        settings["mesh"] = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=names)
        own = sliced(own, settings["mesh"]["tensor"]) if axis == "tensor" else own
    if checkpointed:
        own.gradient_checkpointing_enable({"use_reentrant": False})
    for block in own.model.layers if regional else ():
        block.compile(backend="muon_zero", options={"codegen": "eager"})
    stacks = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    loss = loss_of if inputs == "whole" else partial(loss_of_parts, by_hand=inputs == "by hand")
    parts = "whole" if inputs == "whole" else "sharded"
    beside(
        own, whole, hidden_matrices(whole, exclude=EXCLUDED, stacks=stacks), loss,
        lambda step, micro, place: batch(
            step, micro, place, length=length, masked=masked, packed=packed, rows=rows[step % len(rows)]
        ),
        SequenceParallelConfig(size, inputs=parts, attention=attention), steps=max(2, len(rows)),
        experts=ExpertParallelConfig(experts), **settings,
    )  # fmt: skip


#: models, settings of :func:`trained`, and whether the default tier has them
ONE = {"num_hidden_layers": 1}
MODELS = {
    "llama-1-odd-masked": ("Llama", {"stage": 1, "length": 15, "masked": True, "model": ONE}, True),
    "llama-3-checkpointed-accumulated": (
        "Llama", {"stage": 3, "checkpointed": True, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}, True,
    ),
    "llama-3-compiled-odd": ("Llama", {"stage": 3, "compiled": True, "length": 15, "model": ONE}, False),
    "llama-3-parts": ("Llama", {"stage": 3, "inputs": "labels", "masked": True, "model": ONE}, True),
    # Behind their last norm they view hidden states in the shape of all positions.
    "gpt2-odd": ("GPT2", {"stage": 3, "length": 15, "rows": (1, 3)}, True),
    "gpt2-compiled": ("GPT2", {"stage": 2, "compiled": True}, False),
    "bigcode": ("GPTBigCode", {"stage": 1}, False),
    "llama-2-packed-mqa": ("Llama", {"stage": 2, "packed": True, "model": {"num_key_value_heads": 1}}, False),
    "llama-3-regional": ("Llama", {"stage": 3, "length": 14, "regional": True}, False),
    "llama-2-compiled-checkpointed": ("Llama", {"stage": 2, "compiled": True, "checkpointed": True}, False),
    "llama-2-parts-by-hand": ("Llama", {"stage": 2, "inputs": "by hand", "packed": True}, False),
    "sliding-window": ("Gemma3", {"stage": 3}, False),
    "mla": ("DeepseekV3", {"stage": 3}, False),
    "sinks": ("GptOss", {"stage": 3}, False),
    "encoder": ("ModernBert", {"stage": 2, "masked": True}, False),
}  # fmt: skip
RING = {
    "packed-mqa": ("Llama", {"stage": 2, "packed": True, "model": {"num_key_value_heads": 1, **ONE}}, True),
    "compiled-odd": ("Llama", {"stage": 3, "compiled": True, "length": 15, "model": ONE}, False),
    "mla-checkpointed": ("DeepseekV3", {"stage": 1, "checkpointed": True}, False),
    "encoder": ("ModernBert", {"stage": 2, "masked": True, "length": 14}, False),
}
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, **ONE}
FOUR = {
    "more-ranks-than-heads": (
        "Llama", {"stage": 3, "size": 4, "attention": "both", "length": 18, "masked": True, "model": FEW_HEADS}, False,
    ),
    "two-sequences": ("Llama", {"stage": 3, "length": 13, "masked": True}, False),
    "and-experts": ("Qwen3Moe", {"stage": 3, "experts": 2}, False),
    "and-replicas": ("Llama", {"stage": 2, "axis": "replicate"}, False),
    "and-slices": ("Llama", {"stage": 3, "axis": "tensor", "compiled": True}, False),
    "ring-and-slices": ("Llama", {"stage": 1, "axis": "tensor", "attention": "ring"}, False),
}  # fmt: skip


def listed(cases: dict[str, Any]) -> pytest.MarkDecorator:
    marks = {True: (), False: pytest.mark.full}
    params = [pytest.param(*rest, id=name, marks=marks[short]) for name, (*rest, short) in cases.items()]
    return pytest.mark.parametrize(("kind", "settings"), params)


@listed(MODELS)
@on_ranks(2)
def test_two_ranks_of_one_sequence_train_as_one(kind, settings) -> None:
    trained(kind, **settings)


@listed(RING)
@on_ranks(2)
def test_keys_and_values_go_around(kind, settings) -> None:
    trained(kind, attention="ring", **settings)


@listed(FOUR)
@on_ranks(4)
def test_four_ranks_of_two_sequences_or_one(kind, settings) -> None:
    trained(kind, **settings)


@pytest.mark.parametrize(
    ("compiled", "stage", "attention"),
    [(False, 3, "heads"), *(pytest.param(True, *each, marks=pytest.mark.full) for each in ((2, "heads"), (3, "ring")))],
)
@on_ranks(2)
def test_blocks_of_ones_own(compiled, stage, attention) -> None:
    """They call scaled_dot_product_attention, and the loss is the loop's."""
    zoo = ZOO["gpt"]
    torch.manual_seed(0)
    model = zoo.build()
    whole, sequence = copy.deepcopy(model), SequenceParallelConfig(2, ("blocks",), attention=attention)
    given = {"compiled": compiled, "fullgraph": True, "stage": stage}
    beside(model, whole, zoo.matrices(whole), zoo.loss, zoo.data, sequence, **given)


IMAGE = 60
TEXT: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, use_cache=False,
)  # fmt: skip


def pictures(step: int, micro: int, place: int) -> dict[str, Tensor]:
    """Three images in two rows of text, of which one lies on the border between the ranks."""
    generator = torch.Generator().manual_seed(100 * step + place)
    ids = torch.randint(3, IMAGE, (2, 45), generator=generator)
    ids[0, 3:19] = ids[0, 24:40] = ids[1, 15:31] = IMAGE
    labels = ids.clone()
    labels[ids == IMAGE] = -100
    return {"input_ids": ids, "labels": labels, "pixel_values": torch.randn(3, 3, 16, 16, generator=generator)}


def llava() -> tuple[Any, Callable[..., dict[str, Tensor]]]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=4
    )
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_id=IMAGE)
    model: Any = LlavaForConditionalGeneration(config)
    model(**pictures(0, 0, 0)).loss.backward()
    for name, param in model.named_parameters():  # what follows the layer that is read, and what is noise
        param.requires_grad_(param.grad is not None and "k_proj.bias" not in name)
        param.grad = None
    return model, pictures


def qwen(kind: str) -> tuple[Any, Callable[..., dict[str, Tensor]]]:
    """A tiny Qwen2-VL or Qwen3-VL, whose images come as patches with a grid."""
    import transformers

    text = {**TEXT, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    vision: dict[str, Any] = dict(depth=2, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)
    if kind == "Qwen2VL":
        vision |= dict(embed_dim=16, hidden_size=32, mlp_ratio=2)
    else:
        text["head_dim"] = 8
        vision |= dict(hidden_size=16, intermediate_size=24, out_hidden_size=32)
        vision |= dict(num_position_embeddings=64, deepstack_visual_indexes=[0])
    ids = dict(image_token_id=IMAGE, video_token_id=59, vision_start_token_id=58, vision_end_token_id=57)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **ids)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config), patches


def patches(step: int, micro: int, place: int) -> dict[str, Tensor]:
    """Two texts with three images of 16, 8 and 32 patches, of which four are a token."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + place)
    grid = torch.tensor([[1, 4, 4], [1, 2, 4], [1, 4, 8]])
    ids = torch.randint(3, 50, (2, 30), generator=generator)
    for row, first, tokens in ((0, 2, 4), (0, 9, 2), (1, 4, 8)):
        ids[row, first - 1], ids[row, first : first + tokens] = 58, IMAGE
    return {
        "input_ids": ids, "labels": torch.where(ids >= 57, -100, ids), "image_grid_thw": grid,
        "pixel_values": torch.randn(56, 96, generator=generator), "mm_token_type_ids": (ids == IMAGE).int(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "compiled", "each"),
    [
        ("Qwen3VL", False, [[32, 32], [24, 24]]),  # the largest image to one rank, the others to the other
        ("Qwen2VL", True, None),
        ("Llava", False, [[2, 2], [2, 2]]),
    ],
)
@pytest.mark.full
@on_ranks(2)
def test_whole_images_are_dealt_out_and_cross_borders(kind, compiled, each) -> None:
    """``each``: images or patches that a rank's first vision layer sees, by rank."""
    torch.manual_seed(0)
    model, batches = llava() if kind == "Llava" else qwen(kind)
    whole = copy.deepcopy(model)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    excluded = ("embed_tokens", "position_embedding", "class_embedding", "pos_embed", "lm_head", "norm", "bias", "ln_q")
    matrices = {k: v for k, v in hidden_matrices(whole, exclude=excluded).items() if k in trained}
    seen: list[int] = []
    first = model.model.vision_tower if kind == "Llava" else model.model.visual.blocks[0]
    first.register_forward_hook(lambda m, a, output: seen.append(len(output[0] if kind == "Llava" else output)))

    sequence = SequenceParallelConfig(2)
    beside(model, whole, matrices, loss_of, batches, sequence, compiled=compiled, stage=3)
    assert each is None or seen == each[dist.get_rank()]


class MaskedBlock(nn.Module):
    """Attention with a mask of all positions that the model hands on; or by positions of its own, which is wrong."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.counts:
            x = x + torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Masked(nn.Module):
    """The whole, or what a pipeline stage has of it."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(MaskedBlock(counts=counts) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x, mask)
        return x if self.head is None else self.head(x)


def sharded(
    model: nn.Module, size: int = 2, *, blocks: tuple[str, ...] | None = None, inputs: str = "whole",
    attention: str = "heads", **settings: Any,
) -> MuonZero:  # fmt: skip
    config = config_from_kwargs(ns_dtype="float32", **{"stage": 3, **settings})
    object.__setattr__(
        config, "sequence_parallel", SequenceParallelConfig(size, blocks, inputs=inputs, attention=attention)
    )
    return MuonZero.from_config(model, config)


def refusal(call: Callable[[], Any], model: nn.Module | None = None, errors: Any = ConfigError) -> str:
    """What an error says, which leaves the model as it was; or nothing."""
    params = [] if model is None else list(model.parameters())
    before = [full(param.detach()).clone() for param in params]
    try:
        call()
    except errors as error:
        assert all(torch.equal(old, full(new)) for old, new in zip(before, params, strict=True))
        return str(error)
    finally:
        torch._dynamo.reset()
    return ""


class Losing(Masked):
    """Returns its loss alone, as models of small trainers do."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).logsumexp(-1).square().mean()


@pytest.mark.parametrize(
    ("kind", "counts", "compiled", "by"),
    [
        ("Masked", True, False, "check"),
        *(("Masked", counts, False, "step") for counts in (False, True)),
        ("Losing", True, False, "step"),  # a loss, where that is all
        pytest.param("Masked", False, True, "check", marks=pytest.mark.full),
        pytest.param("Llama", False, True, "step", marks=pytest.mark.full),
    ],
)
@on_ranks(2)
def test_a_check_and_the_first_step_compare_outputs(kind, counts, compiled, by) -> None:
    """What is said of blocks that count positions by themselves: by a check, or by the first step."""
    torch.manual_seed(0)
    own, far = {"Masked": Masked, "Losing": Losing}.get(kind), list[float]()
    model: Any = built(kind, use_cache=True) if own is None else own(counts=counts)
    optimizer = sharded(model, blocks=None if own is None else ("blocks",))
    if compiled:
        model.compile(backend="muon_zero", options={"codegen": "eager"}, fullgraph=own is None)
    ids = torch.arange(20).view(2, 10)
    if by == "check":
        said = refusal(lambda: far.append(check_sequence(model, ids)))
        assert said or far[0] <= 1e-5
        assert ("count positions from their own first one" in said) == counts, said
    else:
        given = batch(0, 0, 0, length=9, masked=False, packed=False)
        (model(**given).loss if own is None else model(ids).square().mean()).backward()
        said, shared = refusal(optimizer.step, model), optimizer.engine.extension(SharedSequences)
        assert said or (shared is not None and not shared.plan.unchecked)
    assert (f"changes what {kind} computes" in said) == counts, said


def part(whole: Masked, stage: int) -> Masked:
    """A pipeline stage: the first with the embedding, the second with the head."""
    made = Masked()
    made.embed, made.head = (whole.embed, None) if stage == 0 else (None, whole.head)
    made.blocks = nn.ModuleList([whole.blocks[stage]])
    return made


@pytest.mark.full
@on_ranks(4)
def test_stages_of_a_pipeline_share_sequences() -> None:
    """Two stages of two ranks that share sequences, beside the whole model on one."""

    def ids(step: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (4, 10), generator=torch.Generator().manual_seed(step))

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "sequence"))
    stage = mesh.get_local_rank("pipeline")
    torch.manual_seed(0)
    whole = Masked()
    own = part(copy.deepcopy(whole), stage)
    plain = config_from_kwargs(ns_dtype="float32", stage=0, gradient_clipping=0.1)
    config = config_from_kwargs(ns_dtype="float32", stage=2, gradient_clipping=0.1, gradient_accumulation_steps=2)
    config = dataclasses.replace(config, sequence_parallel=SequenceParallelConfig(2, ("blocks",)))
    optimizer = MuonZero.from_config(own, config, mesh=mesh["sequence"], norm_group=mesh["pipeline"])
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    reference = MuonZero.from_config(whole, plain, process_group=alone)
    pipeline = PipelineStage(own, stage, 2, torch.device("cpu"), group=mesh.get_group("pipeline"))
    schedule = ScheduleGPipe(pipeline, 2, loss_fn=loss)
    for step in range(2):
        schedule.step(*(() if stage else (ids(step),)), **({"target": ids(step)} if stage else {}))
        loss(whole(ids(step)), ids(step)).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    theirs = dict(part(whole, stage).named_parameters())
    for name, param in own.named_parameters():
        assert (full(param.detach()) - full(theirs[name].detach())).abs().max() < 1e-5, name


@pytest.mark.full
@on_ranks(4)
def test_ranks_of_a_sequence_with_different_batches_are_named() -> None:
    """Two steps, in the second or in both of which the last rank has another batch."""
    (world, rank), said = world_and_rank(), []
    for wrong in ((1,), (0, 1)):
        model = built("Llama")
        optimizer = sharded(model)
        for step in range(2):
            place = 1 if rank == world - 1 and step in wrong else 0
            model(**batch(step, 0, place, length=8, masked=False, packed=False)).loss.backward()
            if error := refusal(optimizer.step, model, (ConfigError, NonFiniteError)):
                said.append(f"{step}: {error}")
                break
            optimizer.zero_grad()
    later, first = said
    assert later.startswith("1: ") and first.startswith("0: "), said
    for error in said:
        assert "ranks 2, 3 share a sequence and were given different batches" in error and "data_place" in error, error


@pytest.mark.parametrize(
    ("compiled", "inputs", "length"),
    [
        (False, "whole", 12),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((True, "whole", 12), (False, "sharded", 6))),
    ],
)
@on_ranks(2)
def test_batches_of_other_shapes_are_an_error_ahead_of_the_first_exchange(compiled, inputs, length) -> None:
    """What a rank is told whose batch has more rows than that of the other."""
    zoo, rank = ZOO["gpt"], dist.get_rank()
    model = zoo.build()
    sharded(model, blocks=("blocks",), stage=2, inputs=inputs)
    run: Any = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
    said = refusal(lambda: run(torch.ones(2 + rank, length, dtype=torch.int64)))
    assert said.startswith(f"batch = [[{2 + rank}, {length}]]: "), said
    assert f"were given [[2, {length}]] on rank 0, [[3, {length}]] on rank 1" in said, said


def saved(size: int, attention: str = "heads") -> int:
    """Bytes of activations that a forward keeps for backward."""
    model = built("Llama", max_position_embeddings=512, attn_implementation="sdpa")
    sharded(model, size, stage=2, attention=attention)
    seen: dict[int, Tensor] = {}

    def keep(value: Tensor) -> Tensor:
        if value.ndim > 2:  # weights are not
            seen[value.untyped_storage().data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        kept = model(**batch(0, 0, 0, length=256, masked=False, packed=False))
    assert kept.loss.isfinite()
    return sum(value.untyped_storage().nbytes() for value in seen.values())


@on_ranks(2)
def test_each_rank_keeps_its_part_of_the_activations() -> None:
    whole, part, around = saved(1), saved(2), saved(2, "ring")
    assert part == pytest.approx(whole / 2, rel=0.01), (whole, part)
    assert around == pytest.approx(whole / 2, rel=0.05), (whole, around)


@on_ranks(2)
def test_generation_and_evaluation_have_all_positions() -> None:
    model = built("Llama", use_cache=True).eval()
    ids = torch.arange(3, 13).view(1, 10)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    logits = model(ids).logits
    sharded(model, stage=2)
    with torch.no_grad():
        cached = model(ids, use_cache=True).logits
        joined = model(ids, use_cache=False).logits
    for _ in range(1 if world_and_rank()[1] else 2):  # once more alone
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert torch.allclose(cached, logits, atol=1e-5) and torch.allclose(joined, logits, atol=1e-5)


@on_ranks(2)
def test_parts_are_evaluated_and_generation_is_whole() -> None:
    """A model whose config reads a cache; what a rank has of the logits, and what is refused."""
    from transformers import LlamaForTokenClassification

    model = built("Llama", use_cache=True).eval()
    ids = torch.arange(3, 15).view(1, 12)
    expected, text = model(ids).logits, model.generate(ids, max_new_tokens=3, do_sample=False)
    optimizer = sharded(model, stage=3, inputs="sharded")
    rank, world = optimizer.sequence_place
    with torch.no_grad():
        logits = model(ids.chunk(world, 1)[rank]).logits
    classifier = LlamaForTokenClassification(model.config)
    sharded(classifier, stage=1, inputs="sharded")
    unshifted = refusal(lambda: model.loss_function(labels=ids[:, :6], logits=logits, vocab_size=VOCABULARY))
    assert "labels = [1, 6]: are a part" in unshifted and "shift_labels" in unshifted, unshifted
    kept = refusal(lambda: model(input_ids=ids[:, :6], logits_to_keep=1, vocab_size=VOCABULARY))
    assert "logits_to_keep = 1" in kept, kept
    labels = refusal(lambda: classifier(input_ids=ids[:, :6], labels=ids[:, :6]))
    assert "labels = [1, 6]: is for a loss of all positions" in labels, labels
    assert torch.allclose(logits, expected.chunk(world, 1)[rank], atol=1e-5)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), text)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    def refused(model: nn.Module, *parts: str, size: int = 2, **settings: Any) -> None:
        said = refusal(lambda: plan_sequence(model, SequenceParallelConfig(size, **settings)))
        assert said and all(each in said for each in parts), said

    heads = "does not divide the 4 heads of model.layers.0.self_attn"
    refused(built("Llama"), heads, 'use one of 1, 2, 4, or "attention": "both"', size=3)
    refused(built("GptOss"), "attention = 'ring'", "is 'eager'", 'attn_implementation="sdpa"', attention="ring")
    refused(Masked(), "attention = 'both'", "do not say how many", blocks=("blocks",), attention="both")
    assert plan_sequence(built("Llama"), SequenceParallelConfig(12, attention="both")).ring == 3  # noqa: PLR2004
    refused(
        built("Llama"), "sequence_parallel.blocks = 'layers'", "is no ModuleList", "model.layers", blocks=("layers",)
    )
    refused(Masked(), "finds other than one stack of blocks", '"blocks": ["blocks"]')
    refused(Masked(), "joined = False", "causal loss of Transformers", blocks=("blocks",), joined=False)
    moe = built("Qwen3Moe", output_router_logits=True)
    refused(moe, "output_router_logits", "each rank's own tokens")
    explicit = "no other calls scaled_dot_product_attention"  # naming their blocks would not help
    refused(built("Bloom"), explicit, "leave sequence_parallel out")
    refused(built("Bloom"), "transformer.h.1 = 'BloomBlock'", "attends neither", blocks=("transformer.h",))
    refused(built("GPTJ", rotary_dim=4), explicit)
    refused(built("Mamba"), explicit)
    mixed = Masked()
    mixed.blocks[1].conv = nn.Conv1d(4, 4, 3)
    refused(mixed, "blocks.1.conv", "Conv1d", "mixes positions", blocks=("blocks",))


@pytest.mark.parametrize(
    ("world", "size", "said"), [(2, 3, "3: does not divide the 2 ranks along shard"), (1, 2, "2: is more than the one")]
)
@on_ranks()
def test_a_size_that_does_not_divide_the_ranks(size, said) -> None:
    with pytest.raises(ConfigError, match=f"^sequence_parallel.size = {said}"):
        sharded(built("Llama"), size)


@on_ranks(2)
def test_blocks_that_hand_nothing_on_want_lengths_that_divide() -> None:
    model = Masked()
    sharded(model, blocks=("blocks",))
    with pytest.raises(ConfigError, match="does not divide 9 positions, and MaskedBlock hands nothing on to attention"):
        model(torch.arange(18).view(2, 9))


def test_settings_are_read_as_they_are_written() -> None:
    assert compile_muon.load_config({"sequence_parallel": {"size": 2}}).sequence_parallel.size == 2
    assert compile_muon.load_config({"sequence_parallel_size": 4}).sequence_parallel.size == 4
    assert Config().sequence_parallel.size == 1 and dist.is_available()
    with pytest.raises(ConfigError, match=r"sequence_parallel_size = 4: contradicts sequence_parallel.size = 2"):
        compile_muon.load_config({"sequence_parallel": {"size": 2}, "sequence_parallel_size": 4})
    for more in ({"attention": "ring"}, {"blocks": ["blocks"]}):
        given = {"sequence_parallel": {"size": 2, **more}, "optimizer": {"params": {"qk_clip": 100.0}}}
        with pytest.raises(ConfigError, match="qk_clip = 100.0: notes logits where ranks exchange heads"):
            compile_muon.load_config(given)
