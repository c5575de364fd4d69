"""What the device keeps of every slot: its last token, its pages and how it samples.

The engine names slots and pages; here they become rows of device tensors, uploaded when they
change and never waited for. A slot is named by one lane at a time (the engine orders launches
that name it), so both lanes may write here without a lock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from twolane.kernels.sampling import MAX_BANNED, new_params, pack_params
from twolane.lanes.work import DecodeRow, PromptRow, Sampling

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Known:
    """What was uploaded for a slot."""

    pages: Sequence[int] = ()
    """The list itself: another one is another allocation."""
    count: int = 0
    sampling: Sampling | None = None


class Slots:
    """Device tensors by slot, one more than there are slots: the last one pads batches.

    Args:
        slots: the most requests at a time.
        max_pages: of one sequence.
        device: where the tensors live.
    """

    def __init__(self, slots: int, max_pages: int, device: torch.device) -> None:
        self.padding = slots
        self.tables = torch.zeros((slots + 1, max_pages), dtype=torch.int32, device=device)
        """Physical pages of each slot's sequence, in order."""
        self.last_token = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.params = new_params(slots + 1, device)
        """How each slot's tokens are chosen; see `kernels.sampling`."""
        self._known = [_Known() for _ in range(slots)]
        self._max_pages = max_pages

    def update(self, rows: Iterable[PromptRow | DecodeRow]) -> None:
        """Upload, on the current stream, what these rows have that the device lacks."""
        places: list[Ints] = []
        pages: list[int] = []
        sampling: list[tuple[int, Sampling]] = []
        for row in rows:
            known = self._known[row.slot]
            if known.pages is not row.pages:
                known.pages, known.count = row.pages, 0
            count = len(row.pages)
            if known.count < count:
                first = row.slot * self._max_pages
                places.append(np.arange(first + known.count, first + count, dtype=np.int32))
                pages += row.pages[known.count : count]
                known.count = count
            if row.sampling is not None and known.sampling is not row.sampling:
                known.sampling = row.sampling
                sampling.append((row.slot, row.sampling))
        if pages:
            both = np.concatenate([*places, np.asarray(pages, dtype=np.int32)])
            sent = upload(both, self.tables.device)
            where, what = sent.chunk(2)
            self.tables.view(-1).index_copy_(0, where.long(), what)
        if sampling:
            self._update_params(sampling)

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


def upload(values: Ints, device: torch.device, into: torch.Tensor | None = None) -> torch.Tensor:
    """The values on the device, int32, in order on the current stream; the host does not wait.

    PyTorch keeps the pinned copy until the stream has read it.
    """
    pinned = torch.empty(values.size, dtype=torch.int32, pin_memory=device.type == "cuda")
    pinned.numpy()[:] = values.reshape(-1)
    if into is None:
        return pinned.to(device, non_blocking=True)
    return into[: values.size].copy_(pinned, non_blocking=True)
