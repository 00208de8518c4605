"""A replica group of torchft for its tests: a small model under FSDP2, trained by the loop of the guide.

The arguments: the number of the group, and of its life; how many groups the job has; the steps to train; the step
before which a rank of the group kills itself (-1: none); the step before which the group waits for another one (-1:
none). With 0 as the last number, the quorum is not in the background.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchft import Manager, Optimizer, ProcessGroupGloo

import holdfast  # noqa: F401 - for the guide
from holdfast.data import GlobalOrder  # noqa: F401 - as above

group, life, num_groups, num_steps, killed, waits = map(int, sys.argv[1:])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
    load_state_dict=None,
    state_dict=None,
    min_replica_size=1,
    replica_id=f"replica_{group}",
    timeout=timedelta(seconds=60),
    use_async_quorum=bool(waits),
)
torch.manual_seed(group)  # torchft brings the groups to one state
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
mesh = init_device_mesh("cpu", (size,))
layers = [model[0], model[2], model]
for layer in layers:
    fully_shard(layer, mesh=mesh)
# HOOKS
optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=0.01))
dataset = torch.linspace(-1, 1, 4 * 4096).view(4096, 4)
batch_size = 12
trained: dict[int, list[int]] = {}


def train_on(samples: list[int]) -> None:
    """Train on samples, or die, or wait for another group first."""
    step = manager.current_step()
    if step == killed and rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)  # a save may be under way, and the other groups are in the step
    model(dataset[samples]).square().mean().backward()
    optimizer.step()
    if manager.current_step() > step and manager.participating_rank() is not None:  # else its gradients are left out
        trained[step] = samples
        Path(f"trained-{num_steps}-{group}-{life}-{rank}.json").write_text(json.dumps(trained))
    if manager.current_step() == waits:
        meet(f"group-0-{life + 1}", size)


def meet(name: str, number: int) -> None:
    """Wait for so many files whose names begin so."""
    while len([*Path().glob(f"{name}*.met")]) < number:
        time.sleep(0.05)


first = 0  # the loop of the guide sets it
# LOOP
weights = {
    name: parameter.full_tensor() for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)
}
torch.save({"first": first, "model": weights}, f"ended-{group}-{rank}.pt")
manager.shutdown()
dist.destroy_process_group()
