"""Rounding with care: codes of few bits whose errors fall where K and V do not see them.

K and V are linear in a layer's normed input, so an error e of that input costs |A e|^2. Rounding each element
to its nearest code looks at |e|^2 alone. Here elements are rounded one after the other, and each one's error
is made up for in those that come behind it, as the inverse of A^T A says. Grouped heads make K and V narrower
than the input, and then most of the error can go where nothing sees it. The format is the same, and so are
the bytes.

Source: optimal brain compression with a fixed order, as GPTQ does it for weights (Frantar et al., ICLR 2023).
Plain torch. A step for each element of a row, for all rows at once: for saving off the request path. Worst
case: a projection that is not linear (norms of K), for which elements are rounded to the nearest.
"""

import torch
from torch import Tensor

from gpu_worker.families import Adapter

DAMPING = 0.01
"""Share of the mean diagonal, added to it: an error that K and V do not see still moves the next delta."""
BLOCK = 64
"""Elements after which what is behind them is made up for at once."""
KEPT_BYTES = 1 << 30
_PROBES = 4
_LINEAR = 1e-3


class Roundings:
    """How errors of a model's layers are made up for. One thread; keeps up to KEPT_BYTES of matrices."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._known: dict[int, Tensor | None] = {}

    def of(self, layer: int) -> Tensor | None:
        """The upper factor [D, D] float32 of the inverse of what errors of a layer's input cost.

        None where elements are to be rounded to the nearest.
        """
        if layer in self._known:
            return self._known[layer]
        made = self._made(layer)
        size_bytes = 4 * self._adapter.hidden_size**2
        # D^2 floats a layer: 64 MiB at D = 4,096. Beyond the bound a matrix is made again for each use.
        if made is None or (len(self._known) + 1) * size_bytes <= KEPT_BYTES:
            self._known[layer] = made
        return made

    def _made(self, layer: int) -> Tensor | None:
        weights = self._weights(layer)
        if weights is None:
            return None
        # A: the layer's way from input to K and V, [D, out]. An error e [D] costs |e A|^2 = e (A A') e':
        #
        #     cost   A A' + damping       [D, D]
        #     upper  Cholesky factor of its inverse: row i makes up for an error of element i behind it
        cost = weights @ weights.T
        mean = float(cost.diagonal().mean())
        if not 0 < mean < float("inf"):
            return None
        # Grouped heads leave A A' without full rank: without damping it has no inverse.
        cost.diagonal().add_(DAMPING * mean)
        factor, problem = torch.linalg.cholesky_ex(
            torch.cholesky_inverse(torch.linalg.cholesky(cost)), upper=True
        )
        return None if int(problem) else factor

    def _weights(self, layer: int) -> Tensor | None:
        """The layer's way from its input to K and V, [D, out], but for a factor of each token."""
        decoder, adapter = self._adapter.layers[layer], self._adapter
        if not decoder.has_rows or decoder.recurrence is not None:
            return None
        with torch.no_grad():
            # Each input by itself: a projection's rows are then its
            # matrix, whatever module it is (fused, packed, adapted).
            unit = torch.eye(adapter.hidden_size, dtype=adapter.model.dtype, device=decoder.device)
            # Half the difference of both signs: what a norm adds, and its mean, are gone.
            normed = (decoder.normed(unit) - decoder.normed(-unit)) / 2
            zero = adapter.pack(*decoder.projection.project(torch.zeros_like(normed[:, :1])))
            whole = (adapter.pack(*decoder.projection.project(normed)) - zero).float()
            twice = (adapter.pack(*decoder.projection.project(2 * normed[:, :_PROBES])) - zero).float()
        # A norm of K makes the way depend on the row. A few inputs show it: norms are the same for all.
        is_linear = (twice - 2 * whole[:_PROBES]).abs().max() <= _LINEAR * twice.abs().max()
        return whole if bool(is_linear) else None


def rounded(rows: Tensor, steps: Tensor, zeros: Tensor, most: int, places: Tensor, upper: Tensor) -> Tensor:
    """Codes [T, D] of rows [T, D] float32, whose outliers, at `places` [T, n], are exact.

    `steps` and `zeros` [T, D]: X = (code - zero) * step, a step of infinity for elements that are 0. `upper`
    [D, D]: see Roundings.
    """
    size = rows.shape[1]
    work, codes = rows.clone(), torch.empty_like(rows)
    # Outliers are stored exactly. Errors that are shifted onto them go on to elements that can take them.
    is_outlier = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, places, value=True)
    scale = torch.where(torch.isinf(steps), 0.0, steps)
    # Elements of all T rows at once, one column after the other:
    #
    #     columns   done │ block of 64           │ behind
    #                    │ i: code, error ──►    │          within the block at once, a column at a time
    #                    │ ─── errors @ upper ───┼──►       behind it once per block, as one product
    for begin in range(0, size, BLOCK):
        end = min(begin + BLOCK, size)
        errors = rows.new_zeros(len(rows), end - begin)
        for i in range(begin, end):
            value = work[:, i]
            code = (value / steps[:, i] + zeros[:, i]).round_().clamp_(0, most)
            codes[:, i] = code
            back = (code - zeros[:, i]) * scale[:, i]
            error = (value - torch.where(is_outlier[:, i], rows[:, i], back)) / upper[i, i]
            errors[:, i - begin] = error
            work[:, i + 1 : end] -= error.unsqueeze(1) * upper[i, i + 1 : end]
        work[:, end:] -= errors @ upper[begin:end, end:]
    return codes
