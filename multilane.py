"""MULTI-LANE: multi-label class-incremental learning by summarizing patch tokens.

The method of "Less is more: Summarizing Patch Tokens for efficient Multi-Label Class-Incremental
Learning" (De Min, Mancini, Lathuilière, Roy, Ricci; CoLLAs 2024), in one file that needs PyTorch,
and timm if a backbone is asked for by name.

A ViT is frozen. Every task gets its own lane: a few learned selectors that summarize the image's
tokens by attention, a few prefix prompts, a head. A lane's [CLS] attends to its summaries and
prompts, block after block; lanes never read each other, so nothing is forgotten and nothing needs
replay. All lanes run on every image, their logits are concatenated.

The file reads from top to bottom: the settings, the frozen ViT, the method as the paper writes it
(the reference), the same numbers for all lanes at once at the price of a plain ViT (parallel), the
GPU kernel for its innermost step, a readout that all lanes may share (not in the paper), and the
module that a user holds.

Words and shapes:
    B images   T lanes (tasks)   S selectors per lane   P prompts per lane and block
    N tokens = [CLS] + patches   D width   H heads   d head width   L blocks   C classes
    g      [B,N,D]    norm1 of the frozen tokens entering a block: the frozen stream
    s      [T,S,D]    the selectors as they reach that block
    alpha  [B,T,S,N]  softmax over N of s . g / sqrt(D)                          (equation 3)
    c      [B,T,D]    the lanes' own [CLS]: all that a lane carries from block to block
"""

import hashlib
import json
import math
import operator
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:  # the kernel is an extra: everything else works without triton
    triton = None


# ---------------------------------------------------------------------------------------------
# 1. Settings


@dataclass(frozen=True)
class LaneConfig:
    """What a lane is made of. The defaults are the paper's for VOC2007."""

    selectors: int = 10  # S: summaries per block; the paper's mAP hardly changes from 1 to 20
    prompts: int = 10  # P for the keys and P for the values; 0 leaves only the selectors to learn
    prompt_blocks: int = 5  # prompts enter the first so many blocks, as in DualPrompt and CODA-P
    pre_head_norm: bool = True  # L2-normalise before the heads: lanes then speak equally loud
    # Ablations of the paper: each takes one idea away.
    pathways: bool = True  # False: a key per lane picks one lane per image, which feeds all heads
    drop_replace: bool = True  # False: summarize in block 0 only, then carry the summaries along
    token_merging: bool = False  # True: summaries by Token Merging, the same for all lanes
    merged_tokens: int = 30  # Token Merging halves the tokens until at most so many are left
    # Beyond the paper, see section 6.
    readout: float = 0.0  # what the shared readout's log-odds weigh in the logits; 0: there is none

    def __post_init__(self):
        least = {"selectors": 1, "prompts": 0, "prompt_blocks": 0, "merged_tokens": 1}
        for name, value in asdict(self).items():
            if name in least:
                wish = f"a whole number of at least {least[name]}"
                fine = type(value) is int and value >= least[name]
            elif name == "readout":
                wish, fine = "a number of at least 0", type(value) in (int, float)
                fine = fine and 0 <= value < float("inf")
            else:
                wish, fine = "True or False", type(value) is bool
            if not fine:
                raise ValueError(f"LaneConfig.{name} is {value!r}: give {wish}.")
        if self.token_merging and not self.drop_replace:
            raise ValueError(
                "LaneConfig cannot have token_merging=True with drop_replace=False: without "
                "selectors there is nothing the carried summaries could start from."
            )


# ---------------------------------------------------------------------------------------------
# 2. The frozen ViT


def build_backbone(name: str, pretrained: bool = True) -> nn.Module:
    """A timm ViT by its full name, e.g. "vit_base_patch16_224.augreg_in21k_ft_in1k"."""
    try:
        import timm

        return timm.create_model(name, pretrained=pretrained, num_classes=0)
    except Exception as error:  # timm passes on whatever the hub or the network raised
        raise ValueError(
            f"timm could not build {name!r} ({type(error).__name__}: {error}); check the name with "
            "timm.list_models, or make the backbone from a local file and pass that object."
        ) from error


def check_backbone(vit: nn.Module) -> None:
    """Refuse, with the reason, every backbone over which the identities below would not hold."""

    def refuse_if(condition: bool, why: str):
        if condition:
            raise ValueError(
                f"{type(vit).__name__} cannot carry lanes: {why}; use a timm VisionTransformer with "
                "a class token and plain attention (ViT, DeiT, DINO, DINOv2, CLIP image towers)."
            )

    def has(module, *parts):  # timm leaves out a part by None or by Identity
        found = [getattr(module, part, None) for part in parts]
        return all(part is not None and not isinstance(part, nn.Identity) for part in found)

    parts = "patch_embed", "blocks", "_pos_embed"
    known = isinstance(vit, nn.Module) and has(vit, *parts)
    refuse_if(not known, "it is not a VisionTransformer")
    vit.eval()  # for good: dropout would make its tokens differ from call to call
    refuse_if(not has(vit, "cls_token"), "it has no class token for the lanes to start from")
    rotary = has(vit, "rope") or has(vit, "rot_pos_emb")
    refuse_if(rotary, "its rotary positions turn keys by their place, and a summary has no place")
    for index, block in enumerate(vit.blocks):
        attn, where = getattr(block, "attn", None), f"block {index} ({type(block).__name__})"
        plain = has(block, "norm1", "norm2", "mlp") and has(attn, "qkv", "proj")
        plain = plain and hasattr(block, "ls1") and hasattr(block, "ls2")
        refuse_if(not plain, f"{where} is not made of norm1, attn with qkv and proj, norm2 and mlp")
        normed = has(attn, "q_norm") or has(attn, "k_norm")
        refuse_if(normed, f"{where} has qk-norm, so a summary's key is not the mean of its keys")
        refuse_if(has(attn, "gate"), f"{where} has gated attention, which is not linear in values")
        refuse_if(has(attn, "norm"), f"{where} has scaled attention, a norm between heads and proj")
        weight = attn.qkv.weight
        if not weight.is_meta:  # whatever else it does differently shows on a few tokens
            x = torch.arange(4 * weight.shape[1], device=weight.device).sin().to(weight.dtype)
            x = x.view(1, 4, -1)
            with torch.no_grad():
                n = block.norm1(x)
                heads = frozen_attention(*project(attn, n))
                pairs = (attn.proj(heads), attn(n)), (finish(block, x, heads), block(x))
            strict = weight.dtype in (torch.float32, torch.float64)
            other = max((a - b).abs().max() / b.abs().max() for a, b in pairs)
            other = other > (1e-4 if strict else 5e-2)
            refuse_if(other, f"{where} is not pre-norm softmax attention followed by an MLP")


def embed(vit: nn.Module, images: Tensor) -> Tensor:
    """[B,3,height,width] -> the tokens that enter block 0 [B,N,D], as timm makes them."""
    x = vit._pos_embed(vit.patch_embed(images))
    return vit.norm_pre(vit.patch_drop(x))


def first_cls(vit: nn.Module) -> Tensor:
    """A lane's [CLS] before block 0 [1,1,D]: pre-trained, without its position, not trained."""
    return vit.norm_pre(vit.cls_token)


