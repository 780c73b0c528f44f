"""What lanes cost, measured on this machine: the paper's table of complexity, and beyond it.

    python bench.py                         ViT-B/16, ten lanes, S = P = 20, as in the paper
    python bench.py --only growth           one of: complexity, growth, training
    python bench.py --device cuda --precision bf16 --batch 64
    python bench.py --quick                 everything in seconds, over a small ViT

Prints its tables and leaves table.md, results.json and plots in --out. Weights are random: what a
method costs does not depend on them. Counts do not depend on the machine. Times do, so each is
also given as a ratio to the plain ViT (of timm) of the same round: all rows take turns.

The file reads from top to bottom: the rows, the literal method with its lanes in one batch, how
things are counted and timed, the three parts, tables and plots, the command line.
"""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler talks a lot otherwise

import timm
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import train
from baselines import METHODS, CodaPrompt
from data import write_whole
from multilane import (
    LaneConfig,
    MultiLane,
    build_backbone,
    check_backbone,
    embed,
    first_cls,
    frozen_attention,
    frozen_stream,
    project,
    summarize,
    triton,
)
from train import Options, UsageError, autocast, table

SETTINGS: dict[str, Any] = {
    "backbone": "vit_base_patch16_224", "lanes": 10, "selectors": 20, "prompts": 20, "batch": 8,
    "kept_batch": 256, "repeat": 7, "precision": "fp32", "compile": False, "device": "auto", "only": None,
    "out": Path("runs/bench"),
}  # fmt: skip
QUICK = {"backbone": "vit_tiny_patch16_224", "lanes": 3, "selectors": 4, "prompts": 4}
QUICK |= {"batch": 2, "kept_batch": 4, "repeat": 3}
GROWTH = {  # what is varied, one at a time
    "lanes": (1, 2, 5, 10, 20, 50, 100),
    "selectors": (1, 2, 5, 10, 20, 50),
    "backbone": tuple(f"vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large")),
    "batch": (1, 8, 32),
}
QUICK_GROWTH = {"lanes": (1, 5), "selectors": (1, 8), "backbone": GROWTH["backbone"][:2]}
QUICK_GROWTH |= {"batch": (1, 2)}
CLASSES = 10  # of each lane, as in COCO B0-C10 and in CIFAR-100
EPOCH = 1000  # images


# ---------------------------------------------------------------------------------------------
# 1. The rows


class Row(NamedTuple):
    """One way from images to logits."""

    name: str
    method: str | None = None  # of baselines.METHODS; None is the plain ViT
    impl: str = "auto"  # of MultiLane, or "batched": see `literal_lanes`
    selectors: int = 1
    readout: float = 0.0
    passes: int = 1  # how often the tokens go through the ViT
    paper: tuple[float, int, float] | None = None  # GMACs, images/s, million parameters


def make_rows(o: Options) -> list[Row]:
    """The rows of the paper's table, and ours; its figures only where they are of this setting."""
    as_published = o.backbone.startswith("vit_base_patch16_224") and o.lanes == 10
    rows = [
        Row("plain ViT", paper=(16.9, 918, 85.8)),
        Row("naive pathways", "naive", passes=o.lanes, paper=(168.7, 92, 858.0)),
        Row("CODA-P", "coda-p", passes=2, paper=(33.7, 436, 3.7)),
    ]
    figures = {1: (18.6, 790, 1.2), 20: (34.7, 393, 1.3)}
    kinds = {"reference": "as written, lane by lane", "batched": "as written, lanes in one batch"}
    kinds["parallel"] = "parallel"
    if o.where.type == "cuda" and triton is not None:
        kinds["triton"] = "kernel"
    for impl, words in kinds.items():
        for S in sorted({1, o.selectors}):
            paper = figures.get(S) if impl in ("reference", "batched") else None
            rows.append(Row(f"MULTI-LANE {words}, S={S}", "multilane", impl, S, paper=paper))
    name = f"MULTI-LANE parallel with readout, S={o.selectors}"
    rows.append(Row(name, "multilane", "parallel", o.selectors, readout=1.0))
    return rows if as_published else [row._replace(paper=None) for row in rows]


