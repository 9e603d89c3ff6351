"""Two processes under torchrun give the gradient, the losses and the files of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parseshot.data.packed import Pack
from parseshot.engine.distributed import Team
from parseshot.engine.model import Model
from parseshot.errors import UsageError

PROGRAM = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from parseshot.data.packed import Pack
from parseshot.engine import run, training
from parseshot.engine.distributed import Team, synchronise
from parseshot.engine.model import Model, ModelConfig
torch.set_num_threads(1)
data, out, method = sys.argv[1:4]
joined = Team.joined()
team = joined.__enter__()
pack, config = Pack(data), training.TrainingConfig(
    episodes=50, way=4, shots=2, queries=2, lr=1e-3, validate_every=25, validation_episodes=5)
kind = ModelConfig(method=method, backbone_options={"channels": 8})
episode = training.draw(pack.by_class("base"), config, 0)
for kind_of_number in (torch.float32, torch.float64):
    torch.manual_seed(0)
    model = Model(kind)
    training.initialise(model, pack, episode)
    model.to(kind_of_number)
    synchronise(model, team)
    training.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), pack, episode, config, 0, team)
    if team.first:
        grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        save_file({name: grad.contiguous() for name, grad in grads.items()}, f"{out}.{kind_of_number}")
torch.manual_seed(0)
run.train(Model(kind).double(), pack, config, out + "-double", team=team)
run.start_run(kind, pack, config.model_copy(update={"episodes": 3}), out)
joined.__exit__(None, None, None)
tasks = Path("/proc/self/task").iterdir() if sys.platform == "linux" else ()
left = [task.joinpath("comm").read_text().strip() for task in tasks]
Path(f"{out}.threads-{team.rank}").write_text("\\n".join(left))
"""

CACHED = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from parseshot.backbones import BACKBONES, Conv4
from parseshot.data.packed import Pack
from parseshot.engine import training
from parseshot.engine.distributed import Team
from parseshot.engine.model import Model, ModelConfig
torch.set_num_threads(1)
data, out, method = sys.argv[1:4]
BACKBONES["frozen"] = lambda: Conv4(channels=16, pools=3).eval().requires_grad_(False)
kind = ModelConfig(
    backbone="frozen", method=method, projection=8, mirrored=True, method_options={"warps": 2.0, "layout": 3.0})
config = training.TrainingConfig(way=5, shots=2, queries=2, cached_views=1)
with Team.joined() as team:
    pack = training.cached_for(kind, config, Pack(data), Path(out).parent / "features", torch.device("cpu"))
    torch.manual_seed(0)
    stage = training.EpisodeStage(Model(kind), pack, config, team)
    stage.begin()
    stage.step(torch.optim.SGD(stage.module.parameters(), lr=0.0), 0)
    if team.first:
        named = stage.model.named_parameters()
        save_file({name: one.grad.contiguous() for name, one in named if one.grad is not None}, out)
"""


def launch(birds: Pack, out: Path, method: str, processes: int, program: str = PROGRAM) -> None:
    file = out.parent / "program.py"
    file.write_text(program)
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(runner if processes > 1 else []), file, birds.path, out, method]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("method", ["dop", "protonet"])
def test_two_processes_are_as_one(birds: Pack, tmp_path: Path, method: str) -> None:
    runs = [tmp_path / "one", tmp_path / "two"]
    for processes, out in enumerate(runs, 1):
        launch(birds, out, method, processes)
    # the mathematics agrees to the last digits of float64; in float32 a pooling near a tie may go the other way,
    # and Adam makes full steps of such noise, so that runs of float32 part after some tens of steps
    for kind, largest in (("torch.float64", 1e-9), ("torch.float32", 1e-2)):
        one, two = (load_file(f"{out}.{kind}") for out in runs)
        assert one.keys() == two.keys()
        norm = torch.stack([grad.norm() for grad in one.values()]).norm()
        apart = torch.stack([(one[name] - two[name]).norm() for name in one]).norm() / norm
        print(f"{method} {kind}: gradients {apart:.1e} apart, of a norm of {norm:.3g}")
        assert apart <= largest
    first, second = (
        [json.loads(line) for line in Path(f"{out}-double/metrics.jsonl").read_text().splitlines()] for out in runs
    )
    assert len(first) == len(second) == 50
    assert max(abs(a["ce"] - b["ce"]) for a, b in zip(first, second, strict=True)) < 1e-3
    for rank in range(2):  # a thread of gloo that is left may abort the process when Python ends
        left = Path(f"{runs[1]}.threads-{rank}").read_text().splitlines()
        assert left or sys.platform != "linux"
        assert not [name for name in left if "gloo" in name]
    for out in runs:
        Model.from_pretrained(out / "last")
        Model.from_pretrained(out / "best")
    most = max(abs(a["ce"] - b["ce"]) for a, b in zip(first, second, strict=True))
    print(f"{method}: losses of 50 steps at most {most:.1e} apart")


def test_two_processes_ask_parts_to_follow_as_one_does(birds: Pack, tmp_path: Path) -> None:
    """From cached maps, with the terms of layout and warps."""
    for processes, name in enumerate(("one", "two"), 1):
        launch(birds, tmp_path / name, "dop", processes, CACHED)
    one, two = (load_file(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    norm = torch.stack([grad.norm() for grad in one.values()]).norm()
    assert torch.stack([(one[name] - two[name]).norm() for name in one]).norm() < 1e-4 * norm


def test_alone_nothing_happens() -> None:
    team = Team()
    model = torch.nn.Linear(2, 2)
    team.sum_gradients(model)
    assert model.weight.grad is None
    assert team.share(10) == slice(0, 10)
    assert team.any(True)
    assert not team.any(False)
    assert team.from_first(0.25) == 0.25


def test_an_episode_must_be_shared_out_evenly() -> None:
    assert [Team(rank, 3).share(12) for rank in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    with pytest.raises(UsageError, match="10 images an episode cannot be shared out evenly over 3 processes"):
        Team(0, 3).share(10)
