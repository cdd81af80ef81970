"""Sequences of point-wise operations in one pass over memory, forward and backward: any chain, and a block's end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import saved as context
from ..env import Env, Savings
from ..fusion import BackwardFusion, ForwardFusion, JointFusion, Requirements
from ..generated import Source
from ..hardware import STEP
from ..kernels import kernels_of
from ..operation import Grads
from ..ops import Add, Bias, Dropout, Linear, Scale
from ..ops._lowprecision import as_codes, as_quantized
from ..pointwise import Pointwise
from ..quantized import Quantize, Quantized
from ..saved import Saved, maker
from ._shared import (
    act_fits,
    as_one_activation,
    bias_fits,
    device,
    gemm_fits,
    kernels_run,
    linear_of,
    output_bytes,
    own_records,
    sum_dtype,
)

if TYPE_CHECKING:
    from ..kernels.chains import Chain

Part = Pointwise | Scale | Bias | Dropout
Steps = Sequence[tuple[Any, ...]]
"""Steps of `kernels.chains`: the name and the arguments of each."""


class ChainOfParts:
    """Base of fusions of a chain of two to nine parts."""

    first: Part
    rest: tuple[Part, ...]

    kernels = ("triton", "c")

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in order."""
        return self.first, *self.rest

    def requires(self, env: Env) -> Requirements:
        """Requirements of the kernel for the parts."""
        yield from kernels_run(env)
        yield all(dtype is env.dtype for dtype in env.along), "an operation in it gives another dtype"
        for part in self.parts:
            if isinstance(part, Pointwise):
                yield from act_fits(part, env)
            elif isinstance(part, Bias):
                yield from bias_fits(part, env)
        yield len(_active(self.parts)) > 1, "only a Dropout that drops nothing here is with it"


class PointwiseChain(ChainOfParts, ForwardFusion):
    """y = f_n(... f_1(x)) in one pass: activations, constant factors, biases and dropouts in any order.

    The saved tensors of activations are rounded and written; everything else stays in float32 from x to y. Dropout
    masks are recomputed from the seeds. x, y: [*, H]. Saves the same tensors as the operations.
    """

    first: Part
    rest: tuple[Part, ...]

    def can_quantize(self, to: Quantize, env: Env) -> bool:
        last = _active(self.parts)[-1]
        return not env.grad or not isinstance(last, Pointwise) or last.reads == "input"  # which saves y

    def fwd(
        self, x: Tensor, *, seeds: tuple[Tensor | None, ...], needs: frozenset[str], to: Quantize | None = None
    ) -> Any:
        forward, parts = self.decided((bool(needs), to), self._forward, bool(needs), to)
        y, kept = forward(x, seeds)
        if not needs:
            return y
        first, *rest = map(_record, parts, kept)
        return y, {"first": first, "rest": tuple(rest)}

    def _forward(self, keep: bool, to: Quantize | None) -> tuple[ForwardPass, tuple[Part, ...]]:
        parts = self.parts
        return forward_of(parts, parts, keep, to), parts


class PointwiseChainBackward(ChainOfParts, BackwardFusion):
    """dx = f_1'(t_1) ... f_n'(t_n) dy in one pass with the gradients of biases; t are the saved tensors of activations.

    The gradient of a bias is a sum over all tokens, in float32 and a fixed order. Dropout masks are recomputed from the
    seeds. dy, dx, t: [*, H].
    """

    first: Part
    rest: tuple[Part, ...]

    layout = "any"  # its host function copies tensors with other strides

    def bwd(
        self, dy: Tensor, *, first: Any, rest: tuple[Any, ...], needs: frozenset[str], to: Quantize | None = None
    ) -> tuple[Tensor | Quantized | None, Grads]:
        records = (first, *rest)
        gradient = self.decided((needs, to), self._without_numbers, needs, to)
        if gradient is None:
            numbers = tuple(map(_numbers_in, self.parts, records))
            gradient = self.decided((needs, numbers, to), self._gradient, records, needs, to)
        return gradient(dy, records)

    def _without_numbers(self, needs: frozenset[str], to: Quantize | None) -> BackwardPass | None:
        return None if any(map(_has_numbers, self.parts)) else self._gradient((), needs, to)

    def _gradient(self, records: Sequence[Any], needs: frozenset[str], to: Quantize | None) -> BackwardPass:
        places: list[Place] = []
        for i, (slot, part) in enumerate(zip(_slots(self.rest), self.parts, strict=True)):
            number = _numbers_in(part, records[i])[0] if isinstance(part, Scale | Dropout) else 0.0
            drops = isinstance(part, Dropout) and records[i].seed is not None
            kept = ("x" if part.reads == "input" else "y") if isinstance(part, Pointwise) else "seed"
            places.append(Place(slot, part, f"kept[{i}].{kept}", number, drops))
        return backward_of(places, needs, to)


