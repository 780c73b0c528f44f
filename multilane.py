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
GPU kernel for its innermost step, and the module that a user holds.

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
import os
import warnings
from dataclasses import asdict, dataclass
from typing import Iterable, NamedTuple, Sequence

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

    def __post_init__(self):
        for name, least in dict(selectors=1, prompts=0, prompt_blocks=0, merged_tokens=1).items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(
                    f"LaneConfig.{name} is {value!r}: give a whole number of at least {least}."
                )
        for name in ("pre_head_norm", "pathways", "drop_replace", "token_merging"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"LaneConfig.{name} is {getattr(self, name)!r}: give True or False.")
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
    except ImportError as error:
        raise ImportError("A backbone by name needs timm: pip install timm.") from error
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('.')[0]}*")[:3]
        hint = f"did you mean {' or '.join(near)}" if near else "timm.list_models() lists them"
        raise ValueError(f"timm has no model named {name!r}: {hint}.")
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0)
    except Exception as error:  # timm passes on whatever the hub or the network raised
        if not pretrained:
            raise
        raise RuntimeError(
            f"The weights of {name!r} could not be had ({type(error).__name__}: {error}); "
            "build the backbone with timm.create_model from a local file and pass that object."
        ) from error


def check_backbone(vit: nn.Module) -> None:
    """Refuse, with the reason, every backbone over which the identities below would not hold."""

    def refuse(why: str):
        raise ValueError(
            f"{type(vit).__name__} cannot carry lanes: {why}; use a timm VisionTransformer with a "
            "class token and plain attention (ViT, DeiT, DINO, DINOv2, CLIP image towers)."
        )

    if not all(hasattr(vit, part) for part in ("patch_embed", "blocks", "_pos_embed", "norm")):
        refuse("it is not a timm VisionTransformer")
    if getattr(vit, "cls_token", None) is None:
        refuse("it has no class token for the lanes to start from")
    if getattr(vit, "rope", None) is not None or getattr(vit, "rot_pos_emb", None) is not None:
        refuse("it has rotary positions, which turn keys by place, and a summary has no place")
    for index, block in enumerate(vit.blocks):
        attn, where = getattr(block, "attn", None), f"block {index}"
        if not hasattr(attn, "qkv") or not all(hasattr(block, p) for p in ("norm1", "norm2", "mlp")):
            refuse(f"{where} is a {type(block).__name__} without norm1, attn.qkv, norm2 and mlp")
        for part in ("q_norm", "k_norm"):
            if not isinstance(getattr(attn, part, nn.Identity()), nn.Identity):
                refuse(f"{where} has qk-norm, so a summary's key is not the mean of its keys")
        if getattr(attn, "gate", None) is not None:
            refuse(f"{where} has gated attention, so its output is not linear in the values")
        if not isinstance(getattr(attn, "norm", nn.Identity()), nn.Identity):
            refuse(f"{where} has scaled attention (a norm before proj) that lanes would bypass")
        # Whatever else a block may do differently shows when both run on the same few tokens.
        if not attn.qkv.weight.is_meta:
            weight = attn.qkv.weight
            x = torch.arange(4 * weight.shape[1], device=weight.device).sin().to(weight.dtype)
            with torch.no_grad():
                x = x.view(1, 4, -1)
                q, k, v = project(attn, block.norm1(x))
                ours, theirs = finish(block, x, frozen_attention(q, k, v)), block(x)
            loose = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 5e-2
            if not torch.allclose(ours, theirs, rtol=loose, atol=loose * float(theirs.abs().max())):
                refuse(f"{where} is not pre-norm softmax attention followed by an MLP")


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


class BlockStream(NamedTuple):
    """What lanes read of one block. Keys and values are None where only g was kept."""

    g: Tensor  # [B,N,D]
    keys: Tensor | None = None  # [B,N,H,d]
    values: Tensor | None = None  # [B,N,H,d]


