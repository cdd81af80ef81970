"""One rank measures, and all ranks plan with its measurements."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import StateError


class Ranks:
    """The ranks of a group, the first of which measures; `None` is the default group, if there is one."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self.first = not self.several or dist.get_rank(group) == 0
        self._group = group
        if self.several:
            self._from = dist.get_global_rank(group, 0) if group is not None else 0
            self._device = device if dist.get_backend(group) == "nccl" else torch.device("cpu")

    def send(self, found: Any) -> None:
        """Send measurements, or the error that ended the search, from the first rank to the others.

        `None` says that it still measures, so that they do not time out.
        """
        if self.several and self.first:
            self._broadcast(found)

    def receive(self) -> Any:
        """Receive from the first rank; raises if it failed."""
        while (found := self._broadcast(None)) is None:
            pass
        if isinstance(found, str):
            raise StateError(f"the first rank could not tune: {found}", code="SF504")
        return found

    def _broadcast(self, found: Any) -> Any:
        box = [found]
        dist.broadcast_object_list(box, self._from, self._group, self._device)
        return box[0]
