"""The inner loop of PARSE for one scale: correlate, threshold, locate (Eq. 5) and express (Eq. 6), within the cache.

Written with the usual operators, the [B, C, K, G, G] responses of Eq. 5 and 6 are read and written about twenty times
in a training step, and that traffic, not the arithmetic, is the cost of the parse. Here it is one autograd function:

* the algebra is reduced to one quantity a cell: x = max(0, a − λ_c) in the LASSO form, whose square is the gain of the
  cell and which over ‖D‖ is its expression. In the printed form x = a, and (a − λ_c)² is x·(x − 2λ_c) plus a constant
  that the softmax cancels (and float32 would not: it grows as 1/‖D‖²);
* channels are visited in blocks small enough to stay in cache between the passes;
* only x is kept for the backward pass; its gradient exists one block at a time;
* the correlation is a batched matrix product: D as a banded matrix along x, the s neighbouring rows stacked along y.

Letters: B images, C channels, K parts, G×G cells, s template side. Cells are ordered [x, y] and images come last, so
that every pass runs along contiguous memory.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from parseshot.parts.templates import correlate

BLOCK_ELEMENTS = 1 << 19  # elements of x visited at a time: 2 MiB in float32, measured best of 2^16 … 2^21


@functools.lru_cache(maxsize=64)
def _bands(size: int, side: int, spacing: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One-hot [s, G, G]: entry (dx, x, x') is 1 where x' = x + (dx − s//2)·spacing lies inside the grid."""
    with torch.inference_mode(False):  # the cache outlives the mode it is filled in, and training may use it next
        offset = (torch.arange(side).view(-1, 1, 1) - side // 2) * spacing
        x, x_source = torch.arange(size).view(1, -1, 1), torch.arange(size).view(1, 1, -1)
        return (x_source == x + offset).to(dtype=dtype, device=device)  # [s, G, G]


def correlation_matrix(templates: Tensor, size: int, spacing: int = 1) -> Tensor:
    """Templates as the left factor of the correlation: [K, C, s, s] → [C, K·G, s·G], and [C, K, 1] for s = 1."""
    parts, channels, side, _ = templates.shape
    if side == 1:
        return templates.reshape(parts, channels, 1).transpose(0, 1).contiguous()
    bands = _bands(size, side, spacing, templates.dtype, templates.device)
    matrix = torch.einsum("kcyd,dgh->ckgyh", templates, bands)  # [C, K, G, s, G]
    return matrix.reshape(channels, parts * size, side * size)


def _shifts(side: int, spacing: int, size: int) -> list[tuple[int, int, int, int]]:
    """For each row of a template: its number, its distance from the middle one, and the rows that it meets there."""
    shifts = [(row, (row - side // 2) * spacing) for row in range(side)]
    return [(row, shift, max(0, -shift), min(size, size - shift)) for row, shift in shifts if abs(shift) < size]


def _columns(phi: Tensor, side: int, spacing: int) -> Tensor:
    """Right factor of the correlation: [c, G, G, B] → [c, s·G, G·B], the s zero-padded neighbouring rows stacked."""
    channels, size, _, batch = phi.shape
    if side == 1:
        return phi.view(channels, 1, size * size * batch)
    stacked = phi.new_zeros(channels, side, size, size, batch)
    for row, shift, low, high in _shifts(side, spacing, size):
        stacked[:, row, :, low:high] = phi[:, :, low + shift : high + shift]
    return stacked.view(channels, side * size, size * batch)


def _fold(columns: Tensor, side: int, spacing: int, size: int, batch: int) -> Tensor:
    """Adjoint of `_columns`: [c, s·G, G·B] → [c, G, G, B]."""
    if side == 1:
        return columns.view(-1, size, size, batch)
    stacked = columns.view(-1, side, size, size, batch)
    total = stacked[:, side // 2].clone()
    for row, shift, low, high in _shifts(side, spacing, size):
        if shift:
            total[:, :, low + shift : high + shift] += stacked[:, row, :, low:high]
    return total


class LocateAndExpress(torch.autograd.Function):
    """Eq. 5 and 6 for one scale; `locate_and_express` below says what goes in and out."""

    @staticmethod
    def forward(
        ctx: Any,
        phi: Tensor,
        matrix: Tensor,
        unit: Tensor,
        level: Tensor,
        sharpness: Tensor | None,
        given: Tensor | None,
        positive: bool,
        spacing: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        channels, size, _, batch = phi.shape
        parts, cells = unit.shape[1], size * size
        side = matrix.shape[2] // size if matrix.shape[1] > parts else 1
        block = max(1, BLOCK_ELEMENTS // (parts * cells * batch))
        blocks = [slice(start, start + block) for start in range(0, channels, block)]
        work = phi.new_empty(min(block, channels), parts, cells, batch)

        kept = []
        score = phi.new_zeros(parts, cells, batch)
        for span in blocks:
            x = torch.bmm(matrix[span], _columns(phi[span], side, spacing)).view(-1, parts, cells, batch)  # r
            x.mul_(unit[span, :, :, None])  # a = θ ∗ φ
            if positive:
                x.sub_(level[span, :, None, None]).relu_()
                gain = torch.mul(x, x, out=work[: len(x)])
            else:
                gain = torch.sub(x, level[span, :, None, None], alpha=2.0, out=work[: len(x)]).mul_(x)
            score += gain.sum(0)  # the sum over channels of Eq. 4
            kept.append(x)

        if given is not None:
            nu = given.expand_as(score).contiguous()
        elif sharpness is None:  # Eq. 4: argmax
            nu = torch.zeros_like(score).scatter_(1, score.argmax(1, keepdim=True), 1.0)
        else:  # Eq. 5: softmax
            nu = torch.softmax(score * sharpness, 1)
        expression = phi.new_empty(channels, parts, batch)
        for span, x in zip(blocks, kept, strict=True):
            torch.sum(torch.mul(x, nu, out=work[: len(x)]), 2, out=expression[span])  # E_ν[x], Eq. 6

        if sharpness is None and given is None:
            ctx.mark_non_differentiable(nu, expression, score)
        else:
            ctx.mark_non_differentiable(score)
            if any(ctx.needs_input_grad):
                ctx.save_for_backward(phi, matrix, unit, level, sharpness, nu, score, *kept)
                ctx.side, ctx.spacing, ctx.positive, ctx.blocks = side, spacing, positive, blocks
                ctx.given = given is not None
        return nu, expression, score

    @staticmethod
    def backward(ctx: Any, grad_nu: Tensor, grad_expression: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        phi, matrix, unit, level, sharpness, nu, score, *kept = ctx.saved_tensors
        size, batch, shape = phi.shape[1], phi.shape[3], (ctx.side, ctx.spacing)
        work = torch.empty_like(kept[0])
        grad_expression = grad_expression.contiguous()

        grad_nu = grad_nu.clone()  # from outside, and from the expression
        for span, x in zip(ctx.blocks, kept, strict=True):
            grad_nu += torch.mul(x, grad_expression[span, :, None], out=work[: len(x)]).sum(0)
        grad_given, grad_sharpness = None, None
        if ctx.given:
            grad_given, twice = grad_nu.sum(0, keepdim=True), torch.zeros_like(nu)
        else:
            grad_logit = nu * (grad_nu - (grad_nu * nu).sum(1, keepdim=True))  # through the softmax
            grad_sharpness = (grad_logit * score).sum()
            twice = 2.0 * grad_logit * sharpness  # of the score, [K, cells, B]

        grad_phi, grad_matrix = torch.empty_like(phi), torch.empty_like(matrix)
        grad_unit, grad_level = torch.empty_like(unit), torch.empty_like(level)
        for span, x in zip(ctx.blocks, kept, strict=True):
            grad_x = torch.mul(grad_expression[span, :, None], nu, out=work[: len(x)]).addcmul_(x, twice)
            if ctx.positive:  # x = max(0, a − λ_c), gain x²: a = x + λ_c where x > 0
                grad_x = torch.ops.aten.threshold_backward(grad_x, x, 0)
                total = grad_x.sum(-1)  # [c, K, cells]
                grad_level[span] = -total.sum(-1)
                response = total.mul_(level[span, :, None])
            else:  # x = a, gain x·(x − 2λ_c)
                grad_level[span] = -(x * twice).sum((2, 3))
                grad_x.addcmul_(level[span, :, None, None], twice, value=-1.0)
                response = 0.0
            grad_unit[span] = (grad_x * x).sum(-1).add_(response).div_(unit[span])  # a = r·unit, so r = a/unit
            grad_r = grad_x.mul_(unit[span, :, :, None]).view(len(x), matrix.shape[1], -1)
            grad_phi[span] = _fold(torch.bmm(matrix[span].transpose(1, 2), grad_r), *shape, size, batch)
            torch.bmm(grad_r, _columns(phi[span], *shape).transpose(1, 2), out=grad_matrix[span])
        return grad_phi, grad_matrix, grad_unit, grad_level, grad_sharpness, grad_given, None, None


def locate_and_express(
    phi: Tensor,
    templates: Tensor,
    unit: Tensor,
    level: Tensor,
    sharpness: Tensor | None,
    *,
    positive: bool,
    given: Tensor | None = None,
    spacing: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 5 and 6 for one scale.

    phi: features [C, G, G, B], cells ordered [x, y].
    templates: D [K, C, s, s], ordered [row, column].
    unit: what turns the response r = D ∗ φ into a = θ ∗ φ at each cell, [C, K, G, G], cells ordered [x, y].
    level: λ_c, [C, K].
    sharpness: scalar that multiplies the summed gain before the softmax (1/T, or 1/(C·T) for a mean);
        None takes the argmax of Eq. 4 (no gradient).
    positive: x = max(0, a − λ_c), the LASSO solution; otherwise x = a, as printed.
    given: one ν for all parts, [G, G, B], in place of Eq. 4 or 5.
    spacing: cells from one entry of a template to the next.

    Returns nu [K, G, G, B], the expression E_ν[x] [C, K, B], and the summed gain [K, G, G, B] without gradient
    (as printed: less the constant Σ_c λ_c²).
    """
    if torch.compiler.is_exporting():
        return plainly(phi, templates, unit, level, sharpness, positive=positive, given=given, spacing=spacing)
    parts, size = templates.shape[0], phi.shape[1]
    matrix = correlation_matrix(templates, size, spacing)
    cells = None if given is None else given.reshape(1, size * size, -1)
    nu, expression, score = LocateAndExpress.apply(
        phi.contiguous(), matrix, unit.flatten(2).contiguous(), level.contiguous(), sharpness, cells, positive, spacing
    )
    grid = (parts, size, size, phi.shape[3])
    return nu.view(grid), expression, score.view(grid)


def plainly(
    phi: Tensor,
    templates: Tensor,
    unit: Tensor,
    level: Tensor,
    sharpness: Tensor | None,
    *,
    positive: bool,
    given: Tensor | None = None,
    spacing: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """`locate_and_express` with the usual operators: the same for any batch, so that a graph of it can be exported."""
    response = correlate(phi.permute(3, 0, 2, 1), templates, spacing)  # [B, K, C, G, G], cells ordered [row, column]
    x = response.permute(2, 1, 4, 3, 0) * unit.unsqueeze(-1)  # a, [C, K, G, G, B], cells ordered [x, y]
    level = level[:, :, None, None, None]
    if positive:
        x = (x - level).relu()
    score = (x.square() if positive else x * (x - 2.0 * level)).sum(0)  # [K, G, G, B]
    cells = score.flatten(1, 2)  # [K, G², B]
    if given is not None:
        nu = given.expand_as(score)
    elif sharpness is None:
        nu = torch.zeros_like(cells).scatter(1, cells.argmax(1, keepdim=True), 1.0).view_as(score)
    else:
        nu = torch.softmax(cells * sharpness, 1).view_as(score)
    return nu, (x * nu).sum((2, 3)), score.detach()