@torch.no_grad()
def frozen_stream(
    vit: nn.Module, x: Tensor, keys: bool = False, cls: bool = True
) -> tuple[list[BlockStream], Tensor | None]:
    """Run the frozen ViT over x [B,N,D] and keep what lanes read, block by block.

    Also gives the frozen [CLS] after the final norm [B,D], if asked for: without it, the last
    block's queries, attention and MLP serve nobody and are not computed.
    """
    stream = []
    for index, block in enumerate(vit.blocks):
        g, skip = block.norm1(x), not cls and index + 1 == len(vit.blocks)
        k = v = None
        if not skip:
            q, k, v = project(block.attn, g)
            x = finish(block, x, frozen_attention(q, k, v))
        elif keys:
            k, v = project(block.attn, g, 1, 3)
        stream.append(BlockStream(g, k, v) if keys else BlockStream(g))
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
    return (members / members.sum(-1, keepdim=True)).to(g.dtype)


def prefix_attention(attn: nn.Module, x: Tensor, prompts: Tensor | None) -> Tensor:
    """Multi-head attention of x [B,M,D] with prompts [2,H,P,d] before its keys and values."""
    q, k, v = (t.transpose(1, 2) for t in project(attn, x))  # [B,H,M,d]
    if prompts is not None:
        prompts_k, prompts_v = prompts.unsqueeze(1).expand(-1, len(x), -1, -1, -1)  # [B,H,P,d]
        k, v = torch.cat([prompts_k, k], 2), torch.cat([prompts_v, v], 2)  # [B,H,P+M,d]
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)  # [B,H,M,P+M]
    return attn.proj((weights @ v).transpose(1, 2).flatten(2))  # [B,M,D]


def reference_lane(vit: nn.Module, lane: "Lane", stream: list[BlockStream]) -> Tensor:
    """One lane, from its first [CLS] to the [CLS] after the last block [B,D]."""
    config, B = lane.config, len(stream[0].g)
    tokens = first_cls(vit).expand(B, -1, -1)  # [B,1,D]
    if not config.token_merging:
        tokens = torch.cat([tokens, lane.selectors.expand(B, -1, -1)], 1)  # [B,1+S,D]
    for index, (block, (g, *_)) in enumerate(zip(vit.blocks, stream)):
        n = block.norm1(tokens)
        c, s = n[:, :1], n[:, 1:]
        if config.token_merging:
            x = torch.cat([c, merge_tokens(g, config.merged_tokens) @ g], 1)  # [B,1+M,D]
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
# (v)   The last block's frozen tokens are needed as keys and values only.
# (vi)  q . K(g) = (W_K^T q) . g and sum_n w_n V(g_n) = W_V (sum_n w_n g_n): g alone is enough, so
#       for fixed images it can be kept, and training never runs the ViT again.


class LaneStack(NamedTuple):
    """The parameters of several lanes, laid out for the products below."""

    path: Tensor | None  # [L,T,S,D] selectors entering each block, normed; None with Token Merging
    prompts: Tensor  # [prompt_blocks,2,T,H,P,d]


def stack_lanes(vit: nn.Module, lanes: Sequence["Lane"]) -> LaneStack:
    """Stack the lanes' prompts and walk their selectors through the blocks (identity iii)."""
    prompts = torch.stack([lane.prompts for lane in lanes], 2)  # [prompt_blocks,2,T,H,P,d]
    if lanes[0].config.token_merging:
        return LaneStack(None, prompts)
    s, path = torch.stack([lane.selectors for lane in lanes]), []  # [T,S,D]
    with torch.autocast(s.device.type, enabled=False):  # once per weights: no reason to round
        for block in vit.blocks:
            path.append(block.norm1(s))
            s = s + block.ls1(path[-1])
            s = s + block.ls2(block.mlp(block.norm2(s)))
    return LaneStack(torch.stack(path), prompts)


def look(s: Tensor, g: Tensor) -> Tensor:
    """How much every selector wants every token: s [T,S,D], g [B,N,D] -> scores z [B,T,S,N]."""
    return torch.einsum("tsd,bnd->btsn", s * s.shape[-1] ** -0.5, g)


