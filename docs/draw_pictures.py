"""Draw the pictures of the guides as SVG.

`make pictures` runs it; a test fails when the files are not what it would write. The pictures are narrow, so
that their text can be read on a telephone, and have colors for a light and for a dark page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent / "pictures"
RESULTS = Path(__file__).parent.parent / "benchmarks" / "scale.json"
FAILURE = Path(__file__).parent.parent / "benchmarks" / "failure.json"
WIDTH = 400
Rows = Sequence[Sequence[Sequence[int]]]
"""The samples of each batch of each rank."""
STYLE = """
svg { color-scheme: light dark; }
text { fill: #1f2430; font: 13px system-ui, "DejaVu Sans", sans-serif; }
.back { fill: #f7f8fb; stroke: #d5d9e4; }
.head { font-weight: bold; }
.note { fill: #555d70; font-size: 12px; }
.small { font-size: 12px; }
.code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.curve { stroke: #3b6fd4; stroke-width: 2; }
rect, path { stroke: #6b7388; stroke-width: 1; fill: none; }
.a { fill: #cfe0fc; } .b { fill: #fbdcb8; }
.c { fill: #cdeccf; } .d { fill: #e6d3f7; } .plain { fill: #ffffff; }
.padding { fill: #f7f8fb; stroke-dasharray: 4 3; }
.arrow { marker-end: url(#tip); stroke-width: 1.5; }
#tip path { fill: #6b7388; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7ef; }
  .back { fill: #242731; stroke: #3b4050; }
  .note { fill: #aab1c2; }
  rect, path { stroke: #949cb0; }
  .a { fill: #27487d; } .b { fill: #7a4c16; }
  .c { fill: #275c34; } .d { fill: #5b3a7c; } .plain { fill: #2f3340; }
  .padding { fill: #242731; }
  #tip path { fill: #949cb0; }
}
"""


class Picture:
    """An SVG that grows downwards.

    Args:
        title: what the picture shows, in a few words.
        description: the same for those who do not see it.
        height: in pixels, of `WIDTH` pixels of width.
    """

    def __init__(self, title: str, description: str, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(description)}</desc>',
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>',
            f'<rect class="back" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Write one line; `y` is its base line."""
        self.parts.append(f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        words: str = "",
        kind: str = "plain",
        font: str = "",
    ) -> None:
        """Draw a box with lines of text in its middle."""
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>')
        lines = words.split("\n") if words else []
        top = y + height / 2 - 8 * (len(lines) - 1) + 4.5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 16 * number, line, f"middle {font}")

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw an arrow through points."""
        way = " ".join(f"{x} {y}" for x, y in points)
        self.parts.append(f'<path class="arrow" d="M{way}"/>')

    def line(self, *points: tuple[float, float], kind: str = "") -> None:
        """Draw a line through points."""
        way = " ".join(f"{x} {y}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="M{way}"/>')

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def _draw_batches(picture: Picture, y: float, rows: Rows, real: int = 22) -> None:
    """Draw what each rank reads: a row for each rank, a group of cells for each batch."""
    for rank, batches in enumerate(rows):
        picture.text(14, y + 34 * rank + 19, f"rank {rank}", "head")
        for step, batch in enumerate(batches):
            for place, sample in enumerate(batch):
                kind = "ab"[rank] if sample < real else "padding"
                x = 68 + 110 * step + 25 * place
                picture.box(x, y + 34 * rank, 25, 26, str(sample % real), kind, "small")


def draw_sharding() -> Picture:
    """Show which rank reads which batch of a map-style dataset."""
    picture = Picture(
        "Which rank reads which batch",
        "A dataset of 22 samples in batches of 4. Rank 0 reads batches 0, 2 and 4, rank 1 reads batches "
        "1, 3 and 5. The last batch has two samples and is filled with samples 0 and 1; "
        "gather_for_metrics removes these.",
        262,
    )
    picture.text(14, 26, "22 samples, batch_size=4: 6 batches", "head")
    for batch in range(6):
        last = min(4 * batch + 3, 21)
        words = f"batch {batch}\n{4 * batch}-{last}"
        picture.box(14 + 62 * batch, 38, 58, 40, words, "ab"[batch % 2], "small")
    for step in range(3):
        picture.text(118 + 110 * step, 108, f"step {step}", "note middle")
    _draw_batches(
        picture,
        116,
        [[range(4), range(8, 12), range(16, 20)], [range(4, 8), range(12, 16), [20, 21, 22, 23]]],
    )
    picture.box(14, 200, 25, 18, "", "padding")
    picture.text(48, 214, "repeated, so that all ranks have equally many;", "note")
    picture.text(48, 231, "gather_for_metrics removes these samples", "note")
    picture.text(14, 251, "Each sample is returned once: 16-19, then 20 and 21.", "note")
    return picture


def draw_uneven_end() -> Picture:
    """Show what becomes of the last, short batch under each setting."""
    picture = Picture(
        "The last batches of 22 samples on two ranks",
        "By default the short batch is filled with samples 0 and 1. With even_batches=False rank 1 gets a "
        "batch of two samples. With drop_last=True both ranks end after two batches. With "
        "split_batches=True each rank gets a half of each batch, and the last half is filled.",
        366,
    )
    settings: list[tuple[str, Rows]] = [
        ("even_batches=True (default)", [[range(8, 12), range(16, 20)], [range(12, 16), [20, 21, 22, 23]]]),
        ("even_batches=False", [[range(8, 12), range(16, 20)], [range(12, 16), [20, 21]]]),
        ("drop_last=True in the DataLoader", [[range(8, 12), []], [range(12, 16), []]]),
        ("split_batches=True", [[[12, 13], [16, 17], [20, 21]], [[14, 15], [18, 19], [22, 23]]]),
    ]
    for number, (name, rows) in enumerate(settings):
        top = 12 + 88 * number
        picture.text(14, top + 14, name, "code")
        _draw_batches(picture, top + 22, rows)
    return picture


def draw_dispatch() -> Picture:
    """Show how rank 0 reads for all."""
    picture = Picture(
        "A dispatched loader: rank 0 reads for all ranks",
        "Rank 0 reads 8 samples of a stream, and each of two ranks receives 4 of them. Of the last 6 "
        "samples each rank receives 3.",
        242,
    )
    picture.text(14, 26, "stream of 22 samples, batch_size=4", "head")
    picture.box(14, 38, 372, 62)
    picture.text(24, 56, "rank 0 reads a batch for each rank and sends it", "note")
    shares = [["0-3", "8-11", "16-18"], ["4-7", "12-15", "19-21"]]
    for step in range(3):
        x = 74 + 104 * step
        for rank in range(2):
            picture.box(x + 46 * rank, 64, 46, 26, shares[rank][step], "ab"[rank], "small")
            picture.box(x, 134 + 40 * rank, 92, 28, shares[rank][step], "ab"[rank], "small")
        picture.arrow((x + 46, 104), (x + 46, 128))
    for rank in range(2):
        picture.text(14, 153 + 40 * rank, f"rank {rank}", "head")
    picture.text(14, 228, "The last 6 samples are divided: 3 for each rank.", "note")
    return picture


def _draw_ranks(picture: Picture, y: float, parts: Sequence[int], batches: Sequence[str], of: int) -> None:
    """Draw ranks in rows of four: the part of the weights that each holds, and the batch that it reads."""
    for rank, (part, batch) in enumerate(zip(parts, batches, strict=True)):
        words = f"rank {rank}\nweights {part + 1}/{of}\n{batch}"
        picture.box(14 + 94 * (rank % 4), y + 68 * (rank // 4), 90, 62, words, "abcd"[part], "small")


def draw_mesh() -> Picture:
    """Show three layouts of a device mesh."""
    picture = Picture(
        "Layouts of a device mesh",
        "Eight ranks as two replicas of four shards: each rank reads its own batch. Eight ranks as two "
        "copies, two shards and two ranks that share each layer: two neighbors read the same batch. Four "
        "ranks with two shards and two parts of each sequence: two neighbors read parts of the same "
        "sequences.",
        498,
    )
    picture.text(14, 24, "dp_replicate_size=2, dp_shard_size=4", "code")
    picture.text(14, 42, "two replicas of the model, each in four shards (HSDP)", "note")
    _draw_ranks(picture, 50, [0, 1, 2, 3] * 2, [f"batch {rank}" for rank in range(8)], 4)
    picture.text(14, 212, "dp_replicate_size=2, dp_shard_size=2, tp_size=2", "code")
    picture.text(14, 230, "neighbors share each layer and read the same batch", "note")
    _draw_ranks(picture, 238, [0, 1, 2, 3] * 2, [f"batch {rank // 2}" for rank in range(8)], 4)
    picture.text(14, 400, "dp_shard_size=2, cp_size=2", "code")
    picture.text(14, 418, "neighbors read parts of the same sequences", "note")
    _draw_ranks(picture, 426, [0, 1, 2, 3], ["batch 0, i", "batch 0, ii", "batch 1, i", "batch 1, ii"], 4)
    return picture


Pass = tuple[str, int, int]
"""A pass of a schedule: "F", "B", "I" or "W", its stage and its micro-batch."""


def _order_1f1b(rank: int, ranks: int, count: int) -> list[Pass]:
    """Give the passes of one rank in 1F1B: forwards to fill the pipeline, then one backward for each."""
    ahead = min(count, ranks - rank)
    order: list[Pass] = [("F", rank, index) for index in range(ahead)]
    for index in range(count):
        order.append(("B", rank, index))
        if ahead + index < count:
            order.append(("F", rank, ahead + index))
    return order


def _order_gpipe(rank: int, ranks: int, count: int) -> list[Pass]:
    """Give the passes of one rank in GPipe: all forwards, then all backwards."""
    return [(kind, rank, index) for kind in "FB" for index in range(count)]


def _order_split(rank: int, ranks: int, count: int) -> list[Pass]:
    """Give 1F1B with backwards in two parts, of which that for weights fills idle time."""
    order: list[Pass] = []
    late: list[Pass] = []
    for kind, stage, index in _order_1f1b(rank, ranks, count):
        order.append(("I" if kind == "B" else kind, stage, index))
        if kind == "B":
            late.append(("W", stage, index))
            if len(late) > rank:  # the earlier the rank, the longer it would wait for others
                order.append(late.pop(0))
    return order + late


def _times(orders: Sequence[Sequence[Pass]], length: dict[str, int]) -> dict[Pass, int]:
    """Give the start of each pass, as early as its rank and the passes that it needs allow."""
    last = len(orders) - 1
    starts: dict[Pass, int] = {}
    done = [0] * len(orders)
    free = [0] * len(orders)
    while any(done[rank] < len(order) for rank, order in enumerate(orders)):
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                kind, stage, index = order[done[rank]]
                before = {"F": ("F", stage - 1, index), "W": ("I", stage, index)}.get(kind)
                if kind in "BI":
                    before = (kind, stage + 1, index) if stage < last else ("F", stage, index)
                needed = before is not None and before[1] >= 0
                if needed and before not in starts:
                    break
                ready = starts[before] + length[before[0]] if needed and before is not None else 0
                starts[kind, stage, index] = max(free[rank], ready)
                free[rank] = starts[kind, stage, index] + length[kind]
                done[rank] += 1
    return starts


def draw_schedules() -> Picture:
    """Show which pass each rank computes over time under three schedules."""
    ranks, count = 4, 6
    picture = Picture(
        "Schedules of a pipeline over time",
        "Four ranks with one stage each compute six micro-batches. GPipe runs all forward passes before the "
        "backward passes. 1F1B has the same idle time, but each rank keeps the activations of at most four "
        "micro-batches. A schedule that splits backward passes fills idle time with gradients of weights.",
        392,
    )
    parts = [
        ("GPipe", "activations of all micro-batches", _order_gpipe),
        ("1F1B", "activations of at most four micro-batches", _order_1f1b),
        ("zero bubble", "gradients of weights (green) fill idle time", _order_split),
    ]
    length = {"F": 1, "B": 2, "I": 1, "W": 1}
    kinds = {"F": "a", "B": "b", "I": "b", "W": "c"}
    width = 372 / 28
    for number, (name, note, order) in enumerate(parts):
        top = 12 + 124 * number
        picture.text(14, top + 12, name, "head")
        picture.text(112, top + 12, note, "note")
        starts = _times([order(rank, ranks, count) for rank in range(ranks)], length)
        for (kind, stage, index), start in starts.items():
            x, y = 14 + width * start, top + 22 + 22 * stage
            picture.box(x, y, width * length[kind], 18, str(index), kinds[kind], "small")
    picture.text(14, 386, "rows: ranks; numbers: micro-batches; blue: forward", "note")
    return picture


def draw_commit() -> Picture:
    """Show the commit of a checkpoint."""
    picture = Picture(
        "How save_state commits a checkpoint",
        "First all ranks write their files in a hidden folder beside the older checkpoint. Then they "
        "report sizes and checksums, and rank 0 writes the manifest. Then the two folders exchange names "
        "in one operation. At last the older one is deleted. Until the exchange the older checkpoint is "
        "complete, after it the newer one.",
        470,
    )
    model, complete = "model, optimizer,\nrandom_states_*", "... and\nmanifest.json"
    steps = [
        ("1. All ranks write in a hidden folder", model, "b", "step 100", "a"),
        ("2. Rank 0 writes sizes and checksums of all files", complete, "b", "step 100", "a"),
        ("3. Both folders exchange names in one operation", "step 100", "a", "step 200", "b"),
        ("4. The older one is deleted", "", "padding", "step 200", "b"),
    ]
    for number, (head, left, left_kind, right, right_kind) in enumerate(steps):
        y = 14 + 102 * number
        picture.text(14, y + 12, head, "head")
        if left:
            picture.text(100, y + 34, ".ckpt.saving-...", "code middle")
        picture.text(300, y + 34, "ckpt", "code middle")
        picture.box(30, y + 40, 140, 42, left, left_kind, "small")
        picture.box(230, y + 40, 140, 42, right, right_kind, "small")
    picture.arrow((172, 272), (228, 272))
    picture.arrow((228, 286), (172, 286))
    picture.text(14, 436, "A crash before 3 leaves step 100 complete under the name", "note")
    picture.text(14, 453, "ckpt, a crash after it step 200.", "note")
    return picture


def draw_tiers() -> Picture:
    """Show which node holds which files of a recent checkpoint."""
    picture = Picture(
        "Recent checkpoints on two nodes",
        "Each of two nodes holds the shards that its ranks have written, and a copy of those of the other "
        "node, in a folder in memory. Every n-th recent checkpoint is also written to a durable folder on "
        "a shared disk. If node 1 is lost, node 0 holds all files.",
        292,
    )
    shards = ["rank 0", "rank 1", "rank 2", "rank 3"]
    for node, left in enumerate((14, 214)):
        picture.text(left, 22, f"node {node}", "head")
        picture.text(left, 42, "/dev/shm/one/checkpoint_7", "code")
        for index, shard in enumerate(shards):
            is_own = index // 2 == node
            words = shard if is_own else f"copy of\n{shard}"
            x, y = left + 86 * (index % 2), 54 + 56 * (0 if is_own else 1)
            picture.box(x, y, 78, 44, words, "ab"[index // 2], "small")
    picture.arrow((178, 76), (212, 124))
    picture.arrow((212, 76), (178, 124))
    picture.arrow((96, 158), (96, 216))
    picture.arrow((296, 158), (296, 216))
    picture.text(106, 192, "every durable_every-th one", "note")
    picture.box(14, 220, 364, 30, "checkpoints/checkpoint_1 on a shared disk", "plain", "small")
    picture.text(14, 276, "If node 1 is lost, node 0 still holds all files.", "note")
    return picture


def draw_offload() -> Picture:
    """Show when weights of offloaded blocks come and go."""
    picture = Picture(
        "Offloaded blocks over time",
        "While one block computes, the weights of the next block are copied to the device. At any time "
        "there are at most two blocks on the device.",
        202,
    )
    kinds = "abcd"
    for name, y in (("copy", 38), ("compute", 78), ("on the", 122)):
        picture.text(14, y + 19, name, "head")
    picture.text(14, 157, "device", "head")
    for slot in range(5):
        x = 82 + 61 * slot
        if slot < 4:
            picture.box(x, 38, 57, 28, f"block {slot}", kinds[slot], "small")
        if slot:
            picture.box(x, 78, 57, 28, f"block {slot - 1}", kinds[slot - 1], "small")
            picture.box(x, 118, 57, 24, f"block {slot - 1}", kinds[slot - 1], "small")
        if slot < 4:
            picture.box(x, 142, 57, 24, f"block {slot}", kinds[slot], "small")
    picture.arrow((82, 24), (386, 24))
    picture.text(14, 28, "time", "note")
    picture.text(14, 190, "The copy of a block runs while the block before computes.", "note")
    return picture


def draw_packages() -> Picture:
    """Show the packages in their order, as `layers.yaml` says it."""
    groups: dict[str, list[str]] = yaml.safe_load((Path(__file__).parent / "layers.yaml").read_text("utf-8"))
    boxes: list[tuple[float, float, float, str, int]] = []
    heads: list[tuple[float, str]] = []
    y = 44.0
    for number, (group, names) in enumerate(groups.items()):
        heads.append((y + 12, group))
        x, y = 14.0, y + 20
        for name in names:
            width = 16 + 7.3 * len(name)
            if x + width > WIDTH - 14:
                x, y = 14.0, y + 28
            boxes.append((x, y, width, name, number))
            x += width + 6
        y += 36
    picture = Picture(
        "The packages in their order",
        "A file imports only from packages above its own. "
        + "; ".join(f"{g}: {', '.join(n)}" for g, n in groups.items()),
        int(y + 4),
    )
    picture.text(14, 26, "A file imports from packages above its own", "head")
    for height, group in heads:
        picture.text(14, height, group, "note")
    for x, height, width, name, number in boxes:
        picture.box(x, height, width, 22, name, "abcd"[number % 4], "code")
    return picture


STEP = (
    (
        "for batch in loader:",
        "b",
        "The sampler gives this rank its indices, the batch moves to",
        "the device, GradientState records whether it is the last one.",
    ),
    (
        "  with accelerator.accumulate(model):",
        "a",
        "Decides whether this batch synchronizes gradients;",
        "if not, the model is under no_sync.",
    ),
    (
        "    loss = loss_fn(model(x), y)",
        "a",
        "Forward pass under autocast. FSDP all-gathers the",
        "parameters of each block, and prefetches the next.",
    ),
    (
        "    accelerator.backward(loss)",
        "c",
        "Scales the loss. DDP all-reduces gradients in buckets, FSDP",
        "reduce-scatters them, while the backward pass runs.",
    ),
    (
        "    accelerator.clip_grad_norm_(...)",
        "c",
        "Unscales the gradients; the norm is that of all shards.",
        "",
    ),
    (
        "    optimizer.step()",
        "d",
        "Runs when gradients were synchronized; skipped where",
        "they overflow in fp16.",
    ),
    ("    scheduler.step()", "d", "Follows the optimizer: skipped when its step was.", ""),
    ("    optimizer.zero_grad()", "d", "Runs when gradients were synchronized.", ""),
)
"""The lines of a training step: the code, the color of its box, and two lines about what happens."""


def draw_step() -> Picture:
    """Show what the lines of one training step do."""
    picture = Picture(
        "One training step",
        " ".join(f"{code.strip()} {first} {second}" for code, _, first, second in STEP),
        44 + sum(60 + 16 * bool(second) for *_, second in STEP),
    )
    picture.text(14, 26, "One training step, line by line", "head")
    y = 40
    for code, kind, first, second in STEP:
        indent = 7.3 * (len(code) - len(code.lstrip()))
        picture.box(14 + indent, y, WIDTH - 28 - indent, 24, "", kind)
        picture.text(22 + indent, y + 16, code.strip(), "code")
        picture.text(22, y + 41, first, "note")
        if second:
            picture.text(22, y + 57, second, "note")
        y += 60 + 16 * bool(second)
    return picture


def draw_run() -> Picture:
    """Show the four kinds of objects of a run."""
    picture = Picture(
        "The objects of a run",
        "A strategy has layers, which change models and steps. A prepared loader has a position in the data. "
        "Observers of the run are called at its events. State items list what is saved, and checkpoints, "
        "recent checkpoints, replica groups and local SGD read them.",
        344,
    )
    picture.text(14, 26, "How a run is distributed", "head")
    picture.box(14, 36, 84, 46, "Strategy", "plain")
    for number, words in enumerate(("Layer\npipeline", "Layer\nexperts", "Layer\nrecompute")):
        picture.box(112 + 92 * number, 36, 84, 46, words, "a", "small")
    picture.text(14, 112, "One step", "head")
    events = ("batch_read", "backward", "before_step", "after_step")
    for number, words in enumerate(events):
        x = 14 + 95 * number
        picture.box(x, 122, 85, 34, words, "plain", "code")
        if number:
            picture.arrow((x - 10, 139), (x, 139))
        picture.arrow((x + 42, 156), (x + 42, 184))
    picture.arrow((151, 82), (151, 122))
    picture.box(14, 184, 370, 34, "Observers: step clock, averages, replica groups", "b", "small")
    picture.text(14, 246, "What is saved", "head")
    picture.box(14, 256, 84, 34, "Position", "d")
    picture.box(112, 256, 272, 34, "State items: models, optimizers, loaders", "c", "small")
    picture.arrow((98, 273), (112, 273))
    picture.arrow((248, 290), (248, 308))
    picture.text(248, 326, "checkpoints, recent ones, groups, local SGD", "middle small")
    return picture


def draw_scale() -> Picture:
    """Show how many requests the store gets per second as ranks are added."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    picture = Picture(
        "Requests per second at the store",
        "Requests per second of all simulated ranks, on two logarithmic axes: ranks that train, ranks "
        "that wait, and what one store answers.",
        300,
    )
    figures, most = results["simulated"], results["store"]
    left, right, top, bottom = 58.0, 380.0, 40.0, 258.0
    columns = [math.log2(figure["ranks"]) for figure in figures]
    rows = [math.floor(math.log10(min(f["ranks"] * f["idle_requests"] for f in figures))), 5]

    def point(ranks: float, requests: float) -> tuple[float, float]:
        across = (math.log2(ranks) - columns[0]) / (columns[-1] - columns[0])
        up = (math.log10(requests) - rows[0]) / (rows[1] - rows[0])
        return round(left + across * (right - left), 1), round(bottom - up * (bottom - top), 1)

    picture.text(14, 24, "Requests per second at the store", "head")
    for exponent in range(rows[0], rows[1] + 1):
        _, y = point(figures[0]["ranks"], 10**exponent)
        picture.line((left, y), (right, y))
        picture.text(14, y + 4, f"{10**exponent:,}", "small")
    for figure in figures:
        x, _ = point(figure["ranks"], 10 ** rows[0])
        picture.text(min(x, right - 10), bottom + 18, f"{figure['ranks']:,}", "small middle")
    picture.text(right, bottom + 34, "ranks", "note end")
    for kind, label in (("idle", "train"), ("waiting", "wait")):
        points = [point(f["ranks"], f["ranks"] * f[f"{kind}_requests"]) for f in figures]
        picture.line(*points, kind="curve")
        x, y = points[-2]
        picture.text(x, y - 8, f"ranks that {label}", "note end")
    _, y = point(figures[0]["ranks"], most)
    picture.line((left, y), (right, y), kind="curve")
    picture.text(left + 4, y - 6, f"what one store answers: {most:,.0f}", "note")
    return picture


def draw_failure() -> Picture:
    """Show the committed steps of four replica groups, of which one is killed."""
    run = json.loads(FAILURE.read_text(encoding="utf-8"))
    steps, killed, start = run["steps"], run["killed"], run["start"]
    first = min(times[0] for times in steps)
    end = math.ceil(max(max(times) for times in steps))
    picture = Picture(
        "One failure over time",
        "Committed steps of four replica groups. One is killed, the others go on after a pause, and the "
        "killed one joins again.",
        230,
    )
    left, right = 66.0, 380.0

    def across(seconds: float) -> float:
        return round(left + (seconds - first) / (end - first) * (right - left), 1)

    picture.text(14, 24, "One failure over time", "head")
    for group, times in enumerate(steps):
        y = 44 + 32 * group
        picture.text(14, y + 15, f"group {group}", "small")
        for time in times:
            picture.line((across(time), y), (across(time), y + 22), kind="curve")
    y = 44 + 32 * killed
    joined = next(time for time in steps[killed] if time > 0)
    width = across(joined) - across(0)
    picture.box(across(0) + 2, y, width - 4, 22, f"killed, starts at {start:.0f} s, joins", "b", "small")
    others = steps[killed - 1]
    pause = max(late - early for early, late in zip(others, others[1:], strict=False))
    for second in range(math.ceil(first / 2) * 2, end + 1, 2):
        picture.text(across(second), 188, str(second), "small middle")
    picture.text(right, 204, "seconds after the kill", "note end")
    picture.text(14, 220, f"A mark is a committed step. The other groups pause for {pause:.1f} s.", "note")
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "sharding": draw_sharding,
    "uneven_end": draw_uneven_end,
    "dispatch": draw_dispatch,
    "mesh": draw_mesh,
    "schedules": draw_schedules,
    "commit": draw_commit,
    "tiers": draw_tiers,
    "offload": draw_offload,
    "packages": draw_packages,
    "run": draw_run,
    "step": draw_step,
    "scale": draw_scale,
    "failure": draw_failure,
}


def make_files() -> dict[Path, str]:
    """Give the content of each file that is written."""
    return {FOLDER / f"{name}.svg": str(draw()) for name, draw in PICTURES.items()}


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for path, text in make_files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
