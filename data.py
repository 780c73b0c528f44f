"""Data sets as streams of tasks.

A benchmark is a list of classes, a training and a test split. A protocol cuts the classes into
tasks. What a task may see is what class-incremental learning allows: of the training images only
those that hold one of its classes, and of their labels only its own; it is tested on the images
that hold any class seen so far, over the classes seen so far.

    python data.py glyphs                            the embedded benchmark: no download, no GPU
    python data.py voc --protocol B10-C2             print a split; --picture FILE draws it
    python data.py own --data-dir DIR --protocol B0-C2   the same of your own images
    python data.py glyphs --pretrain FILE            make the glyphs' ViT again, from nothing

VOC2007, MS-COCO 2014, CIFAR-100 and ImageNet-R are read from --data-dir in the layouts in which
they are usually unpacked, or downloaded into it. Your own images come with a CSV or sorted into
folders: see `load_own`.
"""

import argparse
import csv
import filecmp
import hashlib
import io
import json
import math
import os
import pickle
import re
import sys
import tarfile
import unicodedata
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from tqdm import tqdm


class DataError(ValueError):
    """Something is wrong with the data or with what was asked of it; the text says what."""

    def __init__(self, text: str):  # a loader's worker wraps the sentence into its traceback
        super().__init__(text.rpartition("DataError: ")[2].strip())


class UsageError(ValueError):
    """What was asked cannot be done; the text says why. Exit code 2."""


# ---------------------------------------------------------------------------------------------
# Benchmarks and tasks


@dataclass(frozen=True)
class Split:
    """Images and their labels."""

    images: Sequence[Path] | Tensor  # files, or pixels uint8 [n,3,height,width]
    labels: Tensor  # bool [n,C]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor, columns: Sequence[int]) -> "Split":
        """Some images (bool or indices [n]) and some classes, in the order given."""
        rows = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        pixels = isinstance(self.images, Tensor)
        images = self.images[rows] if pixels else [self.images[i] for i in rows.tolist()]
        return Split(images, self.labels[rows][:, list(columns)])


@dataclass(frozen=True)
class Benchmark:
    """A data set: classes in alphabetical or the user's order, labels in columns of that order."""

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    multi_label: bool = True
    notes: tuple[str, ...] = ()  # what is unlike the published data, a line each


@dataclass(frozen=True)
class Task:
    """One step of the stream."""

    index: int
    classes: tuple[str, ...]  # its own
    seen: tuple[str, ...]  # of all tasks up to this one, in the order of the lanes' logits
    train: Split  # labels [n,len(classes)]
    test: Split  # labels [n,len(seen)]
    test_rows: Tensor  # [len(test)] where these images are in the benchmark's test split


def task_sizes(protocol: str | None, classes: int, multi_label: bool = True) -> list[int]:
    """How many classes each task of a protocol has: "B0-C4", "B10-C2", or "10-tasks".

    B<base>-C<step>: base classes in the first task (0: none apart), then step in every further.
    """
    if protocol is None:
        fitting = [f"B0-C{n}" for n in range(1, classes + 1) if classes % n == 0]
        raise DataError(
            f"Say how the {classes} classes arrive, with --protocol B<base>-C<step>: base in the "
            f"first task, then step in every further; without a base {_either(fitting)} would fit."
        )
    if found := re.fullmatch(r"B(\d+)-C(\d+)", protocol):
        base, step = (int(n) for n in found.groups())
        rest = classes - base
        if base < classes and step and rest % step == 0:
            return [base] * (base > 0) + [step] * (rest // step)
        hint = f"the base must be below {classes}"
        if rest > 0:
            fitting = [n for n in range(1, rest + 1) if rest % n == 0]
            hint = f"with B{base} the step can be {_either(fitting)}"
    elif (found := re.fullmatch(r"(\d+)-tasks", protocol)) and not multi_label:
        tasks = int(found[1])
        if tasks and classes % tasks == 0:
            return [classes // tasks] * tasks
        fitting = [n for n in range(1, classes + 1) if classes % n == 0]
        hint = f"the number of tasks can be {_either(fitting)}"
    else:
        kinds = 'like "B0-C4"' + ("" if multi_label else ' or "10-tasks"')
        raise DataError(f"There is no protocol {protocol!r} for this data set: give one {kinds}.")
    raise DataError(f"{classes} classes do not divide into {protocol}: {hint}.")


def _either(choices: Sequence[int | str]) -> str:
    *most, last = (str(choice) for choice in choices)
    return f"{', '.join(most)} or {last}" if most else last


def make_tasks(
    benchmark: Benchmark, protocol: str | None, order_seed: int | None = None, learned: int = 0
) -> list[Task]:
    """Cut a benchmark into tasks; classes in its order, or shuffled by order_seed.

    The first `learned` tasks have their lanes already: they may be without training images.
    """
    if not len(benchmark.test):
        raise DataError(
            f"{benchmark.name} has no test images: add them (own data: test.csv or folders "
            "test/<class>/, made like train), or score on a part of the training images, with "
            "--holdout 0.2."
        )
    order = list(range(len(benchmark.classes)))
    if order_seed is not None:
        generator = torch.Generator().manual_seed(order_seed)
        order = torch.randperm(len(order), generator=generator).tolist()
    tasks, start, train, test = [], 0, benchmark.train, benchmark.test
    try:
        sizes = task_sizes(protocol, len(order), benchmark.multi_label)
    except DataError as error:
        if benchmark.name != "own":
            raise
        names = [f"{name!r}" for name in benchmark.classes]  # one may be a slip of the pen
        names = names if len(names) <= 20 else [*names[:20], f"{len(names) - 20} more"]
        raise DataError(f"{str(error)[:-1]}; they are {', '.join(names)}.") from None
    for index, size in enumerate(sizes):
        own, seen = order[start : start + size], order[: start + size]
        names = [benchmark.classes[c] for c in seen]
        rows = train.labels[:, own].any(1)
        test_rows = test.labels[:, seen].any(1).nonzero()[:, 0]
        if (index >= learned and not rows.any()) or not len(test_rows):
            raise DataError(
                f"Task {index + 1} of {benchmark.name} {protocol} ({', '.join(names[start:])}) has "
                f"{int(rows.sum())} training and {len(test_rows)} test images: it cannot be "
                "learned; choose larger steps or complete the data."
            )
        parts = train.take(rows, own), test.take(test_rows, seen), test_rows
        tasks.append(Task(index, tuple(names[start:]), tuple(names), *parts))
        start += size
    return tasks


def hold_out(benchmark: Benchmark, part: float, seed: int = 0) -> Benchmark:
    """A benchmark whose test images are a part of the training images: to choose settings by."""
    train, every = benchmark.train, range(len(benchmark.classes))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    held = torch.zeros(len(train), dtype=torch.bool)
    held[order[: round(part * len(train))]] = True
    note = f"scored on {int(held.sum()):,} held-out training images, not on the test images"
    train, test = train.take(~held, every), train.take(held, every)
    return replace(benchmark, train=train, test=test, notes=(*benchmark.notes, note))


def average_precision(scores: Tensor, truth: Tensor) -> float:
    """Area under precision over recall, by rank: the mean precision at the ranks of the positives.

    scores, truth [n]; NaN if there is no positive. Of equal scores the earlier image ranks higher.
    """
    hits = truth[scores.argsort(descending=True, stable=True)].double()
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1, device=hits.device)
    return float((precision * hits).sum() / hits.sum())


# ---------------------------------------------------------------------------------------------
# From files to batches


def open_image(path: Path) -> Image.Image:
    """An RGB image as a person sees it: grey, CMYK, palette and EXIF-rotated ones included."""
    with Image.open(path) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16-bit grey, which PIL would clip instead of scaling
            image = Image.fromarray((np.asarray(image) / 257).clip(0, 255).astype(np.uint8))
        return image.convert("RGB")


def make_transform(
    train: bool,
    size: int = 224,
    mean_std: tuple[Sequence[float], Sequence[float]] | None = None,
    scale: tuple[float, float] = (0.05, 1.0),
    flip: bool = True,
    resize: float = 8 / 7,
    timm_backbone: nn.Module | None = None,
) -> Callable:
    """From an RGB image to floats [3,size,size], as published, or for testing as timm does it.

    Published: training takes a random crop of `scale` of the area, resized, and flips it; testing
    resizes to 8/7 of the size (256 for 224, bicubic; `resize` says otherwise) and takes the
    centre. Pixels are in [0,1]: mean_std=None leaves them so, (mean, std) normalizes. With
    timm_backbone, testing follows that backbone's own configuration in timm (crop, interpolation,
    and mean and std unless mean_std is None).
    """
    if timm_backbone is not None and not train:
        from timm.data import create_transform, resolve_model_data_config

        config = resolve_model_data_config(timm_backbone)
        if mean_std is None:
            config |= {"mean": (0.0,) * 3, "std": (1.0,) * 3}
        return v2.Compose([v2.ToPILImage(), create_transform(**config)])
    if train:
        steps = [v2.RandomResizedCrop(size, scale, (3 / 4, 4 / 3), antialias=True)]
        steps += [v2.RandomHorizontalFlip()] * flip
    else:
        bicubic = v2.InterpolationMode.BICUBIC
        shorter_side = v2.Resize(round(size * resize), bicubic, antialias=True)
        steps = [shorter_side, v2.CenterCrop(size)]
    steps = [v2.ToImage(), *steps, v2.ToDtype(torch.float32, scale=True)]
    return v2.Compose(steps + ([v2.Normalize(*mean_std)] if mean_std else []))


class Images(Dataset):
    """A split, transformed. An item is asked for by (index, seed): its randomness is its own."""

    def __init__(self, split: Split, transform: Callable, where: str):
        self.split, self.transform, self.where = split, transform, where

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, Tensor, int]:
        index, seed = item
        image = self.split.images[index]
        if not isinstance(image, Tensor):
            image = v2.functional.to_image(read_image(image, self.where))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.transform(image), self.split.labels[index].float(), index