def weigh(alpha: Tensor, r: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of lane attention, in terms of the frozen tokens (identity ii).

    alpha [B,T,S,N]; r [B,T,H,N] the [CLS] query against the frozen keys; e [B,T,H,P+1] the same
    against the prompts and its own key -> a [B,T,H,N] weights over the frozen values, and
    w [B,T,H,P+1] over the prompts and its own value.
    """
    scores = torch.cat([e, r @ alpha.mT], -1)  # [B,T,H,P+1+S]
    w, summaries = scores.softmax(-1).split([e.shape[-1], alpha.shape[2]], -1)
    return summaries @ alpha, w


def mix(z: Tensor, r: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """From the selectors' scores z [B,T,S,N] to weights; the kernel below computes just this."""
    return weigh(z.softmax(-1), r, e)


def lane_attention(
    attn: nn.Module,
    config: LaneConfig,
    cls: Sequence[Tensor],
    frozen: BlockStream,
    s: Tensor | None,
    prompts: Tensor | None,
    mix=mix,
) -> Tensor:
    """The attention output of the lanes' [CLS] tokens [B,T,H*d].

    cls: their query, key, value [B,T,H,d]; s [T,S,D]; prompts [2,T,H,P,d].
    """
    (q, k, v), (g, keys, values) = cls, frozen
    B, T, H, d = q.shape
    width, D = H * d, g.shape[-1]
    q = q * d**-0.5
    e = (q * k).sum(-1, keepdim=True)  # [B,T,H,1]
    if prompts is not None:
        e = torch.cat([torch.einsum("bthd,thpd->bthp", q, prompts[0]), e], -1)  # [B,T,H,P+1]
    if keys is not None:
        r = torch.einsum("bthd,bnhd->bthn", q, keys)  # [B,T,H,N]
    else:  # identity (vi)
        weight, bias = attn.qkv.weight[width:].view(2, H, d, D), attn.qkv.bias
        r = torch.einsum("bthd,hdD->bthD", q, weight[0])  # [B,T,H,D]
        r = (r.flatten(1, 2) @ g.mT).unflatten(1, (T, H))  # [B,T,H,N]
        if bias is not None:
            r = r + (q * bias[width : 2 * width].view(H, d)).sum(-1, keepdim=True)
    if s is None:
        alpha = merge_tokens(g, config.merged_tokens).unsqueeze(1)  # [B,1,M,N]
        a, w = weigh(alpha.expand(-1, T, -1, -1), r, e)
    else:
        a, w = mix(look(s, g), r, e)  # [B,T,H,N], [B,T,H,P+1]
    if values is not None:
        out = torch.einsum("bthn,bnhd->bthd", a, values)  # [B,T,H,d]
    else:
        out = torch.einsum("bthD,hdD->bthd", (a.flatten(1, 2) @ g).view(B, T, H, D), weight[1])
        if bias is not None:
            out = out + a.sum(-1, keepdim=True) * bias[2 * width :].view(H, d)
    out = out + w[..., -1:] * v
    if prompts is not None:
        out = out + torch.einsum("bthp,thpd->bthd", w[..., :-1], prompts[1])
    return out.flatten(2)


def parallel_lanes(
    vit: nn.Module, config: LaneConfig, stack: LaneStack, stream: Sequence[BlockStream]
) -> Tensor:
    """All lanes over a frozen stream, with gradients into the lanes -> [CLS] tokens [B,T,D]."""
    c = first_cls(vit).expand(len(stream[0].g), stack.prompts.shape[2], -1)  # [B,T,D]
    for index, (block, frozen) in enumerate(zip(vit.blocks, stream)):
        cls = project(block.attn, block.norm1(c))
        s, prompts = at_block(stack, index)
        c = finish(block, c, lane_attention(block.attn, config, cls, frozen, s, prompts))
    return c


def riding_lanes(
    vit: nn.Module, config: LaneConfig, stack: LaneStack, x: Tensor, cls: bool = False, mix=mix
) -> tuple[Tensor, Tensor | None]:
    """All lanes and the frozen tokens x [B,N,D] in one sequence (identities iv and v).

    Inference only. -> the lanes' [CLS] tokens [B,T,D], and the frozen one [B,D] if asked for.
    """
    N, T = x.shape[1], stack.prompts.shape[2]
    x = torch.cat([x, first_cls(vit).expand(len(x), T, -1)], 1)  # [B,N+T,D]
    for index, block in enumerate(vit.blocks):
        n, s_prompts = block.norm1(x), at_block(stack, index)
        if cls or index + 1 < len(vit.blocks):
            q, k, v = project(block.attn, n)  # [B,N+T,H,d]
            heads = [frozen_attention(q[:, :N], k[:, :N], v[:, :N])]
        else:
            (q,), (k, v) = project(block.attn, n[:, N:], 0, 1), project(block.attn, n, 1, 3)
            x, heads = x[:, N:], []
        own, frozen = (q[:, -T:], k[:, N:], v[:, N:]), BlockStream(n[:, :N], k[:, :N], v[:, :N])
        heads.append(lane_attention(block.attn, config, own, frozen, *s_prompts, mix=mix))
        x = finish(block, x, torch.cat(heads, 1))
    return x[:, -T:], final_norm(vit, x[:, 0]) if cls else None


def at_block(stack: LaneStack, index: int) -> tuple[Tensor | None, Tensor | None]:
    """Selectors [T,S,D] and prompts [2,T,H,P,d] of one block, None where there are none."""
    prompted = index < len(stack.prompts) and stack.prompts.shape[4] > 0
    s = None if stack.path is None else stack.path[index]
    return s, stack.prompts[index] if prompted else None


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
        z_b, z_t, z_s, r_b, r_t, r_h, e_b, e_t, e_h, a_b, a_t, a_h, w_b, w_t, w_h,
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

        top = tl.full([BLOCK_S], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_S], tl.float32)
        scores = tl.zeros([BLOCK_H, BLOCK_S], tl.float32)
        for start in range(0, N, BLOCK_N):
            at = (start + n)[None, :]
            zs = tl.load(z + at, mask=real_s & (at < N), other=0.0).to(tl.float32)
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
            zs = tl.load(z + at, mask=real_s & (at < N), other=0.0).to(tl.float32)
            alpha = tl.exp(zs - top[:, None])
            out = tl.dot(scores, alpha, input_precision="ieee")  # [BLOCK_H,BLOCK_N]
            tl.store(a + at, out.to(a.dtype.element_ty), mask=real_h & (at < N))


