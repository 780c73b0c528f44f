"""Every method and every ablation on one data set: the paper's comparison as one command.

    python compare.py                                  glyphs, three seeds
    python compare.py --dataset voc --seeds 0 -- --data-dir photos --backbone NAME ...
    python compare.py --finished                       tables of the runs that are there, no more

Flags after `--` go to every run of train.py, those of --with to one row's. Each run has its folder
under --out and is not repeated once it is finished, so a stopped comparison goes on with the same
command. A seed stands for an order of the classes too, as in the paper's ablations. What comes out,
next to the runs: comparison.md (the tables), comparison.json (the numbers) and the plots that the
paper has too.
"""

import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import data
import train

METHODS = {  # a row of the table: flags of train.py
    "MULTI-LANE": [],
    "MULTI-LANE with readout": ["--readout"],
    "joint (upper bound)": ["--method", "joint"],
    "naive pathways": ["--method", "naive"],
    "CODA-P": ["--method", "coda-p"],
    "DualPrompt": ["--method", "dualprompt"],
    "L2P": ["--method", "l2p"],
    "linear probe": ["--method", "probe"],
    "fine-tuning": ["--method", "finetune"],
}
ABLATIONS = {
    "without pre-head norm": ["--ablate", "norm"],
    "one pathway": ["--ablate", "pathways"],
    "without Drop & Replace": ["--ablate", "drop-replace"],
    "Token Merging": ["--ablate", "selectors"],
}
SELECTORS, MERGED = (1, 5, 10, 20), (4, 8, 16, 30)  # of the figure: its two lines
SWEEP = {f"{count} selectors": ["--selectors", str(count)] for count in SELECTORS}
SWEEP |= {
    f"Token Merging to {count}": [*ABLATIONS["Token Merging"], "--merged-tokens", str(count)]
    for count in MERGED
}
# The paper's figures, ViT-B/16: Avg. mAP and final mAP; of an ablation the final mAP.
PAPER = {
    "VOC2007 B0-C4": {
        "MULTI-LANE": "93.5 / 88.8", "joint (upper bound)": "- / 93.6", "CODA-P": "90.6 / 84.5",
        "fine-tuning": "82.1 / 62.9 (with 2 images a class kept)",
    },
    "MS-COCO B0-C10": {
        "MULTI-LANE": "79.1 / 74.5", "joint (upper bound)": "- / 81.8", "CODA-P": "74.0 / 65.4",
        "fine-tuning": "38.3 / 16.9", "without pre-head norm": "- / 72.7",
        "one pathway": "- / 68.0", "without Drop & Replace": "- / 20.3",
    },
}  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Runs


def slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def run(folder: Path, name: str, flags: Sequence[str], seed: int) -> None:
    """Train with these flags; a run that is finished must have been trained with them."""
    words = [*flags, "--seed", str(seed), "--order-seed", str(seed)]
    if is_finished(folder):
        asked, saved = vars(train.complete(train.parse(words))), train.read_config(folder)
        if saved and (differing := train.differences(saved, asked)):
            raise train.UsageError(
                f"{folder} is a finished run of another configuration, it differs in {differing}: "
                "give another --out, or --finished for the tables of what is there"
            )
        return
    print(f"== {name}, seed {seed}: {shlex.join(['python', 'train.py', *words])}", flush=True)
    if code := train.main([*words, "--resume", "--run", str(folder)]):
        sys.exit(code)  # train.py has said why