def read_image(path: Path, where: str) -> Image.Image:
    """`open_image`, with a sentence for a file that is not one."""
    try:
        return open_image(path)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path} ({where}) cannot be read as an image ({error}): replace it, or leave it out."
        ) from error


def load_batches(
    split: Split,
    transform: Callable,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    where: str = "images",
) -> DataLoader:
    """Batches (images [b,3,h,w], labels [b,C], indices [b]) of one epoch.

    Order and augmentation depend on seed, epoch and image alone, so they are the same with any
    number of workers. With several processes, each gets its share of every global batch.
    """
    order = torch.arange(len(split))
    if shuffle:
        generator = torch.Generator().manual_seed(item_seed(seed, epoch))
        order = torch.randperm(len(split), generator=generator)
    items = [(i, item_seed(seed, epoch, i)) for i in order.tolist()]
    batches = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
    batches = [share for batch in batches if (share := batch[rank::world])]
    return DataLoader(
        Images(split, transform, where),
        batch_sampler=batches,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # else every epoch would draw from the program's own
    )


def item_seed(*parts: int) -> int:
    """One seed of several numbers."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def check_data(tasks: Sequence[Task]) -> int:
    """Open every image that the tasks will need; the first unreadable one is a DataError."""
    needed = {}
    for task in tasks:
        for kind, split in (("training", task.train), ("test", task.test)):
            for image in () if isinstance(split.images, Tensor) else split.images:
                needed.setdefault(image, f"task {task.index + 1}, {kind}")
    for path, where in tqdm(needed.items(), desc="checking images", disable=None):
        read_image(path, where)
    return len(needed)


# ---------------------------------------------------------------------------------------------
# Downloads: whole or not at all


class Archive(NamedTuple):
    """A file to be had from the net."""

    name: str
    size: int | None  # bytes
    md5: str | None
    urls: tuple[str, ...]


def fetch(archive: Archive, folder: Path) -> Path:
    """Download an archive into a folder, unless it is there, whole and with the right checksum."""
    path, problems = folder / archive.name, []
    if path.is_file() and not (problem := _fault(path, archive)):
        return path
    if path.is_file():
        problems.append(f"{path} is there but {problem}")
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    for url in archive.urls:
        try:
            with urllib.request.urlopen(url, timeout=60) as source, open(part, "wb") as file:
                total = int(source.headers.get("Content-Length") or 0) or archive.size
                with tqdm(total=total, unit="B", unit_scale=True, desc=archive.name) as bar:
                    while piece := source.read(1 << 20):
                        file.write(piece)
                        bar.update(len(piece))
            if problem := _fault(part, archive):
                problems.append(f"{url}: what came {problem}")
                continue
            os.replace(part, path)
            return path
        except OSError as error:  # urllib's errors are all of this kind
            problems.append(f"{url}: {error}")
        finally:
            part.unlink(missing_ok=True)
    raise DataError("; ".join(problems))


def _fault(path: Path, archive: Archive) -> str | None:
    size = path.stat().st_size
    if archive.size is not None and size != archive.size:
        return f"has {size:,} bytes instead of {archive.size:,}"
    if archive.md5 is not None:
        with open(path, "rb") as file:
            if (found := hashlib.file_digest(file, "md5").hexdigest()) != archive.md5:
                return f"has MD5 {found} instead of {archive.md5}"
    return None


def unpack(path: Path, folder: Path) -> None:
    """Unpack an archive. While it lasts, a mark says so: what is half unpacked is done again."""
    mark = _mark(path, folder)
    mark.touch()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            for member in tqdm(file.infolist(), desc=f"unpacking {path.name}", disable=None):
                file.extract(member, folder)
    else:
        with tarfile.open(path) as file:
            for member in tqdm(file, desc=f"unpacking {path.name}", disable=None):
                file.extract(member, folder, filter="data")
    mark.unlink()


def _mark(path: Path, folder: Path) -> Path:
    return folder / f".{path.name}.unpacking"


def obtain(
    name: str,
    data_dir: Path,
    found: Callable[[], Path | None],
    archives: Sequence[Archive],
    other_ways: str,
) -> Path:
    """The folder of a data set: found under data_dir, or downloaded and unpacked there."""
    marks = [_mark(Path(archive.name), data_dir) for archive in archives]
    if (folder := found()) and not any(mark.exists() for mark in marks):
        return folder
    try:
        for archive in archives:
            unpack(fetch(archive, data_dir), data_dir)
    except (OSError, DataError, tarfile.TarError, zipfile.BadZipFile) as error:
        files = "; ".join(
            f"{a.name} ({f'{a.size:,} bytes' if a.size else 'size not published'}, "
            f"{f'MD5 {a.md5}' if a.md5 else 'no checksum published'})"
            for a in archives
        )
        raise DataError(
            f"{name} is not in {data_dir} and could not be downloaded ({error}). It needs, in "
            f"{data_dir}, unpacked or as they are: {files}. {other_ways}"
        ) from error
    if folder := found():
        return folder
    raise DataError(f"The archives of {name} in {data_dir} do not hold {name}: remove them.")


def first_folder(candidates: Sequence[Path], *needed: str) -> Path | None:
    """The first of some folders that holds all that is needed."""
    for folder in candidates:
        if folder.is_dir() and all((folder / part).exists() for part in needed):
            return folder
    return None


# ---------------------------------------------------------------------------------------------
# VOC2007

VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)  # fmt: skip
VOC_HOSTS = (
    "https://thor.robots.ox.ac.uk/pascal/VOC/voc2007/",
    "http://host.robots.ox.ac.uk/pascal/VOC/voc2007/",
    "https://pjreddie.com/media/files/",
)
VOC_ARCHIVES = tuple(
    Archive(name, size, md5, tuple(host + name for host in VOC_HOSTS))
    for name, size, md5 in (
        ("VOCtrainval_06-Nov-2007.tar", 460_032_000, "c52e279531787c972589f7e41ab4ae64"),
        ("VOCtest_06-Nov-2007.tar", 451_020_800, "b6e924de25625d8de591ea690078ad9f"),
    )
)


def load_voc(data_dir: Path) -> Benchmark:
    """VOC2007 from <data_dir>[/VOCdevkit[/VOC2007]]; "difficult" (0) counts as absent."""
    places = [data_dir / "VOCdevkit" / "VOC2007", data_dir / "VOC2007", data_dir]
    root = obtain(
        "VOC2007",
        data_dir,
        lambda: first_folder(places, "JPEGImages", "ImageSets/Main"),
        VOC_ARCHIVES,
        "Its host is often down: the same files are on Kaggle and Academic Torrents (search for "
        '"PASCAL VOC 2007"), and torchvision.datasets.VOCDetection(year="2007", download=True) '
        "fetches them too.",
    )
    files = {path.stem: path for path in (root / "JPEGImages").iterdir()}
    notes = []
    listed = {p.stem.rsplit("_", 1)[0] for p in (root / "ImageSets" / "Main").glob("*_*.txt")}
    if strange := sorted(listed - set(VOC_CLASSES)):
        notes.append(f"VOC2007: lists of unknown classes are not used: {', '.join(strange)}")
    splits = []
    for split in ("trainval", "test"):
        present: dict[str, list[bool]] = {}
        for column, name in enumerate(VOC_CLASSES):
            for where, image, flag in _read_voc_list(root, f"{name}_{split}.txt"):
                if image not in files:
                    raise DataError(f"{where} labels image {image}, which is not in JPEGImages.")
                present.setdefault(image, [False] * len(VOC_CLASSES))[column] = flag == "1"
        images = sorted(present)
        labels = torch.tensor([present[image] for image in images]).view(-1, len(VOC_CLASSES))
        splits.append(Split([files[image] for image in images], labels.bool()))
    notes += _size_notes("VOC2007", splits, (5011, 4952))
    return _with_empty_classes_told(Benchmark("voc", VOC_CLASSES, *splits, notes=tuple(notes)))


def _read_voc_list(root: Path, name: str) -> Iterator[tuple[str, str, str]]:
    """The lines of a list: where it is said, image, flag ("1", "0" difficult, "-1")."""
    path, seen = root / "ImageSets" / "Main" / name, {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The list {path} cannot be read ({error}): unpack it again.") from error
    for number, line in enumerate(text.splitlines(), 1):
        words, where = line.split(), f"{path}, line {number},"
        if not words:
            continue
        if len(words) != 2 or words[1] not in ("1", "0", "-1"):
            raise DataError(f'{where} says "{line}": it must be an image and 1, 0 or -1.')
        if words[0] in seen:
            raise DataError(f"{where} lists image {words[0]} again after line {seen[words[0]]}.")
        seen[words[0]] = number
        yield where, *words


def _size_notes(name: str, splits: Sequence[Split], published: Sequence[int]) -> list[str]:
    found = [len(split) for split in splits]
    if tuple(found) == tuple(published):
        return []
    numbers = [f"{n[0]:,} training and {n[1]:,} test images" for n in (found, published)]
    return [f"{name}: {numbers[0]} are here, {numbers[1]} are published"]


def _with_empty_classes_told(benchmark: Benchmark) -> Benchmark:
    """Add a note for every class without a training or a test image."""
    notes = list(benchmark.notes)
    for kind, split in (("training", benchmark.train), ("test", benchmark.test)):
        if not len(split):
            continue
        empty = (~split.labels.any(0)).nonzero()[:, 0].tolist()
        if empty:
            names = ", ".join(benchmark.classes[c] for c in empty)
            notes.append(f"{benchmark.name}: no {kind} image of {names}")
    return replace(benchmark, notes=tuple(notes))


# ---------------------------------------------------------------------------------------------
# MS-COCO 2014

COCO_ARCHIVES = tuple(
    Archive(name, size, md5, (f"http://images.cocodataset.org/{place}/{name}",))
    for place, name, size, md5 in (
        (
            "annotations",
            "annotations_trainval2014.zip",
            252_872_794,
            "0a379cfc70b0e71301e0f377548639bd",
        ),
        ("zips", "train2014.zip", 13_510_573_713, "0da8c0bd3d6becc4dcb32757491aca88"),
        ("zips", "val2014.zip", 6_645_013_297, "a3d79f5ed8d289b7a7554ce06a5782b3"),
    )
)


def load_coco(data_dir: Path) -> Benchmark:
    """MS-COCO 2014 from <data_dir>[/coco]; images without any label are left out."""
    lists = [f"annotations/instances_{part}2014.json" for part in ("train", "val")]
    root = obtain(
        "MS-COCO 2014",
        data_dir,
        lambda: first_folder([data_dir, data_dir / "coco"], *lists),
        COCO_ARCHIVES,
        "The COCO site (cocodataset.org) and Kaggle have the same files.",
    )
    names, splits = None, []
    for part, path in zip(("train2014", "val2014"), (root / name for name in lists), strict=True):
        folder = first_folder([root / part, root / "images" / part])
        if folder is None:
            raise DataError(f"{path} is there, but the images in {root / part} are not.")
        split_names, split = _read_coco(path, folder)
        if names not in (None, split_names):
            raise DataError(f"{path} has other categories than the training part: use one release.")
        names = split_names
        splits.append(split)
    notes = _size_notes("MS-COCO 2014", splits, (82_081, 40_137))
    return _with_empty_classes_told(Benchmark("coco", names, *splits, notes=tuple(notes)))


def _read_coco(path: Path, folder: Path) -> tuple[tuple[str, ...], Split]:
    """The category names, alphabetical, and the labelled images of one instances_*.json."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        categories = {c["id"]: c["name"] for c in content["categories"]}
        files = {image["id"]: image["file_name"] for image in content["images"]}
        pairs = [(a.get("id"), a["image_id"], a["category_id"]) for a in content["annotations"]]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a COCO instances file ({error!r}): get it again."
        ) from error
    names = tuple(sorted(categories.values()))
    if len(set(names)) < len(names) or len(files) < len(content["images"]):
        raise DataError(f"{path} has a category name or an image id twice: get it again.")
    column = {number: names.index(name) for number, name in categories.items()}
    present: dict[int, set[int]] = {}
    for annotation, image, category in pairs:
        if image not in files or category not in column:
            what = f"image {image}" if image not in files else f"category {category}"
            raise DataError(
                f"{path}: annotation {annotation} is for {what}, which it does not list."
            )
        present.setdefault(image, set()).add(column[category])
    here = {entry.name for entry in os.scandir(folder)}
    if missing := [files[i] for i in present if files[i] not in here]:
        raise DataError(
            f"{path} labels {missing[0]}, which is not in {folder} ({len(missing):,} such images): "
            "unpack the images again."
        )
    ids = sorted(present)
    labels = torch.zeros(len(ids), len(names), dtype=torch.bool)
    for row, image in enumerate(ids):
        labels[row, list(present[image])] = True
    return names, Split([folder / files[image] for image in ids], labels)