def build(row: Row, vit: nn.Module, o: Options) -> nn.Module:
    """The row's model over a ViT, on the ViT's device; the ViT itself for the plain row."""
    if row.method is None:
        return vit
    blocks = min(LaneConfig().prompt_blocks, len(vit.blocks))
    config = LaneConfig(row.selectors, o.prompts, blocks, readout=row.readout)
    model = METHODS[row.method].model(vit, config)
    model.impl = "reference" if row.impl == "batched" else row.impl
    with torch.device(vit.cls_token.device if vit.cls_token.is_meta else "cpu"):
        for t in range(o.lanes):
            model.add_lane([f"class {t}.{i}" for i in range(CLASSES)])
    return model.eval()


def inference(row: Row, model: nn.Module, images: Tensor, o: Options) -> Callable[[], Tensor]:
    """The row's forward pass over these images."""
    run, inputs = model, {}
    if row.impl == "batched":
        run = lambda images: literal_lanes(model, images)
    elif o.compile and row.impl in ("parallel", "auto", "triton") and row.method == "multilane":
        inputs["stack"] = model.stack()  # a compiled model would walk the selectors in every call
    run = torch.compile(run) if o.compile else run

    @torch.no_grad()
    def forward() -> Tensor:
        with autocast(o):
            return run(images, **inputs)

    return forward


def trainable(row: Row, vit: nn.Module, o: Options) -> tuple[int, str]:
    """How many parameters the row trains, by its formula, and the formula."""
    D, T, P, C = vit.embed_dim, o.lanes, o.prompts, CLASSES
    blocks, head = min(LaneConfig().prompt_blocks, len(vit.blocks)), (D + 1) * C
    if row.method is None:
        return 0, "0 (frozen)"
    if row.method == "naive":
        return T * (2 * blocks * P * D + head), f"T (2·{blocks}·P·D + (D+1)·C)"
    if row.method == "coda-p":
        M, L, length = CodaPrompt.components, CodaPrompt.blocks, CodaPrompt.length
        return T * (M * L * (length + 2) * D + head), f"T ({M}·{L}·({length}+2)·D + (D+1)·C)"
    each = row.selectors * D + 2 * blocks * P * D + head
    return T * each, f"T (S·D + 2·{blocks}·P·D + (D+1)·C)"


# ---------------------------------------------------------------------------------------------
# 2. The literal method with its lanes in one batch
#
# multilane.py's reference runs one lane after the other, for the reader. This is the same with
# all lanes as images of one batch: the literal method at its fastest, and the fair rival.


def literal_lanes(model: MultiLane, images: Tensor) -> Tensor:
    """All lanes as the paper writes them: images [B,3,height,width] -> logits [B,C]."""
    vit, lanes = model.backbone, list(model.lanes)
    stream, _ = frozen_stream(vit, embed(vit, images), whole=True)
    B, T, S = len(images), len(lanes), model.config.selectors
    prompts = torch.stack([lane.prompts for lane in lanes], 2)  # [prompt_blocks,2,T,H,P,d]
    s = torch.stack([lane.selectors for lane in lanes])  # [T,S,D]
    tokens = torch.cat([first_cls(vit).expand(T, -1, -1), s], 1).repeat(B, 1, 1)  # [B*T,1+S,D]
    for index, (block, g) in enumerate(zip(vit.blocks, stream, strict=True)):
        n = block.norm1(tokens)
        c, s = n[:, :1], n[:, 1:]
        gbar = summarize(s.reshape(B, T * S, -1), g).view(B * T, S, -1)
        q, k, v = project(block.attn, torch.cat([c, gbar], 1))  # [B*T,1+S,H,d]
        if index < len(prompts):
            both = prompts[index].repeat(1, B, 1, 1, 1).transpose(2, 3)  # [2,B*T,P,H,d]
            k, v = torch.cat([both[0], k], 1), torch.cat([both[1], v], 1)  # [B*T,P+1+S,H,d]
        x = block.attn.proj(frozen_attention(q, k, v))
        x = torch.cat([x[:, :1], s], 1)  # Drop & Replace
        tokens = tokens + block.ls1(x)
        tokens = tokens + block.ls2(block.mlp(block.norm2(tokens)))
    return model._heads(tokens[:, 0].view(B, T, -1), None, lanes, choose=False)


