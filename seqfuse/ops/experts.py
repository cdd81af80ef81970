"""Mixture of experts: the router, and the permutation of tokens to their experts and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from .. import operation as sf
from ..casts import dtype_of
from ..compiler import CompileError
from ..env import Env, triton_installed
from ..errors import InputError
from ..kernels import kernels_of
from ._grouped import inside, is_watched, last
from ._mm import linear, mm
from ._parameters import parameter, required, reset_linear
from ._philox import gave_up, runs_in_c
from ._tensors import check_last, floating, is_whole, stats_dtype

T = TypeVar("T")


_LARGEST = torch.iinfo(torch.int64).max
_IN_C = (torch.float32, torch.bfloat16, torch.float16)
_IN_TRITON = (*_IN_C, torch.float64)


def _by_kernel(x: Tensor, run: Callable[[], T]) -> T | None:
    """The result of `run` if kernels support x (Triton on a GPU, C on a CPU), else `None`."""
    if not (x.is_cuda and x.dtype in _IN_TRITON and triton_installed()) and not (x.dtype in _IN_C and runs_in_c(x)):
        return None
    try:
        return run()
    except CompileError as error:
        gave_up("experts", error)
        return None


class Route(sf.UnfusedOperation):
    """The router: y = x, plus the channels experts and probs, the chosen experts of each token and their factors.

    Forward: logits = x weight^T + bias; scores = softmax(logits) or sigmoid(logits); experts = the `top_k` largest of
    scores + correction, ties in any order; probs = scale scores[experts], divided by their sum with `normalize`. With
    groups = (n, m) the experts form n equal groups, and only experts of the m best groups are chosen. The score of a
    group is that of its best expert, or with a correction the sum of its two best.

    Backward: through probs only, as the choice has no gradient. dscores is the gradient of probs, scattered to the
    chosen experts;  dlogits = scores (dscores - sum of dscores scores), of a sigmoid
    dscores scores (1 - scores); dx = dy + dlogits weight; dweight = dlogits^T x; dbias = sum of dlogits over tokens.

    x, y: [*, in_features], experts: [*, top_k] int64, probs: [*, top_k] float32 (float64 for float64), weight:
    [experts, in_features], bias: [experts]. Scores are in the dtype of probs.
    Saved: x for dweight, weight for dx, logits [*, experts] in their dtype, experts.
    Source: Shazeer et al. 2017, arXiv:1701.06538; sigmoid, correction and groups: DeepSeek-AI 2024, arXiv:2412.19437.

    Args:
        in_features: last dimension of x.
        experts: number of experts.
        top_k: number of experts per token.
        score: `"softmax"` or `"sigmoid"`.
        normalize: whether the factors of a token are divided by their sum.
        bias: whether the logits have a bias.
        correction: whether to add a buffer `correction` [experts] to the scores for the choice only. It starts at zero;
            load balancing is left to the user.
        groups: number of groups, and number of groups per token.
        scale: factor of all probs.
        to: names of the channels of experts and probs.

    Raises:
        ValueError: for inconsistent numbers.
        InputError: (SF101) for a complex x.
    """

    outputs = ("experts", "probs")
    integers = ("experts",)
    autocast = "same"

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="weight")  # [*, in_features]
        weight: Tensor = sf.field(for_="x")  # [experts, in_features], the parameter
        logits: Tensor  # [*, experts]
        experts: Tensor  # [*, top_k] int64

    is_view = True

    def __init__(
        self,
        in_features: int,
        experts: int,
        top_k: int,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        bias: bool = False,
        correction: bool = False,
        groups: Sequence[int] | None = None,
        scale: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        to: Sequence[str] = ("experts", "probs"),
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k must be between 1 and the {experts} experts, got {top_k}")
        if groups is not None:
            cut, taken = groups
            if not (0 < taken <= cut and experts % cut == 0 and top_k <= taken * (experts // cut)):
                message = f"groups must cut {experts} experts equally and leave {top_k} of them, got {tuple(groups)}"
                raise ValueError(message)
        self.in_features, self.experts, self.top_k, self.score = in_features, experts, top_k, score
        self.normalize, self.scale = normalize, float(scale)
        self.groups = None if groups is None else (groups[0], groups[1])
        self.to_channels = tuple(to)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty((experts, in_features), **made))
        self.register_parameter("bias", nn.Parameter(torch.empty(experts, **made)) if bias else None)
        self.register_buffer("correction", torch.zeros(experts, device=device) if correction else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize from U(-1/sqrt(in_features), 1/sqrt(in_features)), as in `torch.nn.Linear`."""
        reset_linear(self)

    @property
    def channels(self) -> Mapping[str, str | None]:
        return dict(zip(self.outputs, self.to_channels, strict=True))

    def reference(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        floating(x, "Route")
        logits = self._logits(x, self.weight, parameter(self, "bias"))
        experts = self.chosen(logits.detach())
        return x, {"experts": experts, "probs": self._factors(self._scores(logits).gather(-1, experts))}

    def _logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias).to(stats_dtype(x))

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()

    def chosen(self, logits: Tensor) -> Tensor:
        """The experts of each token, [*, top_k]."""
        correction = self._buffers.get("correction")
        if correction is None and self.groups is None:
            return logits.topk(self.top_k, -1).indices  # not of scores, which may round to 1
        scores = self._scores(logits)
        scores = scores if correction is None else scores + correction
        if self.groups is not None:
            cut, taken = self.groups
            grouped = scores.reshape(*scores.shape[:-1], cut, self.experts // cut)
            best = grouped.topk(min(2, grouped.shape[-1]), -1).values if correction is not None else grouped
            best = best.sum(-1) if correction is not None else best.amax(-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(taken, -1).indices, True)
            scores = grouped.masked_fill(~kept.unsqueeze(-1), -math.inf).reshape(scores.shape)
        return scores.topk(self.top_k, -1).indices

    def _factors(self, scores: Tensor) -> Tensor:
        if self.normalize:
            scores = scores / self._total(scores)
        return scores if self.scale == 1.0 else scores * self.scale

    def _total(self, scores: Tensor) -> Tensor:
        total = scores.sum(-1, keepdim=True)
        return total if self.score == "softmax" else total + 1e-20  # all scores may be 0

    @property
    def _of_kernels(self) -> dict[str, Any]:
        """The configuration as arguments of `kernels.route`."""
        return {"softmax": self.score == "softmax", "normalize": self.normalize, "scale": self.scale}

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], Saved]:
        floating(x, "Route")
        weight = required(self, "weight")
        logits = self._logits(x, weight, parameter(self, "bias"))
        experts = self.chosen(logits)
        rows, chosen = logits.reshape(-1, self.experts), experts.reshape(-1, self.top_k)
        probs = _by_kernel(logits, lambda: kernels_of("route").route_factors(rows, chosen, **self._of_kernels))
        if probs is None:
            probs = self._factors(self._scores(rows).gather(-1, chosen))
        made = {"experts": experts, "probs": probs.view(experts.shape)}
        return x, made, self.Saved(x=x, weight=weight, logits=logits, experts=experts)

    def bwd(
        self,
        dy: Tensor | None,
        saved: Saved,
        *,
        d_experts: Tensor | None,
        d_probs: Tensor | None,
        needs: frozenset[str],
    ) -> tuple[Tensor | None, sf.Grads]:
        if d_probs is None:
            grads: dict[str, Tensor | None] = {
                name: torch.zeros_like(required(self, name)) for name in ("weight", "bias") if name in needs
            }
            return dy, grads
        read = [getattr(saved, field) for field, grad in (("weight", "x"), ("x", "weight")) if grad in needs]
        # Rounded once; in the kernel itself if all its uses need one dtype.
        of = None if "bias" in needs or len({t.dtype for t in read}) != 1 else read[0].dtype
        wide, dx = self._dlogits(d_probs, saved.logits, saved.experts, of), None
        grads = {"bias": wide.sum(0).to(dtype_of(self, "bias"))} if "bias" in needs else {}
        if "x" in needs:
            dx = mm(wide.to(saved.weight.dtype), saved.weight).view(*saved.experts.shape[:-1], self.in_features)
            dx = dx if dy is None else dx.to(dy.dtype) + dy
        if "weight" in needs:
            grads["weight"] = mm(wide.to(saved.x.dtype).t(), saved.x.reshape(-1, self.in_features))
        return dx, grads

    def _dlogits(self, d_probs: Tensor, logits: Tensor, experts: Tensor, of: torch.dtype | None) -> Tensor:
        """The gradient of the logits, [tokens, experts], in the dtype `of`, by default that of the scores."""
        rows, chosen, d = logits.reshape(-1, self.experts), *(t.reshape(-1, self.top_k) for t in (experts, d_probs))

        def run() -> Tensor:
            return kernels_of("route").route_gradients(d.contiguous(), rows, chosen, dtype=of, **self._of_kernels)

        made = _by_kernel(logits, run)
        if made is not None:
            return made
        scores = self._scores(rows)
        taken = scores.gather(-1, chosen)
        d = d.to(scores.dtype) * self.scale
        if self.normalize:
            total = self._total(taken)
            d = (d - (d * taken).sum(-1, keepdim=True) / total) / total
        dscores = torch.zeros_like(scores).scatter_(-1, chosen, d)
        if self.score == "sigmoid":
            return dscores * scores * (1 - scores)
        return scores * (dscores - (dscores * scores).sum(-1, keepdim=True))

    dy_may_be_none = True

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        return sf.Traffic(8, 2, 1) if backward else sf.Traffic(5, 1, 0)

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        check_last(shape, self.in_features)
        return shape

    @classmethod
    def example(cls, x: Tensor) -> Route:
        return cls(x.shape[-1], 6, 2, device=x.device, dtype=x.dtype)

    def extra_repr(self) -> str:
        text = f"{self.in_features}, {self.experts}, {self.top_k}, {self.score!r}, normalize={self.normalize}"
        named = {
            "bias": self._parameters.get("bias") is not None,
            "correction": self._buffers.get("correction") is not None,
        }
        text += "".join(f", {name}=True" for name, given in named.items() if given)
        text += "" if self.groups is None else f", groups={self.groups}"
        return text + ("" if self.scale == 1.0 else f", scale={self.scale:g}")


