"""Reasons why a fusion does not apply: dtypes that change inside it, and channels that cross its border."""

from __future__ import annotations

from collections.abc import Sequence

from ..fusion import ForwardFusion, FusedOperation
from .flatten import Node
from .inputs import Border


def refuses_dtypes(cls: type[FusedOperation], nodes: Sequence[Node], a: int, around: Sequence[Border]) -> str | None:
    """Why no fusion of a class applies where dtypes change between its operations."""
    if cls.kernels and any(border.taken is None for border in around):
        return "the dtypes here are not known before a call: an operation states no class of autocast"
    for position, border in enumerate(around[1:-1], a + 1):
        if border.cast is not None and not cls.casts:
            return f"x is cast to {str(border.cast).removeprefix('torch.')} inside it, before {nodes[position].name}"
    return None


def refuses_channels(fusion: FusedOperation, nodes: Sequence[Node], a: int, b: int, dead: bool) -> str | None:
    """Channels that cross the fusion's border must be named in its signatures."""
    if not any(node.inputs or node.outputs for node in nodes[a:b]):
        return None
    places = [name.replace(".", "_") for name, _ in fusion.named_operations()]
    inside = {channel for node in nodes[a:b] for _, channel in node.outputs}
    forward, backward = fusion.forward_signature.extras, fusion.backward_signature.extras
    made = False
    for place, node in zip(places, nodes[a:b], strict=True):
        for name, channel in node.inputs:
            full = f"{place}_{name}"
            if not fusion.replaces_forward and (channel in inside) != made:
                # It has no fwd to name the input in: the pattern says where it comes from, by what stands before it.
                return f"the extra input {full} {'comes' if channel in inside else 'does not come'} from inside it"
            if fusion.replaces_forward and (channel in inside) == (full in forward):
                side = "comes from inside it" if channel in inside else "is not in the signature of its fwd"
                return f"the extra input {full} {side}"
        made = made or bool(node.outputs)
        for name, channel in node.outputs:
            full = f"{place}_{name}"
            readers = nodes[a].readers[channel]
            if readers and readers <= set(range(a, b)):
                continue
            needs_dy = not getattr(node.operation, "dy_may_be_none", False)
            if isinstance(fusion, ForwardFusion) and needs_dy and not dead and node is not nodes[b - 1]:
                return f"{node.name} needs a gradient of its y, whose shape is not kept where its {full} alone is used"
            if fusion.replaces_forward and full not in fusion.outputs:
                return f"the extra output {full} is read elsewhere and is not among its outputs"
            if fusion.replaces_backward and not dead and f"d_{full}" not in backward:
                return f"the gradient d_{full} arrives from elsewhere and is not in the signature of its bwd"
    return None
