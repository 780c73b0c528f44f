"""What else one could do with the same frozen ViT: the methods that the paper compares with.

Read after multilane.py. None of them keeps an image of an old task. Each is a MultiLane in what a
trainer sees (`add_lane`, `lane_parameters`, `forward`, `key_loss`, `save_lane`, `load_lanes`), and
differs in what a lane is and in the way from images to logits: here a lane is what one task adds.
`python train.py --method NAME` runs one.

    probe        heads on the frozen [CLS]                               one plain forward pass
    finetune     one lane, trained on by task after task                 as one lane of MULTI-LANE
    naive        a full pathway for each task, nothing summarized        T forward passes
    l2p          prompts chosen from a pool, as tokens                   2 passes: query, answer
    dualprompt   a prompt for all tasks, and one for each, chosen        2 passes
    coda-p       a weighted sum of all prompts                           2 passes

The last three share the first pass: the frozen [CLS] of the image is the query [B,D] that says
which prompts the second pass gets. An image with classes of several tasks has but one query, and
that is what MULTI-LANE does away with.
"""

import math
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multilane import (
    LaneConfig,
    MultiLane,
    embed,
    final_norm,
    finish,
    frozen_attention,
    frozen_stream,
    project,
)

# ---------------------------------------------------------------------------------------------
# 1. What they are made of


class TaskHead(nn.Module):
    """A linear head for the classes of one task, and what else the task trains, by name."""

    statistics = None  # these methods have no readout

    def __init__(self, classes: Sequence[str], config: LaneConfig, vit: nn.Module, **more: Tensor):
        super().__init__()
        self.classes, self.config = tuple(classes), config
        self.head = nn.Linear(vit.embed_dim, len(self.classes))
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        for name, start in more.items():
            setattr(self, name, nn.Parameter(start))
        self.to(vit.cls_token)


class Baseline(MultiLane):
    """Tasks with parameters of their own, and `shared` ones that every task trains on.

    What is shared is one and the same Parameter in all lanes. So a lane's file holds it as it was
    after that lane's training, and a model of several files has it from the last of them.
    """

    shared: tuple[str, ...] = ()

    def add_lane(self, classes: Sequence[str], warm_start: bool = False) -> int:
        """Add a task and return its index; what is shared goes on from where it is."""
        self.lanes.append(self._new_lane(self._new_classes(classes, self.classes, "add_lane")))
        self._share(self.lanes[max(0, len(self.lanes) - 2)])
        return len(self.lanes) - 1

    def load_lanes(self, paths: Iterable[str | PathLike]) -> None:
        """What is a task's own from each file, what is shared from the last one."""
        super().load_lanes(paths)
        if len(self.lanes):
            self._share(self.lanes[-1])

    def _share(self, source: nn.Module) -> None:
        for lane in self.lanes:
            for name in self.shared:
                setattr(lane, name, getattr(source, name))


def run_blocks(vit: nn.Module, x: Tensor, prefixes: Sequence[Tensor] = ()) -> Tensor:
    """All blocks of the frozen ViT over x [B,M,D] -> [B,M,D], open to gradients of what is trained.

    Prefix tuning: prefixes[l] [2,B,P,H,d] ([2,1,P,H,d]: the same for all images) goes before the
    keys and the values of block l. The blocks that are left have none.
    """
    if len(prefixes) > len(vit.blocks):
        raise ValueError(f"Prompts for {len(prefixes)} blocks: the ViT has only {len(vit.blocks)}.")
    for index, block in enumerate(vit.blocks):
        q, k, v = project(block.attn, block.norm1(x))  # [B,M,H,d]
        if index < len(prefixes):
            prefix_k, prefix_v = prefixes[index].expand(-1, len(x), -1, -1, -1).to(k)  # [B,P,H,d]
            k, v = torch.cat([prefix_k, k], 1), torch.cat([prefix_v, v], 1)  # [B,P+M,H,d]
        x = finish(block, x, frozen_attention(q, k, v))
    return x


