"""A thousand random training loops against torch's own: the ledger balances, and the numbers are the reference's.

Every loop mixes what people do between two optimizer steps. One compiled model per kind of model serves all of them;
what a loop did is in the message of a failure, and its seed alone repeats it.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from support.harness import Ranks
from support.reference import decayed_apart, full, world_and_rank
from torch import nn

from compile_muon import MuonZero
from compile_muon.kernels import newton_schulz

LOOPS = {"plain": 250, "break": 250, "tied": 200, "frozen": 150, "pair": 150}
# Every stage, with the kinds that are hardest for it; between two ranks and three, every kind, too.
ON_TWO_RANKS = [("frozen", 3)]
ON_TWO_RANKS += [
    pytest.param(*given, marks=pytest.mark.campaign)
    for given in (("break", 0), ("tied", 1), ("break", 2), ("pair", 3), ("plain", 1), ("break", 1), ("plain", 3))
]
ON_THREE_RANKS = [("break", 1), ("plain", 3)]
LR, ADAMW_LR = 0.02, 1e-3


class Boom(Exception):
    """What the loops raise on purpose."""


def boom(_grad):
    raise Boom


@torch._dynamo.disable
def between(model, h):
    """Runs between two frames: a place for exceptions on the way forward and back."""
    if model.fail == "forward":
        raise Boom
    if model.fail == "between":
        h.register_hook(boom)
    return h


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 6, bias=False)
        self.head = nn.Linear(6, 3)
        self.fail = None

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Break(Plain):
    def forward(self, x):
        h = between(self, torch.tanh(self.a(x)))
        return self.head(torch.tanh(self.b(h)))


class Tied(nn.Module):
    """One matrix read in two frames, beside others read in one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.mid = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)
        self.fail = None

    def forward(self, x):
        h = between(self, torch.tanh(self.first(x)))
        return self.head(self.second(torch.tanh(self.mid(h))))


class Frozen(Break):
    """A frozen matrix, a frozen bias, a matrix nobody uses."""

    def __init__(self):
        super().__init__()
        self.c = nn.Linear(6, 6)
        self.unused = nn.Linear(4, 4)
        self.c.weight.requires_grad_(False)
        self.a.bias.requires_grad_(False)

    def forward(self, x):
        h = between(self, torch.tanh(self.a(x)))
        return self.head(self.c(torch.tanh(self.b(h))))


