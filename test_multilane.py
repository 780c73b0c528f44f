"""The tests of multilane. `pytest` runs them all, offline, without a GPU."""

import copy
import dataclasses
import gc
import hashlib
import json
import math
import os
import pickle
import re
import runpy
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tomllib
import unicodedata
import warnings
import zlib
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels then run on the CPU

import nbformat
import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from nbclient import NotebookClient
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from timm.models.vision_transformer import ParallelThingsBlock, ResPostBlock, VisionTransformer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms import v2

import baselines
import bench
import compare
import data
import multilane
import train
from data import DataError
from multilane import LaneConfig, MultiLane

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "shared" / "golden" / "lanes.npz"
IMPLS = ("reference", "parallel", "triton")

needs_triton = pytest.mark.skipif(multilane.triton is None, reason="triton is not installed")


# ---------------------------------------------------------------------------------------------
# Small models


def small_vit(seed=0, **options):
    """A ViT that is quick, with weights large enough that every part of a block matters."""
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
    torch.manual_seed(seed)
    vit = VisionTransformer(**{**settings, "num_classes": 0, **options})
    return randomize(vit)


def randomize(module, scale=0.15):
    for p in module.parameters():
        nn.init.normal_(p, std=scale) if p.ndim > 1 else nn.init.normal_(p, 0.5, scale)
    return module


def small_model(lanes=3, classes=4, seed=0, vit=None, impl="auto", **config):
    config = {"selectors": 4, "prompts": 5, "prompt_blocks": 2, **config}
    model = MultiLane(vit or small_vit(seed), LaneConfig(**config), impl=impl)
    torch.manual_seed(seed + 1)
    for t in range(lanes):
        model.add_lane([f"class {t}.{i}" for i in range(classes)])
        randomize(model.lanes[t], 0.5)
    return model.eval()


def pictures(count=3, size=32, seed=0):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def logits(model, images, impl, **options):
    model.impl = impl
    with torch.no_grad():
        return model(images, **options)


def gradients(model, compute, lane=None):
    """Logits of compute(model), and the gradients of a loss that no two logits share."""
    model.zero_grad()
    out = compute(model)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out.sigmoid() * weights).sum().backward()
    lanes = model.lanes if lane is None else [model.lanes[lane]]
    # a key only chooses, so it gets its gradient from key_loss alone
    named = [(n, p) for m in lanes for n, p in m.named_parameters() if p.numel() and n != "key"]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for _, p in named)
    return out.detach(), [p.grad.clone() for _, p in named]


def assert_close(a, b, tolerance=1e-5):
    a, b = a.detach(), b.detach()
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


# ---------------------------------------------------------------------------------------------
# The method gives the published numbers


def golden_model():
    numbers = {k: torch.from_numpy(np.array(v)) for k, v in np.load(GOLDEN).items() if k != "note"}
    vit = VisionTransformer(
        img_size=64, patch_size=16, embed_dim=48, depth=4, num_heads=3, num_classes=0
    )
    ours = ("param/selectors", "param/head")
    params = {
        k.removeprefix("param/"): v
        for k, v in numbers.items()
        if k.startswith("param/") and not k.startswith(ours) and "prompts" not in k
    }
    vit.load_state_dict(params)
    model = MultiLane(vit, LaneConfig(selectors=4, prompts=5, prompt_blocks=2))
    for t in range(3):
        lane = model.lanes[model.add_lane([f"{t}.{i}" for i in range(4)])]
        with torch.no_grad():
            for name, p in lane.named_parameters():
                p.copy_(golden_part(numbers, "param", name, t))
    return model, numbers


def golden_part(numbers, kind, name, t):
    """The golden parameter or gradient that belongs to a parameter of lane t."""
    if name == "selectors":
        return numbers[f"{kind}/selectors"][t]
    if name == "prompts":
        blocks = [numbers[f"{kind}/blocks.{b}.attn.prompts"][:, t] for b in range(2)]
        return torch.stack(blocks).transpose(2, 3)  # [2,2,P,H,d] -> [2,2,H,P,d]
    return numbers[f"{kind}/{name}"][4 * t : 4 * t + 4]


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden numbers are not part of the product")
@pytest.mark.parametrize("impl", [*IMPLS[:2], pytest.param("triton", marks=needs_triton)])
def test_golden_logits(impl):
    model, numbers = golden_model()
    assert_close(logits(model, numbers["images"], impl), numbers["eval/logits"])
    g, cls = model.stream(numbers["images"])
    assert_close(model.forward_stream(g), numbers["eval/logits"])
    assert_close(cls, numbers["eval/frozen_cls"])


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden numbers are not part of the product")
@pytest.mark.parametrize("impl", ("reference", "parallel", "stream"))
def test_golden_gradients(impl):
    model, numbers = golden_model()
    lane, images = int(numbers["train/lane"]), numbers["images"]
    if impl == "stream":
        out = model.forward_stream(*model.stream(images), lane=lane)
    else:
        model.impl = impl
        out = model(images, lane=lane)
    assert_close(out, numbers["train/logits"])
    loss = F.binary_cross_entropy_with_logits(out, numbers["train/targets"])
    assert abs(loss.item() - float(numbers["train/loss"])) < 1e-6
    loss.backward()
    for name, p in model.lanes[lane].named_parameters():
        wanted = golden_part(numbers, "grad", name, lane)
        assert (p.grad - wanted).abs().max() <= 1e-4 * wanted.abs().max(), name


# ---------------------------------------------------------------------------------------------
# Reference, parallel, cached and kernel are one method

RAGGED = [  # lanes, image size, config
    (3, 32, {}),
    (1, 32, {"selectors": 1}),
    (2, 32, {"selectors": 1, "prompts": 0}),
    (4, 24, {"selectors": 7, "prompts": 3, "prompt_blocks": 3}),
    (5, 56, {"selectors": 3, "prompts": 1, "prompt_blocks": 1}),
    (2, 40, {"selectors": 20, "prompts": 20, "prompt_blocks": 0}),
    (3, 32, {"prompts": 0, "prompt_blocks": 3}),
    (3, 32, {"pre_head_norm": False}),
    (3, 32, {"pathways": False}),
    (3, 64, {"token_merging": True}),
    (2, 56, {"token_merging": True, "merged_tokens": 7, "pre_head_norm": False}),
    (2, 32, {"token_merging": True, "pathways": False, "prompts": 0}),
]


@pytest.mark.parametrize("lanes, size, config", RAGGED, ids=str)
def test_all_implementations_agree(lanes, size, config):
    model = small_model(lanes, vit=small_vit(img_size=size), **config)
    images = pictures(3, size)
    wanted = logits(model, images, "reference")
    assert wanted.shape == (3, 4 * lanes)
    for impl in IMPLS[1:] if multilane.triton else ["parallel"]:
        assert_close(logits(model, images, impl), wanted)
    assert_close(model.forward_stream(*model.stream(images)), wanted)
    for t in range(lanes):
        wanted = logits(model, images, "reference", lane=t)
        assert_close(logits(model, images, "parallel", lane=t), wanted)


@pytest.mark.parametrize("lanes, size, config", RAGGED, ids=str)
@pytest.mark.parametrize("lane", (None, 0))
def test_all_gradients_agree(lanes, size, config, lane):
    if lane is None and not config.get("pathways", True):
        pytest.skip("with one pathway a lane is trained alone")
    model = small_model(lanes, vit=small_vit(img_size=size), **config)
    images = pictures(3, size)
    g, cls = model.stream(images)
    model.impl = "reference"
    wanted, wanted_grads = gradients(model, lambda m: m(images, lane=lane), lane)
    model.impl = "parallel"
    for compute in (
        lambda m: m(images, lane=lane),
        lambda m: m.forward_stream(g, cls, lane=lane),
    ):
        out, grads = gradients(model, compute, lane)
        assert_close(out, wanted)
        for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
            assert (grad - wanted_grad).abs().max() <= 1e-5 * max(1, wanted_grad.abs().max())


def test_without_drop_replace_summaries_are_carried():
    """This ablation has no parallel form: every implementation runs the reference."""
    model, images = small_model(drop_replace=False), pictures()
    wanted = logits(model, images, "reference")
    assert torch.equal(logits(model, images, "parallel"), wanted)
    assert_close(model.forward_stream(*model.stream(images)), wanted)
    other = small_model()
    other.load_state_dict(model.state_dict())
    assert (logits(other, images, "reference") - wanted).abs().max() > 1e-2
    with pytest.raises(RuntimeError, match="Drop & Replace"):
        logits(model, images, "triton")


@pytest.mark.parametrize("config", ({}, {"pathways": False}), ids=str)
def test_cached_stream_in_half_precision(config):
    model, images = small_model(**config), pictures()
    g, cls = model.stream(images)
    out = model.forward_stream(g.half(), cls.half())
    assert_close(out, logits(model, images, "parallel"), 2e-2)


def test_a_wrong_stream_gets_a_sentence():
    model, images = small_model(pathways=False), pictures()
    g, cls = model.stream(images)
    for wrong in (
        (g[:2], cls),  # a block is missing
        (pictures(2), cls),
        (g[..., :40], cls),
        (model.stream(pictures(2))[0].transpose(0, 1), cls),  # [B,L,N,D], as a loader stacks it
        (g, None),
    ):
        with pytest.raises(ValueError, match=r"\[3,B,N,48\].*cls"):
            model.forward_stream(*wrong)
    assert model.forward_stream(g, lane=1).shape == (3, 4)


@pytest.mark.parametrize("impl", ("reference", "parallel"))
def test_no_gradient_reaches_the_frozen_stream(impl):
    model, images = small_model(impl=impl), pictures().requires_grad_()
    model(images).sum().backward()
    assert images.grad is None
    assert all(len(model.lane_parameters(t)) == 4 for t in range(3))
    assert len(small_model(prompts=0).lane_parameters(0)) == 3  # nothing empty is trained


def test_summaries_are_averages():
    """Equation 3 by hand, and Token Merging: rows that sum to 1 over disjoint tokens."""
    torch.manual_seed(0)
    s, g = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    wanted = torch.zeros(2, 3, 8)
    for b in range(2):
        for j in range(3):
            scores = torch.stack([s[b, j] @ g[b, k] / 8**0.5 for k in range(5)]).exp()
            wanted[b, j] = sum(scores[k] / scores.sum() * g[b, k] for k in range(5))
    assert_close(multilane.summarize(s, g), wanted)
    for tokens, left in ((197, 25), (64, 16), (30, 30), (31, 16), (2, 2)):
        alpha = multilane.merge_tokens(torch.randn(2, tokens, 8), 30)
        assert alpha.shape == (2, left, tokens)
        assert_close(alpha.sum(-1), torch.ones(2, left))
        assert ((alpha > 0).sum(1) == 1).all()  # every frozen token is in exactly one


