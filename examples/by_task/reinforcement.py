"""Train a policy with REINFORCE: each rank simulates episodes of its own.

    accelerate launch --cpu --num_processes 2 examples/by_task/reinforcement.py

A cart with a pole is pushed to the left or to the right. A loader yields the seeds of episodes: each rank
simulates others, and their number does not depend on the number of ranks. The mean and the standard
deviation of the returns are those of all ranks. A rank first simulates its episodes without gradients, and
then computes the loss of all steps in one forward of the prepared model.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

NUM_STEPS = 100
EPISODES = 32


def begin(seeds: torch.Tensor) -> torch.Tensor:
    """Returns positions, speeds, angles and angular speeds, of shape (episodes, 4)."""
    rows = [torch.rand(4, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    return (torch.stack(rows) * 0.1 - 0.05).to(seeds.device)


def push(states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Returns the states after 0.02 seconds of a force of 10 newtons."""
    position, speed, angle, turn = states.unbind(1)
    force = (20.0 * actions - 10 + 0.05 * turn**2 * angle.sin()) / 1.1
    turn_change = (9.8 * angle.sin() - angle.cos() * force) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    speed_change = force - 0.05 * turn_change * angle.cos() / 1.1
    changes = torch.stack([speed, speed_change, turn, turn_change], 1)
    return states + 0.02 * changes


@torch.no_grad()
def simulate(policy: nn.Module, seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns states, actions and whether the pole was upright, each of shape (episodes, steps, ...)."""
    states, is_upright = begin(seeds), torch.ones(len(seeds), dtype=torch.bool, device=seeds.device)
    steps = []
    for _ in range(NUM_STEPS):
        right = policy(states).softmax(-1)[:, 1]
        actions = (torch.rand(len(states), device=states.device) < right).long()
        steps.append((states, actions, is_upright))
        states = push(states, actions)
        is_upright = is_upright & (states[:, 2].abs() < 0.21) & (states[:, 0].abs() < 2.4)
    states, actions, upright = (torch.stack(parts, 1) for parts in zip(*steps, strict=True))
    return states, actions, upright


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a policy with REINFORCE.")
    parser.add_argument("--num_updates", type=int, default=60)
    arguments = parser.parse_args()

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    set_seed(0)
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    loader = DataLoader(range(arguments.num_updates * EPISODES), batch_size=EPISODES)
    policy, optimizer, loader = accelerator.prepare(policy, optimizer, loader)
    set_seed(0, device_specific=True)  # each rank draws other actions

    for update, seeds in enumerate(loader):
        states, actions, upright = simulate(accelerator.unwrap_model(policy), seeds)
        lengths = upright.sum(1, keepdim=True)
        returns = (
            lengths - torch.arange(NUM_STEPS, device=seeds.device)
        ) * upright  # steps until the pole falls
        sums = torch.stack([upright.sum(), returns.sum(), (returns**2).sum()]).double()
        count, total, squares = accelerator.reduce(sums)
        mean = total / count
        advantages = (returns - mean) / (squares / count - mean**2).sqrt().clamp(min=1e-6) * upright
        chosen = policy(states).log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        # The mean over ranks of a sum for each rank: the steps of all ranks count equally.
        loss = -(chosen * advantages.float()).sum() * accelerator.num_processes / count.float()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if update % 10 == 9:
            accelerator.print(f"update {update + 1}: the pole is upright for {count / EPISODES:.1f} steps")


if __name__ == "__main__":
    main()