class Pair(nn.Module):
    """Two models in one frame, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.left, self.right = Plain(), Plain()
        self.fail = None

    def forward(self, x):
        return self.left(x) - self.right(2 * x)


KINDS = {"plain": Plain, "break": Break, "tied": Tied, "frozen": Frozen, "pair": Pair}


def averaged(tensors):
    """In place, over the ranks."""
    world, _ = world_and_rank()
    for tensor in tensors if world > 1 else ():
        dist.all_reduce(tensor)
        tensor /= world
    return tensors


# --- two sides of one loop --------------------------------------------------------------------------------------------


class Reference:
    """Unsharded, eager, the formulas of Muon and torch.optim.AdamW; gradients are averaged over the ranks."""

    accumulate = staticmethod(contextlib.nullcontext)

    def __init__(self, model, muon):
        self.model = self.run = self.eager = model
        self.named = dict(model.named_parameters())
        self.muon = muon
        self.buffers = {name: torch.zeros_like(self.named[name]) for name in muon}
        self.rest = [p for name, p in self.named.items() if name not in muon and p.requires_grad]
        self.reset()

    def reset(self):
        for buffer in self.buffers.values():
            buffer.zero_()
        self.adamw = torch.optim.AdamW(decayed_apart(self.rest), lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.1)

    def zero_grad(self, **kwargs):
        self.model.zero_grad(**kwargs)

    def backward(self, loss, **kwargs):
        loss.backward(**kwargs)

    def reload(self):
        pass

    def gradients(self, loss, wanted):
        return averaged(torch.autograd.grad(loss, wanted))

    def edited(self):
        # What all ranks have alike stays as it is when what comes later is averaged with it.
        averaged([p.grad for p in self.named.values() if p.grad is not None])

    @torch.no_grad()
    def step(self):
        averaged([p.grad for p in self.named.values() if p.grad is not None])
        for name in self.muon:
            p = self.named[name]
            if p.grad is not None:
                self.buffers[name].lerp_(p.grad, 0.05)
                update = newton_schulz(p.grad.lerp(self.buffers[name], 0.95), dtype="float32", method="standard")
                p.mul_(1 - LR * 0.1)
                p.add_(update, alpha=-LR * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
        self.adamw.step()


class Ours:
    """The compiled model and its MuonZero, or two of them."""

    def __init__(self, kind, **settings):
        torch.manual_seed(0)
        self.model = self.eager = KINDS[kind]()
        settings = {"lr": LR, "adamw_lr": ADAMW_LR, "ns_dtype": "float32", "ns_method": "standard", **settings}
        if kind == "pair":
            # What one optimizer wants must not decide for the other.
            left, right = self.eager.left, self.eager.right
            self.optimizers = [MuonZero(left, **settings), MuonZero(right, **{**settings, **OTHER})]
        else:
            self.optimizers = [MuonZero(self.eager, **settings)]
        self.run = torch.compile(self.eager, backend="muon_zero", options={"codegen": "eager"})
        self.initial = {name: full(p.detach()).clone() for name, p in self.eager.state_dict().items()}

    @property
    def sharded_params(self):
        return [sharded for optimizer in self.optimizers for sharded in optimizer.engine.params]

    def matrices(self):
        muon = {id(a.param) for a in self.sharded_params if a.spec.muon and a.param.requires_grad}
        return [name for name, p in self.eager.named_parameters() if id(p) in muon]

    def reset(self, steps):
        for optimizer in self.optimizers:
            optimizer.engine.ledger.accumulation_steps = optimizer.engine.ledger._expected = steps
            for slots in optimizer.state.values():
                for tensor in slots.values():
                    tensor.zero_()
        for sharded in self.sharded_params:
            sharded.speculations.__init__()  # "auto" starts anew
        self.zero_grad()
        self.eager.load_state_dict(self.initial)

    @contextlib.contextmanager
    def accumulate(self):
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.accumulate())
            yield

    def zero_grad(self, **kwargs):
        for optimizer in self.optimizers:
            optimizer.zero_grad(**kwargs)

    def gradients(self, loss, wanted):
        return tuple(full(grad) for grad in torch.autograd.grad(loss, wanted))

    def edited(self):
        pass

    def backward(self, loss, **kwargs):
        loss.backward(**kwargs)

    def reload(self):
        self.eager.load_state_dict(self.eager.state_dict())
        for optimizer in self.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def count(self, what):
        return sum(optimizer.totals()[what] for optimizer in self.optimizers)


#: of the second optimizer of a pair
OTHER = {"update": "step", "gradient_clipping": 1e9}


# --- what happens between two steps -----------------------------------------------------------------------------------


def loss_of(out):
    return out.square().mean()


def train(side, x):
    side.backward(loss_of(side.run(x)))


def train_in_eval_mode(side, x):
    side.model.eval()
    try:
        train(side, x)
    finally:
        side.model.train()


def evaluate(side, x):
    side.model.eval()
    side.run(x)
    side.model.train()


def without_grad(side, x):
    with torch.no_grad():
        side.run(x)


def forward_only(side, x):
    side.run(x)


def two_forwards_one_backward(side, x):
    side.backward(loss_of(side.run(x)) + loss_of(side.run(2 * x)))


def two_forwards_two_backwards(side, x):
    first, second = loss_of(side.run(x)), loss_of(side.run(2 * x))
    side.backward(first)
    side.backward(second)


def two_forwards_reversed(side, x):
    first, second = loss_of(side.run(x)), loss_of(side.run(2 * x))
    side.backward(second)
    side.backward(first)


def two_forwards_first_dropped(side, x):
    side.run(x)
    side.backward(loss_of(side.run(2 * x)))


def raise_in_forward(side, x):
    side.model.fail = "forward"
    try:
        side.run(x)
    except Boom:
        pass
    finally:
        side.model.fail = None


def raise_before_backward(side, x):
    """Nothing has been delivered when it happens."""
    out = side.run(x)
    out.register_hook(boom)
    with contextlib.suppress(Boom):
        side.backward(loss_of(out))


def raise_between_frames(side, x):
    """The second frame has delivered its gradients, the first never runs."""
    side.model.fail = "between"
    try:
        side.backward(loss_of(side.run(x)))
    except Boom:
        pass
    finally:
        side.model.fail = None


def raise_after_backward(side, x):
    """Which gradients had arrived is up to autograd: the batch is dropped, as people do."""
    x = x.clone().requires_grad_()
    x.register_hook(boom)
    with contextlib.suppress(Boom):
        side.backward(loss_of(side.run(x)))
    side.zero_grad()


def gradient_of_the_input(side, x):
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(side.run(x)), x)
    return grad


def gradients_of_parameters(side, x):
    wanted = [p for name, p in side.model.named_parameters() if p.requires_grad and "unused" not in name]
    return side.gradients(loss_of(side.run(x)), wanted)


def with_input_gradient(side, x):
    x = x.clone().requires_grad_()
    side.backward(loss_of(side.run(x)))
    return x.grad


def for_one_parameter(side, x):
    """backward(inputs=[...]) delivers to the head only."""
    head = [p for name, p in side.model.named_parameters() if "head" in name]
    side.backward(loss_of(side.run(x)), inputs=head)


def zero_grad(side, x):
    side.zero_grad()


def accumulated(side, x):
    with side.accumulate():
        train(side, x)


def eagerly(side, x):
    """A step outside the compiled model, a metric that trains, say."""
    side.backward(loss_of(side.eager(x)))


def read_a_weight(side, x):
    """A penalty that reads a matrix through the model."""
    inner = getattr(side.model, "left", side.model)
    module = inner.mid if hasattr(inner, "mid") else inner.b
    side.backward(loss_of(side.run(x)) + 0.1 * module.weight.square().sum())


def clip(side, x):
    side.edited()
    torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.05)


def foreach(side, x):
    """Operations on lists of DTensors count as an edit of neither them nor their shards."""
    side.edited()
    grads = [p.grad for p in side.model.parameters() if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, 0.5)


def replace_gradient(side, x):
    side.edited()
    p = next(p for name, p in side.model.named_parameters() if name.endswith("head.weight") or name == "b.weight")
    p.grad = None if p.grad is None else p.grad * 0.5


def through_data(side, x):
    side.edited()
    for p in side.model.parameters():
        if p.grad is not None:
            (p.grad._local_tensor if hasattr(p.grad, "_local_tensor") else p.grad).data.mul_(-1)


def with_hook(side, x):
    """A hook on a matrix that scales what arrives."""
    p = next(p for name, p in side.model.named_parameters() if p.ndim == 2 and p.requires_grad)
    handle = p.register_hook(lambda grad: grad * 0.5)
    train(side, x)
    handle.remove()


def zero_grad_between(side, x):
    """Lightning's order."""
    loss = loss_of(side.run(x))
    side.zero_grad()
    side.backward(loss)


