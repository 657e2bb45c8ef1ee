"""Recognize vowels in sound: a convolutional network on spectrograms of sounds of different lengths.

    accelerate launch --cpu --num_processes 2 examples/by_task/audio.py

The sounds are synthetic: a tone at the pitch of a voice, with the formants of a vowel, and noise. A generator
that is seeded with the index draws the sample, which is then the same for any number of ranks and workers.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset

from accelerate import Accelerator
from accelerate.utils import set_seed

RATE = 8000
VOWELS = {"a": (730, 1090), "e": (530, 1840), "i": (270, 2290), "o": (570, 840), "u": (300, 870)}
"""Vowel -> its first two formants in Hz."""


class Vowels(Dataset):
    """Sounds of 0.1 to 0.3 seconds, and the number of their vowel."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        pitch, seconds, *shifts = torch.rand(4, generator=generator).tolist()
        label = index % len(VOWELS)
        formants = torch.tensor(list(VOWELS.values())[label]) * (0.85 + 0.3 * torch.tensor(shifts))
        times = torch.arange(int((0.1 + 0.2 * seconds) * RATE)) / RATE
        harmonics = (90 + 160 * pitch) * torch.arange(1, 25)
        loudness = sum(torch.exp(-(((harmonics - formant) / 150) ** 2)) for formant in formants)
        sound = (loudness[:, None] * torch.sin(2 * torch.pi * harmonics[:, None] * times)).sum(0)
        return sound + 0.5 * torch.randn(len(times), generator=generator), label


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log spectrograms, padded with zeros, of shape (sounds, frequencies, frames), and labels."""
    window = torch.hann_window(256)
    spectra = [torch.stft(sound, 256, 128, window=window, return_complex=True).abs() for sound, _ in samples]
    padded = pad_sequence([spectrum.log1p().T for spectrum in spectra], batch_first=True)
    return padded.transpose(1, 2), torch.tensor([label for _, label in samples])


def main() -> None:
    parser = argparse.ArgumentParser(description="Recognize vowels.")
    parser.add_argument("--num_epochs", type=int, default=4)
    arguments = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    dataset = Vowels(1500)
    train_loader = DataLoader(Subset(dataset, range(1200)), batch_size=16, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(Subset(dataset, range(1200, 1500)), batch_size=64, collate_fn=collate)
    model = nn.Sequential(
        nn.Conv1d(129, 64, 5), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(64, len(VOWELS))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    for _ in range(arguments.num_epochs):
        for sounds, labels in train_loader:
            loss = cross_entropy(model(sounds), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    right = []
    for sounds, labels in test_loader:
        with torch.no_grad():
            right.append(accelerator.gather_for_metrics(model(sounds).argmax(1) == labels))
    accelerator.print(f"accuracy: {torch.cat(right).float().mean():.3f} of {len(torch.cat(right))} sounds")


if __name__ == "__main__":
    main()