class PointwiseChainJoint(ChainOfParts, JointFusion):
    """y = f_n(... f_1(x)) and all gradients, one pass each, with fewer saved tensors.

    Of consecutive activations and constant factors only the first input is saved; the backward pass recomputes the
    others from it in registers: with y = f_2(f_1(t)), dt = f_1'(t) f_2'(f_1(t)) dy. Otherwise as `PointwiseChain` and
    `PointwiseChainBackward`.

    x, y, t: [*, H].
    """

    first: Part
    rest: tuple[Part, ...]

    class Saved(context.Saved):
        held: tuple[Tensor | None, ...]  # [*, H] for each group of consecutive activations
        seeds: tuple[Tensor | None, ...]  # [] int64 for each dropout
        numbers: tuple[float, ...]  # factors, and p of dropouts; otherwise 0

    def requires(self, env: Env) -> Requirements:
        yield env.grad, "where nothing needs a gradient nothing is kept"
        yield from super().requires(env)
        yield len(_joined(self.parts, self._numbers())) < len(self.parts), "no two activations are adjacent"

    def saved_at(self) -> Iterator[int]:
        for at, part in _joined(self.parts, self._numbers()):
            if isinstance(part, Pointwise | Run):
                yield at + (part.reads == "output")

    def fwd(self, x: Tensor, *, seeds: tuple[Tensor | None, ...]) -> tuple[Tensor, Saved]:
        forward, numbers = self.decided("forward", self._forward)
        y, held = forward(x, seeds)
        return y, self.Saved(held=held, seeds=seeds, numbers=numbers)

    def _forward(self) -> tuple[ForwardPass, tuple[float, ...]]:
        numbers = self._numbers()
        return forward_of([part for _, part in _joined(self.parts, numbers)], self.parts), numbers

    def _numbers(self) -> tuple[float, ...]:
        """The current factor of each part, or p of a dropout; 0 for other parts."""
        found = [p.factor if isinstance(p, Scale) else p.p if isinstance(p, Dropout) else 0.0 for p in self.parts]
        return tuple(found)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, Grads]:
        drops = tuple(seed is not None for seed in saved.seeds)
        of = tuple(part.P for part in self.parts if isinstance(part, Pointwise))
        key = needs, saved.numbers, drops, of
        return self.decided(key, self._gradient, saved.numbers, drops, needs)(dy, (saved.held, saved.seeds))

    def _gradient(self, numbers: Sequence[float], drops: Sequence[bool], needs: frozenset[str]) -> BackwardPass:
        slots, places = _slots(self.rest), list[Place]()
        for i, (at, part) in enumerate(_joined(self.parts, numbers)):
            kept = f"kept[1][{at}]" if drops[at] else f"kept[0][{i}]"
            places.append(Place(slots[at], part, kept, numbers[at], drops[at]))
        return backward_of(places, needs)

    def unfused(self, saved: Saved) -> dict[str, Any]:
        """The `Saved` of each operation, for the unfused backward pass."""
        records: list[context.Saved | None] = []
        for (at, part), kept in zip(_joined(self.parts, saved.numbers), saved.held, strict=True):
            if isinstance(part, Run):
                assert kept is not None
                records += own_records(part.parts, kept, part.factors)
            elif isinstance(part, Dropout):
                records.append(Dropout.Saved(seed=saved.seeds[at], p=saved.numbers[at]))
            elif isinstance(part, Scale):
                records.append(Scale.Saved(factor=saved.numbers[at]))
            else:
                records.append(_record(part, kept))
        return {"first": records[0], "rest": tuple(records[1:])}


class Run(NamedTuple):
    """Consecutive activations and constant factors as one function; the factors are those of the forward pass."""

    parts: tuple[Pointwise | Scale, ...]
    factors: tuple[float, ...]

    reads = "input"


class Place(NamedTuple):
    """A part of a chain, as its gradient needs it."""

    slot: str
    part: Part | Run
    kept: str  # its saved tensor, as an expression of `kept`
    number: float  # a factor, or p of a dropout, as in the forward pass
    drops: bool