def zero_in_place(side, x):
    side.zero_grad(set_to_none=False)


def retained(side, x):
    """Two backwards of one forward."""
    loss = loss_of(side.run(x))
    side.backward(loss, retain_graph=True)
    side.backward(loss)


def penalty(side, x):
    """A penalty on the parameters, outside the model."""
    squares = sum(full(p.square().sum()) for p in side.model.parameters() if p.requires_grad)
    side.backward(loss_of(side.run(x)) + 0.1 * squares)


def to_device(side, x):
    side.model.to("cpu")


def reload(side, x):
    """State dicts of model and optimizer, saved and loaded."""
    side.reload()


def drop_gradients(side, x):
    """The model's own zero_grad: the optimizer is not told."""
    side.model.zero_grad()


COMMON = [train] * 10 + [accumulated] * 3 + [eagerly] * 2 + [drop_gradients]
RARE = [
    train_in_eval_mode,
    evaluate,
    without_grad,
    forward_only,
    two_forwards_one_backward,
    two_forwards_two_backwards,
    two_forwards_reversed,
    two_forwards_first_dropped,
    raise_in_forward,
    raise_before_backward,
    raise_between_frames,
    raise_after_backward,
    gradient_of_the_input,
    gradients_of_parameters,
    with_input_gradient,
    for_one_parameter,
    zero_grad,
    read_a_weight,
    clip,
    clip,
    foreach,
    replace_gradient,
    through_data,
    with_hook,
    zero_grad_between,
    zero_in_place,
    retained,
    penalty,
    to_device,
    reload,
]
#: They touch `.grad`, which at stage 1 is whole only after a step's last micro-batch.
ON_GRADIENTS = {clip, foreach, replace_gradient, through_data, with_hook}


@dataclass
class Counts:
    loops: int = 0
    compared: int = 0
    used: int = 0
    discarded: int = 0
    done: set = field(default_factory=set)


def values_agree(a, b):
    if a is None:
        return
    for x, y in zip(a if isinstance(a, tuple) else (a,), b if isinstance(b, tuple) else (b,), strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-4)


