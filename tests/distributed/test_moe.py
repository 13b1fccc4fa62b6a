"""Experts on several ranks beside Transformers' own forward of the whole model, in the same process."""

import contextlib
import copy
import math
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness import RanksOf, on_ranks
from support.mixtures import tiny, tokens_of
from support.reference import world_and_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compile_muon.errors import ConfigError
from compile_muon.experts.plan import plan_experts


def loss_of(model: Any, rank: int, length: int = 6) -> Tensor:
    tokens = tokens_of(rank, length)
    return model(input_ids=tokens, labels=tokens).loss


def expert_mesh(size: int) -> DeviceMesh:
    world, _ = world_and_rank()
    return init_device_mesh("cpu", (world // size, size), mesh_dim_names=("replicate", "expert"))["expert"]


def shared(model: nn.Module, size: int, capacity_factor: float | None = None) -> Any:
    plan_experts(model, size, capacity_factor=capacity_factor).apply(expert_mesh(size))
    return model


def close(found: Tensor, expected: Tensor, what: str = "", limit: float = 1e-6) -> None:
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    difference = float((found - expected).abs().max()) if expected.numel() else 0.0
    assert found.shape == expected.shape and difference <= limit * scale, f"{what}: differs by {difference}"


def summed_gradients(model: nn.Module, size: int) -> dict[str, Tensor]:
    """As a data-parallel engine would sum them: experts over the groups that hold the same, the rest over all."""
    world, rank = world_and_rank()
    found = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        expert = isinstance(param, DTensor)
        grad = param.grad
        assert grad is not None, name
        local = (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
        if not expert:
            dist.all_reduce(local)
        elif size < world:
            parts = [torch.empty_like(local) for _ in range(world)]
            dist.all_gather(parts, local)
            local = sum(part for other, part in enumerate(parts) if other % size == rank % size)
        found[name] = local
    return found


def compare_gradients(found: dict[str, Tensor], whole: nn.Module, size: int) -> None:
    _, rank = world_and_rank()
    for name, param in whole.named_parameters():
        if not param.requires_grad:
            continue
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        if found[name].shape != expected.shape:
            count = expected.shape[0] // size
            expected = expected[rank % size * count : (rank % size + 1) * count]
        close(found[name], expected, name)


def beside(
    kind: str, size: int, capacity_factor: float | None = None, reentrant: bool | None = None
) -> tuple[Any, Any, list[str]]:
    """A model whose experts are shared, the whole one with the same loss and gradients, and what backward called.
    ``reentrant``: how layers are checkpointed, if they are."""
    world, rank = world_and_rank()
    whole, model = tiny(kind), shared(tiny(kind), size, capacity_factor)
    losses = [loss_of(whole, other) for other in range(world)]
    sum(losses).backward()
    if reentrant is not None:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        assert model.is_gradient_checkpointing
    loss = loss_of(model, rank)
    with contextlib.nullcontext([]) if reentrant is None else watched() as ops:
        loss.backward()
    close(loss, losses[rank], kind)
    compare_gradients(summed_gradients(model, size), whole, size)
    return model, whole, ops


@pytest.mark.parametrize(("world", "size"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.full)])
@on_ranks()
def test_whole_models_compute_what_they_do_unsharded(size: int) -> None:
    world, rank = world_and_rank()
    for kind in ("Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss") if world == 2 else ("DeepseekV3", "GptOss"):
        model, whole, _ = beside(kind, size)
        found, expected = (each(input_ids=tokens_of(rank)).logits for each in (model, whole))
        close(found, expected, kind)


def experts_of(kind: str) -> nn.Module:
    """An experts module of its own kind, in a model of nothing else."""
    import importlib

    own = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    cls = next(value for name, value in vars(own).items() if name.endswith("Experts"))
    config = Config(
        num_local_experts=8, n_routed_experts=8, moe_num_experts=8, hidden_size=16, intermediate_size=12,
        moe_intermediate_size=12, moe_hidden_size=16, hidden_act="silu", mlp_hidden_act="relu2", moe_latent_size=None,
        swiglu_alpha=1.7, swiglu_limit=2.0, post_norm_eps=1e-6, num_experts=8,
        _experts_implementation_internal="eager",
    )  # fmt: skip
    torch.manual_seed(3)
    made = cls(config)
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(std=0.3)
    return nn.ModuleDict({"experts": made})


class Config(SimpleNamespace):
    """As Transformers' own it has a property that an experts module reads when it runs."""

    @property
    def _experts_implementation(self) -> str:
        return self._experts_implementation_internal


def routed(rank: int, tokens: int, among: range, slots: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, their experts and weights, and what the output is multiplied with to make a loss."""
    dice = torch.Generator().manual_seed(11 + rank)
    chosen = [torch.randperm(len(among), generator=dice)[:slots] + among[0] for _ in range(tokens)]
    index = torch.stack(chosen) if tokens else torch.zeros(0, slots, dtype=torch.long)
    made = (torch.randn(tokens, 16, generator=dice), torch.rand(tokens, slots, generator=dice))
    return made[0], index, made[1], torch.randn(tokens, 16, generator=dice)


def gradients_of(experts: nn.Module, case: tuple[Tensor, ...], *, hidden_grad: bool = True) -> list[Tensor]:
    """The output, and the gradients of tokens and weights; those of the experts are in .grad."""
    hidden, index, weights, factor = case
    hidden, weights = hidden.clone().requires_grad_(hidden_grad), weights.clone().requires_grad_()
    out = experts["experts"](hidden, index, weights)
    if out.requires_grad:  # of no tokens, Transformers' eager forward makes a constant
        (out * factor).sum().backward()
    else:
        assert not out.numel()
        weights.grad, hidden.grad = torch.zeros_like(weights), torch.zeros_like(hidden)
    return [out.detach(), weights.grad, *([hidden.grad] if hidden_grad else [])]


def compare_experts(
    model: nn.Module, whole: nn.Module, batches: list[tuple[Tensor, ...]], what: str, *,
    hidden_grad: bool = True, capacity: int | None = None,
) -> int:  # fmt: skip
    """One rank's batch each, beside all of them by the whole; how many pairs ``capacity`` drops."""
    world, rank = world_and_rank()
    expected, dropped = list[list[Tensor]](), 0
    for hidden, index, weights, factor in batches:
        kept = kept_by_hand(index, weights, capacity)
        dropped += int((~kept).sum())
        left = (hidden, index, torch.where(kept, weights, 0.0), factor)
        expected.append(gradients_of(whole, left, hidden_grad=hidden_grad))
        expected[-1][1] = torch.where(kept, expected[-1][1], 0.0)
    mine = gradients_of(model, batches[rank], hidden_grad=hidden_grad)
    for found_one, expected_one in zip(mine, expected[rank], strict=True):
        close(found_one, expected_one, what)
    compare_gradients(summed_gradients(model, world), whole, world)
    return dropped


def kept_by_hand(index: Tensor, weights: Tensor, capacity: int | None) -> Tensor:
    """Which pairs stay: for each expert those with the largest weights, among equals the earlier token's."""
    kept = torch.zeros_like(weights, dtype=torch.bool)
    for expert in index.unique().tolist():
        pairs = sorted((-float(weights[t, s]), t, s) for t, s in (index == expert).nonzero().tolist())
        for _, token, slot in pairs[:capacity]:
            kept[token, slot] = True
    return kept


#: the experts that get tokens, and how many tokens each of two ranks has
CASES = {
    "all": (range(8), (5, 5)), "one expert gets none": (range(1, 8), (5, 5)),
    "one rank gets none": (range(4, 8), (5, 5)), "one rank has none": (range(8), (5, 0)),
    "no rank has any": (range(8), (0, 0)),
}  # fmt: skip


def run_experts(kind: str, case: str, frozen: str = "") -> None:
    among, tokens = CASES[case]
    whole, model = experts_of(kind), shared(experts_of(kind), 2)
    for both in (whole, model):
        for name, param in both.named_parameters():
            param.requires_grad_(not frozen or frozen not in name)
    batches = [routed(rank, count, among) for rank, count in enumerate(tokens)]
    compare_experts(model, whole, batches, f"{kind}, {case}", hidden_grad=frozen != "hidden")
    for name, param in whole.named_parameters():
        if not param.requires_grad:
            assert model.get_parameter(name).grad is None


@on_ranks(2)
def test_every_kind_of_experts_with_and_without_tokens() -> None:
    for kind in ("mixtral", "gpt_oss"):
        for case in CASES:
            run_experts(kind, case)
    # no gate; a norm behind the experts; transposed stacks; a gate and a summation of its own
    for kind in ("nemotron_h", "muse_spark", "aria", "openai_privacy_filter"):
        run_experts(kind, "one rank gets none")
    for frozen in ("hidden", "experts", "gate_up"):
        run_experts("mixtral", "one rank has none", frozen=frozen)


@on_ranks(2)
def test_one_rank_computes_bit_for_bit_what_transformers_does() -> None:
    """A group of one: no collective, and the numbers of Transformers' own grouped products."""
    whole, model = tiny("GptOss", experts_implementation="grouped_mm"), shared(tiny("GptOss"), 1)
    _, rank = world_and_rank()
    with watched() as ops:
        loss = loss_of(model, rank)
        loss.backward()
    assert not any("c10d" in op for op in ops)
    expected = loss_of(whole, rank)
    expected.backward()
    assert torch.equal(loss, expected)
    for name, param in whole.named_parameters():
        grad: Any = model.get_parameter(name).grad
        close(grad.to_local() if isinstance(grad, DTensor) else grad, param.grad, name, limit=0.0)


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """The names of what is called."""
    found: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(str(op))
            return op(*args, **(kwargs or {}))

    with Watch():
        yield found


def drop(capacity_factor: float) -> int:
    world, _ = world_and_rank()
    tokens, slots, experts = 12, 2, 8
    whole, model = experts_of("gpt_oss"), shared(experts_of("gpt_oss"), world, capacity_factor)
    capacity = math.ceil(capacity_factor * tokens * slots / experts)
    batches = [crowded(rank, tokens) for rank in range(world)]
    return compare_experts(model, whole, batches, f"capacity {capacity}", capacity=capacity)


def crowded(rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Many tokens for few experts, many of the same weight."""
    hidden, index, weights, factor = routed(rank, tokens, range(3))
    return hidden, index, (weights * 4).round() / 4 + 0.25, factor


def test_capacity_drops_the_least_probable(ranks: RanksOf) -> None:
    found = [ranks(2).run(drop, capacity_factor=factor)[0] for factor in (0.3, 1.0, 8.0)]
    assert found[0] > found[1] > found[2] == 0


@on_ranks(2)
def test_capacity_that_drops_nothing_is_exact() -> None:
    world, rank = world_and_rank()
    model, *_ = beside("GptOss", world, capacity_factor=8.0)
    # Fewer tokens on one rank would be buffers of another size.
    with pytest.raises(ConfigError, match=r"capacity_factor = 8.0: ranks have \[12, 10\] tokens"):
        loss_of(model, rank, 6 - rank)


@pytest.mark.parametrize(
    ("capacity_factor", "backend", "fullgraph", "graphs"),
    [(None, "aot_eager", False, 2), pytest.param(1.0, "inductor", True, 1, marks=pytest.mark.full)],
)
@on_ranks(2)
def test_a_block_is_one_graph_where_it_can_be(
    capacity_factor: float | None, backend: str, fullgraph: bool, graphs: int
) -> None:
    """A block of router and experts, compiled and not."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    world, rank = world_and_rank()
    model = shared(tiny("DeepseekV3", num_hidden_layers=1), world, capacity_factor)
    block = model.model.layers[0].mlp
    counter = CompileCounterWithBackend(backend)
    fast = torch.compile(block, backend=counter, fullgraph=fullgraph, dynamic=False)
    dice = torch.Generator().manual_seed(rank)
    for scale in (1.0, -3.0):  # other experts, the same graph
        hidden = (torch.randn(2, 6, 32, generator=dice) * scale).requires_grad_()
        found = []
        for module in (block, fast):
            block.zero_grad()
            out = module(hidden)
            hidden.grad = None
            out.square().sum().backward()
            found.append([out, hidden.grad, *summed_gradients(block, world).values()])
        for mine, expected in zip(found[1], found[0], strict=True):
            close(mine, expected, f"{backend}, capacity {capacity_factor}", limit=2e-6)
    assert counter.frame_count == graphs


@on_ranks(2)
def test_checkpointed_layers_dispatch_again() -> None:
    for kind, *how in (("DeepseekV3", None, True), ("GptOss", None, False), ("Mixtral", 8.0, False)):
        model, _, ops = beside(kind, world_and_rank()[0], *how)
        exchanges = sum("all_to_all_single" in op for op in ops)
        assert exchanges > 2 * len(model.model.layers)  # more than gradients there and back


@on_ranks(2)
def test_half_precision() -> None:
    """Under bf16 autocast as in Transformers' grouped products, whose rows these are."""
    world, rank = world_and_rank()
    whole = tiny("GptOss", experts_implementation="grouped_mm")
    for capacity_factor in (None, 8.0):
        model = shared(tiny("GptOss"), world, capacity_factor)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = (each(input_ids=tokens_of(rank)).logits for each in (model, whole))
            loss = loss_of(model, rank)
        assert found.dtype is torch.bfloat16
        close(found.float(), expected.float(), limit=1e-2)
        loss.backward()
        assert all(param.grad is not None and param.grad.isfinite().all() for param in model.parameters())
    low = shared(tiny("GptOss").bfloat16(), world)
    loss_of(low, rank).backward()
    found, expected = (each(input_ids=tokens_of(rank)).logits.float() for each in (low, whole.bfloat16()))
    close(found, expected, limit=1e-2)


@on_ranks(2)
def test_a_model_is_switched_by_itself() -> None:
    world, rank = world_and_rank()
    model = tiny("GptOss")
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    stack.use_muon = False
    model.model.layers[1].mlp.experts.down_proj.requires_grad_(False)
    before, config = dict(model.named_parameters()), copy.deepcopy(model.config)
    plan = plan_experts(model, world)
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(param is before[name] for name, param in model.named_parameters())
    assert len(plan.parameters) == 8 and "model.layers.1.mlp.experts.down_proj_bias" in plan.parameters
    plan.apply(expert_mesh(world))
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor) is (name in plan.parameters)
        assert param.shape == before[name].shape and param.requires_grad is before[name].requires_grad
        if name in plan.parameters:
            local = param.to_local().detach()
            assert torch.equal(local, before[name].chunk(world)[rank])
            assert local.untyped_storage().nbytes() == before[name].nbytes // world
    assert model.model.layers[0].mlp.experts.gate_up_proj.use_muon is False
    # The model's config, what is saved of it, and another model of the same config know nothing of it.
    assert model.config.to_dict() == config.to_dict()
    assert model.get_experts_implementation() == {"": "eager"}
    other = type(model)(model.config)
    assert torch.isfinite(loss_of(other, rank))
    model.set_experts_implementation("grouped_mm")
    expected = loss_of(model, rank)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        assert "compile_muon" not in Path(folder, "config.json").read_text()
    twin = copy.deepcopy(model)
    assert torch.equal(loss_of(twin, rank), expected)
    twin.model.layers[0].mlp.experts.down_proj.detach().zero_()
    assert torch.equal(loss_of(model, rank), expected)
    assert torch.equal(loss_of(pickle.loads(pickle.dumps(model)), rank), expected)


@on_ranks(2)
def test_what_cannot_be_shared_is_refused_on_every_rank() -> None:
    world, _ = world_and_rank()
    found = []

    def say(call: Callable[..., Any], *given: Any) -> None:
        with pytest.raises(ConfigError) as error:
            call(*given)
        found.append(str(error.value))

    def refuse(model: nn.Module, size: int = 2) -> None:
        before = dict(model.named_parameters())
        say(plan_experts, model, size)
        assert all(param is before[name] for name, param in model.named_parameters())

    refuse(tiny("Mixtral"), 3)
    refuse(nn.Sequential(nn.Linear(2, 2)))
    refuse(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])}))

    two = tiny("Mixtral")
    first, second = (layer.mlp.experts for layer in two.model.layers)
    tensor_parallel = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    first.gate_up_proj = nn.Parameter(distribute_tensor(first.gate_up_proj.detach(), tensor_parallel, [Shard(1)]))
    second.down_proj = nn.Parameter(distribute_tensor(second.down_proj.detach(), tensor_parallel, [Replicate()]))
    refuse(two)

    quantized = tiny("Mixtral")
    stack = quantized.model.layers[1].mlp.experts.down_proj
    quantized.model.layers[1].mlp.experts.down_proj = nn.Parameter(stack.detach().to(torch.int8), requires_grad=False)
    refuse(quantized)

    odd = tiny("Mixtral")
    odd.model.layers[0].mlp.experts.scales = nn.Parameter(torch.ones(8))
    refuse(odd)

    tied = tiny("Mixtral")
    tied.model.layers[0].register_parameter("copy", tied.model.layers[0].mlp.experts.down_proj)
    refuse(tied)

    hooked = tiny("Mixtral")
    experts = hooked.model.layers[0].mlp.experts
    experts.forward = experts.forward
    refuse(hooked)

    nn.utils.parametrizations.weight_norm(odd.model.layers[1].mlp.experts, "down_proj")
    refuse(odd)
    refuse(shared(tiny("Mixtral"), world))

    say(loss_of, tiny("Mixtral", experts_implementation="compile_muon_expert_parallel"), 0)
    for message, part in zip(found, REFUSED, strict=True):
        assert part in message, message
    # All of it in one error: both parameters that are placed already.
    assert "2 settings are wrong" in found[3] and "model.layers.1.mlp.experts.down_proj" in found[3]


