"""diffusers: a pipeline of tiny random parts that are offloaded, and a loop in the style of its examples.

Usage: pipeline.py FOLDER [WAY ...], ways to offload the parts of the pipeline.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, DiTPipeline, DiTTransformer2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from material import tell
from sklearn.datasets import load_digits
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, cpu_offload, cpu_offload_with_hook
from accelerate.utils import ProjectConfiguration


def transformer(channels: int = 4, size: int = 8) -> DiTTransformer2DModel:
    torch.manual_seed(0)
    return DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=channels,
        out_channels=channels,
        num_layers=2,
        sample_size=size,
        patch_size=2,
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    ).eval()


def decoder() -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, layers_per_block=1, sample_size=8).eval()


def picture(offload: str) -> float:
    pipeline = DiTPipeline(transformer(), decoder(), DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    if offload == "parts":
        _, first = cpu_offload_with_hook(pipeline.transformer, "cpu")
        _, second = cpu_offload_with_hook(pipeline.vae, "cpu", first)
        second.offload()
    elif offload == "layers":
        cpu_offload(pipeline.transformer, "cpu")
        cpu_offload(pipeline.vae, "cpu")
    elif offload == "model":
        pipeline.enable_model_cpu_offload(device="cpu")
    elif offload == "sequential":
        pipeline.enable_sequential_cpu_offload(device="cpu")
    generator = torch.Generator().manual_seed(0)
    made = pipeline([3], generator=generator, num_inference_steps=2, output_type="np").images
    return float(abs(made).sum())


def train(folder: str) -> list[float]:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=f"{folder}/logs", total_limit=1),
    )
    model = transformer(channels=1).train()
    average = EMAModel(model.parameters())
    noise_scheduler = DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    images = torch.tensor(load_digits().images[:64], dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(load_digits().target[:64])
    loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=False)
    schedule = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for clean, label in loader:
        with accelerator.accumulate(model):
            noise = torch.randn(clean.shape, generator=generator)
            times = torch.randint(50, (len(clean),), generator=generator)
            noisy = noise_scheduler.add_noise(clean, noise, times)
            guess = model(noisy, timestep=times, class_labels=label).sample
            loss = mse_loss(guess, noise)
            losses.append(accelerator.gather(loss.repeat(len(clean))).mean().item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.step(model.parameters())
    accelerator.save_state(f"{folder}/state")
    accelerator.wait_for_everyone()  # the original lets a process go before the others have written
    accelerator.load_state(f"{folder}/state")
    accelerator.end_training()
    return losses


def main() -> None:
    folder, *ways = sys.argv[1:]
    found: dict[str, Any] = {"losses": train(folder)}
    found["pictures"] = {way: picture(way) for way in ways or ("none", "parts", "layers", "model")}
    if int(os.environ.get("RANK", "0")) == 0:
        tell(found)


if __name__ == "__main__":
    main()
