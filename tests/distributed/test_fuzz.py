"""Random training loops against torch's own: the ledger balances, and the numbers are the reference's.

Every loop mixes what people do between two optimizer steps; loops as people write them are in
tests/compile_muon/test_loops.py. One compiled model per kind of model serves all of them; what a loop did is in the
message of a failure, and its seed alone repeats it.
"""

import contextlib
import random
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.compiled import EAGER, Net, Pair, Plain
from support.harness import RanksOf
from support.reference import full, world_and_rank
from torch import nn
from torch.utils.checkpoint import checkpoint

from compile_muon import MuonZero
from compile_muon.config import config_from_kwargs

LOOPS = {"plain": 250, "break": 250, "tied": 200, "frozen": 150, "pair": 150}
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


class Break(Net):
    """Two frames; others have more ahead of the head."""

    fail = None

    def __init__(self):
        super().__init__()
        self.c = nn.Identity()

    def forward(self, x):
        return self.head(self.c(torch.tanh(self.b(between(self, torch.tanh(self.a(x)))))))


class Tied(Break):
    """One matrix read in two frames, beside others read in one."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6, bias=bias) for bias in (False, True, False))
        self.c.weight = self.a.weight


class Frozen(Break):
    """A frozen matrix, a frozen bias, a matrix nobody uses."""

    def __init__(self):
        super().__init__()
        self.c, self.unused = nn.Linear(6, 6), nn.Linear(4, 4)
        self.c.weight.requires_grad_(False)
        self.a.bias.requires_grad_(False)


KINDS = {"plain": Net, "break": Break, "tied": Tied, "frozen": Frozen, "pair": Pair}


def averaged(tensors):
    """In place, over the ranks."""
    world, _ = world_and_rank()
    for tensor in tensors if world > 1 else ():
        dist.all_reduce(tensor)
        tensor /= world
    return tensors


class Reference(Plain):
    """Gradients are averaged over the ranks."""

    accumulate = staticmethod(contextlib.nullcontext)

    def __init__(self, model, muon):
        self.muon, self.eager = muon, model
        super().__init__(model, config_from_kwargs(lr=LR, adamw_lr=ADAMW_LR), muon)

    def reset(self):
        self.__init__(self.model, self.muon)

    def reload(self):
        pass

    def gradients(self, loss, wanted):
        return averaged(torch.autograd.grad(loss, wanted))

    def edited(self):
        # What all ranks have alike stays as it is when what comes later is averaged with it.
        averaged([p.grad for p in self.model.parameters() if p.grad is not None])

    def step(self):
        self.edited()
        super().step()


class Ours:
    """The compiled model and its MuonZero, or two of them."""

    def __init__(self, kind, **settings):
        torch.manual_seed(0)
        self.model = self.eager = KINDS[kind]()
        settings = {"lr": LR, "adamw_lr": ADAMW_LR, "ns_dtype": "float32", "ns_method": "standard", **settings}
        # What one optimizer wants must not decide for the other.
        other = {**settings, "update": "step", "gradient_clipping": 1e9}
        parts = [(self.model.left, settings), (self.model.right, other)] if kind == "pair" else [(self.model, settings)]
        self.optimizers = [MuonZero(part, **given) for part, given in parts]
        self.run = torch.compile(self.eager, backend="muon_zero", options=EAGER)
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

    def reload(self):
        self.eager.load_state_dict(self.eager.state_dict())
        for optimizer in self.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def count(self, what):
        return sum(optimizer.totals()[what] for optimizer in self.optimizers)


def loss_of(run, x):
    return run(x).square().mean()


def train(side, x):
    loss_of(side.run, x).backward()


@contextlib.contextmanager
def in_eval_mode(side):
    side.model.eval()
    yield
    side.model.train()


def forward_only(side, x):
    side.run(x)


def two_forwards(first, second):
    """Backwards of x and 2 x in this order, if at all."""

    def action(side, x):
        losses = [loss_of(side.run, x), loss_of(side.run, 2 * x)]
        losses[first].backward()
        if second is not None:
            losses[second].backward()

    return action


def raising(fail):
    """In the forward between two frames, or in backward once the second has delivered its gradients."""

    def action(side, x):
        side.model.fail = fail
        with contextlib.suppress(Boom):
            train(side, x)
        side.model.fail = None

    return action


def raise_before_backward(side, x):
    """Nothing has been delivered when it happens."""
    out = side.run(x)
    out.register_hook(boom)
    with contextlib.suppress(Boom):
        out.square().mean().backward()


def of_the_input(action):
    """With a gradient of the input."""
    return lambda side, x: action(side, x.clone().requires_grad_())


def raise_after_backward(side, x):
    """Which gradients had arrived is up to autograd: the batch is dropped, as people do."""
    x.register_hook(boom)
    with contextlib.suppress(Boom):
        train(side, x)
    side.zero_grad()


def with_input_gradient(side, x):
    train(side, x)
    return (x.grad,)


def gradients_of_parameters(side, x):
    wanted = [p for name, p in side.model.named_parameters() if p.requires_grad and "unused" not in name]
    return side.gradients(loss_of(side.run, x), wanted)


def for_one_parameter(side, x):
    """backward(inputs=[...]) delivers to the head only."""
    loss_of(side.run, x).backward(inputs=[p for name, p in side.model.named_parameters() if "head" in name])


def inside(context, action):
    """The action of a side in a context that it gives."""

    def entered(side, x):
        with context(side):
            action(side, x)

    return entered


def read_a_weight(side, x):
    """A penalty that reads a matrix through the model."""
    module = getattr(side.model, "left", side.model).b
    (loss_of(side.run, x) + 0.1 * module.weight.square().sum()).backward()


def on_gradients(edit):
    def edited(side, x):
        side.edited()
        edit(side, [p.grad for p in side.model.parameters() if p.grad is not None])

    return edited


def foreach(side, grads):
    """Operations on lists of DTensors count as an edit of neither them nor their shards."""
    if grads:
        torch._foreach_mul_(grads, 0.5)


def replace_gradient(side, grads):
    p = next(p for name, p in side.model.named_parameters() if name.endswith("head.weight") or name == "b.weight")
    p.grad = None if p.grad is None else p.grad * 0.5


def through_data(side, grads):
    for grad in grads:
        (grad._local_tensor if hasattr(grad, "_local_tensor") else grad).data.mul_(-1)


def with_hook(side, x):
    """A hook on a matrix that scales what arrives."""
    p = next(p for name, p in side.model.named_parameters() if p.ndim == 2 and p.requires_grad)
    handle = p.register_hook(lambda grad: grad * 0.5)
    train(side, x)
    handle.remove()


def zero_grad_between(side, x):
    """Lightning's order."""
    loss = loss_of(side.run, x)
    side.zero_grad()
    loss.backward()


