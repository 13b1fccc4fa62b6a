"""A thousand random training loops against torch's own: the ledger balances, and the numbers are the reference's.

Every loop mixes what people do between two optimizer steps. One compiled model per kind of model serves all of them;
what a loop did is in the message of a failure, and its seed alone repeats it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from reference import full, world_and_rank
from torch import nn

from compile_muon import LedgerError, MuonZero
from compile_muon.kernels import newton_schulz

LOOPS = {"plain": 300, "break": 300, "tied": 200, "frozen": 200}
# Every stage, with the kinds that are hardest for it.
ON_TWO_RANKS = [("break", 0), ("plain", 1), ("break", 1), ("tied", 1), ("break", 2), ("plain", 3), ("frozen", 3)]
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


KINDS = {"plain": Plain, "break": Break, "tied": Tied, "frozen": Frozen}


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
        self.adamw = torch.optim.AdamW(self.rest, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.1)

    def zero_grad(self):
        self.model.zero_grad()

    def backward(self, loss, **kwargs):
        loss.backward(**kwargs)

    def gradients(self, loss, wanted):
        return averaged(torch.autograd.grad(loss, wanted))

    def edited(self):
        # What all ranks have alike stays as it is when what comes later is averaged with it.
        averaged([p.grad for p in self.named.values() if p.grad is not None])

    def dropped(self):
        pass

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


@dataclass
class Told:
    """What a loop has told the optimizer since the last step: when may it refuse a gradient?"""

    steps: int | None
    accumulating: bool = False
    delivered: int = 0
    mixed: bool = False

    def may_refuse(self):
        """The step's micro-batches are complete as far as the optimizer was told, so an update may be under way."""
        return self.steps is not None and self.delivered >= self.steps


class Ours:
    """The compiled model and its MuonZero."""

    def __init__(self, kind, **settings):
        torch.manual_seed(0)
        self.eager = KINDS[kind]()
        self.optimizer = MuonZero(
            self.eager, lr=LR, adamw_lr=ADAMW_LR, ns_dtype="float32", ns_method="standard", **settings
        )
        self.model = self.eager
        self.run = torch.compile(self.eager, backend="muon_zero", options={"codegen": "eager"})
        self.told = Told(1)
        self.initial = [p.detach().clone() for p in self.eager.parameters()]

    def reset(self, steps):
        self.told = Told(steps)
        self.optimizer._ledger.accumulation_steps = steps
        self.zero_grad()
        with torch.no_grad():
            for p, start in zip(self.eager.parameters(), self.initial, strict=True):
                p.copy_(start)
            for slots in self.optimizer.state.values():
                for tensor in slots.values():
                    tensor.zero_()

    @contextlib.contextmanager
    def accumulate(self):
        with self.optimizer.accumulate():
            self.told.accumulating = True
            try:
                yield
            finally:
                self.told.accumulating = False

    def zero_grad(self):
        self.optimizer.zero_grad()
        self.dropped()

    def dropped(self):
        self.told.delivered, self.told.mixed = 0, False

    def gradients(self, loss, wanted):
        return tuple(full(grad) for grad in torch.autograd.grad(loss, wanted))

    def edited(self):
        self.told.mixed |= self.told.may_refuse()

    def backward(self, loss, **kwargs):
        before = self.state()
        late = self.told.may_refuse()
        try:
            loss.backward(**kwargs)
        except LedgerError:
            assert late, "refused, though micro-batches were still to come"
            assert_equal(before, self.state())
            raise
        finally:
            self.told.delivered += not self.told.accumulating
        self.told.mixed |= late

    def step(self):
        before = self.state()
        try:
            self.optimizer.step()
        except LedgerError:
            assert self.told.mixed, "step() refused gradients that nobody had added to a direction"
            assert_equal(before, self.state())
            raise

    def state(self):
        kept = [s.local for s in self.optimizer._ledger.states] + [s.momentum for s in self.optimizer._muon]
        return [tensor.detach().clone() for tensor in kept]


def assert_equal(before, after):
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True)), "a refusal changed something"


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
    head = [p for name, p in side.model.named_parameters() if name.startswith("head")]
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
    module = side.model.mid if hasattr(side.model, "mid") else side.model.b
    side.backward(loss_of(side.run(x)) + 0.1 * module.weight.square().sum())


