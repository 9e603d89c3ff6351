"""What a recipe will cost, from a few real steps: parameters, seconds a step, hours in all, memory."""

import statistics
import time
from typing import Any

import torch

from parseshot.data.packed import Pack
from parseshot.engine.allocator import peak_memory
from parseshot.engine.model import Model
from parseshot.engine.recipe import Recipe
from parseshot.engine.training import draw, initialise, train_step

MEASURED = 3  # steps that are timed, after one that is not
IMAGES = 64  # of the val classes that are encoded to time a validation


def plan(recipe: Recipe, pack: Pack) -> dict[str, Any]:
    """Train a few steps on a model that is thrown away, and say what the whole run will take."""
    training = recipe.training
    torch.manual_seed(training.seed)
    model, members = Model(recipe.model), pack.by_class("base")
    initialise(model, pack, draw(members, training, 0, pack.classes))
    optimiser = torch.optim.Adam(model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    seconds = []
    for step in range(MEASURED + 1):
        started = time.perf_counter()
        train_step(model, optimiser, pack, draw(members, training, step, pack.classes), training, step)
        seconds.append(time.perf_counter() - started)
    each = statistics.median(seconds[1:])
    validations = -(-training.episodes // training.validate_every)
    started = time.perf_counter()
    model.encode(pack.load(range(min(IMAGES, len(pack)))))
    validation = (time.perf_counter() - started) / min(IMAGES, len(pack)) * pack.counts()["val"]["images"]
    memory = peak_memory()
    return {
        "parameters": {
            "backbone": sum(weight.numel() for weight in model.backbone.parameters()),
            "method": sum(weight.numel() for weight in model.method.parameters()),
        },
        "images_a_step": training.way * (training.shots + training.queries),
        "seconds_a_step": round(each, 3),
        "steps": training.episodes,
        "validations": validations,
        "seconds_a_validation": round(validation, 1),  # encoding; its episodes take little
        "hours": round((training.episodes * each + validations * validation) / 3600, 2),
        "memory_gb": round(memory, 2) if memory else None,
        "threads": torch.get_num_threads(),
    }