def one_loop(seed, ours, reference, counts):
    dice = random.Random(seed)
    steps = dice.choice([1, 1, 1, 2, 2, 3, None])
    ours.reset(steps)
    reference.model.load_state_dict(ours.initial)
    reference.zero_grad()
    reference.reset()
    history = [f"accumulation {steps}"]
    try:
        for _ in range(dice.randint(1, 3)):
            one_step(dice, steps, ours, reference, counts, history)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {' | '.join(history)}: {type(error).__name__}: {error}") from error
    counts.loops += 1


def one_step(dice, steps, ours, reference, counts, history):
    actions = dice.choices(COMMON + RARE, k=dice.choice([1, 1, 2, 2, 3, 4]))
    if ours.optimizers[0].config.zero.stage == 1 and (steps not in (1, None) or accumulated in actions):
        actions = [action for action in actions if action not in ON_GRADIENTS]
    for action in actions:
        history.append(action.__name__)
        world, rank = world_and_rank()
        x = torch.randn(world, 4, 6, generator=torch.Generator().manual_seed(dice.randrange(10**6)))[rank]
        mine = action(ours, x)
        values_agree(mine, action(reference, x))
        counts.done.add(action.__name__)
    history.append("step")
    ours.step()
    assert sum(optimizer.engine.ledger.balance() for optimizer in ours.optimizers) == 0
    reference.step()
    for (name, p), q in zip(ours.eager.named_parameters(), reference.model.parameters(), strict=True):
        p, q = full(p.detach()), q.detach()
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    counts.compared += 1
    if dice.random() < 0.8:  # else gradients of this step are in the next one too
        ours.zero_grad()
        reference.zero_grad()


@contextlib.contextmanager
def compiler():
    """Frames for train and eval mode, with and without gradients of the input: more than the default limit."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        try:
            yield
        finally:
            torch._dynamo.reset()


@compiler()
def random_loops(kind, loops, *, spoil=None, **settings):
    """Run so many; every rank the same ones, on data of its own. ``spoil`` gets our side first."""
    with torch._functorch.config.patch(donated_buffer=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "auto" says when it stops
        ours = Ours(kind, **settings)
        if spoil is not None:
            spoil(ours)
        torch.manual_seed(0)
        reference = Reference(KINDS[kind](), ours.matrices())
        counts = Counts()
        for number in range(loops):
            one_loop(f"{kind}-{number}", ours, reference, counts)
    counts.used, counts.discarded = ours.count("directions_used"), ours.count("directions_discarded")
    return counts


def random_loops_on_a_rank(**kwargs):
    return vars(random_loops(**kwargs))


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "plain" else pytest.mark.campaign) for kind in LOOPS]
)
def test_random_loops(kind):
    counts = random_loops(kind, LOOPS[kind])
    assert counts.loops == LOOPS[kind]
    assert counts.done == {action.__name__ for action in COMMON + RARE}
    # The matrix of "tied" is read in two frames: only what is beside it can be updated from backward.
    assert counts.used > 0.2 * counts.compared, counts
    assert counts.discarded > 0.05 * counts.compared, counts


@pytest.mark.parametrize(("kind", "loops"), [("break", 12), ("tied", 12)])
def test_a_few_random_loops(kind, loops):
    counts = random_loops(kind, loops)
    assert counts.loops == loops and counts.compared >= loops, counts


@pytest.mark.full
@pytest.mark.parametrize(("kind", "stage"), ON_TWO_RANKS)
def test_random_loops_on_two_ranks(ranks: Callable[[int], Ranks], kind, stage):
    loops = 60 if stage == 1 else 30  # the stage that keeps sums of its own between micro-batches
    for counts in ranks(2).run(random_loops_on_a_rank, kind=kind, loops=loops, stage=stage):
        assert counts["loops"] == loops and counts["compared"] >= loops, counts


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "stage"), ON_THREE_RANKS)
def test_random_loops_on_three_ranks(ranks: Callable[[int], Ranks], kind, stage):
    for counts in ranks(3).run(random_loops_on_a_rank, kind=kind, loops=15, stage=stage):
        assert counts["loops"] == 15, counts


def test_the_loops_would_notice(monkeypatch):
    """A step that trusts every direction must fail."""
    from compile_muon.engine.step_checks import StepChecks

    monkeypatch.setattr(StepChecks, "held", lambda self: frozenset(self.names("ready")))
    with pytest.raises(AssertionError, match="seed plain-"):
        random_loops("plain", LOOPS["plain"])