REFUSED = (
    "expert_parallel.size = 3: model.layers.0.mlp.experts: 8 experts cannot be divided among 3 ranks on the axis "
    '"expert"; use one of 1, 2, 4, 8',
    "expert_parallel = 2: the model has no experts; ",
    "expert_parallel = 2: the model has no experts behind Transformers' experts interface, but experts (ModuleList of "
    "4 Linear)",
    "model.layers.0.mlp.experts.gate_up_proj = '[Shard(dim=1)] on tensor': is placed on other ranks already and cannot "
    'be Shard(0) on the axis "expert" too; leave the experts out',
    "model.layers.1.mlp.experts.down_proj = torch.int8: is quantized; load",
    "model.layers.0.mlp.experts.scales = [8]: looks like a stack of experts",
    "model.layers.0.mlp.experts.down_proj = [8, 32, 16]: is tied to model.layers.0.copy",
    "model.layers.0.mlp.experts = 'MixtralExperts': has a forward that something else put there",
    "model.layers.1.mlp.experts = 'ParametrizedMixtralExperts': has no parameter down_proj of its own",
    "model.layers.0.mlp.experts = 'MixtralExperts': has its experts shared already",
    "experts_implementation = 'compile_muon_expert_parallel': MixtralExperts has its experts to itself; leave it out",
)
