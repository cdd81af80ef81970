"""What a region's plan is bound with: what its tensors are like where they enter, and how their dtypes change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..env import Env
from .check import Like
from .inputs import clearer, dtypes_of
from .listing import Listing, Region
from .plan import Wants
from .program import Binder


def binder_of(
    listing: Listing,
    region: Region,
    x: Tensor,
    channels: Mapping[str, Tensor],
    parameters: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    wants: Wants,
    env: Env,
    on_error: str,
    note: Callable[[], Callable[[str, int, str], None] | None],
) -> Binder:
    """The binder of a region for the tensors that enter it; `shapes` are those at its positions."""
    # The region holds what is bound here, which therefore holds neither it nor its listing.
    about = listing.items, listing.random, range(region.start, region.stop)
    dtypes = None
    if env.autocast is not None or any(
        t.dtype is not x.dtype for t in (*parameters, *(channels[c] for c in region.channels))
    ):
        dtypes = dtypes_of(*about, x, channels)
    named = zip(region.slots, parameters, strict=True)
    likes = {(id(owner), name): Like.of(p) for (owner, name), p in named}
    entering = {region.start + i: Like(torch.Size(s), x.dtype, x.device) for i, s in enumerate(shapes)}
    channel_likes = {c: Like.of(channels[c]) for c in region.channels}

    @functools.cache
    def dtypes_now() -> list[torch.dtype | None]:
        blank = {c: like.empty() for c, like in channel_likes.items()}
        return dtypes_of(*about, entering[about[2].start].empty(), blank)

    clear = functools.partial(clearer, listing.items)
    can_fall_back = on_error == "fallback"
    return Binder(listing, wants, env, dtypes, can_fall_back, likes, entering, dtypes_now, clear, note)
