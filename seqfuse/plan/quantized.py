"""The quantized operations of a sequence, their recipes, and why others are not quantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..env import Env, constant_under_compile, short
from ..errors import InputError
from ..fake import is_fake
from ..group import ParameterShard
from ..hardware import capability
from ..recipes import MULTIPLE, Float8CurrentScaling, Recipe, current
from .flatten import Node, located

_QUANTIZED = (torch.float32, torch.bfloat16, torch.float16)


class Unquantized(NamedTuple):
    """An operation that stays in the dtype of its input although it has a recipe: its position, and the reason."""

    at: int
    recipe: Recipe
    reason: str


class Quantization(NamedTuple):
    """A quantized operand, `"x"`, `"weight"` or `"dy"`, of the operation at a position, and its format.

    `inside` names the step whose kernel also quantizes; `None` for a separate pass.
    """

    at: int
    role: str
    format: str
    scaling: str
    inside: str | None = None


def recipe_at(
    nodes: Sequence[Node], position: int, dtype: torch.dtype | None, env: Env | None, wide: bool = False
) -> Recipe | Unquantized | None:
    """The recipe of an operation for an x of a dtype; `None` where it has none.

    Without an `env` it is the recipe of its reference. With `wide` float64 is quantized, too.

    Raises:
        InputError: (SF108) where a strict recipe does not fit, or the device has no kernels for it.
    """
    node = nodes[position]
    operation: Any = node.operation
    if node.eager is not None or not (operation.forward_signature.recipe and operation.backward_signature.recipe):
        return None
    default = _now()[0] if env is None else env.recipe
    recipe: Any = None if default is False else default if node.recipe is ... else node.recipe
    if recipe is None:
        return None
    reason = f"{node.name} derives from {node.derives.__name__}" if node.derives else None
    reason = reason or _why_not(operation, recipe, dtype, wide)
    there = None if env is None or env.device in ("cpu", "meta") or recipe.emulate else env
    if reason is None and there is not None and _has_gemms(recipe, there):
        reason = operation.not_quantized(recipe, dtype, there.arch)
    if reason is not None:
        if recipe.strict:
            raise InputError(f"{recipe} is strict, and {reason}", code="SF108", **located(nodes, position))
        return Unquantized(position, recipe, reason)
    if there is not None and not _has_gemms(recipe, there):
        hint = f"sf.recipes.{recipe}(emulate=True) computes the same numbers, by GEMMs in float32"
        message = f"{recipe} has no kernels for {there.arch}" + " yet" * (not recipe.whole_rows)
        raise InputError(message, code="SF108", hint=hint, **located(nodes, position))
    return recipe


def _has_gemms(recipe: Recipe, env: Env) -> bool:
    """Whether torch has GEMMs for a recipe in an environment."""
    if env.device != "cuda" or not recipe.has_gemms(capability(env.arch)):
        return False
    cuda = torch.version.cuda  # `None` in a plan for another machine
    return recipe.whole_rows or cuda is None or tuple(map(int, cuda.split(".")[:2])) >= (12, 9)


def _why_not(operation: Any, recipe: Recipe, dtype: torch.dtype | None, wide: bool) -> str | None:
    if dtype is not None and dtype not in _QUANTIZED and not (wide and dtype is torch.float64):
        return f"{short(dtype)} is not quantized"
    for sizes in operation.gemms:
        for name, size in zip(("in_features", "out_features"), sizes, strict=True):
            if size % MULTIPLE or not size:
                return f"{name} {size} is not a multiple of {MULTIPLE}"
    if len(operation.shards):  # Dynamo does not trace the truth of a tuple
        return _straddles(operation.shards["weight"], recipe)
    return None


def _straddles(shard: ParameterShard, recipe: Recipe) -> str | None:
    """Why a shard of a weight would have other scales than the whole weight: its end must be the end of a block."""
    high, wide = recipe.block("weight", "columns" if shard.dim == 0 else "rows")
    block = high if shard.dim == 0 else wide
    if block is None:
        return "its weight is sharded over processes, which would have their own scales"
    for size in shard.parts:
        own = size // shard.group.size
        if own % block:
            return f"its weight is sharded over processes, and {own} of {size} is not a multiple of {block}"
    return None


def reference_recipe(nodes: Sequence[Node], position: int, x: Tensor) -> Recipe | None:
    """The recipe that is passed to the reference of an operation.

    Raises: InputError: (SF108) for a recipe with state, which references do not support. On tensors without data,
    outside of compilers, `Float8CurrentScaling` replaces it.
    """
    found = recipe_at(nodes, position, getattr(x, "dtype", None), None, _now()[1])  # proxies may lack a dtype
    if not isinstance(found, Recipe):
        return None
    if found.keeps_state:
        if torch.compiler.is_compiling() or not (is_fake(x) or x.is_meta) or _recorded():
            message = f"{found} keeps scales between steps, which compilers and transforms of torch do not see"
            raise InputError(message, code="SF108", **located(nodes, position))
        return Float8CurrentScaling()
    return found


def check_stateless(nodes: Sequence[Node]) -> None:
    """Raise InputError (SF108) where a compiler would trace a recipe with state."""
    for position in range(len(nodes)):
        found = recipe_at(nodes, position, None, None)
        if isinstance(found, Recipe) and found.keeps_state:
            message = f"{found} keeps scales between steps, which compilers do not see"
            raise InputError(message, code="SF108", hint="compile with another recipe", **located(nodes, position))


def _recorded() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # pyright: ignore


@constant_under_compile
def _now() -> tuple[Any, bool]:
    """The default recipe, and whether float64 is quantized; in a function since Dynamo does not trace `ContextVar`."""
    now = current.get()
    return now.default, now.wide
