"""Accelerate where ranks share a sequence: one batch for a whole group, and one copy of its results in metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object, recursively_apply
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from compile_muon.integrations.common import refuse
from compile_muon.mesh import DataPlace


def give_same_batches(accelerator: Accelerator, places: Sequence[DataPlace]) -> None:
    """Patch ``prepare_data_loader`` and ``gather_for_metrics`` of `accelerator`, if ranks share data.

    `places`: the data of each rank. Loaders give all ranks of a group the same batches; ``gather`` and ``reduce`` still
    cover all ranks.
    """
    if len(places) != places[0].world:
        shared = _Shared(accelerator, places)
        accelerator.prepare_data_loader = shared.prepare_data_loader
        accelerator.gather_for_metrics = shared.gather_for_metrics


class _Shared:
    """Replacements of methods of one accelerator."""

    def __init__(self, accelerator: Accelerator, places: Sequence[DataPlace]) -> None:
        self._accelerator = accelerator
        self._ranks = len(places)
        self._firsts = [list(places).index(place) for place in sorted(set(places))]  # the first rank of each group
        self._own = places[accelerator.process_index]
        self._gather, self._gather_for_metrics = accelerator.gather, accelerator.gather_for_metrics

    def prepare_data_loader(
        self, data_loader: DataLoader, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a loader as Accelerate does, for the data of this rank's group.

        Raises a ConfigError if it is prepared already, or ``dispatch_batches`` would give each rank a part of a batch.
        """
        accelerator, kind = self._accelerator, type(data_loader).__name__
        is_prepared = getattr(data_loader, "_is_accelerate_prepared", False)
        problem = "gives each process batches or parts of its own, and ranks share a sequence here"
        refuse([
            (is_prepared, "data_loader", kind, problem, "prepare it with the sharded model, or later"),
            (accelerator.dispatch_batches, "dispatch_batches", True, problem, "leave it out"),
        ])  # fmt: skip
        prepared = prepare_data_loader(
            data_loader,
            accelerator.device,
            num_processes=self._own.world,
            process_index=self._own.rank,
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as Accelerate does, from the first rank of each group."""
        if use_gather_object or not all(isinstance(leaf, Tensor) for leaf in tree_leaves(input_data)):
            by_rank = gather_object([input_data])
            objects = [thing for rank in self._firsts for thing in by_rank[rank]]
            state = self._accelerator.gradient_state
            return objects[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else objects
        self._accelerator.gather = lambda tensor: recursively_apply(self._once, self._gather(tensor))
        try:
            return self._gather_for_metrics(input_data)
        finally:
            self._accelerator.gather = self._gather

    def _once(self, gathered: Tensor) -> Tensor:
        rows = gathered.shape[0] // self._ranks
        return gathered.unflatten(0, (self._ranks, rows))[self._firsts].flatten(0, 1)
