"""DOP's learned parse of every base class: its loss as written out, and that it lives in training only."""

from pathlib import Path

import numpy as np
import pytest
import torch

from parseshot.data.packed import Pack
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.run import start_run
from parseshot.engine.training import TrainingConfig
from parseshot.methods import BasePhotos, build_method
from parseshot.methods.dop import DOP
from parseshot.methods.dop_companions import Representatives


def literal(z: np.ndarray, entropy: np.ndarray, classes: np.ndarray, slope: float, scale: float, label: int) -> float:
    """−log softmax of −scale · mean over pairs of scales of Σ_p α_p ‖z_{s1,p} − r_{s2,p}‖² for one photo."""
    scales, parts, _ = z.shape
    totals = []
    for one in classes:
        total = 0.0
        for first in range(scales):
            alpha = np.exp(slope * entropy[first])
            alpha /= alpha.sum()
            for second in range(scales):
                for part in range(parts):
                    unit = one[second, part] / np.linalg.norm(one[second, part])
                    total += alpha[part] * ((z[first, part] - unit) ** 2).sum()
        totals.append(-scale * total / scales**2)
    return float(np.log(np.exp(totals).sum()) - totals[label])


@pytest.mark.parametrize("options", [{}, {"reweight": False}, {"parts": 1}])
def test_the_loss_is_the_distance_to_all_base_classes(options: dict) -> None:
    torch.manual_seed(0)
    method = build_method("dop", 6, 5, {"representatives": 0.5, **options}).double()
    assert isinstance(method, DOP)
    codes = method.encode(torch.randn(4, 6, 5, 5, dtype=torch.float64).relu())
    labels = torch.tensor([-1, 3, 0, -1, 1, 2, 2])
    companion = method.companion(BasePhotos(labels, None))
    assert isinstance(companion, Representatives)
    companion = companion.double()
    images = torch.tensor([1, 2, 5, 4])
    found = companion(codes, images)
    slope = 0.0 if method.slopes is None else float(method.slopes[0].detach())
    scale = float(companion.log_scale.exp().detach())
    expected = [
        literal(z, entropy, companion.z.detach().numpy(), slope, scale, int(labels[image]))
        for z, entropy, image in zip(
            codes["z"].detach().numpy(), codes["entropy"].detach().numpy(), images, strict=True
        )
    ]
    assert list(found) == ["global_ce"]
    assert float(found["global_ce"].detach()) == pytest.approx(0.5 * np.mean(expected), rel=1e-9)


def test_they_train_the_model_and_are_not_kept(birds: Pack, tmp_path: Path) -> None:
    assert build_method("dop", 6, 5).companion(BasePhotos(torch.tensor([0, 1]), None)) is None
    config = TrainingConfig(episodes=3, way=4, shots=2, queries=2, validate_every=3, validation_episodes=5)
    saved = []
    for weight in (0.0, 1.0):
        kind = ModelConfig(backbone_options={"channels": 8}, method_options={"representatives": weight})
        start_run(kind, birds, config, tmp_path / str(weight))
        saved.append(Model.from_pretrained(tmp_path / str(weight) / "last"))
    assert saved[0].state_dict().keys() == saved[1].state_dict().keys()
    first, second = (model.method.templates.maps[0] for model in saved)
    assert not torch.equal(first, second)