# ---------------------------------------------------------------------------------------------
# CIFAR-100 and ImageNet-R: one label an image

CIFAR_ARCHIVE = Archive(
    "cifar-100-python.tar.gz",
    169_001_437,
    "eb9058c3a382ffc7106e4002c42a8d85",
    ("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",),
)


def load_cifar100(data_dir: Path) -> Benchmark:
    """CIFAR-100 from <data_dir>/cifar-100-python (or <data_dir> itself), as torchvision has it."""
    places, needed = [data_dir / "cifar-100-python", data_dir], ("train", "test", "meta")
    root = obtain(
        "CIFAR-100",
        data_dir,
        lambda: first_folder(places, *needed),
        [CIFAR_ARCHIVE],
        "torchvision.datasets.CIFAR100(download=True) fetches the same file.",
    )
    try:
        train, test, meta = (_read_plain_pickle(root / name) for name in needed)
        names = list(meta["fine_label_names"])
        classes, splits = tuple(sorted(names)), []
        for part in (train, test):
            pixels = torch.from_numpy(np.asarray(part["data"], dtype=np.uint8)).view(-1, 3, 32, 32)
            columns = torch.tensor([classes.index(names[n]) for n in part["fine_labels"]])
            splits.append(Split(pixels, one_hot(columns, len(classes))))
            if len(pixels) != len(columns):
                raise ValueError(f"{len(pixels)} images but {len(columns)} labels")
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{root} is not CIFAR-100 as published ({error!r}): unpack it again."
        ) from error
    notes = _size_notes("CIFAR-100", splits, (50_000, 10_000))
    found = Benchmark("cifar100", classes, *splits, multi_label=False, notes=tuple(notes))
    return _with_empty_classes_told(found)


