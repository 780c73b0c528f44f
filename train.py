"""The paper's experiments from the command line: train, resume, score, ablate, predict, report.

    python train.py                                 glyphs: from nothing to a report, in minutes
    python train.py --dataset voc                   VOC2007 B0-C4 as published
    python train.py --resume --run runs/voc-B0-C4   go on where a run was stopped
    python train.py --eval runs/voc-B0-C4           score its lanes again
    python train.py --predict a.jpg --run runs/voc-B0-C4
    python train.py --dataset own --data-dir DIR --protocol B0-C2    your images: see data.load_own
    torchrun --nproc-per-node 2 train.py ...        the same run, shared by two processes

The file reads from top to bottom: presets, metrics, processes, backbone and views, the kept frozen
stream, training one lane, scoring it, the run's folder, the whole run, the report, the commands.
"""

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from matplotlib import colormaps
from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from tqdm import tqdm

import baselines
import data
from data import (
    Benchmark,
    DataError,
    Parser,
    Split,
    Task,
    UsageError,
    at_least,
    average_precision,
    between,
    item_seed,
    write_whole,
)
from multilane import (
    LaneConfig,
    MultiLane,
    Statistics,
    build_backbone,
    readout_features,
    readout_logits,
    solve_readout,
)

try:
    import fcntl
except ImportError:  # not on Windows: there nobody keeps two trainings out of one folder
    fcntl = None


# The options of a command: flags over presets; `where` is the device, `folder` the run's folder.
Options = argparse.Namespace


class RunError(RuntimeError):
    """A run cannot go on; the text says why and how to go on. Exit code 1."""


# ---------------------------------------------------------------------------------------------
# 1. Presets: the published settings, and glyphs

VIT_B = "vit_base_patch16_224.augreg_in21k_ft_in1k"  # the bare name now means other weights
PUBLISHED = {
    "backbone": VIT_B,
    "normalize": False,  # pixels stay in [0,1], although timm's own config says 0.5/0.5
    "crop_scale": 0.05,
    "flip": True,
    "cache_views": 0,
}
PRESETS: dict[str, dict[str, Any]] = {
    "voc": {
        **PUBLISHED, "epochs": 30, "batch": 256, "lr": 0.05,
        "selectors": 10, "prompts": 10, "prompt_blocks": 5,
    },
    "coco": {
        **PUBLISHED, "epochs": 30, "batch": 128, "lr": 0.03,
        "selectors": 20, "prompts": 20, "prompt_blocks": 5,
    },
    "cifar100": {
        **PUBLISHED, "epochs": 50, "batch": 1024, "lr": 0.01,
        "selectors": 20, "prompts": 20, "prompt_blocks": 5,
    },
    "imagenet-r": {
        **PUBLISHED, "epochs": 50, "batch": 1024, "lr": 0.01,
        "selectors": 20, "prompts": 20, "prompt_blocks": 12,
    },
    "glyphs": {
        "backbone": "glyph_vit",  # made for this benchmark, see data.py
        "normalize": True,
        "crop_scale": 0.5,  # a smaller crop would lose whole symbols, and keep their labels
        "flip": False,  # a mirrored symbol is another one
        "cache_views": 1,
        "epochs": 20, "batch": 64, "lr": 0.4,
        "selectors": 10, "prompts": 10, "prompt_blocks": 5,
    },
    "own": {  # your images: a start, not a published setting
        "backbone": VIT_B,
        "normalize": True,  # as the weights were trained, since there is no table to agree with
        "crop_scale": 0.25,  # a small crop loses small things, and keeps their labels
        "flip": True,
        "cache_views": 1,  # the ViT sees each image once, so more epochs cost little
        # Small batches: of a few hundred images an epoch is still several steps. The first is
        # lr * batch/256 = 0.025, half of VOC's: too slow shows in the loss and is mended by more
        # epochs, too fast does not always show.
        "epochs": 10, "batch": 32, "lr": 0.2,
        "selectors": 10, "prompts": 10, "prompt_blocks": 5,
    },
}  # fmt: skip
# What other methods want otherwise: rates as their own papers published them ("any" data set), and
# for glyphs the best of three on held-out scenes; 5 epochs, since each runs the whole ViT.
METHOD_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "l2p": {"any": {"lr": 0.03}, "glyphs": {"lr": 0.1, "epochs": 5}},
    "dualprompt": {"any": {"lr": 0.005}, "glyphs": {"lr": 0.1, "epochs": 5}},
    "coda-p": {"any": {"lr": 0.001}, "glyphs": {"lr": 0.2, "epochs": 5}},
    "naive": {"glyphs": {"lr": 1.0, "epochs": 5}},
}
PAPER = {  # Avg. mAP and final mAP; with one label an image, final accuracy
    ("voc", "B0-C4"): (93.5, 88.8),
    ("voc", "B10-C2"): (93.1, 88.3),
    ("coco", "B0-C10"): (79.1, 74.5),
    ("coco", "B40-C10"): (78.8, 76.6),
    ("cifar100", "10-tasks"): (None, 84.84),
    ("imagenet-r", "10-tasks"): (None, 73.69),
}
SINGLE_LABEL = ("cifar100", "imagenet-r")
ABLATIONS = {  # of the paper: each takes one idea away
    "norm": {"pre_head_norm": False},
    "pathways": {"pathways": False},
    "drop-replace": {"drop_replace": False},
    "selectors": {"token_merging": True},
}
COMMON = {  # the same for every data set
    "method": "multilane", "weights": None, "warm_start": True, "ablate": None, "merged_tokens": 30,
    "precision": "fp32", "compile": False, "seed": 0, "order_seed": None, "threshold": 0.8,
    "data_dir": Path("data"), "device": "auto", "workers": 0, "cache_dir": None, "holdout": None,
    "start_from": None, "readout": None,
}  # fmt: skip
# What may change from a run to its continuation: it says where things are, not what they are.
PLACES = ("weights", "data_dir", "cache_dir", "start_from", "workers", "device")
TEST_BATCH = 64  # the same on every machine: a score must not depend on how it was batched

METRICS = """\
All scores are in percent. After task t they are taken on the test images that hold at least one \
class seen so far, over the classes seen so far.
AP of a class: mean of the precision at the ranks of its positives.
mAP: mean AP of the seen classes; a class without a positive never enters a mean.
Avg. mAP, average accuracy: mean of the score after each task.
CF1: 2 P R / (P + R) of the mean precision P and the mean recall R of the classes, where \
sigmoid(logit) >= threshold says that a class is there; one that is never said has precision 0.
OF1: the same of the precision and the recall counted over all classes together.
accuracy (images with one label): share of the images whose highest logit is their class.
score on a task: mAP over its classes, or accuracy on its images.
forgetting of a task: its best score before the last task minus its score at the end. Lanes never \
change, yet it need not be 0: later test sets have more images and more classes.
trainable parameters: selectors, prompts, heads (and keys) of all lanes; the ViT has none.
""".splitlines()  # a definition each; --help and the report print them


# ---------------------------------------------------------------------------------------------
# 2. Metrics


def mean(values: Iterable[float]) -> float:
    """The mean of what is not NaN; NaN if nothing is left."""
    values = [v for v in values if not math.isnan(v)]
    return sum(values) / len(values) if values else math.nan


def class_precisions(scores: Tensor, truth: Tensor) -> list[float]:
    """Average precision of every class, from scores and truth [n,C]; NaN without a positive."""
    return [average_precision(s, t) for s, t in zip(scores.T, truth.T, strict=True)]


def f1_scores(probabilities: Tensor, truth: Tensor, threshold: float) -> tuple[float, float]:
    """CF1 and OF1 of probabilities and truth [n,C]; NaN if there is no positive at all."""
    said, truth = probabilities >= threshold, truth.bool()
    right, said, real = (said & truth).sum(0), said.sum(0), truth.sum(0)  # [C]
    present = real > 0
    if not present.any():
        return math.nan, math.nan

    def f1(precision: Tensor, recall: Tensor) -> float:
        return float(2 * precision * recall / (precision + recall).clamp_min(1e-12))

    by_class = (right / said.clamp_min(1))[present].mean(), (right / real)[present].mean()
    return f1(*by_class), f1(right.sum() / said.sum().clamp_min(1), right.sum() / real.sum())


def accuracy(scores: Tensor, truth: Tensor) -> float:
    """Share of the images whose highest score is their class, scores and truth [n,C]."""
    return float((scores.argmax(1) == truth.int().argmax(1)).double().mean())


def forgetting(task_scores: Sequence[Sequence[float]]) -> list[float]:
    """Best earlier score minus the last one, of every task but the last.

    task_scores[t][i]: the score on task i after task t, for i <= t.
    """
    last = task_scores[-1]
    earlier = [[row[i] for row in task_scores[i:-1]] for i in range(len(last) - 1)]
    return [max(before) - last[i] for i, before in enumerate(earlier)]


def score_task(logits: Tensor, truth: Tensor, sizes: Sequence[int], o: Options) -> dict:
    """All scores after a task: logits and truth [n,C] of the seen classes, C = sum(sizes)."""
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))  # [C]
    own = [owner == i for i in range(len(sizes))]
    if o.dataset in SINGLE_LABEL:
        held = [truth[:, columns].any(1) for columns in own]
        by_class = [accuracy(logits[t], truth[t]) if t.any() else math.nan for t in truth.T.bool()]
        tasks = [accuracy(logits[r], truth[r]) if r.any() else math.nan for r in held]
        scores = {"accuracy": accuracy(logits, truth)}
    else:
        by_class = class_precisions(logits, truth)
        tasks = [mean([by_class[c] for c in columns.nonzero()[:, 0]]) for columns in own]
        scores = {"mAP": mean(by_class)}
        for threshold in sorted({0.8, o.threshold}):
            names = f"CF1@{threshold:g}", f"OF1@{threshold:g}"
            scores |= zip(names, f1_scores(logits.sigmoid(), truth, threshold), strict=True)
    return percent(scores | {"by_task": tasks, "by_class": by_class})


def percent(x: Any) -> Any:
    """Shares as percent, NaN as None, so that JSON can hold them."""
    if isinstance(x, dict):
        return {name: percent(value) for name, value in x.items()}
    if isinstance(x, list):
        return [percent(value) for value in x]
    return None if math.isnan(x) else 100 * x