def _flat(t: Tensor, size: int) -> Tensor:
    """The tensor as [*, size] with contiguous rows, as the kernels need."""
    rows = t.reshape(-1, size)
    # Without rows, `contiguous` returns the same tensor with any strides.
    return rows if rows.stride(1) == 1 or size == 1 else rows.clone(memory_format=torch.contiguous_format)


def kept_pairs(rows: Tensor, offsets: Tensor) -> Tensor:
    """Whether each (token, expert) pair was kept: its row belongs to a group."""
    return rows < last(offsets)


class Permute(sf.UnfusedOperation):
    """y = x with each token repeated for each of its experts, sorted by expert; offsets: the end of each expert's rows.

    The rows of y are those of expert 0, then of expert 1, and so on, each in the order of tokens. If an expert is out
    of range, such as -1, the token is dropped there: its row is zeros and comes after all offsets, and `GroupedLinear`
    returns zeros for it.

    Backward: dx = sum of dy over the rows of each token without dropped ones, in the order of its experts, in float32
    (float64 for float64), rounded once.

    x: [*, H], experts: [*, top_k] integers, y: [*, top_k, H], offsets: [experts] int32, rows: [*, top_k] int64, the row
    in y of each token and expert.
    Saved: rows and offsets.
    Source: Shazeer et al. 2017, arXiv:1701.06538; Gale et al. 2022, arXiv:2211.15841 (dropless).

    Args:
        experts: number of experts.
        top_k: number of experts per token.
        name: channel of the experts of each token, as from `Route`.
        to: names of the channels of offsets and rows.

    Raises:
        ValueError: for numbers below 1.
        InputError: (SF101) for experts of another shape or dtype.
    """

    outputs = ("offsets", "rows")
    integers = ("offsets", "rows")
    autocast = "same"

    class Saved(sf.Saved):
        rows: Tensor  # [*, top_k] int64
        offsets: Tensor  # [experts] int32

    def __init__(
        self, experts: int, top_k: int, *, name: str = "experts", to: Sequence[str] = ("offsets", "rows")
    ) -> None:
        super().__init__()
        if experts < 1 or top_k < 1:
            raise ValueError(f"experts and top_k must be at least 1, got {experts} and {top_k}")
        self.experts, self.top_k, self.name, self.to_channels = experts, top_k, name, tuple(to)

    @property
    def channels(self) -> Mapping[str, str | None]:
        return {"experts": self.name, **dict(zip(self.outputs, self.to_channels, strict=True))}

    def check(self, shape: Sequence[int], experts: Tensor) -> None:
        """Raise `InputError` unless each token of an x of this shape has `top_k` integer experts."""
        wanted = (*shape[:-1], self.top_k)
        if tuple(experts.shape) != wanted or not is_whole(experts):
            got = f"{tuple(experts.shape)} {experts.dtype}"
            message = f"expects the experts of each token, integers {wanted}, got {got}"
            raise InputError(message, code="SF101", operation="Permute")

    def sorted(self, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The (token, expert) pair of each row of y, the row of each pair, and the end of each expert's rows."""
        # Without its sign bit an expert below 0 becomes the greatest number, so it is sorted last.
        behind_all = (experts.reshape(-1).to(torch.int64) & _LARGEST).clamp_(max=self.experts)
        flat, order = behind_all.sort(stable=True)
        rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        behind = torch.arange(1, self.experts + 1, device=order.device)
        return order, rows.view(experts.shape), torch.searchsorted(flat, behind, out_int32=True)

    def reference(self, x: Tensor, *, experts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.check(x.shape, experts)
        order, rows, offsets = self.sorted(experts)
        y = x.reshape(-1, x.shape[-1]).index_select(0, order // self.top_k)
        y = torch.where(inside(offsets, len(y)), y, 0)
        return y.view(*x.shape[:-1], self.top_k, x.shape[-1]), {"offsets": offsets, "rows": rows}

    def fwd(self, x: Tensor, *, experts: Tensor) -> tuple[Tensor, dict[str, Tensor], Saved]:
        self.check(x.shape, experts)

        def run() -> tuple[Tensor, Tensor, Tensor]:
            if x.is_cpu:
                rows, offsets = kernels_of("permute").sorted_pairs(experts.to(torch.int64), self.experts)
            else:
                _, rows, offsets = self.sorted(experts)
            return _copied(x, rows, offsets), offsets, rows

        made = _by_kernel(x, run)
        if made is None:
            order, rows, offsets = self.sorted(experts)
            y = _in_order(x, order, offsets, self.top_k)
        else:
            y, offsets, rows = made
        return y, {"offsets": offsets, "rows": rows}, self._saved(rows, offsets)

    def bwd(
        self, dy: Tensor, saved: Saved, *, d_offsets: Tensor | None, d_rows: Tensor | None
    ) -> tuple[Tensor, sf.Grads]:
        return summed(dy, saved.rows, saved.offsets, None), {"experts": None}

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not shape:
            raise ValueError("expects at least one dimension")
        return (*shape[:-1], self.top_k, shape[-1])

    @classmethod
    def example(cls, x: Tensor) -> Permute:
        return cls(4, 2)

    def extra_repr(self) -> str:
        return f"{self.experts}, {self.top_k}"


def _in_order(x: Tensor, order: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """The y of a `Permute`, given the (token, expert) pair of each of its rows."""
    y = x.reshape(-1, x.shape[-1]).index_select(0, order // top_k)
    if y.is_cpu and not is_watched(y):
        y[int(offsets[-1]) :].zero_()
    else:
        y = torch.where(inside(offsets, len(y)), y, 0)
    return y.view(*x.shape[:-1], top_k, x.shape[-1])


def sorted_rows(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Recompute the y of a `Permute` bit for bit from the saved rows."""
    y = _by_kernel(x, lambda: _copied(x, rows, offsets))
    if y is not None:
        return y
    flat = rows.reshape(-1)
    order = torch.empty_like(flat).scatter_(0, flat, torch.arange(flat.shape[0], device=flat.device))
    return _in_order(x, order, offsets, rows.shape[-1])


def _copied(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """`sorted_rows` by a kernel."""
    size, top_k = x.shape[-1], rows.shape[-1]
    y = kernels_of("permute").spread_rows(_flat(x, size), _flat(rows, top_k), offsets)[0]
    return y.view(*x.shape[:-1], top_k, size)


def gathered(x: Tensor, rows: Tensor, offsets: Tensor, probs: Tensor | None) -> Tensor:
    """The sum over each token's rows that were not dropped, each times its factor, in float32, rounded once.

    x: [*, top_k, H], rows, probs: [*, top_k], offsets: [G].
    """
    wide, size = stats_dtype(x), x.shape[-1]
    flat, at = x.reshape(-1, size), rows.reshape(-1, rows.shape[-1])
    kept = kept_pairs(at, offsets)
    factors = None if probs is None else torch.where(kept, probs.reshape(at.shape).to(wide), 0)
    total = torch.zeros(len(at), size, dtype=wide, device=x.device)
    for j in range(at.shape[1]):  # always in this order, for any number of threads or tokens
        part = flat.index_select(0, at.select(1, j)).to(wide)
        part = torch.where(kept.narrow(1, j, 1), part, 0)
        total = total + (part if factors is None else part * factors.narrow(1, j, 1))
    return total.to(x.dtype).view(*rows.shape[:-1], size)


def summed(x: Tensor, rows: Tensor, offsets: Tensor, probs: Tensor | None) -> Tensor:
    """`gathered`, by a kernel where one runs; not differentiable."""
    size, top_k = x.shape[-1], rows.shape[-1]

    def run() -> Tensor:
        factors = None if probs is None else probs.reshape(-1, top_k).contiguous()
        return kernels_of("permute").gather_rows(_flat(x, size), _flat(rows, top_k), offsets, factors=factors)

    y = _by_kernel(x, run)
    return gathered(x, rows, offsets, probs) if y is None else y.view(*rows.shape[:-1], size)


def by_row(t: Tensor, rows: Tensor) -> Tensor:
    """Sort t [*, top_k], with one number per (token, expert) pair, into the rows of a `Permute`."""
    return sorted_rows(t.reshape(-1, 1), rows.reshape(-1, 1), rows.new_full((1,), rows.numel())).view(rows.shape)


def by_pair(t: Tensor, rows: Tensor, offsets: Tensor | None = None) -> Tensor:
    """The inverse of `by_row`; with offsets, dropped pairs get 0."""
    ends = rows.new_full((1,), rows.numel()) if offsets is None else offsets
    return summed(t.reshape(-1, 1), rows.reshape(-1, 1), ends, None).view(rows.shape)


def _spread(
    dy: Tensor,
    rows: Tensor,
    offsets: Tensor,
    factors: Tensor | None,
    x: Tensor | None,
    spread: bool,
    sums: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None]:
    """`kernels.permute.spread_rows` by torch calls."""
    kept, wide = kept_pairs(rows, offsets), stats_dtype(dy)
    dx = dprobs = None
    if spread:
        scales = kept.to(wide) if factors is None else torch.where(kept, factors.to(wide), 0)
        scaled = torch.where(kept.unsqueeze(-1), dy.to(wide).unsqueeze(1) * scales.unsqueeze(-1), 0)
        scaled = scaled.to(dy.dtype).view(-1, dy.shape[-1])
        dx = torch.empty_like(scaled).index_copy_(0, rows.view(-1), scaled)
    if x is not None and sums is not None:
        parts = [(dy.to(wide) * x.index_select(0, rows.select(1, j)).to(wide)).sum(-1) for j in range(rows.shape[1])]
        dprobs = torch.where(kept, torch.stack(parts, -1), 0).to(sums)
    return dx, dprobs


def dtype_of_sums(x: Tensor, probs: Tensor | None) -> torch.dtype:
    """Of the gradient of probs: that of probs where it is known, no wider than that of the sums."""
    wide = stats_dtype(x)
    return probs.dtype if probs is not None and probs.dtype.itemsize < wide.itemsize else wide


class Unpermute(sf.UnfusedOperation):
    """y = sum over experts of probs x: the outputs of the experts, summed for each token. The inverse of `Permute`.

    Forward: with r = rows_tj the row of token t for its expert j, y_t = sum over j of probs_tj x_r, without dropped
    rows, in the order of j, in float32 (float64 for float64), rounded once.

    Backward: dx_r = probs_tj dy_t, zeros for dropped rows;  dprobs_tj = sum over features of dy_t x_r, 0 for dropped
    rows.

    x: [*, top_k, H], rows, probs: [*, top_k], offsets: [experts], y: [*, H]. y has the dtype of x.
    Saved: x for dprobs, probs for dx, rows, offsets.
    Source: Shazeer et al. 2017, arXiv:1701.06538.

    Args:
        probs: channel of the factors, as from `Route`; `None` for factors of 1.
        rows: channel of the rows of each token, as from `Permute`.
        offsets: channel of the end of each expert's rows.

    Raises:
        InputError: (SF101) if the shape of x or probs does not match rows.
    """

    class Saved(sf.Saved):
        x: Tensor | None = sf.field(for_="probs")  # [*, top_k, H]; `None` without factors
        probs: Tensor | None = sf.field(for_="x")  # [*, top_k]
        rows: Tensor  # [*, top_k] int64
        offsets: Tensor  # [experts] int32

    autocast = "same"

    def __init__(self, probs: str | None = "probs", *, rows: str = "rows", offsets: str = "offsets") -> None:
        super().__init__()
        self.probs, self.rows, self.offsets = probs, rows, offsets

    @property
    def channels(self) -> Mapping[str, str | None]:
        given = {"rows": self.rows, "offsets": self.offsets}
        return given if self.probs is None else {**given, "probs": self.probs}

    def check(self, x: Tensor, rows: Tensor, probs: Tensor | None) -> None:
        """Raise `InputError` unless x has a row, and probs a factor, for each token and expert."""
        floating(x, "Unpermute")
        if tuple(rows.shape) != tuple(x.shape[:-1]):
            message = f"expects x [*, top_k, H] with the rows {tuple(rows.shape)}, got {tuple(x.shape)}"
            raise InputError(message, code="SF101", operation="Unpermute")
        if probs is not None and probs.shape != rows.shape:
            message = f"expects probs of the shape of the rows, {tuple(rows.shape)}, got {tuple(probs.shape)}"
            raise InputError(message, code="SF101", operation="Unpermute")

    def reference(self, x: Tensor, *, rows: Tensor, offsets: Tensor, probs: Tensor | None = None) -> Tensor:
        self.check(x, rows, probs)
        return gathered(x, rows, offsets, probs)

    def fwd(self, x: Tensor, *, rows: Tensor, offsets: Tensor, probs: Tensor | None = None) -> tuple[Tensor, Saved]:
        self.check(x, rows, probs)
        kept = None if probs is None else x
        return summed(x, rows, offsets, probs), self.Saved(x=kept, probs=probs, rows=rows, offsets=offsets)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        rows, size = saved.rows, dy.shape[-1]
        at, flat = _flat(rows, rows.shape[-1]), _flat(dy, size)
        probs = saved.probs.reshape(at.shape) if "x" in needs and saved.probs is not None else None
        x = _flat(saved.x, size) if "probs" in needs and saved.x is not None else None
        given: dict[str, Any] = {"spread": "x" in needs, "sums": None if x is None else dtype_of_sums(dy, probs)}

        def run() -> tuple[Tensor | None, Tensor | None]:
            factors = None if probs is None else probs.contiguous()
            return kernels_of("permute").spread_rows(flat, at, saved.offsets, factors=factors, other=x, **given)

        made = _by_kernel(dy, run)
        dx, dprobs = _spread(flat, at, saved.offsets, probs, x, **given) if made is None else made
        dx = None if dx is None else dx.view(*rows.shape, size)
        return dx, {"probs": None if dprobs is None else dprobs.view(rows.shape), "rows": None, "offsets": None}

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) < 2:
            raise ValueError(f"expects [*, top_k, H], got shape {tuple(shape)}")
        return (*shape[:-2], shape[-1])

    @classmethod
    def example(cls, x: Tensor) -> Unpermute:
        return cls()

    def extra_repr(self) -> str:
        return "" if self.probs == "probs" else f"probs={self.probs!r}"
