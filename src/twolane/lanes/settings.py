"""Settings that lanes need: the model, the device, and the sizes."""

import contextlib
import re
from collections.abc import Iterator

import msgspec
import torch

from twolane.common.errors import FieldError
from twolane.devices import DeviceSettings, OnProgress
from twolane.model.decoder import Weights
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights
from twolane.model.page_layout import PageLayout
from twolane.model.spec import ModelSpec

TRIED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
"""PyTorch's message about memory that it could not allocate."""


class LaneSizes(msgspec.Struct, frozen=True):
    """Sizes that lanes are made for."""

    pages: int
    """Pages of the KV pool."""
    page_size: int
    """Tokens in a page."""
    slots: int
    """The most requests at a time."""
    max_model_len: int
    """The most tokens of one request."""
    snapshots: int = 0
    """Snapshots of states of linear attention, whose ids follow the slots."""
    window_tables: int = 0
    """Tables of layers with a window, which have pages of their own (`PageLayout.of`); 0: all
    layers share one table."""
    graphs_later: bool = False
    """Whether graphs that larger ones can stand in for are captured while nothing runs, so that the
    lanes are ready sooner."""

    def layout(self, spec: ModelSpec) -> PageLayout:
        """Return the pages of a model's layers."""
        return PageLayout.of(spec) if self.window_tables else PageLayout.whole(spec)

    @property
    def tokens(self) -> int:
        """Tokens that the KV pool holds in all layers."""
        return self.pages // (1 + self.window_tables) * self.page_size

    @property
    def longest(self) -> int:
        """Tokens of the longest request that it holds."""
        return min(self.tokens, self.max_model_len)


def check_states_stay(settings: DeviceSettings) -> None:
    """Refuse a model with states where another process decodes than the one that reads prompts.

    Raises:
        FieldError: a request of the model keeps a state.
    """
    if resolve(settings.model, settings.load_format).spec().state:
        raise FieldError("disaggregated", "does not carry the states of linear attention yet")


def without_adapters(spec: ModelSpec) -> str | None:
    """Return why LoRA adapters of a model are not served; None: they are."""
    if spec.state is not None:
        return "adapters of models with linear attention are not served yet"
    return None


@contextlib.contextmanager
def memory_errors(settings: DeviceSettings) -> Iterator[None]:
    """Say what to set where a GPU has too little memory to start.

    Raises:
        FieldError: it has.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        found = TRIED.search(str(error))
        what = f" for {found[1]} more" if found else ""
        raise FieldError(
            "gpu_memory_utilization",
            f"is {settings.gpu_memory_utilization:g}, and CUDA ran out of memory{what} at the "
            "start: use --quantization or more GPUs (--tensor-parallel-size), end other programs "
            "on the GPU, or, if the weights fit, lower it",
        ) from error


def load_shard(
    settings: DeviceSettings, device: str, progress: OnProgress, rank: int = 0
) -> tuple[ModelSpec, Weights]:
    """Load one rank's part of the weights; return it with the whole model's shape.

    Raises:
        ValueError: a setting is wrong, or the model.
    """
    return load_weights(
        resolve(settings.model, settings.load_format),
        dtype=settings.dtype,
        load_format=settings.load_format,
        quantization=settings.quantization,
        max_positions=settings.max_positions,
        seed=settings.seed,
        router_skew=settings.router_skew,
        device=device,
        progress=progress,
        rank=rank,
        ranks=settings.tensor_parallel_size,
        eight_bits=settings.dtype == "auto",
    )