@pytest.mark.parametrize("images", [1, 4, 7])
@pytest.mark.parametrize("kept", [torch.float64, torch.float16])
def test_summaries_of_a_few_images_at_a_time(images, kept, monkeypatch):
    monkeypatch.setattr(multilane.Summarize, "at_once", 100)  # two images of 5 tokens, width 8
    generator = torch.Generator().manual_seed(images)
    s = torch.randn(3, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    g = torch.randn(images, 5, 8, generator=generator).to(kept)
    weights = torch.randn(images, 3, 8, generator=generator, dtype=torch.float64)
    ours, wanted = multilane.Summarize.apply(s, g), multilane.summarize(s, g.double())
    assert_close(ours, wanted)
    (grad,) = torch.autograd.grad((ours * weights).sum(), s)
    assert_close(grad, torch.autograd.grad((wanted * weights).sum(), s)[0])


def test_token_merging_joins_what_is_alike():
    base = torch.eye(4).repeat_interleave(2, 0)[None]  # tokens 0,1 alike, 2,3 alike, ...
    alpha = multilane.merge_tokens(base, 4)
    assert torch.equal(alpha[0].bool(), torch.eye(4).repeat_interleave(2, 1).bool())


def test_one_pathway_follows_the_nearest_key():
    model, images = small_model(pathways=False), pictures(4)
    _, cls = model.stream(images)
    for t in (2, 0):
        with torch.no_grad():
            for i, lane in enumerate(model.lanes):
                lane.key.copy_(cls.mean(0) * (1 if i == t else -1))
        own = logits(model, images, "parallel", lane=t)
        everything = logits(model, images, "parallel")
        assert_close(everything[:, 4 * t : 4 * t + 4], own)
        parallel = small_model()
        parallel.load_state_dict(model.state_dict(), strict=False)
        other = logits(parallel, images, "parallel")
        columns = [c for c in range(12) if c // 4 != t]
        assert (everything - other)[:, columns].abs().max() > 1e-3
    out, cls_again = model(images, lane=1, return_cls=True)
    assert out.requires_grad and not cls_again.requires_grad
    assert_close(cls_again, cls)
    loss = model.key_loss(cls, 1)
    assert_close(loss, -F.cosine_similarity(cls, model.lanes[1].key[None]).mean())
    loss.backward()
    assert model.lanes[1].key.grad.abs().max() > 0
    with pytest.raises(ValueError, match="pathways=False"):
        small_model().key_loss(cls, 0)


# ---------------------------------------------------------------------------------------------
# The kernel


@needs_triton
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    "B, T, S, N, H, P",
    ((2, 3, 4, 17, 3, 5), (1, 1, 1, 1, 1, 0), (2, 2, 20, 197, 12, 20), (1, 3, 33, 65, 17, 1)),
)
def test_kernel_equals_mix(B, T, S, N, H, P, dtype):
    """Judged by exact arithmetic: PyTorch's own error in this dtype, or one step of the output's.

    (One, not half a step: Triton's interpreter cuts bf16 off where a GPU rounds.)
    """
    torch.manual_seed(B * N)
    z = torch.randn(B, N, T * S).mul(3).to(dtype).mT.unflatten(1, (T, S))
    r, e = torch.randn(B, H, T, N).to(dtype).transpose(1, 2), torch.randn(B, T, H, P + 1).to(dtype)
    exact = multilane.mix(z.double(), r.double(), e.double())
    for name, kernel, plain, truth in zip(
        "aw", multilane.mix_triton(z, r, e), multilane.mix(z, r, e), exact, strict=True
    ):
        assert kernel.dtype == dtype and kernel.shape == truth.shape, name
        error, usual = ((t.double() - truth).abs().max() for t in (kernel, plain))
        assert error <= max(usual, torch.finfo(dtype).eps * truth.abs().max()), name
    total = sum(float(t[0, 0, 0].sum()) for t in multilane.mix_triton(z, r, e))
    assert abs(total - 1) < (1e-5 if dtype == torch.float32 else 2e-2)


@needs_triton
def test_kernel_takes_scores_of_minus_infinity():
    torch.manual_seed(0)
    z, r, e = torch.randn(1, 2, 3, 70), torch.randn(1, 2, 4, 70), torch.randn(1, 2, 4, 2)
    z[..., :40] = float("-inf")  # more than one step of the kernel
    for ours, theirs in zip(multilane.mix_triton(z, r, e), multilane.mix(z, r, e), strict=True):
        assert_close(ours, theirs)


@needs_triton
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_kernel_in_a_low_precision_model(dtype):
    model, images = small_model(), pictures()
    wanted = logits(model, images, "reference")
    low = copy.deepcopy(model).to(dtype)
    kernel, plain = (logits(low, images, impl).float() for impl in ("triton", "parallel"))
    usual = (plain - wanted).abs().max()
    assert (kernel - wanted).abs().max() <= 2 * usual + 1e-2


AHEAD_OF_TIME = """
import json, subprocess, tempfile, triton, multilane
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.backends.nvidia import compiler
reports = {}
for arch in 80, 90:
    for S, P in (20, 20), (1, 0):
        for dtype in "fp32", "fp16", "bf16":
            sizes, options = multilane.mix_options(S, 12, P + 1)
            types = {name: "constexpr" if name in sizes else "i32"
                     for name in multilane.mix_kernel.arg_names}
            types |= dict.fromkeys("zreaw", "*" + dtype)
            source = ASTSource(multilane.mix_kernel, signature=types, constexprs=sizes)
            built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            assert built.asm["cubin"]
            with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
                file.write(built.asm["ptx"]); file.flush()
                find = compiler.get_ptxas  # takes the architecture in later releases
                ptxas = (find(arch) if find.__code__.co_argcount else find()).path
                target = "sm_90a" if arch == 90 else "sm_80"
                told = subprocess.run([ptxas, "-v", "--gpu-name=" + target, file.name, "-o",
                                       "/dev/null"], capture_output=True, text=True, check=True)
            reports[f"sm_{arch} S={S} P={P} {dtype}"] = told.stderr
print(json.dumps(reports))
"""


@needs_triton
@pytest.mark.skipif(
    multilane.triton and [int(n) for n in multilane.triton.__version__.split(".")[:2]] < [3, 4],
    reason="compiling for an absent GPU is written here for triton 3.4 and later",
)
def test_kernel_compiles_ahead_of_time_without_spills(tmp_path):
    """For A100 and H100, without either, at T=10, N=197, H=12, d=64."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(HERE), "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", AHEAD_OF_TIME],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    reports = json.loads(ran.stdout)
    assert len(reports) == 12
    for shape, told in reports.items():
        spills = re.findall(r"(\d+) bytes spill", told)
        assert spills and set(spills) == {"0"}, (shape, told)


def pretend_gpu(monkeypatch):
    """Make "auto" believe that the images are on a GPU; the interpreter then runs the kernel."""
    monkeypatch.setattr(MultiLane, "_on_gpu", staticmethod(lambda x: True))


@needs_triton
def test_auto_uses_the_kernel_after_a_check(monkeypatch):
    model, images, calls = small_model(), pictures(5), []
    kernel = multilane.mix_triton

    def spy(z, r, e):
        calls.append(len(z))
        return kernel(z, r, e)

    monkeypatch.setattr(multilane, "mix_triton", spy)
    wanted = logits(model, images, "parallel")
    assert not calls
    pretend_gpu(monkeypatch)
    for _ in range(2):
        assert_close(logits(model, images, "auto"), wanted)
    assert calls == [2] * 3 + [5] * 3 + [5] * 3  # three blocks: the check once, then the batches


@needs_triton
@pytest.mark.parametrize("fault", ("raises", "disagrees", "is not a number"))
def test_auto_falls_back_when_the_kernel_fails(monkeypatch, fault):
    def broken(z, r, e):
        if fault == "raises":
            raise RuntimeError("no such instruction")
        a, w = multilane.mix(z, r, e)
        return (a * 1.01, w) if fault == "disagrees" else (a * float("nan"), w)

    model, images = small_model(), pictures()
    wanted = logits(model, images, "parallel")
    monkeypatch.setattr(multilane, "mix_triton", broken)
    pretend_gpu(monkeypatch)
    with pytest.warns(UserWarning, match="no such instruction" if fault == "raises" else "off by"):
        out = logits(model, images, "auto")
    assert torch.equal(out, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        assert torch.equal(logits(model, images, "auto"), wanted)


@needs_triton
def test_insisting_on_the_kernel_where_it_cannot_run(monkeypatch):
    model = small_model(impl="triton")
    with pytest.raises(RuntimeError, match="no backward"):
        model(pictures())
    monkeypatch.delenv("TRITON_INTERPRET")
    with torch.no_grad(), pytest.raises(RuntimeError, match="GPU"):
        model(pictures())


# ---------------------------------------------------------------------------------------------
# Backbones


@pytest.mark.parametrize(
    "name, options",
    (
        ("vit_tiny_patch16_224", {}),
        ("vit_base_patch16_224", {}),
        ("deit_tiny_patch16_224", {}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("deit3_small_patch16_224", {"img_size": 64}),  # layer-scale, no position for [CLS]
        ("vit_small_patch14_reg4_dinov2", {"img_size": 56}),  # registers and layer-scale
        ("vit_base_patch32_clip_224", {"img_size": 96}),  # norm_pre
        ("vit_tiny_patch16_224", {"img_size": (96, 64)}),
        ("vit_tiny_patch16_224", {"dynamic_img_size": True}),
        ("vit_tiny_r_s16_p8_224", {"img_size": 64}),  # patches made by a small ResNet
        ("vit_tiny_patch16_224", {"global_pool": "avg", "img_size": 64}),  # fc_norm for norm
    ),
    ids=str,
)
def test_backbones(name, options):
    torch.manual_seed(0)
    vit = timm.create_model(name, num_classes=0, **options)
    for block in vit.blocks:
        for scale in (block.ls1, block.ls2):
            if hasattr(scale, "gamma"):  # timm starts it at 1e-5, where no block does anything
                nn.init.uniform_(scale.gamma, 0.2, 1.0)
    model = MultiLane(vit, LaneConfig(selectors=3, prompts=2), pretrained=False)
    size = (64, 96) if options.get("dynamic_img_size") else vit.patch_embed.img_size
    images = torch.rand(2, 3, *size)
    with torch.no_grad():
        out, cls = model(images, return_cls=True)
        features = vit.forward_features(images)
        if isinstance(vit.norm, nn.Identity):
            features = vit.fc_norm(features)
        assert out.shape == (2, 0)
        assert_close(cls, features[:, 0])
    for t in range(2):
        randomize(model.lanes[model.add_lane([f"{t}.{i}" for i in range(3)])], 0.3)
    wanted = logits(model, images, "reference")
    assert_close(logits(model, images, "parallel"), wanted)
    assert wanted.std(0).min() > 0  # another image, another answer
    maps = model.heatmaps(images)
    rows, columns = (4, 6) if options.get("dynamic_img_size") else vit.patch_embed.grid_size
    assert maps.shape == (2, 2, len(vit.blocks), 3, rows, columns)


class Rotary(VisionTransformer):
    rope = nn.Linear(1, 1)


def with_part(name, part):
    vit = small_vit()
    setattr(vit.blocks[1].attn, name, part)
    return vit


@pytest.mark.parametrize(
    "build, reason",
    (
        (lambda: timm.create_model("resnet18", num_classes=0), "is not a VisionTransformer"),
        (lambda: small_vit(class_token=False, global_pool="avg"), "no class token"),
        (lambda: small_vit(qk_norm=True), "qk-norm"),
        (lambda: timm.create_model("eva02_tiny_patch14_224", num_classes=0), "rotary"),
        (lambda: with_part("gate", nn.Linear(48, 48)), "gated attention"),
        (lambda: with_part("norm", nn.LayerNorm(48)), "scaled attention"),
        (lambda: small_vit(block_fn=ResPostBlock), "block 0"),
        (lambda: small_vit(block_fn=ParallelThingsBlock), "block 0"),
        (lambda: timm.create_model("beit_base_patch16_224", num_classes=0), "Beit cannot"),
        (lambda: nn.Linear(2, 2), "Linear cannot carry lanes"),
    ),
)
def test_unsuitable_backbones_are_refused(build, reason):
    with pytest.raises(ValueError, match=reason) as told:
        MultiLane(build())
    assert "class token and plain attention" in str(told.value)


def test_attention_with_another_scale_is_refused_even_under_a_tiny_layer_scale():
    vit = small_vit(init_values=1e-6)
    nn.init.constant_(vit.blocks[0].ls1.gamma, 1e-6)
    MultiLane(vit, LaneConfig(prompt_blocks=2))
    vit.blocks[0].attn.fused_attn, vit.blocks[0].attn.scale = False, 0.5
    with pytest.raises(ValueError, match="block 0.*not pre-norm softmax attention"):
        MultiLane(vit, LaneConfig(prompt_blocks=2))


def test_a_block_that_computes_something_else_is_refused():
    vit = small_vit()
    original = vit.blocks[2].forward
    vit.blocks[2].forward = lambda x: original(x) * 1.01
    with pytest.raises(ValueError, match="block 2.*not pre-norm softmax attention"):
        MultiLane(vit)


def test_backbone_by_name():
    model = MultiLane("vit_tiny_patch16_224.augreg_in21k_ft_in1k", pretrained=False)
    assert model.backbone_name == "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert small_model().backbone_name == "VisionTransformer"
    with pytest.raises(ValueError, match="'no_such_vit'.*timm.list_models"):
        MultiLane("no_such_vit", pretrained=False)


# ---------------------------------------------------------------------------------------------
# Cost, counted on the meta device


def count_macs(function):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function()
    return counter.get_total_flops() / 2


def base_macs(lanes, impl="parallel", **config):
    vit = timm.create_model("vit_base_patch16_224", num_classes=0).to("meta")
    with torch.device("meta"):
        model = MultiLane(vit, LaneConfig(**{"selectors": 20, "prompts": 20, **config}), impl=impl)
        for t in range(lanes):
            model.add_lane([f"{t}.{i}" for i in range(10)])
        images = torch.empty(1, 3, 224, 224)
        with torch.no_grad():
            model(images)  # walks the selectors, once per set of weights
        return count_macs(lambda: model(images)), count_macs(lambda: vit(images))


def test_ten_lanes_cost_no_more_than_a_plain_vit():
    ten, plain = base_macs(10)
    eleven, _ = base_macs(11)
    single, _ = base_macs(10, selectors=1)
    literal, _ = base_macs(10, impl="reference")
    assert plain == pytest.approx(17.56e9, rel=0.01)
    assert ten <= 1.01 * plain
    assert eleven - ten <= 0.13e9
    assert single <= 0.99 * plain
    assert literal == pytest.approx(36.2e9, rel=0.02)  # what the identities save


# ---------------------------------------------------------------------------------------------
# The readout that lanes share


def batch_readout(phi, y):
    """Log-odds [n,C] of all images at once, from phi [n,F] and y [n,C]: no sums, no tricks.

    Two classes a task.
    """
    phi, y, best = phi.double(), y.double(), (torch.inf, None)
    n, power = len(phi), phi.square().sum() / phi.shape[1] / len(phi)
    for images in torch.logspace(0, 5, 21):
        hat = phi @ torch.linalg.solve(
            phi.mT @ phi + images * power * torch.eye(phi.shape[1]), phi.mT
        )  # [n,n]
        error = ((y - hat @ y).square().sum(0) / y.sum(0)).sum() / (1 - hat.trace() / n) ** 2
        best = min(best, (float(error), hat @ y), key=lambda pair: pair[0])
    odds = []
    for r, truth in zip(best[1].T, y.T.bool(), strict=True):
        with_it, without = r[truth], r[~truth]
        m1, m0 = with_it.mean(), without.mean()
        variance = ((with_it - m1).square().sum() + (without - m0).square().sum()) / n
        slope = (m1 - m0) / variance.clamp_min(0.05 * (m1 - m0) ** 2)
        odds.append(slope * (r - (m1 + m0) / 2) + torch.log(truth.sum() / (~truth).sum()))
    odds = torch.stack(odds, 1)
    p = odds.sigmoid().unflatten(1, (-1, 2)).amax(2)  # [n,T]
    tasks = p.sum(1) ** 2 / p.square().sum(1)  # how many are in the image
    return (odds + tasks.log()[:, None]).float()


def taught_model(order=(0, 1, 2), size=40, **config):
    """A small model whose lanes have statistics, and the images and targets they are of."""
    model, taught = small_model(0, readout=1.0, **config), {}
    for t in order:
        torch.manual_seed(10 + t)
        lane = model.add_lane([f"{t}.{i}" for i in range(2)], warm_start=False)
        images, targets = pictures(size, seed=50 + t), torch.rand(size, 2).round()
        for rows in torch.arange(size).split(7):
            model.learn_readout(lane, model.features(images[rows]), targets[rows])
        taught[t] = images, targets
    return model.eval(), taught


def test_the_readout_is_ridge_regression_on_all_images_at_once():
    model, taught = taught_model()
    images = torch.cat([taught[t][0] for t in range(3)])
    truth = torch.block_diag(*(taught[t][1] for t in range(3)))  # hidden labels count as absent
    phi = model.features(images)
    assert phi.shape == (120, 3 * 48 + 1)
    wanted = batch_readout(phi, truth)
    assert_close(model.read_out(phi), wanted, 5e-3)  # sums are kept in float32
    for part in ("reference", "parallel"):
        alone = torch.cat([logits(model, images[:5], part, lane=t) for t in range(3)], 1)
        assert_close(logits(model, images[:5], part), alone + model.read_out(phi[:5]), 1e-4)
    with torch.no_grad():
        g, cls = model.stream(images[:5])
        assert_close(model.forward_stream(g, cls), model(images[:5]), 1e-4)
    assert_close(model(images[:5]), logits(model, images[:5], "parallel"), 1e-4)
    with torch.autocast("cpu", torch.bfloat16):  # large terms cancel: they are not rounded
        assert_close(model.read_out(phi), wanted, 5e-3)
    loud, _ = taught_model()
    loud.config = multilane.LaneConfig(4, 5, 2, readout=2.5)
    loud._solved = [], None, None
    assert_close(loud.read_out(phi), 2.5 * wanted, 5e-3)


def test_the_features_of_the_readout_are_the_frozen_vits():
    vit = small_vit(reg_tokens=2)
    model, images = small_model(vit=vit, readout=1.0), pictures()
    last = []
    hook = vit.blocks[-1].norm1.register_forward_hook(lambda *a: last.append(a[-1]))
    wanted = vit(images)  # timm's own features: the [CLS] after the final norm
    hook.remove()
    phi = model.features(images)
    parts = last[0][:, 0], last[0][:, 3:].mean(1), wanted
    for part, found in zip(parts, phi[:, :-1].split(48, 1), strict=True):
        assert_close(found, part / part.norm(dim=1, keepdim=True) * 48**0.5)
    assert (phi[:, -1] == 1).all()


def test_the_order_of_tasks_does_not_change_the_readout():
    (model, _), (other, _) = taught_model((0, 1, 2)), taught_model((2, 0, 1))
    phi = model.features(pictures(9, seed=3))
    moved = [other.classes.index(name) for name in model.classes]
    assert_close(other.read_out(phi)[:, moved], model.read_out(phi), 1e-3)  # a float32 product
    weights = [
        multilane.solve_readout([lane.statistics for lane in m.lanes]) for m in (model, other)
    ]
    assert_close(weights[1][:, moved], weights[0], 1e-6)


def test_a_dropped_task_is_gone_from_the_readout():
    (model, _), (never, _) = taught_model((0, 1, 2)), taught_model((0, 2))
    phi, before = model.features(pictures(9, seed=3)), model.read_out(model.features(pictures(9)))
    assert not torch.equal(before, model.read_out(phi))
    model.drop_lane(1)
    assert torch.equal(model.read_out(phi), never.read_out(phi))


def test_the_readout_is_saved_loaded_and_put_together_with_the_lanes(tmp_path):
    model, _ = taught_model()
    images = pictures(5)
    for t in range(3):
        model.save_lane(t, tmp_path / f"{t}")
    twin = MultiLane(small_vit(), model.config)
    twin.load_lanes([tmp_path / "0", tmp_path / "1", tmp_path / "2"])
    assert torch.equal(logits(twin, images, "parallel"), logits(model, images, "parallel"))
    copied = copy.deepcopy(model)
    copied.drop_lane(0)
    assert torch.equal(logits(twin, images, "parallel"), logits(model, images, "parallel"))
    half = copy.deepcopy(model).half()  # statistics are no parameters: they are not rounded
    assert torch.equal(half.lanes[0].statistics.gram, model.lanes[0].statistics.gram)
    # A lane that was never shown to the readout has nothing but its own logits.
    model.lanes[1].statistics = None
    model.save_lane(1, tmp_path / "1")
    twin = MultiLane(small_vit(), model.config)
    twin.load_lanes([tmp_path / "0", tmp_path / "1"])
    assert (twin.read_out(twin.features(images))[:, 2:] == 0).all()
    spoiled = load_file(tmp_path / "0")
    with safe_open(tmp_path / "0", "pt") as file:
        about = file.metadata()
    spoiled["readout.sums"] = spoiled["readout.sums"][:, :1].contiguous()
    save_file(spoiled, tmp_path / "0", about)
    with pytest.raises(ValueError, match="readout.sums"):
        MultiLane(small_vit(), model.config).load_lane(tmp_path / "0")


def test_the_next_forward_knows_what_the_readout_learned():
    model, taught = taught_model()
    images, (more, targets) = pictures(4), taught[0]
    before = logits(model, images, "parallel")
    model.learn_readout(2, model.features(more), targets)
    assert not torch.equal(logits(model, images, "parallel"), before)
    before = logits(model, images, "parallel")
    model.add_lane(["new"])
    assert_close(logits(model, images, "parallel")[:, :6], before, 1e-4)


@pytest.mark.parametrize("targets", (torch.ones(5, 1), torch.zeros(5, 1)))
def test_a_readout_of_one_class_is_finite(targets):
    """All of a task's images have it, or none has: there is nothing to tell apart."""
    model = small_model(0, readout=1.0)
    model.add_lane(["one"])
    model.learn_readout(0, model.features(pictures(5)), targets)
    assert logits(model, pictures(5), "parallel").isfinite().all()


def test_misuse_of_the_readout_gets_a_sentence():
    model, _ = taught_model()
    phi = model.features(pictures())
    with pytest.raises(ValueError, match="have no readout"):
        small_model().learn_readout(0, phi, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="as `features` makes it"):
        model.learn_readout(0, phi[:, 1:], torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"targets are \(3, 4\): lane 0 takes \[3,2\]"):
        model.learn_readout(0, phi, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="comes with cls"):
        model.forward_stream(model.stream(pictures())[0])


def test_the_readout_costs_at_most_two_percent():
    with_it, plain = base_macs(10, readout=1.0)
    without, _ = base_macs(10)
    assert 0 < with_it - without <= 0.001 * plain


# ---------------------------------------------------------------------------------------------
# Lanes never touch each other, and what is kept is never stale


def train_lane(model, lane, steps=3):
    torch.manual_seed(lane)
    images, targets = pictures(6, seed=lane), torch.rand(6, 4).round()
    optimizer = torch.optim.Adam(model.lane_parameters(lane), lr=0.05)
    for _ in range(steps):
        loss = F.binary_cross_entropy_with_logits(model(images, lane=lane), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("config", ({}, {"pre_head_norm": False}, {"drop_replace": False}), ids=str)
def test_adding_training_and_dropping_leave_other_lanes_alone(config):
    model, images = small_model(**config), pictures()
    before = copy.deepcopy(model.lanes.state_dict())
    frozen = copy.deepcopy(model.backbone.state_dict())
    alone = [logits(model, images, "auto", lane=t) for t in range(3)]
    reference, parallel = (logits(model, images, impl) for impl in ("reference", "parallel"))
    new = model.add_lane([f"new {i}" for i in range(4)])
    start = logits(model, images, "auto", lane=new)
    model.impl = "auto"
    train_lane(model, new)
    assert (logits(model, images, "auto", lane=new) - start).abs().max() > 1e-2

    def check_others():
        for name, value in before.items():
            assert torch.equal(model.lanes.state_dict()[name], value)
        for name, value in frozen.items():
            assert torch.equal(model.backbone.state_dict()[name], value)
        for t in range(3):
            assert torch.equal(logits(model, images, "auto", lane=t), alone[t])
        assert torch.equal(logits(model, images, "reference")[:, :12], reference)
        assert_close(logits(model, images, "parallel")[:, :12], parallel)

    check_others()
    assert model.drop_lane(new) == tuple(f"new {i}" for i in range(4))
    check_others()
    model.drop_lane(1)
    kept = [0, 1, 2, 3, 8, 9, 10, 11]
    assert torch.equal(logits(model, images, "reference"), reference[:, kept])
    assert_close(logits(model, images, "parallel"), parallel[:, kept])
    assert torch.equal(logits(model, images, "auto", lane=1), alone[2])
    assert model.classes == tuple(f"class {t}.{i}" for t in (0, 2) for i in range(4))


def test_new_lanes_start_from_the_last_or_orthogonal():
    model = small_model(1)
    warm, fresh = model.add_lane(["a"]), model.add_lane(["b", "c"], warm_start=False)
    first, warm, fresh = model.lanes[0], model.lanes[warm], model.lanes[fresh]
    assert torch.equal(warm.selectors, first.selectors)
    assert torch.equal(warm.prompts, first.prompts)
    assert warm.selectors.data_ptr() != first.selectors.data_ptr()
    assert_close(fresh.selectors @ fresh.selectors.T, torch.eye(4))
    rows = fresh.prompts[1, 0].transpose(0, 1).flatten(1)  # [P,H*d]
    assert_close(rows @ rows.T, torch.eye(5))
    assert warm.head.weight.shape == (1, 48) and fresh.head.weight.shape == (2, 48)


@pytest.mark.parametrize("impl", ("reference", "parallel"))
def test_batch_mates_do_not_matter(impl):
    model, images = small_model(), pictures(6)
    together = logits(model, images, impl)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    assert_close(logits(model, images[order], impl), together[order], 1e-6)
    for b in range(6):
        assert_close(logits(model, images[b : b + 1], impl)[0], together[b], 1e-6)


EDITS = {
    "in place": lambda m: m.lanes[1].selectors.mul_(1.5),
    "behind autograd": lambda m: m.lanes[1].prompts.data.mul_(-2.0),
    "through numpy": lambda m: m.lanes[0].selectors.detach().numpy().__imul__(2),
    "swapped rows": lambda m: m.lanes[1].selectors.data.copy_(m.lanes[0].selectors.data),
    "head": lambda m: m.lanes[2].head.weight.mul_(3),
    "replaced": lambda m: setattr(m.lanes[0], "selectors", nn.Parameter(torch.randn(4, 48))),
    "state dict": lambda m: m.load_state_dict(small_model(seed=7).state_dict()),
    "assigned": lambda m: m.load_state_dict(small_model(seed=7).state_dict(), assign=True),
    "backbone": lambda m: m.backbone.load_state_dict(small_vit(9).state_dict()),
    "backbone data": lambda m: setattr(
        m.backbone.blocks[0].mlp.fc1.weight, "data", torch.ones(192, 48)
    ),
    "dtype": lambda m: m.double(),
    "dropped": lambda m: m.drop_lane(0),
    "dropped and added": lambda m: (m.drop_lane(2), m.add_lane(["x"], warm_start=False)),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("lane", (None, 0))
def test_edits_are_seen_by_the_next_forward(edit, lane):
    model, images = small_model(), pictures()
    before = logits(model, images, "parallel", lane=lane)
    assert torch.equal(logits(model, images, "parallel", lane=lane), before)
    with torch.no_grad():
        EDITS[edit](model)
    after = logits(model, images, "parallel", lane=lane)
    assert_close(after, logits(model, images, "reference", lane=lane))
    if lane is None:
        assert after.shape != before.shape or (after - before).abs().max() > 1e-7


def test_training_is_seen_by_the_next_forward():
    model, images = small_model(), pictures()
    for lane in (None, 1):
        before = logits(model, images, "parallel", lane=lane)
        train_lane(model, 1, steps=1)
        after = logits(model, images, "parallel", lane=lane)
        assert (after - before).abs().max() > 1e-4
        assert_close(after, logits(model, images, "reference", lane=lane))


def test_selector_paths_are_walked_once_per_weights(monkeypatch):
    model, images, walks = small_model(), pictures(), []
    original = multilane.stack_lanes
    monkeypatch.setattr(
        multilane,
        "stack_lanes",
        lambda vit, lanes: walks.append(len(lanes)) or original(vit, lanes),
    )
    for _ in range(3):
        logits(model, images, "parallel")
        logits(model, images, "parallel", lane=2)
    assert walks == [3, 1]
    with torch.inference_mode():
        model(images)
    assert walks == [3, 1]


def test_the_backbone_is_frozen_for_good():
    model = small_model(vit=small_vit(proj_drop_rate=0.5, attn_drop_rate=0.5, drop_path_rate=0.5))
    images = pictures()
    quiet = logits(model, images, "parallel")
    model.train()
    model.requires_grad_(True)
    assert model.training and not any(m.training for m in model.backbone.modules())
    assert not any(p.requires_grad for p in model.backbone.parameters())
    assert torch.equal(logits(model, images, "parallel"), quiet)
    for impl in ("reference", "parallel"):
        model.impl = impl
        model(images).sum().backward()
        assert all(p.grad is None for p in model.backbone.parameters())
        assert all(p.grad is not None for lane in model.lanes for p in lane.parameters())
    model.backbone.train()  # past the model itself: the next forward puts it right
    model.backbone.requires_grad_(True)
    assert torch.equal(logits(model, images, "parallel"), quiet)
    assert not any(m.training for m in model.backbone.modules())
    trained = {id(p) for t in range(3) for p in model.lane_parameters(t)}
    assert trained == {id(p) for p in model.parameters() if p.requires_grad}


def test_training_lowers_the_loss():
    before, after = (train_lane(small_model(1), 0, steps) for steps in (1, 60))
    assert after < 0.6 * before


def test_heatmaps_are_the_attention_of_equation_3():
    model, images = small_model(), pictures(2)
    maps = model.heatmaps(images)
    assert maps.shape == (2, 3, 3, 4, 4, 4)
    assert (maps >= 0).all() and (maps.sum((-1, -2)) <= 1 + 1e-5).all()
    g, _ = model.stream(images)
    s = model.backbone.blocks[0].norm1(model.lanes[1].selectors)
    alpha = (s @ g[0].mT / 48**0.5).softmax(-1)
    assert_close(maps[:, 1, 0].flatten(2), alpha[..., 1:].detach())
    assert small_model(drop_replace=False).heatmaps(images).shape == (2, 3, 1, 4, 4, 4)
    for model in (small_model(token_merging=True), small_model(0)):
        with pytest.raises(ValueError, match="selectors"):
            model.heatmaps(images)


def test_a_copy_is_independent():
    model, images = small_model(), pictures()
    before = logits(model, images, "parallel")
    twin = copy.deepcopy(model)
    train_lane(twin, 0)
    assert torch.equal(logits(model, images, "parallel"), before)
    assert (logits(twin, images, "parallel") - before).abs().max() > 1e-4


# ---------------------------------------------------------------------------------------------
# Files


def test_save_and_load_give_the_same_bits(tmp_path):
    for config in ({}, {"pathways": False}, {"token_merging": True}, {"prompts": 0}):
        model, images = small_model(**config), pictures()
        twin = small_model(0, **config)
        for t in range(3):
            model.save_lane(t, tmp_path / f"lane {t}.safetensors")
            seed_state = torch.get_rng_state()
            assert twin.load_lane(tmp_path / f"lane {t}.safetensors") == t
            assert torch.equal(torch.get_rng_state(), seed_state)
        assert twin.classes == model.classes
        for impl in ("reference", "parallel"):
            assert torch.equal(logits(twin, images, impl), logits(model, images, impl))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"lane {t}.safetensors" for t in range(3)]


def test_lanes_trained_apart_are_put_together(tmp_path):
    images, parts = pictures(), []
    for t in range(3):
        apart = small_model(0)
        torch.manual_seed(t)
        apart.add_lane([f"apart {t}.{i}" for i in range(4)])
        train_lane(apart, 0)
        apart.save_lane(0, tmp_path / f"{t}.safetensors")
        parts.append(logits(apart, images, "reference"))
    config = multilane.read_lane(tmp_path / "0.safetensors")[0]["config"]
    model = MultiLane(small_vit(), config)
    model.load_lanes(tmp_path / f"{t}.safetensors" for t in range(3))
    assert torch.equal(logits(model, images, "reference"), torch.cat(parts, 1))
    assert_close(logits(model, images, "parallel"), torch.cat(parts, 1))
    with pytest.raises(ValueError, match=r"apart 0.0.*there already"):
        model.load_lanes([tmp_path / "0.safetensors"])
    assert len(model.lanes) == 3


def test_a_lane_travels_to_another_dtype(tmp_path):
    model, images = small_model(1), pictures()
    model.save_lane(0, tmp_path / "lane")
    low = small_model(0).to(torch.bfloat16)
    low.load_lane(tmp_path / "lane")
    assert_close(logits(low, images, "parallel").float(), logits(model, images, "parallel"), 0.05)


class Bomb:
    def __reduce__(self):
        return (os.system, (f"touch {os.environ['BOMB']}",))


def rewrite(path, edit_tensors=lambda t: t, edit_info=lambda i: i):
    with safe_open(path, framework="pt") as file:
        info, tensors = file.metadata(), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    edit_tensors(tensors)
    info = json.loads(info[multilane.LANE_FORMAT])
    info = edit_info(info) or info
    text = info if isinstance(info, str) else json.dumps(info)
    save_file(tensors, path, {multilane.LANE_FORMAT: text} if info else {})


def spoil(change):
    """A spoiler of a lane file: from (path) to nothing."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


BAD_FILES = {
    "missing": (lambda p: p.unlink(), "missing"),
    "empty": (spoil(lambda b: b""), "cut off"),
    "truncated header": (spoil(lambda b: b[:100]), "cut off"),
    "truncated data": (spoil(lambda b: b[:-10]), "cut off"),
    "noise": (spoil(lambda b: bytes(range(256)) * 8), "cut off"),
    "pickle": (lambda p: p.write_bytes(pickle.dumps(Bomb())), "another kind"),
    "torch pickle": (lambda p: torch.save({"a": Bomb()}, p), "another kind"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "cannot be read"),
    "not a lane": (lambda p: rewrite(p, edit_info=lambda i: i.clear()), "not a lane"),
    "nan": (
        lambda p: rewrite(p, lambda t: t["selectors"].view(-1)[3:4].fill_(float("nan"))),
        "selectors is not all finite",
    ),
    "integers": (
        lambda p: rewrite(p, lambda t: t.update(key=torch.ones(3).int())),
        "not all finite",
    ),
    "wrong shape": (
        lambda p: rewrite(p, lambda t: t.update(selectors=torch.zeros(5, 48))),
        r"\(5, 48\).*\(4, 48\)",
    ),
    "tensor missing": (lambda p: rewrite(p, lambda t: t.pop("prompts")), "prompts"),
    "tensor too many": (lambda p: rewrite(p, lambda t: t.update(more=torch.ones(1))), "more"),
    "other backbone": (
        lambda p: rewrite(p, edit_info=lambda i: i.update(fingerprint="0" * 64, backbone="vit_x")),
        "other weights.*vit_x",
    ),
    "other kind": (
        lambda p: rewrite(p, edit_info=lambda i: i.update(kind="Probe")),
        "lane of Probe",
    ),
    "other config": (
        lambda p: rewrite(p, edit_info=lambda i: i["config"].update(prompts=6)),
        "prompts=6.*prompts=5",
    ),
    "impossible config": (
        lambda p: rewrite(p, edit_info=lambda i: i["config"].update(prompts=-5)),
        "description is spoiled",
    ),
    "unknown setting": (
        lambda p: rewrite(p, edit_info=lambda i: i.update(config={"depth": 3})),
        "description is spoiled",
    ),
    "classes a number": (
        lambda p: rewrite(p, edit_info=lambda i: i.update(classes=5)),
        "list of names",
    ),
    "classes a table": (
        lambda p: rewrite(p, edit_info=lambda i: i.update(classes={"a": 1})),
        "list of names",
    ),
    "deep json": (lambda p: rewrite(p, edit_info=lambda i: "[" * 200_000), "spoiled"),
    "no classes": (lambda p: rewrite(p, edit_info=lambda i: i.update(classes=[])), "list of names"),
    "strange classes": (
        lambda p: rewrite(p, edit_info=lambda i: i.update(classes=[1, 2, 3, 4])),
        "list of names",
    ),
    "broken json": (lambda p: rewrite(p, edit_info=lambda i: "{"), "spoiled"),
    "json of another kind": (lambda p: rewrite(p, edit_info=lambda i: "[1]"), "spoiled"),
    "no fingerprint": (
        lambda p: rewrite(p, edit_info=lambda i: [i.pop("fingerprint"), i][1]),
        "spoiled",
    ),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_bad_lane_files_are_refused(fault, tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    path, good = tmp_path / "lane.safetensors", tmp_path / "good.safetensors"
    model = small_model(2)
    model.save_lane(0, path)
    model.save_lane(1, good)
    spoiler, reason = BAD_FILES[fault]
    spoiler(path)
    twin = small_model(0)
    with pytest.raises(ValueError, match=f"(?s)lane.safetensors.*{reason}") as told:
        twin.load_lanes([good, path])
    assert str(told.value).endswith(".") and "\n" not in str(told.value)
    assert len(twin.lanes) == 0  # all or none
    assert not (tmp_path / "exploded").exists()


def test_lanes_over_another_backbone_are_refused(tmp_path):
    small_model(1).save_lane(0, tmp_path / "lane")
    with pytest.raises(ValueError, match="other weights"):
        small_model(0, seed=3).load_lane(tmp_path / "lane")
    vit = small_vit()
    with torch.no_grad():
        vit.blocks[1].mlp.fc1.weight[0, 0] += 1e-6
    with pytest.raises(ValueError, match="other weights"):
        small_model(0, vit=vit).load_lane(tmp_path / "lane")
    model = small_model(0)
    model.backbone.load_state_dict(small_vit(3).state_dict())  # changed after it was wrapped
    with pytest.raises(ValueError, match="other weights"):
        model.load_lane(tmp_path / "lane")
    half = small_model(0).half()
    for same in (half, copy.deepcopy(half), pickle.loads(pickle.dumps(half))):
        same.load_lane(tmp_path / "lane")
    headed = small_vit(num_classes=7)  # the classifier of the pre-training does not matter
    headed.load_state_dict(small_vit().state_dict(), strict=False)
    small_model(0, vit=headed).load_lane(tmp_path / "lane")


def test_numbers_that_are_not_finite_never_reach_a_file_or_a_lane(tmp_path):
    model = small_model(1)
    with torch.no_grad():
        model.lanes[0].prompts[0, 0, 0, 0, 0] = 1e6
    model.save_lane(0, tmp_path / "lane")
    with pytest.raises(ValueError, match="prompts does not fit into torch.float16"):
        small_model(0).half().load_lane(tmp_path / "lane")
    with torch.no_grad():
        model.lanes[0].head.bias[1] = float("nan")
    with pytest.raises(ValueError, match=r"head.bias holds NaN"):
        model.save_lane(0, tmp_path / "other")
    assert [p.name for p in tmp_path.iterdir()] == ["lane"]


def live_tensors():
    """How many tensors Python holds, and the bytes that they share among them."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return len(found), sum(stores.values())


def test_two_hundred_lanes_come_and_go_and_leave_nothing(tmp_path):
    model, images, seen = small_model(2), pictures(2), []
    for round in range(201):
        lane = model.add_lane([f"new {round}", f"other {round}"])
        optimizer = torch.optim.Adam(model.lane_parameters(lane))
        model(images, lane=lane).sum().backward()
        optimizer.step()
        model.save_lane(lane, tmp_path / "lane")
        with torch.no_grad():
            out = model(images)
            model.drop_lane(lane)
            model.load_lane(tmp_path / "lane")
            assert torch.equal(model(images), out) and model(images, lane=lane).shape == (2, 2)
        model.drop_lane(round % 2)  # an old one: what was new is old in the next round
        if round % 30 == 20:
            seen.append(live_tensors())
    assert len(set(seen)) == 1, (seen[0], seen[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["lane"]


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    model, path = small_model(1), tmp_path / "lane"
    model.save_lane(0, path)
    old = path.read_bytes()
    with torch.no_grad():
        model.lanes[0].selectors.zero_()

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            model.save_lane(0, path)
    assert path.read_bytes() == old and len(list(tmp_path.iterdir())) == 1
    model.save_lane(0, path)
    assert path.read_bytes() != old


# ---------------------------------------------------------------------------------------------
# Compiled, in low precision, and misused


def test_compile_without_a_graph_break():
    # Two blocks, the second without prompts: what is compiled is as long as there are blocks.
    model, images = small_model(vit=small_vit(depth=2), prompt_blocks=1), pictures()
    compiled = torch.compile(model, fullgraph=True, backend="inductor")
    with torch.no_grad():
        assert_close(compiled(images), model(images))
        model.lanes[1].selectors.data.mul_(1.5)  # not stale there either
        assert_close(compiled(images), logits(model, images, "reference"))
        stack = model.stack()  # or, as of now, without walking the selectors in every call
        assert_close(compiled(images, stack=stack), logits(model, images, "reference"))


@pytest.mark.parametrize("config", ({}, {"token_merging": True}, {"drop_replace": False}), ids=str)
def test_autocast(config):
    model, images = small_model(**config), pictures()
    wanted = logits(model, images, "reference")
    for impl in ("reference", "parallel"):
        with torch.autocast("cpu", torch.bfloat16):
            out = logits(model, images, impl)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(images, lane=1).float().square().mean()
            assert model.stack().path is None or model.stack().path.dtype == torch.float32
        assert out.dtype == torch.bfloat16
        assert_close(out.float(), wanted, 0.1)
        model.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.lane_parameters(1))


@pytest.mark.parametrize(
    "images",
    (
        torch.rand(2, 3, 33, 32),
        torch.rand(2, 3, 64, 64),
        torch.rand(2, 1, 32, 32),
        torch.rand(2, 4, 32, 32),
        torch.rand(0, 3, 32, 32),
        torch.rand(3, 32, 32),
        torch.randint(0, 256, (2, 3, 32, 32)),
        torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8),
        np.zeros((2, 3, 32, 32)),
        None,
    ),
    ids=lambda x: f"{getattr(x, 'dtype', '')} {tuple(getattr(x, 'shape', ()))}",
)
def test_wrong_images_get_a_sentence(images):
    model = small_model()
    for method in (model, model.stream, model.heatmaps):
        with pytest.raises(ValueError, match=r"\[B,3,32,32\]"):
            method(images)


def test_wrong_size_with_dynamic_images():
    model = small_model(vit=small_vit(dynamic_img_size=True))
    assert logits(model, torch.rand(1, 3, 40, 24), "parallel").shape == (1, 12)
    with pytest.raises(ValueError, match="multiples of"):
        model(torch.rand(1, 3, 41, 24))


@pytest.mark.parametrize(
    "bad",
    (
        {"selectors": 0},
        {"selectors": 2.0},
        {"selectors": True},
        {"prompts": -1},
        {"prompts": "5"},
        {"prompt_blocks": -1},
        {"prompt_blocks": None},
        {"merged_tokens": 0},
        {"pre_head_norm": 1},
        {"pathways": "no"},
        {"drop_replace": None},
        {"token_merging": True, "drop_replace": False},
    ),
    ids=str,
)
def test_impossible_configs_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        LaneConfig(**bad)


def test_misuse_gets_a_sentence():
    model = small_model(2)
    for call, reason in (
        (lambda: model.add_lane("cat"), "list of names"),
        (lambda: model.add_lane([]), "list of names"),
        (lambda: model.add_lane([1, 2]), "list of names"),
        (lambda: model.add_lane(["a", "a"]), "'a' is there already"),
        (lambda: model.add_lane(["class 0.1"]), "'class 0.1' is there already"),
        (lambda: model.add_lane(5), "list of names"),
        (lambda: MultiLane(None), "NoneType cannot carry lanes"),
        (lambda: logits(model, pictures(), "fast"), "auto, reference, parallel, triton"),
        (
            lambda: MultiLane(small_vit(), LaneConfig(prompts=0, prompt_blocks=0), "fast"),
            "auto, reference, parallel, triton",
        ),
        (lambda: MultiLane(small_vit(), LaneConfig()), "5.*only 3 blocks"),
    ):
        with pytest.raises(ValueError, match=reason):
            call()
    model.impl = "auto"
    with pytest.raises(TypeError, match="give a LaneConfig"):
        MultiLane(small_vit(), {"selectors": 3})
    assert torch.equal(model(pictures(), lane=np.int64(1)), model(pictures(), lane=1))
    for lane in (2, -1, "0", 1.0, True):
        with pytest.raises(IndexError, match="2 lanes"):
            model(pictures(), lane=lane)
    with pytest.raises(IndexError, match="no lane 5"):
        model.drop_lane(5)
    assert len(model.lanes) == 2


def test_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LaneConfig().selectors = 3


def test_the_file_stands_alone(tmp_path):
    """Copied elsewhere, with neither timm nor triton nor this repo, it still imports and works."""
    shutil.copy(HERE / "multilane.py", tmp_path)
    script = """
import sys
for name in "timm", "triton", "data", "train", "numpy.random":
    sys.modules[name] = None
import multilane
assert multilane.triton is None
try:
    multilane.MultiLane("vit_tiny_patch16_224")
except ValueError as told:
    assert "timm" in str(told), told
else:
    raise SystemExit("timm was imported")
print(multilane.LaneConfig())
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


# ---------------------------------------------------------------------------------------------
# Data: protocols and tasks


@pytest.mark.parametrize(
    "protocol, classes, sizes",
    (
        ("B0-C4", 20, [4] * 5),
        ("B10-C2", 20, [10] + [2] * 5),
        ("B0-C10", 80, [10] * 8),
        ("B40-C10", 80, [40] + [10] * 4),
        ("B0-C20", 20, [20]),
        ("10-tasks", 100, [10] * 10),
    ),
)
def test_protocols(protocol, classes, sizes):
    assert data.task_sizes(protocol, classes, multi_label=False) == sizes


@pytest.mark.parametrize(
    "protocol, reason",
    (
        ("B0-C3", "step can be 1, 2, 4, 5, 10 or 20"),
        ("B10-C3", "with B10 the step can be 1, 2, 5 or 10"),
        ("B19-C2", "with B19 the step can be 1"),
        ("B20-C4", "base must be below 20"),
        ("B0-C0", "step can be 1, 2"),
        ("10-tasks", "no protocol '10-tasks'"),
        ("b0c4", "no protocol 'b0c4'"),
        ("", "no protocol ''"),
    ),
)
def test_impossible_protocols_name_what_would_work(protocol, reason):
    with pytest.raises(DataError, match=reason):
        data.task_sizes(protocol, 20)
    with pytest.raises(DataError, match=r"tasks can be 1, 2, 4, 5, 10 or 20"):
        data.task_sizes("3-tasks", 20, multi_label=False)


def toy_benchmark(images=60, classes=6, seed=0):
    torch.manual_seed(seed)
    splits = []
    for n in (images, images // 2):
        labels = torch.rand(n, classes) < 0.3
        splits.append(
            data.Split(torch.arange(n).view(n, 1, 1, 1).expand(n, 3, 8, 8).byte(), labels)
        )
    return data.Benchmark("toy", tuple("abcdef"[:classes]), *splits)


def test_classes_of_your_own_are_named_where_they_do_not_divide():
    """One of them may be a slip of the pen: `Red` among `red`."""
    mine = dataclasses.replace(
        toy_benchmark(classes=5), name="own", classes=("Red", "blue", "g", "h", "red")
    )
    with pytest.raises(DataError, match="be 1 or 5; they are 'Red', 'blue', 'g', 'h', 'red'"):
        data.make_tasks(mine, "B0-C2")


def test_weights_that_cannot_be_downloaded_are_told_from_a_wrong_name(monkeypatch):
    def offline(name, pretrained=True):
        raise ValueError("no network")

    monkeypatch.setattr(train, "build_backbone", offline)
    for name in ("vit_tiny_patch16_224", "vit_tiny_patch16_224.augreg_in21k_ft_in1k"):
        with pytest.raises(
            data.UsageError, match=rf"download the weights of --backbone {name} .*--weights"
        ):
            train.load_vit(name, None)
    with pytest.raises(data.UsageError, match=r"build --backbone vit_tiny.x .*timm.list_models"):
        train.load_vit("vit_tiny.x", None)


@pytest.mark.parametrize("order_seed", (None, 3))
def test_a_task_sees_only_its_own(order_seed):
    toy = toy_benchmark()
    tasks = data.make_tasks(toy, "B2-C2", order_seed)
    assert [len(t.classes) for t in tasks] == [2, 2, 2]
    assert sorted(tasks[-1].seen) == list(toy.classes)
    assert (tasks[-1].seen == toy.classes) == (order_seed is None)
    for task in tasks:
        own = [toy.classes.index(name) for name in task.classes]
        seen = [toy.classes.index(name) for name in task.seen]
        assert task.seen[-2:] == task.classes
        rows = [i for i in range(60) if toy.train.labels[i, own].any()]
        assert task.train.images[:, 0, 0, 0].tolist() == rows
        assert torch.equal(task.train.labels, toy.train.labels[rows][:, own])
        rows = [i for i in range(30) if toy.test.labels[i, seen].any()]
        assert task.test_rows.tolist() == rows
        assert torch.equal(task.test.labels, toy.test.labels[rows][:, seen])
    again = data.make_tasks(toy, "B2-C2", order_seed)
    assert [t.classes for t in again] == [t.classes for t in tasks]


def test_held_out_images_are_taken_from_training_once():
    toy = toy_benchmark()
    held = data.hold_out(toy, 0.25, seed=1)
    parts = [split.images[:, 0, 0, 0].tolist() for split in (held.train, held.test)]
    assert [len(part) for part in parts] == [45, 15]
    assert sorted(parts[0] + parts[1]) == list(range(60))  # each once, none of the test images
    for split, rows in zip((held.train, held.test), parts, strict=True):
        assert torch.equal(split.labels, toy.train.labels[rows])
    assert parts[1] == data.hold_out(toy, 0.25, seed=1).test.images[:, 0, 0, 0].tolist()
    assert parts[1] != data.hold_out(toy, 0.25, seed=2).test.images[:, 0, 0, 0].tolist()
    assert "15 held-out training images" in held.notes[0]


def test_a_task_without_images_is_refused():
    toy = toy_benchmark()
    toy.train.labels[:, 2:4] = False
    with pytest.raises(DataError, match=r"Task 2 of toy B0-C2 \(c, d\) has 0 training"):
        data.make_tasks(toy, "B0-C2")


def test_average_precision_by_hand():
    scores = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5])
    assert data.average_precision(scores, torch.tensor([1, 0, 1, 0, 1]).bool()) == pytest.approx(
        (1 / 1 + 2 / 3 + 3 / 5) / 3
    )
    assert data.average_precision(scores, torch.tensor([0, 0, 0, 0, 1]).bool()) == pytest.approx(
        0.2
    )
    assert data.average_precision(scores, torch.ones(5).bool()) == 1
    assert np.isnan(data.average_precision(scores, torch.zeros(5).bool()))
    ties = data.average_precision(torch.zeros(4), torch.tensor([0, 1, 0, 1]).bool())
    assert ties == pytest.approx((1 / 2 + 2 / 4) / 2)


# ---------------------------------------------------------------------------------------------
# Data: images and loaders


def gradient_image(width=40, height=30):
    """Red grows to the right, green downwards."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, np.full_like(x, 60)], -1).astype(np.uint8))


def test_images_of_every_kind_are_read(tmp_path):
    picture = gradient_image()
    wanted = np.asarray(picture).astype(int)
    kinds = {
        "plain.png": picture,
        "palette.png": picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=256),
        "alpha.png": picture.convert("RGBA"),
        "cmyk.jpg": picture.convert("CMYK"),
    }
    for name, image in kinds.items():
        image.save(tmp_path / name)
        found = np.asarray(data.open_image(tmp_path / name)).astype(int)
        assert found.shape == wanted.shape and abs(found - wanted).mean() < 8, name
    picture.convert("L").save(tmp_path / "grey.jpg")
    grey = np.asarray(data.open_image(tmp_path / "grey.jpg"))
    assert grey.shape == (30, 40, 3) and (grey[..., 0] == grey[..., 2]).all() and grey.std() > 20
    deep = (np.asarray(picture.convert("L")).astype(np.uint16) * 257).astype(np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert abs(np.asarray(data.open_image(tmp_path / "deep.png"))[..., 0] - (deep / 257)).max() <= 1
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: a viewer turns the picture by 90 degrees clockwise
    picture.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    turned = np.asarray(data.open_image(tmp_path / "turned.jpg")).astype(int)
    assert turned.shape == (40, 30, 3)
    assert abs(turned - np.rot90(wanted, -1)).mean() < 8


def file_split(folder, count=9):
    folder.mkdir(exist_ok=True)
    for i in range(count):
        gradient_image(40 + i, 32).rotate(10 * i).save(folder / f"{i}.jpg")
    return data.Split([folder / f"{i}.jpg" for i in range(count)], torch.eye(count).bool())


def test_batches_are_the_same_with_any_number_of_workers(tmp_path):
    split = file_split(tmp_path / "with spaces")
    transform = data.make_transform(train=True, size=16)

    def epoch(number, **options):
        torch.manual_seed(torch.seed() % 1000)  # whatever the state, it must not matter
        loader = data.load_batches(
            split, transform, 4, shuffle=True, seed=5, epoch=number, **options
        )
        state = torch.get_rng_state()
        parts = [torch.cat(part) for part in zip(*loader, strict=True)]
        assert torch.equal(torch.get_rng_state(), state)
        return parts

    images, labels, indices = epoch(0)
    assert images.shape == (9, 3, 16, 16) and images.dtype == torch.float32
    assert sorted(indices.tolist()) == list(range(9)) != indices.tolist()
    assert torch.equal(labels.bool(), split.labels[indices])
    for workers in (0, 2):
        again = epoch(0, workers=workers)
        assert all(torch.equal(a, b) for a, b in zip(again, (images, labels, indices), strict=True))
    other_images, _, other_indices = epoch(1)
    assert not torch.equal(other_indices, indices)
    assert not torch.equal(other_images[other_indices.argsort()], images[indices.argsort()])
    ranks = [epoch(0, rank=r, world=2) for r in range(2)]
    together = {int(i): image for part in ranks for image, i in zip(part[0], part[2], strict=True)}
    assert len(together) == 9
    assert all(
        torch.equal(together[int(i)], image) for image, i in zip(images, indices, strict=True)
    )


def test_transforms_as_published():
    picture = torchvision.tv_tensors.Image(torch.randint(0, 256, (3, 300, 400), dtype=torch.uint8))
    test = data.make_transform(train=False)
    out = test(picture)
    assert out.shape == (3, 224, 224) and 0 <= out.min() and out.max() <= 1
    by_hand = v2.functional.resize(
        picture, [256, 341], v2.InterpolationMode.BICUBIC, antialias=True
    )
    by_hand = v2.functional.center_crop(by_hand, [224, 224]).float() / 255
    assert_close(torch.Tensor(out), torch.Tensor(by_hand), 1e-2)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    normalized = data.make_transform(train=False, mean_std=(mean, std))(picture)
    wanted = (out - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert_close(torch.Tensor(normalized), torch.Tensor(wanted))
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    own = data.make_transform(train=False, mean_std=(mean, std), timm_backbone=vit)(picture)
    plain = data.make_transform(train=False, timm_backbone=vit)(picture)
    assert own.shape == (3, 224, 224) and own.min() < 0 <= plain.min() and plain.max() <= 1
    torch.manual_seed(0)
    train = data.make_transform(train=True)
    first, second = train(picture), train(picture)
    assert first.shape == (3, 224, 224) and not torch.equal(first, second)


def test_unreadable_images_are_named_with_their_task(tmp_path):
    split = file_split(tmp_path)
    (tmp_path / "4.jpg").write_bytes((tmp_path / "4.jpg").read_bytes()[:300])
    (tmp_path / "6.jpg").write_text("this is no picture")
    names = tuple(f"class {i}" for i in range(9))
    tasks = data.make_tasks(data.Benchmark("files", names, split, split), "B0-C3")
    with pytest.raises(
        DataError, match=r"4.jpg \(task 2, training\).*cannot be read.*[Tt]runcated"
    ):
        data.check_data(tasks)
    for workers in (0, 2):
        loader = data.load_batches(
            split, data.make_transform(False, 16), 9, where="task 3, training", workers=workers
        )
        with pytest.raises(DataError, match=r"4.jpg \(task 3, training\)") as told:
            list(loader)
        assert "\n" not in str(told.value)
    for name in ("4.jpg", "6.jpg"):
        gradient_image().save(tmp_path / name)
    assert data.check_data(tasks) == 9


# ---------------------------------------------------------------------------------------------
# Data: the published data sets, in miniature


def make_voc(folder, trainval=6, test=4):
    """VOC's layout: image i of a split holds class i, and person unless it is "difficult"."""
    root = folder / "VOCdevkit" / "VOC2007"
    (root / "ImageSets" / "Main").mkdir(parents=True)
    (root / "JPEGImages").mkdir()
    for split, first, count in (("trainval", 0, trainval), ("test", 100, test)):
        for i in range(first, first + count):
            image = gradient_image()
            (image.convert("L") if i == 2 else image).save(root / "JPEGImages" / f"{i:06d}.jpg")
        for column, name in enumerate(data.VOC_CLASSES):
            lines = []
            for i in range(count):
                flag = 1 if column == i else -1
                if name == "person":
                    flag = 1 - i % 2  # 0: difficult
                lines.append(f"{first + i:06d} {flag:2d}")
            (root / "ImageSets" / "Main" / f"{name}_{split}.txt").write_text(
                "\n".join(lines) + "\n"
            )
    return root


def test_voc_is_read_as_published(tmp_path):
    root = make_voc(tmp_path / "a folder with spaces")
    for place in (root.parent.parent, root.parent, root):
        voc = data.load_voc(place)
        assert voc.classes == tuple(sorted(voc.classes)) and len(voc.classes) == 20
        assert (len(voc.train), len(voc.test)) == (6, 4) and voc.multi_label
    person = voc.classes.index("person")
    assert voc.train.labels[:, person].tolist() == [True, False] * 3  # difficult is absent
    assert torch.equal(voc.train.labels[:, :6], torch.eye(6).bool())
    assert voc.train.images[3] == root / "JPEGImages" / "000003.jpg"
    told = "\n".join(voc.notes)
    assert "6 training and 4 test images are here, 5,011 training and 4,952 test" in told
    assert "no training image of car, cat" in told
    assert data.open_image(voc.train.images[2]).mode == "RGB"


def voc_fault(name, text):
    def spoil(root):
        path = root / "ImageSets" / "Main" / name
        path.write_text(path.read_text() + text) if text is not None else path.unlink()

    return spoil


@pytest.mark.parametrize(
    "fault, reason",
    (
        (voc_fault("cat_test.txt", None), r"cat_test.txt cannot be read"),
        (voc_fault("cat_trainval.txt", "000001 -1\n"), r"line 7, lists image 000001 again.*line 2"),
        (
            voc_fault("dog_trainval.txt", "000777 1\n"),
            r"dog_trainval.txt, line 7, labels image 000777",
        ),
        (voc_fault("dog_trainval.txt", "000777\n"), r'line 7, says "000777"'),
        (voc_fault("dog_trainval.txt", "000777 2\n"), "1, 0 or -1"),
    ),
)
def test_voc_traps(tmp_path, fault, reason):
    fault(make_voc(tmp_path))
    with pytest.raises(DataError, match=reason):
        data.load_voc(tmp_path)


def test_voc_unknown_class_is_told_and_not_used(tmp_path):
    root = make_voc(tmp_path)
    (root / "ImageSets" / "Main" / "dragon_trainval.txt").write_text("000001 1\n")
    voc = data.load_voc(tmp_path)
    assert any("dragon" in note for note in voc.notes) and len(voc.classes) == 20


def make_coco(folder, edit=lambda content: None, images=4):
    """COCO's layout with three categories, out of order; the last image has no annotation."""
    for part in ("train2014", "val2014"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "annotations").mkdir(exist_ok=True)
        names = [f"COCO_{part}_{i:012d}.jpg" for i in range(images)]
        for name in names:
            gradient_image().save(folder / part / name)
        content = {
            "categories": [
                {"id": 7, "name": "zebra"}, {"id": 2, "name": "apple"}, {"id": 44, "name": "kite"},
            ],
            "images": [{"id": 10 + i, "file_name": name} for i, name in enumerate(names)],
            "annotations": [
                {"id": 1, "image_id": 10, "category_id": 7},
                {"id": 2, "image_id": 10, "category_id": 2},
                {"id": 3, "image_id": 11, "category_id": 44},
                {"id": 4, "image_id": 11, "category_id": 44},
                {"id": 5, "image_id": 12, "category_id": 2},
            ],
        }  # fmt: skip
        edit(content)
        path = folder / "annotations" / f"instances_{part}.json"
        path.write_text(json.dumps(content))
    return folder


def test_coco_is_read_as_published(tmp_path):
    make_coco(tmp_path / "my coco")
    coco = data.load_coco(tmp_path / "my coco")
    assert coco.classes == ("apple", "kite", "zebra")
    assert coco.train.labels.int().tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 0]]  # no empty image
    assert [p.name[-5] for p in coco.test.images] == ["0", "1", "2"]
    assert "82,081" in coco.notes[0]
    tasks = data.make_tasks(coco, "B0-C1")
    assert [len(t.train) for t in tasks] == [2, 1, 1] and [len(t.test) for t in tasks] == [2, 3, 3]


COCO_TRAPS = {
    "unknown image": (
        lambda c: c["annotations"].append({"id": 9, "image_id": 99, "category_id": 2}),
        "annotation 9 is for image 99",
    ),
    "unknown category": (
        lambda c: c["annotations"].append({"id": 9, "image_id": 10, "category_id": 3}),
        "annotation 9 is for category 3",
    ),
    "missing file": (
        lambda c: c["images"][1].update(file_name="lost.jpg"),
        r"labels lost.jpg, which is not in .*train2014",
    ),
    "image twice": (lambda c: c["images"].append(dict(c["images"][0])), "an image id twice"),
    "category twice": (lambda c: c["categories"].append({"id": 8, "name": "kite"}), "twice"),
    "no annotations": (lambda c: c.pop("annotations"), "not a COCO instances file"),
    "other content": (lambda c: c.update(images=[3]), "not a COCO instances file"),
}


@pytest.mark.parametrize("trap", COCO_TRAPS)
def test_coco_traps(tmp_path, trap):
    edit, reason = COCO_TRAPS[trap]
    make_coco(tmp_path, edit)
    with pytest.raises(DataError, match=reason):
        data.load_coco(tmp_path)


def test_coco_without_images_or_with_broken_json(tmp_path):
    make_coco(tmp_path)
    (tmp_path / "annotations" / "instances_val2014.json").write_text('{"images": [')
    with pytest.raises(DataError, match=r"instances_val2014.json is not a COCO instances file"):
        data.load_coco(tmp_path)
    shutil.rmtree(tmp_path / "train2014")
    with pytest.raises(DataError, match=r"the images in .*train2014 are not"):
        data.load_coco(tmp_path)


def make_cifar(folder, per_class=3, classes=("wolf", "apple", "bear", "crab")):
    root = folder / "cifar-100-python"
    root.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part in ("train", "test"):
        labels = [i % len(classes) for i in range(per_class * len(classes))]
        content = {
            "fine_labels": labels,
            "data": random.integers(0, 256, (len(labels), 3072), np.uint8),
        }
        (root / part).write_bytes(pickle.dumps(content))
    (root / "meta").write_bytes(pickle.dumps({"fine_label_names": list(classes)}))
    return root


def test_cifar_is_read_as_published(tmp_path):
    root = make_cifar(tmp_path)
    cifar = data.load_cifar100(tmp_path)
    assert cifar.classes == ("apple", "bear", "crab", "wolf") and not cifar.multi_label
    assert cifar.train.images.shape == (12, 3, 32, 32) and cifar.train.images.dtype == torch.uint8
    assert cifar.train.labels[:4].int().argmax(1).tolist() == [3, 0, 1, 2]
    assert (cifar.train.labels.sum(1) == 1).all()
    assert [t.classes for t in data.make_tasks(cifar, "2-tasks")] == [
        ("apple", "bear"),
        ("crab", "wolf"),
    ]
    assert data.load_cifar100(root).classes == cifar.classes


def test_cifar_pickles_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    root = make_cifar(tmp_path)
    (root / "train").write_bytes(pickle.dumps({"data": Bomb()}))
    with pytest.raises(DataError, match=r"train is not a part of CIFAR-100.*system"):
        data.load_cifar100(tmp_path)
    assert not (tmp_path / "exploded").exists()
    for spoiled in (b"", b"noise", pickle.dumps([1, 2]), pickle.dumps({"data": 3})):
        (root / "train").write_bytes(spoiled)
        with pytest.raises(DataError, match="CIFAR-100"):
            data.load_cifar100(tmp_path)


def test_imagenet_r_split_is_made_once_and_written_down(tmp_path):
    for wnid in ("n00000002", "n00000001", "n00000003"):
        (tmp_path / "imagenet-r" / wnid).mkdir(parents=True)
        for i in range(10):
            gradient_image(8, 8).save(tmp_path / "imagenet-r" / wnid / f"art_{i}.jpg")
    (tmp_path / "imagenet-r" / "README.txt").write_text("not a class")
    first = data.load_imagenet_r(tmp_path, seed=1)
    assert first.classes == ("n00000001", "n00000002", "n00000003") and not first.multi_label
    assert first.train.labels.sum(0).tolist() == [8, 8, 8]
    assert first.test.labels.sum(0).tolist() == [2, 2, 2]
    assert not set(first.train.images) & set(first.test.images)
    record = tmp_path / "imagenet-r-split-1.json"
    assert len(json.loads(record.read_text())["test"]) == 6
    again = data.load_imagenet_r(tmp_path, seed=1)
    assert again.train.images == first.train.images
    assert data.load_imagenet_r(tmp_path, seed=2).train.images != first.train.images
    kept = record.read_text()
    record.unlink()
    data.load_imagenet_r(tmp_path, seed=1)
    assert record.read_text() == kept
    record.write_text(kept.replace("art_", "lost_"))
    with pytest.raises(DataError, match="lost_.*remove one"):
        data.load_imagenet_r(tmp_path, seed=1)
    record.write_text("{")
    with pytest.raises(DataError, match="is not a split"):
        data.load_imagenet_r(tmp_path, seed=1)


def make_own(folder, train=6, test=4, classes=("ant", "bee", "cat", "dog")):
    """Two CSV files: image i holds class i, and ant if i is odd."""
    (folder / "photos").mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("test", test)):
        lines = ["image,labels"]
        for i in range(count):
            gradient_image(20 + i).save(folder / "photos" / f"{part} {i}.png")
            own = classes[i % len(classes)]
            lines.append(f"photos/{part} {i}.png,{own}" + "|ant" * (i % 2 and own != "ant"))
        (folder / f"{part}.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_own_images_from_csv(tmp_path):
    own = data.load_own(make_own(tmp_path / "a folder"))
    assert own.classes == ("ant", "bee", "cat", "dog") and own.multi_label and not own.notes
    assert own.train.images[1] == tmp_path / "a folder" / "photos" / "train 1.png"
    assert own.train.labels.int().tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1], [1, 0, 0, 0], [1, 1, 0, 0],
    ]  # fmt: skip
    assert len(own.test) == 4 and data.read_image(own.test.images[3], "test").size == (23, 30)
    # As a spreadsheet writes it: a byte-order mark, CRLF, quotes, spaces, blank lines.
    list_ = tmp_path / "a folder" / "train.csv"
    list_.write_bytes(
        '\ufeffimage,labels\r\n"photos/train 0.png", ant | é,t \r\n\r\n'.encode()
        .replace(b" ant | \xc3\xa9,t ", b'"ant | \xc3\xa9,t "')
    )  # fmt: skip
    own = data.load_own(tmp_path / "a folder")
    assert own.classes == ("ant", "bee", "cat", "dog", "é,t")
    assert own.train.labels.int().tolist() == [[1, 0, 0, 0, 1]]
    assert own.notes == ("own: no training image of bee, cat, dog", "own: no test image of é,t")


