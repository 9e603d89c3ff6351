"""Places that know nothing of parts: what a model's parts must beat.

Box centre, random cells, the cells of most energy (Σ_c φ²), a regular grid. Box centre and energy argmax are one place.
The others have as many as the parts they are compared with: K, and K·S where the parts of all scales are pooled; there
the energy's are its strongest cells. A floor is always active, so it has one value for both variants of a protocol.
"""

from collections.abc import Sequence

import numpy as np

from parseshot.part_quality.units import Units, to_pixels


def floors(
    energy: np.ndarray, boxes: np.ndarray | None, size: int, *, locations: Sequence[int], seed: int = 0
) -> list[Units]:
    """The floors of n images with energy [n, G, G] and boxes [n, 4], in pictures of `size` pixels."""
    count, grid = energy.shape[:2]
    centre = np.full((count, 1, 2), (size - 1) / 2) if boxes is None else (boxes[:, None, :2] + boxes[:, None, 2:]) / 2
    strongest = np.argsort(-energy.reshape(count, -1), axis=1, kind="stable")  # [n, G²]
    cells = np.stack((strongest % grid, strongest // grid), -1).astype(float)  # [n, G², 2] as (x, y)
    found = {("floor: box centre", 1): centre, ("floor: energy argmax", 1): to_pixels(cells[:, :1], grid, size)}
    for number in locations:
        random = np.random.default_rng(seed).integers(0, grid, (count, number, 2)).astype(float)
        found["floor: random cell", number] = to_pixels(random, grid, size)
        if number > 1:
            found["floor: strongest cells", number] = to_pixels(cells[:, :number], grid, size)
        rows, points = regular_grid(number)
        name = f"floor: {rows}×{number // rows} grid"
        found[name, number] = np.tile(points * size - 0.5, (count, 1, 1))
    return [Units(name, places, size) for (name, _), places in found.items()]


def regular_grid(number: int) -> tuple[int, np.ndarray]:
    """Rows of the most nearly square grid of so many points, and its points [number, 2] in shares of the picture.

    >>> regular_grid(4)
    (2, array([[0.25, 0.25],
           [0.75, 0.25],
           [0.25, 0.75],
           [0.75, 0.75]]))
    """
    rows = max(divisor for divisor in range(1, number + 1) if number % divisor == 0 and divisor * divisor <= number)
    columns = number // rows
    points = [((x + 0.5) / columns, (y + 0.5) / rows) for y in range(rows) for x in range(columns)]
    return rows, np.array(points)
