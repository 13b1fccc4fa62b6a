"""Edits of gathered copies, which would be lost: noticed, and refused by name.

Outside compiled graphs ``module.weight`` is a copy, gathered for the reader. What is written into it
(``nn.init.zeros_(m.weight)``, ``m.weight.data.zero_()``, ``m.weight.data = x``) reaches no parameter. So a copy that is
read outside every forward, where people initialize and operate on models, is *handed out*: its content is
fingerprinted, and compared when it dies, or at the next forward or step if it lives on.

A watch holds the copy's memory through an alias, and drops it with the copy. Only where something else still holds that
memory then (``m.weight.data`` outlives ``m.weight``), it is kept until the next copy is handed out, or the next check.
Nothing here waits for a device but :meth:`Handouts.check`, and that only while something was handed out.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compile_muon.errors import UnsupportedModelError, listed
from compile_muon.passes.fingerprint import fingerprint
from compile_muon.passes.torch_private import storage_holders, unobserved

__all__ = ["Handouts"]

_CALL = nn.Module._call_impl.__code__


def _in_forward() -> bool:
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
        before: its fingerprint then.
        version: edits PyTorch had counted.
        holders: of the memory, while the copy and nothing else of the reader's holds it.
        compared: whether a forward has looked at the content.
    """

    name: str
    copy: weakref.ref[Tensor]
    alias: Tensor
    before: Tensor
    version: int
    holders: int
    compared: bool = False

    def differs(self) -> Tensor:
        """Whether the memory is not what it was; not read here."""
        return (fingerprint([self.alias]) != self.before).any()

    def redirected(self) -> bool:
        """Whether the copy, which lives, was given other memory: ``m.weight.data = x``."""
        copy = self.copy()
        return copy is not None and copy.untyped_storage()._cdata != self.alias.untyped_storage()._cdata


class Handouts:
    """The gathered copies that are out, for all parameters of one optimizer.

    Attributes:
        whole: names of parameters that are whole and plain for the moment (``full_parameters``).
    """

    def __init__(self) -> None:
        self.whole: set[str] = set()
        self._watches: dict[int, _Watch] = {}
        self._edited: dict[str, Tensor | bool] = {}
        self._numbers = itertools.count()

    def __deepcopy__(self, memo: dict[int, Any]) -> Handouts:
        """Copies of the first model's weights are none of a copied model's business."""
        return memo.setdefault(id(self), Handouts())

    def read(self, name: str, copy: Tensor) -> None:
        """``copy`` of the parameter ``name`` was gathered by eager code: watch it, or check, inside a forward.

        Args:
            copy: a whole weight that nothing else holds.
        Raises:
            UnsupportedModelError: inside a forward, an earlier copy was edited.
        """
        if _in_forward():
            self.check()
            return
        self._sweep()
        if type(copy) is not Tensor or copy.device.type == "meta" or not copy.numel():
            return
        with torch.no_grad():
            alias = copy.detach()
            before = fingerprint([alias])
        number = next(self._numbers)
        watch = _Watch(name, weakref.ref(copy), alias, before, alias._version, storage_holders(alias))
        self._watches[number] = watch
        weakref.finalize(copy, _died, weakref.ref(self), number).atexit = False

    def check(self, *, thoroughly: bool = False) -> None:
        """Raise if a copy was edited since it was handed out. The edit is forgotten then.

        Args:
            thoroughly: compare the content of copies that are still held each time (as ``step()`` does), not only the
                first time and after edits that PyTorch counts.
        Raises:
            UnsupportedModelError: naming the parameter.
        """
        if not self._watches and not self._edited:
            return
        self._sweep()
        for watch in list(self._watches.values()):
            if thoroughly or not watch.compared or watch.alias._version != watch.version:
                watch.compared, watch.version = True, watch.alias._version
                self._note(watch.name, watch.redirected() or watch.differs())
        names = [name for name, edited in self._edited.items() if bool(edited)]
        self._edited.clear()
        if names:
            edited = {name: None for name in names}
            for number, watch in list(self._watches.items()):
                if watch.name in edited:
                    del self._watches[number]
            raise edited_copy_error(names)

    def _note(self, name: str, edited: Tensor | bool) -> None:
        before = self._edited.get(name, False)
        if before is True or edited is False:
            return
        self._edited[name] = edited if before is False or edited is True else before | edited

    def _sweep(self) -> None:
        """Let go of memory whose copy has died since, and that nothing else holds any more."""
        for number, watch in list(self._watches.items()):
            if watch.copy() is None:
                with torch.no_grad():
                    self._note(watch.name, watch.differs())
                if storage_holders(watch.alias) < watch.holders:
                    self._watches.pop(number, None)

    def _close(self, number: int) -> None:
        """The copy is dying; its own hold on the memory still counts."""
        watch = self._watches.get(number)
        if watch is None:
            return
        holders = storage_holders(watch.alias)
        if holders < watch.holders:
            self._note(watch.name, True)  # the copy holds other memory now: `m.weight.data = x`
        elif holders == watch.holders:
            self._note(watch.name, watch.differs())
        if holders <= watch.holders:
            del self._watches[number]


def _died(owner: weakref.ref[Handouts], number: int) -> None:
    """Finalizer of a copy: anywhere, at any time, so it must neither raise nor show in a graph that is being traced."""
    handouts = owner()
    if handouts is None:
        return
    try:
        with unobserved():
            handouts._close(number)
    except Exception:
        handouts._watches.pop(number, None)


def edited_copy_error(names: Sequence[str]) -> UnsupportedModelError:
    """For copies of weights that were written to."""
    return UnsupportedModelError(
        f"{listed(names)}: a gathered copy of the weight was edited, which the sharded parameter does not see and "
        "training ignores; edit inside `with compile_muon.full_parameters(model, write=True):`, write to the parameter "
        "of model.named_parameters() itself, or initialize before MuonZero"
    )