def mix_blocks(S: int, H: int, E: int) -> dict[str, int]:
    """Block sizes of the kernel: powers of two, and at least 16 where tl.dot asks for it."""
    up = triton.next_power_of_2
    return dict(BLOCK_S=max(16, up(S)), BLOCK_N=64, BLOCK_H=max(16, up(H)), BLOCK_E=up(E))


def mix_triton(z: Tensor, r: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """`mix` in one kernel: fp32, fp16 or bf16 in and out, fp32 inside. Inference only."""
    (B, T, S, N), (H, E) = z.shape, e.shape[2:]
    z, r, e = (t if t.stride(-1) == 1 else t.contiguous() for t in (z, r, e))
    a = torch.empty_like(r.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    w = torch.empty_like(e, memory_format=torch.contiguous_format)
    strides = [step for t in (z, r, e, a, w) for step in t.stride()[:3]]
    mix_kernel[(B * T,)](z, r, e, a, w, T, S, N, H, E, *strides, **mix_blocks(S, H, E))
    return a, w


# ---------------------------------------------------------------------------------------------
# 6. The module


class Lane(nn.Module):
    """The parameters of one task, and the names of its classes."""

    def __init__(self, classes: Sequence[str], config: LaneConfig, vit: nn.Module):
        super().__init__()
        self.classes, self.config = tuple(classes), config
        weight, H = vit.cls_token, vit.blocks[0].attn.num_heads
        like = dict(device=weight.device, dtype=weight.dtype)
        D, width = weight.shape[-1], vit.blocks[0].attn.qkv.out_features // 3
        S, P = 0 if config.token_merging else config.selectors, config.prompts
        self.selectors = nn.Parameter(torch.empty(S, D, **like))  # [S,D]
        prompts = torch.empty(config.prompt_blocks, 2, H, P, width // H, **like)
        self.prompts = nn.Parameter(prompts)  # [prompt_blocks,2,H,P,d]
        self.key = None if config.pathways else nn.Parameter(torch.empty(D, **like))  # [D]
        self.head = nn.Linear(D, len(self.classes), **like)
        if weight.is_meta:
            return
        with torch.no_grad():
            if S:
                self.selectors.copy_(nn.init.orthogonal_(torch.empty(S, D)))
            for block in range(config.prompt_blocks if P else 0):
                for part in range(2):
                    rows = nn.init.orthogonal_(torch.empty(P, width)).view(P, H, -1)
                    self.prompts[block, part] = rows.transpose(0, 1)
            if self.key is not None:
                self.key.copy_(torch.empty(D).uniform_(-1, 1))
            self.head.weight.copy_(nn.init.trunc_normal_(torch.empty(len(self.classes), D), std=0.02))
            nn.init.zeros_(self.head.bias)

    def block_prompts(self, index: int) -> Tensor | None:
        """The prompts of one block [2,H,P,d], or None."""
        return self.prompts[index] if index < len(self.prompts) and self.config.prompts else None


class FrozenStream(NamedTuple):
    """What training needs of a batch of images, whatever the lanes: made once, kept anywhere."""

    g: Tensor  # [L,B,N,D]
    cls: Tensor  # [B,D] the frozen [CLS] after the final norm


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
        self.backbone_name = backbone if isinstance(backbone, str) else _name_of(backbone)
        if isinstance(backbone, str):
            backbone = build_backbone(backbone, pretrained)
        self.backbone = backbone.eval()
        check_backbone(backbone)
        self.config = config or LaneConfig()
        if self.config.prompt_blocks > len(backbone.blocks):
            raise ValueError(
                f"LaneConfig.prompt_blocks is {self.config.prompt_blocks}, but {self.backbone_name} "
                f"has {len(backbone.blocks)} blocks."
            )
        if impl not in self.IMPLS:
            raise ValueError(f"impl is {impl!r}: choose one of {', '.join(self.IMPLS)}.")
        self.impl = impl
        self.lanes = nn.ModuleList()
        self.backbone.requires_grad_(False)
        self._stacks, self._kernel_works, self._print = {}, {}, None
        self.fingerprint()  # taken now, so that a lane's home is known after a later .half()

    # Lanes come and go ------------------------------------------------------------------------

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes, in the order of the logits."""
        return tuple(name for lane in self.lanes for name in lane.classes)

    def add_lane(self, classes: Sequence[str], warm_start: bool = True) -> int:
        """Add a lane for these classes and return its index.

        It starts from the last lane's selectors and prompts, or orthogonal if there is none or
        warm_start is False.
        """
        lane = Lane(self._new_classes(classes), self.config, self.backbone)
        if warm_start and len(self.lanes):
            with torch.no_grad():
                lane.selectors.copy_(self.lanes[-1].selectors)
                lane.prompts.copy_(self.lanes[-1].prompts)
        self.lanes.append(lane)
        return len(self.lanes) - 1

    def drop_lane(self, lane: int) -> tuple[str, ...]:
        """Remove a lane, and with it all that was learned of its task; return its classes.

        The lanes after it move up by one.
        """
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
        data = save(
            {name: p.detach().cpu().contiguous() for name, p in module.named_parameters()},
            {
                "format": LANE_FORMAT,
                "config": json.dumps(asdict(self.config)),
                "classes": json.dumps(module.classes),
                "backbone": self.backbone_name,
                "fingerprint": self.fingerprint(),
            },
        )
        unfinished = f"{os.fspath(path)}.{os.getpid()}.tmp"
        try:
            with open(unfinished, "wb") as file:
                file.write(data)
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
        """Add the lanes of several files, trained here or elsewhere: all of them or none."""
        lanes, seen = [], []
        for path in paths:
            info, tensors = read_lane(path)
            if info["fingerprint"] != self.fingerprint():
                raise ValueError(
                    f"{path} holds a lane over other weights (backbone {info['backbone']!r}, "
                    f"fingerprint {info['fingerprint'][:12]}) than this model's "
                    f"({self.backbone_name!r}, {self.fingerprint()[:12]}): load that backbone."
                )
            if info["config"] != self.config:
                ours, theirs = asdict(self.config), asdict(info["config"])
                other = [f"{k}={theirs[k]} (here {ours[k]})" for k in ours if ours[k] != theirs[k]]
                raise ValueError(
                    f"{path} holds a lane with another config, {', '.join(other)}: build MultiLane "
                    "with that LaneConfig."
                )
            lane = Lane(self._new_classes(info["classes"], seen, path), self.config, self.backbone)
            wanted = {name: tuple(p.shape) for name, p in lane.named_parameters()}
            found = {name: tuple(t.shape) for name, t in tensors.items()}
            if wanted != found:
                raise ValueError(
                    f"{path} holds tensors {found} where this model's lane has {wanted}: "
                    "it was saved by another version or edited; save it again."
                )
            with torch.no_grad():
                for name, p in lane.named_parameters():
                    p.copy_(tensors[name])
            lanes.append(lane)
            seen += lane.classes
        self.lanes.extend(lanes)

    @classmethod
    def from_files(
        cls, backbone: nn.Module | str, paths: Sequence[str | os.PathLike], **options
    ) -> "MultiLane":
        """A model of the lanes in these files, in their order, with the config they carry."""
        paths = list(paths)
        if not paths:
            raise ValueError("from_files got no files: name at least one lane file.")
        model = cls(backbone, read_lane(paths[0])[0]["config"], **options)
        model.load_lanes(paths)
        return model

    # From images to logits --------------------------------------------------------------------

    def forward(self, images: Tensor, lane: int | None = None, return_cls: bool = False):
        """Logits of all lanes, concatenated [B,C], or of one lane [B,|Y_t|].

        images [B,3,height,width]: floats, prepared as the backbone wants them. With return_cls,
        also the frozen [CLS] after the final norm [B,D], which `key_loss` takes.
        """
        x = embed(self.backbone, self._checked(images))
        lanes = list(self.lanes) if lane is None else [self._lane(lane)]
        literal = self.impl == "reference" or not self.config.drop_replace
        want_cls = return_cls or not lanes or (lane is None and not self.config.pathways)
        if self.impl == "triton":
            self._insist_on_kernel(x)
        if literal or not lanes:
            stream, cls = frozen_stream(self.backbone, x, cls=want_cls)
            c = [reference_lane(self.backbone, module, stream) for module in lanes]
            c = torch.stack(c, 1) if c else x[:, :0]  # [B,T,D]
        elif torch.is_grad_enabled():
            stream, cls = frozen_stream(self.backbone, x, keys=True, cls=want_cls)
            c = parallel_lanes(self.backbone, self.config, self._stack(lanes), stream)
        else:
            c, cls = self._ride(lanes, x, want_cls)
        logits = self._heads(c, cls, lanes, lane is None)
        return (logits, cls) if return_cls else logits

    @torch.no_grad()
    def stream(self, images: Tensor) -> FrozenStream:
        """The frozen stream of these images, for `forward_stream`: no lane can ever change it."""
        x = embed(self.backbone, self._checked(images))
        stream, cls = frozen_stream(self.backbone, x)
        return FrozenStream(torch.stack([block.g for block in stream]), cls)

    def forward_stream(self, stream: FrozenStream, lane: int | None = None) -> Tensor:
        """As `forward`, from a kept frozen stream in place of the images (identity vi)."""
        lanes = list(self.lanes) if lane is None else [self._lane(lane)]
        dtype = self.backbone.cls_token.dtype
        blocks = [BlockStream(g.to(dtype)) for g in stream.g]
        if not lanes:
            return blocks[0].g[:, 0, :0]
        if self.config.drop_replace:
            c = parallel_lanes(self.backbone, self.config, self._stack(lanes), blocks)
        else:
            c = torch.stack([reference_lane(self.backbone, m, blocks) for m in lanes], 1)
        return self._heads(c, stream.cls.to(dtype), lanes, lane is None)

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
        vit = self.backbone
        stream, _ = frozen_stream(vit, embed(vit, self._checked(images)), cls=False)
        path = self._stack(list(self.lanes)).path[: None if self.config.drop_replace else 1]
        maps = [look(s, block.g).softmax(-1) for s, block in zip(path, stream)]  # [B,T,S,N] each
        maps = torch.stack(maps, 2)[..., vit.num_prefix_tokens :]  # [B,T,L,S,patches]
        return maps.unflatten(-1, vit.patch_embed.dynamic_feat_size(tuple(images.shape[-2:])))

    def _heads(self, c: Tensor, cls: Tensor | None, lanes: list[Lane], choose: bool) -> Tensor:
        """The lanes' last [CLS] tokens [B,T,D] -> logits [B,C]."""
        if not lanes:
            return c.flatten(1)  # [B,0]
        c = final_norm(self.backbone, c)
        if self.config.pre_head_norm:
            c = F.normalize(c, dim=-1)
        if choose and not self.config.pathways:  # one pathway: the nearest key's lane feeds all
            keys = torch.stack([lane.key for lane in lanes])  # [T,D]
            nearest = F.cosine_similarity(cls[:, None], keys, dim=-1).argmax(-1)  # [B]
            c = c[torch.arange(len(c), device=c.device), nearest].unsqueeze(1).expand_as(c)
        return torch.cat([lane.head(c[:, t]) for t, lane in enumerate(lanes)], -1)

    def _ride(self, lanes: list[Lane], x: Tensor, want_cls: bool) -> tuple[Tensor, Tensor | None]:
        """Inference by `riding_lanes`, with the kernel where it is chosen and works."""
        args = self.backbone, self.config, self._stack(lanes)
        step = mix_triton if self.impl == "triton" else mix
        if self.impl == "auto" and self._kernel_is_for(x):
            key = (x.device, x.dtype, torch.is_autocast_enabled(x.device.type), len(lanes) == 1)
            if key not in self._kernel_works:  # first time: a small batch both ways
                self._kernel_works[key] = kernel_agrees(*args, x[:2])
            step = mix_triton if self._kernel_works[key] else mix
        return riding_lanes(*args, x, want_cls, step)

    def _kernel_is_for(self, x: Tensor) -> bool:
        """Whether "auto" should try the kernel; torch.compile fuses the parallel path by itself."""
        return (
            triton is not None
            and x.is_cuda
            and not self.config.token_merging
            and not torch.compiler.is_compiling()
        )

    def _insist_on_kernel(self, x: Tensor) -> None:
        why = None
        if triton is None:
            why = "triton is not installed"
        elif torch.is_grad_enabled():
            why = "the kernel has no backward, so call it under torch.no_grad()"
        elif self.config.token_merging or not self.config.drop_replace:
            why = "there is no kernel for lanes without selectors or without Drop & Replace"
        elif not x.is_cuda and not os.environ.get("TRITON_INTERPRET") == "1":
            why = f"the images are on {x.device.type} and the kernel runs on a GPU"
        if why:
            raise RuntimeError(f'impl="triton" cannot run: {why}; impl="auto" chooses by itself.')

    def _stack(self, lanes: list[Lane]) -> LaneStack:
        """`stack_lanes`, kept from call to call where no gradient is wanted.

        Kept values are used only while every number that they were made of is the same: lanes
        are compared by content, so even an edit behind autograd's back is seen; the backbone,
        which is frozen, by the place and version of its tensors.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return stack_lanes(self.backbone, lanes)
        now = [p.detach().flatten() for lane in lanes for p in (lane.selectors, lane.prompts)]
        now = torch.cat(now)
        key = (now.device, now.dtype, now.shape, _versions(self.backbone, "data_ptr"))
        kept = self._stacks.get(len(lanes) == 1)
        if kept and kept[0] == key and (now.is_meta or torch.equal(kept[1], now)):
            return kept[2]
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
        """SHA-256 of the backbone's weights as they were given, before any change of dtype."""
        versions = _versions(self.backbone)
        if self._print is None or self._print[0] != versions:
            digest = hashlib.sha256()
            for name, p in sorted(self.backbone.state_dict().items()):
                if not name.startswith("head"):  # the ImageNet classifier is never used
                    digest.update(f"{name} {tuple(p.shape)} {p.dtype}".encode())
                    if not p.is_meta:
                        digest.update(p.detach().cpu().reshape(-1).view(torch.uint8).numpy())
            self._print = (versions, digest.hexdigest())
        return self._print[1]

    # Checks -----------------------------------------------------------------------------------

    def _lane(self, lane: int) -> Lane:
        if not isinstance(lane, int) or not 0 <= lane < len(self.lanes):
            raise IndexError(f"There is no lane {lane!r}: this model has {len(self.lanes)} lanes.")
        return self.lanes[lane]

    def _new_classes(self, classes, seen: Sequence[str] = (), where="add_lane") -> list[str]:
        if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
            raise TypeError(f"{where}: classes must be a list of names, not {classes!r}.")
        classes = list(classes)
        if not classes:
            raise ValueError(f"{where}: a lane needs at least one class.")
        taken = set(self.classes) | set(seen)
        for index, name in enumerate(classes):
            if name in taken or name in classes[:index]:
                raise ValueError(f"{where}: class {name!r} is there already; each has one lane.")
        return classes

    def _checked(self, images: Tensor) -> Tensor:
        if not isinstance(images, Tensor) or images.ndim != 4:
            shape = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise ValueError(f"images must be a tensor [B,3,height,width], not {shape}.")
        if not images.is_floating_point():
            raise TypeError(f"images are {images.dtype}: give floats, such as images / 255.")
        if not len(images):
            raise ValueError("images is an empty batch: give at least one image.")
        patches = self.backbone.patch_embed
        size, channels = tuple(images.shape[-2:]), patches.proj.weight.shape[1]
        if images.shape[1] != channels:
            raise ValueError(f"images have {images.shape[1]} channels: the backbone takes {channels}.")
        if not getattr(self.backbone, "dynamic_img_size", False):
            if size != tuple(patches.img_size):
                raise ValueError(
                    f"images are {size[0]}x{size[1]} pixels: the backbone takes "
                    f"{patches.img_size[0]}x{patches.img_size[1]}; resize them, or build it with "
                    "img_size= or dynamic_img_size=True."
                )
        elif not patches.dynamic_img_pad and any(n % p for n, p in zip(size, patches.patch_size)):
            raise ValueError(
                f"images are {size[0]}x{size[1]} pixels: sides must be multiples of the backbone's "
                f"patch size {patches.patch_size[0]}x{patches.patch_size[1]}."
            )
        return images.to(self.backbone.cls_token.dtype)


LANE_FORMAT = "multilane lane 1"


def read_lane(path: str | os.PathLike) -> tuple[dict, dict[str, Tensor]]:
    """What a lane file says of itself (config, classes, backbone, fingerprint), and its tensors.

    Nothing in the file can run code, and anything that is not a whole, finite lane is refused.
    """
    from safetensors import SafetensorError, safe_open

    if not os.path.isfile(path):
        raise FileNotFoundError(f"There is no lane file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            info = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}): it is cut off or of another kind; "
            "copy it again or save the lane again."
        ) from None
    if info.get("format") != LANE_FORMAT:
        raise ValueError(f"{path} is a safetensors file, but not a lane made by save_lane.")
    try:
        config = LaneConfig(**json.loads(info["config"]))
        info = dict(info, config=config, classes=json.loads(info["classes"]))
        info["backbone"], info["fingerprint"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is a lane with an unreadable description: {error}.") from None
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(
                f"{path} is spoiled: {name} holds numbers that are not finite; take an earlier copy."
            )
    return info, tensors


def kernel_agrees(vit, config, stack, x: Tensor) -> bool:
    """Whether the kernel compiles on this device and gives what the parallel path gives."""
    c, _ = riding_lanes(vit, config, stack, x)
    try:
        by_kernel, _ = riding_lanes(vit, config, stack, x, mix=mix_triton)
        error = float((by_kernel - c).abs().max() / c.abs().max())
        allowed = 1e-3 if c.dtype == torch.float32 and not torch.is_autocast_enabled() else 5e-2
        problem = None if error <= allowed else f"it is off by {error:.1e}"
    except Exception as failure:  # a compiler or driver may raise anything
        problem = f"{type(failure).__name__}: {failure}"
    if problem:
        warnings.warn(f"The GPU kernel is not used on {x.device}, the parallel path is: {problem}.")
    return problem is None


def _versions(vit: nn.Module, *also: str) -> tuple:
    """Changes whenever a weight of the backbone is written or replaced."""
    return tuple(
        (id(p), 0 if p.is_inference() else p._version, *(getattr(p, name)() for name in also))
        for p in vit.parameters()
    )


def _name_of(vit: nn.Module) -> str:
    """timm's full name of a backbone object, or its class's."""
    known = getattr(vit, "pretrained_cfg", None) or {}
    name, tag = known.get("architecture"), known.get("tag")
    return f"{name}.{tag}" if name and tag else name or type(vit).__name__