class Prompted(Baseline):
    """L2P, DualPrompt and CODA-P: a query from a first, frozen pass; prompts for the second."""

    def forward(self, images: Tensor, lane: int | None = None, return_cls: bool = False):
        """Logits of all tasks [B,C], or of one [B,|Y_t|] as in its training.

        images [B,3,height,width]. With return_cls, also the query [B,D], which `key_loss` takes.
        """
        x = embed(self.backbone, self._checked(images))  # [B,N,D]
        with torch.no_grad():
            query = final_norm(self.backbone, run_blocks(self.backbone, x)[:, 0])  # [B,D]
        c = self._features(x, query.to(self.backbone.cls_token), lane)  # [B,D]
        logits = torch.cat([task.head(c) for task in self._pick(lane)], -1)
        return (logits, query) if return_cls else logits

    def _features(self, x: Tensor, query: Tensor, lane: int | None) -> Tensor:
        """What the heads see [B,D], from the embedded tokens x [B,N,D] and the query [B,D]."""
        prefixes = self._prefixes(query, lane)
        return final_norm(self.backbone, run_blocks(self.backbone, x, prefixes)[:, 0])

    def _prefixes(self, query: Tensor, lane: int | None) -> Sequence[Tensor]:
        """The prompts of the first blocks [2,B,P,H,d], for `run_blocks`."""
        raise NotImplementedError

    def _prefix_shape(self, length: int) -> tuple[int, ...]:
        """A prompt of this length, half before the keys and half before the values."""
        attn = self.backbone.blocks[0].attn
        width, H = attn.qkv.out_features // 3, attn.num_heads
        return 2, length // 2, H, width // H  # [2,P,H,d]


def likeness(query: Tensor, keys: Tensor) -> Tensor:
    """Cosine of every query [B,D] with every key [M,D] -> [B,M]; not rounded by autocast."""
    return F.cosine_similarity(query[:, None], keys, dim=-1)


def uniform(*shape: int) -> Tensor:
    """As the prompts and keys of L2P and DualPrompt start."""
    return torch.rand(shape) * 2 - 1


# ---------------------------------------------------------------------------------------------
# 2. The simplest: nothing but heads, one lane for all tasks, a whole ViT for each task


class Probe(Baseline):
    """A linear probe: a head for each task on the frozen [CLS], and nothing else is learned."""

    def _new_lane(self, classes: Sequence[str]) -> nn.Module:
        return TaskHead(classes, self.config, self.backbone)

    def forward(self, images: Tensor, lane: int | None = None) -> Tensor:
        """Logits of all tasks [B,C], or of one, for images [B,3,height,width]."""
        _, cls = frozen_stream(self.backbone, embed(self.backbone, self._checked(images)))
        return self.forward_stream(None, cls, lane)

    def forward_stream(self, g: Tensor | None, cls: Tensor, lane: int | None = None) -> Tensor:
        """The same from a kept [CLS] [B,D]; the rest of the frozen stream is not read."""
        return torch.cat([task.head(cls) for task in self._pick(lane)], -1)


class FineTune(Baseline):
    """One lane, trained on by task after task: what is shared is overwritten, and so forgotten.

    Each task has a head of its own, on a pathway that has changed since the head was trained.
    """

    shared = ("selectors", "prompts")


class Naive(MultiLane):
    """The paper's "naive multiple pathways", without summaries: T tasks are T passes of the ViT.

    A task has the prompts and the head of a lane, but in place of summaries it has the image's
    own tokens, which run through all blocks under its prompts. What it says never changes.
    """

    def _new_lane(self, classes: Sequence[str]) -> nn.Module:
        lane = super()._new_lane(classes)
        lane.selectors = nn.Parameter(lane.selectors.detach()[:0])  # [0,D]: nothing to summarize
        return lane

    def forward(self, images: Tensor, lane: int | None = None) -> Tensor:
        """Logits of all tasks [B,C], or of one, for images [B,3,height,width]."""
        x, c = embed(self.backbone, self._checked(images)), []  # [B,N,D]
        for task in self._pick(lane):
            prefixes = task.prompts.transpose(2, 3).unsqueeze(2)  # [blocks,2,1,P,H,d]
            c.append(run_blocks(self.backbone, x, prefixes)[:, 0])  # [B,D]
        return self._heads(torch.stack(c, 1), None, self._pick(lane), choose=False)