def number(x: float | None) -> float:
    """The way back: None is NaN."""
    return math.nan if x is None else x


def main_scores(scores: dict) -> list[str]:
    """The names of what is one number: mAP, CF1 and OF1, or accuracy."""
    return [name for name in scores if name.startswith(("mAP", "CF1", "OF1", "accuracy"))]


# ---------------------------------------------------------------------------------------------
# 3. Processes: one, or many under torchrun
#
# A lane has few parameters, so their gradients are simply added up over the processes: no wrapper
# is needed, and it is exact for batches of any size.


def start_processes(device: str) -> torch.device:
    """The device of this process; under torchrun also joins the others."""
    try:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        chosen = torch.device(device)
        if chosen.type == "cuda" and chosen.index is None:
            chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.zeros(1, device=chosen).item()  # meta would make tensors, without numbers
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {device} cannot be used here ({reason})") from None
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=12))  # a download may take long
    return chosen


def rank_and_world() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_first() -> bool:
    """Whether this is the process that writes and talks."""
    return rank_and_world()[0] == 0


def say(text: Any) -> None:
    """A line on stdout, from the first process, without spoiling a progress bar."""
    if is_first():
        tqdm.write(str(text))
        sys.stdout.flush()


def share(thing: Any) -> Any:
    """What the first process has, for all of them."""
    box = [thing]
    if dist.is_initialized():
        dist.broadcast_object_list(box, 0)
    return box[0]


def add_up(tensors: Sequence[Tensor]) -> None:
    """Replace tensors by their sums over all processes."""
    if dist.is_initialized():
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


# ---------------------------------------------------------------------------------------------
# 4. Backbone, lanes, data and views


def load_vit(name: str, weights: Path | None) -> nn.Module:
    """The backbone: of the glyphs, or of timm with timm's weights or those of a local file."""
    glyphs = name == "glyph_vit"
    if weights is None and glyphs:
        weights = data.GLYPH_WEIGHTS
    if weights is not None and not weights.is_file():
        raise UsageError(f"--weights {weights}: there is no such file")
    try:
        vit = data.build_glyph_vit(None) if glyphs else build_backbone(name, weights is None)
    except ValueError as error:  # its remedy, an object to pass, is none on a command line
        reason = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        tags = timm.list_models(pretrained=True)
        known = weights is None and any(name in (tag, tag.partition(".")[0]) for tag in tags)
        told, remedy = "build --backbone", "check its name with timm.list_models"
        if known:
            told, remedy = "download the weights of --backbone", "give a file of them as --weights"
        raise UsageError(f"timm could not {told} {name} ({reason}): {remedy}") from None
    if weights is not None:
        try:
            if weights.suffix == ".safetensors":
                found = load_file(weights)
            else:  # weights_only: nothing in the file can run code
                with warnings.catch_warnings(action="ignore"):  # of files that are refused anyway
                    found = torch.load(weights, map_location="cpu", weights_only=True)
            found = found.get("model", found.get("state_dict", found))
            missing, extra = vit.load_state_dict(found, strict=False)
        except UnpicklingError:  # PyTorch's advice is to load it unsafely
            raise UsageError(
                f"--weights {weights} is not for {name}: it is no checkpoint, or holds more than "
                "weights; give a .safetensors file, or one made by torch.save(vit.state_dict(), ...)"
            ) from None
        except Exception as error:  # noqa: BLE001, a file that is no checkpoint may raise anything
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"--weights {weights} is not for {name} ({reason})") from None
        # The classifier of the pre-training is not used, so the file may have or lack it.
        if wrong := [key for key in (*missing, *extra) if not key.startswith("head")]:
            kind = "lacks" if wrong[0] in missing else "has, beyond what is needed,"
            raise UsageError(f"--weights {weights} is not for {name}: it {kind} {wrong[0]}")
    return vit


def method(o: Options) -> baselines.Method:
    """What the trainer must know of a method."""
    found = baselines.METHODS[o.method]
    # With one pathway a new lane's key may win images from the old lanes.
    return found._replace(independent=False, key_loss=True) if o.ablate == "pathways" else found


def has_selectors(o: Options) -> bool:
    return "selectors" in method(o).flags and o.ablate != "selectors"


def build_model(o: Options) -> MultiLane:
    """The frozen ViT without lanes yet."""
    ablated = ABLATIONS[o.ablate] if o.ablate else {}
    if o.ablate == "selectors":
        ablated = ablated | {"merged_tokens": o.merged_tokens}
    config = LaneConfig(
        o.selectors, o.prompts, o.prompt_blocks, readout=o.readout or 0.0, **ablated
    )
    try:
        return method(o).model(load_vit(o.backbone, o.weights), config).to(o.where)
    except ValueError as error:
        raise UsageError(str(error)) from None


def load_tasks(o: Options) -> tuple[Benchmark, list[Task]]:
    """The data set, cut into tasks; with --dry-run a few images of the first two."""
    later = int(os.environ.get("LOCAL_RANK", "0")) > 0  # one process of a machine downloads
    if dist.is_initialized() and later:
        dist.barrier()
    benchmark = data.load_benchmark(o.dataset, o.data_dir, o.seed)
    if dist.is_initialized() and not later:
        dist.barrier()
    if o.holdout:
        benchmark = data.hold_out(benchmark, o.holdout, o.seed)
    protocol = f"B0-C{len(benchmark.classes)}" if o.method == "joint" else o.protocol
    if not o.dry_run:
        done = read_state(o.folder).task if "folder" in o else 0
        learned = done or len(lanes_to_start_from(o))  # these need no training images
        return benchmark, data.make_tasks(benchmark, protocol, o.order_seed, learned)
    few = []
    for split, count in ((benchmark.train, 4), (benchmark.test, 2)):  # images of every class
        rows = (split.labels & (split.labels.cumsum(0) <= count)).any(1)
        few.append(split.take(rows, range(len(benchmark.classes))))
    benchmark = replace(benchmark, train=few[0], test=few[1])
    return benchmark, data.make_tasks(benchmark, protocol, o.order_seed)[:2]


def data_digest(benchmark: Benchmark) -> str:
    """SHA-256 of the class names, the labels, and the pixels or file names."""
    digest = hashlib.sha256("\n".join(benchmark.classes).encode())
    for split in (benchmark.train, benchmark.test):
        digest.update(split.labels.numpy())
        if isinstance(split.images, Tensor):
            digest.update(split.images.numpy())
        else:
            digest.update("\n".join(path.name for path in split.images).encode())
    return digest.hexdigest()


def make_views(o: Options, vit: nn.Module) -> tuple[Callable, Callable]:
    """The transforms of training and of testing."""
    size, known = vit.patch_embed.img_size[0], vit.pretrained_cfg
    mean_std = (known["mean"], known["std"]) if o.normalize else None
    train = data.make_transform(True, size, mean_std, (o.crop_scale, 1.0), o.flip)
    resize = 1.0 if o.dataset == "glyphs" else 8 / 7  # of a scene nothing is cut off
    return train, data.make_transform(False, size, mean_std, resize=resize)


def autocast(o: Options) -> torch.autocast:
    return torch.autocast(o.where.type, torch.bfloat16, enabled=o.precision == "bf16")


# ---------------------------------------------------------------------------------------------
# 5. The kept frozen stream: with K fixed views the ViT runs K times an image, not once an epoch


class Kept(NamedTuple):
    """The frozen stream of the images of this process."""

    g: np.ndarray  # mapped from the disk, [K,n,L,N,D]
    cls: Tensor  # [K,n,D]
    seconds: float  # that it took to make


def stream_shape(model: MultiLane, views: int, images: int) -> tuple[int, ...]:
    """[K,n,L,N,D]"""
    vit = model.backbone
    tokens = vit.patch_embed.num_patches + vit.num_prefix_tokens
    return (views, images, len(vit.blocks), tokens, vit.embed_dim)


def disk_room(shape: Sequence[int], dtype: type, o: Options) -> tuple[float, float]:
    """What the processes of this machine will keep in all, and what is free, in MB."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    size = math.prod(shape) * np.dtype(dtype).itemsize * here
    return size / 1e6, shutil.disk_usage(o.cache_dir or o.folder).free / 1e6


def keep_stream(
    model: MultiLane, shape: Sequence[int], dtype: type, epochs: Sequence[Iterable], o: Options
) -> Kept:
    """Run the frozen ViT over batches of images, an epoch for each view, and keep what lanes read.

    The file has no name: the system removes it with the process, however that ends.
    """
    started, cls = time.perf_counter(), []
    file = tempfile.TemporaryFile(dir=o.cache_dir or o.folder)  # noqa: SIM115, it lives with g
    with progress("frozen stream", shape[0] * shape[1]) as bar:
        for images, *_ in (batch for epoch in epochs for batch in epoch):
            with autocast(o):
                g, frozen = model.stream(images.to(o.where))  # [L,B,N,D], [B,D]
            g = g.transpose(0, 1).float().cpu().numpy()  # [B,L,N,D]
            file.write(np.ascontiguousarray(g, dtype))
            cls.append(frozen.float().cpu())
            bar.update(len(images))
    file.flush()
    g = np.memmap(file, dtype, "r", shape=shape) if shape[1] else np.zeros(shape, dtype)
    cls = torch.cat([torch.zeros(0, shape[-1]), *cls]).view(*shape[:2], shape[-1])
    return Kept(g, cls, time.perf_counter() - started)


def keep_training(model: MultiLane, task: Task, views: Sequence[Callable], o: Options) -> Kept:
    """The kept stream of a task's training images: image i is with process i % world."""
    rank, world = rank_and_world()
    shape = stream_shape(model, o.cache_views, len(range(rank, len(task.train), world)))
    size, room = disk_room(shape, np.float16, o)
    told = f"the frozen stream of task {task.index + 1} takes {size:,.0f} MB in "
    told += str(o.cache_dir or o.folder)
    if size > room:
        raise RunError(
            f"{told}, where {room:,.0f} MB are free: make room, give another --cache-dir, or "
            "train with --cache-views 0 in another --run"
        )
    say(f"    {told}")
    # One view is the centre as in testing; several are drawn like the views of an epoch each.
    transform, where = views[o.cache_views == 1], f"task {task.index + 1}, training"
    options = {"seed": item_seed(o.seed, task.index), "workers": o.workers, "where": where}
    options |= {"rank": rank, "world": world}
    epochs = [
        data.load_batches(task.train, transform, TEST_BATCH * world, epoch=view, **options)
        for view in range(o.cache_views)
    ]
    return keep_stream(model, shape, np.float16, epochs, o)