def test_own_classes_can_be_ordered_and_added_to(tmp_path):
    make_own(tmp_path)
    (tmp_path / "classes.txt").write_text("dog\nbee\n\nant\ncat\n")
    first = data.load_own(tmp_path)
    assert first.classes == ("dog", "bee", "ant", "cat")
    assert first.train.labels[1].tolist() == [False, True, True, False]
    (tmp_path / "classes.txt").write_text("dog\nbee\nant\ncat\naxolotl\n")
    shutil.copy(tmp_path / "photos" / "train 0.png", tmp_path / "photos" / "new.png")
    (tmp_path / "train.csv").write_text("image,labels\nphotos/new.png,axolotl\n")
    later = data.load_own(tmp_path)
    assert later.classes[:4] == first.classes and "no training image of dog, bee" in later.notes[0]
    with pytest.raises(DataError, match="Task 1 of own B2-C3"):
        data.make_tasks(later, "B2-C3")
    tasks = data.make_tasks(later, "B4-C1", learned=1)  # the old images may be gone
    assert [len(task.train) for task in tasks] == [0, 1] and tasks[1].classes == ("axolotl",)


def test_own_images_from_folders(tmp_path):
    for name in ("train/cat/1.png", "train/dog/2.png", "test/cat/1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        gradient_image(20 + len(name)).save(tmp_path / name)
    (tmp_path / "train" / "eel").mkdir()
    shutil.copy(tmp_path / "train" / "cat" / "1.png", tmp_path / "train" / "dog" / "1.png")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "cat" / ".DS_Store").write_text("hidden")
    own = data.load_own(tmp_path)
    assert own.classes == ("cat", "dog")
    assert own.train.labels.tolist() == [[True, True], [False, True]]  # one image with two labels
    assert own.train.images == [tmp_path / "train" / "cat" / "1.png", tmp_path / "train/dog/2.png"]
    told = "\n".join(own.notes)
    assert "no image in" in told and "eel" in told and "1 entries" in told and "notes.txt" in told
    assert "no test image of dog" in told
    gradient_image(50).save(tmp_path / "train" / "dog" / "1.png")
    with pytest.raises(DataError, match=r"cat.1.png and .*dog.1.png are different.*rename"):
        data.load_own(tmp_path)
    (tmp_path / "train" / "dog" / "1.png").unlink()
    (tmp_path / "classes.txt").write_text("cat\n")
    with pytest.raises(DataError, match=r"2.png says 'dog', which is not in .*classes.txt"):
        data.load_own(tmp_path)


