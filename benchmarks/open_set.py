"""Known or none of these, and how true probabilities are: a calibrated model against ProtoNet's largest softmax.

    parseshot train cub-efficientnet-protonet --data data/cub-224 --out runs/protonet
    python benchmarks/open_set.py --data data/cub-224 --other runs/protonet/best [--model default] [--episodes 1000]

Episodes of novel classes: 5 known ones with 5 photos each, 15 queries of each, and as many of 5 unknown ones; the same
for both models. AUROC and the share of unknown queries accepted where 95 % of the known ones are (FPR@95), means over
episodes and their paired differences. Expected calibration error of the 5 known classes: by the raw softmax, and with
the calibration that was fitted on val classes.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parseshot.data.episodes import Episodes, draw_episodes
from parseshot.data.packed import Pack
from parseshot.engine.allocator import keep_freed_memory
from parseshot.engine.encoding import encode_split
from parseshot.engine.evaluation import score
from parseshot.engine.features import cached
from parseshot.engine.model import Model
from parseshot.engine.statistics import Interval, Reliability, auroc, false_positives
from parseshot.recognition.calibration import Calibration

WAY, SHOTS, QUERIES = 5, 5, 15
OURS = "calibrated P(one of these)"


def logits(model: Model, pack: Pack, features: Path, count: int) -> tuple[Episodes, Tensor, Tensor]:
    """Of known queries and of strangers, [E, Q, N] and [E, U, N]."""
    encoded = encode_split(model, cached(model, pack, features), "novel")
    episodes = draw_episodes(
        encoded.rows, range(count), way=WAY, shots=(SHOTS,) * WAY, queries=QUERIES, seed=0, unseen=WAY
    )
    return episodes, *score(model.method, encoded.encoding, episodes)


def told(values: np.ndarray) -> str:
    interval = Interval.of(values)
    return f"{100 * interval.mean:.2f} ± {100 * interval.half_width:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--other", required=True, help="a ProtoNet on the same features")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    pack, features = Pack(asked.data), asked.data / "features"
    model = Model.from_pretrained(asked.model)
    fitted = Calibration.model_validate(model.provenance["calibration"])
    episodes, known, unknown = logits(model, pack, features, asked.episodes)
    photos = torch.full((WAY,), SHOTS)
    known, unknown = (fitted.corrected(each, photos) for each in (known, unknown))
    rows = {OURS: [fitted.knowns(each.flatten(0, 1), photos).view(each.shape[:2]) for each in (known, unknown)]}
    rows["its largest score"] = [each.amax(-1) for each in (known, unknown)]
    rows["its largest softmax"] = [torch.softmax(each, -1).amax(-1) for each in (known, unknown)]
    _, known_other, unknown_other = logits(Model.from_pretrained(asked.other), pack, features, asked.episodes)
    rows["ProtoNet's largest softmax"] = [torch.softmax(each, -1).amax(-1) for each in (known_other, unknown_other)]
    rows["ProtoNet's largest score"] = [each.amax(-1) for each in (known_other, unknown_other)]
    found = {name: (auroc(*pair).numpy(), false_positives(*pair).numpy()) for name, pair in rows.items()}
    first = found[OURS]
    report = {
        name: {
            "AUROC": told(area), "FPR@95": told(accepted),
            "first_leads_by": told(first[0] - area), "first_accepts_fewer_by": told(accepted - first[1]),
        }
        for name, (area, accepted) in found.items()
    }  # fmt: skip
    targets = torch.from_numpy(episodes.query_labels)
    counted = torch.ones(known.shape[:2], dtype=torch.bool)
    raw, calibrated = Reliability(), Reliability()
    raw.add(torch.log_softmax(known, -1), targets, counted)
    shares = fitted.shares(known.flatten(0, 1), photos).view(known.shape)
    calibrated.add(shares.log(), targets, counted)
    accepted = [round(100 * float((each >= fitted.threshold).double().mean()), 1) for each in rows[OURS]]
    print(
        json.dumps(
            {
                "open_set": report,
                "ece_raw": round(100 * raw.ece, 2), "ece_calibrated": round(100 * calibrated.ece, 2),
                "accepted_at_its_threshold": dict(zip(("known", "unknown"), accepted, strict=True)),
            },
            indent=1,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
