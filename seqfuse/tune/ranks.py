"""One rank measures, all ranks plan by what it found."""

from __future__ import annotations

import json
from typing import Any, cast

import torch
import torch.distributed as dist

from ..errors import StateError


class Ranks:
    """The ranks of a group, the first of which measures; without a group, this process alone.

    Args:
        group: a process group; the default one, if there is one, where it is `None`.
        device: of the tensors that are sent, where the backend sends nothing else.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self.first = not self.several or dist.get_rank(group) == 0
        self._group = group
        if self.several:
            self._from = dist.get_global_rank(group, 0) if group is not None else 0
            self._device = device if dist.get_backend(group) == "nccl" else torch.device("cpu")

    def beat(self) -> None:
        """Tell the other ranks that this one still measures, before they give it up."""
        if self.several and self.first:
            self._length(0)

    def send(self, document: dict[str, Any]) -> None:
        """Send what was found, or the error that ended the search, to the other ranks."""
        if self.several and self.first:
            data = bytearray(json.dumps(document).encode())
            self._length(len(data))
            self._broadcast(torch.frombuffer(data, dtype=torch.uint8).to(self._device))

    def receive(self) -> dict[str, Any]:
        """What the first rank sends.

        Raises:
            StateError: (SF504) if it failed.
        """
        while (length := self._length(0)) == 0:
            pass
        data = self._broadcast(torch.empty(length, dtype=torch.uint8, device=self._device))
        document: dict[str, Any] = json.loads(
            bytes(cast(list[int], data.tolist()))  # pyright: ignore[reportUnknownMemberType]
        )
        if "error" in document:
            raise StateError(f"the first rank could not tune: {document['error']}", code="SF504")
        return document

    def _length(self, length: int) -> int:
        return int(self._broadcast(torch.tensor([length], dtype=torch.int64, device=self._device)).item())

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, self._from, group=self._group)
        return tensor
