"""An optimizer of whole matrices over FSDP2's shards: gathered, updated, scattered, one matrix per process at a time.

In: parameters as DTensors whose rows are split over a group of processes, with gradients. A round has as many matrices
as the group has processes: one exchange brings all rows of the k-th matrix, of its gradient and of its moments to the
k-th process, which computes the update as ``single`` does, bit by bit; a second exchange brings the rows back. So no
process holds more than one whole matrix, none computes what another does, and moments are sharded between updates as
weights are. Traffic of an update with one moment: 5 values per element of a matrix (FSDP itself: 3 in each iteration).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor, nn

from unigen_ds.backends.torch_optimizer import local_part
from unigen_ds.core.shards import STEP
from unigen_ds.optim.optimizer_state import OptimizerState


@dataclass(frozen=True)
class _Matrix:
    master: nn.Parameter
    group: int
    """Number of its parameter group."""

    def rows(self, rank: int, size: int) -> tuple[int, int]:
        """First and last (exclusive) row that a process holds: equal parts, the last ones less, as in FSDP2."""
        num_rows = self.master.shape[0]
        part = -(-num_rows // size)
        return min(rank * part, num_rows), min((rank + 1) * part, num_rows)

    def numel(self, rank: int, size: int) -> int:
        first, last = self.rows(rank, size)
        return (last - first) * self.master.shape[1]


class WholeMatrices:
    """Steps ``optimizer``, all parameters of which are sharded matrices.

    Args:
        optimizer: its state holds DTensors that are split like the parameters, also those which are made here.
        kept: what it keeps for each matrix.
        group: the processes that share one copy of the model; None: each process has a copy of its own.
        device: where matrices are computed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kept: OptimizerState,
        *,
        group: td.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._optimizer, self._kept, self._group, self._device = optimizer, kept, group, device
        self._moments = sorted((kept.kinds or frozenset()) - {STEP})
        self._counts = int(STEP in (kept.kinds or ()))
        self._rank, self._size = (0, 1) if group is None else (td.get_rank(group), td.get_world_size(group))
        matrices = [
            _Matrix(master, number)
            for number, options in enumerate(optimizer.param_groups)
            for master in options["params"]
        ]
        matrices.sort(
            key=lambda matrix: -matrix.master.numel()
        )  # similar ones in one round; the same order on all ranks
        self._rounds = [matrices[i : i + self._size] for i in range(0, len(matrices), self._size)]

    @torch.no_grad()
    def step(self) -> None:
        """One update. Collective."""
        for matrices in self._rounds:
            idle = [self._empty()] * (self._size - len(matrices))
            mine = matrices[self._rank] if self._rank < len(matrices) else None
            received = self._exchange(
                [*map(self._rows_of, matrices), *idle],
                [self._length(mine, rank, 2 + len(self._present(mine))) if mine else 0 for rank in range(self._size)],
            )
            updated = self._updated(mine, received) if mine else [self._empty()] * self._size
            results = self._exchange(
                updated,
                [self._length(matrix, self._rank, 1 + len(self._moments)) for matrix in matrices] + [0] * len(idle),
            )
            for matrix, result in zip(matrices, results, strict=False):
                self._store(matrix, result)

    def _state(self, matrix: _Matrix) -> dict[str, Any]:
        return self._optimizer.state.get(matrix.master, {})

    def _present(self, matrix: _Matrix) -> list[str]:
        """The moments that exist already: none before the first update. The same on all ranks."""
        return [kind for kind in self._moments if self._state(matrix).get(kind) is not None]

    def _length(self, matrix: _Matrix, rank: int, num: int) -> int:
        """Elements of ``num`` tensors' rows on a process, and the step count."""
        return num * matrix.numel(rank, self._size) + self._counts

    def _empty(self) -> Tensor:
        return torch.empty(0, device=self._device)

    def _count(self, value: Any) -> list[Tensor]:
        return [torch.full((1,), float(value), device=self._device)] if self._counts else []

    def _rows_of(self, matrix: _Matrix) -> Tensor:
        """This process's rows of a matrix, of its gradient and of its moments as one tensor, and the step count."""
        state = self._state(matrix)
        tensors = [matrix.master, matrix.master.grad, *(state[kind] for kind in self._present(matrix))]
        pieces = [local_part(tensor).reshape(-1).to(self._device) for tensor in tensors]
        assert pieces[0].numel() == matrix.numel(self._rank, self._size), "rows are not split as FSDP2 splits them"
        return torch.cat([*pieces, *self._count(state.get(STEP, 0.0))])

    def _exchange(self, sent: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """The k-th of ``sent`` goes to the k-th process. Returns what each process has sent here."""
        if self._size == 1:
            return list(sent)
        received = torch.empty(sum(lengths), device=self._device)
        td.all_to_all_single(received, torch.cat(list(sent)), list(lengths), [t.numel() for t in sent], self._group)
        return list(received.split(list(lengths)))

    def _updated(self, matrix: _Matrix, received: Sequence[Tensor]) -> list[Tensor]:
        """Updates a whole matrix as ``single`` does. Returns the new rows of each process."""
        present = self._present(matrix)
        num = 2 + len(present)
        parts = [
            piece[: piece.numel() - self._counts].view(num, matrix.numel(rank, self._size))
            for rank, piece in enumerate(received)
        ]
        weight, gradient, *moments = (
            torch.cat([part[index] for part in parts]).view(matrix.master.shape) for index in range(num)
        )
        whole = nn.Parameter(weight)
        whole.grad = gradient
        state: dict[str, Any] = dict(zip(present, moments, strict=True))
        if STEP in self._state(matrix):
            state[STEP] = self._step_count(matrix, float(received[0][-1]))
        state = self._step_alone(matrix.group, whole, state)
        tensors = [whole.detach(), *(state[kind] for kind in self._moments)]
        ranges = [matrix.rows(rank, self._size) for rank in range(self._size)]
        return [
            torch.cat([*(tensor[a:b].reshape(-1) for tensor in tensors), *self._count(state.get(STEP, 0.0))])
            for a, b in ranges
        ]

    def _step_count(self, matrix: _Matrix, value: float) -> Any:
        return self._kept.make_step(value, matrix.master, self._optimizer.param_groups[matrix.group])

    def _step_alone(self, group: int, whole: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's own step for one whole parameter instead of its sharded ones. Returns its new state."""
        optimizer = self._optimizer
        kept, sharded = optimizer.state, [options["params"] for options in optimizer.param_groups]
        try:
            optimizer.state = defaultdict(dict, {whole: state} if state else {})
            for number, options in enumerate(optimizer.param_groups):
                options["params"] = [whole] if number == group else []
            optimizer.step()
            return dict(optimizer.state[whole])
        finally:
            optimizer.state = kept
            for options, parameters in zip(optimizer.param_groups, sharded, strict=True):
                options["params"] = parameters

    def _store(self, matrix: _Matrix, result: Tensor) -> None:
        """Copy this process's new rows into the weights and moments."""
        master, state = matrix.master, self._optimizer.state[matrix.master]
        targets: list[Tensor] = [master]
        for kind in self._moments:
            if state.get(kind) is None:
                state[kind] = torch.zeros_like(master)
            targets.append(state[kind])
        new = result[: result.numel() - self._counts].view(len(targets), matrix.numel(self._rank, self._size))
        for target, rows in zip(targets, new, strict=True):
            local = local_part(target)
            local.copy_(rows.view(local.shape))
        if self._counts:
            state[STEP] = self._step_count(matrix, float(result[-1]))