def _record(part: Part, kept: Any) -> context.Saved | None:
    """The `Saved` of an activation; the engine creates those of other parts in the forward pass."""
    return part.record(kept, kept) if isinstance(part, Pointwise) else None


def _slots(rest: Sequence[Part]) -> list[str]:
    return ["first", *(f"rest.{i}" for i in range(len(rest)))]


def _joined(parts: Sequence[Part], numbers: Sequence[float]) -> list[tuple[int, Part | Run]]:
    """The parts with their positions; each run of functions with two or more activations is joined into one part."""
    found: list[tuple[int, Part | Run]] = []
    for functions, group in itertools.groupby(enumerate(parts), lambda pair: isinstance(pair[1], Pointwise | Scale)):
        run = list(group)
        if functions and sum(isinstance(part, Pointwise) for _, part in run) > 1:
            factors = tuple(numbers[at] for at, part in run if isinstance(part, Scale))
            together = tuple(part for _, part in run if isinstance(part, Pointwise | Scale))
            found.append((run[0][0], Run(together, factors)))
        else:
            found += run
    return found


ForwardPass = Callable[[Tensor, Sequence[Tensor | None]], tuple[Any, tuple[Tensor | None, ...]]]
"""From x and the seeds to y and the saved tensors of the parts, in one pass."""
BackwardPass = Callable[[Tensor, Sequence[Any]], tuple[Any, Grads]]
"""From dy and the saved tensors of the parts to dx and the gradients of biases, in one pass."""


def forward_of(
    kept_of: Sequence[Part | Run], parts: Sequence[Part], keep: bool = True, to: Quantize | None = None
) -> ForwardPass:
    """The forward pass of these parts as currently configured; `kept_of` are the parts, joined where they save less."""
    _, kept = _forward_steps(kept_of, keep)

    def made() -> Callable[..., tuple[Any, ...]]:
        chain = chain_of(_forward_steps(kept_of, keep)[0])
        return kernels_of("pointwise").pointwise_of(chain) if to is None else quantized_chain(chain, to)

    def kernel(*given: Tensor) -> tuple[Any, ...]:  # for activations whose numbers may change at any time
        return made()(*given)

    source = Source("forward", "x, seeds")
    numbered = any(isinstance(part, Pointwise) and _has_numbers(part) for part in parts)
    source.constants["kernel"] = kernel if numbered else made()
    operands = [
        f"{source.put(part.read)}()" if isinstance(part, Bias) else f"seeds[{i}]"
        for i, part in enumerate(parts)
        if isinstance(part, Bias) or (isinstance(part, Dropout) and part.random)
    ]
    source.add(f"out = kernel({', '.join(['x', *operands])})", f"return out[0], ({''.join(f'{k}, ' for k in kept)})")
    return source.define()


def _forward_steps(parts: Sequence[Part | Run], keep: bool) -> tuple[Steps, list[str]]:
    """Steps of the chain, and each part's saved tensor, as an expression of x and of the kernel's results."""
    steps: list[tuple[Any, ...]] = []
    kept: list[str] = []
    here: str | None = "x"  # the current value of the chain, if it is stored in a tensor

    def stored() -> str:
        steps.append(("store",))
        return f"out[{steps.count(('store',))}]"

    for i, part in enumerate(parts):
        own = "None"
        if isinstance(part, Pointwise | Run):
            if keep and part.reads == "input":
                own = here = here or stored()
            steps.append(("act", _function(part)))
            here = None
            if keep and part.reads == "output":
                own = here = stored() if _active(parts[i + 1 :]) else "out[0]"
        elif made := _linear_step(part):
            steps.append(made)
            here = None
        kept.append(own)
    return steps, kept


def backward_of(places: Sequence[Place], needs: frozenset[str], to: Quantize | None = None) -> BackwardPass:
    """The backward pass of these parts from their saved tensors: dx and the sums over tokens, as far as needed."""
    steps: list[tuple[Any, ...]] = []
    operands: list[str] = []
    summed: list[tuple[str, Bias]] = []
    for slot, part, kept, number, drops in reversed(places):
        if isinstance(part, Pointwise | Run):
            steps.append(("dact", _function(part)))
            operands.append(kept)
        elif isinstance(part, Scale):
            steps.append(("scale", number))
        elif isinstance(part, Dropout):
            steps += filter(None, [_dropout_step(part, number, drops)])
            operands += [kept] * drops
        elif f"{slot}.bias" in needs:
            steps.append(("column_sum",))
            summed.append((f"{slot}.bias", part))
    source = Source("gradient", "dy, kept")
    dtypes = [bias.dtype for _, bias in summed]
    chain, result = chain_of(steps), "x" in needs
    plain = kernels_of("pointwise").pointwise_of(chain, None, dtypes, result)
    source.constants["kernel"] = plain if to is None or not result else quantized_chain(chain, to, dtypes)
    sums = [f"{source.put(name)}: out[{i}]" for i, (name, _) in enumerate(summed, 1)]
    source.add(f"out = kernel({', '.join(['dy', *operands])})", f"return out[0], {{{', '.join(sums)}}}")
    return source.define()