def own_fault(name, line):
    def spoil(folder):
        with open(folder / name, "ab") as file:
            file.write(line if isinstance(line, bytes) else line.encode())

    return spoil


@pytest.mark.parametrize(
    "fault, reason",
    (
        (
            own_fault("train.csv", "photos/9.png,ant\n"),
            r"train.csv, line 8, names photos/9.png, wh",
        ),
        (
            own_fault("test.csv", "photos,ant\n"),
            r"test.csv, line 6, names photos, which is no file",
        ),
        (own_fault("train.csv", "photos/test 0.png,\n"), r"train.csv, line 8, has an empty label"),
        (own_fault("train.csv", "photos/test 0.png,ant||cat\n"), r"line 8, has an empty label"),
        (own_fault("classes.txt", "ant\nbee\ncat"), r"train.csv, line 5, says 'dog', which is not"),
        (own_fault("classes.txt", "ant\nbee\nant"), r"classes.txt, line 3, names 'ant' again.*1"),
        (own_fault("classes.txt", "\n"), r"classes.txt names no class"),
        (own_fault("train.csv", "photos/./train 2.png,ant\n"), r"line 8, lists .* after line 4"),
        (own_fault("train.csv", "photos/test 0.png\n"), r'line 8, says "photos/test 0.png": it mu'),
        (own_fault("train.csv", "photos/test 0.png,ant,cat\n"), r"line 8, says .* double quotes"),
        (own_fault("train.csv", b"photos/\xe9.png,ant\n"), r"train.csv, line 8, is not UTF-8"),
        (own_fault("classes.txt", b"ant\n\xe9"), r"classes.txt, line 2, is not UTF-8"),
        (own_fault("train.csv", "photos/test 0.png,a\0nt\n"), r"train.csv, line 8, is not UTF-8"),
        (own_fault("train.csv", "../secret.png,ant\n"), r"line 8, names ../secret.png, .*outside"),
        (own_fault("train.csv", "photos/../../secret.png,ant\n"), r"line 8, .* is outside of"),
        (own_fault("train.csv", "/etc/passwd,ant\n"), r"line 8, names /etc/passwd, .*outside"),
        (own_fault("train.csv", 'photos/test 0.png,"ant\n'), r"train.csv, line 8, is not CSV"),
        (lambda f: (f / "train.csv").write_text(""), r'line 1, says "": it must be "image,labels"'),
        (lambda f: (f / "train.csv").write_text("file;label\n"), r'line 1, says "file;label"'),
        (lambda f: (f / "test.csv").write_text("image,labels\n"), r"test.csv has no image"),
        (lambda f: (f / "train.csv").unlink(), r"holds neither train.csv nor a folder train"),
    ),
)
def test_own_traps(tmp_path, fault, reason):
    fault(make_own(tmp_path))
    with pytest.raises(DataError, match=reason) as raised:
        data.load_own(tmp_path)
    assert "\n" not in str(raised.value)


def test_own_images_without_a_test_part(tmp_path):
    make_own(tmp_path, train=10)
    (tmp_path / "test.csv").unlink()
    own = data.load_own(tmp_path)
    assert len(own.test) == 0 and not own.notes
    with pytest.raises(DataError, match=r"own has no test images.*test.csv.*--holdout 0.2"):
        data.make_tasks(own, "B0-C2")
    held = data.hold_out(own, 0.3)
    assert (len(held.train), len(held.test)) == (7, 3)
    assert [len(task.seen) for task in data.make_tasks(held, "B0-C2")] == [2, 4]
    with pytest.raises(DataError, match=r"the 4 classes arrive.*B0-C1, B0-C2 or B0-C4 would fit"):
        data.make_tasks(held, None)
    (tmp_path / "test.csv").write_text("image,labels\nphotos/train 3.png,dog\n")
    assert "1 test images are training images too" in data.load_own(tmp_path).notes[0]


# ---------------------------------------------------------------------------------------------
# Data: downloads, tried on file:// addresses


def make_archives(tmp_path, monkeypatch, spoil=lambda path: None):
    """VOC's two archives in miniature, behind two addresses of which the first is down."""
    root, store = make_voc(tmp_path / "source"), tmp_path / "server"
    store.mkdir()
    archives = []
    for archive in data.VOC_ARCHIVES:
        split = "test" if "test" in archive.name else "trainval"
        with tarfile.open(store / archive.name, "w") as file:
            for path in sorted(root.rglob("*.*")):
                if split in path.name or (
                    path.suffix == ".jpg" and path.stem.startswith("0001") == (split == "test")
                ):
                    file.add(path, path.relative_to(tmp_path / "source"))
        content = (store / archive.name).read_bytes()
        urls = tuple((folder / archive.name).as_uri() for folder in (tmp_path / "down", store))
        md5 = hashlib.md5(content).hexdigest()
        archives.append(archive._replace(size=len(content), md5=md5, urls=urls))
        spoil(store / archive.name)
    monkeypatch.setattr(data, "VOC_ARCHIVES", tuple(archives))
    return store, archives


def test_voc_is_downloaded_checked_and_unpacked(tmp_path, monkeypatch):
    store, _ = make_archives(tmp_path, monkeypatch)
    voc = data.load_voc(tmp_path / "data")
    assert (len(voc.train), len(voc.test)) == (6, 4)
    shutil.rmtree(store)
    assert len(data.load_voc(tmp_path / "data").train) == 6  # found, nothing is fetched again
    shutil.rmtree(tmp_path / "data" / "VOCdevkit")
    assert len(data.load_voc(tmp_path / "data").train) == 6  # unpacked from the kept archives
    assert not list((tmp_path / "data").glob(".*")) and not list((tmp_path / "data").glob("*.part"))


def test_a_half_unpacked_archive_does_not_count(tmp_path, monkeypatch):
    _, archives = make_archives(tmp_path, monkeypatch)
    extract, done = tarfile.TarFile.extract, []

    def killed(self, member, *args, **options):
        if len(done) == 9:
            raise KeyboardInterrupt
        done.append(member)
        return extract(self, member, *args, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tarfile.TarFile, "extract", killed)
        data.load_voc(tmp_path / "data")
    assert (tmp_path / "data" / "VOCdevkit").exists()
    assert len(data.load_voc(tmp_path / "data").test) == 4
    assert len(archives) == 2


@pytest.mark.parametrize(
    "spoil, reason",
    (
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "bytes instead of"),
        (lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]), "has MD5"),
        (lambda path: path.unlink(), "No such file"),
    ),
)
def test_failed_downloads_say_what_is_needed(tmp_path, monkeypatch, spoil, reason):
    _, archives = make_archives(tmp_path, monkeypatch, spoil)
    with pytest.raises(DataError, match=reason) as told:
        data.load_voc(tmp_path / "data")
    for archive in archives:
        for part in (archive.name, f"{archive.size:,} bytes", archive.md5, str(tmp_path / "data")):
            assert part in str(told.value)
    assert "Kaggle" in str(told.value)
    assert list((tmp_path / "data").iterdir()) == []  # nothing half is left


def test_a_half_downloaded_file_does_not_count(tmp_path, monkeypatch):
    store, archives = make_archives(tmp_path, monkeypatch)
    (tmp_path / "data").mkdir()
    name = archives[0].name
    (tmp_path / "data" / name).write_bytes((store / name).read_bytes()[:1000])
    (tmp_path / "data" / (name + ".part")).write_bytes(b"of an earlier try")
    assert len(data.load_voc(tmp_path / "data").train) == 6


def test_archives_cannot_write_outside_their_folder(tmp_path):
    with tarfile.open(tmp_path / "bad.tar", "w") as file:
        (tmp_path / "x").write_text("x")
        file.add(tmp_path / "x", "../escaped")
    (tmp_path / "inside").mkdir()
    with pytest.raises(tarfile.TarError):
        data.unpack(tmp_path / "bad.tar", tmp_path / "inside")
    assert not (tmp_path / "escaped").exists()


# ---------------------------------------------------------------------------------------------
# Data: glyphs


def test_glyphs_are_drawn_by_their_seed(tmp_path):
    images, labels = data.draw_glyphs(300, seed=1)
    assert images.shape == (300, 3, 64, 64) and images.dtype == torch.uint8
    assert labels.shape == (300, 20) and labels.dtype == torch.bool
    number = labels.sum(1)
    assert number.min() == 1 and number.max() == 4
    again = data.draw_glyphs(300, seed=1)
    assert torch.equal(images, again[0]) and torch.equal(labels, again[1])
    assert not torch.equal(images, data.draw_glyphs(300, seed=2)[0])
    assert images.float().std((1, 2, 3)).min() > 5


def test_glyphs_are_kept_and_a_spoiled_copy_is_drawn_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "GLYPH_TRAIN", 200)
    monkeypatch.setattr(data, "GLYPH_TEST", 50)
    first = data.load_glyphs(tmp_path / "new folder")
    (kept,) = (tmp_path / "new folder").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(data, "draw_glyphs", None)  # not called: it is read
        again = data.load_glyphs(tmp_path / "new folder")
    kept.write_bytes(kept.read_bytes()[:1000])
    anew = data.load_glyphs(tmp_path / "new folder")
    for other in (again, anew):
        assert torch.equal(other.train.images, first.train.images)
        assert torch.equal(other.test.labels, first.test.labels)
    assert not torch.equal(first.train.images[:50], first.test.images)
    (tmp_path / "file").write_text("")
    told = data.load_glyphs(tmp_path / "file" / "below")  # a place where nothing can be written
    assert (
        torch.equal(told.train.images, first.train.images) and "cannot be written" in told.notes[0]
    )


def test_glyphs_have_a_long_tail_and_five_tasks(tmp_path):
    glyphs = data.load_glyphs(tmp_path)
    assert (len(glyphs.train), len(glyphs.test), len(glyphs.classes)) == (4000, 1000, 20)
    assert glyphs.classes == tuple(sorted(glyphs.classes))
    counts = glyphs.train.labels.sum(0)
    assert counts.max() > 5 * counts.median() > 5 * counts.min() >= 100
    assert [len(t.classes) for t in data.make_tasks(glyphs, "B0-C4")] == [4] * 5
    other = data.draw_glyphs(1000, seed=99)[1].sum(0)
    assert np.corrcoef(counts, other)[0, 1] > 0.98  # the same tail for every seed


def test_no_pretraining_symbol_is_a_benchmark_class():
    symbols, classes = data.pretraining_symbols(), list(data.GLYPHS.values())
    assert len(symbols) > 200 and len(set(symbols)) == len(symbols)
    assert not set(symbols) & set(classes)
    masks, class_masks = data.symbol_masks(symbols), data.symbol_masks(classes)
    assert data.likeness(masks, class_masks).max() < 0.66  # no look-alike at any angle
    assert (data.likeness(class_masks, class_masks).diagonal() > 0.99).all()  # it would be seen
    forbidden = ("STAR", "HEART", "SCISSORS", "UMBRELLA", "TELEPHONE", "MOON", "SNOWFLAKE")
    names = [unicodedata.name(symbol).split() for symbol in symbols]
    assert not any(word in name for name in names for word in forbidden)


def test_pretraining_runs_from_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PRETRAINED_TEST", 512)
    score = data.pretrain_glyph_vit(tmp_path / "vit.safetensors", rounds=(128, 128))
    assert 0 < score < 50
    vit = data.build_glyph_vit(tmp_path / "vit.safetensors")
    assert vit(torch.rand(1, 3, 64, 64)).shape == (1, 128)
    assert (tmp_path / "vit.safetensors").stat().st_size < 3e6


def test_the_shipped_vit_knows_shapes_it_never_saw():
    """A linear probe on its frozen [CLS] sees benchmark classes that no chance would."""
    assert data.GLYPH_WEIGHTS.stat().st_size <= 3e6
    vit = data.build_glyph_vit()
    assert sum(p.numel() for p in vit.parameters()) < 1.05e6
    images, labels = data.draw_glyphs(600, seed=5)
    with torch.no_grad():
        features = vit.forward_features((images / 255 - 0.5) / 0.25)[:, 0].double()
    features = torch.cat([features, torch.ones(600, 1)], 1)
    seen, new = features[:400], features[400:]
    ridge = seen.T @ seen + 10 * torch.eye(features.shape[1])
    scores = new @ torch.linalg.solve(ridge, seen.T @ labels[:400].double())
    found = [data.average_precision(scores[:, c], labels[400:, c]) for c in range(20)]
    assert np.nanmean(found) > 2 * float(labels[400:].float().mean())


# ---------------------------------------------------------------------------------------------
# Data: the command line


def run_data(*arguments):
    return subprocess.run(
        [sys.executable, str(HERE / "data.py"), *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_data_command_line_prints_and_draws_a_split(tmp_path):
    make_voc(tmp_path, trainval=20, test=20)
    ran = run_data(
        "voc", "--protocol", "B10-C2", "--data-dir", tmp_path, "--picture", tmp_path / "p.png",
        "--check-data", "--order-seed", 1,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "voc: 6 tasks, 20 classes, 20 training images" in ran.stdout
    assert "note: VOC2007: 20 training" in ran.stdout and "40 image files can be read" in ran.stdout
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.size[0] > 500


# ---------------------------------------------------------------------------------------------
# Training: metrics, by worked examples


def test_mean_leaves_nan_out():
    assert train.mean([1.0, math.nan, 3.0]) == 2.0
    assert math.isnan(train.mean([math.nan])) and math.isnan(train.mean([]))


def test_map_over_classes_that_have_a_positive():
    scores = torch.tensor([[0.9, 0.1, 0.5], [0.8, 0.7, 0.9], [0.7, 0.6, 0.1], [0.1, 0.2, 0.2]])
    truth = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]])
    found = train.class_precisions(scores, truth)
    # class 0: ranks 1 and 3 -> (1/1 + 2/3) / 2; class 1: rank 2 -> 1/2; class 2: no positive
    assert found[:2] == pytest.approx([5 / 6, 1 / 2]) and math.isnan(found[2])
    assert train.mean(found) == pytest.approx(2 / 3)


