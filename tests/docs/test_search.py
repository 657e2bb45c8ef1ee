"""The search of the site shows the page that answers a question among its first three pages.

The search runs in the browser. `Search` computes the same: the terms of a question are prefixes of words,
a hit counts by field and by page, and a page has the score of its best section.
"""

from __future__ import annotations

import html
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("mkdocs", "material", "mkdocstrings")
FIRST = 3
SATURATION = 1.2  # of repeated words, as in BM25
ANSWERS = {
    "OOM": "guides/troubleshooting guides/memory",
    "out of memory": "guides/troubleshooting guides/memory",
    "multinode": "guides/launching",
    "multi-node training": "guides/launching",
    "multiple GPUs": "guides/launching",
    "SLURM": "guides/launching",
    "jupyter notebook": "guides/launching",
    "lightning": "tutorials/from-other-libraries",
    "torchrun": "tutorials/from-other-libraries",
    "resume training": "guides/checkpoints",
    "save model": "guides/checkpoints",
    "load checkpoint": "guides/checkpoints",
    "FSDP vs DDP": "guides/layouts",
    "pipeline parallel": "guides/layouts",
    "tensor parallel": "guides/sharding",
    "mixture of experts": "guides/sharding",
    "mixed precision": "guides/precision",
    "gradient checkpointing": "guides/memory",
    "gradient accumulation": "guides/accumulation",
    "ZeRO stage 3": "guides/deepspeed",
    "LoRA": "guides/clients",
    "4 bit": "guides/quantization",
    "freeze layers": "guides/troubleshooting",
    "NCCL timeout": "guides/troubleshooting",
    "training hangs": "guides/troubleshooting",
    "slow training": "guides/profiling",
    "wandb": "guides/tracking",
    "spot instances": "guides/failures guides/stopping",
    "install cuda": "install",
    "reproducibility": "concepts/comparing",
    "learning rate scheduler": "tutorials/migration",
    "all flags": "cheat-sheet",
    "unwrap model": "tutorials/migration",
    "save every n steps": "guides/checkpoints",
    "torch.compile": "guides/compile",
    **dict.fromkeys(
        (
            "RuntimeError: Expected to have finished reduction in the prior iteration",
            "CUDA out of memory",
            "'DistributedDataParallel' object has no attribute 'generate'",
            "Watchdog caught collective operation timeout",
            "address already in use",
            "ChildFailedError",
            "element 0 of tensors does not require grad",
            "Expected all tensors to be on the same device",
            "NCCL error unhandled system error",
            "Cannot re-initialize CUDA in forked subprocess",
            "received 0 items of ancdata",
            "exitcode -9",
            "Attempting to unscale FP16 gradients",
            "Cannot copy out of meta tensor",
            "Missing key(s) in state_dict",
            "loss is nan",
        ),
        "guides/troubleshooting",
    ),
}


class Search:
    """Search index of the site.

    Args:
        index: content of `search_index.json`.
    """

    def __init__(self, index: dict[str, Any]) -> None:
        self._separator = re.compile(index["config"]["separator"])
        self._weights = {name: field["boost"] for name, field in index["config"]["fields"].items()}
        self.sections = index["docs"]
        self._counts = [
            {field: Counter(self._words(section.get(field, ""))) for field in self._weights}
            for section in self.sections
        ]
        frequencies = Counter(word for fields in self._counts for words in fields.values() for word in words)
        total = len(self.sections)
        self._rarity = {
            word: math.log(1 + abs(total - n + 0.5) / (n + 0.5)) for word, n in frequencies.items()
        }

    def pages(self, question: str) -> list[str]:
        """Return pages from the best one."""
        terms = self._words(question)
        expanded = Counter(word for term in terms for word in self._rarity if word.startswith(term))
        scores: dict[str, float] = {}
        for section, fields in zip(self.sections, self._counts, strict=True):
            score = section.get("boost", 1) * sum(
                self._weights[field] * self._rarity[word] * expanded[word] * n / (n + SATURATION)
                for field, words in fields.items()
                for word, n in words.items()
                if word in expanded
            )
            words = set().union(*fields.values())
            hits = sum(any(word.startswith(term) for word in words) for term in terms)
            page, anchor, _ = section["location"].partition("#")
            score *= 1 + ((not anchor) + hits / len(terms)) ** 2
            scores[page.strip("/")] = max(score, scores.get(page.strip("/"), 0))
        return sorted((page for page in scores if scores[page]), key=lambda page: -scores[page])

    def _words(self, text: str | list[str]) -> list[str]:
        joined = " ".join(text) if isinstance(text, list) else text
        plain = html.unescape(re.sub(r"<[^>]*>", " ", joined))
        return [word for word in self._separator.split(plain.lower()) if word]


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Search:
    """Return the search of a site that is built for the test."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the search index needs the extra docs: {', '.join(missing)} not installed")
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert built.returncode == 0, built.stderr
    return Search(json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_finds_its_page(search: Search, question: str) -> None:
    pages = search.pages(question)[:FIRST]
    assert not set(ANSWERS[question].split()).isdisjoint(pages), pages


def test_generated_pages_come_after_guides(search: Search) -> None:
    boosts = {section["location"].partition("#")[0]: section.get("boost", 1) for section in search.sections}
    generated = [value for page, value in boosts.items() if page.startswith("reference/api")]
    guides = [value for page, value in boosts.items() if re.match(r"(guides|tutorials)/\w", page)]
    assert max(generated) < 1 < min(guides)