def spread(values: Sequence[float | None], digits: int = 1) -> str:
    """Mean and, of several, the standard deviation."""
    known = [v for v in values if v is not None and not math.isnan(v)]
    if not known:
        return "-"
    text = f"{statistics.mean(known):,.{digits}f}"
    return text + (f" ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else "")


# ---------------------------------------------------------------------------------------------
# Tables


def row(name: str, results: Sequence[dict], paper: dict) -> list[str]:
    """One line of the table, over the seeds."""
    lost = [train.mean(map(train.number, r["forgetting"])) for r in results]
    return [
        name,
        len(results),
        *(spread([r[key] for r in results]) for key in ("average_mAP", "mAP")),
        *(spread([r[key] for r in results]) for key in ("CF1@0.8", "OF1@0.8")),
        spread(lost),
        f"{results[0]['trainable_parameters']:,}",
        spread([r["time"]["seconds"] for r in results], 0),
        *(paper[column].get(name, "-") for column in paper),
    ]


def comparison_table(found: dict[str, list[dict]]) -> str:
    head = [
        "method",
        "seeds",
        "Avg. mAP",
        "mAP",
        "CF1",
        "OF1",
        "forgetting",
        "parameters",
        "seconds",
    ]
    head += [f"the paper's {column}" for column in PAPER]
    return train.table(head, [row(name, results, PAPER) for name, results in found.items()])


# ---------------------------------------------------------------------------------------------
# The paper's figures


def class_f1(probabilities: Tensor, truth: Tensor, threshold: float = 0.8) -> Tensor:
    """F1 of every class [C], from probabilities and truth [n,C]; 0 for one that is never said."""
    said, truth = probabilities >= threshold, truth.bool()
    right = (said & truth).sum(0)
    return 2 * right / (said.sum(0) + truth.sum(0)).clamp_min(1)


def run_f1(folder: Path) -> tuple[Tensor, Tensor]:
    """F1 [C] and the number of training images [C] of every class, in a finished run."""
    o, _, model = train.open_run(folder, {"where": torch.device("cpu"), "dry_run": False})
    _, tasks = train.load_tasks(o)
    test = tasks[-1].test
    kept = train.read_kept(folder / "logits.safetensors", *test.labels.shape, o)
    logits = train.all_logits(kept, model, tasks[-1], o)
    counts = torch.cat([task.train.labels.sum(0) for task in tasks])
    return class_f1(logits.sigmoid(), test.labels), counts


def frequency_bins(gains: Tensor, counts: Tensor, bins: int) -> list[tuple[int, int, float]]:
    """Least and most training images of a class, and the mean gain, in bins of equally many."""
    order = counts.argsort(stable=True)
    parts = [part for part in order.tensor_split(bins) if len(part)]
    return [(int(counts[p].min()), int(counts[p].max()), float(gains[p].mean())) for p in parts]


def draw_frequency(bins: Sequence[tuple[int, int, float]], path: Path) -> None:
    """Bars: F1 of MULTI-LANE minus F1 of CODA-P, from rare to frequent classes."""
    figure = Figure((6, 3.4), layout="constrained")
    axis = figure.subplots()
    bars = axis.bar(range(len(bins)), [100 * gain for *_, gain in bins])
    axis.bar_label(bars, fmt="%.1f", fontsize=8)
    axis.margins(y=0.15)
    axis.axhline(0, c="black", lw=0.8)
    axis.set_xticks(range(len(bins)), [f"{low}-{high}" for low, high, _ in bins], fontsize=7)
    axis.set(xlabel="training images of a class", ylabel="F1: MULTI-LANE - CODA-P (points)")
    train.save_figure(figure, path)


def draw_selectors(curves: dict[str, dict[int, list[float]]], path: Path) -> None:
    """Lines: final mAP over the number of summaries, selectors against Token Merging."""
    figure = Figure((6, 3.4), layout="constrained")
    axis = figure.subplots()
    for name, points in curves.items():
        middle = [statistics.mean(values) for values in points.values()]
        low = [m - min(values) for m, values in zip(middle, points.values(), strict=True)]
        high = [max(values) - m for m, values in zip(middle, points.values(), strict=True)]
        axis.errorbar(list(points), middle, (low, high), fmt="o-", capsize=3, label=name)
    axis.set_xscale("log")
    ticks = sorted({x for points in curves.values() for x in points})
    axis.set_xticks(ticks, ticks, fontsize=8)
    axis.minorticks_off()
    axis.set(xlabel="summaries of a lane (at most, with Token Merging)", ylabel="final mAP (%)")
    axis.legend(fontsize=8)
    train.save_figure(figure, path)


def draw_ablations(found: dict[str, list[dict]], path: Path) -> None:
    """Points: the final mAP of each run, with and without each idea."""
    figure = Figure((6, 2.6), layout="constrained")
    axis = figure.subplots()
    for y, (name, results) in enumerate(found.items()):
        values = [r["mAP"] for r in results]
        axis.plot(values, [y] * len(values), "o", alpha=0.6)
        axis.annotate(f"{name}: {spread(values)}", (max(values), y), fontsize=8, va="center",
                      xytext=(8, 0), textcoords="offset points")  # fmt: skip
    axis.set_yticks([])
    axis.set(xlabel="final mAP (%), a point a run", ylim=(len(found) - 0.5, -0.5))
    low, high = axis.get_xlim()
    axis.set_xlim(low, high + 0.6 * (high - low))
    train.save_figure(figure, path)


# ---------------------------------------------------------------------------------------------
# The command line


def make_parser() -> train.Parser:
    parser = train.Parser(
        "compare.py", None, __doc__, formatter_class=train.argparse.RawDescriptionHelpFormatter
    )
    several = [name for name, preset in train.PRESETS.items() if name not in train.SINGLE_LABEL]
    parser.add_argument("--dataset", choices=several, default="glyphs", help="default: glyphs")
    text = "a run of every row for each; default: 0 1 2"
    parser.add_argument("--seeds", type=train.at_least(0), nargs="+", default=[0, 1, 2], help=text)
    parser.add_argument(
        "--with", nargs=2, action="append", default=[], metavar=("ROW", "FLAGS"), dest="extra",
        help="more flags for one row, as in --with CODA-P '--epochs 3 --lr 0.01'",
    )  # fmt: skip
    text = "make the tables of the runs that are finished, and train none"
    parser.add_argument("--finished", action="store_true", help=text)
    parser.add_argument("--out", type=Path, help="default: runs/compare-<data set>")
    parser.add_argument(
        "--parts", nargs="+", default=["methods", "ablations", "selectors"],
        choices=["methods", "ablations", "selectors"], help="default: all",
    )  # fmt: skip
    return parser


def command(words: Sequence[str]) -> None:
    """Do what the command line says."""
    cut = words.index("--") if "--" in words else len(words)
    words, common = words[:cut], words[cut + 1 :]
    own = {"--run", "--run-dir", "--resume", "--eval", "--predict", "--dry-run"}
    if found := own.intersection(word.partition("=")[0] for word in common):
        raise train.UsageError(f"{min(found)} does not go with compare.py: it asks for whole runs")
    o, flags = make_parser().parse_args(words), METHODS | ABLATIONS | SWEEP
    for name, more in o.extra:
        if name not in flags:
            raise train.UsageError(f"--with {name!r}: the rows are {', '.join(flags)}")
        try:
            flags[name] = [*flags[name], *shlex.split(more)]
        except ValueError as error:
            raise train.UsageError(f"--with {name!r} {more!r}: {error}") from None
    out = o.out or Path("runs") / f"compare-{o.dataset}"
    told = shlex.join(["python", "compare.py", *words, *(["--", *common] if common else [])])

    def folders(name: str) -> dict[int, Path]:
        found = {seed: out / f"{slug(name)}-seed{seed}" for seed in o.seeds}
        if o.finished:
            return {seed: folder for seed, folder in found.items() if is_finished(folder)}
        for seed, folder in found.items():
            run(folder, name, ["--dataset", o.dataset, *common, *flags[name]], seed)
        return found

    if o.finished and not folders("MULTI-LANE"):
        raise train.UsageError(f"--finished: {out} has no finished run of MULTI-LANE")
    compare(out, o.parts, folders, told)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or what a run of train.py ended with, or its codes for what is wrong."""
    try:
        command(list(sys.argv[1:] if arguments is None else arguments))
        return 0
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:  # of a run, which has said why; or of --help
        return int(stop.code or 0)
    except (train.UsageError, data.DataError) as error:
        text, code = str(error), 2
    except (train.RunError, OSError) as error:
        text, code = str(error), 1
    print(f"compare.py: error: {' '.join(text.split())}", file=sys.stderr)
    return code


def is_finished(folder: Path) -> bool:
    return (folder / "report.md").exists()


Folders = Callable[[str], dict[int, Path]]  # of a row's name: its finished runs, by their seeds


def compare(out: Path, parts: Sequence[str], folders: Folders, command: str) -> None:
    """Write the tables and the plots; asking for `folders` trains what is not there yet."""
    names = dict.fromkeys(["MULTI-LANE", *(METHODS if "methods" in parts else [])])
    names |= dict.fromkeys(ABLATIONS if "ablations" in parts else [])
    found = {name: [train.read_results(f) for f in folders(name).values()] for name in names}
    found = {name: results for name, results in found.items() if results}
    numbers, text = {"rows": found}, [comparison_table(found)]
    if "ablations" in parts:
        chosen = {name: found[name] for name in ("MULTI-LANE", *ABLATIONS) if name in found}
        draw_ablations(chosen, out / "ablations.png")
        text.append("![final mAP with and without each idea](ablations.png)")
    ours, theirs = folders("MULTI-LANE"), folders("CODA-P") if "methods" in parts else {}
    if both := [(ours[seed], theirs[seed]) for seed in ours.keys() & theirs.keys()]:
        bins = compare_frequency(both)
        draw_frequency(bins, out / "frequency.png")
        numbers["frequency"] = bins
        text.append("![F1 by class frequency, MULTI-LANE minus CODA-P](frequency.png)")
    if "selectors" in parts:
        curves = compare_selectors(folders)
        draw_selectors(curves, out / "selectors.png")
        numbers["selectors"] = curves
        text.append("![final mAP over the number of summaries](selectors.png)")
    config = train.read_config(next(iter(ours.values())))
    made = ", ".join(
        f"{key} {value}" for key, value in {**config["versions"], **config["machine"]}.items()
    )
    text.append(f"`{command}`")
    text.append(
        "Mean ± standard deviation over the seeds, each with its own order of the classes. "
        f"Revision {config['revision']}; {made}."
    )
    text += [f"Note: {note}." for note in config["notes"]]
    data.write_whole(out / "comparison.json", json.dumps(numbers, indent=1).encode())
    data.write_whole(out / "comparison.md", ("\n\n".join(text) + "\n").encode())
    print(f"{text[0]}\n\nsee {out / 'comparison.md'}")


def compare_frequency(pairs: Sequence[tuple[Path, Path]]) -> list:
    """The gain in F1 of some runs over others, in bins of class frequency: `frequency_bins`.

    The paper has 10 bins for 80 classes; here a bin has at least 4 classes.
    """
    gains, counts = [], []
    for own, other in pairs:
        (f1, count), (other_f1, _) = run_f1(own), run_f1(other)
        gains.append(f1 - other_f1)
        counts.append(count)
    bins = min(10, max(1, len(counts[0]) // 4))
    return frequency_bins(torch.cat(gains), torch.cat(counts), bins)


def compare_selectors(folders: Folders) -> dict[str, dict[int, list[float]]]:
    """Final mAP over the number of selectors, and of the tokens that Token Merging leaves."""
    first = next(iter(folders("MULTI-LANE").values()))
    chosen = train.read_config(first)["settings"]["selectors"]
    same = {f"{chosen} selectors": "MULTI-LANE", "Token Merging to 30": "Token Merging"}
    curves = {}
    for line, counts, name in (
        ("selectors", SELECTORS, "{} selectors"),
        ("Token Merging", MERGED, "Token Merging to {}"),
    ):
        rows = {count: folders(same.get(row := name.format(count), row)) for count in counts}
        curves[line] = {
            count: [train.read_results(folder)["mAP"] for folder in found.values()]
            for count, found in rows.items()
            if found
        }
    return curves


if __name__ == "__main__":
    sys.exit(main())