def test_f1_by_hand():
    truth = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 1, 0]])
    said = torch.tensor([[0.9, 0.1, 0.9], [0.8, 0.1, 0.0], [0.8, 0.9, 0.0], [0.1, 0.79, 0.0]])
    cf1, of1 = train.f1_scores(said, truth, 0.8)
    # class 0: 2 of 3 right, 2 of 2 found; class 1: 1 of 1, 1 of 3; class 2 has no positive, so it
    # is in no mean, but its false alarm counts in the overall precision: 3 right of 5 said, of 5.
    p, r = (2 / 3 + 1) / 2, (1 + 1 / 3) / 2
    assert cf1 == pytest.approx(2 * p * r / (p + r)) and of1 == pytest.approx(3 / 5)
    assert train.f1_scores(said, truth, 0.79)[1] == pytest.approx(2 * (4 / 6) * (4 / 5) / (22 / 15))
    assert train.f1_scores(said, truth, 1.0) == (0.0, 0.0)  # nothing said
    assert all(math.isnan(x) for x in train.f1_scores(said, 0 * truth, 0.8))


def test_accuracy_by_hand():
    scores = torch.tensor([[0.1, 0.9], [0.6, 0.4], [0.3, 0.2]])
    assert train.accuracy(scores, torch.tensor([[0, 1], [0, 1], [1, 0]])) == pytest.approx(2 / 3)


def test_forgetting_is_best_earlier_minus_last():
    scores = [[80.0], [85.0, 60.0], [70.0, 61.0, 50.0]]
    assert train.forgetting(scores) == [15.0, -1.0]
    assert train.forgetting([[80.0]]) == []


def options(**given):
    return train.complete(given)


def test_scores_after_a_task_are_of_seen_classes_by_task():
    truth = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]])
    logits = torch.tensor([[3.0, -9, -9, 9], [1, 2, -9, -9], [2, -9, 4, -9]])
    found = train.score_task(logits, truth, [2, 2], options(threshold=0.5))
    assert found["by_class"] == [100.0, 100.0, 100.0, None] and found["mAP"] == 100.0
    assert found["by_task"] == [100.0, 100.0]  # the absent class is in no mean
    # at 0.5: classes 0, 1, 2 are said on 3, 1, 1 images, class 3 on one where it is not
    assert found["OF1@0.5"] == pytest.approx(100 * 2 * (3 / 6) / (3 / 6 + 1))
    assert set(found) == {"mAP", "by_class", "by_task", "CF1@0.5", "OF1@0.5", "CF1@0.8", "OF1@0.8"}
    found = train.score_task(logits, truth, [2, 2], options(dataset="cifar100"))
    assert found["accuracy"] == pytest.approx(200 / 3)
    assert found["by_task"] == [50.0, 100.0] and found["by_class"] == [0.0, 100.0, 100.0, None]


def test_learning_rate_is_a_cosine_of_whole_epochs():
    o = options(lr=0.05, batch=128, epochs=4)
    rates = [train.learning_rate(o, epoch) for epoch in range(4)]
    assert rates[0] == 0.025 and rates[2] == pytest.approx(0.0125)
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([p], 0.025)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for rate in rates:
        assert schedule.get_last_lr()[0] == pytest.approx(rate)
        optimizer.step()
        schedule.step()


# ---------------------------------------------------------------------------------------------
# Training: small runs


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with miniature VOC and CIFAR-100 trees of noise, and weights of a small ViT."""
    folder = tmp_path_factory.mktemp("small")
    random = np.random.default_rng(0)
    for path in sorted((make_voc(folder, 20, 20) / "JPEGImages").iterdir()):
        Image.fromarray(random.integers(0, 256, (48, 64, 3), np.uint8)).save(path)
    make_cifar(folder, 25, ("wolf", "apple", "bear", "crab", "dog", "eel"))
    torch.manual_seed(0)
    vit = data.build_glyph_vit(None)
    save_file(
        {name: p.contiguous() for name, p in vit.state_dict().items()}, folder / "vit.safetensors"
    )
    torch.save(
        {"model": {**vit.state_dict(), "head.weight": torch.zeros(3, 128)}}, folder / "vit.pth"
    )
    return folder


def flags(small, dataset="voc", **more):
    protocol = "B0-C10" if dataset == "voc" else "3-tasks"
    given = {
        "dataset": dataset, "protocol": protocol, "data-dir": small, "backbone": "glyph_vit",
        "weights": small / "vit.safetensors", "epochs": 2, "batch": 8, "lr": 1.0, "selectors": 3,
        "prompts": 2, "prompt-blocks": 2, **more,
    }  # fmt: skip
    words = []
    for name, value in given.items():
        words += (
            [] if value is None else [f"--{name}"] if value is True else [f"--{name}", str(value)]
        )
    return words


def bits(path):
    return {name: t.numpy().tobytes() for name, t in load_file(path).items()}


def numbers(run):
    """All that a run came to, but for times."""
    found = {path.name: path.read_bytes() for path in sorted(run.glob("lane-*"))}
    assert found
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    results = json.loads((run / "results.json").read_text())
    for record in [*records, results]:
        del record["time"]
    logits = bits(run / "logits.safetensors")
    return {**found, "metrics": records, "results": results, "logits": logits}


def sentence(capsys):
    """The one line on stderr."""
    text = capsys.readouterr().err
    assert text.startswith("train.py: error: ") and text.count("\n") == 1, text
    return text


def undraw(monkeypatch):
    """Runs draw no plots, which is most of what a small one costs."""
    for name in ("scores", "classes", "forgetting", "heatmaps"):
        monkeypatch.setattr(train, f"draw_{name}", lambda *args: None)


@pytest.fixture
def undrawn():
    """For tests of what a run computes; others look at the plots."""
    with pytest.MonkeyPatch.context() as patch:
        undraw(patch)
        yield


@pytest.fixture(scope="module")
def voc_run(small):
    """An uninterrupted run, against which others are compared."""
    run = small / "runs" / "voc"
    assert train.main([*flags(small), "--run", str(run)]) == 0
    return run


def test_a_run_leaves_everything(voc_run, small):
    config = json.loads((voc_run / "config.json").read_text())
    settings = config["settings"]
    assert (settings["lr"], settings["selectors"], settings["flip"]) == (1.0, 3, True)
    assert config["versions"]["torch"] == torch.__version__ and "revision" in config
    records = [json.loads(line) for line in (voc_run / "metrics.jsonl").read_text().splitlines()]
    assert [(r["task"], r.get("epoch")) for r in records] == [
        (1, 1), (1, 2), (1, None), (2, 1), (2, 2), (2, None),
    ]  # fmt: skip
    results = json.loads((voc_run / "results.json").read_text())
    assert results["mAP"] == records[-1]["mAP"] and len(results["forgetting"]) == 1
    assert results["average_mAP"] == pytest.approx((records[2]["mAP"] + records[5]["mAP"]) / 2)
    lanes = [load_file(path) for path in sorted(voc_run.glob("lane-*.safetensors"))]
    assert results["trainable_parameters"] == sum(
        t.numel() for lane in lanes for t in lane.values()
    )
    report = (voc_run / "report.md").read_text()
    for name in ("scores", "classes", "forgetting", "heatmaps"):
        assert f"({name}.png)" in report
        with Image.open(voc_run / f"{name}.png") as picture:
            assert min(picture.size) > 200
    assert "only the new lane ran" in report and "Avg. mAP" in report and "The paper" not in report
    assert f"| 2 | 20 | 20 | {results['mAP']:.2f} |" in report


@pytest.mark.usefixtures("undrawn")
def test_the_same_seed_gives_the_same_bits_with_any_number_of_workers(voc_run, small, tmp_path):
    assert train.main([*flags(small, workers=2), "--run", str(tmp_path / "a")]) == 0
    assert numbers(tmp_path / "a") == numbers(voc_run)
    assert train.main([*flags(small, seed=1), "--run", str(tmp_path / "b")]) == 0
    assert numbers(tmp_path / "b")["lane-01.safetensors"] != numbers(voc_run)["lane-01.safetensors"]


def test_kept_logits_are_those_of_all_lanes_on_all_images(voc_run, small):
    o, _, model = train.open_run(voc_run, {"where": torch.device("cpu")})
    _, tasks = train.load_tasks(o)
    view = train.make_views(o, model.backbone)[1]
    batches = data.load_batches(tasks[-1].test, view, 7)
    with torch.no_grad():
        logits = torch.cat([model(images) for images, _, _ in batches])
    kept = load_file(voc_run / "logits.safetensors")["logits"]
    assert logits.shape == (20, 20) and (logits - kept).abs().max() < 1e-5


def test_eval_gives_the_same_digits(voc_run, capsys):
    assert train.main(["--eval", str(voc_run)]) == 0
    told = capsys.readouterr().out
    results = json.loads((voc_run / "results.json").read_text())
    assert f"mAP {results['mAP']:.2f}" in told and "the same digits" in told
    assert train.main(["--eval", str(voc_run), "--threshold", "0.3"]) == 0
    assert "CF1@0.3" in capsys.readouterr().out


def test_eval_sees_another_number(voc_run, small, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    for path in voc_run.iterdir():
        if path.is_file():
            (run / path.name).write_bytes(path.read_bytes())
    results = json.loads((run / "results.json").read_text())
    results["after_task"][0]["mAP"] += 1e-9
    (run / "results.json").write_text(json.dumps(results))
    assert train.main(["--eval", str(run)]) == 1
    assert "after_task" in sentence(capsys)


def test_predict_prints_classes_and_writes_overlays(voc_run, small, capsys):
    folder = small / "VOCdevkit" / "VOC2007" / "JPEGImages"
    images = [str(folder / name) for name in ("000100.jpg", "000101.jpg")]
    assert (
        train.main(["--predict", *images, images[0], "--run", str(voc_run), "--threshold", "0.01"])
        == 0
    )
    told = capsys.readouterr().out
    assert told.count(" * ") == 60 and "aeroplane" in told  # 20 classes are above 0.01, three times
    for name in ("000100.png", "000101.png", "000100-2.png"):
        with Image.open(voc_run / "predictions" / name) as picture:
            assert min(picture.size) > 150
    kept = load_file(voc_run / "logits.safetensors")["logits"][0].sigmoid()
    highest = data.VOC_CLASSES[int(kept.argmax())]
    assert told.splitlines()[1].split() == [f"{kept.max():.3f}", "*", highest]


@pytest.mark.usefixtures("undrawn")
def test_lanes_can_be_trained_on_kept_streams(small, tmp_path, capsys):
    """One kept view is the un-augmented centre: training on it equals training on that view."""
    measured, measure = [], train.unkept_seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "unkept_seconds", lambda *a: measured.append(a) or measure(*a))
        words = [*flags(small, **{"cache-views": 1}), "--run", str(tmp_path / "kept")]
        assert train.main(words) == 0
    lines = (tmp_path / "kept" / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["time"] for line in lines]
    assert len(measured) == 1  # in the first task, for the second as well
    assert [t["unkept_epoch"] > 0 for t in times if "unkept_epoch" in t] == [True, True]
    told = capsys.readouterr().out
    assert "the frozen stream of task 1 takes" in told and "without it about 2 x" in told
    with pytest.MonkeyPatch.context() as patch:
        both = train.make_views
        patch.setattr(train, "make_views", lambda *args: (both(*args)[1],) * 2)
        assert train.main([*flags(small), "--run", str(tmp_path / "fresh")]) == 0
    kept, fresh = (load_file(tmp_path / run / "lane-02.safetensors") for run in ("kept", "fresh"))
    for name, p in kept.items():
        assert (p - fresh[name]).abs().max() < 2e-2  # the kept one is in half precision
    assert not list((tmp_path / "kept").glob("*.tmp"))
    assert train.main([*flags(small, **{"cache-views": 3}), "--run", str(tmp_path / "three")]) == 0
    three = load_file(tmp_path / "three" / "lane-02.safetensors")
    assert any((p - three[name]).abs().max() > 2e-2 for name, p in kept.items())


@pytest.mark.usefixtures("undrawn")
def test_the_kept_stream_of_the_test_images_changes_no_bit(small, tmp_path, capsys, monkeypatch):
    runs, passes, stream = [], [], MultiLane.stream

    def counted(model, images):
        passes.append(len(images))
        return stream(model, images)

    monkeypatch.setattr(MultiLane, "stream", counted)
    for room in (1.5, 1e9):  # MB that are free for the test images, of which 1 is needed
        free = {np.float16: 1e9, np.float32: room}
        with monkeypatch.context() as patch:
            patch.setattr(train, "disk_room", lambda shape, dtype, o, free=free: (1, free[dtype]))
            words = [*flags(small, **{"cache-views": 1}), "--run", str(tmp_path / str(room))]
            assert train.main(words) == 0
        told = capsys.readouterr().out
        assert ("the ViT runs over them after every task" in told) == (room == 1.5)
        runs.append((numbers(tmp_path / str(room)), sum(passes)))
        passes.clear()
    assert runs[0][0] == runs[1][0]
    assert runs[0][1] == runs[1][1] + 20  # the second task's test cost no ViT
    assert train.main(["--eval", str(tmp_path / str(room))]) == 0
    assert "the same digits" in capsys.readouterr().out


def test_scores_can_be_taken_on_held_out_training_images(small, tmp_path):
    run = tmp_path / "run"
    assert train.main([*flags(small, holdout=0.3), "--run", str(run)]) == 0
    results = json.loads((run / "results.json").read_text())
    assert results["after_task"][-1]["test_images"] == 6
    assert "6 held-out training images" in (run / "report.md").read_text()
    assert train.main(["--eval", str(run)]) == 0


def own_flags(small, folder, **more):
    more = {"protocol": "B0-C2", "data-dir": folder, "batch": 4, **more}
    return flags(small, "own", **more)


def test_own_images_end_to_end(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_own(tmp_path / "mine", 12, 8)
    assert train.main(own_flags(small, tmp_path / "mine")) == 0
    run = tmp_path / "runs" / "own-B0-C2"
    assert "task 2/2: " in capsys.readouterr().out and (run / "report.md").exists()
    assert train.main(["--eval", str(run)]) == 0
    image = str(tmp_path / "mine" / "photos" / "test 1.png")
    assert train.main(["--predict", image, "--run", str(run)]) == 0
    capsys.readouterr()
    assert train.main(own_flags(small, tmp_path / "mine", protocol=None)) == 2
    assert "B0-C1, B0-C2 or B0-C4 would fit" in sentence(capsys)
    assert train.main(own_flags(small, tmp_path / "nowhere", run=tmp_path / "other")) == 2
    assert "neither train.csv nor" in sentence(capsys) and not (tmp_path / "other").exists()
    (tmp_path / "mine" / "test.csv").unlink()
    held = {"run": tmp_path / "held", "holdout": 0.3, "epochs": 1}
    assert train.main(own_flags(small, tmp_path / "mine", **held)) == 0
    with open(tmp_path / "mine" / "train.csv", "a") as list_:
        list_.write("photos/gone.png,ant\n")
    assert train.main(own_flags(small, tmp_path / "mine", run=tmp_path / "other")) == 2
    assert "train.csv, line 14, names photos/gone.png" in sentence(capsys)


@pytest.mark.usefixtures("undrawn")
def test_a_task_is_added_to_a_finished_run(small, tmp_path, capsys):
    """New classes next month: the old lanes stay as they are, to the bit; only one is trained."""
    make_own(tmp_path, 12, 8)
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\ndog\n")
    first, second = tmp_path / "first", tmp_path / "second"
    assert train.main(own_flags(small, tmp_path, run=first)) == 0
    make_own(tmp_path, 14, 16, ("ant", "bee", "cat", "dog", "axolotl", "eel"))
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\ndog\naxolotl\neel\n")
    lines = (tmp_path / "train.csv").read_text().splitlines()
    lines = [line for line in lines if not line.endswith((",ant", ",cat", "bee|ant", "dog|ant"))]
    (tmp_path / "train.csv").write_text("\n".join(lines) + "\n")  # the old images are gone
    words = own_flags(small, tmp_path, run=second, **{"start-from": first})
    capsys.readouterr()
    assert train.main(words) == 0
    told = capsys.readouterr().out
    assert "2 lanes are from" in told and "task 3/3" in told and "task 2/3" not in told
    for name in ("lane-01.safetensors", "lane-02.safetensors"):
        assert (second / name).read_bytes() == (first / name).read_bytes()
    after = json.loads((second / "results.json").read_text())["after_task"]
    assert [scores["classes"] for scores in after] == [2, 4, 6]
    shutil.rmtree(first)  # nothing of it is needed any more
    assert train.main(["--eval", str(second)]) == 0
    assert "the same digits" in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_a_run_from_other_lanes_resumes_to_the_same_bits(small, tmp_path, monkeypatch):
    make_own(tmp_path, 12, 8)
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\ndog\n")
    assert train.main(own_flags(small, tmp_path, run=tmp_path / "first", protocol="B2-C2")) == 0
    words = {"start-from": tmp_path / "first", "protocol": "B2-C2", "data-dir": tmp_path / "more"}
    make_own(tmp_path / "more", 12, 12, ("ant", "bee", "cat", "dog", "eel", "fly"))
    assert train.main(own_flags(small, tmp_path / "more", run=tmp_path / "a", **words)) == 0
    with monkeypatch.context() as patch:
        stop_after_writes(patch, 6, KeyboardInterrupt())
        assert train.main(own_flags(small, tmp_path / "more", run=tmp_path / "b", **words)) == 130
    assert train.main(["--resume", "--run", str(tmp_path / "b")]) == 0
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")


@pytest.mark.parametrize(
    "more, reason",
    (
        ({"start-from": "nowhere"}, "--start-from nowhere is no run's folder"),
        ({"protocol": "B0-C1"}, "its lane 1 is for ant, bee, but task 1 here is for ant: write"),
        ({"protocol": "B2-C1", "order-seed": 3}, "but task 1 here is for"),
        ({"selectors": 4}, "--start-from: "),
        ({"holdout": 0.5}, "--holdout with --start-from could test old lanes"),
        ({"ablate": "pathways"}, "--start-from does nothing where"),
        ({"run": None, "epochs": None, "dry-run": True}, "--start-from does nothing with --dry"),
    ),
)
@pytest.mark.usefixtures("undrawn")
def test_lanes_that_cannot_be_started_from(small, tmp_path, capsys, more, reason):
    first = small / "own first"
    if not first.exists():
        make_own(small / "own", 12, 8)
        assert train.main(own_flags(small, small / "own", run=first, epochs=1)) == 0
        capsys.readouterr()
    given = {"run": tmp_path / "run", "start-from": first, **more}
    assert train.main(own_flags(small, small / "own", **given)) == 2
    assert reason in sentence(capsys) and not (tmp_path / "run").exists()


@pytest.mark.usefixtures("undrawn")
def test_check_data_opens_every_image_before_training(small, tmp_path, capsys):
    root, run = make_voc(tmp_path, 20, 20), tmp_path / "run"
    words = [*flags(small, epochs=1, **{"data-dir": tmp_path}), "--check-data", "--run", str(run)]
    (root / "JPEGImages" / "000113.jpg").write_text("no image")  # of the test images
    assert train.main(words) == 2 and "000113.jpg" in sentence(capsys) and not run.exists()
    shutil.copy(root / "JPEGImages" / "000001.jpg", root / "JPEGImages" / "000113.jpg")
    assert train.main(words) == 0
    assert "40 image files can be read" in capsys.readouterr().out


def test_kept_streams_need_room(small, tmp_path, capsys, monkeypatch):
    usage = train.shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(train.shutil, "disk_usage", lambda folder: usage)
    assert train.main([*flags(small, **{"cache-views": 1}), "--run", str(tmp_path / "run")]) == 1
    told = sentence(capsys)
    assert "--cache-views 0" in told and "0 MB are free" in told


def test_single_label_end_to_end(small, tmp_path, capsys):
    run = tmp_path / "run"
    assert train.main([*flags(small, "cifar100"), "--run", str(run)]) == 0
    results = json.loads((run / "results.json").read_text())
    assert len(results["after_task"]) == 3 and 0 <= results["accuracy"] <= 100
    logits = load_file(run / "logits.safetensors")["logits"]
    tasks = data.make_tasks(data.load_cifar100(small), "3-tasks")
    right = logits.argmax(1) == tasks[-1].test.labels.int().argmax(1)
    assert results["accuracy"] == pytest.approx(100 * float(right.double().mean()))
    first = results["after_task"][0]
    assert first["classes"] == 2 and first["test_images"] == 50 and "mAP" not in first
    assert train.main(["--eval", str(run)]) == 0
    assert "accuracy" in (run / "report.md").read_text()


@pytest.mark.parametrize("ablation", list(train.ABLATIONS))
def test_ablations_run_and_score_again(small, tmp_path, ablation, capsys):
    run = tmp_path / "run"
    more = {"selectors": None, "merged-tokens": 12} if ablation == "selectors" else {}
    more |= {"cache-views": 1} if ablation == "pathways" else {}
    assert train.main([*flags(small, ablate=ablation, **more), "--run", str(run)]) == 0
    _, _, model = train.open_run(run, {"where": torch.device("cpu")})
    for name, value in train.ABLATIONS[ablation].items():
        assert getattr(model.config, name) == value
    assert model.config.merged_tokens == more.get("merged-tokens", 30)
    assert train.main(["--eval", str(run)]) == 0
    assert "the same digits" in capsys.readouterr().out
    assert (run / "heatmaps.png").exists() == (ablation != "selectors")
    report = (run / "report.md").read_text()
    assert (
        "all were tested again" if ablation == "pathways" else "only the new lane ran"
    ) in report


@pytest.mark.usefixtures("undrawn")
def test_one_pathway_trains_the_keys_with_and_without_kept_streams(small, tmp_path):
    for views in (0, 1):
        run = tmp_path / str(views)
        more = {"ablate": "pathways", "epochs": 20, "cache-views": views, "protocol": "B0-C20"}
        assert train.main([*flags(small, **more), "--run", str(run)]) == 0
        _, _, model = train.open_run(run, {"where": torch.device("cpu")})
        images = torch.rand(4, 3, 64, 64)
        _, cls = model.stream(images)
        assert model.key_loss(cls, 0) < -0.3  # keys start at random: a cosine near 0


@pytest.mark.usefixtures("undrawn")
def test_fresh_start_bf16_and_other_settings_reach_the_training(voc_run, small, tmp_path):
    before = numbers(voc_run)
    for number, more in enumerate(
        ({"no-warm-start": True}, {"precision": "bf16"}, {"no-flip": True})
    ):
        run = tmp_path / str(number)
        assert train.main([*flags(small, **more), "--run", str(run)]) == 0
        after = numbers(run)
        assert after["lane-02.safetensors"] != before["lane-02.safetensors"]
        cold = "no-warm-start" in more  # it matters from the second lane on
        assert (after["lane-01.safetensors"] == before["lane-01.safetensors"]) == cold


@pytest.mark.usefixtures("undrawn")
def test_compiled_training_agrees(small, tmp_path, monkeypatch):
    compiled = []

    def compile_quickly(function):  # the same capture, without C++ being built
        compiled.append(function)
        return whole(function, backend="eager")

    whole = torch.compile
    monkeypatch.setattr(torch, "compile", compile_quickly)
    for views in (0, 1):
        lanes = []
        for more in ({}, {"compile": True}):
            run = tmp_path / f"{views}{len(more)}"
            words = flags(small, epochs=1, lr=0.1, **{"cache-views": views, **more})
            assert train.main([*words, "--run", str(run)]) == 0
            lanes.append(load_file(run / "lane-02.safetensors"))
        for name, p in lanes[0].items():
            assert (p - lanes[1][name]).abs().max() < 1e-3
    assert compiled == [train.lane_logits] * 4  # two lanes, twice


def test_glyphs_end_to_end_on_a_few_scenes(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data, "GLYPH_TRAIN", 120)
    monkeypatch.setattr(data, "GLYPH_TEST", 80)
    monkeypatch.chdir(tmp_path)
    words = ["--weights", str(small / "vit.safetensors"), "--epochs", "1", "--data-dir", str(small)]
    assert train.main(words) == 0
    run = tmp_path / "runs" / "glyphs-B0-C4"
    assert "frozen stream kept in" in capsys.readouterr().out and len(numbers(run)) == 8
    # A scene is taken whole: neither resized nor cut.
    o, _, model = train.open_run(run, {"where": torch.device("cpu")})
    _, tasks = train.load_tasks(o)
    pixels = tasks[0].test.images[0]
    view = train.make_views(o, model.backbone)[1](pixels)
    assert torch.allclose(view, (pixels / 255 - 0.5) / 0.25, atol=1e-6)
    assert (train.undo_normalize(view, o, model.backbone) - pixels / 255).abs().max() < 1e-6


def test_what_the_readout_sees_has_the_length_that_the_model_says(voc_run, monkeypatch):
    o, _, model = train.open_run(voc_run, {"where": torch.device("cpu")})
    test = train.TestImages(train.load_tasks(o)[1][-1].test, model, o)
    assert train.test_features(model, test).shape == (20, len(model.no_statistics(1).gram))
    sums = multilane.Statistics(torch.zeros(5, 5), torch.zeros(5, 1))
    monkeypatch.setattr(MultiLane, "no_statistics", lambda model, classes: sums)
    monkeypatch.setattr(train, "readout_features", lambda vit, g, cls: cls[:, :5])
    assert train.test_features(model, test).shape == (20, 5)


@pytest.mark.parametrize("views", (0, 1, 2))
@pytest.mark.usefixtures("undrawn")
def test_a_readout_is_scored_resumed_and_asked(
    voc_run, small, tmp_path, capsys, monkeypatch, views
):
    words = flags(small, readout=True, **{"cache-views": views})
    assert train.main([*words, "--run", str(tmp_path / "a")]) == 0
    assert "without the readout: mAP" in capsys.readouterr().out
    results = numbers(tmp_path / "a")["results"]
    plain = tmp_path / "plain" if views else voc_run
    if views:
        assert train.main([*flags(small, **{"cache-views": views}), "--run", str(plain)]) == 0
    without = numbers(plain)["results"]  # the lanes are those of a run without
    assert results["mAP"] != without["mAP"]
    assert results["without_readout"]["mAP"] == without["mAP"]
    assert results["without_readout"]["average_mAP"] == without["average_mAP"]
    kept, keep = [], train.keep_training
    monkeypatch.setattr(
        train, "keep_training", lambda *args: kept.append(args[1].index) or keep(*args)
    )
    for writes in (5, 12):  # after the last epoch of the first and of the second task
        run = tmp_path / f"stopped {writes}"
        with monkeypatch.context() as patch:
            stop_after_writes(patch, writes, KeyboardInterrupt())
            assert train.main([*words, "--run", str(run)]) == 130
        kept.clear()
        assert train.main(["--resume", "--run", str(run)]) == 0
        assert kept == ([1] if writes == 5 and views else [])  # not for the readout alone
        assert numbers(run) == numbers(tmp_path / "a")
    capsys.readouterr()
    assert train.main(["--eval", str(tmp_path / "a")]) == 0
    assert "the same digits" in capsys.readouterr().out
    o, _, model = train.open_run(tmp_path / "a", {"where": torch.device("cpu")})
    _, tasks = train.load_tasks(o)
    n = sum(int(task.train.labels.any(1).sum()) for task in tasks)
    assert sum(float(lane.statistics.gram[-1, -1]) for lane in model.lanes) == n
    image = tasks[0].test.images[0]
    assert train.main(["--predict", str(image), "--run", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    view = train.make_views(o, model.backbone)[1](data.read_image(image, "test"))[None]
    with torch.no_grad():
        highest = model(view).sigmoid().max()
    assert f"  {highest:.3f} " in said


def test_weights_from_pth_equal_those_from_safetensors(small):
    a = train.build_backbone("test_vit", pretrained=False)
    save_file(a.state_dict(), small / "test.safetensors")
    torch.save({"model": {**a.state_dict(), "head.bias": torch.zeros(2)}}, small / "test.pth")
    for name in ("test.safetensors", "test.pth"):
        b = train.load_vit("test_vit", small / name)
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# ---------------------------------------------------------------------------------------------
# Training: nothing is lost

# Imports once, and forks a training for every kill: a process start would cost seconds each. It
# computes nothing itself, so that PyTorch's threads begin in the children.
KILLER = """
import json, os, random, signal, sys, time
sys.path.insert(0, {here!r})
import train
words, root = {words!r}, {root!r}
fsync, replace, writes = os.fsync, os.replace, 0
def fork(run, stop=0):
    def count(handle=None):
        global writes
        writes += 1
        if writes == stop:
            if handle is not None:
                os.ftruncate(handle, os.fstat(handle).st_size // 2)  # half written
            os.kill(os.getpid(), signal.SIGKILL)
    if child := os.fork():
        return child
    os.fsync = lambda handle: (count(handle), fsync(handle))
    os.replace = lambda *names: (count(), replace(*names))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        os._exit(train.main([*words, "--resume", "--run", os.path.join(root, str(run))]))
    finally:
        os._exit(99)
def end(child, moment=None):
    deadline = time.monotonic() + (1e9 if moment is None else moment)
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, 0 if moment is None else os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
started = time.monotonic()
assert end(fork("whole")) == 0
whole, chance, run, kills = time.monotonic() - started, random.Random(0), 0, 0
for stop in (1, 2, 5, 8, 7, 12):  # odd: half written, even: before it gets its name
    assert end(fork(run, stop)) == -signal.SIGKILL
    kills += 1
while kills < 20:
    code = end(fork(run), chance.uniform(0, whole))
    assert code in (0, -signal.SIGKILL), code
    kills, run = kills + (code != 0), run + (code == 0)  # done before it was killed: another run
first = fork(run + 1)
while not os.path.exists(os.path.join(root, str(run + 1), "config.json")):
    time.sleep(0.002)
os.kill(first, signal.SIGSTOP)  # at work in its folder, however long that takes
assert end(fork(run + 1)) == 1
os.kill(first, signal.SIGCONT)
assert end(first) == 0 and end(fork(run)) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_run_that_is_killed_twenty_times_resumes_to_the_same_bits(voc_run, small, tmp_path):
    """At chosen writes and at random moments; and a second training in the folder is refused."""
    script = KILLER.format(here=str(HERE), words=flags(small), root=str(tmp_path))
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=900
    )
    assert ran.returncode == 0, ran.stderr
    told = [line for line in ran.stderr.splitlines() if "error: " in line]
    assert len(told) == 1 and "another training is at work" in told[0]
    for run in tmp_path.iterdir():
        assert numbers(run) == numbers(voc_run), run
        assert not list(run.glob("*.tmp")) and (run / "report.md").exists()