def _active(parts: Sequence[Part | Run]) -> list[Part | Run]:
    """All parts but dropouts that return their input."""
    return [part for part in parts if not isinstance(part, Dropout) or _linear_step(part)]


def _linear_step(part: Scale | Bias | Dropout) -> tuple[Any, ...] | None:
    """The step of a part that is not an activation, as currently configured; `None` if a dropout returns its input."""
    if isinstance(part, Dropout):
        return _dropout_step(part, part.p, part.random)
    return ("scale", part.factor) if isinstance(part, Scale) else ("bias",)


def _dropout_step(part: Dropout, p: float, random: bool) -> tuple[Any, ...] | None:
    """The step of a dropout, which is also the step of its gradient, with the current or the saved configuration."""
    upscale = part.mode == "upscale_in_train"
    if random:
        return "dropout", p, upscale
    return None if upscale or p == 0 else ("scale", 1 - p)


def _function(part: Pointwise | Run) -> Any:
    return as_one_activation(part.parts, part.factors) if isinstance(part, Run) else device(part)


def _numbers_in(part: Part, record: Any) -> tuple[float, ...]:
    """The numbers with which a gradient is compiled: configuration, or the saved factor, or p and whether it drops."""
    if isinstance(part, Pointwise):
        return part.P
    if isinstance(part, Dropout):
        return record.p, record.seed is not None
    return (record.factor,) if isinstance(part, Scale) else ()


def _has_numbers(part: Part) -> bool:
    return type(part).P is not Pointwise.P if isinstance(part, Pointwise) else not isinstance(part, Bias)


_chains: dict[Any, Chain] = {}
_MOST = 1024  # chains in this cache: numbers in them, such as a factor, may change in each step of a training