def one_hot(columns: Tensor, classes: int) -> Tensor:
    """Class numbers [n] -> labels bool [n,classes]."""
    return F.one_hot(columns.long(), classes).bool()


class _PlainUnpickler(pickle.Unpickler):
    """Takes numbers, strings, lists, dicts and numpy arrays; nothing in the file can run code."""

    ALLOWED = (("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"))

    def find_class(self, module, name):
        if (module, name) in self.ALLOWED or (
            name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray")
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _read_plain_pickle(path: Path) -> dict:
    try:
        with open(path, "rb") as file:
            return _PlainUnpickler(file, encoding="latin1").load()
    except Exception as error:  # a spoiled pickle may raise anything
        raise DataError(f"{path} is not a part of CIFAR-100 ({error}): unpack it again.") from error


IMAGENET_R_ARCHIVE = Archive(
    "imagenet-r.tar", None, None, ("https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar",)
)


def load_imagenet_r(data_dir: Path, seed: int = 0) -> Benchmark:
    """ImageNet-R from <data_dir>/imagenet-r (or <data_dir>): a folder per class.

    80 % of every class are for training, drawn by the seed. The split is written to
    <data_dir>/imagenet-r-split-<seed>.json when it is first made, and read from there after that.
    """

    def class_folders(root: Path) -> list[Path]:
        return sorted(p for p in root.iterdir() if p.is_dir() and re.fullmatch(r"n\d{8}", p.name))

    def found() -> Path | None:
        places = [data_dir / "imagenet-r", data_dir]
        return next((p for p in places if p.is_dir() and class_folders(p)), None)

    root = obtain(
        "ImageNet-R",
        data_dir,
        found,
        [IMAGENET_R_ARCHIVE],
        "github.com/hendrycks/imagenet-r names the current address.",
    )
    folders, notes, files, columns = class_folders(root), [], [], []
    for column, folder in enumerate(folders):
        inside = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
        files += [f"{folder.name}/{name}" for name in inside]
        columns += [column] * len(inside)
    record = data_dir / f"imagenet-r-split-{seed}.json"
    if record.exists():
        try:
            test = set(json.loads(record.read_text(encoding="utf-8"))["test"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{record} is not a split ({error!r}): remove it.") from error
        if strange := test - set(files):
            raise DataError(f"{record} names {min(strange)}, which is not in {root}: remove one.")
    else:
        test, columns_of = set(), torch.tensor(columns)
        generator = torch.Generator().manual_seed(seed)
        for column in range(len(folders)):
            rows = (columns_of == column).nonzero()[:, 0]
            rows = rows[torch.randperm(len(rows), generator=generator)]
            test |= {files[i] for i in rows[round(0.8 * len(rows)) :].tolist()}
        text = {"seed": seed, "test": sorted(test), "train": sorted(set(files) - test)}
        try:
            write_whole(record, json.dumps(text, indent=0).encode())
        except OSError as error:
            notes.append(f"ImageNet-R: the split could not be written down ({error})")
    labels, is_test = one_hot(torch.tensor(columns), len(folders)), [name in test for name in files]
    everything, is_test = Split([root / name for name in files], labels), torch.tensor(is_test)
    splits = [everything.take(rows, range(len(folders))) for rows in (~is_test, is_test)]
    if len(files) != 30_000 or len(folders) != 200:
        here = f"{len(files):,} images of {len(folders)} classes are here"
        notes.append(f"ImageNet-R: {here}, 30,000 of 200 are published")
    names = tuple(folder.name for folder in folders)
    found = Benchmark("imagenet-r", names, *splits, multi_label=False, notes=tuple(notes))
    return _with_empty_classes_told(found)


IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif"}


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------
# Your own images: any number of labels each


def load_own(data_dir: Path) -> Benchmark:
    """The user's images, listed in two CSV files or sorted into folders.

    <data_dir>/train.csv and test.csv: a header "image,labels", then a line an image: its path from
    data_dir, and its labels with | between them. Or, if there is no train.csv, the folders
    train/<class>/ and test/<class>/: a file that is under two classes of a split, with the same
    name, is one image with two labels. The test part may be missing: see `hold_out`.

    Classes are all labels that are found, alphabetical; or those of <data_dir>/classes.txt, a line
    each, in that order. New classes are written at its end: so the old ones keep their tasks.
    """
    listed, known = (data_dir / "train.csv").is_file(), _read_own_classes(data_dir)
    if not listed and not (data_dir / "train").is_dir():
        raise DataError(
            f"{data_dir} holds neither train.csv nor a folder train: list the images in train.csv "
            "(header image,labels; a line like photos/1.jpg,cat|dog), or sort them into "
            "train/<class>/; and the same for test."
        )
    notes, parts, names = [], [], set()
    for part in ("train", "test"):
        place = data_dir / (f"{part}.csv" if listed else part)
        rows = _read_own_csv(place, data_dir) if listed else _read_own_folders(place, notes)
        found: dict[str, set[str]] = {}  # labels of each image
        for where, image, labels in rows if place.exists() else ():
            for label in labels:
                if known and label not in known:
                    raise DataError(
                        f"{where} says {label!r}, which is not in {data_dir / 'classes.txt'}: "
                        "correct it, or write it at the end of that file."
                    )
            names.update(labels)
            found.setdefault(image, set()).update(labels)
        if place.exists() and not found:
            raise DataError(f"{place} has no image: give it some, or remove it.")
        parts.append(found)
    if both := parts[0].keys() & parts[1].keys():
        notes.append(f"own: {len(both):,} test images are training images too, as {min(both)}")
    classes, splits = tuple(known or sorted(names)), []
    for found in parts:
        labels = torch.zeros(len(found), len(classes), dtype=torch.bool)
        for row, image in enumerate(sorted(found)):
            labels[row, [classes.index(label) for label in found[image]]] = True
        splits.append(Split([data_dir / image for image in sorted(found)], labels))
    return _with_empty_classes_told(Benchmark("own", classes, *splits, notes=tuple(notes)))


def _read_own_text(path: Path) -> str:
    """A text file in UTF-8, with or without the mark that spreadsheets put at its beginning."""
    content = path.read_bytes()
    try:
        text, fault = content.decode("utf-8-sig"), content.find(b"\0")  # UTF-16 is full of these
    except UnicodeDecodeError as error:
        text, fault = "", error.start
    if fault >= 0:
        line = content[:fault].count(b"\n") + 1
        raise DataError(
            f"{path}, line {line}, is not UTF-8: save it as UTF-8 (in a spreadsheet: CSV UTF-8)."
        )
    return text


def _read_own_classes(data_dir: Path) -> dict[str, int] | None:
    """The classes of classes.txt, in order, and the line of each; None if there is no such file."""
    path, names = data_dir / "classes.txt", {}
    if not path.is_file():
        return None
    for number, line in enumerate(_read_own_text(path).splitlines(), 1):
        name = line.strip()
        if name in names:
            raise DataError(
                f"{path}, line {number}, names {name!r} again after line {names[name]}."
            )
        if name:
            names[name] = number
    if not names:
        raise DataError(f"{path} names no class: write one in each line, or remove it.")
    return names


def _read_own_csv(path: Path, data_dir: Path) -> Iterator[tuple[str, str, list[str]]]:
    """The lines of a list: where it is said, image, labels."""
    rows, seen = csv.reader(io.StringIO(_read_own_text(path), newline=""), strict=True), {}
    try:
        header = ",".join(word.strip() for word in next(rows, ()))
        if header != "image,labels":
            raise DataError(f'{path}, line 1, says "{header}": it must be "image,labels".')
        for row in rows:
            where, row = f"{path}, line {rows.line_num},", [word.strip() for word in row]
            if not any(row):
                continue
            if len(row) != 2:
                raise DataError(
                    f'{where} says "{",".join(row)}": it must be an image and its labels, with one '
                    "comma between; put a name that has a comma in double quotes."
                )
            labels, image = [word.strip() for word in row[1].split("|")], os.path.normpath(row[0])
            if not all(labels):
                raise DataError(
                    f"{where} has an empty label: write labels like cat|dog, or take the line out; "
                    "an image without any class is of no use here."
                )
            if os.path.isabs(image) or image.split(os.sep)[0] == "..":
                raise DataError(
                    f"{where} names {row[0]}, which is outside of {data_dir}: move or link the "
                    "image into it, and give its path from there."
                )
            if image in seen:
                raise DataError(
                    f"{where} lists {row[0]} again after line {seen[image]}: write all its labels "
                    "in one line, as cat|dog."
                )
            if not (data_dir / image).is_file():
                raise DataError(
                    f"{where} names {row[0]}, which is no file in {data_dir}: add it, or take the "
                    "line out."
                )
            seen[image] = rows.line_num
            yield where, image, labels
    except csv.Error as error:
        raise DataError(
            f"{path}, line {rows.line_num}, is not CSV ({error}): correct it."
        ) from None


def _read_own_folders(root: Path, notes: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """The images under root/<class>/: where, image, label; of one in several folders the first."""
    first: dict[str, Path] = {}
    unused, empty = [], []
    for folder in sorted(p for p in root.iterdir() if not p.name.startswith(".")):
        inside = [p for p in folder.iterdir() if p.name[0] != "."] if folder.is_dir() else []
        images = [p for p in inside if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file()]
        unused += set(inside) - set(images) if folder.is_dir() else [folder]
        empty += [folder.name] * (folder.is_dir() and not images)
        for path in sorted(images):
            known = first.setdefault(path.name, path)
            if known is not path and not filecmp.cmp(known, path, shallow=False):
                raise DataError(
                    f"{known} and {path} are different images: one name under two classes means "
                    "one image with both labels, so rename one of them."
                )
            yield str(path), str(known.relative_to(root.parent)), [folder.name]
    if empty:
        notes.append(f"own: no image in {', '.join(str(root / name) for name in empty)}")
    if unused:
        notes.append(f"own: {len(unused):,} entries are no images by name, as {min(unused)}")


# ---------------------------------------------------------------------------------------------
# Glyphs: an incremental problem that needs no download
#
# Scenes of one to four symbols, drawn from the font that comes with matplotlib, at random place,
# size, angle and colour over a cluttered background. 20 symbols are the benchmark's classes; the
# small ViT that comes with it has been pre-trained on other symbols only.

GLYPHS = {
    "airplane": "✈", "anchor": "⚓", "cloud": "☁", "coffee": "☕", "envelope": "✉",
    "flag": "⚑", "flower": "✿", "gear": "⚙", "heart": "♥", "moon": "☾",
    "music": "♫", "pencil": "✏", "scissors": "✂", "skull": "☠", "smiley": "☺",
    "snowflake": "❄", "star": "★", "sun": "☀", "telephone": "☎", "umbrella": "☂",
}  # fmt: skip
GLYPH_TRAIN, GLYPH_TEST, GLYPH_PIXELS = 4000, 1000, 64
MASK_PIXELS = 48  # a symbol alone on its mask, its longer side two thirds of it
GLYPH_TURN = 40.0  # degrees to either side
GLYPH_WEIGHTS = Path(__file__).with_name("glyphs.safetensors")


def symbol_masks(symbols: Sequence[str]) -> Tensor:
    """Every symbol alone, white on black, all of one size: [n,1,MASK_PIXELS,MASK_PIXELS]."""
    font = ImageFont.truetype(str(_font_file()), 96)
    masks = torch.zeros(len(symbols), 1, MASK_PIXELS, MASK_PIXELS)
    for mask, symbol in zip(masks, symbols, strict=True):
        page = Image.new("L", (256, 256))
        ImageDraw.Draw(page).text((64, 64), symbol, fill=255, font=font)
        page = page.crop(page.getbbox())
        scale = MASK_PIXELS * 2 // 3 / max(page.size)
        wide, high = (max(1, round(side * scale)) for side in page.size)
        page = np.asarray(page.resize((wide, high), Image.Resampling.BILINEAR)) / 255.0
        left, top = (MASK_PIXELS - wide) // 2, (MASK_PIXELS - high) // 2
        mask[0, top : top + high, left : left + wide] = torch.from_numpy(page)
    return masks


def _font_file() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


def clutter_masks(count: int = 64) -> Tensor:
    """Strokes, arcs, discs and triangles that are no symbol: [count,1,MASK_PIXELS,MASK_PIXELS]."""
    random, side, masks = np.random.default_rng(0), 4 * MASK_PIXELS, []
    for index in range(count):
        page = Image.new("L", (side, side))
        pen, width = ImageDraw.Draw(page), int(random.integers(4, 14))
        points = random.uniform(0.17, 0.83, (4, 2)) * side
        box = [*points[:2].min(0), *points[:2].max(0)]
        match index % 5:
            case 0:
                pen.line([tuple(p) for p in points[:2]], fill=255, width=width)
            case 1:
                pen.line([tuple(p) for p in points], fill=255, width=width)
            case 2:
                pen.arc(box, *random.uniform(0, 360, 2), fill=255, width=width)
            case 3:
                pen.ellipse(box, fill=255)
            case 4:
                pen.polygon([tuple(p) for p in points[:3]], fill=255)
        page = page.resize((MASK_PIXELS, MASK_PIXELS), Image.Resampling.BOX)
        masks.append(torch.from_numpy(np.asarray(page) / 255.0).float())
    return torch.stack(masks)[:, None]


def place(masks: Tensor, x: Tensor, y: Tensor, size: Tensor, angle: Tensor, pixels: int) -> Tensor:
    """Put masks [n,1,48,48] on empty squares of pixels x pixels -> [n,pixels,pixels].

    x, y, size [n] in pixels (the centre, and the symbol's longer side), angle [n] in radians.
    """
    zoom = pixels / size * 2 / 3
    cos, sin, x, y = angle.cos() * zoom, angle.sin() * zoom, x / pixels * 2 - 1, y / pixels * 2 - 1
    rows = (cos, sin, -cos * x - sin * y), (-sin, cos, sin * x - cos * y)
    theta = torch.stack([torch.stack(row, -1) for row in rows], 1)  # [n,2,3]
    grid = F.affine_grid(theta, [len(masks), 1, pixels, pixels], align_corners=False)
    return F.grid_sample(masks, grid, align_corners=False)[:, 0]


def paint(
    masks: Tensor, which: Tensor, clutter: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw scenes: which [n,4] says what symbols of masks they hold, -1 for none.

    -> images uint8 [n,3,64,64], and how much of every symbol is seen where [n,4,64,64].
    """

    def uniform(*shape, low=0.0, high=1.0):
        return torch.rand(*shape, generator=generator) * (high - low) + low

    def layers(masks, index, x, y, smallest, largest):  # [n,k] each -> [n,k,64,64]
        turn = math.radians(GLYPH_TURN)
        size = uniform(*index.shape, low=smallest, high=largest)
        angle = uniform(*index.shape, low=-turn, high=turn)
        chosen = masks[index.flatten().clamp_min(0)]
        alpha = place(chosen, *(t.flatten() for t in (x, y, size, angle)), side)
        return alpha.view(*index.shape, side, side) * (index >= 0).view(*index.shape, 1, 1)

    (n, slots), side, strokes = which.shape, GLYPH_PIXELS, 6
    light = (uniform(n, 1, 1, 1) < 0.5).float()  # symbols are dark on light or light on dark
    canvas = uniform(n, 3, 5, 5, high=0.5) + 0.5 * light
    canvas = F.interpolate(canvas, side, mode="bilinear", align_corners=True)

    junk = torch.randint(len(clutter), (n, strokes), generator=generator)
    x, y, colours = (
        uniform(n, strokes, high=side),
        uniform(n, strokes, high=side),
        uniform(n, strokes, 3),
    )
    behind = layers(clutter, junk, x, y, 12.0, 48.0) * uniform(n, strokes, 1, 1, low=0.2, high=0.8)
    for alpha, colour in zip(behind.unbind(1), colours.unbind(1), strict=True):
        canvas = canvas.lerp(colour[:, :, None, None], alpha[:, None])

    # Each symbol has a quarter of the picture to itself, more or less.
    quarter, jitter = uniform(n, 4).argsort(1)[:, :slots], side / 8
    x = quarter % 2 * side / 2 + side / 4 + uniform(n, slots, low=-jitter, high=jitter)
    y = quarter // 2 * side / 2 + side / 4 + uniform(n, slots, low=-jitter, high=jitter)
    cover = layers(masks, which, x, y, 18.0, 32.0)
    colours = uniform(n, slots, 3, high=0.42) + 0.58 * (1 - light[..., 0])
    for slot in range(slots):
        alpha = cover[:, slot, None]
        canvas = canvas.lerp(colours[:, slot, :, None, None], alpha)
        cover[:, :slot] *= 1 - alpha  # what is drawn later hides what is under it
    canvas = canvas + 0.04 * torch.randn(canvas.shape, generator=generator)
    return canvas.clamp(0, 1).mul(255).round().byte(), cover


def draw_glyphs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scenes of the benchmark: images uint8 [count,3,64,64], labels bool [count,20]."""
    generator = torch.Generator().manual_seed(seed)
    masks, clutter, images, labels = symbol_masks(GLYPHS.values()), clutter_masks(), [], []
    rank = torch.randperm(len(GLYPHS), generator=torch.Generator().manual_seed(0))
    frequency = (1.0 + rank) ** -0.9  # a long tail like VOC's, the same for every seed
    for start in range(0, count, 250):
        n = min(250, count - start)
        which = torch.multinomial(frequency.expand(n, -1), 4, generator=generator)  # [n,4]
        share = torch.tensor([0.35, 0.3, 0.2, 0.15])  # of scenes with one to four symbols
        number = torch.multinomial(share, n, replacement=True, generator=generator)[:, None]
        which = which.where(torch.arange(4) <= number, -1)
        images.append(paint(masks, which, clutter, generator)[0])
        labels.append((which[:, :, None] == torch.arange(len(GLYPHS))).any(1))
    return torch.cat(images), torch.cat(labels)


def pretraining_symbols() -> list[str]:
    """The symbols that the glyphs ViT was trained on: letters, arrows, signs, no benchmark class.

    Left out is whatever has a benchmark class in its Unicode name, or looks like one at some angle
    of the scenes, or looks like a symbol that is in the list already.
    """
    from matplotlib.ft2font import FT2Font

    blocks = (
        (0x21, 0x7E), (0x391, 0x3C9), (0x410, 0x44F), (0x531, 0x556), (0x5D0, 0x5EA),
        (0x10D0, 0x10F0), (0x2190, 0x21FF), (0x2200, 0x22FF), (0x2300, 0x23FF), (0x25A0, 0x25FF),
        (0x2600, 0x26FF), (0x2701, 0x27BE), (0x2D30, 0x2D65), (0xA640, 0xA66D),
    )  # fmt: skip
    drawn = FT2Font(str(_font_file())).get_charmap()
    symbols = [
        chr(code) for first, last in blocks for code in range(first, last + 1) if code in drawn
    ]
    symbols = [
        s for s in symbols if not FORBIDDEN_WORDS & set(re.split(r"\W", unicodedata.name(s, "")))
    ]
    masks = symbol_masks(symbols)
    looks_like_a_class = likeness(masks, symbol_masks(GLYPHS.values())).amax(1) > 0.65
    alike = likeness(masks, masks) > 0.6
    too_thin = (masks > 0.5).float().mean((1, 2, 3)) < 0.02
    chosen = []
    for index in range(len(symbols)):
        if not (looks_like_a_class[index] or too_thin[index] or alike[index, chosen].any()):
            chosen.append(index)
    return [symbols[index] for index in chosen]


FORBIDDEN_WORDS = {
    "AIRPLANE", "ANCHOR", "CLOUD", "BEVERAGE", "ENVELOPE", "FLAG", "FLOWER", "FLORETTE", "GEAR",
    "HEART", "MOON", "CRESCENT", "NOTE", "NOTES", "PENCIL", "NIB", "SCISSORS", "SKULL", "FACE",
    "SNOWFLAKE", "SNOWMAN", "STAR", "SUN", "RAYS", "ASTERISK", "TELEPHONE", "UMBRELLA",
}  # fmt: skip


def likeness(masks: Tensor, others: Tensor) -> Tensor:
    """Highest correlation of masks [n,1,48,48] with turned others [m,1,48,48] -> [n,m]."""

    def unit(masks):
        flat = masks.flatten(1)
        return F.normalize(flat - flat.mean(1, keepdim=True), dim=1)

    best, middle, size = None, *torch.tensor([MASK_PIXELS / 2, MASK_PIXELS * 2 / 3])
    for degrees in torch.linspace(-GLYPH_TURN, GLYPH_TURN, 9):
        n = len(others)
        args = (middle.expand(n), middle.expand(n), size.expand(n), degrees.deg2rad().expand(n))
        found = unit(masks) @ unit(place(others, *args, MASK_PIXELS)).T
        best = found if best is None else torch.maximum(best, found)
    return best


def build_glyph_vit(weights: Path | None = GLYPH_WEIGHTS) -> nn.Module:
    """The benchmark's backbone, a timm ViT of a million parameters; weights None: untrained."""
    from safetensors.torch import load_file
    from timm.models.vision_transformer import VisionTransformer

    vit = VisionTransformer(
        img_size=GLYPH_PIXELS, patch_size=8, embed_dim=128, depth=5, num_heads=4, num_classes=0
    )
    vit.pretrained_cfg = {"architecture": "glyph_vit", "mean": (0.5,) * 3, "std": (0.25,) * 3}
    if weights is not None:
        vit.load_state_dict({name: t.float() for name, t in load_file(weights).items()})
    return vit.eval()


PRETRAINED_TEST = 5120  # new scenes on which a round of pre-training is scored


def pretrain_glyph_vit(
    path: Path = GLYPH_WEIGHTS, rounds: Sequence[int] = (600_000, 450_000), seed: int = 0
) -> float:
    """Make the glyphs' ViT from nothing, write it to path, return its mAP on new scenes.

    rounds: how many images each round sees. A round has new heads and a learning-rate cycle of
    its own, and starts from the weights that the one before it wrote.
    """
    for number, images in enumerate(rounds):
        score = pretraining_round(path, path if number else None, images, seed + number)
    return score


def pretraining_round(path: Path, start: Path | None, images: int, seed: int) -> float:
    """One round of pre-training from the weights in start (None: from nothing) to those in path.

    Two tasks at once: [CLS] says which symbols are in the picture, every patch says which symbol
    it is a part of. Scenes are drawn as they are needed and never seen twice.
    """
    from safetensors.torch import save
    from timm.layers import build_sincos2d_pos_embed

    torch.manual_seed(seed)
    generator, symbols = torch.Generator().manual_seed(seed), pretraining_symbols()
    masks, clutter, M, batch = symbol_masks(symbols), clutter_masks(), len(symbols), 128
    vit = build_glyph_vit(start).train()
    if start is None:
        with torch.no_grad():  # to know where the neighbours are from the start saves much time
            grid = vit.patch_embed.grid_size
            vit.pos_embed[0, 1:] = 0.3 * build_sincos2d_pos_embed(grid, vit.embed_dim)
    heads = nn.ModuleList([nn.Linear(vit.embed_dim, M), nn.Linear(vit.embed_dim, M + 1)])
    trained, steps = [*vit.parameters(), *heads.parameters()], max(1, images // batch)
    optimizer = torch.optim.AdamW(trained, weight_decay=0.05)
    highest = 3e-3 if start is None else 2e-3
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, highest, steps, pct_start=0.08, div_factor=20, cycle_momentum=False
    )

    def scenes():
        which = torch.stack([torch.randperm(M, generator=generator)[:4] for _ in range(batch)])
        number = torch.randint(4, (batch, 1), generator=generator)
        which = which.where(torch.arange(4) <= number, -1)
        pixels, cover = paint(masks, which, clutter, generator)
        part, slot = F.avg_pool2d(cover, 8).flatten(2).max(1)  # [batch,64] of every patch
        patch = which.gather(1, slot).where(part > 0.1, M)  # M: background
        present = (which[:, :, None] == torch.arange(M)).any(1).float()  # [batch,M]
        return (pixels / 255.0 - 0.5) / 0.25, present, patch

    def forward(pixels):
        tokens = vit.forward_features(pixels)
        return heads[0](tokens[:, 0]), heads[1](tokens[:, 1:])

    rarer = torch.ones(M + 1)
    rarer[M] = 0.2  # most patches are background
    with tqdm(range(steps), desc="pre-training", unit="step", mininterval=10) as bar:
        for _ in bar:
            pixels, present, patch = scenes()
            by_cls, by_patch = forward(pixels)
            loss_cls = F.cross_entropy(by_cls, present / present.sum(1, keepdim=True))
            loss_patch = F.cross_entropy(by_patch.flatten(0, 1), patch.flatten(), rarer)
            optimizer.zero_grad()
            (loss_cls + loss_patch).backward()
            nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.set_postfix_str(f"[CLS] {loss_cls:.3f} patch {loss_patch:.3f}")
    vit.eval()
    with torch.no_grad():
        rounds = [scenes() for _ in range(PRETRAINED_TEST // batch)]
        scores = torch.cat([forward(pixels)[0] for pixels, _, _ in rounds])
    truth = torch.cat([present for _, present, _ in rounds]).bool()
    write_whole(path, save({name: p.half().contiguous() for name, p in vit.state_dict().items()}))
    precisions = [average_precision(scores[:, c], truth[:, c]) for c in range(M)]
    return 100 * float(np.nanmean(precisions))


def load_glyphs(data_dir: Path, seed: int = 0) -> Benchmark:
    """The embedded benchmark; drawn in seconds, then kept in data_dir."""
    from safetensors import SafetensorError
    from safetensors.torch import load, save

    recipe = (GLYPHS, GLYPH_TRAIN, GLYPH_TEST, torch.__version__, Image.__version__)
    kept = (
        data_dir
        / f"glyphs-{seed}-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:8]}.safetensors"
    )
    notes: tuple[str, ...] = ()
    try:
        parts = load(kept.read_bytes())
    except (OSError, SafetensorError):  # not there yet, or spoiled: it is drawn anew
        parts = {}
        for number, (split, count) in enumerate((("train", GLYPH_TRAIN), ("test", GLYPH_TEST))):
            images, labels = draw_glyphs(count, item_seed(seed, number) % 2**31)
            parts |= {f"{split}_images": images, f"{split}_labels": labels}
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            write_whole(kept, save(parts))
        except OSError as error:
            notes = (f"glyphs: drawn anew every time, since {kept} cannot be written ({error})",)
    splits = [Split(parts[f"{s}_images"], parts[f"{s}_labels"]) for s in ("train", "test")]
    return Benchmark("glyphs", tuple(GLYPHS), *splits, notes=notes)


# ---------------------------------------------------------------------------------------------
# By name, and the command line

PROTOCOLS = {  # the paper's; for glyphs, VOC's; own classes can be any number: the user says it
    "voc": "B0-C4",
    "coco": "B0-C10",
    "cifar100": "10-tasks",
    "imagenet-r": "10-tasks",
    "glyphs": "B0-C4",
    "own": None,
}


def load_benchmark(name: str, data_dir: str | Path = "data", seed: int = 0) -> Benchmark:
    """A benchmark by name; the seed draws glyphs' scenes and ImageNet-R's split."""
    folder = Path(data_dir).expanduser()
    match name:
        case "voc":
            return load_voc(folder)
        case "coco":
            return load_coco(folder)
        case "cifar100":
            return load_cifar100(folder)
        case "imagenet-r":
            return load_imagenet_r(folder, seed)
        case "glyphs":
            return load_glyphs(folder, seed)
        case "own":
            return load_own(folder)
    raise DataError(f"There is no data set {name!r}: choose {', '.join(PROTOCOLS)}.")


def describe(benchmark: Benchmark, tasks: Sequence[Task]) -> str:
    """The split as text: tasks, their classes with the images of each, their sizes."""
    lines = []
    for task in tasks:
        counts = task.train.labels.sum(0).tolist()
        classes = ", ".join(f"{name} {n:,}" for name, n in zip(task.classes, counts, strict=True))
        lines.append(f"task {task.index + 1:2d}  {len(task.train):6,} training images: {classes}")
        lines.append(f"         {len(task.test):6,} test images, {len(task.seen)} classes seen")
    labels = int(benchmark.train.labels.sum()), int(benchmark.test.labels.sum())
    lines.append(
        f"{benchmark.name}: {len(tasks)} tasks, {len(benchmark.classes)} classes, "
        f"{len(benchmark.train):,} training images with {labels[0]:,} labels, "
        f"{len(benchmark.test):,} test images with {labels[1]:,} labels"
    )
    return "\n".join([*lines, *(f"note: {note}" for note in benchmark.notes)])


def draw_split(benchmark: Benchmark, tasks: Sequence[Task], path: Path) -> None:
    """The split as a picture: the long tail, and which labels are hidden in which task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = tasks[-1].seen
    order = [benchmark.classes.index(name) for name in names]
    owner = torch.cat([torch.full((len(t.classes),), t.index) for t in tasks])
    labels = benchmark.train.labels[:, order]
    counts = labels.sum(0)
    inside = torch.stack([labels[labels[:, owner == t.index].any(1)].sum(0) for t in tasks])
    own = owner == torch.arange(len(tasks))[:, None]  # [T,C]
    width, colours = max(7.0, 0.28 * len(names)), plt.get_cmap("tab10").colors
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(width, 4.2 + 0.32 * len(tasks)), layout="constrained",
        height_ratios=[3, 1 + 0.35 * len(tasks)],
    )  # fmt: skip
    falling = counts.argsort(descending=True, stable=True)
    tints = [colours[int(owner[c]) % 10] for c in falling]
    top.bar(range(len(names)), counts[falling].tolist(), color=tints)
    top.set_xticks(range(len(names)), [names[c] for c in falling], rotation=90, fontsize=7)
    top.set(
        ylabel="training images", title=f"{benchmark.name}: class frequencies, coloured by task"
    )
    top.margins(x=0.01)
    share = inside / counts.clamp_min(1)
    picture = bottom.imshow(
        share.masked_fill(own, float("nan")).numpy(), cmap="Greys", vmin=0, aspect="auto"
    )
    for t, c in own.nonzero().tolist():
        bottom.add_patch(plt.Rectangle((c - 0.5, t - 0.5), 1, 1, color=colours[t % 10], lw=0))
    bottom.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    bottom.set_yticks(range(len(tasks)), [f"task {t.index + 1}" for t in tasks], fontsize=7)
    bottom.set_title("coloured: labelled in this task; grey: in its images, but hidden")
    figure.colorbar(picture, ax=bottom, label="share of the class's images")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # matplotlib knows pictures by their suffix
        raise DataError(f"--picture {path} cannot be drawn ({error}): name it *.png.") from None
    finally:
        plt.close(figure)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UsageError(message)  # instead of printing the usage, which is long


def at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not least <= (value := int(text)) < 2**63:  # as large as PyTorch's whole numbers
            what = f"below {least}" if value < least else "too large"
            raise argparse.ArgumentTypeError(f"{text} is {what}")
        return value

    return whole_number


def between(low: float, high: float) -> Callable[[str], float]:
    def decimal_number(text: str) -> float:
        if not low < (value := float(text)) <= high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text} is not above {low:g} and up to {high:g}")
        return value

    return decimal_number


def make_parser() -> argparse.ArgumentParser:
    text = "Print a data set's split into tasks."
    parser = Parser("data.py", description=text, allow_abbrev=False)
    seed = at_least(0)
    parser.add_argument("dataset", choices=PROTOCOLS, help=", ".join(PROTOCOLS), metavar="dataset")
    known = ", ".join(f"{name} {protocol}" for name, protocol in PROTOCOLS.items() if protocol)
    parser.add_argument("--protocol", help=f"B0-C4, B10-C2, 10-tasks, ...; default: {known}")
    text = "test on this part of the training images"
    parser.add_argument("--holdout", type=between(0, 0.9), help=text)
    text = "where data sets are, or are downloaded to; default: %(default)s"
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help=text)
    text = "of glyphs' scenes, ImageNet-R's split, --holdout, --pretrain; default: %(default)s"
    parser.add_argument("--seed", type=seed, default=0, help=text)
    text = "shuffle the classes; default: alphabetical, or as in an own classes.txt"
    parser.add_argument("--order-seed", type=seed, help=text)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the split into a PNG")
    parser.add_argument("--check-data", action="store_true", help="open every image once")
    text = "glyphs: train the ViT from nothing into FILE"
    parser.add_argument("--pretrain", type=Path, metavar="FILE", help=text)
    return parser


def command(arguments: Sequence[str] | None) -> None:
    """Do what the command line says."""
    options = make_parser().parse_args(arguments)
    for name in ("picture", "pretrain"):  # before the work that it is to hold
        path = getattr(options, name)
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise UsageError(f"--{name} {path} cannot be written: give a file in a folder there is")
    if options.pretrain:
        if options.dataset != "glyphs":
            raise UsageError("--pretrain makes the glyphs' ViT: say `data.py glyphs --pretrain`")
        score = pretrain_glyph_vit(options.pretrain, seed=options.seed)
        print(f"{options.pretrain}: {score:.1f} mAP on new scenes of its own symbols")
        return
    benchmark = load_benchmark(options.dataset, options.data_dir, options.seed)
    if options.holdout is not None:
        benchmark = hold_out(benchmark, options.holdout, options.seed)
    protocol = options.protocol or PROTOCOLS[options.dataset]
    tasks = make_tasks(benchmark, protocol, options.order_seed)
    print(describe(benchmark, tasks))
    if options.check_data:
        print(f"{check_data(tasks):,} image files can be read")
    if options.picture:
        draw_split(benchmark, tasks, options.picture)
        print(f"drawn: {options.picture}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for bad usage or data, 1 for what the system refuses, 130: Ctrl-C."""
    try:
        command(arguments)
        return 0
    except KeyboardInterrupt:
        return 130
    except (UsageError, DataError) as error:
        text, code = str(error), 2
    except OSError as error:
        text, code = str(error), 1
    print(f"data.py: error: {' '.join(text.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