def clip(side, x):
    """Fine for raw gradients, an error for directions."""
    side.edited()
    torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.05)


def drop_gradients(side, x):
    """The model's own zero_grad: the optimizer is not told."""
    side.model.zero_grad()
    side.dropped()


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
]


@dataclass
class Counts:
    loops: int = 0
    refused: int = 0
    compared: int = 0
    in_backward: int = 0
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
    reference.model.load_state_dict({name: full(value) for name, value in ours.eager.state_dict().items()})
    reference.zero_grad()
    reference.reset()
    history = [f"accumulation {steps}"]
    try:
        for _ in range(dice.randint(1, 3)):
            one_step(dice, ours, reference, counts, history)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {' | '.join(history)}: {type(error).__name__}: {error}") from error
    counts.loops += 1


def one_step(dice, ours, reference, counts, history):
    actions = dice.choices(COMMON + RARE, k=dice.choice([1, 1, 2, 2, 3, 4]))
    if ours.optimizer.config.zero.stage == 1:  # between micro-batches there is nothing in `.grad` that could be clipped
        actions = [action for action in actions if action is not clip]
    try:
        for action in actions:
            history.append(action.__name__)
            world, rank = world_and_rank()
            x = torch.randn(world, 4, 6, generator=torch.Generator().manual_seed(dice.randrange(10**6)))[rank]
            mine = action(ours, x)
            values_agree(mine, action(reference, x))
            counts.done.add(action.__name__)
        history.append("step")
        counts.in_backward += any(state.pending is not None for state in ours.optimizer._muon)
        ours.step()
    except LedgerError:
        # Refused, and nothing has changed: drop the step on both sides, as the message says.
        history.append("REFUSED")
        counts.refused += 1
        ours.zero_grad()
        reference.zero_grad()
        return
    assert ours.optimizer._ledger.balance() == 0
    reference.step()
    for (name, p), q in zip(ours.eager.named_parameters(), reference.model.parameters(), strict=True):
        p, q = full(p.detach()), q.detach()
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    counts.compared += 1
    ours.zero_grad()
    reference.zero_grad()
    assert ours.optimizer._ledger.balance() == 0


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
    ours = Ours(kind, **settings)
    if spoil is not None:
        spoil(ours)
    torch.manual_seed(0)
    reference = Reference(KINDS[kind](), [s.name for s in ours.optimizer._muon])
    counts = Counts()
    for number in range(loops):
        one_loop(f"{kind}-{number}", ours, reference, counts)
    return counts


def random_loops_on_a_rank(**kwargs):
    return vars(random_loops(**kwargs))


@pytest.mark.parametrize("kind", list(LOOPS))
def test_random_loops(kind):
    counts = random_loops(kind, LOOPS[kind])
    assert counts.loops == LOOPS[kind]
    assert counts.done == {action.__name__ for action in COMMON + RARE}
    # A weight read in two frames is never updated in backward, nor is what shares a frame with it; so nothing is late.
    assert (counts.in_backward == 0) == (counts.refused == 0) == (kind == "tied"), counts
    assert kind == "tied" or counts.in_backward > 0.1 * counts.compared, counts
    # Refusals are for loops that do not say how many micro-batches they have; most loops here do.
    assert counts.compared > 3 * counts.refused, counts


@pytest.mark.parametrize(("kind", "stage"), ON_TWO_RANKS)
def test_random_loops_on_two_ranks(ranks: Callable[[int], Ranks], kind, stage):
    loops = 60 if stage == 1 else 30  # the stage that keeps sums of its own between micro-batches
    for counts in ranks(2).run(random_loops_on_a_rank, kind=kind, loops=loops, stage=stage):
        assert counts["loops"] == loops and counts["compared"] > loops, counts


def test_the_loops_would_notice():
    """A ledger that updates at every backward must fail."""

    def ignore_eager_and_repeated_reads(ours):
        ours.optimizer._ledger._is_clean = lambda state: True

    with pytest.raises(AssertionError, match="seed break-"):
        random_loops("break", LOOPS["break"], spoil=ignore_eager_and_repeated_reads)
