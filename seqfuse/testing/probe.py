"""One fusion on one op sequence: where it is used, and how its results compare with those of the operations."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..env import Savings
from ..errors import FallbackWarning, KernelError
from ..fusion import (
    BackwardFusion,
    ForwardFusion,
    FusedOperation,
    InferenceFusion,
    JointFusion,
    records_of,
    unknown_slots,
    wrong_record,
)
from ..plan import Plan, Step
from ..saved import Recompute, Saved
from ..settings import fusing
from .cases import Bench, Case, OnPass, Outcome, Specimen, cases, few_rows, subsets, uncounted
from .judge import (
    assert_alike,
    assert_like_inputs,
    assert_only_wanted,
    assert_own_memory,
    assert_reads_records,
    assert_repeats,
    assert_saves_parameters,
    judge,
    judge_case,
    saying,
)
from .observe import Observer, Pass, pass_name
from .structure import Tree, assert_bitwise_equal, bits
from .tensors import varied

_COMBINATIONS = {
    ForwardFusion: "fused forward x unfused backward",
    BackwardFusion: "unfused forward x fused backward",
    JointFusion: "fused forward x fused backward",
    InferenceFusion: "fused forward, no gradient wanted",
}


class NotRun(AssertionError):
    """`check_fusion` could not run the fusion: where its pattern matched, its requirements did not hold."""


class Probe:
    """One fusion on one sequence in one dtype, with all its checks."""

    def __init__(self, fusion: type[FusedOperation], specimen: Specimen, dtype: torch.dtype) -> None:
        self.fusion, self.specimen, self.dtype, self.seed = fusion, specimen, dtype, specimen.seed
        self._plans: dict[tuple[Any, ...], str | None] = {}
        self.combination = next(text for kind, text in _COMBINATIONS.items() if issubclass(fusion, kind))
        self.start = 0

    def bench(self, on_step: OnPass | None = None) -> Bench:
        """A bench of a new copy of the sequence with the fusion."""
        return self.specimen.bench(self.dtype, (self.fusion,), on_step)

    def find(self, plan: Plan) -> Step:
        """The step of a plan that is this fusion; raises AssertionError with the reasons if there is none."""
        steps = plan.backward if issubclass(self.fusion, BackwardFusion) else plan.forward
        used = [step for step in steps if type(step.operation) is self.fusion]
        if len(used) == 1:
            return used[0]
        if used:
            raise AssertionError(f"its pattern matches {len(used)} times; give the operations of one match")
        reasons = [f"{r.reason} (at position {r.at})" for r in plan.refused if r.fusion == self.fusion.__name__]
        slots = ", ".join(slot.name for slot in self.fusion.slots)
        why = "; ".join(dict.fromkeys(reasons)) or f"its pattern ({slots}) matches nowhere in {', '.join(plan.names)}"
        slips = "requires raised", "saves raised", "not in the signature of its"
        mistaken = not reasons or any(slip in reason for reason in reasons for slip in slips)
        raise (AssertionError if mistaken else NotRun)(f"it is not used: {why}")

    def place(self) -> AssertionError | None:
        """Find the fusion in the plan and name parameters by its slots; returns the error if the fusion is not used."""
        grad = not issubclass(self.fusion, InferenceFusion)
        self.plan = plan = self._plan(Case(tuple(self.specimen.x.shape), self.dtype, grad=grad))
        try:
            step = self.find(plan)
        except AssertionError as error:
            return error
        savings = step.operation.saves(plan.env)
        if not isinstance(savings, Savings):
            raise AssertionError(f"saves must return sf.Savings, not {savings!r}")
        places = (place for place, _ in step.operation.named_operations())
        outside = {i: f"{node.name.lower()}@{i}" for i, node in enumerate(self.specimen.nodes)}
        self.specimen.places = outside | dict(enumerate(places, step.covers.start))
        self.start = step.covers.start
        return None

    def uncounted(self) -> list[str]:
        """Which bytes the plan found by `place` cannot count, and why."""
        return uncounted(self.plan, saved=not issubclass(self.fusion, BackwardFusion))

    def _plan(self, case: Case) -> Plan:
        inputs = self.specimen.inputs_for(case, self.seed)
        with torch.set_grad_enabled(case.grad):
            given: dict[str, Any] = {
                name: t.requires_grad_(case.grad and t.is_floating_point()) for name, t in inputs.items()
            }
            return self.bench().plan(**given)

    def _refused(self, case: Case) -> str | None:
        """Why the fusion is not used in a case, such as too few rows; None with frozen parameters or no rows."""
        if case.frozen or not torch.Size(case.shape).numel():
            return None
        key = case.shape, case.layout, case.dy_layout, case.grad
        if key not in self._plans:
            try:
                self.find(self._plan(case))
                self._plans[key] = None
            except AssertionError as error:
                self._plans[key] = str(error)
        return self._plans[key]

    def check(self, where: str, *, whole: bool) -> tuple[int, list[str]]:
        """Run every case, or only a few for a variant of a sequence that ran all.

        Returns the number of cases, and which were skipped because the fusion is not applied there.
        """
        inference = issubclass(self.fusion, InferenceFusion)
        shapes = self.specimen.shapes()
        either = few_rows(shapes), tuple(self.specimen.x.shape)
        candidates = (Case(shape, self.dtype, grad=not inference) for shape in either)
        few = next(case for case in candidates if self._refused(case) is None)
        backward = issubclass(self.fusion, BackwardFusion)
        everything = [case for case in cases(shapes, self.dtype, self.specimen.outputs) if case.grad or not backward]
        chosen = everything if whole else [*everything[:2], everything[-1]]
        chosen = [dataclasses.replace(case, grad=case.grad and not inference) for case in chosen]
        if whole:
            names = self.specimen.names()
            frozen = [dataclasses.replace(few, frozen=frozenset(names) - wanted) for wanted in subsets(names)]
            chosen += [dataclasses.replace(frozen[0], grad=True), *frozen[1:]]
        with saying(f"{where}: {self.combination}, {few}"):
            self.specimen.observed(few, None, (self.fusion,), twice=True)
            once, bench, observer = self.specimen.observed(few, None, (self.fusion,))
            assert_repeats(self.specimen, bench, few, once)
        skipped: list[str] = []
        for case in dict.fromkeys(chosen):
            refused = self._refused(case)
            if refused is not None:
                skipped.append(f"{case}: {refused}")
                continue
            with saying(f"{where}: {self.combination}, {case}"):
                judge_case(functools.partial(self.measure, case), case, self.seed)
        with saying(f"{where}: {self.combination}, {few}"):
            self._check_reads(observer, bench)
            if whole:
                assert_alike(observer)
        with saying(f"{where}: after its parameters changed, {few}"):
            assert_bitwise_equal(self._changed(few, True), self._changed(few, False))
        for name in ("fwd", "bwd"):
            if hasattr(self.fusion, name):
                with saying(f"{where}: a {name} that fails, {few}"):
                    self._check_fallback(name, few)
        count = len(dict.fromkeys(chosen)) - len(skipped)
        return count, [*self.specimen.refused, *skipped] if whole else skipped

    def _own(self, case: Case, seed: int, *, wide: bool = False) -> tuple[Outcome, list[Saved]]:
        """The unfused outcome, if `wide` without gradients; the operations' saved tensors in the sequence's order."""
        if wide:
            case = dataclasses.replace(case, unused=frozenset(("y", *self.specimen.outputs)))
        # `check_op` watches operations.
        own, _, observer = self.specimen.observed(case, seed, watches=False, wide=wide)
        return own, [ahead.out[-1] for ahead in observer.passes("fwd")]

    def measure(self, case: Case, seed: int) -> tuple[Tree, Tree, Tree]:
        """A case fused, unfused and in float64; raises AssertionError for failures other than numeric ones."""
        fused, bench, observer = self.specimen.observed(case, seed, (self.fusion,))
        unfused, own = self._own(case, seed)
        assert_own_memory(fused, unfused)
        if not torch.equal(fused.random, unfused.random):
            raise AssertionError("torch's random generator is left in another state than by the operations")
        self._check_passes(case, observer, bench, fused.inputs)
        # Wrong saved tensors cause wrong gradients, so they are reported first.
        f, u, r = dict[str, Tensor | None](), dict[str, Tensor | None](), dict[str, Tensor | None]()
        infinite = case.regime == "one_inf"
        for ahead in observer.passes("fwd"):
            saved, parameters = self._saved(ahead, fused, unfused)
            if saved is None:
                continue
            places = [place for place, _ in cast(FusedOperation, ahead.owner).named_operations()]
            both = own, self._own(case, seed, wide=True)[1]
            records, exact = (dict(zip(places, made[self.start :], strict=False)) for made in both)
            owner = cast(FusedOperation, ahead.owner)
            for name, *tensors in saved_fields(owner, saved, records, exact, parameters):
                f[name], u[name], r[name] = map(_spoiled, tensors) if infinite else tensors
        trees: list[dict[str, Any]] = [fused.tree, unfused.tree, self.specimen.references(case, seed, wide=True).tree]
        if infinite and self.fusion.reorders:
            trees = [{name: t if t is None else _spoiled(t) for name, t in tree.items()} for tree in trees]
        f, u, r = f | trees[0], u | trees[1], r | trees[2]
        if infinite and self.fusion.reorders:
            # A norm's statistic is 0 for a row with Inf, and NaN for a row with NaN.
            for name, mine in f.items():
                if mine is not None and mine.is_floating_point():
                    u[name], r[name] = (_spoiled_where(mine.isnan(), tree[name]) for tree in (u, r))
        return f, u, r

    def _saved(self, ahead: Pass, fused: Outcome, unfused: Outcome) -> tuple[Any, dict[int, Tensor]]:
        """Saved tensors to compare with the operations', and the parameters that must be among them."""
        if issubclass(self.fusion, ForwardFusion):
            if ahead.kwargs.get("needs") == frozenset():  # it saves nothing
                return None, {}
            pairs = zip(unfused.parameters.values(), fused.parameters.values(), strict=True)
            return ahead.out[-1], {id(own): parameter for own, parameter in pairs}
        unfuse = getattr(ahead.owner, "unfused", None)
        if unfuse is None:
            return None, {}
        with torch.no_grad():
            return unfuse(ahead.out[-1]), {}

    def _check_passes(self, case: Case, observer: Observer, bench: Bench, given: Mapping[str, Tensor]) -> None:
        """The fusion ran in every case that it cannot refuse; its backward returned exactly the needed gradients.

        Gradients of extra inputs have the dtypes of these, in `given`.
        """
        plain = not (case.frozen or case.unused) and torch.Size(case.shape).numel()
        for name, runs in (("fwd", self.fusion.replaces_forward), ("bwd", self.fusion.replaces_backward and case.grad)):
            if plain and runs and not observer.passes(name):
                raise AssertionError(f"its {name} did not run")
        nodes = bench.nodes
        for back in observer.passes("bwd"):
            places = [place for place, _ in cast(FusedOperation, back.owner).named_operations()]
            inside = nodes[self.start : self.start + len(places)]
            if not case.frozen:  # a saved tensor whose dtype tells that of a gradient may be dropped otherwise
                read = [(f"{place}.{n}", c) for place, node in zip(places, inside, strict=True) for n, c in node.inputs]
                assert_like_inputs(back, {name: given[channel] for name, channel in read if channel in given})
            if "needs" in back.kwargs:
                own = {channel for node in inside for _, channel in node.outputs}  # inner channels: no gradients in bwd
                each = [
                    (*node.slots, *(name for name, channel in node.inputs if channel not in own)) for node in inside
                ]
                names = [f"{place}.{name}" for place, named in zip(places, each, strict=True) for name in named]
                assert_only_wanted(back, back.kwargs["needs"], names)

    def _check_reads(self, observer: Observer, bench: Bench) -> None:
        for run in observer.seen:
            places = [place for place, _ in cast(FusedOperation, run.owner).named_operations()]
            inside = zip(places, bench.nodes[self.start :], strict=False)
            parameters = {f"{place}.{n}": slot for place, node in inside for n, slot in node.slots.items()}
            if run.name == "bwd":
                assert_reads_records(run, parameters)
            elif isinstance(run.owner, JointFusion):  # other fusions' fields are compared with the operations'
                assert_saves_parameters(run.out[-1], parameters, views=True)

    def _changed(self, case: Case, called: bool) -> Tree:
        """Results after the parameters changed, with or without a call before; both must be equal."""
        bench = self.bench()
        if called:
            self.specimen.run(bench, case, self.seed)
        with torch.no_grad():
            for p in bench.root.parameters():
                p.copy_(varied(p, self.seed + 1))
        return self.specimen.run(bench, case, self.seed).tree

    def _check_fallback(self, name: str, case: Case) -> None:
        calls: list[str] = []

        def fail(step: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
            if not step.fused or pass_name(step, run) != name:
                return run(*args, **kwargs)
            calls.append(name)
            raise RuntimeError("injected by the test kit")

        def run(seed: int) -> Outcome:
            with fusing(on_error="fallback"), warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                return self.specimen.run(self.bench(fail), case, seed)

        recovers = hasattr(self.fusion, "unfused")
        if name == "bwd" and issubclass(self.fusion, JointFusion) and not recovers:
            try:
                run(self.seed)
            except KernelError:
                return
            raise AssertionError("raised no KernelError, and there is no unfused(saved)")
        unfused = self._own(case, self.seed)[0]
        if name == "bwd" and issubclass(self.fusion, JointFusion):

            def measure(seed: int) -> tuple[Tree, Tree, Tree]:
                wide = self.specimen.references(case, seed, wide=True)
                return run(seed).tree, self._own(case, seed)[0].tree, wide.tree

            judge(measure, self.seed)
        else:
            assert_bitwise_equal(run(self.seed).tree, unfused.tree)
        if not calls:
            raise AssertionError("it did not run")


def _spoiled(saved: Tensor) -> Tensor:
    """The tensor with NaN for Inf: the order of a sum that has Infs, such as a mean, decides between Inf and NaN."""
    return saved.masked_fill(saved.isinf(), torch.nan) if saved.is_floating_point() else saved


def _spoiled_where(spoiled: Tensor, t: Tensor | None) -> Tensor | None:
    """A tensor with NaN instead of 0 in the elements that are `spoiled`."""
    if t is None or t.shape != spoiled.shape:
        return t
    return torch.where(spoiled & (t == 0), torch.nan, t)


def saved_fields(
    fusion: FusedOperation,
    saved: Mapping[str, Any],
    own: Mapping[str, Saved],
    exact: Mapping[str, Saved],
    parameters: Mapping[int, Tensor],
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yields the saved tensors to compare numerically by name, fused, unfused and in float64; compares the rest.

    `parameters` are, by `id` of a parameter that an operation saved, those that the fusion must save.
    """
    found, operations = dict(records_of(fusion, saved)), dict(fusion.named_operations())
    for place, mine in own.items():
        record = found.pop(place, None)
        if record is None and operations[place].own_record(None) is not None:
            continue  # the engine creates it
        if record is None or type(record) is not type(mine):
            raise AssertionError(wrong_record(place, operations[place], mine, record))
        for field in mine.fields:
            name, u = f"field {field!r} of slot {place!r}", stored(mine, field)
            parameter = parameters.get(id(u))
            if parameter is None:
                yield from _tensors(name, stored(record, field), u, stored(exact[place], field))
            elif stored(record, field) is not parameter:
                raise AssertionError(f"{name} must be the parameter itself, not a copy or a view of it")
    if found:
        raise AssertionError(unknown_slots(fusion, found))


def _tensors(name: str, f: Any, u: Any, r: Any) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    if isinstance(u, tuple) and isinstance(f, tuple):
        mine, its = cast(tuple[Any, ...], f), cast(tuple[Any, ...], u)
        if len(mine) == len(its):
            for i in range(len(its)):
                yield from _tensors(f"{name}[{i}]", mine[i], its[i], r[i])
            return
    if isinstance(u, Tensor) and isinstance(f, Tensor):
        yield name, f.detach(), u.detach(), (r.double() if u.is_floating_point() else r).detach()
    elif type(cast(object, f)) is not type(cast(object, u)) or f != u:
        raise AssertionError(f"{name} should be {u!r}, not {f!r}")


def stored(record: Saved, field: str) -> Any:
    """The value of a saved field; a `Recompute` is evaluated but stays in the record."""
    late: Mapping[str, Recompute] = vars(record).get("_late", {})
    if field not in late or field in vars(record):
        return vars(record)[field]
    fn: Any = late[field].fn
    while isinstance(fn, functools.partial):
        fn = cast(Any, fn).func
    if "<" in getattr(fn, "__qualname__", "<"):
        raise AssertionError(f"field {field!r}: the function of a Recompute must be a module-level one, got {fn!r}")
    once, again = late[field](), late[field]()
    if once.dtype is not again.dtype or not torch.equal(bits(once), bits(again)):
        raise AssertionError(f"field {field!r}: its Recompute gives other bits when evaluated again")
    return once
