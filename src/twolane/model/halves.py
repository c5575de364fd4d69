"""A prefill pass of several ranks in two halves: one is summed while the other computes.

In each layer the products of the first half are queued before those of the second, and behind each
comes its sum, on a stream of its own. A row's products do not depend on the other rows, and
attention is of all rows at once, so both halves see each other's keys as if there were no cut.
"""

from collections.abc import Sequence

from torch import Tensor

from twolane.kernels.products.dispatch import Products
from twolane.model.gpu_decoder import GpuDecoder, GpuKVCache, PartialSum, Rows, Workspace
from twolane.parallel.side_sums import SideSums


class HalvedPass:
    """The layers of one pass.

    Args:
        decoder: the model.
        rows: all tokens.
        residual: [T, hidden], updated in place.
        cut: number of tokens in the first half.
        workspace: of the lane.
        products: the matrix products for the lane's share of the SMs.
        sums: of the lane.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        rows: Rows,
        residual: Tensor,
        cut: int,
        workspace: Workspace,
        products: Products,
        sums: SideSums,
    ) -> None:
        self._decoder, self._rows, self._products = decoder, rows, products
        self._workspace, self._sums = workspace, sums
        self._halves: Sequence[slice] = (slice(0, cut), slice(cut, len(residual)))
        partial = workspace.get("partial", len(residual))
        self._residual = [residual[half] for half in self._halves]
        self._left = [PartialSum(partial[half]) for half in self._halves]
        self._attention = decoder.attended(workspace, len(residual))

    def run(self, first: int, last: int, kv: GpuKVCache) -> None:
        """Run layers `first:last` on the current stream; see `GpuDecoder.layers`."""
        for i in range(first, last):
            self._attend(i, kv, begins=i == first)
            self._end_attention(i)
            self._mlp(i)
        for number, residual in enumerate(self._residual):
            self._summed(number, last - 1).add_into(residual)

    def _attend(self, i: int, kv: GpuKVCache, *, begins: bool) -> None:
        """Attention of all rows; `begins`: no layer before this has left anything to add."""
        (q, qkv, out), spec = self._attention, self._decoder.spec
        for number, half in enumerate(self._halves):
            left = None if begins else self._summed(number, i - 1)
            residual, parts = self._residual[number], (self._workspace, self._products)
            self._decoder.project(i, residual, qkv[half], *parts, left)
        self._rows.write(qkv, q, i, kv.layers[i])
        self._rows.attend(q, qkv, kv.layers[i], spec.window(i), out)

    def _end_attention(self, i: int) -> None:
        attended = self._workspace.get("attended", self._halves[1].stop)
        for number, half in enumerate(self._halves):
            partial, parts = self._left[number].partial, (self._workspace, self._products)
            self._decoder.end_attention(i, attended[half], partial, *parts)
            self._sums.begin(number, partial)

    def _mlp(self, i: int) -> None:
        norm, active = self._decoder.weights.layers[i].attention_out_norm, self._rows.active
        for number, half in enumerate(self._halves):
            self._sums.wait(number)
            left, residual = self._left[number], self._residual[number]
            self._decoder.norm_block(left.partial, norm)
            parts = self._workspace, self._products
            self._decoder.run_mlp(i, residual, left.partial, left, active.part(half), *parts)
            self._sums.begin(number, left.partial)

    def _summed(self, number: int, i: int) -> PartialSum:
        """What layer i adds to a half, once it is summed."""
        self._sums.wait(number)
        left = self._left[number]
        self._decoder.norm_block(left.partial, self._decoder.weights.layers[i].mlp_out_norm)
        return left