def quantized_chain(chain: Chain, to: Quantize, dtypes: Sequence[torch.dtype] = ()) -> Callable[..., tuple[Any, ...]]:
    """A function of x and the operands of a chain whose last value is quantized."""
    before, behind = chain.parts[0], chain.parts[-1]

    def run(x: Tensor, *operands: Tensor) -> tuple[Any, ...]:
        if not x.numel():
            return kernels_of("pointwise").pointwise_of(chain, None, dtypes)(x, *operands)
        shape = (*x.shape[:-1], x.shape[-1] * behind // before)
        wanted, newest = as_codes(to, x)
        given = [t.contiguous() for t in operands]
        codes, rest = kernels_of("pointwise").pointwise_codes(
            x.contiguous(), chain, given, wanted, newest, dtypes=dtypes
        )
        return as_quantized(codes, wanted, shape, x.dtype, x.device), *rest

    return run


def chain_of(steps: Steps) -> Chain:
    """The chain of these steps, created once; it keeps alive the functions whose `id` is in its key."""
    key = tuple([(name, *map(_identity, of)) for name, *of in steps])
    found = _chains.get(key)
    if found is None:
        chains = kernels_of("chains")
        if len(_chains) >= _MOST:
            _chains.clear()
        found = _chains[key] = chains.Chain(*(getattr(chains, name)(*of) for name, *of in steps))
    return found


def _identity(of: Any) -> Any:
    """The key of a step's arguments: functions by identity, as they hash their source, and numbers with their sign."""
    if isinstance(of, tuple):
        return tuple(map(_identity, of))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return id(of) if callable(of) else repr(of)  # 0.0 and -0.0 are equal


class LinearBiasPointwise(ForwardFusion):
    """y = act(z), z = x weight^T + bias: a GEMM with the bias in its epilogue, as in cuBLAS, and one pass.

    z is written once; the gradient of the activation reads it in any case, so in training no fusion moves fewer bytes.

    x: [*, in_features], z, y: [*, out_features]. Saves the same tensors as the operations.
    """

    linear: Linear
    bias: Bias
    act: Pointwise

    kernels = ("triton", "c")
    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield from kernels_run(env)
        yield from act_fits(self.act, env)
        yield from gemm_fits(self.linear, self.bias, env)
        keeps = self.act.reads == "input" or env.leaving is env.dtype
        yield keeps, f"{type(self.act).__name__} keeps y, which is cast for what comes next"

    def saves(self, env: Env) -> Savings:
        return Savings(launches=1 + STEP, bytes=2 * output_bytes(self.linear, env))  # two kernels in one step

    def fwd(self, x: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, dict[str, Any]]:
        return self.decided((dtype, self.act.P), self._passes, dtype)(x)

    def _passes(self, dtype: torch.dtype | None) -> Callable[[Tensor], tuple[Tensor, dict[str, Any]]]:
        gemm, record = linear_of(self.linear, self.bias), _recorder(self.act)
        kernel = kernels_of("pointwise").pointwise_of(chain_of([("act", device(self.act))]), dtype)

        def run(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
            z, saved = gemm(x)
            y: Any = kernel(z)[0]
            return y, {"linear": saved, "act": record(z, y)}

        return run


def _recorder(act: Pointwise) -> Callable[[Tensor, Tensor], Saved]:
    """`act.record`, without keyword arguments if it is the default one."""
    if type(act).record is not Pointwise.record:
        return act.record
    save = maker(act.Saved)
    return (lambda x, y: save(x)) if act.reads == "input" else (lambda x, y: save(y))


class BiasDropoutAdd(ForwardFusion):
    """y = other + dropout(x + bias) in one pass, rounded once; the dropout mask is recomputed from the seed.

    x, other, y: [*, H]; if `other` has another dtype, y has the dtype that torch promotes to. Saves the same tensors as
    the operations.
    """

    bias: Bias | None
    dropout: Dropout
    add: Add | None

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        return _dropout_fits(self.bias, self.dropout, env)

    def fwd(
        self, x: Tensor, *, add_other: Tensor | None = None, dropout_seed: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        drop, operands, dtype = self.dropout, list[Any]([dropout_seed]), x.dtype
        if self.bias is not None:
            operands.insert(0, self.bias.read())
        if self.add is not None:
            assert add_other is not None
            if add_other.shape != x.shape:
                self.add.fwd(x, other=add_other)  # raises, and reports the shapes
            operands.append(add_other)
            dtype = sum_dtype(x, add_other)
        upscale = drop.mode == "upscale_in_train"
        kernel = _dropout_kernel(self.bias is not None, drop.p, upscale, self.add is not None, dtype=dtype)
        y: Any = kernel(x, *operands)[0]
        return y, {}


class BiasDropoutAddBackward(BackwardFusion):
    """dx = dropout(dy) and dbias = sum of dx over all tokens in one pass;  dother = dy.

    The dropout mask is recomputed from the seed; the sum is in float32 and a fixed order. dy, dx: [*, H].
    """

    bias: Bias | None
    dropout: Dropout
    add: Add | None

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        return _dropout_fits(self.bias, self.dropout, env)

    def bwd(self, dy: Tensor, *, dropout: Any, needs: frozenset[str]) -> tuple[Tensor | None, Grads]:
        other, bias = dy if "add.other" in needs else None, self.bias if "bias.bias" in needs else None
        if "x" not in needs and bias is None:
            return None, {"add.other": other}
        upscale, dtypes = self.dropout.mode == "upscale_in_train", () if bias is None else (bias.dtype,)
        kernel = _dropout_kernel(False, dropout.p, upscale, False, bias is not None, dtypes=dtypes, result="x" in needs)
        dx, *totals = kernel(dy, dropout.seed)
        return dx, {"bias.bias": totals[0] if totals else None, "add.other": other}


def _dropout_fits(bias: Bias | None, dropout: Dropout, env: Env) -> Requirements:
    yield from kernels_run(env)
    yield from bias_fits(bias, env)
    yield dropout.random, "nothing is dropped here"


@functools.lru_cache(256)
def _dropout_kernel(
    bias: bool, p: float, upscale: bool, add: bool, sums: bool = False, **of: Any
) -> Callable[..., tuple[Tensor | None, ...]]:
    """The kernel of the chain of these steps; other arguments are those of `pointwise_of`."""
    steps: Steps = [*[("bias",)] * bias, ("dropout", p, upscale), *[("add",)] * add, *[("column_sum",)] * sums]
    return kernels_of("pointwise").pointwise_of(chain_of(steps), **of)
