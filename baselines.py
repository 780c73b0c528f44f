"""What else one could do with the same frozen ViT: the methods that the paper compares with.

Read after multilane.py. None of them keeps an image of an old task. Each is a MultiLane in what a
trainer sees (`add_lane`, `lane_parameters`, `forward`, `save_lane`, `load_lanes`), and differs in
what a lane is and in the way from images to logits. `python train.py --method NAME` runs one.
"""

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import NamedTuple

import torch
from torch import Tensor, nn

from multilane import LaneConfig, MultiLane, embed, frozen_stream


class TaskHead(nn.Module):
    """A linear head for the classes of one task."""

    def __init__(self, classes: Sequence[str], config: LaneConfig, vit: nn.Module):
        super().__init__()
        self.classes, self.config = tuple(classes), config
        self.head = nn.Linear(vit.embed_dim, len(self.classes))
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        self.to(vit.cls_token)


class Probe(MultiLane):
    """A linear probe: a head for each task on the frozen [CLS], and nothing else is learned."""

    def _new_lane(self, classes: Sequence[str]) -> nn.Module:
        return TaskHead(classes, self.config, self.backbone)

    def add_lane(self, classes: Sequence[str], warm_start: bool = False) -> int:
        self.lanes.append(self._new_lane(self._new_classes(classes, self.classes, "add_lane")))
        return len(self.lanes) - 1

    def forward(self, images: Tensor, lane: int | None = None) -> Tensor:
        """Logits of all tasks [B,C], or of one, for images [B,3,height,width]."""
        _, cls = frozen_stream(self.backbone, embed(self.backbone, self._checked(images)))
        return self.forward_stream(None, cls, lane)

    def forward_stream(self, g: Tensor | None, cls: Tensor, lane: int | None = None) -> Tensor:
        """The same from a kept [CLS] [B,D]; the rest of the frozen stream is not read."""
        return torch.cat([task.head(cls) for task in self._pick(lane)], -1)


class FineTune(MultiLane):
    """One lane, trained on by task after task: what is shared is overwritten, and so forgotten.

    Each task has a head of its own, on a pathway that has changed since the head was trained.
    """

    shared = ("selectors", "prompts")

    def add_lane(self, classes: Sequence[str], warm_start: bool = True) -> int:
        lane = super().add_lane(classes, warm_start)
        self._share()
        return lane

    def load_lanes(self, paths: Iterable[str | PathLike]) -> None:
        """Heads from each file, the pathway from the last one."""
        super().load_lanes(paths)
        self._share()

    def _share(self) -> None:
        for lane in self.lanes:
            for name in self.shared:
                setattr(lane, name, getattr(self.lanes[-1], name))


LANE_FLAGS = ("selectors", "prompts", "prompt_blocks")


class Method(NamedTuple):
    """What a trainer must know of a method."""

    model: type[MultiLane]
    independent: bool = True  # what is said of a task's classes never changes after its training
    on_stream: bool = True  # reads nothing but the frozen stream, which can be kept
    key_loss: bool = False  # has a loss besides that of the labels
    flags: tuple[str, ...] = LANE_FLAGS  # settings of a lane that it has
    warm_start: bool = True  # may start from the lane before


METHODS = {
    "multilane": Method(MultiLane),
    "joint": Method(MultiLane, warm_start=False),  # upper bound: one lane, all labels at once
    "finetune": Method(FineTune, independent=False, warm_start=False),
    "probe": Method(Probe, flags=(), warm_start=False),
}
