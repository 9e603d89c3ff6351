"""What a recipe will cost, from a few real steps: parameters, seconds a step, hours in all, memory."""

import statistics
import time
from typing import Any

import torch
from torch import nn

from parseshot.data.packed import Pack
from parseshot.engine.allocator import peak_memory
from parseshot.engine.model import Model
from parseshot.engine.recipe import Recipe
from parseshot.engine.training import EpisodeStage, PretrainingStage, Stage

MEASURED = 3  # steps that are timed, after one that is not
IMAGES = 64  # of the val classes that are encoded to time a validation


def plan(recipe: Recipe, pack: Pack, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Train a few steps on a model that is thrown away, and say what the whole run will take."""
    training = recipe.training
    torch.manual_seed(training.seed)
    model = Model(recipe.model).to(device)
    stages: list[Stage] = [PretrainingStage(model, pack, training)] if training.pretraining else []
    stages.append(EpisodeStage(model, pack, training))
    costs = {stage.name: _cost(stage) for stage in stages}
    seconds = sum(cost["steps"] * cost["seconds_a_step"] for cost in costs.values())
    validations = -(-training.episodes // training.validate_every)
    started = time.perf_counter()
    model.encode(pack.load(range(min(IMAGES, len(pack)))))
    validation = (time.perf_counter() - started) / min(IMAGES, len(pack)) * pack.counts()["val"]["images"]
    memory = peak_memory()
    return {
        "parameters": {
            **{
                name: _size(part)
                for name, part in model.named_children()
                if part is not model.projection or _size(part)
            },
            "trained": sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        },
        **costs.pop(EpisodeStage.name),
        **costs,
        "validations": validations,
        "seconds_a_validation": round(validation, 1),  # encoding; its episodes take little
        "hours": round((seconds + validations * validation) / 3600, 4),
        "memory_gb": round(memory, 2) if memory else None,
        "threads": torch.get_num_threads(),
    }


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _cost(stage: Stage) -> dict[str, Any]:
    optimiser = torch.optim.Adam(stage.module.parameters(), lr=stage.schedule.lr)
    stage.begin()
    seconds = []
    for step in range(MEASURED + 1):
        started = time.perf_counter()
        stage.step(optimiser, step)  # its figures are numbers of Python, so a GPU has finished
        seconds.append(time.perf_counter() - started)
    return {
        "images_a_step": stage.images,
        "seconds_a_step": round(statistics.median(seconds[1:]), 3),
        "steps": stage.steps,
    }