def final_norm(vit: nn.Module, x: Tensor) -> Tensor:
    """The backbone's norm after its last block (timm calls it fc_norm where it pools first)."""
    return vit.fc_norm(x) if isinstance(vit.norm, nn.Identity) else vit.norm(x)


def project(attn: nn.Module, x: Tensor, first: int = 0, last: int = 3) -> tuple[Tensor, ...]:
    """Queries, keys, values (numbers first..last-1 of the three) of x [B,M,D], each [B,M,H,d]."""
    width = attn.qkv.out_features // 3
    rows = slice(first * width, last * width)
    bias = None if attn.qkv.bias is None else attn.qkv.bias[rows]
    y = F.linear(x, attn.qkv.weight[rows], bias)  # [B,M,(last-first)*H*d]
    return y.unflatten(-1, (last - first, attn.num_heads, -1)).unbind(-3)


def frozen_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain attention among the frozen tokens, [B,N,H,d] each -> [B,N,H*d]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B,H,N,d]
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def finish(block: nn.Module, x: Tensor, heads: Tensor) -> Tensor:
    """The rest of a block, token by token: x, heads [B,M,D] -> [B,M,D]."""
    x = x + block.ls1(block.attn.proj(heads))
    return x + block.ls2(block.mlp(block.norm2(x)))


@torch.no_grad()
def frozen_stream(
    vit: nn.Module, x: Tensor, cls: bool = True, whole: bool = False
) -> tuple[list[Tensor], Tensor | None]:
    """Run the frozen ViT over x [B,N,D] and keep what lanes read: g [B,N,D] of every block.

    Also gives the frozen [CLS] after the final norm [B,D], if asked for. After the last norm1
    nobody reads the patches any more: of the last block only the row of [CLS] is computed, or
    nothing; whole computes it all, as the method is literally written.
    """
    stream = []
    for index, block in enumerate(vit.blocks):
        stream.append(block.norm1(x))
        if whole or index + 1 < len(vit.blocks):
            x = finish(block, x, frozen_attention(*project(block.attn, stream[-1])))
        elif cls:
            (q,), kv = (
                project(block.attn, stream[-1][:, :1], 0, 1),
                project(block.attn, stream[-1], 1),
            )
            x = finish(block, x[:, :1], frozen_attention(q, *kv))
    return stream, final_norm(vit, x[:, 0]) if cls else None


# ---------------------------------------------------------------------------------------------
# 3. The reference: the paper's equations, one lane at a time, no trick


def summarize(s: Tensor, g: Tensor) -> Tensor:
    """Equation 3: selectors s [B,S,D] and frozen stream g [B,N,D] -> summaries gbar [B,S,D]."""
    alpha = (s @ g.mT / g.shape[-1] ** 0.5).softmax(-1)  # [B,S,N]
    return alpha @ g