def kept_batches(kept: Kept, task: Task, o: Options, epoch: int) -> Iterator:
    """One epoch from the kept stream: g [L,b,N,D], cls [b,D], labels [b,C]; None for no image."""
    rank, world = rank_and_world()
    generator = torch.Generator().manual_seed(item_seed(item_seed(o.seed, task.index), epoch))
    order = torch.randperm(len(task.train), generator=generator)  # as load_batches shuffles
    view = torch.randint(o.cache_views, (len(task.train),), generator=generator)
    for rows in order.split(o.batch):
        rows = rows[rows % world == rank]
        here = view[rows], rows // world
        g = torch.from_numpy(kept.g[tuple(i.numpy() for i in here)])  # [b,L,N,D]
        batch = g.transpose(0, 1), kept.cls[here], task.train.labels[rows].float()
        yield batch if len(rows) else None


# ---------------------------------------------------------------------------------------------
# 6. The state of a run: one file is the truth, written whole or not at all


# What reading a file may raise that is cut off, of another kind, or was edited into nonsense.
SPOILED = (OSError, SafetensorError, ValueError, TypeError, LookupError, RuntimeError)


def spoiled(path: Path, error: Any, remedy: str = "restore it, or remove the run") -> RunError:
    reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    reason = " ".join(reason.split())[:200]
    return RunError(f"{path} is spoiled ({reason}): {remedy}")


@dataclass
class State:
    """How far a run is. Lanes of earlier tasks are finished, and in their own files."""

    task: int = 0  # in work
    epoch: int = 0  # finished epochs of it
    records: list[dict] = field(default_factory=list)  # the lines of metrics.jsonl so far
    tensors: dict[str, Tensor] = field(default_factory=dict)  # the lane in work, Adam's moments


def write_state(folder: Path, state: State) -> None:
    """state.safetensors, then metrics.jsonl, which only repeats what the state says."""
    if is_first():
        info = {"task": state.task, "epoch": state.epoch, "records": state.records}
        info = {"state": json.dumps(info)}
        write_whole(folder / "state.safetensors", save(state.tensors, info))
        lines = [json.dumps(record) + "\n" for record in state.records]
        write_whole(folder / "metrics.jsonl", "".join(lines).encode())


def read_state(folder: Path) -> State:
    """The state as last written; a new one if there is none."""
    path = folder / "state.safetensors"
    if not path.exists():
        return State()
    try:
        with safe_open(path, framework="pt") as file:
            info = json.loads((file.metadata() or {}).get("state", "null"))
            names = file.keys()
            state = State(**info, tensors={name: file.get_tensor(name) for name in names})
        done = [record for record in state.records if "epoch" not in record]
        if state.task != len(done) or state.epoch < 0:
            raise ValueError("its parts contradict each other")
        return state
    except SPOILED as error:
        raise spoiled(path, error) from None


def snapshot(model: MultiLane, lane: int, optimizer: torch.optim.Adam) -> dict[str, Tensor]:
    """Copies of a lane's parameters and of Adam's moments."""
    tensors = {f"lane.{name}": p for name, p in model.lanes[lane].state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{name}": t for name, t in moments.items()}
    return {name: t.detach().cpu().clone() for name, t in tensors.items()}


def restore(
    model: MultiLane, lane: int, optimizer: torch.optim.Adam, tensors: dict[str, Tensor]
) -> None:
    """The way back."""
    parts = [(*name.split(".", 1), t) for name, t in tensors.items()]
    model.lanes[lane].load_state_dict({name: t for kind, name, t in parts if kind == "lane"})
    moments: dict[int, dict[str, Tensor]] = {}
    for kind, name, tensor in parts:
        if kind == "adam":
            index, name = name.split(".")
            moments.setdefault(int(index), {})[name] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


# ---------------------------------------------------------------------------------------------
# 7. Training one lane


def fresh_batches(task: Task, transform: Callable, o: Options, epoch: int) -> Iterator:
    """One epoch from the images: images [b,3,h,w], None, labels [b,C]; None for no image."""
    rank, world = rank_and_world()
    seed, where = item_seed(o.seed, task.index), f"task {task.index + 1}, training"
    options = {"seed": seed, "epoch": epoch, "rank": rank, "world": world, "where": where}
    for images, labels, _ in data.load_batches(
        task.train, transform, o.batch, shuffle=True, workers=o.workers, **options
    ):
        yield images, None, labels
    if rank >= (len(task.train) - 1) % o.batch + 1:  # the last batch has no share for this process
        yield None


def lane_logits(model: MultiLane, lane: int, inputs: Tensor, cls: Tensor | None, keys: bool):
    """Logits of a lane [b,C] and frozen [CLS] [b,D], from a kept stream (with cls) or images."""
    if cls is not None:
        return model.forward_stream(inputs, cls, lane=lane), cls
    if keys:
        return model(inputs, lane=lane, return_cls=True)
    return model(inputs, lane=lane), None  # without the [CLS], half of the last block is saved


def lane_loss(run: Callable, model: MultiLane, lane: int, batch: tuple, o: Options) -> Tensor:
    """The sum of the images' losses; run is `lane_logits`, compiled or not."""
    inputs, cls, labels = (None if t is None else t.to(o.where, non_blocking=True) for t in batch)
    with autocast(o):
        logits, cls = run(model, lane, inputs, cls, method(o).key_loss)
    logits = logits.float()
    if o.dataset in SINGLE_LABEL:
        loss = F.cross_entropy(logits, labels.argmax(1), reduction="sum")
    else:
        loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1).sum()
    if method(o).key_loss:
        loss = loss + len(labels) * model.key_loss(cls.float(), lane)
    return loss


def train_epoch(
    run: Callable, model: MultiLane, lane: int, optimizer, batches: Iterator, images: int, o, bar
) -> float:
    """One epoch over the global batches of all processes; returns the mean loss.

    Every process adds its images' losses and divides by the size of the global batch, so the sum
    of the processes' gradients is the gradient of one process, whatever each one's share is.
    """
    parameters, total = model.lane_parameters(lane), torch.zeros((), device=o.where)
    for start in range(0, images, o.batch):
        size, batch = min(o.batch, images - start), next(batches)
        optimizer.zero_grad(set_to_none=False)
        if batch is not None:
            loss = lane_loss(run, model, lane, batch, o)
            (loss / size).backward()
            total += loss.detach()
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        add_up([p.grad for p in parameters])
        optimizer.step()
        bar.update(size)
    add_up([total])
    return float(total) / images


def learning_rate(o: Options, epoch: int) -> float:
    """Cosine over the task's epochs, from lr * batch / 256 towards 0."""
    return o.lr * o.batch / 256 * (1 + math.cos(math.pi * epoch / o.epochs)) / 2


def unkept_seconds(
    model: MultiLane, lane: int, task: Task, transform: Callable, o: Options
) -> float:
    """How long an image of an epoch without the kept stream would take, by at most two batches."""
    small = Options(**vars(o) | {"batch": min(o.batch, TEST_BATCH)})
    batches, times = fresh_batches(task, transform, small, 0), []
    for _ in range(2):  # the first one warms up
        started, batch = time.perf_counter(), next(batches, None)
        if batch is not None:
            lane_loss(lane_logits, model, lane, batch, o).backward()
            if o.where.type == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - started) / len(batch[-1]))
    model.zero_grad()
    return times[-1] if times else math.nan


def train_lane(model: MultiLane, task: Task, state: State, o: Options) -> None:
    """Train the lane of a task from where its state is, and write the state after every epoch."""
    lane, images, views = task.index, len(task.train), make_views(o, model.backbone)
    run, kept, times = lane_logits, None, {}
    if o.compile:
        torch.compiler.reset()  # every lane is compiled anew, and PyTorch gives up after a few
        run = torch.compile(lane_logits)
    optimizer = torch.optim.Adam(model.lane_parameters(lane), betas=(0.9, 0.999))
    if state.tensors:
        try:
            restore(model, lane, optimizer, state.tensors)
        except SPOILED as error:
            raise spoiled(o.folder / "state.safetensors", error) from None
    if o.cache_views and method(o).on_stream and state.epoch < o.epochs:
        # Lanes cost alike: measured once in a run, it holds for the other tasks.
        known = [r["time"]["unkept_image"] for r in state.records if "unkept_image" in r["time"]]
        each = known[0] if known else unkept_seconds(model, lane, task, views[0], o)
        kept = keep_training(model, task, views, o)
        times = {"unkept_image": each, "unkept_epoch": each * images / rank_and_world()[1]}
        times["keeping"] = kept.seconds
    with progress(f"task {lane + 1}", o.epochs * images, state.epoch * images) as bar:
        for epoch in range(state.epoch, o.epochs):
            started, lr = time.perf_counter(), learning_rate(o, epoch)
            optimizer.param_groups[0]["lr"] = lr
            if kept:
                batches = kept_batches(kept, task, o, epoch)
            else:  # where there is nothing to keep, one fixed view is still the centre
                batches = fresh_batches(task, views[o.cache_views], o, epoch)
            loss = train_epoch(run, model, lane, optimizer, batches, images, o, bar)
            finite = all(p.isfinite().all() for p in model.lane_parameters(lane))
            if not (finite and math.isfinite(loss)):
                raise RunError(
                    f"the loss of task {lane + 1} is {loss} after epoch {epoch + 1}, or its lane "
                    f"is not finite: nothing of this epoch is kept, {lane} finished lanes stay in "
                    f"{o.folder}; try a lower --lr in another --run"
                )
            seconds = time.perf_counter() - started
            times |= {"seconds": seconds, "images_per_second": images / seconds}
            record = {"task": lane + 1, "epoch": epoch + 1, "loss": loss, "lr": lr, "time": times}
            state.records.append(record)
            state.epoch, state.tensors, times = epoch + 1, snapshot(model, lane, optimizer), {}
            write_state(o.folder, state)
            told = f"epoch {epoch + 1}/{o.epochs}, loss {loss:.4f}"
            bar.set_postfix_str(told)
            if bar.disable:
                say(f"    {told}, {images / seconds:,.0f} images/s")
    if o.readout:
        learn_readout(model, task, kept, views[1], o)


