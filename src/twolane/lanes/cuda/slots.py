"""The device's state of every slot: its last token, its pages and its sampling parameters.

The engine names slots and pages; here they become rows of device tensors, uploaded when they
change and never waited for. A slot is named by one lane at a time (the engine orders launches
that name it), so both lanes may write here without a lock.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twolane.kernels.sampling import MAX_BANNED, new_params, pack_params
from twolane.lanes.slot_table import SlotTable, named_by
from twolane.lanes.work import Sampling, SlotUpdate, Work

Ints = npt.NDArray[np.int32]


class Slots:
    """Device tensors by slot, one more than there are slots: the last one pads batches.

    Args:
        slots: the most requests at a time.
        max_pages: Largest number of pages of one sequence.
        device: The device of the tensors.
        tables: Number of tables of each slot (`model/page_layout.py`).
    """

    def __init__(self, slots: int, max_pages: int, device: torch.device, tables: int = 1) -> None:
        self.padding = slots
        self.host = SlotTable(slots)
        """State that launches have set, part of which may not be on the device yet."""
        shape = tables, slots + 1, max_pages
        self.tables = torch.zeros(shape, dtype=torch.int32, device=device)
        """Physical pages of each slot's sequence in each table, in order."""
        self.last_token = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.adapters = torch.full((slots + 1,), -1, dtype=torch.int32, device=device)
        """The adapter slot of each slot's request; -1: none, as in the slot that pads."""
        self.params = new_params(slots + 1, device)
        """Sampling parameters of each slot; see `kernels.sampling`."""
        self._max_pages = max_pages
        self._sent = [0] * slots
        """Pages of each slot that were uploaded."""
        self._sent_adapters = [-1] * slots
        self._stale: dict[int, bool] = {}
        """Slots of which something was not uploaded, and whether it is their sampling, too."""

    def take(self, updates: Iterable[SlotUpdate]) -> None:
        """Note a launch's updates; `upload` sends them to the device."""
        for update in updates:
            if not update.first:
                self._sent[update.slot] = 0
            resampled = update.sampling is not None
            self._stale[update.slot] = resampled or self._stale.get(update.slot, False)
        self.host.take(updates)

    def upload(self, slots: Iterable[int]) -> None:
        """Upload, on the current stream, what the device lacks of these slots."""
        places: list[Ints] = []
        pages: list[int] = []
        sampling: list[tuple[int, Sampling]] = []
        adapters: list[tuple[int, int]] = []
        for slot in slots:
            resampled = self._stale.pop(slot, None)
            if resampled is None:
                continue
            count, sent = len(self.host.pages[slot]), self._sent[slot]
            for table in range(len(self.tables) if sent < count else 0):
                first = (table * (self.padding + 1) + slot) * self._max_pages
                places.append(np.arange(first + sent, first + count, dtype=np.int32))
                pages += self.host.table(slot, table)[sent:]
            self._sent[slot] = count
            if (adapter := self.host.adapters[slot]) != self._sent_adapters[slot]:
                self._sent_adapters[slot] = adapter
                adapters.append((slot, adapter))
            if resampled:
                sampling.append((slot, self.host.sampling_of(slot)))
        if pages:
            both = np.concatenate([*places, np.asarray(pages, dtype=np.int32)])
            sent_now = upload(both, self.tables.device)
            where, what = sent_now.chunk(2)
            self.tables.view(-1).index_copy_(0, where.long(), what)
        if adapters:
            sent_now = upload(np.array(adapters, dtype=np.int32).T, self.adapters.device)
            where, what = sent_now.chunk(2)
            self.adapters.index_copy_(0, where.long(), what)
        if sampling:
            self._update_params(sampling)

    def adapted(self, work: Work) -> bool:
        """Return whether a request of the work has an adapter."""
        return any(self.host.adapters[slot] >= 0 for slot in named_by(work))

    def _update_params(self, sampling: Sequence[tuple[int, Sampling]]) -> None:
        slots = np.array([slot for slot, _ in sampling], dtype=np.int32)
        words = np.stack([_packed(each) for _, each in sampling])
        sent = upload(np.concatenate([words.view(np.int32).reshape(-1), slots]), self.params.device)
        count = len(sampling)
        rows = sent[:-count].view(torch.int64).view(count, -1)
        self.params.index_copy_(0, sent[-count:].long(), rows)


def _packed(sampling: Sampling) -> npt.NDArray[np.int64]:
    params = sampling.params
    limit = sampling.prompt_tokens + params.min_tokens
    banned = sampling.banned(limit - 1)
    return pack_params(
        temperature=0.0 if params.greedy else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=sampling.seed,
        limit=limit,
        banned=banned if len(banned) <= MAX_BANNED else (),  # more: `LogitProcessors` bans them
    )


def upload(values: Ints, device: torch.device, into: Tensor | None = None) -> Tensor:
    """Return the values on the device, int32, in order on the current stream, without waiting.

    PyTorch keeps the pinned copy until the stream has read it.
    """
    pinned = torch.empty(values.size, dtype=torch.int32, pin_memory=device.type == "cuda")
    pinned.numpy()[:] = values.reshape(-1)
    if into is None:
        return pinned.to(device, non_blocking=True)
    return into[: values.size].copy_(pinned, non_blocking=True)
