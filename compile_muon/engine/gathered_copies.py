"""Edits of gathered copies, which would be lost: noticed, and refused by name.

Outside compiled graphs ``module.weight`` is a copy, gathered for the reader. What is written into it
(``nn.init.zeros_(m.weight)``, ``m.weight.data.zero_()``, ``m.weight.data = x``) reaches no parameter. So a copy that is
read outside every forward, where people initialize and operate on models, is *handed out*: its content is
fingerprinted, and compared when it dies, or at the next forward, step, save or load if it lives on.

A module that writes to its weight inside its own forward (a renormalization, a clamp, a quantizer) does it every time.
So inside forwards the content is compared the first times alone, and after them only what PyTorch counts. In graphs
:func:`compile_muon.backend.muon_zero` looks for such writes.

A watch holds the copy's memory through an alias, and drops it with the copy. Only where something else still holds that
memory then (``m.weight.data`` outlives ``m.weight``), it is kept until the next copy is handed out, or the next check.
Nothing here waits for a device but :meth:`GatheredCopies.check`, and that only while something was handed out.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from compile_muon.engine.dtensors import edits_of
from compile_muon.errors import UnsupportedModelError, listed
from compile_muon.passes.fingerprint import fingerprint
from compile_muon.passes.torch_private import storage_holders, transforming, unobserved

__all__ = ["GatheredCopies", "in_forward", "written_in_forward"]

_CALL = nn.Module._call_impl.__code__

#: reads of a weight inside forwards whose copy is compared by content
_INSPECTED = 2


def in_forward() -> bool:
    """Whether some caller is the forward of a module."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _CALL:
            return True
        frame = frame.f_back
    return False


@dataclass(eq=False)
class _Watch:
    """One copy that was handed out.

    Attributes:
        name: of the parameter.
        copy: the tensor the reader got.
        alias: the same memory.
        before: its fingerprint then; None where only the edits that PyTorch counts are looked at.
        version: edits PyTorch had counted.
        holders: of the memory, while the copy and nothing else of the reader's holds it.
        compared: whether a forward has looked at the content.
    """

    name: str
    copy: weakref.ref[Tensor]
    alias: Tensor
    before: Tensor | None
    version: int
    holders: int
    compared: bool = False

    @classmethod
    def over(cls, name: str, copy: Tensor, *, content: bool) -> _Watch:
        """Begin to watch ``copy``."""
        # Modes of the reader's are not to see this: selective checkpointing counts what a region computes.
        with unobserved():
            alias = copy.detach()
            before = fingerprint([alias]) if content else None
        return cls(name, weakref.ref(copy), alias, before, edits_of(alias), storage_holders(alias))

    def differs(self) -> Tensor | bool:
        """Whether the memory is not what it was; not read here."""
        if self.before is None:
            return edits_of(self.alias) != self.version
        with unobserved():
            return (fingerprint([self.alias]) != self.before).any()

    def redirected(self) -> bool:
        """Whether the copy, which lives, was given other memory: ``m.weight.data = x``."""
        copy = self.copy()
        return copy is not None and copy.untyped_storage()._cdata != self.alias.untyped_storage()._cdata