@torch.no_grad()
def learn_readout(
    model: MultiLane, task: Task, kept: Kept | None, view: Callable, o: Options
) -> None:
    """Add the centre view of every training image of a task to its lane's statistics."""
    started, (rank, world) = time.perf_counter(), rank_and_world()
    labels = task.train.labels[rank::world]
    if kept and o.cache_views == 1:

        def seen(rows: Tensor) -> Tensor:
            g = torch.from_numpy(kept.g[0, rows.numpy(), -1]).float()  # [b,N,D] of the last block
            return readout_features(model.backbone, g, kept.cls[0, rows])

        features = map(seen, torch.arange(len(labels)).split(TEST_BATCH))
    else:

        def kept_bits(images: Tensor) -> Tensor:  # resumed after the last epoch: as if it were kept
            g, cls = (t.float().cpu() for t in model.stream(images))  # [L,b,N,D], [b,D]
            return readout_features(model.backbone, g[-1].half().float(), cls)

        where = f"task {task.index + 1}, training"
        options = {"workers": o.workers, "rank": rank, "world": world, "where": where}
        batches = data.load_batches(task.train, view, TEST_BATCH * world, **options)
        look = kept_bits if o.cache_views == 1 else model.features
        features = (look(images.to(o.where)) for images, *_ in batches)
    with autocast(o):
        for phi, truth in zip(features, labels.split(TEST_BATCH), strict=True):
            model.learn_readout(task.index, phi, truth)
    lane = model.lanes[task.index]  # without statistics, if this process has no image
    sums = [t.to(o.where) for t in lane.statistics or model.no_statistics(len(task.classes))]
    add_up(sums)
    lane.statistics = Statistics(*(t.cpu() for t in sums))
    size = sum(t.nbytes for t in lane.statistics) / 1e6
    say(f"    readout: {size:.1f} MB of sums kept, {time.perf_counter() - started:.1f} s")


def progress(name: str, total: int, done: int = 0) -> tqdm:
    """A bar with images/s and the time left, if somebody watches."""
    silent = not (is_first() and sys.stderr.isatty())
    return tqdm(desc=name, total=total, initial=done, unit=" images", disable=silent)


# ---------------------------------------------------------------------------------------------
# 8. Scoring


class TestImages:
    """The test images of a run: whole batches of them go to the processes in turn."""

    def __init__(self, split: Split, model: MultiLane, o: Options):
        rank, world = rank_and_world()
        rows = torch.arange(len(split))
        self.rows = rows[rows // TEST_BATCH % world == rank]  # of this process
        self.count, self.o, self.kept = len(split), o, None
        self.part = split.take(self.rows, range(split.labels.shape[1]))
        self.view = make_views(o, model.backbone)[1]

    def images(self) -> Iterable:
        workers = self.o.workers
        return data.load_batches(self.part, self.view, TEST_BATCH, workers=workers, where="test")

    def keep(self, model: MultiLane) -> None:
        """Keep their frozen stream, to the bit, if that takes at most half of the free disk."""
        shape = stream_shape(model, 1, len(self.rows))
        size, room = disk_room(shape, np.float32, self.o)
        told = f"the frozen stream of the test images takes {size:,.0f} MB"
        if size > room / 2:
            say(f"    {told}, {room:,.0f} MB are free: the ViT runs over them after every task")
            return
        say(f"    {told} in {self.o.cache_dir or self.o.folder}")
        self.kept = keep_stream(model, shape, np.float32, [self.images()], self.o)

    def batches(self, model: MultiLane) -> Iterator:
        """What a method reads: g [L,B,N,D] and cls [B,D], or images [B,3,h,w] and None."""
        if self.kept:
            for rows in torch.arange(len(self.rows)).split(TEST_BATCH):
                g = torch.from_numpy(self.kept.g[0, rows.numpy()])  # [B,L,N,D]
                yield g.transpose(0, 1).to(self.o.where), self.kept.cls[0, rows].to(self.o.where)
        else:
            for images, *_ in self.images():
                images = images.to(self.o.where)
                yield model.stream(images) if method(self.o).on_stream else (images, None)


@torch.no_grad()
def test_logits(model: MultiLane, test: TestImages, lanes: Sequence[int | None]) -> Tensor:
    """The logits of some lanes on all test images [n,C], for all processes; None: all lanes as one.

    Lanes run one by one over the frozen stream: so every number is computed in the same way,
    whoever computes it and whatever else is asked for.
    """
    parts = [torch.zeros(0)]
    with progress("testing", len(test.rows)) as bar, autocast(test.o):
        for inputs, cls in test.batches(model):
            run = model if cls is None else partial(model.forward_stream, cls=cls)
            parts.append(torch.cat([run(inputs, lane=t).float() for t in lanes], 1))  # [B,C]
            bar.update(len(parts[-1]))
    widths = [len(model.classes) if t is None else len(model.lanes[t].classes) for t in lanes]
    logits = torch.zeros(test.count, sum(widths), device=test.o.where)
    if len(test.rows):
        logits[test.rows.to(test.o.where)] = torch.cat(parts[1:])
    add_up([logits])
    return logits.cpu()


@torch.no_grad()
def test_features(model: MultiLane, test: TestImages) -> Tensor:
    """What the readout sees of all test images [n,F], for all processes."""
    phi = torch.zeros(test.count, len(model.no_statistics(0).gram), device=test.o.where)
    parts = [phi[:0]]
    with autocast(test.o):
        parts += [readout_features(model.backbone, g[-1], cls) for g, cls in test.batches(model)]
    phi[test.rows.to(test.o.where)] = torch.cat(parts)
    add_up([phi])
    return phi.cpu()


def all_logits(kept: dict[str, Tensor], model: MultiLane, task: Task, o: Options) -> Tensor:
    """What the model said of all test images after a task [n,C], the readout included.

    kept: the lanes' "logits" [n,C] and, with a readout, the "features" [n,F] that it sees.
    """
    logits = kept["logits"][:, : len(task.seen)]
    if not o.readout:
        return logits
    lanes = model.lanes[: task.index + 1]
    weights = solve_readout([lane.statistics for lane in lanes])  # [F,C]
    sizes = [len(lane.classes) for lane in lanes]
    return logits + o.readout * readout_logits(kept["features"], weights, sizes)


def score(
    kept: dict[str, Tensor], model: MultiLane, task: Task, tasks: Sequence[Task], o: Options
) -> dict:
    """The scores after a task, from what is kept of all test images of the run: `all_logits`."""
    rows = torch.searchsorted(tasks[-1].test_rows, task.test_rows)
    widths = [len(t.classes) for t in tasks[: task.index + 1]]
    found = {"task": task.index + 1, "classes": len(task.seen), "test_images": len(rows)}
    if o.readout:
        lanes = kept["logits"][rows][:, : len(task.seen)]
        alone = score_task(lanes, task.test.labels, widths, o)
        found["without_readout"] = {name: alone[name] for name in main_scores(alone)}
    found |= score_task(all_logits(kept, model, task, o)[rows], task.test.labels, widths, o)
    found["by_class"] = dict(zip(task.seen, found["by_class"], strict=True))
    return found


def final_results(after: list[dict], model: MultiLane, o: Options) -> dict:
    """What a run comes to, from the scores after each task."""
    lost = forgetting([[number(x) for x in scores["by_task"]] for scores in after])
    return {
        **{name: after[-1][name] for name in main_scores(after[-1])},
        f"average_{metric(o)}": mean(number(scores[metric(o)]) for scores in after),
        **({"without_readout": without_readout(after, o)} if o.readout else {}),
        "forgetting": [None if math.isnan(x) else x for x in lost],
        "trainable_parameters": sum(p.numel() for p in model.lanes.parameters()),
        "after_task": after,
    }


def without_readout(after: list[dict], o: Options) -> dict:
    """What the lanes of a run come to without its readout."""
    alone = [scores["without_readout"] for scores in after]
    average = mean(number(scores[metric(o)]) for scores in alone)
    return alone[-1] | {f"average_{metric(o)}": average}


def metric(o: Options) -> str:
    """The name of the main score."""
    return "accuracy" if o.dataset in SINGLE_LABEL else "mAP"


# ---------------------------------------------------------------------------------------------
# 9. A run and its folder
#
#     config.json           everything needed to repeat the run
#     metrics.jsonl         a line an epoch, a line a task; what depends on the clock is in "time"
#     lane-01.safetensors   a finished lane
#     logits.safetensors    what the finished lanes say of the test images, and what a readout sees
#     state.safetensors     the lane in work
#     results.json          the scores; report.md and its plots: the same to be read


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder, and keep every other training out of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"another training is at work in {folder}: wait for it") from None
        for part in folder.glob("*.tmp"):  # what a killed process was writing
            part.unlink()
        yield


def read_config(folder: Path) -> dict | None:
    """What config.json says; None for a folder that is not there or empty."""
    path = folder / "config.json"
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no run's folder, but a file: give another --run")
    if not path.exists():
        if folder.is_dir() and (
            found := [p.name for p in folder.iterdir() if p.name != ".lock" and p.suffix != ".tmp"]
        ):
            raise UsageError(
                f"{folder} is no run's folder, it holds {min(found)}: give another --run"
            )
        return None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        check_config(saved)
        return saved
    except SPOILED as error:
        raise spoiled(path, error) from None


def check_config(saved: dict) -> None:
    """Raise whatever fits, unless every setting is one that this version's flags could give."""
    needed = "backbone_fingerprint", "data_digest", "command", "revision", "versions", "machine"
    for name in (*needed, "notes"):
        saved[name]
    given = {**saved["settings"], **saved["places"]}
    plain = {n: v for n, v in given.items() if not (v is None or isinstance(v, bool))}
    parsed = make_parser("glyphs").parse_args([f"{flag(n)}={v}" for n, v in plain.items()])
    for name, usual in defaults(given["dataset"], given["method"]).items():
        if name == "device":  # is of the command, not of the run
            continue
        value, read = given[name], getattr(parsed, name, None)
        read = str(read) if isinstance(read, Path) else read
        if value != read if name in plain else type(value) is not type(usual):
            raise ValueError(f"{flag(name)} is {value!r}")