def recomputed(side, x):
    """Its forward runs again in backward."""
    checkpoint(lambda y: loss_of(side.run, y), x, use_reentrant=False).backward()


def retained(side, x):
    """Two backwards of one forward."""
    loss = loss_of(side.run, x)
    loss.backward(retain_graph=True)
    loss.backward()


def penalty(side, x):
    """A penalty on the parameters, outside the model."""
    squares = sum(full(p.square().sum()) for p in side.model.parameters() if p.requires_grad)
    (loss_of(side.run, x) + 0.1 * squares).backward()


def to_device(side, x):
    side.model.to("cpu")


#: They touch `.grad`, which at stage 1 is whole only after a step's last micro-batch.
ON_GRADIENTS = {
    "clip": on_gradients(lambda side, grads: torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.05)),
    "foreach": on_gradients(foreach),
    "replace gradient": on_gradients(replace_gradient),
    "through data": on_gradients(through_data),
    "with hook": with_hook,
}
#: Edits that PyTorch does not count: checks that are read in the next step call them an error there.
UNCOUNTED = ("foreach", "through data")
ACTIONS = ON_GRADIENTS | {
    "train": train,
    "accumulated": inside(lambda side: side.accumulate(), train),
    "eagerly": lambda side, x: loss_of(side.eager, x).backward(),  # outside the compiled model, a metric that trains
    "drop gradients": lambda side, x: side.model.zero_grad(),  # the optimizer is not told
    "train in eval mode": inside(in_eval_mode, train),
    "evaluate": inside(in_eval_mode, forward_only),
    "without grad": inside(lambda side: torch.no_grad(), forward_only),
    "forward only": forward_only,
    "two forwards, one backward": lambda side, x: (loss_of(side.run, x) + loss_of(side.run, 2 * x)).backward(),
    "two forwards, two backwards": two_forwards(0, 1),
    "two forwards, reversed": two_forwards(1, 0),
    "two forwards, the first dropped": two_forwards(1, None),
    "raise in forward": raising("forward"),
    "raise between frames": raising("between"),
    "raise before backward": raise_before_backward,
    "raise after backward": of_the_input(raise_after_backward),
    "gradient of the input": of_the_input(lambda side, x: torch.autograd.grad(loss_of(side.run, x), x)),
    "gradients of parameters": gradients_of_parameters,
    "with input gradient": of_the_input(with_input_gradient),
    "for one parameter": for_one_parameter,
    "zero grad": lambda side, x: side.zero_grad(),
    "zero in place": lambda side, x: side.zero_grad(set_to_none=False),
    "zero grad between": zero_grad_between,
    "read a weight": read_a_weight,
    "recomputed": recomputed,
    "retained": retained,
    "penalty": penalty,
    "to device": to_device,
    "reload": lambda side, x: side.reload(),  # state dicts of model and optimizer, saved and loaded
}
OFTEN = ["train"] * 9 + ["accumulated"] * 2 + ["eagerly", "clip"] + list(ACTIONS)


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
    actions = dice.choices(OFTEN, k=dice.choice([1, 1, 2, 2, 3, 4]))
    zero = ours.optimizers[0].config.zero
    if zero.stage == 1 and (steps not in (1, None) or "accumulated" in actions):
        actions = [action for action in actions if action not in ON_GRADIENTS]
    if zero.checks == "next_step":
        actions = [action for action in actions if action not in UNCOUNTED]
    for action in actions:
        history.append(action)
        world, rank = world_and_rank()
        x = torch.randn(world, 4, 6, generator=torch.Generator().manual_seed(dice.randrange(10**6)))[rank]
        mine, theirs = (ACTIONS[action](side, x) for side in (ours, reference))
        for one, other in zip(mine or (), theirs or (), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
        counts.done.add(action)
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


def random_loops(kind, loops, **settings):
    """Run so many; every rank the same ones, on data of its own."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = KINDS[kind]()
    # Frames for train and eval mode, with and without gradients of the input: more than the default limit.
    limits = torch._dynamo.config.patch(recompile_limit=64), torch._functorch.config.patch(donated_buffer=False)
    with limits[0], limits[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "auto" says when it stops
        ours, counts = Ours(kind, **settings), SimpleNamespace(loops=0, compared=0, done=set())
        reference = Reference(plain, ours.matrices())
        for number in range(loops):
            one_loop(f"{kind}-{number}", ours, reference, counts)
    counts.used, counts.discarded = ours.count("directions_used"), ours.count("directions_discarded")
    torch._dynamo.reset()
    return vars(counts)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "plain" else pytest.mark.campaign) for kind in LOOPS]
)
def test_random_loops(kind):
    counts = random_loops(kind, LOOPS[kind])
    assert counts["done"] == ACTIONS.keys()
    # The matrix of "tied" is read in two frames: only what is beside it can be updated from backward.
    assert counts["used"] > 0.2 * counts["compared"], counts
    assert counts["discarded"] > 0.05 * counts["compared"], counts


#: ranks, and each stage with the kinds that are hardest for it
ON_RANKS = [
    *((2, *each) for each in (("frozen", 3), ("break", 0), ("tied", 1), ("break", 2), ("pair", 3), ("plain", 1))),
    *((3, *each) for each in (("break", 1), ("plain", 3))),
]


#: ranks, kinds and stages where checks are read in the next step: a gradient that a graph has not made alone takes no
#: direction, and accuses nobody
NEXT_STEP = [(2, "tied", 1, 30), (2, "break", 3, 30)]


@pytest.mark.parametrize(
    ("world", "kind", "stage", "loops", "checks"),
    [
        (1, "break", 2, 8, "in_step"),
        (1, "tied", 2, 8, "in_step"),
        (1, "plain", 2, 12, "next_step"),
        *(pytest.param(*each, "next_step", marks=pytest.mark.full) for each in NEXT_STEP),
        *(
            pytest.param(*each, 30, "in_step", marks=pytest.mark.full if each == ON_RANKS[0] else pytest.mark.campaign)
            for each in ON_RANKS
        ),
    ],
)
def test_some_random_loops(ranks: RanksOf, world, kind, stage, loops, checks):
    for counts in ranks(world).run(random_loops, kind=kind, loops=loops, stage=stage, checks=checks):
        assert counts["loops"] == loops and counts["compared"] >= loops, counts


def test_the_loops_would_notice(monkeypatch):
    """A step that trusts every direction must fail."""
    from compile_muon.engine.step_checks import StepChecks

    monkeypatch.setattr(StepChecks, "speculated", lambda self: frozenset(self.names("ready")))
    with pytest.raises(AssertionError, match="seed plain-"):
        random_loops("plain", LOOPS["plain"])