@pytest.mark.usefixtures("undrawn")
def test_resume_needs_no_other_flag_and_remembers_the_settings(
    voc_run, small, tmp_path, capsys, monkeypatch
):
    run = tmp_path / "run"
    stop_after_writes(monkeypatch, 3, KeyboardInterrupt())
    assert train.main([*flags(small), "--run", str(run)]) == 130
    assert f"--resume --run {run}" in capsys.readouterr().out
    monkeypatch.undo()
    assert train.main(["--resume", "--run", str(run)]) == 0
    assert "resuming after 0 tasks and 1 epochs" in capsys.readouterr().out
    assert numbers(run) == numbers(voc_run)
    assert train.main(["--resume", "--run", str(run)]) == 0
    assert "finished already" in capsys.readouterr().out


def test_ctrl_c_ends_in_a_sentence(small, tmp_path):
    words = [*flags(small, epochs=1000), "--run", str(tmp_path / "run")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell may have started the tests with SIGINT ignored, which a child inherits.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen([sys.executable, str(HERE / "train.py"), *words], **pipes)
    while "epoch 1/" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err
    assert f"go on with: python train.py --resume --run {tmp_path / 'run'}" in out


def test_ctrl_c_before_a_run_has_begun_names_none_to_go_on_with(tmp_path, capsys, monkeypatch):
    def interrupted(o):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "build_model", interrupted)
    assert train.main(["--run", str(tmp_path / "run")]) == 130
    told = capsys.readouterr().out
    assert "nothing has been kept yet" in told and "--resume" not in told
    assert not (tmp_path / "run").exists()


def stop_after_writes(monkeypatch, count, error):
    written, write = [], data.write_whole

    def write_or_stop(path, content):
        if len(written) == count:
            raise error
        written.append(path)
        write(path, content)

    monkeypatch.setattr(train, "write_whole", write_or_stop)


@pytest.mark.usefixtures("undrawn")
def test_resuming_a_kept_stream_with_several_views_gives_the_same_bits(
    small, tmp_path, monkeypatch
):
    words = flags(small, **{"cache-views": 2, "epochs": 3})
    assert train.main([*words, "--run", str(tmp_path / "whole")]) == 0
    stop_after_writes(monkeypatch, 5, KeyboardInterrupt())
    assert train.main([*words, "--run", str(tmp_path / "cut")]) == 130
    monkeypatch.undo()
    assert train.main([*words, "--run", str(tmp_path / "cut"), "--resume"]) == 0
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


@pytest.mark.parametrize("writes", [0, 4, 8, 14])
@pytest.mark.usefixtures("undrawn")
def test_a_full_disk_is_a_sentence_and_the_run_can_go_on(
    voc_run, small, tmp_path, writes, capsys, monkeypatch
):
    run = tmp_path / "run"
    stop_after_writes(monkeypatch, writes, OSError(28, "No space left on device", "x"))
    assert train.main([*flags(small), "--run", str(run)]) == 1
    told = sentence(capsys)
    assert "No space left on device" in told and f"--resume --run {run}" in told
    monkeypatch.undo()
    assert train.main([*flags(small), "--run", str(run), "--resume"]) == 0
    assert numbers(run) == numbers(voc_run)


@pytest.mark.usefixtures("undrawn")
def test_a_nan_loss_is_a_sentence_and_finished_lanes_stay(
    voc_run, small, tmp_path, capsys, monkeypatch
):
    run, loss = tmp_path / "run", train.lane_loss

    def broken(run, model, lane, batch, o):
        return loss(run, model, lane, batch, o) * (math.nan if lane == 1 else 1)

    monkeypatch.setattr(train, "lane_loss", broken)
    assert train.main([*flags(small), "--run", str(run)]) == 1
    told = sentence(capsys)
    assert "loss of task 2 is nan after epoch 1" in told and "--lr" in told
    lane = "lane-01.safetensors"
    assert bits(run / lane) == bits(voc_run / lane)
    monkeypatch.undo()
    assert train.main([*flags(small), "--run", str(run), "--resume"]) == 0
    assert numbers(run) == numbers(voc_run)


def test_two_trainings_are_kept_out_of_one_folder(small, tmp_path, capsys):
    with train.held(tmp_path / "run"):
        assert train.main([*flags(small), "--run", str(tmp_path / "run")]) == 1
    assert "another training is at work" in sentence(capsys)


def test_other_weights_or_data_are_not_resumed(small, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    stop_after_writes(monkeypatch, 4, KeyboardInterrupt())
    assert train.main([*flags(small, "cifar100"), "--run", str(run)]) == 130
    monkeypatch.undo()
    torch.manual_seed(1)
    vit = data.build_glyph_vit(None)
    save_file({n: p.contiguous() for n, p in vit.state_dict().items()}, tmp_path / "w.safetensors")
    make_cifar(tmp_path / "other", 8, ("wolf", "apple", "bear", "crab", "dog", "eel"))
    capsys.readouterr()
    for name, value, reason in (
        ("--weights", tmp_path / "w.safetensors", "other backbone weights"),
        ("--data-dir", tmp_path / "other", "other data"),
    ):
        assert train.main(["--resume", "--run", str(run), name, str(value)]) == 2
        assert reason in sentence(capsys)


# ---------------------------------------------------------------------------------------------
# Training: several processes


def run_many(count, words):
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(count), str(HERE / "train.py"), *words],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("dataset, views, readout", [("voc", 1, 1), ("cifar100", 2, None)])
@pytest.mark.usefixtures("undrawn")
def test_two_processes_agree_with_one(
    small, tmp_path, dataset, views, readout, capsys, monkeypatch
):
    """15 images in batches of 7: a tail of one, of which a process has none; 150 tests in 64s."""
    words = flags(small, dataset, batch=7, lr=0.05, readout=readout, **{"cache-views": views})
    run_many(2, [*words, "--run-dir", str(tmp_path / "two")])
    assert train.main([*words, "--run", str(tmp_path / "one")]) == 0
    # A run that one process began is resumed by two.
    stop_after_writes(monkeypatch, 10, KeyboardInterrupt())
    assert train.main([*words, "--run", str(tmp_path / "both")]) == 130
    monkeypatch.undo()
    assert "resuming after 1 tasks" in run_many(
        2, ["--resume", "--run-dir", str(tmp_path / "both")]
    )
    one = numbers(tmp_path / "one")
    for other in ("two", "both"):
        for a, b in zip(one["metrics"], numbers(tmp_path / other)["metrics"], strict=True):
            assert a.keys() == b.keys()
            assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-4)
        for path in sorted((tmp_path / "one").glob("lane-*")):
            lane = load_file(tmp_path / other / path.name)
            for key, p in load_file(path).items():
                assert (p - lane[key]).abs().max() < 1e-3 * max(1, p.abs().max())
    # The same lanes score the same digits, on one process or on two.
    capsys.readouterr()
    assert train.main(["--eval", str(tmp_path / "two")]) == 0
    assert "the same digits" in capsys.readouterr().out
    if dataset == "cifar100":
        assert "the same digits" in run_many(2, ["--eval", str(tmp_path / "one")])


# ---------------------------------------------------------------------------------------------
# Training: the command line


def test_help_shows_the_defaults_of_the_data_set(capsys):
    for dataset, words in (
        (
            "voc",
            [
                "augreg_in21k_ft_in1k",
                "--epochs EPOCHS for each task ",
                "(default: 30)",
                "B0-C4",
                "(default: 256)",
            ],
        ),
        ("coco", ["(default: 0.03)", "(default: 128)", "B0-C10"]),
        ("imagenet-r", ["(default: 12)", "(default: 1024)", "10-tasks"]),
        ("glyphs", ["glyph_vit", "(default: 64)"]),
        ("own", ["augreg_in21k_ft_in1k", "(default: 10)", "of own data, say which"]),
    ):
        with pytest.raises(SystemExit) as end:
            train.main(["--dataset", dataset, "--help"])
        told = " ".join(capsys.readouterr().out.split())
        assert end.value.code == 0 and "forgetting" in told
        for word in words:
            assert word in told


def test_every_preset_field_has_a_flag_and_the_published_values():
    known = {action.dest for action in train.make_parser("voc")._actions}
    for preset in train.PRESETS.values():
        assert preset.keys() <= known and preset.keys() == train.PRESETS["voc"].keys()
    assert train.COMMON.keys() <= known
    voc, coco = train.PRESETS["voc"], train.PRESETS["coco"]
    assert (voc["epochs"], voc["batch"], voc["lr"], voc["selectors"]) == (30, 256, 0.05, 10)
    assert (coco["epochs"], coco["batch"], coco["lr"], coco["prompts"]) == (30, 128, 0.03, 20)
    assert train.PRESETS.keys() == data.PROTOCOLS.keys()


def test_the_papers_line_is_drawn_only_in_the_papers_setting():
    assert train.is_published(options(dataset="voc", protocol="B10-C2", seed=3), [])
    assert not train.is_published(options(dataset="voc"), ["VOC2007: 20 training images are here"])
    assert not train.is_published(options(dataset="glyphs"), [])
    for other in ({"epochs": 29}, {"ablate": "norm"}, {"backbone": "x"}, {"weights": Path("x")}):
        assert not train.is_published(options(dataset="voc", **other), [])


def test_dry_run_goes_through_everything_and_leaves_nothing(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.tempfile, "tempdir", str(tmp_path))
    words = flags(small, epochs=None)
    assert train.main([*words, "--dry-run"]) == 0
    told = capsys.readouterr().out
    for word in ("scores mean nothing", "after task 2", "report:", "the same digits", ".png"):
        assert word in told
    assert not list(tmp_path.iterdir())


def test_an_unreadable_image_is_one_sentence_with_workers_too(small, tmp_path, capsys):
    root = make_voc(tmp_path, 20, 20)
    (root / "JPEGImages" / "000003.jpg").write_text("no image")
    for workers in (0, 2):
        run = tmp_path / str(workers)
        words = flags(small, workers=workers, **{"data-dir": tmp_path})
        assert train.main([*words, "--run", str(run)]) == 2
        told = sentence(capsys)
        assert told.startswith("train.py: error: ") and "000003.jpg (task 1, training)" in told


# ---------------------------------------------------------------------------------------------
# Bad inputs: one sentence, an exit code, and nothing is touched


@pytest.fixture(scope="module")
def cut_run(small):
    """A run that was stopped in the second epoch of its second task."""
    run = small / "runs" / "cut"
    with pytest.MonkeyPatch.context() as patch:
        stop_after_writes(patch, 10, KeyboardInterrupt())
        assert train.main([*flags(small), "--run", str(run)]) == 130
    assert (train.read_state(run).task, train.read_state(run).epoch) == (1, 1)
    return run


def put(name, content=b""):
    """A fault: this file has this content. Faults are done in the folder of the test."""
    return lambda: Path(name).write_bytes(content)