def make_config(o: Options, model: MultiLane, benchmark: Benchmark) -> dict:
    """Everything needed to repeat a run."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    git += ["describe", "--always", "--dirty", "--abbrev=40"]
    try:
        revision = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        revision = "unknown"
    modules = {"torch": torch, "torchvision": torchvision, "timm": timm, "numpy": np}
    names = ["dataset", "protocol", *PRESETS[o.dataset], *COMMON]
    places = {name: getattr(o, name) for name in PLACES if name != "device"}
    return {
        "settings": {name: getattr(o, name) for name in names if name not in PLACES},
        "places": {n: str(p.resolve()) if isinstance(p, Path) else p for n, p in places.items()},
        "backbone_fingerprint": model.fingerprint(),
        "data_digest": data_digest(benchmark),
        "command": shlex.join(["python", *sys.argv]),
        "revision": revision,
        "versions": {"python": platform.python_version()}
        | {name: module.__version__ for name, module in modules.items()},
        "machine": {
            "system": platform.platform(),
            "device": torch.cuda.get_device_name() if o.where.type == "cuda" else str(o.where),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "processes": rank_and_world()[1],
        },
        "notes": list(benchmark.notes),
    }


def settle(explicit: dict, folder: Path) -> tuple[Options, dict | None]:
    """The options of a training: of the folder's run if there is one, else presets and flags."""
    saved = share(read_config(folder) if is_first() else None)
    resume = "resume" in explicit
    if saved is None:
        if resume and "run" in explicit and "dataset" not in explicit:  # it knows its own
            raise UsageError(
                f"{folder} holds no run to go on with: check --run, or say which --dataset to "
                "begin there"
            )
        return complete(explicit), None
    asked = explicit if resume else vars(complete(explicit))
    if differing := differences(saved, asked):
        raise UsageError(
            f"{folder} is a run of another configuration, it differs in {differing}: "
            "give another --run"
        )
    if not resume:
        go_on = "score it with --eval" if (folder / "report.md").exists() else "go on with --resume"
        raise UsageError(f"{folder} is a run already: {go_on}, or give another --run")
    return from_config(saved, explicit), saved


def differences(saved: dict, asked: dict) -> str:
    """The settings in which a run is not what is asked, in words; empty if there are none."""
    return ", ".join(
        f"{flag(name)} (there {value}, here {asked[name]})"
        for name, value in saved["settings"].items()
        if name in asked and asked[name] != value
    )


def from_config(saved: dict, explicit: dict) -> Options:
    """The options that a run was made with; where things are may be said anew."""
    places = {n: Path(p) if isinstance(p, str) else p for n, p in saved["places"].items()}
    return complete({**saved["settings"], **places, **explicit})


def check_weights(saved: dict, model: MultiLane, folder: Path) -> None:
    if saved["backbone_fingerprint"] != model.fingerprint():
        raise UsageError(f"{folder} was made over other backbone weights: give those as --weights")


def check_same(saved: dict, model: MultiLane, benchmark: Benchmark, folder: Path) -> None:
    """Refuse to go on with other weights or data than a run began with."""
    check_weights(saved, model, folder)
    if saved["data_digest"] != data_digest(benchmark):
        raise UsageError(f"{folder} was made of other data: give the same --data-dir")


def train(explicit: dict, folder: Path) -> None:
    """A whole run: every task's lane, its scores, the report."""
    o, saved = settle(explicit, folder)
    check_settings(o, explicit)
    if share(saved and is_first() and (folder / "report.md").exists()):
        say(f"{folder} is finished already: see {folder / 'report.md'}")
        return
    o.folder, model = folder, build_model(o)
    benchmark, tasks = load_tasks(o)
    if saved:
        check_same(saved, model, benchmark, folder)
    if o.start_from and not read_state(folder).task:
        check_start(o, model, tasks)
    config = saved or make_config(o, model, benchmark)
    if "check_data" in explicit and is_first():
        say(f"{data.check_data(tasks):,} image files can be read")
    # Nothing has been written so far: bad usage leaves no folder behind.
    with held(folder) if is_first() else contextlib.nullcontext():
        if is_first() and not saved:
            if read_config(folder):
                raise RunError(f"another training has begun in {folder} meanwhile")
            write_whole(folder / "config.json", json.dumps(config, indent=2).encode())
        say(data.describe(benchmark, tasks))
        state = run_tasks(model, tasks, o)
        if is_first():
            after = [record for record in state.records if "epoch" not in record]
            after = [{k: v for k, v in record.items() if k != "time"} for record in after]
            times = [record["time"] for record in state.records]
            results = final_results(after, model, o)
            results["time"] = {"seconds": sum(t["seconds"] + t.get("keeping", 0) for t in times)}
            write_whole(folder / "results.json", json.dumps(results, indent=2).encode())
            write_report(model, tasks, results, config, state.records, o)
            say(f"report: {folder / 'report.md'}")


def lane_files(folder: Path, count: int) -> list[Path]:
    return [folder / f"lane-{t + 1:02d}.safetensors" for t in range(count)]


def load_lanes(model: MultiLane, files: Sequence[Path]) -> None:
    """Load the finished lanes of a run."""
    try:
        model.load_lanes(files)
    except ValueError as error:
        raise RunError(str(error)) from None


def check_lanes(model: MultiLane, tasks: Sequence[Task], folder: Path) -> None:
    """Refuse lanes that are not those of the first tasks, as when two files were swapped."""
    files = lane_files(folder, len(model.lanes))
    for path, lane, task in zip(files, model.lanes, tasks, strict=False):
        if lane.classes != task.classes:
            names = [", ".join(classes) for classes in (lane.classes, task.classes)]
            raise spoiled(path, f"it is for {names[0]}, its task is for {names[1]}")


def read_kept(path: Path, images: int, classes: int, o: Options) -> dict[str, Tensor]:
    """What is kept of the test images, see `score`: of the first so many classes."""
    try:
        kept, wanted = load_file(path), {"logits": [images, classes]}
        if o.readout:
            wanted["features"] = [images, kept["features"].shape[-1]]
        for name, shape in wanted.items():
            found = list(kept[name].shape)
            if len(found) != 2 or found[0] != images or found[1] < shape[1]:
                raise ValueError(f"its {name} are {found} where {shape} are needed")
        kept["logits"] = kept["logits"][:, :classes].contiguous()
        return kept
    except SPOILED as error:
        raise spoiled(path, error) from None


def lanes_to_start_from(o: Options) -> list[Path]:
    """The finished lanes of the run that --start-from names."""
    files = lane_files(o.start_from, read_state(o.start_from).task) if o.start_from else []
    if o.start_from and not files:
        raise UsageError(f"--start-from {o.start_from} is no run's folder, or has no finished lane")
    return files


def check_start(o: Options, model: MultiLane, tasks: Sequence[Task]) -> None:
    """Refuse lanes to start from that are not those of the first tasks."""
    trial = type(model)(model.backbone, model.config)
    try:
        trial.load_lanes(lanes_to_start_from(o))
    except ValueError as error:
        raise UsageError(f"--start-from: {error}") from None
    for t, lane in enumerate(trial.lanes):
        wanted = tasks[t].classes if t < len(tasks) else ()
        if lane.classes != wanted:
            raise UsageError(
                f"--start-from {o.start_from}: its lane {t + 1} is for {', '.join(lane.classes)}, "
                f"but task {t + 1} here is for {', '.join(wanted) or 'nothing'}: write new classes "
                "at the end of classes.txt, and give a --protocol that begins like that run's"
            )


def run_tasks(model: MultiLane, tasks: Sequence[Task], o: Options) -> State:
    """Train and score the lanes, from wherever the folder's state is."""
    state = share(read_state(o.folder) if is_first() else None)
    files = lane_files(o.folder, len(tasks))
    kept_file, test = o.folder / "logits.safetensors", TestImages(tasks[-1].test, model, o)
    kept = {"logits": torch.zeros(test.count, 0)}  # see `score`; the first process needs them
    if o.start_from and not state.task:  # their files are copied: a run's folder is complete
        state.task = len(lanes_to_start_from(o))
        for old, new in zip(lanes_to_start_from(o), files, strict=False) if is_first() else ():
            write_whole(new, old.read_bytes())
    if state.records:
        say(f"resuming after {state.task} tasks and {state.epoch} epochs")
    if state.task > len(tasks) or state.epoch > o.epochs:
        raise spoiled(o.folder / "state.safetensors", "it is of a longer run")
    if is_first():
        load_lanes(model, files[: state.task])
        check_lanes(model, tasks, o.folder)
    if state.records and is_first():
        if state.task:
            # It may have been stopped after it had scored the lane in work: that is done again.
            kept = read_kept(kept_file, test.count, len(tasks[state.task - 1].seen), o)
        write_state(o.folder, state)  # it may have been stopped between the two files of this
    for task in tasks[len(model.lanes) : state.task]:  # the other processes get what the first read
        model.add_lane(task.classes)
    for p in model.lanes.parameters() if dist.is_initialized() else ():
        dist.broadcast(p.data, 0)
    keep_test = o.cache_views and method(o).on_stream and len(tasks) - state.task > 1
    if state.task and not state.records:  # lanes of another run: scored here, as if learned here
        say(f"{state.task} lanes are from {o.start_from}")
        started, kept["logits"] = time.perf_counter(), test_logits(model, test, range(state.task))
        if o.readout:
            kept["features"] = test_features(model, test)
        if is_first():
            write_whole(kept_file, save(kept))
            for task in tasks[: state.task]:
                scores = score(kept, model, task, tasks, o)
                tell_scores(scores)
                spent, started = time.perf_counter() - started, time.perf_counter()
                state.records.append(scores | {"time": {"seconds": spent}})
        write_state(o.folder, state)
    for task in tasks[state.task :]:
        names = ", ".join(task.classes)
        say(f"task {task.index + 1}/{len(tasks)}: {len(task.train):,} training images of {names}")
        torch.manual_seed(item_seed(o.seed, task.index))
        lane = model.add_lane(task.classes, o.warm_start)
        train_lane(model, task, state, o)
        started = time.perf_counter()
        if keep_test:
            test.keep(model)
            keep_test = False
        if method(o).independent:
            kept["logits"] = torch.cat([kept["logits"], test_logits(model, test, [lane])], 1)
        else:  # training may have changed what is said of the old classes: all is computed anew
            kept["logits"] = test_logits(model, test, [None])
        if o.readout and share("features" not in kept):
            kept["features"] = test_features(model, test)
        if is_first():
            scores = score(kept, model, task, tasks, o)
            write_whole(kept_file, save(kept))
            model.save_lane(lane, files[lane])
            tell_scores(scores)
            tell_saving([r["time"] for r in state.records if r["task"] == lane + 1])
            state.records.append(scores | {"time": {"seconds": time.perf_counter() - started}})
        state.task, state.epoch, state.tensors = lane + 1, 0, {}
        write_state(o.folder, state)
    return state