# ---------------------------------------------------------------------------------------------
# 3. The published prompt methods


class L2P(Prompted):
    """Learning to Prompt for Continual Learning (Wang et al., CVPR 2022).

    One pool of prompts for all tasks, each with a key. The prompts whose keys are most like the
    query are put before the image's tokens as further tokens, and the heads see the mean of what
    becomes of them. Sizes as published for CIFAR-100.
    """

    shared = ("pool", "keys")
    pool_size, length, chosen = 10, 5, 5  # M, L_p, N of the paper
    key_weight = 0.5  # lambda

    def _new_lane(self, classes: Sequence[str]) -> nn.Module:
        D, M = self.backbone.embed_dim, self.pool_size
        start = {"pool": uniform(M, self.length, D), "keys": uniform(M, D)}
        return TaskHead(classes, self.config, self.backbone, **start)

    def _features(self, x: Tensor, query: Tensor, lane: int | None) -> Tensor:
        shared = self.lanes[-1]
        # K_x = argmin over N keys of sum_i gamma(q(x), k_i): nobody tells the task, not even here.
        best = likeness(query, shared.keys).topk(self.chosen).indices  # [B,chosen]
        prompts = shared.pool[best].flatten(1, 2).to(x)  # [B,chosen*length,D]
        x = run_blocks(self.backbone, torch.cat([prompts, x], 1))  # [B,chosen*length+N,D]
        return final_norm(self.backbone, x[:, : prompts.shape[1]]).mean(1)

    def key_loss(self, cls: Tensor, lane: int) -> Tensor:
        """lambda sum_i gamma(q(x), k_i) over the chosen keys: pulls them to the queries cls [B,D]."""
        nearest = likeness(cls, self._lane(lane).keys).topk(self.chosen).values  # [B,chosen]
        return -self.key_weight * nearest.sum(1).mean()


class DualPrompt(Prompted):
    """DualPrompt: Complementary Prompting for Rehearsal-free Continual Learning (Wang et al., ECCV
    2022).

    A general (G) prompt, on which all tasks train, in blocks 1 and 2; an expert (E) prompt for each
    task in blocks 3 to 5. Training takes the task's own, testing the one whose key is nearest.
    Published lengths are 5 and 20; half of a length is for the keys, so G has 6.
    """

    shared = ("general",)
    general_blocks, general_length = 2, 6
    expert_blocks, expert_length = 3, 20

    def _new_lane(self, classes: Sequence[str]) -> nn.Module:
        general = uniform(self.general_blocks, *self._prefix_shape(self.general_length))
        expert = uniform(self.expert_blocks, *self._prefix_shape(self.expert_length))
        start = {"general": general, "expert": expert, "key": uniform(self.backbone.embed_dim)}
        return TaskHead(classes, self.config, self.backbone, **start)

    def _prefixes(self, query: Tensor, lane: int | None) -> Sequence[Tensor]:
        if lane is None:
            keys = torch.stack([task.key for task in self.lanes])  # [T,D]
            experts = torch.stack([task.expert for task in self.lanes])  # [T,3,2,P,H,d]
            expert = experts[likeness(query, keys).argmax(1)]  # [B,3,2,P,H,d]
        else:
            expert = self._lane(lane).expert[None]  # [1,3,2,P,H,d]
        general = self.lanes[-1].general.unsqueeze(2)  # [2,2,1,P,H,d]
        return [*general, *expert.permute(1, 2, 0, 3, 4, 5)]

    def key_loss(self, cls: Tensor, lane: int) -> Tensor:
        """gamma(q(x), k_t): pulls the task's key to the queries cls [B,D] of the task's images."""
        return -likeness(cls, self._lane(lane).key[None]).mean()


