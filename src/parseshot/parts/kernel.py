"""The inner loop of PARSE, for one scale: correlate, threshold, locate (Eq. 5) and express (Eq. 6) without leaving the cache.

Written with the usual operators, the [B, C, K, G, G] responses of Eq. 5 and 6 are read and written about twenty times
in a training step, and that traffic, not the arithmetic, is the cost of the parse. Here it is one autograd function:

* the algebra is reduced to one quantity a cell. With w = 1/‖D‖² and, in the LASSO form, y = max(0, r − λ/2), the
  expression of a cell is y·w and its gain is y²·w. In the printed form y = r, the expression is y·w again, and the gain
  (r − λ/2)²·w is y·(y − λ)·w plus a constant that the softmax cancels (and float32 would not: it grows as 1/‖D‖²);
* channels are visited in blocks small enough to stay in cache between the passes;
* only y is kept for the backward pass; its gradient exists one block at a time;
* the correlation is a batched matrix product: D as a banded matrix along x, the s neighbouring rows stacked along y.

Letters: B images, C channels, K parts, G×G cells, s template side. Cells are ordered [x, y] and images come last, so that
every pass runs along contiguous memory.
"""

import functools
from typing import Any

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 19  # elements of y visited at a time: 2 MiB in float32, measured best of 2^16 … 2^21