class GatheredCopies:
    """The gathered copies that are out, for all parameters of one optimizer.

    Attributes:
        whole: names of parameters that are whole and plain for the moment (``full_parameters``).
    """

    def __init__(self) -> None:
        self.whole: set[str] = set()
        self._watches: dict[int, _Watch] = {}
        self._edited: dict[str, Tensor | bool] = {}
        self._written: dict[str, Tensor | bool] = {}
        self._inspected: dict[str, int] = {}
        self._outlived: list[_Watch] = []
        self._asked: dict[str, None] = {}
        self._numbers = itertools.count()

    def __deepcopy__(self, memo: dict[int, Any]) -> GatheredCopies:
        """Copies of the first model's weights are none of a copied model's business, once they are not edited.

        Raises:
            UnsupportedModelError: one was, and the copied model would not have it.
        """
        self.check(thoroughly=True)
        return memo.setdefault(id(self), GatheredCopies())

    def read(self, name: str, copy: Tensor, *, inside: bool) -> None:
        """``copy`` of the parameter ``name`` was gathered by eager code: watch it.

        Args:
            copy: a whole weight that nothing else holds.
            inside: whether a forward reads it.
        Raises:
            UnsupportedModelError: inside a forward, an earlier copy was edited.
        """
        if inside:
            self.check()
        else:
            self._sweep()
        if type(copy) is not Tensor or copy.device.type == "meta" or not copy.numel():
            return
        if inside:
            seen = self._inspected[name] = self._inspected.get(name, 0) + 1
            watch = _Watch.over(name, copy, content=seen <= _INSPECTED)
            weakref.finalize(copy, _died, weakref.ref(self), GatheredCopies._close_forward, watch).atexit = False
            return
        number = next(self._numbers)
        self._watches[number] = _Watch.over(name, copy, content=True)
        weakref.finalize(copy, _died, weakref.ref(self), GatheredCopies._close, number).atexit = False

    def asked_in_vain(self, name: str) -> None:
        """A backward was asked for the gradient of a copy of the parameter ``name``, which forward did not read."""
        self._asked[name] = None

    def gave(self, name: str, value: object) -> bool:
        """Whether ``value`` is a copy of the parameter ``name`` that was handed out."""
        return any(watch.name == name and watch.copy() is value for watch in self._watches.values())

    def check(self, names: Container[str] | None = None, *, thoroughly: bool = False) -> None:
        """Raise if a copy was edited since it was handed out. The edit is forgotten then.

        Args:
            names: of the parameters to look at; default: all.
            thoroughly: compare the content of copies that are still held each time (as ``step()`` does), not only the
                first time and after edits that PyTorch counts.
        Raises:
            UnsupportedModelError: naming the parameter.
        """
        if asked := [name for name in self._asked if names is None or name in names]:
            self._asked.clear()
            raise UnsupportedModelError(
                f"{listed(asked)}: backward(inputs=...) was given a gathered copy, which forward did not read, so it "
                "has no gradient; give it the parameter, dict(model.named_parameters())[name], or ask "
                "torch.autograd.grad(loss, module.weight)"
            )
        self._end_of_forwards()
        if not self._watches and not self._edited and not self._written:
            return
        self._sweep()
        for watch in list(self._watches.values()):
            if names is not None and watch.name not in names:
                continue
            if thoroughly or not watch.compared or edits_of(watch.alias) != watch.version:
                watch.compared, watch.version = True, edits_of(watch.alias)
                _note(self._edited, watch.name, watch.redirected() or watch.differs())
        if written := _taken(self._written, names):
            raise written_in_forward(written)
        if edited := _taken(self._edited, names):
            for number, watch in list(self._watches.items()):
                if watch.name in edited:
                    del self._watches[number]
            raise _edited_copy(edited)

    def _sweep(self) -> None:
        """Let go of memory whose copy has died since, and that nothing else holds any more."""
        for number, watch in list(self._watches.items()):
            if watch.copy() is None:
                _note(self._edited, watch.name, watch.differs())
                if storage_holders(watch.alias) < watch.holders:
                    self._watches.pop(number, None)

    def _close(self, number: int) -> None:
        """The copy is dying; its own hold on the memory still counts."""
        watch = self._watches.pop(number, None)
        if watch is None:
            return
        holders = storage_holders(watch.alias)
        if holders > watch.holders:
            self._watches[number] = watch
        else:  # fewer, where the copy holds other memory now: `m.weight.data = x`
            _note(self._edited, watch.name, holders < watch.holders or watch.differs())

    def _close_forward(self, watch: _Watch) -> None:
        """The same of a copy that was read inside a forward."""
        holders = storage_holders(watch.alias)
        if holders > watch.holders and watch.before is not None:
            self._outlived.append(watch)  # by `m.weight.data`, say, which is about to be edited
        else:
            _note(self._written, watch.name, holders < watch.holders or watch.differs())

    def _end_of_forwards(self) -> None:
        """What outlived copies that were read inside forwards has been edited by now, if ever."""
        outlived, self._outlived = self._outlived, []
        for watch in outlived:
            _note(self._written, watch.name, watch.differs())


def _note(noted: dict[str, Tensor | bool], name: str, edited: Tensor | bool) -> None:
    before = noted.get(name, False)
    if before is True or edited is False:
        return
    if before is False or edited is True:
        noted[name] = edited
        return
    with unobserved():
        noted[name] = before | edited


def _taken(noted: dict[str, Tensor | bool], names: Container[str] | None) -> list[str]:
    """Those of ``names`` that were edited. Waits for the device, and forgets them."""
    with unobserved():
        return [name for name in list(noted) if (names is None or name in names) and bool(noted.pop(name))]


def _died(owner: weakref.ref[GatheredCopies], close: Callable[[GatheredCopies, Any], None], of: int | _Watch) -> None:
    """Finalizer of a copy: anywhere, at any time, so it must neither raise nor show in a graph that is being traced."""
    gathered = owner()
    if gathered is not None and not transforming():  # which would wrap what is compared
        with contextlib.suppress(Exception), unobserved():
            close(gathered, of)


def _edited_copy(names: Sequence[str]) -> UnsupportedModelError:
    """For copies of weights that were written to."""
    merging = "; to merge adapters use compile_muon.merge_adapters(model)" if "peft" in sys.modules else ""
    return UnsupportedModelError(
        f"{listed(names)}: a gathered copy of the weight was edited, which the sharded parameter does not see and "
        "training ignores; edit inside `with compile_muon.full_parameters(model, write=True):`, write to the parameter "
        f"of model.named_parameters() itself, or initialize before MuonZero{merging}"
    )


def written_in_forward(names: Sequence[str]) -> UnsupportedModelError:
    """For weights that a module writes to while it runs."""
    return UnsupportedModelError(
        f"{listed(names)}: its module writes to the weight inside forward (max_norm, a clamp, a quantizer), which is a "
        "gathered copy there and loses the edit; compute with a new tensor (w = f(self.weight)), or write to the "
        "parameter of model.named_parameters() between steps"
    )