# ---------------------------------------------------------------------------------------------
# 3. Counting and timing

CONVOLUTION, NORM = torch.ops.aten.convolution, torch.ops.aten.native_layer_norm
LINEAR = (torch.ops.aten.addmm, torch.ops.aten.mm, CONVOLUTION)


class Macs(NamedTuple):
    """Multiply-accumulates of one image."""

    total: float  # all matrix products, those of attention included
    linear: float  # products with weights: linear layers and the patch embedding
    paper: float  # as the paper counts, see `count`


def norm_flops(x: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * 5 * math.prod(x)  # FlopCounterMode counts two for a multiply-accumulate


def count(row: Row, vit: nn.Module, o: Options) -> Macs:
    """Count on the meta device, where nothing is computed, over a ViT that is there.

    The paper's 16.9 G of a ViT-B/16 is its linear layers and patch embedding, 16.85 G, and 5 for
    every element of a LayerNorm, as fvcore counts; it leaves out the products within attention.
    With whole passes, each has its patch embedding, which baselines.py computes only once.
    """
    if row.impl == "triton":  # the kernel computes what the parallel path computes
        row = row._replace(impl="parallel")
    with torch.device("meta"), torch.no_grad():
        images = torch.empty(1, 3, *vit.patch_embed.img_size)
        run = inference(row, build(row, vit, o), images, Options(**vars(o) | {"compile": False}))
        run()  # walks the selectors of parallel lanes, once per set of weights
        with FlopCounterMode(display=False, custom_mapping={NORM: norm_flops}) as counter:
            run()
    macs = {op: flops / 2 for op, flops in counter.get_flop_counts()["Global"].items()}
    norms, linear = macs.pop(NORM), sum(macs.get(op, 0) for op in LINEAR)
    again = (row.passes - 1) * macs[CONVOLUTION]
    return Macs(sum(macs.values()), linear, linear + norms + again)


def seconds(run: Callable, where: torch.device) -> float:
    """How long one call takes."""
    if where.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def take_turns(runs: dict[str, Callable], o: Options) -> dict[str, list[float]]:
    """Seconds of every run in every round. A disturbance meets all runs of its round alike."""
    for run in runs.values():
        for _ in range(3 if o.where.type == "cuda" or o.compile else 1):
            run()  # warm up: caches, clocks, compilers
    rounds = [{name: seconds(run, o.where) for name, run in runs.items()} for _ in range(o.repeat)]
    return {name: [times[name] for times in rounds] for name in runs}


def compare(base: Sequence[float], times: Sequence[float]) -> list[float]:
    """How many times faster than base, round by round: [median, first quartile, third]."""
    ratios = [b / t for b, t in zip(base, times, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [middle, low, high]


def peak_memory(run: Callable, where: torch.device) -> tuple[int, int]:
    """Bytes that a call takes at its peak, and bytes that the first call leaves for later ones.

    Tensors, that is: on a GPU the allocator knows; on a CPU the profiler's list of all
    allocations is added up. Neither depends on what ran before.
    """
    if where.type == "cuda":
        before = torch.cuda.memory_allocated(where)
        run()
        kept = torch.cuda.memory_allocated(where)
        torch.cuda.reset_peak_memory_stats(where)
        run()
        return torch.cuda.max_memory_allocated(where) - kept, kept - before

    def balance() -> tuple[int, int]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
        events = profiler.profiler.kineto_results.events()
        events = [event for event in events if event.name() == "[memory]"]
        now = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        return now, peak

    kept, _ = balance()
    return balance()[1], kept


# ---------------------------------------------------------------------------------------------
# 4. The three parts


def make_vit(o: Options, device: torch.device | str) -> nn.Module:
    """The backbone with random weights."""
    try:
        vit = build_backbone(o.backbone, pretrained=False).to(device)
        check_backbone(vit)  # puts it into eval mode, too
    except ValueError as error:
        raise UsageError(str(error)) from None
    return vit


def make_images(vit: nn.Module, o: Options) -> Tensor:
    return torch.rand(o.batch, 3, *vit.patch_embed.img_size).to(o.where)  # [B,3,height,width]


def held(model: nn.Module) -> int:
    """Bytes of all weights."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def complexity(o: Options) -> list[dict]:
    """The paper's table: what every row costs."""
    rows, meta, vit = make_rows(o), make_vit(o, "meta"), make_vit(o, o.where)
    images, runs, found = make_images(vit, o), {}, []
    for row in rows:
        model = build(row, vit, o).to(o.where)
        runs[row.name] = inference(row, model, images, o)
        peak, kept = peak_memory(runs[row.name], o.where)
        number, formula = trainable(row, vit, o)
        entry = {"row": row.name, "macs": count(row, meta, o)._asdict(), "paper": row.paper}
        entry |= {"parameters": number, "formula": formula}
        found.append(entry | {"peak_bytes": peak, "held_bytes": held(model) + kept})
        print(f"  counted: {row.name}", flush=True)
    times = take_turns(runs, o)
    for entry, own in zip(found, times.values(), strict=True):
        entry["images_per_second"] = o.batch / statistics.median(own)
        entry["speed"] = compare(times[rows[0].name], own)
    return found


def growth(o: Options) -> list[dict]:
    """Parallel lanes against the plain ViT, with one setting varied at a time."""
    found, points = [], QUICK_GROWTH if o.quick else GROWTH
    for varied, value in ((name, value) for name in points for value in points[name]):
        here = Options(**vars(o) | {varied: value})
        plain, lanes = Row("plain"), Row("parallel", "multilane", selectors=here.selectors)
        literal = lanes._replace(name="as written", impl="batched")
        meta, vit = make_vit(here, "meta"), make_vit(here, o.where)
        macs = {row.name: count(row, meta, here).total for row in (plain, lanes, literal)}
        images, runs = make_images(vit, here), {}
        for row in (plain, lanes):
            runs[row.name] = inference(row, build(row, vit, here).to(o.where), images, here)
        times = take_turns(runs, here)
        entry = {"varied": varied, "value": value, "macs": macs}
        entry["images_per_second"] = here.batch / statistics.median(times["parallel"])
        found.append(entry | {"speed": compare(times["plain"], times["parallel"])})
        print(f"  measured: {varied} {value}", flush=True)
    return found


def training(o: Options) -> list[dict]:
    """A step of Adam on one lane: as written, parallel, and on a kept frozen stream."""
    vit, found = make_vit(o, o.where), []
    images, one = make_images(vit, o), Options(**vars(o) | {"lanes": 1})

    def step_of(impl: str, g: Tensor | None = None) -> Callable[[], None]:
        size = o.batch if g is None else g.shape[1]
        targets = torch.rand(size, CLASSES).round().to(o.where)  # [B,C]
        model = build(Row(impl, "multilane", impl, o.selectors), vit, one).to(o.where).train()
        optimizer = torch.optim.Adam(model.lane_parameters(0), lr=0.001)
        logits = model if g is None else model.forward_stream
        logits, inputs = torch.compile(logits) if o.compile else logits, images if g is None else g

        def step() -> None:
            with autocast(o):
                out = logits(inputs, lane=0)
            loss = F.binary_cross_entropy_with_logits(out.float(), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    keeper = MultiLane(vit)

    def keep() -> Tensor:
        with autocast(o):
            return keeper.stream(images)[0].half()  # [L,B,N,D], as train.py keeps it

    g = keep()
    many = g[:, torch.arange(o.kept_batch) % o.batch]  # an image costs what another one does
    runs = {  # images of a step, and the step
        "as written": (o.batch, step_of("reference")),
        "parallel": (o.batch, step_of("parallel")),
        "kept stream": (o.batch, step_of("parallel", g)),
        "kept stream, larger batch": (o.kept_batch, step_of("parallel", many)),
        "keeping it, once": (o.batch, keep),
    }
    times = take_turns({name: run for name, (_, run) in runs.items()}, o)
    each = {name: [t / runs[name][0] for t in own] for name, own in times.items()}  # of an image
    for name, own in each.items():
        middle, size = statistics.median(own), runs[name][0]
        entry = {"row": name, "images": size, "step_seconds": middle * size}
        entry |= {"epoch_seconds": middle * EPOCH, "kept_bytes_per_image": g.nbytes / o.batch}
        found.append(
            entry | {f"speed_to_{base}": compare(each[base], own) for base in list(runs)[:2]}
        )
    return found


# ---------------------------------------------------------------------------------------------
# 5. Tables and plots


def machine(o: Options) -> str:
    """What measured."""
    names = [platform.processor() or platform.machine()]
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":")[1].strip() for line in lines if "model name" in line] or names
    gpu = f"{torch.cuda.get_device_name(o.where)}, " if o.where.type == "cuda" else ""
    cores, threads = os.cpu_count(), torch.get_num_threads()
    return f"{gpu}{names[0]}, {cores} cores, {threads} thread{'s' * (threads > 1)}"


COMPLEXITY_NOTE = """
GMACs: billions of multiply-accumulates of one image, all matrix products. Linear only: those with
weights (with parallel lanes, selectors are weights). As the paper counts: linear layers, the patch
embedding of every pass, and 5 for each element of a LayerNorm. Trainable: all that T lanes learn,
with C = 10 classes each and D the width; the ViT is frozen. Peak: tensors of a batch, at most,
beyond the weights. In all: with the weights, and what parallel lanes keep of their selectors' path.
Speed: images/s over those of the plain ViT, median of the rounds (first to third quartile).
"""
PAPER_NOTE = """
Columns "paper" quote the paper; its images/s are of its GPU. Its 85.8 and 858.0 M count the ViTs as
trained. It does not say what its 1.2, 1.3 and 3.7 M count: with COCO's 8 tasks in place of 10,
selectors and prompts without heads are 1.23 and 1.35 M, CODA-P (12 components a task) 3.75 M.
"""


def giga(x: float) -> str:
    return f"{x / 1e9:.2f}"


def ratio(x: Sequence[float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*x)


def complexity_text(found: list[dict]) -> str:
    rows, in_all = [], [e["peak_bytes"] + e["held_bytes"] for e in found]
    for e, memory in zip(found, in_all, strict=True):
        macs, paper = e["macs"], e["paper"] or ("", "", "")
        row = [e["row"], giga(macs["total"]), giga(macs["linear"]), f"{macs['paper'] / 1e9:.1f}"]
        row += [paper[0], f"{e['parameters'] / 1e6:.2f}", e["formula"], paper[2]]
        row += [f"{e['peak_bytes'] / 1e6:.0f}", f"{memory / 1e6:.0f}", f"{memory / in_all[0]:.2f}"]
        rows.append([*row, ratio(e["speed"]), f"{e['images_per_second']:.2f}", paper[1]])
    head = "method, GMACs, linear only, as the paper counts, paper, trainable M, formula, paper"
    head += ", peak MB, in all MB, of the plain ViT, speed, images/s, paper"
    text = table(head.split(", "), rows) + "\n" + COMPLEXITY_NOTE
    return text + PAPER_NOTE * any(e["paper"] for e in found)


def growth_text(found: list[dict]) -> str:
    rows = []
    for e in found:
        macs, share = e["macs"], e["macs"]["parallel"] / e["macs"]["plain"]
        row = [e["varied"], e["value"], *map(giga, macs.values()), f"{share:.3f}"]
        rows.append([*row, ratio(e["speed"]), f"{e['images_per_second']:.2f}"])
    head = "varied, value, plain GMACs, parallel, as written, parallel of plain, speed, images/s"
    text = (
        "\nAll lanes on one image. What is not varied is as said above. Speed: as in Complexity.\n"
    )
    return table(head.split(", "), rows) + "\n" + text


def training_text(found: list[dict]) -> str:
    rows = []
    for e in found:
        row = [e["row"], e["images"], f"{1e3 * e['step_seconds']:.1f}"]
        rows.append([*row, ratio(e["speed_to_as written"]), f"{e['epoch_seconds']:.1f}"])
    head = ("a step", "images", "ms", "times faster than as written", f"s for {EPOCH} images")
    small, large = (e for e in found if e["row"].startswith("kept stream"))
    return f"""{table(head, rows)}

One lane is trained, a step of Adam included, loading not; faster: by the images/s. A cached epoch is
{ratio(large["speed_to_parallel"])} times cheaper than an uncached one (parallel) in steps of
{large["images"]} images, and {ratio(small["speed_to_parallel"])} times in steps of {small["images"]}: there
the cost is the ViT's weights, which selectors and [CLS] pass however few the images. It reads the
stream as it is kept, as float16: {large["kept_bytes_per_image"] / 1e6:.1f} MB an image.
"""


def draw_complexity(found: list[dict]) -> Figure:
    figure = Figure((9, 0.4 * len(found) + 1.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [e["row"] for e in found]
    left.barh(names, [e["macs"]["total"] / 1e9 for e in found], color="tab:gray")
    left.set(xlabel="GMACs an image")
    left.invert_yaxis()
    middle, low, high = zip(*(e["speed"] for e in found), strict=True)
    right.barh(names, middle, color="tab:blue")
    right.hlines(names, low, high, color="black")
    right.axvline(1, color="black", linewidth=0.8)
    right.set(xlabel="images/s, plain ViT = 1")
    return figure


def draw_growth(found: list[dict]) -> Figure:
    varied = list(dict.fromkeys(e["varied"] for e in found))
    figure = Figure((3.2 * len(varied), 5.4), layout="constrained")
    grid = figure.subplots(2, len(varied), sharey="row", squeeze=False)
    for (top, bottom), name in zip(grid.T, varied, strict=True):
        points = [e for e in found if e["varied"] == name]
        x = [str(e["value"]).removeprefix("vit_").removesuffix("_patch16_224") for e in points]
        for key in ("as written", "parallel"):
            top.plot(x, [e["macs"][key] / e["macs"]["plain"] for e in points], "o-", label=key)
        middle, low, high = zip(*(e["speed"] for e in points), strict=True)
        bottom.plot(x, middle, "o-", color="tab:orange")
        bottom.fill_between(x, low, high, color="tab:orange", alpha=0.3)
        bottom.set(xlabel=name)
    grid[0, 0].set(ylabel="MACs, plain ViT = 1", ylim=(0, None))  # the row shares its scale
    grid[1, 0].set(ylabel="images/s, plain ViT = 1", ylim=(0, None))
    grid[0, 0].legend()
    return figure


def draw_training(found: list[dict]) -> Figure:
    figure = Figure((6, 2.2), layout="constrained")
    axis = figure.subplots()
    bars = axis.barh([e["row"] for e in found], [e["epoch_seconds"] for e in found])
    axis.bar_label(bars, fmt="%.1f")
    axis.set(xlabel=f"s for {EPOCH} images", xscale="log")
    axis.invert_yaxis()
    return figure


PARTS = {
    "complexity": (complexity, complexity_text, draw_complexity),
    "growth": (growth, growth_text, draw_growth),
    "training": (training, training_text, draw_training),
}


# ---------------------------------------------------------------------------------------------
# 6. The command line


def make_parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = train.Parser("bench.py", None, __doc__, formatter_class=style, allow_abbrev=False)

    def add(name: str, text: str, **options: Any) -> None:
        if SETTINGS[name] not in (None, False):
            quick = f"; quick: {QUICK[name]}" if name in QUICK else ""
            text += f" (default: {SETTINGS[name]}{quick})"
        parser.add_argument(train.flag(name), help=text, default=argparse.SUPPRESS, **options)

    add("backbone", "a timm ViT")
    add("lanes", "T, how many there are", type=train.at_least(1))
    add("selectors", "S of each lane", type=train.at_least(1))
    add("prompts", "P of each lane and block", type=train.at_least(0))
    add("batch", "images", type=train.at_least(1))
    add("kept_batch", "images of the larger training step on a kept stream", type=train.at_least(1))
    add("repeat", "rounds in which all rows take turns", type=train.at_least(2))
    add("precision", "of the forward pass", choices=("fp32", "bf16"))
    add("compile", "with torch.compile", action="store_true")
    add("device", "cpu, cuda, cuda:1, ...")
    add("only", "one part instead of all three", choices=PARTS)
    add("out", "folder for tables and plots", type=Path, metavar="PATH")
    text = "a small ViT, few sizes: everything in seconds"
    parser.add_argument("--quick", help=text, action="store_true")
    return parser


def command(arguments: Sequence[str]) -> None:
    """Measure, print, write."""
    given = vars(make_parser().parse_args(arguments))
    o = Options(**SETTINGS | (QUICK if given["quick"] else {}) | given)
    o.where = train.start_processes(o.device)
    torch.use_deterministic_algorithms(False)  # a training asks for them; speed is measured here
    torch.manual_seed(0)
    if o.compile:  # one class, many models: each is compiled
        torch._dynamo.config.recompile_limit = 1000
    try:
        o.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {o.out} cannot be a folder ({error.strerror})") from None
    told = shlex.join(["python", "bench.py", *arguments])
    made = f"`{told}`: torch {torch.__version__}, timm {timm.__version__}; {machine(o)}; "
    made += f"{o.backbone}, random weights; T={o.lanes}, S={o.selectors}, P={o.prompts}, "
    made += f"batch {o.batch}, {o.precision}{', compiled' * o.compile}, {o.repeat} rounds"
    made += "." if o.where.type == "cuda" else "; no GPU here, so the rows of one are absent."
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(o).items()}
    results = {"measured": made, "settings": settings | {"where": str(o.where)}}
    texts = []
    for name in PARTS if o.only is None else [o.only]:
        measure, text, draw = PARTS[name]
        print(f"{name} ...", flush=True)
        results[name] = measure(o)
        texts.append(f"## {name.capitalize()}\n\n{made}\n\n{text(results[name])}")
        print(f"\n{texts[-1]}", flush=True)
        train.save_figure(draw(results[name]), o.out / f"{name}.png")
    write_whole(o.out / "results.json", json.dumps(results, indent=1).encode())
    write_whole(o.out / "table.md", "\n".join(texts).encode())
    print(f"written: {o.out / 'table.md'}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for bad usage, 1 for what this machine cannot do, 130 for Ctrl-C."""
    try:
        command(sys.argv[1:] if arguments is None else list(arguments))
        return 0
    except KeyboardInterrupt:
        return 130
    except UsageError as error:
        text, code = str(error), 2
    except OSError as error:
        text, code = str(error), 1
    print(f"bench.py: error: {' '.join(text.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