def orthogonality(rows: Tensor) -> Tensor:
    """L(B) of CODA-P: how far rows [...,M,D] are from orthonormal, the mean square of B B^T - I."""
    return (rows @ rows.mT - torch.eye(rows.shape[-2]).to(rows)).square().mean()


class CodaPrompt(Prompted):
    """CODA-Prompt: COntinual Decomposed Attention-based Prompting (Smith et al., CVPR 2023).

    A prompt is a sum of components, weighted by how well the query fits them, in blocks 1 to 5,
    length 8. Every task adds components and trains only those; older ones go on to be summed.
    Published are 100 components in all, for 10 tasks. How many tasks will come is not known here,
    so each adds 10.
    """

    blocks, length, components = 5, 8, 10
    orthogonal_weight = 0.1  # lambda

    def _new_lane(self, classes: Sequence[str]) -> nn.Module:
        D, M, shape = self.backbone.embed_dim, self.components, self._prefix_shape(self.length)
        start = {}
        for name, width in (("prompts", math.prod(shape)), ("keys", D), ("attention", D)):
            start[name] = torch.stack(
                [nn.init.orthogonal_(torch.empty(M, width)) for _ in range(self.blocks)]
            )  # [blocks,M,width]
        start["prompts"] = start["prompts"].unflatten(2, shape)  # [blocks,M,2,P,H,d]
        return TaskHead(classes, self.config, self.backbone, **start)

    def _components(self, lane: int | None) -> list[Tensor]:
        """P [blocks,M,2,P,H,d], K and A [blocks,M,D] of all tasks, or of those up to one in
        training, where only its own are open to gradients."""
        old = [] if lane is None else list(self.lanes[:lane])
        new = self.lanes if lane is None else [self._lane(lane)]
        return [
            torch.cat([getattr(t, name).detach() for t in old] + [getattr(t, name) for t in new], 1)
            for name in ("prompts", "keys", "attention")
        ]

    def _prefixes(self, query: Tensor, lane: int | None) -> Sequence[Tensor]:
        prefixes = []
        for P, K, A in zip(*self._components(lane), strict=True):  # a block at a time
            # alpha = gamma(q(x) * A, K): A says which features of the query a component minds.
            alpha = F.cosine_similarity(query[:, None] * A, K, dim=-1)  # [B,M]
            # p = sum_m alpha_m P_m
            prefixes.append(torch.einsum("bm,mkphd->kbphd", alpha, P))  # [2,B,P,H,d]
        return prefixes

    def key_loss(self, cls: Tensor, lane: int) -> Tensor:
        """lambda (L(P) + L(K) + L(A)): each block's components do not repeat each other."""
        loss = sum(orthogonality(rows.flatten(2)) for rows in self._components(lane))
        return self.orthogonal_weight * loss


# ---------------------------------------------------------------------------------------------
# 4. What a trainer must know of each

LANE_FLAGS = ("selectors", "prompts", "prompt_blocks")


class Method(NamedTuple):
    """What a trainer must know of a method."""

    model: type[MultiLane]
    independent: bool = True  # what is said of a task's classes never changes after its training
    on_stream: bool = True  # reads nothing but the frozen stream, which can be kept
    key_loss: bool = False  # has a loss besides that of the labels
    flags: tuple[str, ...] = LANE_FLAGS  # settings of a lane that it has
    warm_start: bool = True  # may start from the lane before


# What these three have in common: later tasks change what is said of the older ones' classes.
PROMPTED = {"independent": False, "on_stream": False, "key_loss": True, "flags": ()}
PROMPTED |= {"warm_start": False}

METHODS = {
    "multilane": Method(MultiLane),
    "joint": Method(MultiLane, warm_start=False),  # upper bound: one lane, all labels at once
    "finetune": Method(FineTune, independent=False, warm_start=False),
    "probe": Method(Probe, flags=(), warm_start=False),
    "naive": Method(Naive, on_stream=False, flags=("prompts", "prompt_blocks")),
    "l2p": Method(L2P, **PROMPTED),
    "dualprompt": Method(DualPrompt, **PROMPTED),
    "coda-p": Method(CodaPrompt, **PROMPTED),
}