@functools.lru_cache(maxsize=64)
def _bands(size: int, side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One-hot [s, G, G]: entry (dx, x, x') is 1 where x' = x + dx − s//2 lies inside the grid."""
    offset = torch.arange(side).view(-1, 1, 1) - side // 2
    x, x_source = torch.arange(size).view(1, -1, 1), torch.arange(size).view(1, 1, -1)
    return (x_source == x + offset).to(dtype=dtype, device=device)  # [s, G, G]


def correlation_matrix(templates: Tensor, size: int) -> Tensor:
    """Templates as the left factor of the correlation: [K, C, s, s] → [C, K·G, s·G], and [C, K, 1] for s = 1."""
    parts, channels, side, _ = templates.shape
    if side == 1:
        return templates.reshape(parts, channels, 1).transpose(0, 1).contiguous()
    bands = _bands(size, side, templates.dtype, templates.device)
    matrix = torch.einsum("kcyd,dgh->ckgyh", templates, bands)  # [C, K, G, s, G]
    return matrix.reshape(channels, parts * size, side * size)


def _columns(phi: Tensor, side: int) -> Tensor:
    """Right factor of the correlation: [c, G, G, B] → [c, s·G, G·B], the s zero-padded neighbouring rows stacked."""
    channels, size, _, batch = phi.shape
    if side == 1:
        return phi.view(channels, 1, size * size * batch)
    stacked = phi.new_zeros(channels, side, size, size, batch)
    for row, shift in enumerate(range(-(side // 2), side // 2 + 1)):
        low, high = max(0, -shift), min(size, size - shift)
        if low < high:
            stacked[:, row, :, low:high] = phi[:, :, low + shift : high + shift]
    return stacked.view(channels, side * size, size * batch)


def _fold(columns: Tensor, side: int, size: int, batch: int) -> Tensor:
    """Adjoint of `_columns`: [c, s·G, G·B] → [c, G, G, B]."""
    if side == 1:
        return columns.view(-1, size, size, batch)
    stacked = columns.view(-1, side, size, size, batch)
    total = stacked[:, side // 2].clone()
    for row, shift in enumerate(range(-(side // 2), side // 2 + 1)):
        low, high = max(0, -shift), min(size, size - shift)
        if shift and low < high:
            total[:, :, low + shift : high + shift] += stacked[:, row, :, low:high]
    return total


class LocateAndExpress(torch.autograd.Function):
    """Eq. 5 and 6 for one scale; `locate_and_express` below says what goes in and out."""

    @staticmethod
    def forward(
        ctx: Any, phi: Tensor, matrix: Tensor, weight: Tensor, sharpness: Tensor | None, half_lambda: float, positive: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        channels, size, _, batch = phi.shape
        parts, cells = weight.shape[1], size * size
        side = matrix.shape[2] // size if matrix.shape[1] > parts else 1
        block = max(1, BLOCK_ELEMENTS // (parts * cells * batch))
        blocks = [slice(start, start + block) for start in range(0, channels, block)]
        work = phi.new_empty(min(block, channels), parts, cells, batch)

        kept = []
        score = phi.new_zeros(parts, cells, batch)
        for span in blocks:
            y = torch.bmm(matrix[span], _columns(phi[span], side)).view(-1, parts, cells, batch)
            if positive:
                y.sub_(half_lambda).relu_()
            gain = torch.mul(y, y, out=work[: len(y)])
            if not positive:
                gain.sub_(y, alpha=2 * half_lambda)
            score += gain.mul_(weight[span, :, :, None]).sum(0)  # the sum over channels of Eq. 4
            kept.append(y)

        if sharpness is None:  # Eq. 4: argmax
            nu = torch.zeros_like(score).scatter_(1, score.argmax(1, keepdim=True), 1.0)
        else:  # Eq. 5: softmax
            nu = torch.softmax(score * sharpness, 1)
        z = phi.new_empty(channels, parts, batch)
        for span, y in zip(blocks, kept, strict=True):
            shared = torch.mul(y, nu, out=work[: len(y)]).view(-1, cells, batch)
            torch.bmm(weight[span].reshape(-1, 1, cells), shared, out=z[span].view(-1, 1, batch))  # Σ_μ ν·y/‖D‖²

        if sharpness is not None and any(ctx.needs_input_grad):
            ctx.save_for_backward(phi, matrix, weight, sharpness, nu, score, *kept)
            ctx.side, ctx.positive, ctx.lam, ctx.blocks = side, positive, 2 * half_lambda, blocks
        ctx.mark_non_differentiable(score)
        return nu, z, score

    @staticmethod
    def backward(ctx: Any, grad_nu: Tensor, grad_z: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        phi, matrix, weight, sharpness, nu, score, *kept = ctx.saved_tensors
        size, batch = phi.shape[1], phi.shape[3]
        work = torch.empty_like(kept[0])
        grad_weight = torch.empty_like(weight)
        grad_z = grad_z.contiguous()

        # dν: from outside, and from z.   Σ_c dz·y/‖D‖²
        grad_nu = grad_nu.clone()
        for span, y in zip(ctx.blocks, kept, strict=True):
            product = torch.mul(y, grad_z[span, :, None], out=work[: len(y)])
            grad_nu += (product * weight[span, :, :, None]).sum(0)
            grad_weight[span] = product.mul_(nu).sum(-1)
        grad_logit = nu * (grad_nu - (grad_nu * nu).sum(1, keepdim=True))  # through the softmax
        grad_sharpness = (grad_logit * score).sum()
        grad_score = grad_logit * sharpness  # [K, cells, B]

        twice = 2.0 * grad_score
        grad_phi, grad_matrix = torch.empty_like(phi), torch.empty_like(matrix)
        for span, y in zip(ctx.blocks, kept, strict=True):
            # dy = (2·y·dscore + ν·dz)/‖D‖² where y is above the threshold; as printed, (2·y − λ)·dscore + …
            shifted = y if ctx.positive else y - ctx.lam
            grad_weight[span] += torch.mul(y, grad_score, out=work[: len(y)]).mul_(shifted).sum(-1)
            torch.mul(grad_z[span, :, None], nu, out=work[: len(y)])
            grad_y = work[: len(y)].addcmul_(y, twice)
            if not ctx.positive:
                grad_y.sub_(grad_score, alpha=ctx.lam)
            grad_y.mul_(weight[span, :, :, None])
            if ctx.positive:
                grad_y = torch.ops.aten.threshold_backward(grad_y, y, 0)
            grad_y = grad_y.view(-1, matrix.shape[1], grad_y[0].numel() // matrix.shape[1])
            grad_columns = torch.bmm(matrix[span].transpose(1, 2), grad_y)
            grad_phi[span] = _fold(grad_columns, ctx.side, size, batch)
            torch.bmm(grad_y, _columns(phi[span], ctx.side).transpose(1, 2), out=grad_matrix[span])
        return grad_phi, grad_matrix, grad_weight, grad_sharpness, None, None


def locate_and_express(
    phi: Tensor, templates: Tensor, weight: Tensor, sharpness: Tensor | None, *, half_lambda: float, positive: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 5 and 6 for one scale.

    phi: features [C, G, G, B], cells ordered [x, y].
    templates: D [K, C, s, s], ordered [row, column].
    weight: 1/‖D‖² at each cell, [C, K, G, G], cells ordered [x, y].
    sharpness: scalar that multiplies the summed gain before the softmax (1/T, or 1/(C·T) for a mean);
        None takes the argmax of Eq. 4 (no gradient).
    positive: the LASSO solution, y = max(0, r − λ/2); otherwise y = r, as printed.

    Returns nu [K, G, G, B], the expression Σ_μ ν·y/‖D‖² [C, K, B], and the summed gain [K, G, G, B] without gradient
    (as printed: less the constant Σ_c λ_c²).
    """
    parts, _, size = templates.shape[0], templates.shape[1], phi.shape[1]
    matrix = correlation_matrix(templates, size)
    nu, z, score = LocateAndExpress.apply(phi.contiguous(), matrix, weight.flatten(2), sharpness, half_lambda, positive)
    grid = (parts, size, size, phi.shape[3])
    return nu.view(grid), z, score.view(grid)
