"""A job of accelerate with its DeepSpeed plugin, which torchrun runs.

Arguments: the ZeRO stage, the folder, the number of steps, and the step before which the last rank is killed. Each rank
prints the samples and the loss of each step; a job saves what it loaded once more, in ``copy-RANKS``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import islice
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, PartialState
from accelerate.utils import DistributedType, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.trainers.accelerate_state import state_of

STAGE, FOLDER, NUM_STEPS, STOP = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])


def main() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    data = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, dataloader_config=data)
    # accelerate uses DeepSpeed only on accelerators, so this does what it would do there
    plugin.set_mixed_precision("bf16")
    plugin.select(_from_accelerator_state=True)
    accelerator.state.deepspeed_plugins = {"default": plugin}
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.DEEPSPEED
    accelerator.deepspeed_engine_wrapped = None
    set_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    loader = DataLoader(TensorDataset(torch.arange(24.0).unsqueeze(1)), batch_size=2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    state = state_of(accelerator)
    with holdfast.Checkpointer(FOLDER / "run", state, memory=None) as checkpointer:
        step = checkpointer.restore().next_step
        if step:
            holdfast.save(FOLDER / f"copy-{accelerator.num_processes}", state, step - 1)
        while step < NUM_STEPS:
            for (batch,) in islice(loader, NUM_STEPS - step):
                if step == STOP and accelerator.is_last_process:
                    checkpointer.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = model(batch.bfloat16()).float().square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                found = {"rank": accelerator.process_index, "step": step, "loss": loss.item().hex()}
                found |= {"samples": batch.flatten().int().tolist(), "entries": sorted(state)}
                sys.stdout.write(json.dumps(found) + "\n")
                sys.stdout.flush()
                checkpointer.save(step)
                step += 1
    accelerator.end_training()


if __name__ == "__main__":
    main()
