"""The attention-aware roofline of DuetServe (§4.1): analytical, from two measured curves.

    t_token     = max(F / Π(S), B / HBM(S))            of every linear operator and the small ones
    t_attention = Σ over requests of max(F / Π(S), B / HBM(S))
    t_allreduce = 2(N-1)·α + 2(N-1)·B / (N·NVLink) + N(N-1)·B / Π(S)
    t_total     = layers · t_block + t_classifier

Π(S) and HBM(S) are the compute and the bandwidth reached on S units (§4.2), `sweep.py`: by a copy
and a matrix product where the profile has them, else by launches that serve. `serving-roofline`
always takes the latter. Nothing is fitted beyond them, and the other lane is ignored.
"""

from collections.abc import Sequence

from twolane.estimate.base import Estimator
from twolane.estimate.papers.operators import Operators, Shape
from twolane.estimate.papers.sweep import Sweep
from twolane.estimate.profile import Interconnect, Profile
from twolane.estimate.query import Corunner, Floats, LaunchShape, Load


class AttentionRoofline(Estimator):
    """Rooflines, summed. Promises no bound.

    Args:
        profile: The profile that has the curves.
        interconnect: The interconnect of tensor parallelism; by default the profile's.
        serving: Whether the curves are those of launches that serve, even if there are others.
    """

    def __init__(
        self, profile: Profile, interconnect: Interconnect | None = None, *, serving: bool = False
    ) -> None:
        key = profile.key
        sizes = key.weight_itemsize, key.kv_itemsize
        self._shape = Shape(profile.shape, key.itemsize, key.tensor_parallel, *sizes)
        probed = profile.probes and not serving
        self._sweep = Sweep.probed(profile) if probed else Sweep.of(profile, self._shape)
        self._interconnect = interconnect or profile.interconnect

    def _seconds(
        self, launch: LaunchShape, units: Sequence[int], corunner: Corunner | None, bound: bool
    ) -> Sequence[float]:
        load = launch.load
        layers = launch.layers if launch.kind == "prefill" else self._shape.spec.layers
        return self._pass(load, layers, load.requests if launch.finishes else 0, units)

    def _pass(self, load: Load, layers: int, sampled: int, units: Sequence[int]) -> Sequence[float]:
        """L · t_block + t_classifier."""
        shape = self._shape
        flop_rate, byte_rate = self._sweep.flop_rate.at(units), self._sweep.byte_rate.at(units)
        tokens = shape.linears(load.new) + shape.elementwise(load.new)
        classifier = shape.classifier(sampled) if sampled else Operators((), ())
        rates = zip(flop_rate.tolist(), byte_rate.tolist(), strict=True)
        dense = [layers * tokens.seconds(*pair) + classifier.seconds(*pair) for pair in rates]
        block = shape.attention(load, flop_rate, byte_rate)
        if shape.tensor_parallel > 1:
            block += 2 * self._allreduce(load.new, flop_rate)
        seconds: list[float] = (layers * block + dense).tolist()
        return seconds

    def _allreduce(self, tokens: int, flop_rate: Floats) -> Floats:
        """Return the seconds of a ring over the GPUs, for one linear operator's output."""
        n, link = self._shape.tensor_parallel, self._interconnect
        moved = self._shape.reduced_bytes(tokens)
        hops = 2 * (n - 1) * link.startup_seconds
        transfer = 2 * (n - 1) * moved / (n * link.bytes_per_second)
        return hops + transfer + n * (n - 1) * moved / flop_rate