def tell_scores(scores: dict) -> None:
    words = "  ".join(f"{name} {cell(scores[name])}" for name in main_scores(scores))
    say(f"    after task {scores['task']}, {scores['classes']} classes seen: {words}")
    if alone := scores.get("without_readout"):
        words = "  ".join(f"{name} {cell(x)}" for name, x in alone.items())
        say(f"        without the readout: {words}")


def tell_saving(times: Sequence[dict]) -> None:
    """What the kept stream saved in a task, as far as it was measured."""
    keeping = sum(t.get("keeping", 0) for t in times)
    if keeping:
        E, spent = len(times), sum(t["seconds"] for t in times)
        epoch = mean(t.get("unkept_epoch", math.nan) for t in times)
        say(
            f"    frozen stream kept in {keeping:.1f} s, {E} epochs in {spent:.1f} s; "
            f"without it about {E} x {epoch:.1f} = {E * epoch:.1f} s"
        )


# ---------------------------------------------------------------------------------------------
# 10. The report


def is_published(o: Options, notes: Sequence[str]) -> bool:
    """Whether a run is one of the paper's: then its numbers can be set beside the paper's."""
    published = {**PRESETS[o.dataset], **COMMON}
    free = ("seed", "threshold", "data_dir", "device", "workers", "cache_dir", "compile")
    same = all(getattr(o, name) == value for name, value in published.items() if name not in free)
    return same and not notes and not o.dry_run and (o.dataset, o.protocol) in PAPER


