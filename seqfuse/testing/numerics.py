"""The error bound that decides whether a fused result equals the unfused one.

Both are compared with the unfused operations run in float64 on the same representable inputs. With fused `f`,
unfused `u` and reference `r`: `e_f = f - r`, `e_u = u - r`, `phi = eps |r| + tiny`. The bound accepts an error that
the unfused computation could have made, so it needs no tolerance from the caller: inputs that are hard for one are
hard for both.

The constants were chosen with seeded bugs and correct variants: in `tests/testing` every bug fails, no variant does.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .structure import Tree, index_of, named_tensors, share_storage

__tracebackhide__ = operator.methodcaller("errisinstance", AssertionError)  # pytest shows the test and the message

PARTS = ("structure", "max", "rms", "tile", "element", "bias")
"""The parts of the error bound, in the order of the checks."""

# The mean of few, or of few independent, elements is a poor estimate of a bias.
_BIAS_ROWS, _BIAS_ELEMENTS = 16, 256
# Number of rows and columns from which the median error of a row or column estimates the errors of its elements.
_LOCAL = 256
_MEDIAN_OF_NORMAL = 0.6745  # the median of |e| in standard deviations
# The float64 reference is no more accurate than a float64 result: both have errors from ill-conditioned sums. So the
# floor is 2**12 eps of the scale of the whole tensor, still far below any defect that is not rounding.
_FLOAT64_UNITS = 2.0**12
# Half an ulp of float32 in units of phi: the most by which rounding once changes a constant.
_ROUNDED_CONSTANT = 0.25


@dataclass(frozen=True, slots=True)
class Check:
    """One part of the error bound for one tensor; it holds if `measured <= bound`.

    `where` is the worst index or tile, `dtype` the dtype of the tensor (`None` for structure), `elements` its number of
    elements.
    """

    tensor: str
    part: str
    measured: float
    bound: float
    where: str
    what: str
    dtype: torch.dtype | None = None
    elements: int = 0

    @property
    def holds(self) -> bool:
        return self.measured <= self.bound  # NaN does not hold

    @property
    def may_be_a_constant(self) -> bool:
        """Whether it is a float32 bias small enough to come from one rounded constant."""
        small = self.measured <= self.bound + _ROUNDED_CONSTANT
        return self.part == "bias" and self.dtype is torch.float32 and small

    def __str__(self) -> str:
        sign = "<=" if self.holds else ">"
        return f"{self.tensor}: {self.part}: {self.what} {self.measured:.4g} {sign} {self.bound:.4g} at {self.where}"


@dataclass(frozen=True, slots=True)
class Report:
    """All checks, in order. `str` shows them; `worst` is the check nearest to its bound."""

    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.holds)

    @property
    def not_finite(self) -> bool:
        """Whether a failure contains a NaN or an Inf."""
        return any(check.what.startswith("NaN or Inf") for check in self.failures)

    @property
    def worst(self) -> Check | None:
        return max(
            self.checks, key=lambda c: c.measured / c.bound if c.bound > 0 else float(c.measured > 0), default=None
        )

    @property
    def told(self) -> tuple[Check, ...]:
        """The first failure of each tensor, in the order of `PARTS`: a defect usually fails the later parts, too."""
        found: dict[str, Check] = {}
        for check in self.failures:
            found.setdefault(check.tensor, check)
        return tuple(found.values())

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))


_HINT = (
    "\n  (at most half an ulp of float32: a rounded constant, such as 3 * c? check with powers of two for constants, "
    "or multiply by each in turn, as the operations do)"
)


class FusedMismatch(AssertionError):
    """A fused result differs from the unfused one beyond the error bound; `report` has the measurements."""

    def __init__(self, report: Report, what: str = "fused differs from unfused", note: str = "") -> None:
        self.report = report
        hint = _HINT if all(check.may_be_a_constant for check in report.failures) else ""
        told = report.told
        saved = [check.tensor.startswith("field ") for check in told]
        first = "\n  (saved fields differ first: the gradients follow from them)"
        hint += first if any(saved) and not all(saved) else ""
        super().__init__(f"{what}\n" + "\n".join(f"  {check}" for check in told) + hint + note)


def assert_fused_close(
    fused: Tree, unfused: Tree, reference: Tree, *, name: str = "", others: Sequence[Tree] = ()
) -> Report:
    """Check a fused result against the unfused one, within an error bound for its dtype; returns the measurements.

    Each argument is a tensor, or a mapping or sequence of tensors with the same names (`out`, `d_x`, `weight.grad`,
    ...); None is a gradient that is not needed and must be None in all three. `fused` and `unfused` have the working
    dtype, `reference` float64. `others` are further results of the unfused operations, with another order of summation
    (library, device): `e_u` is then the root mean square of their errors, with the sign of the first, since a single
    result may have a small error by chance.

    | part | condition |
    | --- | --- |
    | structure | same shape, dtype, device, requires_grad; own storage; NaN, Inf as in `u`, or as or near `r` |
    | max | `max|e_f| <= 2 max|e_u| + max phi` |
    | rms | `rms(e_f) <= 1.5 rms(e_u) + 0.6 rms(phi)` |
    | tile | each row and column: `rms(e_f) <= (2 max(rms(e_u), its mean over rows) + rms(phi)) (1 + 2/sqrt(n))` |
    | element | `|e_f| <= 6 max(rms(e_u), local(e_u)) + 4 |e_u| + 2 phi + 0.5 rms(phi)` |
    | bias | from 16 rows, 256 elements: mean of `e_f/phi`, also times sign(r): `|mean_f| <= |mean_u| + 4 se + 0.03` |

    `local(e_u)`, from 256 rows and columns on, is the median of the element's row times the median of its column over
    the total median, as the deviation of a normal distribution.
    Errors of weight gradients are larger for heads or channels with larger values: of fifty million elements some
    exceed 6 rms, even between two summation orders of torch. `eps` is the dtype's, twice it for float32; `se` is
    clustered by row, and also by column if column sums vary more than twice as much as for independent elements
    (Cameron, Gelbach, Miller 2011). It does not check that inputs are unchanged; use `Untouched`.
    Raises `FusedMismatch` (an `AssertionError`) with tensor, part, measured value, bound and worst index, and
    `TypeError` if the reference is not float64.
    """
    report = compared(fused, unfused, reference, name=name, others=others)
    if report.failures:
        raise FusedMismatch(report)
    return report


def compared(
    fused: Tree, unfused: Tree, reference: Tree, *, name: str = "", others: Sequence[Tree] = (), skips: bool = False
) -> Report:
    """The measurements of `assert_fused_close`; with `skips`, without those of tensors that equal the unfused ones."""
    trees = [dict(named_tensors(tree, name)) for tree in (fused, unfused, reference)]
    more = [dict(named_tensors(tree, name)) for tree in others]
    names = trees[1].keys()
    for side, tree in (("fused", trees[0]), ("reference", trees[2])):
        if tree.keys() != names:
            extra, missing = sorted(tree.keys() - names), sorted(names - tree.keys())
            _fail(name or "all", f"{side} has other tensors than unfused: surplus {extra}, missing {missing}")
    for tree in more:
        if tree.keys() != names:
            _fail(name or "all", f"another unfused result has the tensors {sorted(tree)}, not {sorted(names)}")
    f, u, r = trees
    checks: list[Check] = []
    for key in names:
        checks += _compare(key, f[key], u[key], r[key], [tree[key] for tree in more], skips)
    return Report(tuple(checks))


def _fail(tensor: str, sentence: str) -> None:
    raise FusedMismatch(Report((_broken(tensor, sentence),)))


def _broken(tensor: str, sentence: str, count: int = 1, where: str = "the whole tensor") -> Check:
    return Check(tensor, "structure", float(count), 0.0, where, sentence)


def _compare(
    name: str, f: Tensor | None, u: Tensor | None, r: Tensor | None, others: Sequence[Tensor | None], skips: bool
) -> Iterator[Check]:
    if f is None or u is None or r is None:
        if not (f is u is r):
            sides = zip(("fused", "unfused", "reference"), (f, u, r), strict=True)
            yield _broken(
                name, "None on one side only: " + ", ".join(f"{s} {'None' if t is None else 'set'}" for s, t in sides)
            )
        return
    problems = [
        _broken(name, f"{what} {mine} where unfused has {its}")
        for what, mine, its in (
            ("shape", tuple(f.shape), tuple(u.shape)),
            ("dtype", f.dtype, u.dtype),
            ("device", f.device, u.device),
            ("requires_grad", f.requires_grad, u.requires_grad),
        )
        if mine != its
    ]
    problems += [
        _broken(name, f"another unfused result of {tuple(t.shape)}, {t.dtype}")
        for t in others
        if t is not None and (t.shape, t.dtype) != (u.shape, u.dtype)
    ]
    if r.shape != u.shape:
        problems.append(_broken(name, f"reference of shape {tuple(r.shape)} for {tuple(u.shape)}"))
    if share_storage(f, u) or share_storage(f, r) or share_storage(u, r):
        problems.append(_broken(name, "two of the three results are one storage, so the comparison says nothing"))
    if problems:
        yield from problems
        return
    f, u, r = f.detach(), u.detach(), r.detach().to(f.device)
    if not u.is_floating_point():
        wrong = int((f != u).sum().item())
        yield Check(name, "structure", float(wrong), 0.0, "the whole tensor", "unequal integer elements")
        return
    if r.dtype != torch.float64:
        raise TypeError(f"{name}: the reference must be float64, got {r.dtype}")
    if u.numel() and not (skips and not others and torch.equal(f, u)):  # equal errors are within each part
        sample = Sample(name, f, u, r, [t.detach().to(f.device) for t in others if t is not None])
        yield sample.non_finite()
        for part in (sample.maximum, sample.rms, sample.tiles, sample.elements, sample.bias):
            yield from part()


def _rms(values: Tensor, count: Tensor, dim: int | None = None) -> Tensor:
    # Scaled by the largest element: squares of values near float64's limits overflow.
    scale = values.abs().amax().clamp_min(torch.finfo(torch.float64).tiny)
    squares = (values / scale).square()
    return (squares.sum() if dim is None else squares.sum(dim)).div(count.clamp_min(1)).sqrt() * scale


def _median(values: Tensor, dim: int) -> Tensor:
    # On a GPU `median` raises in deterministic mode.
    if values.device.type == "cpu":
        return values.median(dim, keepdim=True).values
    return values.sort(dim).values.narrow(dim, (values.shape[dim] - 1) // 2, 1)


class Sample:
    """Errors of one tensor as [rows, columns] in float64; 0 and not counted where any of the three is not finite."""

    def __init__(self, name: str, f: Tensor, u: Tensor, r: Tensor, others: Sequence[Tensor] = ()) -> None:
        self.name, self.shape = name, tuple(f.shape)
        columns = self.shape[-1] if self.shape else 1
        self.raw = f.reshape(-1, columns), u.reshape(-1, columns)
        f, u, r, *more = (t.reshape(-1, columns).double() for t in (f, u, r, *others))
        self.counted = f.isfinite() & u.isfinite() & r.isfinite()
        self.f, self.u, self.r = f, u, r
        clean = torch.where(self.counted, r, 0.0)
        self.e_f = torch.where(self.counted, f - r, 0.0)
        self.e_u = torch.where(self.counted, u - r, 0.0)
        if more:
            errors = [self.e_u, *(torch.where(self.counted & t.isfinite(), t - r, self.e_u) for t in more)]
            self.e_u = torch.stack(errors).square().mean(0).sqrt().copysign(self.e_u)
        self.count = self.counted.sum()
        self.phi = torch.where(self.counted, self._floor(clean, clean), 0.0)
        self.rms_u, self.rms_phi = _rms(self.e_u, self.count), _rms(self.phi, self.count)

    def _floor(self, r: Tensor, counted: Tensor) -> Tensor:
        info = torch.finfo(self.raw[0].dtype)
        if info.dtype == "float64":
            eps = _FLOAT64_UNITS * info.eps
            return eps * r.abs() + eps * _rms(counted, self.count) + info.tiny
        return (2 * info.eps if info.dtype == "float32" else info.eps) * r.abs() + info.tiny

    def _where(self, position: int) -> str:
        return str(index_of(position, self.shape))

    def _check(self, part: str, measured: Tensor, bound: Tensor, where: str, what: str) -> Check:
        return Check(self.name, part, measured.item(), bound.item(), where, what, self.raw[0].dtype, self.f.numel())

    def non_finite(self) -> Check:
        """NaN and Inf must be where `u` has them; where `u` is not finite, `f` may also equal `r`, or be finite and
        close.

        Fused may have a larger range, but must not lose a NaN of `u`. If `u` itself loses a NaN, as torch's CPU
        attention does in its log-sum-exp, `f` must equal `u` bit for bit, since no other expected value exists.
        """
        f, u = self.f, self.u
        if int(self.count.item()) == f.numel():
            return _broken(self.name, "NaN and Inf", 0)
        same = (f.isnan() & u.isnan()) | (f == u)
        floor = self._floor(torch.where(self.r.isfinite(), self.r, 0.0), torch.where(self.counted, self.r, 0.0))
        close = (f - self.r).abs() <= 6 * self.rms_u + 2 * floor + 0.5 * self.rms_phi
        swallowed = ~(f.isfinite() & self.r.isfinite()) & (f != u)
        wrong = torch.where(u.isfinite(), swallowed, ~same & (f != self.r) & ~(f.isfinite() & close))
        total = int(wrong.sum().item())
        at = int(wrong.flatten().int().argmax().item())
        f_at, u_at, r_at = (t.flatten()[at].item() for t in (f, u, self.r))
        if not total:
            return _broken(self.name, "NaN and Inf", 0)
        what = f"NaN or Inf differs (fused {f_at:.4g}, unfused {u_at:.4g}, reference {r_at:.4g}) in elements:"
        return _broken(self.name, what, total, self._where(at))

    def maximum(self) -> Iterator[Check]:
        size = self.e_f.abs()
        bound = 2 * self.e_u.abs().max() + self.phi.max()
        yield self._check("max", size.max(), bound, self._where(int(size.argmax().item())), "max|e_f|")

    def rms(self) -> Iterator[Check]:
        bound = 1.5 * self.rms_u + 0.6 * self.rms_phi
        worst = int(self.e_f.abs().argmax().item())
        yield self._check("rms", _rms(self.e_f, self.count), bound, self._where(worst), "rms(e_f)")

    def tiles(self) -> Iterator[Check]:
        """Rows along the last dimension and columns across it; single elements are left to the element part."""
        rows, columns = self.counted.shape
        for kind, dim, length in (("row", 1, columns), ("column", 0, rows)):
            if length == 1 or (kind == "row" and rows == 1):  # for a single row the rms part is stricter
                continue
            n = self.counted.sum(dim)
            u = _rms(self.e_u, n, dim)
            mean = u.sum() / (n > 0).sum().clamp_min(1)
            bound = (2 * torch.maximum(u, mean) + _rms(self.phi, n, dim)) * (1 + 2 / n.clamp_min(1).sqrt())
            measured = _rms(self.e_f, n, dim)
            worst = int((measured / bound).nan_to_num(0.0).argmax().item())
            where = f"row {index_of(worst, self.shape[:-1])}" if kind == "row" else f"column {worst}"
            yield self._check("tile", measured[worst], bound[worst], where, f"rms(e_f) of a {kind}")

    def elements(self) -> Iterator[Check]:
        bound = 6 * self._local() + 4 * self.e_u.abs() + 2 * self.phi + 0.5 * self.rms_phi
        size = self.e_f.abs()
        worst = int((size / bound).nan_to_num(0.0).argmax().item())
        yield self._check("element", size.flatten()[worst], bound.flatten()[worst], self._where(worst), "|e_f|")

    def _local(self) -> Tensor:
        """The scale of an element's error: the rms of all errors, or more if those of its row and column are larger."""
        if min(self.counted.shape) < _LOCAL:
            return self.rms_u
        # From medians, which one error does not move: the rows and columns of outliers do not loosen the bound.
        size = self.e_u.abs()
        row, column = (_median(size, dim) for dim in (1, 0))
        product = row * column / (size.median() * _MEDIAN_OF_NORMAL)
        return torch.maximum(self.rms_u, product.nan_to_num(0.0, 0.0, 0.0))

    def bias(self) -> Iterator[Check]:
        """Rounding errors have no direction: neither up or down, nor toward or away from zero."""
        rows = (self.counted.sum(1) > 0).sum()
        if rows.item() < _BIAS_ROWS or self.count.item() < _BIAS_ELEMENTS:
            return
        phi = torch.where(self.counted, self.phi, 1.0)
        for kind, weight in (("e_f/phi", torch.ones_like(self.r)), ("sign(r) e_f/phi", self.r.nan_to_num(0.0).sign())):
            z_f, z_u = weight * self.e_f / phi, weight * self.e_u / phi
            mean_f, mean_u = z_f.sum() / self.count, z_u.sum() / self.count
            # Elements of a row share its statistics, so rows are the independent samples; but if rows are equal, as in
            # an expanded tensor, columns are, and the sums of columns vary far more than their elements do.
            off = torch.where(self.counted, z_f - mean_f, 0.0)
            spread = off.sum(1)
            by_row, by_column, single = (t.square().sum() for t in (spread, off.sum(0), off))
            shared = torch.where(by_column > 2 * single, by_column - single, 0.0)
            se = ((by_row + shared) * rows / (rows - 1)).sqrt() / self.count
            worst = index_of(int(spread.abs().argmax().item()), self.shape[:-1])
            yield self._check("bias", mean_f.abs(), mean_u.abs() + 4 * se + 0.03, f"row {worst}", f"|mean {kind}|")