def merge_tokens(g: Tensor, at_most: int) -> Tensor:
    """Token Merging (Bolya et al. 2023) as an averaging matrix [B,M,N], rows summing to 1.

    Every round splits the M tokens into even and odd places, finds for each even one the odd one
    it is most like, and merges the M // 2 closest pairs; rounds go on until at most `at_most`
    tokens are left. A merged token is the mean of all frozen tokens in it.
    """
    B, N, _ = g.shape
    members = torch.eye(N, device=g.device).expand(B, N, N)  # which frozen tokens are in which
    while (M := members.shape[1]) > at_most:
        tokens = F.normalize(members / members.sum(-1, keepdim=True) @ g.float(), dim=-1)  # [B,M,D]
        like, best = (tokens[:, ::2] @ tokens[:, 1::2].mT).max(-1)  # [B,ceil(M/2)]
        moved = F.one_hot(best, M // 2).float()  # [B,ceil(M/2),M//2]
        stay = like.argsort(-1, descending=True)[:, M // 2 :, None]  # [B,M%2,1]
        moved = moved.scatter(1, stay.expand(-1, -1, M // 2), 0.0)
        kept = members[:, ::2].gather(1, stay.expand(-1, -1, N))  # [B,M%2,N]
        members = torch.cat([kept, members[:, 1::2] + moved.mT @ members[:, ::2]], 1)
    return members / members.sum(-1, keepdim=True)


def prefix_attention(attn: nn.Module, x: Tensor, prompts: Tensor | None) -> Tensor:
    """Multi-head attention of x [B,M,D] with prompts [2,H,P,d] before its keys and values."""
    q, k, v = (t.transpose(1, 2) for t in project(attn, x))  # [B,H,M,d]
    if prompts is not None:
        prompts_k, prompts_v = prompts.unsqueeze(1).expand(-1, len(x), -1, -1, -1)  # [B,H,P,d]
        k, v = torch.cat([prompts_k, k], 2), torch.cat([prompts_v, v], 2)  # [B,H,P+M,d]
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)  # [B,H,M,P+M]
    return attn.proj((weights @ v).transpose(1, 2).flatten(2))  # [B,M,D]


def reference_lane(vit: nn.Module, lane: "Lane", stream: Sequence[Tensor]) -> Tensor:
    """One lane, from its first [CLS] to the [CLS] after the last block [B,D]."""
    config, B = lane.config, len(stream[0])
    tokens = first_cls(vit).expand(B, -1, -1)  # [B,1,D]
    if not config.token_merging:
        tokens = torch.cat([tokens, lane.selectors.expand(B, -1, -1)], 1)  # [B,1+S,D]
    for index, (block, g) in enumerate(zip(vit.blocks, stream, strict=True)):
        n = block.norm1(tokens)
        c, s = n[:, :1], n[:, 1:]
        if config.token_merging:
            merged = merge_tokens(g, config.merged_tokens).to(g.dtype) @ g
            x = torch.cat([c, merged], 1)  # [B,1+M,D]
        elif config.drop_replace or index == 0:
            x = torch.cat([c, summarize(s, g)], 1)  # [B,1+S,D]
        else:
            x = n
        x = prefix_attention(block.attn, x, lane.block_prompts(index))
        if config.drop_replace:
            x = torch.cat([x[:, :1], s], 1)  # Drop & Replace: out with summaries, in with selectors
        tokens = tokens + block.ls1(x)
        tokens = tokens + block.ls2(block.mlp(block.norm2(tokens)))
    return tokens[:, 0]


# ---------------------------------------------------------------------------------------------
# 4. Parallel lanes: the same numbers, all lanes at once, by exact identities
#
# (i)   Only the [CLS] row survives Drop & Replace: one query per lane; no query, proj or MLP for
#       a summary.
# (ii)  Projections are linear and alpha's rows sum to 1, so K(alpha g) = alpha K(g), and the same
#       for V: the frozen forward has made K(g) and V(g) already. By associativity
#       scores = (q K^T) alpha^T  and  output = (weights alpha) V: two rows over the N tokens.
# (iii) Selectors never meet the image: their path is computed once, not once per image.
# (iv)  Everything but attention works token by token: without gradients the lanes' [CLS] ride
#       along in the frozen tokens' matrix products.
# (v)   The last block's patches are needed as keys and values only.
# (vi)  q . K(gbar) = (W_K^T q) . gbar and sum_s w_s V(gbar_s) = W_V (sum_s w_s gbar_s): g alone is
#       enough, so for fixed images it can be kept, and training never runs the ViT again.


class LaneStack(NamedTuple):
    """The parameters of several lanes, laid out for the products below."""

    config: LaneConfig
    path: Tensor | None  # [L,T,S,D] selectors entering each block, normed; None with Token Merging
    prompts: Tensor  # [prompt_blocks,2,T,H,P,d]

    def block_prompts(self, index: int) -> Tensor | None:
        """The prompts of one block [2,T,H,P,d], or None."""
        return self.prompts[index] if index < len(self.prompts) else None

    def scores(self, index: int, g: Tensor) -> Tensor:
        """z [B,T,S,N], whose softmax over the tokens is alpha."""
        if self.path is not None:
            return look(self.path[index], g)
        # Token Merging: scores whose softmax is the averaging matrix, for every lane the same
        z = merge_tokens(g, self.config.merged_tokens).clamp_min(1e-30).log().to(g.dtype)
        return z.unsqueeze(1).expand(-1, self.prompts.shape[2], -1, -1)

    def summaries(self, index: int, g: Tensor) -> Tensor:
        """gbar [B,T,S,D] of one block, with gradients into the selectors."""
        if self.path is None:
            g = g.to(self.prompts.dtype)
            gbar = merge_tokens(g, self.config.merged_tokens).to(g.dtype) @ g  # [B,M,D]
            return gbar.unsqueeze(1).expand(-1, self.prompts.shape[2], -1, -1)
        s = self.path[index]  # [T,S,D]
        return Summarize.apply(s.flatten(0, 1), g).unflatten(1, s.shape[:2])


def stack_lanes(vit: nn.Module, lanes: Sequence["Lane"]) -> LaneStack:
    """Stack the lanes' prompts and walk their selectors through the blocks (identity iii)."""
    config = lanes[0].config
    prompts = torch.stack([lane.prompts for lane in lanes], 2)  # [prompt_blocks,2,T,H,P,d]
    if config.token_merging:
        return LaneStack(config, None, prompts)
    s, path = torch.stack([lane.selectors for lane in lanes]), []  # [T,S,D]
    device = "cpu" if s.is_meta else s.device.type
    with torch.autocast(device, enabled=False):  # once per weights: no reason to round
        for block in vit.blocks:
            path.append(block.norm1(s))
            s = s + block.ls1(path[-1])
            s = s + block.ls2(block.mlp(block.norm2(s)))
    return LaneStack(config, torch.stack(path), prompts)


class Summarize(torch.autograd.Function):
    """Equation 3 for training: s [M,D], g [B,N,D] of any dtype -> gbar [B,M,D], gradient for s only.

    As `summarize` does, but a few images at a time on a CPU, where g is then read from memory once
    in each direction and not once for every product; a kept g is converted on the way.
    """

    at_once = 1_300_000  # elements of g that stay in the cache: 8 images of a ViT-B/16

    @staticmethod
    def parts(g: Tensor, *others: Tensor):
        fitting = Summarize.at_once // math.prod(g.shape[1:])
        size = max(1, fitting if g.device.type == "cpu" else len(g))
        return zip(*(t.split(size) for t in (g, *others)), strict=True)

    @staticmethod
    def forward(ctx, s: Tensor, g: Tensor) -> Tensor:
        scaled, alphas, gbar = s * s.shape[-1] ** -0.5, [], []
        for (part,) in Summarize.parts(g):
            part = part.to(s.dtype)
            alphas.append((scaled @ part.mT).softmax(-1))  # [b,M,N]
            gbar.append(alphas[-1] @ part)
        ctx.save_for_backward(g, torch.cat(alphas))
        return torch.cat(gbar)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        g, alphas = ctx.saved_tensors
        grad_s = alphas.new_zeros(grad.shape[1:])  # not rounded by autocast
        for part, alpha, d_gbar in Summarize.parts(g, alphas.to(grad.dtype), grad):
            part = part.to(grad.dtype)
            d_alpha = d_gbar @ part.mT  # [b,M,N]
            d_z = alpha * (d_alpha - (alpha * d_alpha).sum(-1, keepdim=True))
            grad_s += (d_z @ part).sum(0)
        return grad_s * grad.shape[-1] ** -0.5, None


def look(s: Tensor, g: Tensor) -> Tensor:
    """How much every selector wants every token: s [T,S,D], g [B,N,D] -> scores z [B,T,S,N]."""
    z = F.linear(g, s.flatten(0, 1) * s.shape[-1] ** -0.5)  # [B,N,T*S], one matrix product
    return z.mT.unflatten(1, s.shape[:2])


def mix(z: Tensor, r: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """From scores to weights, the heart of lane attention; the kernel below computes just this.

    z [B,T,S,N]; r [B,T,H,N] the [CLS] query against the frozen keys; e [B,T,H,P+1] the same
    against the prompts and its own key -> a [B,T,H,N] weights over the frozen values, and
    w [B,T,H,P+1] over the prompts and its own value.
    """
    alpha = z.softmax(-1)  # [B,T,S,N], equation 3
    scores = torch.cat([e, r @ alpha.mT], -1)  # [B,T,H,P+1+S], identity (ii)
    w, summaries = scores.softmax(-1).split([e.shape[-1], alpha.shape[2]], -1)
    return summaries @ alpha, w


def lane_attention(attn, cls, prompts, gbar=None, frozen=None, mix=mix) -> Tensor:
    """The attention output of the lanes' [CLS] tokens [B,T,H*d].

    cls: their query, key, value [B,T,H,d]; prompts [2,T,H,P,d] or None. Of the image, either
    frozen, that is scores z [B,T,S,N], keys and values [B,N,H,d] (identity ii), or its summaries
    gbar [B,T,S,D], which g alone gives (identity vi).
    """
    (q, k, v), (H, d) = cls, cls[0].shape[2:]
    q = q * d**-0.5
    e = (q * k).sum(-1, keepdim=True)  # [B,T,H,1]
    if prompts is not None:
        e = torch.cat([torch.einsum("bthd,thpd->bthp", q, prompts[0]), e], -1)  # [B,T,H,P+1]
    if frozen is not None:
        z, frozen_k, frozen_v = frozen
        r = torch.einsum("bthd,bnhd->bthn", q, frozen_k)  # [B,T,H,N]
        a, w = mix(z, r, e)  # [B,T,H,N], [B,T,H,P+1]
        out = torch.einsum("bthn,bnhd->bthd", a, frozen_v)  # [B,T,H,d]
    else:
        _, weight_k, weight_v = attn.qkv.weight.view(3, H, d, -1)  # [H,d,D]
        bias = q.new_zeros(3, H, d) if attn.qkv.bias is None else attn.qkv.bias.view(3, H, d)
        r = torch.einsum("bthd,hdD->bthD", q, weight_k) @ gbar.mT  # [B,T,H,S]
        scores = torch.cat([e, r + (q * bias[1]).sum(-1, keepdim=True)], -1)  # [B,T,H,P+1+S]
        w, a = scores.softmax(-1).split([e.shape[-1], gbar.shape[2]], -1)
        out = torch.einsum("bthD,hdD->bthd", a @ gbar, weight_v)  # [B,T,H,d]
        out = out + a.sum(-1, keepdim=True) * bias[2]
    out = out + w[..., -1:] * v
    if prompts is not None:
        out = out + torch.einsum("bthp,thpd->bthd", w[..., :-1], prompts[1])
    return out.flatten(2)


def parallel_lanes(vit: nn.Module, stack: LaneStack, stream: Sequence[Tensor]) -> Tensor:
    """All lanes over a frozen stream, with gradients into the lanes -> [CLS] tokens [B,T,D].

    From g alone, even where the ViT has just run: for a few lanes that costs no more, and autograd
    need not hold every block's keys and values until the backward pass.
    """
    c = first_cls(vit).expand(len(stream[0]), stack.prompts.shape[2], -1)  # [B,T,D]
    for index, (block, g) in enumerate(zip(vit.blocks, stream, strict=True)):
        cls = project(block.attn, block.norm1(c))
        gbar, prompts = stack.summaries(index, g), stack.block_prompts(index)
        c = finish(block, c, lane_attention(block.attn, cls, prompts, gbar))
    return c


def riding_lanes(
    vit: nn.Module, stack: LaneStack, x: Tensor, mix=mix
) -> tuple[Tensor, Tensor, Tensor]:
    """All lanes and the frozen tokens x [B,N,D] in one matrix of rows (identities iv and v).

    Inference only. -> the lanes' [CLS] tokens [B,T,D]; as `frozen_stream`, the last block's
    g [B,N,D] and the frozen [CLS] after the final norm [B,D].
    """
    (B, N, D), T = x.shape, stack.prompts.shape[2]
    c = first_cls(vit).expand(B, T, -1)
    # The lanes' rows come after all frozen rows: so both are cut out of a product without a copy.
    x = torch.cat([x.flatten(0, 1), c.flatten(0, 1)])  # [B*N+B*T,D]
    for index, block in enumerate(vit.blocks):
        n, last = block.norm1(x), index + 1 == len(vit.blocks)
        heads = riding_attention(block.attn, n, (B, N), stack, index, last, mix)
        x = torch.cat([x[: B * N : N], x[B * N :]]) if last else x  # [B+B*T,D]
        x = finish(block, x, heads)
    return x[B:].view(B, T, D), n[: B * N].view(B, N, D), final_norm(vit, x[:B])


def riding_attention(attn, n: Tensor, size, stack: LaneStack, index: int, last, mix) -> Tensor:
    """The attention output of all rows n [B*N+B*T,D]; in the last block, of the [CLS] rows only.

    A function of its own, so that queries, keys and values are gone when the MLP needs the room.
    """

    def cut(rows: Tensor) -> tuple[Tensor, Tensor]:  # -> [B,N,...] frozen, [B,T,...] lanes
        return tuple(t.unflatten(0, (B, -1)) for t in rows.split([B * N, len(rows) - B * N]))

    B, N = size
    g, own = cut(n)
    if last:  # identity (v)
        (q,), (k, v) = (
            project(attn, torch.cat([g[:, :1], own], 1), 0, 1),
            map(cut, project(attn, n, 1)),
        )
        q = q[:, :1], q[:, 1:]
    else:
        q, k, v = map(cut, project(attn, n))
    frozen = frozen_attention(q[0], k[0], v[0])  # [B,N,H*d], or [B,1,H*d]
    seen, prompts = (stack.scores(index, g), k[0], v[0]), stack.block_prompts(index)
    lanes = lane_attention(attn, (q[1], k[1], v[1]), prompts, frozen=seen, mix=mix)
    return torch.cat([frozen.flatten(0, 1), lanes.flatten(0, 1)])


# ---------------------------------------------------------------------------------------------
# 5. The GPU kernel: `mix` for one image and one lane per program, all heads at once
#
# alpha is never written to memory. Pass 1 walks over the tokens once, in the manner of flash
# attention: running maximum and sum of every selector's softmax, and with them (q K^T) alpha^T.
# Then the softmax over prompts, [CLS] and summaries. Pass 2 walks again and writes weights alpha.

if triton is not None:

    @triton.jit
    def mix_kernel(
        z, r, e, a, w,
        T, S, N, H, E,
        z_b, z_t, z_s, z_n, r_b, r_t, r_h, e_b, e_t, e_h, a_b, a_t, a_h, w_b, w_t, w_h,
        BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr,
    ):  # fmt: skip
        program = tl.program_id(0).to(tl.int64)
        image, lane = program // T, program % T
        s, n, h = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_H)
        j = tl.arange(0, BLOCK_E)
        z += image * z_b + lane * z_t + s[:, None] * z_s
        r += image * r_b + lane * r_t + h[:, None] * r_h
        e += image * e_b + lane * e_t + h[:, None] * e_h + j[None, :]
        a += image * a_b + lane * a_t + h[:, None] * a_h
        w += image * w_b + lane * w_t + h[:, None] * w_h + j[None, :]
        real_s, real_h = (s < S)[:, None], (h < H)[:, None]

        top = tl.full([BLOCK_S], -1e30, tl.float32)  # finite: a chunk may hold nothing but -inf
        total = tl.zeros([BLOCK_S], tl.float32)
        scores = tl.zeros([BLOCK_H, BLOCK_S], tl.float32)
        for start in range(0, N, BLOCK_N):
            at = (start + n)[None, :]
            zs = tl.load(z + at * z_n, mask=real_s & (at < N), other=0.0).to(tl.float32)
            zs = tl.where(at < N, zs, float("-inf"))  # a padded selector stays finite, and unused
            rs = tl.load(r + at, mask=real_h & (at < N), other=0.0).to(tl.float32)
            new_top = tl.maximum(top, tl.max(zs, 1))
            shrink, alpha = tl.exp(top - new_top), tl.exp(zs - new_top[:, None])
            total = total * shrink + tl.sum(alpha, 1)
            scores = scores * shrink[None, :]
            scores += tl.dot(rs, tl.trans(alpha), input_precision="ieee")
            top = new_top
        scores = tl.where((s < S)[None, :], scores / total[None, :], float("-inf"))

        es = tl.load(e, mask=real_h & (j < E)[None, :], other=0.0).to(tl.float32)
        es = tl.where((j < E)[None, :], es, float("-inf"))
        highest = tl.maximum(tl.max(scores, 1), tl.max(es, 1))[:, None]
        scores, es = tl.exp(scores - highest), tl.exp(es - highest)
        sums = (tl.sum(scores, 1) + tl.sum(es, 1))[:, None]
        tl.store(w, (es / sums).to(w.dtype.element_ty), mask=real_h & (j < E)[None, :])
        scores = scores / sums / total[None, :]

        for start in range(0, N, BLOCK_N):
            at = (start + n)[None, :]
            zs = tl.load(z + at * z_n, mask=real_s & (at < N), other=0.0).to(tl.float32)
            alpha = tl.exp(zs - top[:, None])
            out = tl.dot(scores, alpha, input_precision="ieee")  # [BLOCK_H,BLOCK_N]
            tl.store(a + at, out.to(a.dtype.element_ty), mask=real_h & (at < N))


def mix_options(S: int, H: int, E: int) -> tuple[dict[str, int], dict[str, int]]:
    """Block sizes (powers of two, at least 16 where tl.dot asks for it) and launch options."""
    up = triton.next_power_of_2
    sizes = {"BLOCK_S": max(16, up(S)), "BLOCK_H": max(16, up(H)), "BLOCK_E": up(E)}
    # 32 tokens a step and no software pipelining: 128 registers at ViT-B/16 shapes, no spills
    return {**sizes, "BLOCK_N": 32}, {"num_warps": 4, "num_stages": 1}


def mix_triton(z: Tensor, r: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """`mix` in one kernel: fp32, fp16 or bf16 in and out, fp32 inside. Inference only."""
    (B, T, S, N), (H, E) = z.shape, e.shape[2:]
    r, e = (t if t.stride(-1) == 1 else t.contiguous() for t in (r, e))
    a = torch.empty_like(r.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    w = torch.empty_like(e, memory_format=torch.contiguous_format)
    strides = [*z.stride(), *(step for t in (r, e, a, w) for step in t.stride()[:3])]
    sizes, launch = mix_options(S, H, E)
    mix_kernel[(B * T,)](z, r, e, a, w, T, S, N, H, E, *strides, **sizes, **launch)
    return a, w


def kernel_agrees(vit: nn.Module, stack: LaneStack, x: Tensor) -> bool:
    """Whether the kernel compiles on this device and does on x [B,N,D] what `mix` does."""
    errors = []

    def both(z, r, e):
        exact, tolerance = mix(z, r, e), 2e-3 if z.dtype == torch.float32 else 2e-2
        for ours, theirs in zip(mix_triton(z, r, e), exact, strict=True):
            error = (ours - theirs).abs().max() / theirs.abs().max()
            errors.append((float(error), tolerance))
        return exact

    try:
        riding_lanes(vit, stack, x, both)
        works = all(error <= tolerance for error, tolerance in errors)
        problem = f"its results are off by {max(errors)[0]:.1e}"
    except Exception as failure:  # noqa: BLE001, a compiler or driver may raise anything
        works, problem = False, f"{type(failure).__name__}: {failure}"
    if not works:
        warnings.warn(f"The kernel is not used on {x.device}, the parallel path is: {problem}.")
    return works


# ---------------------------------------------------------------------------------------------
# 6. Beyond the paper: a readout that all lanes share
#
# A lane is trained only on images that hold one of its classes, so it never learns to stay quiet
# on the others. That takes a comparison of all tasks' images, and for ridge regression on frozen
# features phi a comparison takes no image, only sums over the images:
#     W = (G + lambda I)^-1 Q,   G = sum_t G_t,  G_t = sum phi phi^T,   Q = [Q_1 ... Q_T],
#     Q_t = sum phi y^T,         sums over task t's own images and labels.
# Sums have no order, and what is left when a task's are taken away is what the others give.


class Statistics(NamedTuple):
    """All that is kept of a task for the readout, however many images it has. float32, CPU."""

    gram: Tensor  # G_t [F,F]; its last element is the number of images
    sums: Tensor  # Q_t [F,|Y_t|]; its last row is the number of images with each class


def readout_features(vit: nn.Module, g: Tensor, cls: Tensor) -> Tensor:
    """What the readout sees of an image: phi [B,F], F = 3 D + 1.

    From the last block's g [B,N,D] its [CLS] and the mean of its patches; the frozen [CLS] after
    the final norm, cls [B,D]; each of one length, sqrt(D); and 1. It is all there for the lanes.
    """
    patches = g[:, vit.num_prefix_tokens :].mean(1)  # [B,D]
    parts = torch.stack([g[:, 0], patches, cls], 1).float()  # [B,3,D]
    phi = F.normalize(parts, dim=-1) * g.shape[-1] ** 0.5
    return torch.cat([phi.flatten(1), torch.ones_like(phi[:, 0, :1])], -1)


def solve_readout(tasks: Sequence[Statistics]) -> Tensor:
    """Weights [F,C] in closed form, for `readout_logits`.

    lambda is the one of the least generalized cross-validation error (Golub, Heath and Wahba 1979),
    |y - Phi w|^2 / (1 - f/n)^2 with f = trace G (G + lambda I)^-1: it estimates the error on new
    images, and from sums alone. Classes count alike, rare or not.
    """
    gram = torch.stack([task.gram for task in tasks]).double().sum(0)  # [F,F]
    sums = torch.cat([task.sums for task in tasks], 1).double()  # [F,C]
    n, positives = gram[-1, -1], sums[-1].clamp_min(1)  # the last feature is 1
    values, vectors = torch.linalg.eigh(gram)
    values, q = values.clamp_min(0)[:, None], vectors.mT @ sums  # [F,1], [F,C]
    least, best = torch.inf, q
    for images in torch.logspace(0, 5, 21):  # as many must contradict "nothing is there"
        ridge = images * values.mean() / n
        w = q / (values + ridge)  # [F,C]
        error = positives - 2 * (w * q).sum(0) + (w * w * values).sum(0)  # |y - Phi w|^2 [C]
        free = (values / (values + ridge)).sum()
        error = (error / positives).sum() / (1 - free / n) ** 2
        if error < least:
            least, best = error, w
    w = vectors @ best  # [F,C]
    # From scores r = phi w to log-odds: two normal distributions of r, with the class and without,
    # of means m1 and m0 and one variance, give the slope (m1 - m0) / variance. Sums are enough. At
    # m1 and m0 the odds are at most e^10 to 1: so few training images cannot make it surer.
    negatives, total = (n - positives).clamp_min(1), gram[-1] @ w  # [C]
    m1 = (w * sums).sum(0) / positives
    m0 = (total - m1 * positives) / negatives
    variance = ((w * (gram @ w)).sum(0) - positives * m1**2 - negatives * m0**2) / n
    slope = (m1 - m0) / variance.clamp_min(0.05 * (m1 - m0) ** 2 + 1e-12)
    w = w * slope
    w[-1] += torch.log(positives / negatives) - slope * (m1 + m0) / 2
    return w.float()


def readout_logits(phi: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
    """Log-odds [B,C] of the classes in images of features phi [B,F]; sizes: classes of each task.

    An image with classes of k tasks is in the sums k times, in all but one of them as an image
    without the class: so phi @ weights are log-odds of y / k. Of all tasks' probabilities p, k is
    estimated as the participation number (sum p)^2 / sum p^2, from 1 to T.
    """
    with torch.autocast("cpu" if phi.is_meta else phi.device.type, enabled=False):
        r = phi.float() @ weights  # [B,C], large terms that cancel
    log_p = torch.stack([F.logsigmoid(part.amax(-1)) for part in r.split(list(sizes), -1)], -1)
    log_k = 2 * log_p.logsumexp(-1) - (2 * log_p).logsumexp(-1)  # [B]
    return r + log_k.unsqueeze(-1)


# ---------------------------------------------------------------------------------------------
# 7. The module


class Lane(nn.Module):
    """The parameters of one task, and the names of its classes."""

    def __init__(self, classes: Sequence[str], config: LaneConfig, vit: nn.Module):
        super().__init__()
        self.classes, self.config = tuple(classes), config
        self.statistics: Statistics | None = None  # for the readout; no parameter, never rounded
        attn, like = vit.blocks[0].attn, vit.cls_token
        D, H, width = like.shape[-1], attn.num_heads, attn.qkv.out_features // 3
        S, P, blocks = config.selectors, config.prompts, config.prompt_blocks
        selectors = torch.empty(0 if config.token_merging else S, D)
        prompts = torch.empty(blocks, 2, P, H, width // H)
        for rows in [selectors, *prompts.view(2 * blocks, P, width)]:
            if rows.numel():
                nn.init.orthogonal_(rows)
        self.selectors = nn.Parameter(selectors)  # [S,D]
        self.prompts = nn.Parameter(prompts.transpose(2, 3).contiguous())  # [blocks,2,H,P,d]
        self.key = None if config.pathways else nn.Parameter(torch.rand(D) * 2 - 1)  # [D]
        self.head = nn.Linear(D, len(self.classes))
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        self.to(like)  # made on the CPU, so a seed gives the same lane on every device

    def block_prompts(self, index: int) -> Tensor | None:
        """The prompts of one block [2,H,P,d], or None."""
        return self.prompts[index] if index < len(self.prompts) else None


LANE_FORMAT = "multilane lane 1"


def read_lane(path: str | os.PathLike) -> tuple[dict, dict[str, Tensor]]:
    """What a lane file says of itself (kind, config, classes, backbone, fingerprint), and its tensors.

    Nothing in the file can run code, and anything that is not a whole, finite lane is refused.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(LANE_FORMAT)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as a safetensors file ({error}): it is missing, cut off or of "
            "another kind; copy or save it again."
        ) from None
    if text is None:
        raise ValueError(f"{path} is a safetensors file, but not a lane made by save_lane.")
    try:
        info = json.loads(text)
        info["config"] = LaneConfig(**info["config"])
        info["kind"], info["classes"], info["backbone"], info["fingerprint"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is a lane whose description is spoiled ({error}).") from None
    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() and tensor.isfinite().all()):
            raise ValueError(f"{path} is spoiled, {name} is not all finite floats: use a copy.")
    return info, tensors


class MultiLane(nn.Module):
    """A frozen ViT and the lanes over it.

    backbone: a timm ViT (used as it is, and frozen), or the name of one.
    impl: "auto" is the kernel on a GPU where it works and "parallel" elsewhere; "reference",
    "parallel" and "triton" insist. All give the same logits up to rounding.
    """

    IMPLS = ("auto", "reference", "parallel", "triton")

    def __init__(
        self,
        backbone: nn.Module | str,
        config: LaneConfig | None = None,
        impl: str = "auto",
        pretrained: bool = True,
    ):
        super().__init__()
        if isinstance(backbone, str):
            backbone = build_backbone(backbone, pretrained)
        check_backbone(backbone)
        config = config or LaneConfig()
        if not isinstance(config, LaneConfig):
            raise TypeError(f"config is {config!r}: give a LaneConfig.")
        if config.prompt_blocks > len(backbone.blocks):
            raise ValueError(
                f"LaneConfig.prompt_blocks is {config.prompt_blocks}: the backbone has only "
                f"{len(backbone.blocks)} blocks."
            )
        self.backbone = backbone.requires_grad_(False)
        self.config, self.impl, self.lanes = config, impl, nn.ModuleList()
        self._chosen_impl()
        known = getattr(backbone, "pretrained_cfg", None) or {}
        names = [known.get("architecture") or type(backbone).__name__, known.get("tag")]
        self.backbone_name = ".".join(filter(None, names))
        self._stacks, self._kernel_works, self._fingerprint = {}, {}, None
        self._solved = [], None, None  # statistics, the readout's weights by them, who has none
        self.fingerprint()  # taken now: a later .half() does not make it another backbone

    # Lanes come and go ------------------------------------------------------------------------

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes, in the order of the logits."""
        return tuple(name for lane in self.lanes for name in lane.classes)

    def add_lane(self, classes: Sequence[str], warm_start: bool = True) -> int:
        """Add a lane for these classes and return its index.

        It starts from the last lane's selectors and prompts; the first lane, or any with
        warm_start=False, starts orthogonal.
        """
        names = self._new_classes(classes, self.classes, "add_lane")
        lane = self._new_lane(names)
        if warm_start and len(self.lanes):
            with torch.no_grad():
                lane.selectors.copy_(self.lanes[-1].selectors)
                lane.prompts.copy_(self.lanes[-1].prompts)
        self.lanes.append(lane)
        return len(self.lanes) - 1

    def _new_lane(self, classes: Sequence[str]) -> nn.Module:
        return Lane(classes, self.config, self.backbone)

    def drop_lane(self, lane: int) -> tuple[str, ...]:
        """Remove a lane and all that was learned of its task; later lanes move up by one."""
        classes = self._lane(lane).classes
        del self.lanes[lane]
        self._stacks.clear()
        return classes

    def lane_parameters(self, lane: int) -> list[nn.Parameter]:
        """What training this lane trains: selectors, prompts, head (and key, with one pathway)."""
        return [p for p in self._lane(lane).parameters() if p.numel()]

    def save_lane(self, lane: int, path: str | os.PathLike) -> None:
        """Write one lane as a safetensors file, whole or not at all."""
        from safetensors.torch import save

        module = self._lane(lane)
        tensors = {name: p.detach().cpu().contiguous() for name, p in module.named_parameters()}
        if self.config.readout and module.statistics is not None:
            tensors |= {f"readout.{name}": t for name, t in module.statistics._asdict().items()}
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise ValueError(f"Lane {lane} is not saved: its {name} holds NaN or infinity.")
        info = {"kind": type(self).__name__, "classes": module.classes}
        info |= {"config": asdict(self.config), "backbone": self.backbone_name}
        info |= {"fingerprint": self.fingerprint()}
        unfinished = f"{os.fspath(path)}.{os.getpid()}.tmp"
        try:
            with open(unfinished, "wb") as file:
                # One entry: safetensors writes several in a random order, so in other bytes.
                file.write(save(tensors, {LANE_FORMAT: json.dumps(info)}))
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        finally:
            if os.path.exists(unfinished):
                os.remove(unfinished)

    def load_lane(self, path: str | os.PathLike) -> int:
        """Add the lane of a file made by `save_lane` and return its index."""
        self.load_lanes([path])
        return len(self.lanes) - 1

    def load_lanes(self, paths: Iterable[str | os.PathLike]) -> None:
        """Put lanes from several files together, trained here or elsewhere: all of them or none."""
        lanes, taken = [], list(self.classes)
        for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
            info, tensors = read_lane(path)
            if info["fingerprint"] != self.fingerprint():
                raise ValueError(
                    f"{path} is a lane over other weights: it was made with {info['backbone']!r}, "
                    f"this is {self.backbone_name!r}, and the fingerprints differ; build MultiLane "
                    "over the same weights, before any change of their dtype."
                )
            if info["kind"] != type(self).__name__:
                raise ValueError(f"{path} is a lane of {info['kind']}: load it with that class.")
            if info["config"] != self.config:
                raise ValueError(
                    f"{path} is a lane with {info['config']}, this model has {self.config}: build "
                    "MultiLane with that config."
                )
            names = self._new_classes(info["classes"], taken, path)
            with torch.random.fork_rng(devices=[]):  # what is about to be overwritten costs no seed
                lane = self._new_lane(names)
            found = {name: tuple(t.shape) for name, t in tensors.items()}
            wanted = {name: tuple(p.shape) for name, p in lane.named_parameters()}
            if self.config.readout and "readout.gram" in found:  # a lane may be without
                lane.statistics = self.no_statistics(len(names))
                empty = lane.statistics._asdict()
                wanted |= {f"readout.{name}": tuple(t.shape) for name, t in empty.items()}
            if found != wanted:
                raise ValueError(f"{path} holds {found} where a lane has {wanted}: save it again.")
            with torch.no_grad():
                for name, p in lane.named_parameters():
                    if not p.copy_(tensors[name]).isfinite().all():
                        raise ValueError(f"{path}: {name} does not fit into {p.dtype}.")
            if lane.statistics is not None:
                lane.statistics = Statistics(tensors["readout.gram"], tensors["readout.sums"])
            lanes.append(lane)
            taken += lane.classes
        self.lanes.extend(lanes)

    # From images to logits --------------------------------------------------------------------

    def forward(
        self,
        images: Tensor,
        lane: int | None = None,
        return_cls: bool = False,
        stack: LaneStack | None = None,
    ):
        """Logits of all lanes, concatenated [B,C], or of one lane [B,|Y_t|].

        images [B,3,height,width]: floats, prepared as the backbone wants them. With return_cls,
        also the frozen [CLS] after the final norm [B,D], which `key_loss` takes. A stack made by
        `stack` is used as it is: under torch.compile, which walks the selectors anew in every
        call, it saves that walk.
        """
        impl, lanes = self._chosen_impl(), self._pick(lane)
        x = embed(self.backbone, self._checked(images))  # [B,N,D]
        want_cls = return_cls or (lane is None and self._needs_cls())
        literal = impl == "reference" or not self.config.drop_replace
        if impl == "triton" and (
            literal
            or triton is None
            or torch.is_grad_enabled()
            or not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")
        ):
            raise RuntimeError(
                'impl="triton" needs triton, images on a GPU, torch.no_grad() (it has no backward) '
                'and lanes with Drop & Replace: see what is missing, or choose impl="auto".'
            )
        if literal or not lanes:
            stream, cls = frozen_stream(self.backbone, x, whole=True)
            c, g = self._one_by_one(lanes, stream), stream[-1]
        elif torch.is_grad_enabled():
            stream, cls = frozen_stream(self.backbone, x, want_cls)
            c, g = parallel_lanes(self.backbone, stack or self._stack(lanes), stream), stream[-1]
        else:
            c, g, cls = self._ride(stack or self._stack(lanes), x)
        logits = self._heads(c, cls, lanes, choose=lane is None)
        if lane is None and self.config.readout:
            logits = logits + self.read_out(readout_features(self.backbone, g, cls)).to(logits)
        return (logits, cls) if return_cls else logits

    def stack(self, lane: int | None = None) -> LaneStack:
        """The stacked parameters of all lanes or of one, as they are now, for `forward`."""
        return self._stack(self._pick(lane))

    @torch.no_grad()
    def stream(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The frozen stream g [L,B,N,D] and frozen [CLS] [B,D] of these images, to be kept."""
        stream, cls = frozen_stream(self.backbone, embed(self.backbone, self._checked(images)))
        return torch.stack(stream), cls

    def forward_stream(self, g: Tensor, cls: Tensor | None = None, lane: int | None = None):
        """As `forward`, from a kept frozen stream in place of the images (identity vi).

        cls is needed only to choose a lane by its key, with one pathway, and by a readout.
        """
        impl, lanes, token = self._chosen_impl(), self._pick(lane), self.backbone.cls_token
        want_cls = lane is None and self._needs_cls() and len(lanes) > 0
        L, D = len(self.backbone.blocks), token.shape[-1]
        if g.ndim != 4 or g.shape[0] != L or g.shape[-1] != D or (want_cls and cls is None):
            raise ValueError(
                f"g is {tuple(g.shape)}: the frozen stream of this backbone is [{L},B,N,{D}], and "
                "comes with cls where keys choose the lane or a readout reads it; both are made by "
                "`stream`."
            )
        if not lanes or impl == "reference" or not self.config.drop_replace:
            c = self._one_by_one(lanes, [block.to(token.dtype) for block in g])
        else:
            c = parallel_lanes(self.backbone, self._stack(lanes), g)
        logits = self._heads(c, cls, lanes, choose=lane is None)
        if lane is None and self.config.readout:
            phi = readout_features(self.backbone, *(t.to(token.dtype) for t in (g[-1], cls)))
            logits = logits + self.read_out(phi).to(logits)
        return logits

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """What the readout sees of these images: phi [B,F], for `learn_readout`."""
        stream, cls = frozen_stream(self.backbone, embed(self.backbone, self._checked(images)))
        return readout_features(self.backbone, stream[-1], cls)

    def learn_readout(self, lane: int, phi: Tensor, targets: Tensor) -> None:
        """Add images to a lane's statistics: phi [B,F] and 0 or 1 for its classes [B,|Y_t|].

        Every training image of the task once, in any order: the next forward knows them.
        """
        module, phi, targets = self._lane(lane), phi.cpu(), targets.cpu().to(torch.float32)
        old = module.statistics or self.no_statistics(len(module.classes))
        if not self.config.readout:
            raise ValueError(
                "These lanes have no readout: build them with LaneConfig(readout=2.0)."
            )
        if phi.shape[1:] != old.gram.shape[1:]:
            raise ValueError(f"phi is {tuple(phi.shape)}: give it as `features` makes it.")
        if targets.shape != (len(phi), len(module.classes)):
            raise ValueError(
                f"targets are {tuple(targets.shape)}: lane {lane} takes "
                f"[{len(phi)},{len(module.classes)}]."
            )
        module.statistics = Statistics(old.gram + phi.mT @ phi, old.sums + phi.mT @ targets)

    def read_out(self, phi: Tensor) -> Tensor:
        """The readout's part of the logits [B,C] of phi [B,F]; 0 for lanes without statistics."""
        if not self.lanes:
            return phi[:, :0]
        now, sizes = zip(
            *((lane.statistics, len(lane.classes)) for lane in self.lanes), strict=True
        )
        if len(now) != len(self._solved[0]) or not all(map(operator.is_, now, self._solved[0])):
            known = [task for task in now if task is not None]
            unknown = [task is None for task, size in zip(now, sizes) for _ in range(size)]
            unknown = torch.tensor(unknown, device="cpu")  # [C]
            weights = torch.zeros(phi.shape[1], sum(sizes), device="cpu")  # [F,C]
            weights[-1, unknown] = -1e4  # never there, as far as the other classes ask
            if known:
                weights[:, ~unknown] = solve_readout(known)
            self._solved = now, weights, unknown
        weights, unknown = (t.to(phi.device) for t in self._solved[1:])
        return self.config.readout * readout_logits(phi, weights, sizes).masked_fill(unknown, 0)

    def no_statistics(self, classes: int) -> Statistics:
        """The readout's sums over no image yet."""
        F = 3 * self.backbone.embed_dim + 1
        return Statistics(torch.zeros(F, F), torch.zeros(F, classes))

    def key_loss(self, cls: Tensor, lane: int) -> Tensor:
        """With one pathway: minus the mean cosine of the frozen [CLS] [B,D] with a lane's key."""
        if self.config.pathways:
            raise ValueError("Lanes have keys only with LaneConfig(pathways=False).")
        return -F.cosine_similarity(cls, self._lane(lane).key, dim=-1).mean()

    @torch.no_grad()
    def heatmaps(self, images: Tensor) -> Tensor:
        """Where every lane's selectors look: alpha over the patches [B,T,L,S,rows,columns].

        What is missing to 1 went to [CLS] and register tokens. Without Drop & Replace L is 1.
        """
        if self.config.token_merging or not len(self.lanes):
            raise ValueError("Heatmaps need lanes with selectors: this model has none.")
        vit, images = self.backbone, self._checked(images)
        stream, _ = frozen_stream(vit, embed(vit, images), cls=False)
        path = self._stack(list(self.lanes)).path[: None if self.config.drop_replace else 1]
        maps = [look(s, g).softmax(-1) for s, g in zip(path, stream)]  # [B,T,S,N] each
        maps = torch.stack(maps, 2)[..., vit.num_prefix_tokens :]  # [B,T,L,S,patches]
        return maps.unflatten(-1, vit.patch_embed.dynamic_feat_size(tuple(images.shape[-2:])))

    def _one_by_one(self, lanes: list[Lane], stream: Sequence[Tensor]) -> Tensor:
        """The reference for each lane -> [CLS] tokens [B,T,D]."""
        c = [reference_lane(self.backbone, lane, stream) for lane in lanes]
        return torch.stack(c, 1) if c else stream[0][:, :0]

    def _needs_cls(self) -> bool:
        """Whether the logits of all lanes depend on the frozen [CLS] after the final norm."""
        return self.config.readout > 0 or not self.config.pathways

    def _ride(self, stack: LaneStack, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inference by `riding_lanes`, with the kernel where it is chosen and works."""
        kernel = self.impl == "triton"
        # Under torch.compile the parallel path is fused by the compiler itself.
        if self.impl == "auto" and self._on_gpu(x) and not torch.compiler.is_compiling():
            device = x.device.type
            low = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
            key = (x.device, x.dtype, low)
            if key not in self._kernel_works and x[:2].isfinite().all():  # a small batch both ways
                self._kernel_works[key] = kernel_agrees(self.backbone, stack, x[:2])
            kernel = self._kernel_works.get(key, False)
        return riding_lanes(self.backbone, stack, x, mix_triton if kernel else mix)

    @staticmethod
    def _on_gpu(x: Tensor) -> bool:
        return triton is not None and x.is_cuda

    def _heads(self, c: Tensor, cls: Tensor | None, lanes: list[Lane], choose: bool) -> Tensor:
        """The lanes' last [CLS] tokens [B,T,D] -> logits [B,C]."""
        if not lanes:
            return c.flatten(1)  # [B,0]
        c = final_norm(self.backbone, c)
        if self.config.pre_head_norm:
            c = F.normalize(c, dim=-1)
        if choose and not self.config.pathways:  # one pathway: the nearest key's lane feeds all
            keys = torch.stack([lane.key for lane in lanes])  # [T,D]
            nearest = F.cosine_similarity(cls[:, None].to(keys), keys, dim=-1).argmax(-1)  # [B]
            c = c[torch.arange(len(c), device=c.device), nearest].unsqueeze(1).expand_as(c)
        return torch.cat([lane.head(c[:, t]) for t, lane in enumerate(lanes)], -1)

    def _stack(self, lanes: list[Lane]) -> LaneStack:
        """`stack_lanes`, kept from call to call where no gradient is wanted.

        What is kept is used only while all it was made of is the same: the lanes are compared
        number by number, so an edit behind autograd's back is seen too; the backbone, which is
        frozen, by the place and version of its tensors.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return stack_lanes(self.backbone, lanes)
        now = torch.cat([p.flatten() for lane in lanes for p in (lane.selectors, lane.prompts)])
        places = [p.data_ptr() for p in self.backbone.parameters()]
        key = (len(lanes), now.shape, now.device, now.dtype, places, self._versions())
        old_key, old, stack = self._stacks.get(len(lanes) == 1, (None, None, None))
        if old_key != key or not (now.is_meta or torch.equal(old, now)):
            stack = stack_lanes(self.backbone, lanes)
            self._stacks[len(lanes) == 1] = (key, now, stack)
        return stack

    # The backbone is frozen for good ----------------------------------------------------------

    def train(self, mode: bool = True) -> "MultiLane":
        super().train(mode)
        self.backbone.eval()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> "MultiLane":
        super().requires_grad_(requires_grad)
        self.backbone.requires_grad_(False)
        return self

    def fingerprint(self) -> str:
        """SHA-256 of the backbone's weights, as they were before any change of dtype."""
        versions = self._versions()
        if self._fingerprint and self._fingerprint[0] is None:  # a copy, which has it already
            self._fingerprint = versions, self._fingerprint[1]
        if not self._fingerprint or self._fingerprint[0] != versions:
            digest = hashlib.sha256()
            for name, p in sorted(self.backbone.state_dict().items()):
                if not name.startswith("head"):  # the classifier of the pre-training is not used
                    digest.update(f"{name} {tuple(p.shape)} {p.dtype}".encode())
                    if not p.is_meta:
                        digest.update(p.cpu().reshape(-1).view(torch.uint8).numpy())
            self._fingerprint = versions, digest.hexdigest()
        return self._fingerprint[1]

    def __getstate__(self) -> dict:
        """For copy.deepcopy and pickle: kept stacks stay behind, the fingerprint comes along."""
        return self.__dict__ | {"_stacks": {}, "_fingerprint": (None, self.fingerprint())}

    def _versions(self) -> list:
        """Differs after writes into the backbone that autograd sees; not after .to() or .half()."""
        return [(id(p), p.is_inference() or p._version) for p in self.backbone.parameters()]

    # Checks -----------------------------------------------------------------------------------

    def _chosen_impl(self) -> str:
        if self.impl not in self.IMPLS:
            raise ValueError(f"impl is {self.impl!r}: choose one of {', '.join(self.IMPLS)}.")
        return self.impl

    def _lane(self, lane: int) -> Lane:
        if (
            isinstance(lane, bool)
            or not hasattr(lane, "__index__")
            or not 0 <= lane < len(self.lanes)
        ):
            raise IndexError(f"There is no lane {lane!r}: this model has {len(self.lanes)} lanes.")
        return self.lanes[lane]

    def _pick(self, lane: int | None) -> list[Lane]:
        return list(self.lanes) if lane is None else [self._lane(lane)]

    def _new_classes(self, classes: Sequence[str], taken: Sequence[str], where: str) -> list[str]:
        names = list(classes) if isinstance(classes, (list, tuple)) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{where}: classes must be a list of names, not {classes!r}.")
        for index, name in enumerate(names):
            if name in taken or name in names[:index]:
                raise ValueError(f"{where}: class {name!r} is there already; each has one lane.")
        return names

    def _checked(self, images: Tensor) -> Tensor:
        """The images in the backbone's dtype, or a sentence that says what is wrong with them."""
        vit, patches = self.backbone, self.backbone.patch_embed
        if vit.training or vit.cls_token.requires_grad:  # somebody reached past this module
            vit.eval().requires_grad_(False)
        channels = next(p for p in patches.parameters() if p.ndim == 4).shape[1]
        steps, free = patches.patch_size, getattr(vit, "dynamic_img_size", False)
        got = tuple(images.shape) if isinstance(images, Tensor) else ()
        if len(got) == 4 and images.is_floating_point() and 0 not in got and got[1] == channels:
            whole = patches.dynamic_img_pad or got[2] % steps[0] == got[3] % steps[1] == 0
            if whole if free else got[2:] == tuple(patches.img_size):
                return images.to(vit.cls_token.dtype)
        size = f"multiples of {steps}" if free else "{},{}".format(*patches.img_size)
        raise ValueError(
            f"images are {getattr(images, 'dtype', type(images))} {got}: the backbone takes a batch "
            f"of at least one, as floats (such as pixels / 255) [B,{channels},{size}]; convert or "
            "resize them, or build it with img_size=."
        )