def save_figure(figure: Figure, path: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_whole(path, picture.getvalue())


def draw_scores(results: dict, published: bool, o: Options) -> None:
    """scores.png: the main score after each task, with the paper's where it can be compared."""
    name, after = metric(o), results["after_task"]
    figure = Figure((6, 3.6), layout="constrained")
    axis, steps, values = figure.subplots(), range(1, len(after) + 1), [x[name] for x in after]
    axis.plot(steps, values, "o-", label=f"this run, Avg. {name} {results[f'average_{name}']:.1f}")
    for point in zip(steps, values, strict=True):
        where = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
        axis.annotate(f"{point[1]:.1f}", point, fontsize=8, **where)
    if published:
        average, final = PAPER[o.dataset, o.protocol]
        axis.axhline(final, ls=":", c="grey", label=f"paper, final {name} {final}")
        if average is not None:
            axis.axhline(average, ls="--", c="grey", label=f"paper, Avg. {name} {average}")
    axis.margins(y=0.15)
    axis.set(xlabel="after task", xticks=steps, ylabel=f"{name} over the classes seen (%)")
    axis.set_title(default_folder(o).name)
    axis.legend(fontsize=8)
    save_figure(figure, o.folder / "scores.png")


def draw_classes(results: dict, tasks: Sequence[Task], o: Options) -> None:
    """classes.png: AP (accuracy) of every class after the last task, coloured by task."""
    by_class = results["after_task"][-1]["by_class"]
    figure = Figure((6, max(2.5, 0.2 * len(by_class) + 0.9)), layout="constrained")
    axis, row, colours = figure.subplots(), 0, colormaps["tab10"].colors
    for task in tasks:
        for name in task.classes:
            value = by_class[name]
            axis.barh(row, value or 0, color=colours[task.index % 10])
            text = "no test image" if value is None else f"{value:.1f}"
            axis.text((value or 0) + 1, row, text, va="center", fontsize=7)
            row += 1
    axis.set_yticks(range(row), by_class, fontsize=7)
    axis.set(xlim=(0, 108), ylim=(row - 0.5, -0.5), xlabel="%")
    kind = "accuracy" if o.dataset in SINGLE_LABEL else "AP"
    axis.set_title(f"{kind} of each class after the last task, coloured by task", fontsize=10)
    save_figure(figure, o.folder / "classes.png")


def draw_forgetting(results: dict, o: Options) -> None:
    """forgetting.png: the score on every task after every task."""
    rows = [x["by_task"] for x in results["after_task"]]
    T, known = len(rows), [x for row in rows for x in row if x is not None]
    matrix = np.array([[number(x) for x in row] + [math.nan] * (T - len(row)) for row in rows])
    figure = Figure((3.4 + 0.5 * T, 2.4 + 0.5 * T), layout="constrained")
    axis = figure.subplots()
    picture = axis.imshow(matrix, vmin=min(known, default=0), vmax=100)
    for t, i in zip(*np.nonzero(~np.isnan(matrix)), strict=True):
        ink = "black" if picture.norm(matrix[t, i]) > 0.5 else "white"
        axis.text(i, t, f"{matrix[t, i]:.1f}", ha="center", va="center", color=ink, fontsize=8)
    axis.set_xticks(range(T), range(1, T + 1))
    axis.set_yticks(range(T), range(1, T + 1))
    axis.set(xlabel="on the classes of task", ylabel="after task")
    figure.colorbar(picture, label=f"{metric(o)} (%)", shrink=0.8)
    save_figure(figure, o.folder / "forgetting.png")


def undo_normalize(images: Tensor, o: Options, vit: nn.Module) -> Tensor:
    """Pixels in [0,1] of transformed images."""
    mean, std = (torch.tensor(vit.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    return (images * std + mean if o.normalize else images).clamp(0, 1)


def look_at(model: MultiLane, images: Tensor, o: Options) -> Tensor:
    """Where the lanes' selectors look in the last block, mean of all S: [B,T,rows,columns]."""
    return model.heatmaps(images.to(o.where))[:, :, -1].float().mean(2).cpu()


def overlay(axis: Any, title: str, picture: Tensor, weights: Tensor | None, top: float) -> None:
    """A picture [3,h,w], and over it a lane's weights [rows,columns], red for top."""
    axis.imshow(picture.permute(1, 2, 0).numpy())
    if weights is not None:
        large = F.interpolate(weights[None, None], picture.shape[1:], mode="bilinear")[0, 0]
        axis.imshow(large.numpy(), cmap="jet", alpha=0.5, vmin=0, vmax=top)
    axis.set_title(title if len(title) < 30 else title[:28] + " …", fontsize=8)


def draw_heatmaps(model: MultiLane, tasks: Sequence[Task], o: Options) -> None:
    """heatmaps.png: test images with up to two related and two unrelated lanes, as in the paper."""
    split, sizes = tasks[-1].test, [len(task.classes) for task in tasks]
    related = torch.stack([part.any(1) for part in split.labels.split(sizes, 1)], 1)  # [n,T]
    lanes = related.sum(1).clamp(max=2) + (~related).sum(1).clamp(max=2)  # [n] that can be shown
    chosen: dict[tuple, int] = {}  # an image for each set of related tasks, if it shows enough
    for row in lanes.argsort(descending=True, stable=True).tolist():
        chosen.setdefault(tuple(related[row].tolist()), row)
    rows = list(chosen.values())[:4]
    part = split.take(torch.tensor(rows), range(split.labels.shape[1]))
    view = make_views(o, model.backbone)[1]
    images, labels, _ = next(iter(data.load_batches(part, view, len(rows), where="test")))
    maps, pictures = look_at(model, images, o), undo_normalize(images, o, model.backbone)
    figure = Figure((9.5, 2.15 * len(rows) + 0.2), layout="constrained")
    grid = figure.subplots(len(rows), 5, squeeze=False)
    for axis in grid.flat:
        axis.axis("off")
    for i, (row, axes) in enumerate(zip(rows, grid, strict=True)):
        names = [tasks[-1].seen[c] for c in labels[i].nonzero()[:, 0]]
        overlay(axes[0], ", ".join(names), pictures[i], None, 1)
        lanes = [*zip(related[row].nonzero()[:2, 0].tolist(), axes[1:3], strict=False)]
        lanes += zip((~related[row]).nonzero()[:2, 0].tolist(), axes[3:], strict=False)
        top = max(float(maps[i, t].max()) for t, _ in lanes)
        for t, axis in lanes:
            title = f"lane {t + 1}, {'related' if related[row, t] else 'unrelated'}"
            overlay(axis, title, pictures[i], maps[i, t], top)
    save_figure(figure, o.folder / "heatmaps.png")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def cell(x: float | None) -> str:
    return "-" if x is None or math.isnan(x) else f"{x:.2f}"


def write_report(
    model: MultiLane, tasks: Sequence[Task], results: dict, config: dict, records: list, o: Options
) -> None:
    """report.md and its plots; the report is the last file of a run: with it, it is finished."""
    name, after, published = metric(o), results["after_task"], is_published(o, config["notes"])
    draw_scores(results, published, o)
    draw_classes(results, tasks, o)
    draw_forgetting(results, o)
    notes = [f"Note: {note}." for note in config["notes"]]
    notes += ["A dry run over a few images: its scores mean nothing."] * o.dry_run
    if published:
        average, final = PAPER[o.dataset, o.protocol]
        notes.append(f"The paper's final {name}: {final}.")
        notes += [f"The paper's Avg. {name}: {average}."] * (average is not None)
    ran = """\
A lane never changes once it is trained, so after each task only the new lane ran on the test
images: the older lanes' logits were kept."""
    if not method(o).independent:
        ran = """\
A new task may change what is said of older classes, so after each task all were tested again."""
    if o.readout:
        alone = results["without_readout"]
        scores = [f"{label} {cell(alone[key])}" for key, label in
                  ((name, name), (f"average_{name}", f"Avg. {name}"))]  # fmt: skip
        size = sum(t.nbytes for t in model.lanes[0].statistics) / 1e6
        ran += f"""

The logits are those of the lanes plus {o.readout:g} x those of a readout that all lanes share: ridge
regression on frozen features, in closed form from sums over each task's own training images. A
lane's file keeps its task's sums, {size:.1f} MB however many images there are, and no image. The
lanes without the readout: {", ".join(scores)}."""
    selectors = "There are no selectors."
    if has_selectors(o):
        draw_heatmaps(model, tasks, o)
        block = "last" if model.config.drop_replace else "first"
        selectors = f"""\
Attention of the selectors to the patches (equation 3) in the {block} block, mean over the selectors
of a lane. From the left: a test image, up to two lanes that have a class it holds, up to two lanes
that have none; a row has one colour scale.

![selector heatmaps](heatmaps.png)"""
    seconds = f"Training and testing took {results['time']['seconds']:.0f} s."
    if o.cache_views and method(o).on_stream:
        unkept = {r["task"]: x for r in records if (x := r["time"].get("unkept_epoch"))}
        keeping = sum(r["time"].get("keeping", 0) for r in records)
        seconds += f"""
{keeping:.0f} s of it were for keeping frozen streams of training images; {o.epochs} epochs without
them would have taken about {o.epochs * sum(unkept.values()):.0f} s."""
    columns, average = main_scores(after[-1]), results[f"average_{name}"]
    by_step = [
        [x["task"], x["classes"], x["test_images"], *(cell(x[key]) for key in columns)]
        for x in after
    ]
    last, lost, by_task = after[-1]["by_task"], [*results["forgetting"], None], []
    for t, task in enumerate(tasks):
        scores = after[t]["by_task"][t], last[t], lost[t]
        by_task.append([t + 1, ", ".join(task.classes), *map(cell, scores)])
    made = {**config["versions"], **config["machine"]}
    text = f"""\
# {default_folder(o).name}: {name} {cell(results[name])}, Avg. {name} {cell(average)}

{"".join(note + chr(10) * 2 for note in notes)}\
{table(["after task", "classes seen", "test images", *columns], by_step)}

![{name} after each task](scores.png)

{ran}

## Forgetting

{table(["task", "classes", f"{name} when learned", f"{name} at the end", "forgetting"], by_task)}

Mean forgetting: {cell(mean(map(number, results["forgetting"])))}.

![{name} on each task after each task](forgetting.png)

## Classes

![each class after the last task](classes.png)

## Where selectors look

{selectors}

## How it was made

`{config["command"]}`

Revision {config["revision"]}; {", ".join(f"{key} {value}" for key, value in made.items())}.
{seconds}
Trainable parameters: {results["trainable_parameters"]:,} in {len(tasks)} lanes, beside
{sum(p.numel() for p in model.backbone.parameters()):,} frozen ones.

{table(["setting", "value"], list(config["settings"].items()))}

## Definitions

{"".join(f"- {line}{chr(10)}" for line in METRICS)}"""
    write_whole(o.folder / "report.md", text.encode())


# ---------------------------------------------------------------------------------------------
# 11. Scoring again, predicting, and the dry run


def open_run(folder: Path, explicit: dict) -> tuple[Options, dict, MultiLane]:
    """A run's options, its config and its finished lanes."""
    saved = read_config(folder)
    if saved is None:
        raise UsageError(f"{folder} is no run's folder: it has no config.json")
    o = from_config(saved, explicit)
    o.folder, model, lanes = folder, build_model(o), read_state(folder).task
    if not lanes:
        raise UsageError(f"{folder} has no finished lane yet: train with --resume --run {folder}")
    check_weights(saved, model, folder)
    load_lanes(model, lane_files(folder, lanes))
    return o, saved, model


def read_results(folder: Path) -> dict:
    """The scores of a finished run."""
    path = folder / "results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        for name in ("after_task", "forgetting", "trainable_parameters", "time"):
            results[name]
        return results
    except SPOILED as error:
        remedy = f"remove it and report.md, and make both again with --resume --run {folder}"
        raise spoiled(path, error, remedy) from None


def evaluate(explicit: dict, folder: Path) -> None:
    """--eval: run the lanes of a finished run over the test images again, and compare."""
    o, saved, model = open_run(folder, explicit)
    if not (folder / "results.json").exists():
        raise UsageError(f"{folder} is not finished: train with --resume --run {folder}")
    before = read_results(folder)
    benchmark, tasks = load_tasks(o)
    check_same(saved, model, benchmark, folder)
    check_lanes(model, tasks, folder)
    test, after, name = TestImages(tasks[-1].test, model, o), [], metric(o)
    kept = {"features": test_features(model, test)} if o.readout else {}
    if method(o).independent:
        kept["logits"] = test_logits(model, test, range(len(tasks)))
    for task in tasks:
        if not method(o).independent:  # as it was then
            until = type(model)(model.backbone, model.config)
            until.load_lanes(lane_files(folder, task.index + 1))
            kept["logits"] = test_logits(until, test, [None])
        after.append(score(kept, model, task, tasks, o))
        tell_scores(after[-1])
    results = final_results(after, model, o)
    lost = mean(map(number, results["forgetting"]))
    say(f"Avg. {name} {cell(results[f'average_{name}'])}, mean forgetting {cell(lost)}")
    shared = [key for key in results if key in before]  # another --threshold adds some
    if differing := [key for key in shared if not same(results[key], before[key])]:
        raise RunError(f"{folder / 'results.json'} has other numbers for {', '.join(differing)}")
    say(f"the same digits as {folder / 'results.json'}")


def same(a: Any, b: Any) -> bool:
    """Whether results agree; another --threshold gives scores that only one of them has."""
    if isinstance(a, dict) and isinstance(b, dict):
        return all(same(a[key], b[key]) for key in a.keys() & b.keys())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@torch.no_grad()
def predict(explicit: dict, folder: Path, files: Sequence[Path]) -> None:
    """--predict: the classes of some images, and where the lanes look."""
    o, _, model = open_run(folder, explicit)
    view, single = make_views(o, model.backbone)[1], o.dataset in SINGLE_LABEL
    pictures = [data.read_image(path, "--predict") for path in files]
    for index, (path, picture) in enumerate(zip(files, pictures, strict=True)):
        image = view(picture)[None]  # [1,3,h,w]
        with autocast(o):
            logits = model(image.to(o.where))[0].float().cpu()  # [C]
        scores = logits.softmax(0) if single else logits.sigmoid()
        present = scores == scores.max() if single else scores >= o.threshold
        say(path)
        for c in scores.argsort(descending=True)[: max(5, int(present.sum()))].tolist():
            say(f"  {scores[c]:.3f} {'*' if present[c] else ' '} {model.classes[c]}")
        if has_selectors(o):
            again = sum(other.stem == path.stem for other in files[:index])
            target = folder / "predictions" / f"{path.stem}{f'-{again + 1}' * (again > 0)}.png"
            target.parent.mkdir(exist_ok=True)
            draw_prediction(model, image, scores, path.name, target, o)
            say(f"  drawn: {target}")
    say(f"* {'the highest' if single else f'at least {o.threshold:g}'}")


def draw_prediction(
    model: MultiLane, image: Tensor, scores: Tensor, name: str, path: Path, o: Options
) -> None:
    """An image [1,3,h,w], and where each lane looks, with its highest score of scores [C]."""
    maps, picture = look_at(model, image, o)[0], undo_normalize(image, o, model.backbone)[0]
    columns = min(6, len(maps) + 1)
    rows = math.ceil((len(maps) + 1) / columns)
    figure = Figure((2.1 * columns, 2.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes:
        axis.axis("off")
    overlay(axes[0], name, picture, None, 1)
    parts = scores.split([len(lane.classes) for lane in model.lanes])
    for t, (lane, part) in enumerate(zip(model.lanes, parts, strict=True)):
        title = f"lane {t + 1}: {lane.classes[part.argmax()]} {part.max():.2f}"
        overlay(axes[t + 1], title, picture, maps[t], float(maps.max()))
    save_figure(figure, path)


def dry_run(explicit: dict) -> None:
    """--dry-run: train, score and predict over a few images, in a folder that is removed."""
    folder = share(tempfile.mkdtemp(prefix="multilane-dry-run-") if is_first() else None)
    run = Path(folder) / "run"
    say("dry run: the first two tasks, a few images of each class, 2 epochs; scores mean nothing")
    try:
        train(explicit | {"epochs": 2}, run)
        say("scoring again, as --eval does")
        here = {name: explicit[name] for name in ("dry_run", "where", *PLACES) if name in explicit}
        evaluate(here, run)
        say("predicting, as --predict does")
        image = load_tasks(complete(explicit))[1][0].test.images[0]
        if is_first():
            if isinstance(image, Tensor):
                pixels, image = image, Path(folder) / "image.png"
                torchvision.io.write_png(pixels, str(image))
            predict(here, run, [image])
    finally:
        if is_first():
            shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------------------------------------
# 12. The command line


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def defaults(dataset: str, method: str) -> dict[str, Any]:
    """The settings of a data set and a method, where no flag says otherwise."""
    own = METHOD_PRESETS.get(method, {})
    preset = PRESETS[dataset] | own.get("any", {}) | own.get(dataset, {})
    return preset | COMMON | {"protocol": data.PROTOCOLS[dataset], "method": method}


def make_parser(dataset: str, method: str = "multilane") -> argparse.ArgumentParser:
    """All flags; the help has the defaults of data set and method. None is set by itself."""
    preset = defaults(dataset, method)
    style = argparse.RawDescriptionHelpFormatter
    epilog = "\n".join(textwrap.fill(line, 100, subsequent_indent="    ") for line in METRICS)
    parser = Parser("train.py", None, __doc__, epilog, formatter_class=style, allow_abbrev=False)
    group = parser.add_argument_group("data")

    def add(*names: str, text: str, **options):
        name = names[0].removeprefix("--").replace("-", "_")
        if preset.get(name) is not None:
            default = preset[name]
            default = ("no", "yes")[default] if isinstance(default, bool) else default
            text = f"{text} (default: {default})"
        group.add_argument(*names, help=text, default=argparse.SUPPRESS, **options)

    yes_no, path = {"action": argparse.BooleanOptionalAction}, {"type": Path, "metavar": "PATH"}
    add("--dataset", text="default: glyphs", choices=PRESETS)
    text = "B0-C4: tasks of 4 classes; B10-C2: 10, then 2 each; 10-tasks; of own data, say which"
    add("--protocol", text=text)
    add("--order-seed", text="shuffle the classes before the cut into tasks", type=at_least(0))
    add("--data-dir", text="where data sets are, or are downloaded to", **path)
    text = "score on this part of the training images, not on the test images: to choose settings"
    add("--holdout", text=text, type=between(0, 0.9))
    add("--check-data", text="open every image before training begins", action="store_true")
    group = parser.add_argument_group("what to do, if not a training from its beginning")
    text = "a run whose lanes are those of the first tasks: only the other tasks are trained"
    add("--start-from", text=text, metavar="RUN", type=Path)
    # torchrun on Python 3.11 takes --run for its own --run-path: hence the second name.
    add(
        "--run",
        "--run-dir",
        text="the run's folder; default: runs/<data set>-<protocol>...",
        **path,
    )
    add("--resume", text="go on with the run in --run, or begin it", action="store_true")
    add("--eval", text="score a finished run again", metavar="RUN", type=Path)
    add(
        "--predict",
        text="the classes of images, by the lanes of --run",
        nargs="+",
        metavar="IMAGE",
        type=Path,
    )
    add("--dry-run", text="everything in seconds, over a few images", action="store_true")
    group = parser.add_argument_group(f"settings, with the defaults of {dataset} and {method}")
    add("--method", text="see baselines.py", choices=baselines.METHODS)
    add("--backbone", text="a timm ViT by its full name")
    add("--weights", text="its weights, .safetensors or .pth, instead of timm's", **path)
    add("--epochs", text="for each task", type=at_least(1))
    add("--batch", text="images, of all processes together", type=at_least(1))
    add("--lr", text="of Adam, is multiplied by batch/256", type=between(0, math.inf))
    add("--selectors", text="for each lane", type=at_least(1))
    add("--prompts", text="for each lane and block", type=at_least(0))
    add("--prompt-blocks", text="the first so many blocks have prompts", type=at_least(0))
    add("--normalize", text="pixels by the backbone's mean and std", **yes_no)
    add("--crop-scale", text="least part of an image in a training view", type=between(0, 1))
    add("--flip", text="mirror half of the training views", **yes_no)
    text = """keep the frozen stream of so many fixed views of each training image on disk, and
        train on that; 1: the centre, not augmented; 0: new views in every epoch"""
    add("--cache-views", text=text, type=at_least(0))
    add("--cache-dir", text="where to keep it, instead of the run's folder", **path)
    add("--warm-start", text="selectors and prompts start from the lane before", **yes_no)
    text = """beyond the paper: add to the lanes' logits those of a readout that all lanes share,
        times WEIGHT (2 if no number is given)"""
    options = {"nargs": "?", "const": 2.0, "type": between(0, 1e6), "metavar": "WEIGHT"}
    add("--readout", text=text, **options)
    add("--ablate", text="take one idea away; selectors: Token Merging", choices=ABLATIONS)
    add("--merged-tokens", text="tokens that Token Merging leaves at most", type=at_least(1))
    add("--threshold", text="of --predict, and of CF1, OF1 besides 0.8", type=between(0, 1))
    add("--seed", text="of everything random", type=at_least(0))
    group = parser.add_argument_group("this machine")
    add("--precision", text="of the forward pass", choices=("fp32", "bf16"))
    add("--compile", text="the lane's forward and backward pass", action="store_true")
    add("--device", text="cpu, cuda, cuda:1, ...")
    add("--workers", text="processes that load images", type=at_least(0))
    return parser


def complete(explicit: dict) -> Options:
    """Flags over the preset of their data set and method."""
    dataset = explicit.get("dataset", "glyphs")
    preset = defaults(dataset, explicit.get("method", COMMON["method"]))
    return Options(**{"dry_run": False, **preset, "dataset": dataset, **explicit})


def check_command(given: set[str]) -> None:
    """Refuse commands and flags that would do nothing together."""
    modes = [name for name in ("eval", "predict", "dry_run", "resume") if name in given]
    if len(modes) > 1:
        raise UsageError(f"{flag(modes[0])} does not go with {flag(modes[1])}")
    for mode, names in {
        "eval": {"eval", "data_dir", "weights", "device", "workers", "threshold"},
        "predict": {"predict", "run", "weights", "device", "threshold"},
    }.items():
        if mode in given and (useless := given - names):
            raise UsageError(f"{flag(min(useless))} does nothing with {flag(mode)}")
    if "predict" in given and "run" not in given:
        raise UsageError("--predict needs --run RUN: the lanes that are asked")
    if "dry_run" in given and (useless := given & {"run", "epochs", "start_from"}):
        raise UsageError(f"{flag(min(useless))} does nothing with --dry-run, which has its own")


def check_settings(o: Options, given: Collection[str]) -> None:
    """Refuse settings that would do nothing together, or cannot be."""
    named = f"with --method {o.method}"
    for name, useless, why in (
        *((name, name not in method(o).flags, named) for name in baselines.LANE_FLAGS),
        ("warm_start", not method(o).warm_start, named),
        ("ablate", o.method != "multilane", named),
        ("readout", method(o).model is not MultiLane, named),
        ("cache_dir", not method(o).on_stream, f"{named}, which keeps no stream"),
        ("protocol", o.method == "joint", f"{named}: all is one task"),
        ("crop_scale", o.cache_views == 1, "with --cache-views 1, which takes the centre"),
        ("flip", o.cache_views == 1, "with --cache-views 1, which takes the centre"),
        ("cache_dir", o.cache_views == 0, "without --cache-views"),
        ("selectors", o.ablate == "selectors", "with --ablate selectors: Token Merging has none"),
        ("start_from", not method(o).independent, "where a task may change older ones"),
        ("start_from", o.method == "joint", f"{named}: all is one task"),
        ("merged_tokens", o.ablate != "selectors", "without --ablate selectors"),
        ("prompt_blocks", o.prompts == 0, "with --prompts 0"),
        ("prompts", o.prompt_blocks == 0, "with --prompt-blocks 0"),
        ("threshold", o.dataset in SINGLE_LABEL, f"with {o.dataset}: its images have one label"),
    ):
        if name in given and useless:
            raise UsageError(f"{flag(name)} does nothing {why}")
    if o.holdout and o.start_from:
        raise UsageError(
            "--holdout with --start-from could test old lanes on images that they were trained "
            "on: give the data a test part"
        )
    if o.readout and o.ablate == "pathways":
        raise UsageError(
            "--readout with --ablate pathways: the readout is scored beside lanes that are asked "
            "one by one, one pathway is asked as a whole: leave one of the two out"
        )
    if o.cache_views > 1 and not method(o).on_stream:
        raise UsageError(f"--cache-views {o.cache_views} {named}: give 0 or 1, it keeps no stream")
    # Before anything is downloaded; without one, reading the user's own data says what would fit.
    if o.protocol and not re.fullmatch(r"B\d+-C\d+|\d+-tasks", o.protocol):
        raise UsageError(f"--protocol {o.protocol} is none: give one like B0-C4 or 10-tasks")
    if o.cache_dir is not None and not o.cache_dir.is_dir():
        raise UsageError(f"--cache-dir {o.cache_dir}: there is no such folder")
    if o.batch < rank_and_world()[1]:
        raise UsageError(f"--batch {o.batch} is smaller than the number of processes")


def default_folder(o: Options) -> Path:
    """runs/<name>, where what is changed most often makes the name."""
    parts = [o.dataset, o.method if o.method != "multilane" else ""]
    parts += [o.protocol if o.method != "joint" else "", f"no-{o.ablate}" if o.ablate else ""]
    parts += ["readout" if o.readout else ""]
    parts += [f"holdout{o.holdout:g}" if o.holdout else ""]
    parts += [f"seed{o.seed}" * (o.seed > 0), f"order{o.order_seed}" * (o.order_seed is not None)]
    return Path("runs") / "-".join(filter(None, parts))


def parse(arguments: Sequence[str] | None) -> dict:
    """The flags that are given, and no others."""
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--dataset", default="glyphs", choices=PRESETS)
    first.add_argument("--method", default="multilane", choices=baselines.METHODS)
    chosen = first.parse_known_args(arguments)[0]
    explicit = vars(make_parser(chosen.dataset, chosen.method).parse_args(arguments))
    check_command(explicit.keys())
    return explicit


def command(arguments: Sequence[str] | None) -> None:
    """Do what the command line says."""
    explicit = parse(arguments)
    explicit["where"] = start_processes(explicit.get("device", "auto"))
    if "eval" in explicit:
        return evaluate(explicit, explicit["eval"])
    if "predict" in explicit:
        return predict(explicit, explicit["run"], explicit["predict"]) if is_first() else None
    if "dry_run" in explicit:
        return dry_run(explicit)
    folder = explicit.get("run") or default_folder(complete(explicit))
    go_on = f"--resume --run {shlex.quote(str(folder))}"
    try:
        return train(explicit, folder)
    except KeyboardInterrupt:
        begun = (folder / "config.json").is_file()
        hint = f"go on with: python train.py {go_on}" if begun else "nothing has been kept yet"
        say(f"\nstopped; {hint}")
        raise
    except OSError as error:
        raise RunError(
            f"{error}: what is finished stays in {folder}; once this is mended, go on with {go_on}"
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for bad usage, 1 for a run that cannot go on, 130 for Ctrl-C."""
    try:
        command(arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
        return 0
    except KeyboardInterrupt:
        return 130
    except (UsageError, DataError) as error:
        text, code = str(error), 2
    except (RunError, OSError) as error:
        text, code = str(error), 1
    print(f"train.py: error: {' '.join(text.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