def halve(name):
    return lambda: Path(name).write_bytes(Path(name).read_bytes()[: Path(name).stat().st_size // 2])


def cut_in(name, text):
    """A fault: the file ends before the last sign of text. Half of a file may end anywhere: how
    long it is depends on the folder of the tests, on how they were started, and on the clock."""
    return lambda: Path(name).write_text(Path(name).read_text().split(text)[0] + text[:-1])


def lose(name):
    return lambda: Path(name).unlink()


def overwrite(name, other):
    return lambda: shutil.copy(other, name)


def swap(name, other):
    return lambda: (Path(name).rename("x"), Path(other).rename(name), Path("x").rename(other))


def setting(name, value):
    """A fault of run/config.json: this setting has this value; None: it is not there."""

    def edit():
        config = json.loads(Path("run/config.json").read_text())
        config["settings"][name] = value
        if value is None:
            del config["settings"][name]
        Path("run/config.json").write_text(json.dumps(config))

    return edit


def tensors(name, info=None, **shapes):
    """A fault: a safetensors file of zeros."""
    return lambda: save_file({n: torch.zeros(shape) for n, shape in shapes.items()}, name, info)


def state(**changes):
    """A fault of cut/state.safetensors: these fields are others, and its tensors zeros."""

    def edit():
        path = Path("cut/state.safetensors")
        with safe_open(path, framework="pt") as file:
            info = json.loads(file.metadata()["state"]) | changes
        path.write_bytes(save({"lane.selectors": torch.zeros(7)}, {"state": json.dumps(info)}))

    return edit


def huge_png():
    """A PNG of a few bytes that says it has 50,000 x 50,000 pixels."""

    def chunk(kind, content):
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


# What is typed, the exit code, a part of the sentence, and what was done to the files before.
# In the folder where it is typed are, if they are named: small/ (the fixture), run/ (a finished
# run), cut/ (a stopped one), own/ (own data), and file, which is empty.
BAD_INPUTS = [
    # Flags of train.py: unknown, of a wrong kind, out of range, that do nothing together.
    ("train.py --dataset cats", 2, "invalid choice: 'cats'"),
    ("train.py --protocol B-4", 2, "--protocol B-4 is none"),
    ("train.py --protocol B0-C3 --data-dir small", 2, "20 classes do not divide"),
    ("train.py --dataset voc --data-dir small --protocol B0-C7", 2, "do not divide"),
    ("train.py --epochs 0", 2, "0 is below 1"),
    ("train.py --epochs x", 2, "invalid whole_number value: 'x'"),
    ("train.py --epochs", 2, "expected one argument"),
    ("train.py --epoch 3", 2, "unrecognized arguments: --epoch 3"),
    ("train.py glyphs", 2, "unrecognized arguments: glyphs"),
    ("train.py --seed 99999999999999999999", 2, "99999999999999999999 is too large"),
    ("train.py --order-seed -1", 2, "-1 is below 0"),
    ("train.py --lr -1", 2, "-1 is not above 0"),
    ("train.py --lr nan", 2, "nan is not above 0"),
    ("train.py --lr inf", 2, "inf is not above 0"),
    ("train.py --threshold 2", 2, "2 is not above 0 and up to 1"),
    ("train.py --holdout 0.95", 2, "0.95 is not above 0 and up to 0.9"),
    ("train.py --frobnicate", 2, "--frobnicate"),
    ("train.py --ablate everything", 2, "invalid choice"),
    ("train.py --device warp", 2, "--device warp cannot be used"),
    ("train.py --device meta", 2, "--device meta cannot be used"),
    ("train.py --prompt-blocks 6", 2, "only 5 blocks"),
    ("train.py --cache-dir . --cache-views 0", 2, "--cache-dir does nothing without --cache"),
    ("train.py --cache-dir file", 2, "--cache-dir file: there is no such folder"),
    ("train.py --crop-scale 0.2", 2, "--crop-scale does nothing with --cache-views 1"),
    ("train.py --ablate selectors --selectors 3", 2, "--selectors does nothing"),
    ("train.py --readout --ablate pathways", 2, "--readout with --ablate pathways: the readout is"),
    ("train.py --merged-tokens 3", 2, "--merged-tokens does nothing without --ablate selectors"),
    ("train.py --prompts 0 --prompt-blocks 2", 2, "--prompt-blocks does nothing with --prompts 0"),
    ("train.py --prompt-blocks 0 --prompts 3", 2, "--prompts does nothing"),
    ("train.py --dataset cifar100 --threshold 0.5", 2, "--threshold does nothing with cifar100"),
    ("train.py --dry-run --resume", 2, "--dry-run does not go with --resume"),
    ("train.py --dry-run --run x", 2, "--run does nothing with --dry-run"),
    ("train.py --eval x --epochs 3", 2, "--epochs does nothing with --eval"),
    ("train.py --predict a.jpg --run run --seed 3", 2, "--seed does nothing with --predict"),
    ("train.py --predict a.jpg", 2, "--predict needs --run"),
    ("train.py --method cats", 2, "invalid choice: 'cats'"),
    ("train.py --method l2p --selectors 3", 2, "--selectors does nothing with --method l2p"),
    ("train.py --method dualprompt --prompts 3", 2, "--prompts does nothing with --method dualp"),
    ("train.py --method coda-p --prompt-blocks 3", 2, "--prompt-blocks does nothing with --method"),
    ("train.py --method naive --selectors 3", 2, "--selectors does nothing with --method naive"),
    ("train.py --method probe --prompts 3", 2, "--prompts does nothing with --method probe"),
    ("train.py --method l2p --no-warm-start", 2, "--warm-start does nothing with --method l2p"),
    ("train.py --method finetune --ablate norm", 2, "--ablate does nothing with --method fine"),
    ("train.py --method joint --protocol B0-C4", 2, "--protocol does nothing with --method joint"),
    ("train.py --method naive --cache-dir .", 2, "--cache-dir does nothing with --method naive"),
    ("train.py --method coda-p --cache-views 2", 2, "--cache-views 2 with --method coda-p"),
    # Backbones and weights.
    ("train.py --backbone no_such_vit", 2, "no_such_vit"),
    ("train.py --backbone no_such_vit", 2, "check its name with timm.list_models"),
    ("train.py --backbone resnet18 --weights empty.pth", 2, "resnet18",
     lambda: torch.save({}, "empty.pth")),
    ("train.py --weights nowhere.pth", 2, "--weights nowhere.pth: there is no such file"),
    ("train.py --weights small", 2, "--weights small: there is no such file"),
    ("train.py --weights file", 2, "--weights file is not for glyph_vit ("),
    ("train.py --weights w.safetensors", 2, "--weights w.safetensors is not for glyph_vit (",
     put("w.safetensors")),
    ("train.py --weights w.safetensors", 2, "w.safetensors is not for glyph_vit (",
     lambda: (overwrite("w.safetensors", "small/vit.safetensors")(), halve("w.safetensors")())),
    ("train.py --weights w.safetensors", 2, "w.safetensors is not for glyph_vit (Error(s)",
     tensors("w.safetensors", cls_token=(1, 1, 64))),
    ("train.py --weights w.safetensors", 2, "w.safetensors is not for glyph_vit: it lacks",
     tensors("w.safetensors", cls_token=(1, 1, 128))),
    ("train.py --weights small/vit.pth --backbone test_vit", 2, "is not for test_vit (Error"),
    ("train.py --weights small/cifar-100-python/meta", 2, "is not for glyph_vit: it is no checkpoint"),
    ("train.py --weights bomb.pth", 2, "bomb.pth is not for glyph_vit: it is no checkpoint",
     lambda: torch.save({"a": Bomb()}, "bomb.pth")),
    ("train.py --weights bomb.pth", 2, "bomb.pth is not for glyph_vit: it is no checkpoint",
     lambda: put("bomb.pth", pickle.dumps(Bomb()))()),
    # Folders of runs.
    ("train.py VOC --run file", 2, "file is no run's folder, but a file: give another --run"),
    ("train.py VOC --run file/run", 1, "Not a directory"),
    ("train.py VOC --run small", 2, "small is no run's folder, it holds "),
    ("train.py VOC --run run", 2, "run is a run already: score it with --eval"),
    ("train.py VOC --run cut", 2, "cut is a run already: go on with --resume"),
    ("train.py --resume --run nowhere", 2, "nowhere holds no run to go on with: check --run"),
    ("train.py VOC --run run --epochs 3 --selectors 4", 2,
     "--epochs (there 2, here 3), --selectors (there 3, here 4)"),
    ("train.py VOC --run run --resume --epochs 3", 2, "differs in --epochs (there 2, here 3)"),
    ("train.py --dataset cifar100 --run run --resume", 2, "--dataset (there voc, here cifar100)"),
    ("train.py --eval nowhere", 2, "nowhere is no run's folder: it has no config.json"),
    ("train.py --eval file", 2, "file is no run's folder"),
    ("train.py --eval cut", 2, "cut is not finished: train with --resume --run cut"),
    ("train.py --eval run --weights other.safetensors", 2, "was made over other backbone weights",
     lambda: save_file(data.build_glyph_vit(None).state_dict(), "other.safetensors")),
    ("train.py VOC --start-from file --run x", 2, "--start-from file is no run's folder"),
    # config.json: spoiled, or of another version.
    ("train.py --eval run", 1, "config.json is spoiled (Expecting value", put("run/config.json")),
    ("train.py --eval run", 1, "config.json is spoiled (Unterminated",
     cut_in("run/config.json", '"settings"')),
    ("train.py --eval run", 1, "config.json is spoiled ('utf-8'",
     put("run/config.json", b"\xff\xfe{}")),
    ("train.py --eval run", 1, "config.json is spoiled (list", put("run/config.json", b"[1, 2]")),
    ("train.py --eval run", 1, "config.json is spoiled (it lacks '", put("run/config.json", b"{}")),
    ("train.py --eval run", 1, "config.json is spoiled (maximum recursion",
     put("run/config.json", b"[" * 100_000)),
    ("train.py --resume --run run", 1, "(it lacks 'epochs'): restore it", setting("epochs", None)),
    ("train.py --resume --run run", 1, "(it lacks 'dataset')", setting("dataset", None)),
    ("train.py --resume --run run", 1, "invalid choice: 'cats'", setting("dataset", "cats")),
    ("train.py --resume --run run", 1, "(unrecognized arguments: --lanes=3)", setting("lanes", 3)),
    ("train.py --predict a.jpg --run run", 1, "0 is below 1", setting("selectors", 0)),
    ("train.py --predict a.jpg --run run", 1, "(--epochs is '2')", setting("epochs", "2")),
    ("train.py --predict a.jpg --run run", 1, "spoiled (argument --flip", setting("flip", 1)),
    ("train.py --eval run", 1, "config.json is spoiled ([Errno 21]",
     lambda: (lose("run/config.json")(), Path("run/config.json").mkdir())),
    # state.safetensors
    ("train.py --eval run", 1, "state.safetensors is spoiled (", put("run/state.safetensors")),
    ("train.py --resume --run cut", 1, "state.safetensors is spoiled (",
     halve("cut/state.safetensors")),
    ("train.py --resume --run cut", 1, "state.safetensors is spoiled (",
     overwrite("cut/state.safetensors", "cut/lane-01.safetensors")),
    ("train.py --resume --run cut", 1, "state.safetensors is spoiled (",
     tensors("cut/state.safetensors", {"state": "{"}, x=3)),
    ("train.py --resume --run cut", 1, "unexpected keyword argument 'lanes'", state(lanes=3)),
    ("train.py --resume --run cut", 1, "contradict", state(task=2)),
    ("train.py --resume --run cut", 1, "state.safetensors is spoiled (",
     state(task="1", records=5)),
    ("train.py --resume --run cut", 1, "state.safetensors is spoiled (it is of a longer run)",
     state(epoch=3)),
    ("train.py --resume --run cut", 1, "state.safetensors is spoiled (it is of a longer run)",
     state(task=3, records=[{}] * 3)),
    ("train.py --resume --run cut", 1, "state.safetensors is spoiled (Error(s) in loading",
     state()),
    # Kept logits, lanes, results.
    ("train.py --resume --run cut", 1, "logits.safetensors is spoiled (No such file",
     lose("cut/logits.safetensors")),
    ("train.py --resume --run cut", 1, "logits.safetensors is spoiled (",
     halve("cut/logits.safetensors")),
    ("train.py --resume --run cut", 1, "its logits are [20, 9] where [20, 10] are needed",
     tensors("cut/logits.safetensors", logits=(20, 9))),
    ("train.py --resume --run cut", 1, "its logits are [200]",
     tensors("cut/logits.safetensors", logits=200)),
    ("train.py --resume --run cut", 1, "logits.safetensors is spoiled (it lacks 'logits')",
     tensors("cut/logits.safetensors", x=20)),
    ("train.py --resume --run cut", 1, "lane-01.safetensors cannot be read",
     lose("cut/lane-01.safetensors")),
    ("train.py --resume --run cut", 1, "lane-01.safetensors cannot be read",
     halve("cut/lane-01.safetensors")),
    ("train.py --resume --run cut", 1, "a lane over other weights",
     lambda: rewrite("cut/lane-01.safetensors", edit_info=lambda i: i.update(fingerprint="0"))),
    ("train.py --resume --run cut", 1, "lane-01.safetensors is spoiled (it is for diningtable",
     overwrite("cut/lane-01.safetensors", "run/lane-02.safetensors")),
    ("train.py --eval run", 1, "lane-02.safetensors cannot be read",
     lose("run/lane-02.safetensors")),
    ("train.py --eval run", 1, "lane-01.safetensors is spoiled (it is for diningtable",
     swap("run/lane-01.safetensors", "run/lane-02.safetensors")),
    ("train.py --eval run", 2, "run is not finished", lose("run/results.json")),
    ("train.py --eval run", 1, "results.json is spoiled (Expecting",
     cut_in("run/results.json", '"after_task":')),
    ("train.py --eval run", 1, "results.json is spoiled (it lacks", put("run/results.json", b"{}")),
    ("train.py --eval run", 1, "results.json is spoiled (list", put("run/results.json", b"[]")),
    # Images.
    ("train.py --predict none.jpg --run run", 2, "none.jpg (--predict) cannot be read"),
    ("train.py --predict small --run run", 2, "small (--predict) cannot be read"),
    ("train.py --predict file --run run", 2, "file (--predict) cannot be read"),
    ("train.py --predict x.jpg --run run", 2, "x.jpg (--predict) cannot be read",
     put("x.jpg", b"words")),
    ("train.py --predict x.png --run run", 2, "x.png (--predict) cannot be read",
     put("x.png", huge_png())),
    ("train.py --predict small/vit.pth --run run", 2, "vit.pth (--predict) cannot be read"),
    ("data.py own OWN --check-data", 2, "train 3.png (task 1, training) cannot be read",
     halve("own/photos/train 3.png")),
    ("data.py own OWN --check-data", 2, "test 2.png (task 2, test) cannot be read",
     put("own/photos/test 2.png")),
    ("train.py --dataset own OWN --check-data --run x", 2, "test 2.png (task 2, test) cannot be",
     put("own/photos/test 2.png", huge_png())),
    # Lists; more of them in test_own_traps.
    ("data.py own OWN", 2, "train.csv, line 1, is not UTF-8",
     put("own/train.csv", "image,labels\n".encode("utf-16"))),
    ("data.py own OWN", 2, "train.csv, line 2, is not UTF-8",
     put("own/train.csv", b"image,labels\n\0,ant\n")),
    ("data.py own OWN", 2, "test.csv, line 3, is not UTF-8",
     put("own/test.csv", "image,labels\n\né.png,ant\n".encode("latin-1"))),
    ("data.py own OWN", 2, "it must be \"image,labels\"",
     put("own/train.csv", b"photos/train 1.png,ant\n")),
    ("data.py own OWN", 2, "names 'ant' again", put("own/classes.txt", b"ant\nbee\nant\n")),
    ("data.py own OWN", 2, "says 'dog', which is not in",
     put("own/classes.txt", b"ant\nbee\ncat\n")),
    ("data.py own --data-dir own", 2, "B0-C1, B0-C2 or B0-C4 would fit"),
    ("data.py own --data-dir file --protocol B0-C2", 2, "file holds neither train.csv nor"),
    # Flags of data.py.
    ("data.py", 2, "required: dataset"),
    ("data.py cats", 2, "invalid choice: 'cats'"),
    ("data.py glyphs --frobnicate", 2, "unrecognized arguments: --frobnicate"),
    ("data.py own OWN --holdout 1", 2, "1 is not above 0 and up to 0.9"),
    ("data.py own OWN --order-seed 99999999999999999999", 2, "is too large"),
    ("data.py own OWN --picture nowhere/x.png", 2, "--picture nowhere/x.png cannot be written"),
    ("data.py own OWN --picture own", 2, "--picture own cannot be written"),
    ("data.py own OWN --picture x.docx", 2, "--picture x.docx cannot be drawn"),
    ("data.py voc --data-dir small --protocol B0-C3", 2, "the step can be"),
    ("data.py voc --pretrain x", 2, "glyphs --pretrain"),
    ("data.py glyphs --pretrain nowhere/x", 2, "--pretrain nowhere/x cannot be written"),
    # compare.py
    ("compare.py --dataset cifar100", 2, "invalid choice: 'cifar100'"),
    ("compare.py --seeds x", 2, "invalid whole_number value: 'x'"),
    ("compare.py --seeds", 2, "expected at least one argument"),
    ("compare.py --finished --out away", 2, "away has no finished run of MULTI-LANE"),
    ("compare.py --with CODA '--lr 1'", 2, "the rows are MULTI-LANE, MULTI-LANE with readout, joint"),
    ("compare.py --with CODA-P \"--lr '1\"", 2, "No closing quotation"),
    ("compare.py -- --lr -1", 2, "-1 is not above 0"),
    ("compare.py -- --dry-run", 2, "--dry-run does not go with compare.py"),
    ("compare.py -- --run=there", 2, "--run does not go with compare.py"),
    ("compare.py --out file -- --data-dir small", 1, "Not a directory"),
    ("compare.py --finished --seeds 0 --out .", 1, "results.json is spoiled (",
     lambda: (Path("run").rename("multi-lane-seed0"), put("multi-lane-seed0/results.json")())),
    # bench.py
    ("bench.py --lanes 0", 2, "0 is below 1"),
    ("bench.py --only speed", 2, "invalid choice: 'speed'"),
    ("bench.py --precision fp8", 2, "invalid choice: 'fp8'"),
    ("bench.py --frobnicate", 2, "--frobnicate"),
    ("bench.py --device warp", 2, "--device warp cannot be used"),
    ("bench.py --device meta", 2, "--device meta cannot be used"),
    ("bench.py --backbone no_such_vit --out .", 2, "no_such_vit"),
    ("bench.py --backbone resnet18 --out .", 2, "cannot carry lanes"),
    ("bench.py --out file", 2, "--out file cannot be a folder"),
]  # fmt: skip


def everything(folder):
    """All that is in a folder, to the byte; links are not followed."""
    paths = folder.rglob("*")
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


@pytest.mark.parametrize("row", BAD_INPUTS, ids=lambda row: f"{row[0]}: {row[2]}")
def test_bad_inputs_get_one_sentence_and_touch_nothing(
    row, small, voc_run, cut_run, tmp_path, capsys, monkeypatch, recwarn
):
    (program, *words), code, reason, *faults = shlex.split(row[0]), *row[1:]
    shutil.copytree(voc_run, tmp_path / "run")
    shutil.copytree(cut_run, tmp_path / "cut")
    make_own(tmp_path / "own")
    (tmp_path / "small").symlink_to(small)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    monkeypatch.setattr(data, "GLYPH_TRAIN", 40)
    monkeypatch.setattr(data, "GLYPH_TEST", 40)
    short = {"VOC": flags(Path("small")), "OWN": ["--data-dir", "own", "--protocol", "B0-C2"]}
    words = [long for word in words for long in short.get(word, [word])]
    if program == "train.py" and not {"--eval", "--predict", "--resume"} & set(words):
        words += [] if "--weights" in words else ["--weights", "small/vit.safetensors"]
        words += [] if "--backbone" in words else ["--backbone", "glyph_vit"]
    torch.manual_seed(1)
    for fault in faults:
        fault()
    capsys.readouterr()
    before = everything(tmp_path)
    main = {"train": train, "data": data, "compare": compare, "bench": bench}[program[:-3]].main
    assert main(words) == code
    told = capsys.readouterr().err
    # What a comparison's run has to say, it says as train.py.
    names = f"({re.escape(program)}|train.py)" if program == "compare.py" else re.escape(program)
    assert re.fullmatch(rf"{names}: error: [^\n]+\n", told), told
    assert reason in told and not recwarn.list
    assert everything(tmp_path) == before


@pytest.mark.usefixtures("undrawn")
def test_what_a_killed_process_left_is_removed_and_not_read(voc_run, cut_run, tmp_path):
    shutil.copytree(cut_run, tmp_path / "run")
    for name in ("state.safetensors", "config.json", "lane-02.safetensors"):
        (tmp_path / "run" / f"{name}.123.tmp").write_bytes(b"half of it")
    assert train.main(["--resume", "--run", str(tmp_path / "run")]) == 0
    assert numbers(tmp_path / "run") == numbers(voc_run)
    assert not list((tmp_path / "run").glob("*.tmp"))


# ---------------------------------------------------------------------------------------------
# Baselines: what makes each method that method

METHODS = [name for name in baselines.METHODS if name != "joint"]  # which is multilane's model


def small_method(name, tasks=3, seed=0, **config):
    """A small ViT with the five blocks that the prompt methods need, and tasks of 4 classes."""
    config = LaneConfig(**{"selectors": 4, "prompts": 5, "prompt_blocks": 2, **config})
    model = baselines.METHODS[name].model(small_vit(seed, depth=5), config)
    torch.manual_seed(seed + 1)
    for t in range(tasks):
        model.add_lane([f"class {t}.{i}" for i in range(4)])
        randomize(model.lanes[t], 0.5)
    return model.eval()


def frozen_cls(model, images):
    with torch.no_grad():
        return model.backbone.forward_features(images)[:, 0]  # by timm


def by_hand(vit, images, prefixes):
    """[CLS] after the final norm, one image at a time; prefixes(image, block) [2,H,P,d] or None."""
    found = []
    for index, image in enumerate(images):
        x = multilane.embed(vit, image[None])
        for number, block in enumerate(vit.blocks):
            n = block.norm1(x)
            x = x + multilane.prefix_attention(block.attn, n, prefixes(index, number))
            x = x + block.mlp(block.norm2(x))
        found.append(vit.norm(x[:, 0]))
    return torch.cat(found)


def all_heads(model, c):
    return torch.cat([F.linear(c, t.head.weight, t.head.bias) for t in model.lanes], 1)


def test_probe_is_heads_on_the_plain_cls():
    model, images = small_method("probe"), pictures()
    assert_close(model(images), all_heads(model, frozen_cls(model, images)))
    assert [n for n, _ in model.lanes[0].named_parameters()] == ["head.weight", "head.bias"]


def test_naive_is_prefix_tuning_of_the_plain_vit():
    images = pictures()
    model = small_method("naive", prompts=0, prompt_blocks=0)
    assert_close(model(images), all_heads(model, F.normalize(frozen_cls(model, images), dim=-1)))
    model = small_method("naive")
    for t, lane in enumerate(model.lanes):
        c = by_hand(model.backbone, images, lambda _, block, lane=lane: lane.block_prompts(block))
        mine = F.linear(F.normalize(c, dim=-1), lane.head.weight, lane.head.bias)
        assert_close(model(images, lane=t), mine)
        assert_close(model(images)[:, 4 * t : 4 * t + 4], mine)
    assert all(lane.selectors.numel() == 0 for lane in model.lanes)


def test_l2p_puts_the_nearest_prompts_before_the_tokens():
    model, images = small_method("l2p"), pictures()
    vit, shared, lengths = model.backbone, model.lanes[0], []
    query = frozen_cls(model, images)
    with torch.no_grad():  # keys for what tells the images apart, and two that nobody likes
        shared.keys[:] = torch.randn(10, 3) @ (query - query.mean(0))
        shared.keys[8:] = -query.mean(0)
    likeness = F.normalize(query, dim=1) @ F.normalize(shared.keys, dim=1).T
    best = likeness.argsort(1, descending=True)[:, :5]  # [B,5]
    chosen = sorted(set(best.flatten().tolist()))
    assert 5 < len(chosen) < 10  # images choose differently, and somebody is left out
    x = torch.cat([shared.pool[best].flatten(1, 2), multilane.embed(vit, images)], 1)
    c = vit.norm(vit.blocks(x))[:, : 5 * 5].mean(1)
    hook = vit.blocks[0].norm1.register_forward_hook(lambda _, x, y: lengths.append(y.shape[1]))
    out = model(images)
    hook.remove()
    assert lengths == [17, 17 + 25]  # the query's pass, and the prompted one
    assert_close(out, all_heads(model, c))
    # Only what was chosen learns from the labels, and keys learn from the key loss alone.
    logits, query = model(images, lane=1, return_cls=True)
    logits.sigmoid().sum().backward()
    got = shared.pool.grad.abs().amax((1, 2)) > 0
    assert got.nonzero()[:, 0].tolist() == chosen and shared.keys.grad is None
    loss = model.key_loss(query, 1)
    assert loss.item() == pytest.approx(-0.5 * likeness.gather(1, best).sum(1).mean().item(), 1e-5)
    loss.backward()
    assert (shared.keys.grad.abs().amax(1) > 0).nonzero()[:, 0].tolist() == chosen


def dual_prompt():
    """Three tasks and four images: image i is task i's by its key, the last one is task 1's."""
    model, images = small_method("dualprompt"), pictures(4)
    with torch.no_grad():
        for lane, query in zip(model.lanes, frozen_cls(model, images[[0, 1, 2]]), strict=True):
            lane.key.copy_(query)
        images[3] = images[1]
    return model, images, [0, 1, 2, 1]


def test_dualprompt_has_a_general_prompt_and_the_expert_of_the_nearest_key():
    model, images, owner = dual_prompt()

    def prefixes(experts):
        def find(index, block):
            lane = model.lanes[experts[index]]
            rows = lane.general[block] if block < 2 else lane.expert[block - 2]  # [2,P,H,d]
            assert rows.shape[:2] == (2, 3 if block < 2 else 10)
            return rows.transpose(1, 2)

        return by_hand(model.backbone, images, find)

    assert_close(model(images), all_heads(model, prefixes(owner)))
    for t, lane in enumerate(model.lanes):  # in training it is the task's own, whatever the keys
        c = prefixes([t] * 4)
        assert_close(model(images, lane=t), F.linear(c, lane.head.weight, lane.head.bias))


def test_dualprompt_other_experts_do_not_matter():
    model, images, owner = dual_prompt()
    before = model(images).detach()
    for t, lane in enumerate(model.lanes):
        with torch.no_grad():
            lane.expert.add_(1)
            after = model(images)
            lane.expert.sub_(1)
        changed = (after - before).abs().amax(1) > 1e-3
        assert changed.tolist() == [t == o for o in owner]
    with torch.no_grad():
        model.lanes[0].general.add_(1)
    assert ((model(images) - before).abs().amax(1) > 1e-3).all()
    # Key t is pulled to the queries of task t's images, and no other is.
    _, query = model(images, lane=1, return_cls=True)
    loss = model.key_loss(query, 1)
    cosines = F.normalize(frozen_cls(model, images), dim=1) @ F.normalize(model.lanes[1].key, dim=0)
    assert loss.item() == pytest.approx(-cosines.mean().item(), 1e-5)
    loss.backward()
    assert [lane.key.grad is not None for lane in model.lanes] == [False, True, False]


def test_coda_prompt_sums_all_components_by_their_weights():
    model, images = small_method("coda-p"), pictures()
    query = frozen_cls(model, images)

    def prefix(index, block, tasks):
        total = torch.zeros(2, 4, 3, 16)  # length 8: 4 for the keys, 4 for the values
        for lane in list(model.lanes)[:tasks]:
            for m in range(10):
                a, k = lane.attention[block, m], lane.keys[block, m]
                alpha = F.cosine_similarity(query[index] * a, k, dim=0)
                total = total + alpha * lane.prompts[block, m]
        return total.transpose(1, 2)

    c = by_hand(model.backbone, images, lambda index, block: prefix(index, block, 3))
    assert_close(model(images), all_heads(model, c))
    # In its training a task sees its own components and the older ones, not the later ones.
    c = by_hand(model.backbone, images, lambda index, block: prefix(index, block, 2))
    head = model.lanes[1].head
    assert_close(model(images, lane=1), F.linear(c, head.weight, head.bias))


def test_prompts_for_blocks_that_are_not_there_are_refused():
    for name in ("dualprompt", "coda-p"):
        model = baselines.METHODS[name].model(small_vit(depth=4), LaneConfig(prompt_blocks=2))
        model.add_lane(["a"])
        with pytest.raises(ValueError, match="5 blocks: the ViT has only 4"):
            model(pictures())


def test_coda_prompt_trains_only_a_tasks_own_components():
    model, images = small_method("coda-p"), pictures()
    logits, query = model(images, lane=2, return_cls=True)
    (logits.sigmoid().sum() + model.key_loss(query, 2)).backward()
    for t, lane in enumerate(model.lanes):
        for p in lane.parameters():
            assert (p.grad is not None and p.grad.abs().max() > 0) == (t == 2)


def test_coda_prompt_components_are_kept_orthogonal():
    rows = nn.init.orthogonal_(torch.empty(6, 20))
    assert baselines.orthogonality(rows) < 1e-12
    rows[1] = rows[0]  # two entries of 36 are 1 in place of 0
    assert baselines.orthogonality(rows).item() == pytest.approx(2 / 36, 1e-4)
    model = baselines.CodaPrompt(small_vit(depth=5))
    model.add_lane(["a"])
    assert model.key_loss(None, 0) < 1e-10
    model.add_lane(["b"])
    with torch.no_grad():  # a new task that repeats the old one is what the penalty sees
        for p, old in zip(model.lanes[1].parameters(), model.lanes[0].parameters(), strict=True):
            p.copy_(old)
    # In each of P, K and A, 2 * 10 of 20 * 20 entries are 1 in place of 0.
    assert model.key_loss(None, 1).item() == pytest.approx(0.1 * 3 * 20 / 400, 1e-4)
    model.key_loss(None, 1).backward()
    assert model.lanes[0].keys.grad is None and model.lanes[1].keys.grad.abs().max() > 0


def test_baselines_cost_what_the_paper_says():
    """In passes of a plain ViT-B/16: T for naive pathways; two, by a query, for CODA-P."""

    vit = timm.create_model("vit_base_patch16_224", num_classes=0).to("meta")

    def passes(name):
        with torch.device("meta"):
            model = baselines.METHODS[name].model(vit, LaneConfig(10, 20, 5))
            for t in range(10):
                model.add_lane([f"{t}.{i}" for i in range(10)])
            images = torch.empty(1, 3, 224, 224)
            return count_macs(lambda: model(images)) / count_macs(lambda: vit(images))

    assert passes("probe") == pytest.approx(
        1 - 0.83 / 12, rel=0.01
    )  # of the last block K, V, [CLS]
    assert passes("naive") == pytest.approx(10, rel=0.01)
    assert passes("dualprompt") == pytest.approx(2, rel=0.01)
    assert passes("coda-p") == pytest.approx(2, rel=0.01)
    assert passes("l2p") == pytest.approx(1 + 222 / 197, rel=0.01)  # 25 tokens more


# ---------------------------------------------------------------------------------------------
# Baselines: task after task


def own_classes(model, images, task=0):
    """What is said of a task's classes when all tasks are asked [B,4]."""
    with torch.no_grad():
        return model(images)[:, 4 * task : 4 * task + 4]


@pytest.mark.parametrize("name", METHODS)
def test_later_tasks_change_what_is_said_of_old_classes_or_do_not(name):
    method, images = baselines.METHODS[name], pictures()
    model = small_method(name, 1)
    train_lane(model, 0)
    before, frozen = own_classes(model, images), copy.deepcopy(model.backbone.state_dict())
    shared = {n: getattr(model.lanes[0], n).clone() for n in getattr(model, "shared", ())}
    model.add_lane([f"class 1.{i}" for i in range(4)])
    for part, value in shared.items():  # a new task goes on from what the old ones have learned
        assert getattr(model.lanes[1], part) is getattr(model.lanes[0], part)
        assert torch.equal(getattr(model.lanes[1], part), value)
    old = {n: p.clone() for n, p in model.lanes[0].named_parameters() if n not in shared}
    train_lane(model, 1)
    difference = (own_classes(model, images) - before).abs().max()
    assert difference < 1e-5 if method.independent else difference > 1e-2
    for part, value in old.items():  # the old task's own parameters, in any case, are left alone
        assert torch.equal(model.lanes[0].get_parameter(part), value)
    for part, value in shared.items():
        learned = part != "keys"  # which learn from the key loss
        assert torch.equal(getattr(model.lanes[0], part), value) != learned
    for part, value in frozen.items():
        assert torch.equal(model.backbone.state_dict()[part], value)
    assert all(p.grad is None for p in model.backbone.parameters())


@pytest.mark.parametrize("name", METHODS)
def test_files_of_a_baseline_give_the_model_as_it_was_then(name, tmp_path):
    model, images, after, paths = small_method(name, 0), pictures(), [], []
    for t in range(3):
        model.add_lane([f"class {t}.{i}" for i in range(4)])
        train_lane(model, t)
        paths.append(tmp_path / f"{t}.safetensors")
        model.save_lane(t, paths[t])
        after.append(model(images).detach())
    for t in range(3):
        again = type(model)(model.backbone, model.config)
        again.load_lanes(paths[: t + 1])
        assert torch.equal(again(images), after[t])
    count = sum(p.numel() for p in again.lanes.parameters())
    assert count == sum(p.numel() for p in model.lanes.parameters())  # shared, so counted once
    train_lane(again, 2, steps=1)  # and what is shared is shared still
    assert all(
        getattr(lane, part) is getattr(again.lanes[0], part)
        for lane in again.lanes
        for part in getattr(again, "shared", ())
    )


@pytest.mark.parametrize("name", ["naive", "l2p", "dualprompt", "coda-p"])
def test_baselines_under_autocast(name):
    model, images = small_method(name), pictures()
    exact, query = model(images), None
    with torch.autocast("cpu", torch.bfloat16):
        out = model(images, lane=2)
        if baselines.METHODS[name].key_loss:
            out, query = model(images, lane=2, return_cls=True)
    assert (out.float() - model(images, lane=2)).abs().max() < 0.1 * exact.abs().max()
    out.float().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.lanes.parameters())
    if query is not None:
        assert model.key_loss(query.float(), 2).isfinite()


# ---------------------------------------------------------------------------------------------
# Baselines: from the command line


def method_flags(small, name, **more):
    """As `flags`, without those that the method does not have."""
    known = baselines.METHODS[name].flags
    useless = {flag.replace("_", "-"): None for flag in baselines.LANE_FLAGS if flag not in known}
    return flags(small, **{"method": name, "lr": 0.1, **useless, **more})


@pytest.mark.parametrize("name", [name for name in METHODS if name != "multilane"] + ["joint"])
def test_baselines_run_resume_and_score_again(name, small, tmp_path, capsys, monkeypatch):
    words = method_flags(small, name, protocol=None if name == "joint" else "B0-C10")
    assert train.main([*words, "--run", str(tmp_path / "whole")]) == 0
    undraw(monkeypatch)
    with monkeypatch.context() as patch:
        stop_after_writes(patch, 3 if name == "joint" else 10, KeyboardInterrupt())
        assert train.main([*words, "--run", str(tmp_path / "cut")]) == 130
    capsys.readouterr()
    assert train.main(["--resume", "--run", str(tmp_path / "cut")]) == 0
    done = 0 if name == "joint" else 1  # what the first task left in shared state is needed here
    assert f"resuming after {done} tasks and 1 epochs" in capsys.readouterr().out
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert train.main(["--eval", str(tmp_path / "whole")]) == 0
    assert "the same digits" in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_two_processes_agree_with_one_on_shared_prompts(small, tmp_path, monkeypatch):
    words = method_flags(small, "dualprompt", batch=7, lr=0.02)
    assert train.main([*words, "--run", str(tmp_path / "one")]) == 0
    stop_after_writes(monkeypatch, 10, KeyboardInterrupt())
    assert train.main([*words, "--run", str(tmp_path / "both")]) == 130
    monkeypatch.undo()
    run_many(2, ["--resume", "--run-dir", str(tmp_path / "both")])
    for path in sorted((tmp_path / "one").glob("lane-*")):
        other = load_file(tmp_path / "both" / path.name)
        for key, p in load_file(path).items():
            assert (p - other[key]).abs().max() < 1e-3


@pytest.mark.usefixtures("undrawn")
def test_fine_tuning_forgets_and_lanes_do_not(small, tmp_path, monkeypatch):
    """On a few hundred scenes: both know the first task equally well, until the next ones come."""
    monkeypatch.setattr(data, "GLYPH_TRAIN", 300)
    monkeypatch.setattr(data, "GLYPH_TEST", 150)
    found = {}
    for name in ("multilane", "finetune"):
        run = tmp_path / name
        words = ["--method", name, "--epochs", "8", "--lr", "1"]
        words += ["--data-dir", str(small), "--run", str(run)]
        assert train.main(words) == 0
        found[name] = json.loads((run / "results.json").read_text())
    first = [results["after_task"][0]["mAP"] for results in found.values()]
    lost = [sum(results["forgetting"]) / 4 for results in found.values()]
    assert first[0] == first[1] and lost[1] > lost[0] + 5, (first, lost)


def test_methods_have_settings_of_their_own(capsys):
    assert train.METHOD_PRESETS.keys() < baselines.METHODS.keys()
    for dataset, preset in train.PRESETS.items():
        for name in baselines.METHODS:
            own = train.METHOD_PRESETS.get(name, {})
            wanted = preset | own.get("any", {}) | own.get(dataset, {})
            assert wanted.items() <= vars(options(dataset=dataset, method=name)).items()
        assert options(dataset=dataset, method="l2p", lr=7.0).lr == 7.0
    assert options(dataset="voc", method="coda-p").lr == 0.001
    assert options(dataset="coco", method="naive").lr == 0.03
    assert options(method="coda-p").epochs == 5 and options().epochs == 20
    with pytest.raises(SystemExit):
        train.main(["--dataset", "voc", "--method", "coda-p", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "defaults of voc and coda-p" in told and "batch/256 (default: 0.001)" in told


# ---------------------------------------------------------------------------------------------
# The comparison


def test_class_f1_and_frequency_bins_by_hand():
    probabilities = torch.tensor([[0.9, 0.9, 0.1], [0.85, 0.2, 0.1], [0.1, 0.95, 0.1]])
    truth = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 1, 1]])
    # said 2, real 2, right 1; said 2, real 3, right 2; said 0, real 1
    assert compare.class_f1(probabilities, truth).tolist() == pytest.approx([0.5, 0.8, 0])
    counts, gains = torch.tensor([50, 3, 20, 7]), torch.tensor([0.1, 0.4, 0.2, 0.6])
    found = compare.frequency_bins(gains, counts, 2)
    assert [bin[:2] for bin in found] == [(3, 7), (20, 50)]
    assert [bin[2] for bin in found] == pytest.approx([0.5, 0.15])


