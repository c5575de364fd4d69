"""The state of every slot by the launches so far: its pages and how it samples."""

from collections.abc import Iterable

from msgspec.structs import replace

from twolane.lanes.work import HybridWork, Sampling, SlotUpdate, Work


class SlotTable:
    """The pages, sampling and adapters of all slots, on the host.

    Launches that name one slot run in order (the engine sees to that), so two lanes may take
    updates at the same time without a lock.

    Args:
        slots: the most requests at a time.
    """

    def __init__(self, slots: int) -> None:
        self.pages: list[list[int]] = [[] for _ in range(slots)]
        """Physical pages of each slot's sequence, in order."""
        self.windows: list[list[list[int]]] = [[] for _ in range(slots)]
        """Those of each slot's further tables, which layers with a window read."""
        self.sampling: list[Sampling | None] = [None] * slots
        self.adapters = [-1] * slots
        """The adapter slot of each slot's request; -1: none."""

    def take(self, updates: Iterable[SlotUpdate]) -> None:
        """Note a launch's updates.

        Raises:
            ValueError: new pages do not follow the slot's last one.
        """
        for update in updates:
            pages = self.pages[update.slot]
            if not update.first:
                self.pages[update.slot] = list(update.pages)
                self.windows[update.slot] = [list(pages) for pages in update.windows]
                self.adapters[update.slot] = update.adapter
            elif update.first == len(pages):
                pages.extend(update.pages)
                # Without pages there are none of the further tables either.
                for table, more in zip(self.windows[update.slot], update.windows, strict=False):
                    table.extend(more)
            else:
                raise ValueError(
                    f"slot {update.slot} has {len(pages)} pages, and is told those from "
                    f"{update.first} on"
                )
            if update.sampling is not None:
                self.sampling[update.slot] = update.sampling

    def table(self, slot: int, table: int) -> list[int]:
        """Return the pages of one of a slot's tables (`model/page_layout.py`)."""
        return self.windows[slot][table - 1] if table else self.pages[slot]

    def sampling_of(self, slot: int) -> Sampling:
        """Return the sampling of a slot, which an update has set."""
        sampling = self.sampling[slot]
        assert sampling is not None
        return sampling


class PendingSlotUpdates:
    """Updates that wait for the first launch that names their slot.

    They are for callers that drive lanes without an engine and launch the same work repeatedly.
    """

    def __init__(self) -> None:
        self._updates: dict[int, SlotUpdate] = {}

    def add(self, update: SlotUpdate) -> None:
        """Attach this update to the next launch that names its slot."""
        self._updates[update.slot] = update

    def attach(self, work: Work) -> Work:
        """Return the work with the pending updates of its slots."""
        slots = [self._updates.pop(slot) for slot in named_by(work) if slot in self._updates]
        return replace(work, slots=(*work.slots, *slots)) if slots else work


def named_by(work: Work) -> list[int]:
    """Return the slots of a launch's rows."""
    if isinstance(work, HybridWork):
        return [row.slot for row in work.decode] + [row.slot for row in work.prompts]
    return [row.slot for row in work.rows]