def test_spread_is_mean_and_deviation_of_what_is_known():
    assert compare.spread([80.0, None, 84.0]) == "82.0 ± 2.8"
    assert compare.spread([80.04]) == "80.0" and compare.spread([None, math.nan]) == "-"


@pytest.mark.usefixtures("undrawn")
def test_the_comparison_is_one_command_and_is_not_repeated(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data, "GLYPH_TRAIN", 100)
    monkeypatch.setattr(data, "GLYPH_TEST", 60)
    monkeypatch.setattr(compare, "SELECTORS", (1, 10))
    monkeypatch.setattr(compare, "MERGED", (4, 30))
    words = ["--seeds", "0", "1", "--out", str(tmp_path / "out"), "--with", "L2P", "--batch 50"]
    words += ["--", "--epochs", "1", "--data-dir", str(small), "--protocol", "B0-C10"]
    words += ["--weights", str(small / "vit.safetensors")]
    methods = {k: v for k, v in compare.METHODS.items() if "joint" not in k}  # has no protocol
    monkeypatch.setattr(compare, "METHODS", methods)
    assert compare.main(words) == 0
    out = tmp_path / "out"
    text, numbers = (
        (out / "comparison.md").read_text(),
        json.loads((out / "comparison.json").read_text()),
    )
    for name in (*methods, *compare.ABLATIONS):
        results = [json.loads((out / f"{compare.slug(name)}-seed{s}" / "results.json").read_text())
                   for s in (0, 1)]  # fmt: skip
        assert numbers["rows"][name] == results
        cells = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
        assert f"| {compare.spread([r['mAP'] for r in results])} |" in cells
    settings = [train.read_config(out / f"{run}-seed1")["settings"] for run in ("l2p", "coda-p")]
    assert [s["batch"] for s in settings] == [50, 64] and settings[0]["order_seed"] == 1
    assert set(numbers["selectors"]["selectors"]) == {"1", "10"}
    assert numbers["selectors"]["selectors"]["10"] == [
        r["mAP"] for r in numbers["rows"]["MULTI-LANE"]
    ]
    assert not (out / "10-selectors-seed0").exists()  # that is MULTI-LANE itself
    assert len(numbers["frequency"]) == 5
    for name in ("ablations", "frequency", "selectors"):
        assert (out / f"{name}.png").stat().st_size > 5000 and f"({name}.png)" in text
    monkeypatch.setattr(train, "main", lambda words: pytest.fail("a finished run is repeated"))
    assert compare.main(words) == 0 and (out / "comparison.md").read_text() == text
    other = [{"1": "2"}.get(w, w) if words[i - 1] == "--epochs" else w for i, w in enumerate(words)]
    assert compare.main(other) == 2 and (out / "comparison.md").read_text() == text
    error = capsys.readouterr().err
    assert "it differs in --epochs (there 1, here 2): give another --out" in error
    for run in ("l2p-seed1", "coda-p-seed0", "linear-probe-seed0"):
        (out / run / "report.md").unlink()
    for seed in (0, 1):
        (out / f"token-merging-seed{seed}" / "report.md").unlink()
    assert compare.main(["--finished", *words]) == 0
    numbers = json.loads((out / "comparison.json").read_text())
    seeds = {name: len(results) for name, results in numbers["rows"].items()}
    assert (
        seeds["MULTI-LANE"] == 2 and seeds["L2P"] == seeds["CODA-P"] == seeds["linear probe"] == 1
    )
    assert "Token Merging" not in seeds and len(numbers["frequency"]) == 5


# ---------------------------------------------------------------------------------------------
# Bench


def bench_options(**changes):
    return bench.Options(
        **bench.SETTINGS | {"where": torch.device("cpu"), "quick": False} | changes
    )


@pytest.fixture(scope="module")
def published_rows():
    """The rows of bench.py at the paper's setting, with their counts on the meta device."""
    o = bench_options()
    vit = bench.make_vit(o, "meta")
    rows = [row for row in bench.make_rows(o) if row.impl != "reference"]  # as batched, but slower
    return o, vit, [(row, bench.count(row, vit, o)) for row in rows]


def test_counts_of_bench_are_the_papers_to_the_digits_it_prints(published_rows):
    paper = [
        (row.paper[0], round(macs.paper / 1e9, 1)) for row, macs in published_rows[2] if row.paper
    ]
    assert [theirs for theirs, _ in paper] == [16.9, 168.7, 33.7, 18.6, 34.7]
    assert all(theirs == ours for theirs, ours in paper)


def test_counts_of_bench_follow_from_the_sizes(published_rows):
    N, D, L, T, H, patches = 197, 768, 12, 10, 12, 196
    embedding, a_token = patches * D * 3 * 16 * 16, 12 * D * D * L  # qkv, proj and MLP: 12 D^2
    attention, heads = 2 * N * N * D * L, T * 10 * D
    for row, macs in published_rows[2]:
        S, P, d = row.selectors, 20, D // H
        if row.method is None:
            linear, more = N * a_token + embedding, attention
        elif row.method == "naive":
            linear = T * N * a_token + embedding + heads
            more = T * (attention + 2 * 5 * N * P * D)
        elif row.method == "coda-p":
            linear, more = 2 * N * a_token + embedding + heads, macs.total - macs.linear
        elif row.impl == "batched":
            linear = (N + T * (1 + S)) * a_token + embedding + heads
            lane = 2 * S * N * D * L + 2 * (1 + S) * ((1 + S) * L + 5 * P) * D
            more = attention + T * lane
        else:  # identity (v): of the last block's patches, only keys and values
            linear = (N + T) * a_token - 10 * (N - 1) * D * D + embedding + heads
            linear += T * S * N * D * L
            rows = 2 * N * D + 2 * H * S * N  # against keys and values, and through alpha
            more = attention * (L - 1) / L + 2 * N * D + T * (rows * L + 2 * 5 * P * H * d)
            linear += (row.readout > 0) * (3 * D + 1) * T * 10
        assert macs.linear == linear, row.name
        assert macs.total == pytest.approx(linear + more, abs=1e4), row.name


def test_formulas_of_trainable_parameters_count_what_is_trained(published_rows):
    o, vit, rows = published_rows
    for row, _ in rows[1:]:
        with torch.device("meta"):
            model = bench.build(row, vit, o)
        found = sum(p.numel() for t in range(o.lanes) for p in model.lane_parameters(t))
        assert bench.trainable(row, vit, o)[0] == found, row.name


def test_literal_lanes_in_one_batch_are_the_reference():
    model, images = small_model(), pictures()
    with torch.no_grad():
        assert_close(bench.literal_lanes(model, images), logits(model, images, "reference"))


def test_peak_memory_counts_tensors():
    kept = []

    def run():
        x = torch.empty(1000)
        y = torch.cat([x, x])
        if not kept:
            kept.append(torch.empty(50))
        return y.sum()

    peak, left = bench.peak_memory(run, torch.device("cpu"))
    assert left == 200 and 12000 <= peak <= 12400


def test_a_quick_bench_leaves_tables_results_and_plots(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "QUICK_GROWTH", {"lanes": (1, 2), "selectors": (1,)})
    words = ["--quick", "--out", str(tmp_path / "new"), "--device", "cpu", "--repeat", "2"]
    assert bench.main([*words, "--batch", "1", "--lanes", "2"]) == 0
    names = {"table.md", "results.json", "complexity.png", "growth.png", "training.png"}
    assert {path.name for path in (tmp_path / "new").iterdir()} == names
    results = json.loads((tmp_path / "new" / "results.json").read_text())
    text = (tmp_path / "new" / "table.md").read_text()
    assert "written: " in capsys.readouterr().out
    o = bench_options(lanes=2, selectors=4)
    assert [e["row"] for e in results["complexity"]] == [row.name for row in bench.make_rows(o)]
    assert [e["value"] for e in results["growth"]] == [1, 2, 1]
    assert {e["row"] for e in results["training"]} >= {"as written", "parallel", "kept stream"}
    for part in ("complexity", "training"):
        assert all(f"| {e['row']} |" in text for e in results[part])
    assert text.count("`python bench.py --quick") == text.count(torch.__version__) == 3
    assert "no GPU here" in text


# ---------------------------------------------------------------------------------------------
# README: what it says is what there is

README = (HERE / "README.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(found[1], found[2]) for found in FENCED.finditer(README)]


def readme_commands():
    """Every command of this project: lines of sh blocks, and code in sentences and tables."""
    lines = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCED.sub("", README))]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return dict.fromkeys(part for part in parts if re.match(r"(python \w+\.py|torchrun)\b", part))


@pytest.mark.parametrize("line", readme_commands())
def test_commands_of_the_readme_are_taken_by_the_real_parsers(line):
    words = shlex.split(line, comments=True)
    place = next(i for i, word in enumerate(words) if word.endswith(".py"))
    program, words = words[place], words[place + 1 :]
    cut = words.index("--") if "--" in words else len(words)
    try:
        match program:
            case "train.py":
                explicit = train.parse(words)
                if not {"eval", "predict", "resume"} & explicit.keys():  # else a run has the rest
                    train.check_settings(train.complete(explicit), explicit)
            case "compare.py":
                compare.make_parser().parse_args(words[:cut])
                train.parse(words[cut + 1 :])
            case "data.py":
                data.make_parser().parse_args(words)
            case "bench.py":
                bench.make_parser().parse_args(words)
            case _:
                pytest.fail(f"there is no parser of {program}")
    except SystemExit as end:  # --help
        assert end.code == 0
    assert line.startswith("python") or "--run" not in words  # torchrun would take it


def test_every_block_of_the_readme_is_tested():
    assert {kind for kind, _ in BLOCKS} == {"sh", "python", "", "bibtex"}
    programs = {re.search(r"\w+\.py", line)[0] for line in readme_commands()}
    assert programs == {"train.py", "data.py", "compare.py", "bench.py"}


@pytest.mark.parametrize("code", [block for kind, block in BLOCKS if kind == "python"])
def test_python_of_the_readme_runs_as_it_is(code, tmp_path, monkeypatch):
    """Word for word; only what the name of the ViT stands for is smaller, and not downloaded."""

    def build(name, pretrained=True):
        assert pretrained and name in timm.list_pretrained()
        return small_vit(img_size=224, patch_size=32, depth=12)

    monkeypatch.setattr(multilane, "build_backbone", build)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "snippet.py").write_text(code)
    names = runpy.run_path("snippet.py")
    assert names["logits"].shape == (8, 2) and names["model"].classes == ("cat", "dog")
    assert multilane.read_lane("pets.safetensors")[0]["classes"] == ["cat", "dog"]


def test_the_list_of_the_readme_is_read_as_it_is(tmp_path):
    (tmp_path / "photos").mkdir()
    for name in ("1.jpg", "2.jpg"):
        gradient_image().save(tmp_path / "photos" / name)
    (listed,) = (block for kind, block in BLOCKS if not kind)
    (tmp_path / "train.csv").write_text(listed)
    own = data.load_own(tmp_path)
    assert own.classes == ("cat", "dog")
    assert own.train.labels.tolist() == [[True, False], [True, True]]


def test_the_paper_is_cited_alike_everywhere():
    (block,) = (block for kind, block in BLOCKS if kind == "bibtex")
    for accent, letter in ((r"{\`e}", "è"), (r"{\'e}", "é")):
        block = block.replace(accent, letter)
    citation = (HERE / "CITATION.cff").read_text(encoding="utf-8")
    title = re.search(r"title += {(.*)}", block)[1]
    family, given = (re.findall(rf"{part}-names: (.*)", citation) for part in ("family", "given"))
    assert f'title: "{title}"' in citation
    authors = " and ".join(map(", ".join, zip(family, given, strict=True)))
    assert f"author    = {{{authors}}}" in block
    version = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in citation
    assert f"\n## {version}\n" in (HERE / "CHANGELOG.md").read_text()
    workflow = (HERE / ".github" / "workflows" / "test.yml").read_text()
    tests = re.search(r"^pip install .* && pytest$", README, re.MULTILINE)[0]
    assert f"- run: {tests}\n" in workflow


def test_the_file_table_names_every_file_and_counts_its_lines():
    section = README.split("\n## What is in it\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    named = set()
    for first, _, lines in rows:
        files = re.findall(r"`([^`]+)`", first)
        named |= {name.rstrip("/") for name in files}
        assert all((HERE / name).exists() for name in files), files
        if lines.strip():
            real = len((HERE / files[0]).read_text(encoding="utf-8").splitlines())
            assert int(lines.replace(",", "")) == pytest.approx(real, rel=0.02), files
        else:
            assert not any(name.endswith(".py") for name in files), files
    listed = subprocess.run(
        ["git", "-C", str(HERE), "ls-files"], capture_output=True, text=True, check=False
    ).stdout.splitlines()  # nothing where it is not a clone
    here = {name.split("/")[0] for name in listed if not name.startswith(".")}
    assert here - {"README.md"} <= named


# ---------------------------------------------------------------------------------------------
# The tutorial

notebooks = pytest.mark.parametrize(
    "path", sorted((HERE / "tutorial").glob("*.ipynb")), ids=lambda path: path.stem
)


@notebooks
def test_a_notebook_runs_and_its_own_checks_hold(path, monkeypatch):
    monkeypatch.setenv("MULTILANE_QUICK", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # a reader's shell does not have it
    where = {"metadata": {"path": str(path.parent)}}
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()


@notebooks
def test_a_notebook_is_built_like_the_others_and_kept_with_its_outputs(path):
    assert path.stat().st_size < 700_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    first, _, settings, *_ = notebook.cells
    assert first.cell_type == "markdown" and first.source.startswith(f"# {int(path.stem[:2])}. ")
    assert "You will learn" in first.source
    assert re.search(r"^Run time: about \d+ (s|min)", first.source, re.MULTILINE)

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    given = [cell for cell in code if re.search(r"^DATASET\b.* = ", cell.source, re.MULTILINE)]
    assert given == [settings] and "DATA_DIR" in settings.source  # the one cell to change
    solutions = [cell for cell in code if "solution" in cell.metadata.get("tags", ())]
    assert len(solutions) >= 3
    assert all(cell.metadata.jupyter.source_hidden for cell in solutions)

    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any("execution" in cell.metadata for cell in code)  # timestamps
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    texts = [cell.source for cell in notebook.cells] + [o.get("text", "") for o in outputs]
    for output in outputs:
        texts += [str(t) for kind, t in output.get("data", {}).items() if "image" not in kind]
    for text in texts:
        assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|mnt|usr|opt|var)/", text)
