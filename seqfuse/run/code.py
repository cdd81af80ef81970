"""Generates Python code for the steps of a segment: records, channels and gradients are local variables.

A forward saves the fields of its records in one order, `Saves`, which follows from the steps: first single tensors, a
recomputed field as the tensors that it is recomputed from, then the tensors of fields with several. If a call differs
from the first one in this, or saved-tensor hooks are installed, `pack` records the place of each field. Checks, partial
gradients and `main_grad` buffers are generated only into the code of calls that need them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import PluginError
from ..fusion import BackwardFusion
from ..generated import Source, identifier
from ..maingrad import MainGrads, accumulated
from ..plan.inputs import Like
from ..plan.step import Drawn, Record, Step, ending, fit
from ..saved import Layout, Recompute, Saved, put_field
from ..scaling import HISTORY
from .check import check_backward, check_forward
from .fallback import instead
from .lower import Buffered, Context, Late, NeededGrads, ParameterPlace, SavedAt, Segment


class BackwardVariant(NamedTuple):
    """The gradients that a backward gets and must return; each variant has its own generated code."""

    missing: tuple[bool, ...]  # for y and each output whether its gradient is missing
    needed: NeededGrads | None = None  # the needed gradients, unless all are needed
    late: Late | None = ()  # the recomputed fields; `None` if `pack` saved the records
    adds: bool = False  # whether parameters have a `main_grad`
    start: int | None = None  # the step to resume at after a fusion failed, with the variables of that moment


def _local(names: dict[str, str], prefix: str, channel: str) -> str:
    return names.setdefault(channel, f"{prefix}{len(names)}")


def likes_of(y: Tensor, made: Mapping[str, Tensor]) -> dict[str, Like]:
    """Descriptions of y, by the name "", and of extra outputs, by channel."""
    return {c: Like.of(t) for c, t in {"": y, **made}.items()}


def plus(known: Tensor | None, g: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be missing."""
    return g if known is None else known if g is None else known + g


def forward_code(segment: Segment, run: Mapping[str, Callable[..., Any]], checked: bool) -> Any:
    """`forward(ctx, segment, seeds, x, *channels)`, or `forward(segment, seeds, x, *channels)` where nothing is saved.

    `run` holds the functions of the node that it calls: `failed`, `pack`, `leave`, `own`, `hooks`. The node references
    the parameters of its AccumulateGrad nodes, which are alive anyway. The code that recomputes a segment ends as soon
    as all its saved tensors exist.
    """
    keep, saves = segment.live, segment.saves
    records = keep and segment.again is None
    stop = ending(segment.forward) if segment.replays else len(segment.forward)
    c = {name: f"c{i}" for i, name in enumerate(segment.inputs)}
    names = "".join(f", {c[name]}" for name in segment.inputs)
    s = Source("forward", f"{'ctx, ' if keep else ''}segment, seeds, x{names}{', *_' if keep else ''}")
    s.constants.update(run, fit=fit, tensor=(Tensor, type(None)))
    s.add("x0, at = x, 0" + "".join(f"; e{i} = c{i}" for i in range(len(segment.inputs))))
    s.add(*["kept, data = ctx.given"] * segment.replays)
    if keep and not records and segment.buffered:
        s.add(f"buffers = {s.put(functools.partial(_buffers, segment.buffered))}(())")
    s.add("try:")
    entered = "".join(f"e{i}, " for i in range(len(segment.inputs)))
    s.depth += 1
    likes = list[str]()
    weighed = [s for s in segment.forward[:stop] if s.weighs and not (segment.replays and s.start in segment.keeps)]
    saving, repeatable = {at for at, _ in saves.records}, True
    for i, step in enumerate(segment.forward):
        if i:
            s.add(f"at = {i}")
        if weighed[1:] and step is weighed[0]:
            gemms = [(one.operation, one.recipe, one.needed) for one in weighed]
            s.add(f"weights = {s.put(step.operation.quantized_weights)}({s.put(gemms)})")
        if i >= stop or (segment.replays and step.start in segment.keeps):
            _restore(s, segment, i)
            continue
        layout, lines = step.operation.layout, list[str]()
        _enter(s, step)
        given = [f"{identifier(k)}={_fitted(s, c[channel], layout)}" for k, channel in step.reads]
        given += [f"{identifier(k)}={_seed(index)}" for k, index in step.seeds]
        given += [f"{identifier(k)}={s.put(v)}" for k, v in step.constants(segment.context.env).items()]
        given += ["weights=weights.pop(0)"] if weighed[1:] and step in weighed else []
        results = ["x", *["made"] * bool(step.operation.outputs)]
        if not step.inference:
            results.append(f"s{i}" if i in saving else "_s")
        called, first = segment.context.called(step, step.operation.fwd), "x"
        if checked:
            called = functools.partial(_checked_forward, segment.context, segment.checked, step, called)
        if step.fused and not step.joint and not repeatable:
            called, first = functools.partial(instead, step, called), "segment, seeds, x"
        repeatable = repeatable and step.repeatable
        lines.append(f"{', '.join(results)} = {s.put(called)}({', '.join([first, *given])})")
        for name, channel in step.writes:
            lines.append(f"{_local(c, 'c', channel)} = made[{s.put(name)}]")
        if records and step.writes and step.zeros:
            made = ", ".join(f"{s.put(channel)}: {c[channel]}" for _, channel in step.writes)
            likes.append(f"{step.stop}: l{step.stop}")
            lines.append(f"l{step.stop} = {s.put(likes_of)}(x, {{{made}}})")
        lines += [f"y{step.start} = x"] * (step.start in segment.keeps)
        for j, (at, record) in enumerate(saves.records):
            if at == i:
                value = f"s{i}{''.join([f'[{key!r}]' for key in record.path])}"
                value = value if record.own is None else f"{s.put(record.own)}({_seed(record.seed)})"
                lines.append(f"f{j} = {value}.__dict__")
        if len(results) > 1:
            lines.append(f"{' = '.join(results[1:])} = None")  # freed before the next step runs
        s.add(*lines, *[f"{c[channel]} = None" for channel in step.ends if channel not in segment.outputs])
    s.depth -= 1
    rest = "*_, " if keep else ""
    s.add("except Exception as error:")
    s.add(f"    return failed({'ctx' if keep else 'None'}, segment, at, error, seeds, x0, ({entered}{rest}))")
    out = "".join(f", {c[name]}" for name in segment.outputs)
    if not keep:
        s.add(f"return x{out}")
        return _defined(s, segment.forward if checked else (), False)
    s.add("ctx.materialize_grads = False")
    if not records:
        names, held = s.put(saves.records[0][1].kept), s.put(functools.partial(_held, segment.slots))
        kept = "".join(f"y{at}, " for at in sorted(segment.keeps))
        if segment.buffered:
            kept += f"{s.put(functools.partial(_buffers, segment.buffered))}(buffers), "
        drawn = "seeds" if any(segment.context.nodes[p].seed is not None for p in segment.span) else "None"
        s.add(f"f0 = dict(zip({names}, (x0, {drawn}, {entered}*{held}(), {kept})))")
    leaves = "".join([f"_[{i}], " for i in range(len(segment.parameters)) if i not in segment.apart])
    leaves = f"({leaves})" if segment.apart and not segment.replays else "_"
    stated = f"{{{', '.join(likes)}}}" if likes else "None", leaves
    late = () if checked or segment.replays or not records else segment.late
    _save(s, segment, late, *stated, entered)
    if segment.replays:
        s.add("return None")
    elif segment.outputs:
        names = [c[name] for name in segment.outputs]
        if segment.crossing.issuperset(segment.outputs) and segment.frozen.isdisjoint(segment.outputs):
            apart = [f"{a} is not {b}" for a, b in itertools.combinations(["x", *names], 2)]
            s.add(f"if {' and '.join(apart)} and not x.requires_grad and not x._is_view(): return x{out}")
        s.add(f"return leave(ctx, segment, [x{out}], (x0, {entered}*_))")
    else:
        s.add(f"return x if not x.requires_grad and not x._is_view() else own(x, (x0, {entered}*_))")
    return _defined(s, segment.forward if checked else (), False)


def _held(slots: Sequence[ParameterPlace]) -> list[Any]:
    """The current parameters in these slots."""
    return [own if (own := owner._parameters.get(name)) is not None else getattr(owner, name) for owner, name in slots]  # pyright: ignore[reportPrivateUsage]


def _buffers(buffered: Buffered, before: Sequence[dict[str, Tensor]]) -> Sequence[dict[str, Tensor]]:
    """The buffers before a forward, and those that it registered, without maxima, which it only writes."""
    if before and all(before):
        return before
    found = list[dict[str, Tensor]]()
    for module, _ in buffered:
        held: dict[str, Tensor | None] = module._buffers  # pyright: ignore[reportPrivateUsage]
        found.append({k: t.clone() for k, t in held.items() if t is not None and not k.endswith(HISTORY)})
    return [one or now for one, now in zip(before, found, strict=True)] if before else found


def _restore(s: Source, segment: Segment, i: int) -> None:
    """Writes the records of a step that is not recomputed, and its result if that was saved."""
    step, given = segment.forward[i], segment.given or segment.saves
    for j, record in [(j, record) for j, (at, record) in enumerate(segment.saves.records) if at == i]:
        run, own = step.record_of(record)
        if own:
            seed = step.nodes[record.position - step.start].seed
            s.add(f"f{j} = {s.put(run)}({_seed(seed)}).__dict__")
            continue
        _enter(s, step)
        if run is not None:
            s.add(f"f{j} = {s.put(run)}(x).__dict__")
            continue
        places = [(f.name, f"kept[{k}]") for k, f in enumerate(given.tensors) if given.records[f.record][0] == i]
        places += [(f.name, f"data[{k}]") for k, f in enumerate(given.data) if given.records[f.record][0] == i]
        s.add(f"f{j} = {{'x': x, {', '.join(f'{s.put(name)}: {place}' for name, place in places)}}}")
    if step.start in segment.keeps:
        at = next(k for k, f in enumerate(given.tensors) if f.name == f"y{step.start}")
        s.add(f"x = kept[{at}]")


def _enter(s: Source, step: Step) -> None:
    if step.cast is not None:
        s.add(_recast(s, "x", step.cast))
    if step.operation.layout != "any":
        s.add(f"x = {_fitted(s, 'x', step.operation.layout)}")


def _defined(s: Source, checked: Sequence[Step], backward: bool) -> Any:
    """Compiles the function; it checks these steps."""
    function = s.define()
    function.checks = tuple((step.key, backward) for step in checked)
    return function


def _save(s: Source, segment: Segment, late: Late, likes: str, leaves: str, entered: str) -> None:
    """Writes the code that saves the fields in their order; `pack` handles unusual values and saved-tensor hooks."""
    saves, made_of = segment.saves, dict(late)
    data = [f"f{f.record}['{f.name}']" for f in saves.data]
    data += [*[f"len(u{i})" for i in range(len(saves.several))], *[f"m{i}.fn" for i in made_of]]
    kept = f"ctx.kept = segment, ({', '.join([*data, ''])}), {likes}, {leaves}, {s.put(late) if late else '()'}"
    if not saves.records:
        s.add(kept)
        return
    s.add(*[f"u{i} = f{f.record}.get('{f.name}')" for i, f in enumerate(saves.several)])
    again = [saves.tensors[i].record for i in made_of]
    usual = [f"len(f{j}['_late']) == {again.count(j)}" for j in dict.fromkeys(again)]
    usual += [f"len(m{i}.tensors) == {count}" for i, count in late]
    holding = dict.fromkeys([f.record for f in (*saves.tensors, *saves.several)])
    usual += [f"'_late' not in f{j}" for j in holding if j not in again]
    usual += [f"u{i}.__class__ is tuple" for i in range(len(saves.several))]
    usual += ["hooks(False) is None"] * (not segment.replays)
    plain = [(i, f, f"f{f.record}['{f.name}']") for i, f in enumerate(saves.tensors)]
    # Torch would raise only after the forward has returned, and name an argument, not an operation.
    usual += [
        f"isinstance({held}, tensor)"
        for i, f, held in plain
        if i not in made_of and not saves.records[f.record][1].cls.__module__.startswith("seqfuse.")
    ]
    tensors = [f"*m{i}.tensors" if i in made_of else held for i, _, held in plain]
    tensors += [f"*u{i}" for i in range(len(saves.several))]
    records = "".join([f"f{j}, " for j in range(len(saves.records))])
    s.add("try:")
    s.add(*[f"    m{i} = f{f.record}['_late']['{f.name}']" for i, f, _ in plain if i in made_of])
    s.add(f"    usual = {' and '.join(usual)}")
    s.add("    if usual:", f"        ctx.save_for_backward({', '.join(tensors)})", f"        {kept}")
    s.add("except KeyError:", "    usual = False")  # `pack` finds out which field it was
    s.add("if not usual:", f"    wrong = pack(ctx, segment, ({records}), {likes}, {leaves})")
    s.add(f"    if wrong: return failed(ctx, segment, *wrong, seeds, x0, ({entered}*_, ), True)")


def _checked_forward(
    context: Context, passed: set[Any], step: Step, run: Callable[..., Any], x: Tensor, /, **given: Any
) -> Any:
    """Runs a forward; checks its results until the check of its step has `passed`."""
    out = run(x, **given)
    context.dtypes[step.start] = x.dtype
    if (step.key, False) not in passed and check_forward(context, step, x, out, given):
        passed.add((step.key, False))
    return out


class _Backward:
    """Generates the code of a backward; it tracks which channels have a gradient at each step."""

    def __init__(self, segment: Segment, variant: BackwardVariant, checked: bool) -> None:
        self.segment, self.saves, self.variant, self.checked = segment, segment.saves, variant, checked
        self.g = {name: f"g{i}" for i, name in enumerate(segment.outputs)}
        self.s = self._source(", d" + "".join(f", {g}" for g in self.g.values()))
        self.has = {
            name: self.g[name] for name, lacks in zip(segment.outputs, variant.missing[1:], strict=True) if not lacks
        }
        self.known = not variant.missing[0]  # whether `d` is a tensor
        self.sums: dict[int, str] = {}
        self.made = 0  # number of records written so far
        self.steps: list[Step] = []
        self.at: Any = 0  # the value of the generated variable `at`
        self.last: list[str] = []  # the variables that this step reads last
        self.made_of = dict(variant.late or ())
        sizes = [self.made_of.get(i, 1) for i in range(len(self.saves.tensors))]
        self.places = [0, *itertools.accumulate(sizes)]  # the index of the first tensor of each field
        self.fields: dict[int, list[tuple[int, SavedAt]]] = {r.position: [] for _, r in self.saves.records}
        for i, f in enumerate((*self.saves.tensors, *self.saves.several)):
            self.fields[self.saves.records[f.record][1].position].append((i, f))

    @staticmethod
    def _source(given: str) -> Source:
        return Source("backward", "segment, kept, tensors, buffers, records" + given)

    def write(self, failed: Callable[..., Any]) -> Any:
        segment, needed, start = self.segment, self.variant.needed, self.variant.start or 0
        steps = segment.backward if needed is None else segment.narrowed(needed)
        places = {step.start: at for at, step in enumerate(segment.backward)}
        for step in steps:
            if places[step.start] < start:
                self._place(step, places[step.start])
        if self.variant.start is not None:  # the steps before have run already
            self.s, self.steps, self.at = self._source(", given"), [], start
        s = self.s
        s.constants.update(failed=failed, fit=fit, plus=plus)
        s.add(f"at = {start}")
        if self.variant.start is not None:
            known = dict.fromkeys(["d"] * self.known + [*self.has.values(), *self.sums.values()])
            s.add(*[f"{name} = given['{name}']" for name in known], "given = None")
        self._ends()
        s.add("try:")
        s.depth += 1
        for step in steps:
            if places[step.start] >= start:
                self._place(step, places[step.start])
        s.add(*["pass"] * (not self.steps))
        s.depth -= 1
        s.add("except Exception as error:")
        s.add(
            f"    return failed(segment, kept, at, error, tensors, buffers, records, locals(), {s.put(self.variant)})"
        )
        dx = "d" if self.known and (needed is None or needed[1]) else "None"
        inputs = "".join(f"{self.has.get(name, 'None')}, " for name in segment.inputs)
        sums = [self.sums.get(i, "None") for i in range(len(segment.parameters))]
        if self.variant.adds:
            s.add(f"sums = [{', '.join(sums)}]", "buffers.settle(sums)")
            s.add(f"return None, None, {dx}, {inputs}*sums")
        else:
            s.add(f"return None, None, {dx}, {inputs}{''.join(f'{one}, ' for one in sums)}")
        return _defined(s, self.steps if self.checked else (), True)

    def _place(self, step: Step, place: int) -> None:
        """Writes a step, or the operations of a fusion that misses a gradient."""
        lacking = [channel for _, channel in step.incoming if channel not in self.has]
        if not self.known and len(lacking) == len(step.incoming):
            return  # no gradient arrives
        if isinstance(step.operation, BackwardFusion) and step.incoming and (lacking or not self.known):
            for k, part in enumerate(step.unfused(backward=True)):  # fusions expect all their gradients as tensors
                self._begin((place, k))
                self._step(part)
        else:
            self._begin(place)
            self._step(step)

    def _begin(self, at: Any) -> None:
        if at != self.at:
            self.s.add(f"at = {at}")
        self.at = at

    def joint_record(self, step: Step) -> Any:
        """Generates `record(kept, tensors)`, which returns the record of a joint fusion."""
        self.s = Source("record", "kept, tensors")
        self._ends()
        self.s.add(f"return {self._record(step.records[0], 'any')}")
        return self.s.define()

    def _ends(self) -> None:
        """Writes the end indices of fields with several tensors."""
        self.s.add(*["data = kept[1]"] * bool(self.saves.data or self.saves.several or self.made_of))
        for i in range(0 if self.variant.late is None else len(self.saves.several)):
            self.s.add(f"b{i} = {f'b{i - 1}' if i else self.places[-1]} + data[{len(self.saves.data) + i}]")

    def _step(self, step: Step) -> None:
        s, has, env = self.s, self.has, self.segment.context.env
        came = [(keyword, channel, has.get(channel)) for keyword, channel in step.incoming]
        if not self.known and all(name is None for _, _, name in came):
            return
        layout, lets_go = step.operation.layout, self._lets_go(step)
        zeros = bool(came) and step.zeros and not isinstance(step.operation, BackwardFusion)
        if not self.known:
            s.add(f"d = kept[2][{step.stop}][''].zeros()" if zeros else "d = None")
            self.known = zeros
        if self.known and step.dy_dtype is not None:
            s.add(_recast(s, "d", step.dy_dtype))
        names: list[tuple[str, str]] = []
        for keyword, channel, name in came:
            if name is None and zeros and step.joint:
                name = _local(self.g, "g", channel)
                s.add(f"{name} = kept[2][{step.stop}][{s.put(channel)}].zeros()")
            elif name is not None and layout != "any":
                s.add(f"{name} = {_fitted(s, name, layout)}")
            names.append((identifier(keyword), name or "None"))
        if self.known and layout != "any":
            s.add(f"d = {_fitted(s, 'd', layout)}")
        own = [self._record(record, layout) for record in step.records]
        if self.segment.replays:  # if a fusion fails, it is recomputed from its start
            self._let_go()
        positional, keywords = ["d"], list[str]()
        if step.joint or not step.fused:
            positional += own
        else:
            named = step.operation.backward_signature.extras
            slots = {identifier(slot): r for slot, r in step.by_slot(own).items() if slot in named}
            keywords += [f"{n}={r}" if isinstance(r, str) else f"{n}=({', '.join(r)},)" for n, r in slots.items()]
        keywords += [f"{keyword}={name}" for keyword, name in names]
        records = zip(own, step.records, strict=True) if self.made_of else ()
        gone = [(r, others) for r, record in records if (others := self._made_for_others(record))]
        lets_go = lets_go and self.segment.context.on_step is None  # `on_step` gets `bwd` itself
        apart = lets_go and bool(gone) and not self.checked
        constants = {k: v for k, v in step.constants(env, True).items() if not (apart and k == "needs")}
        keywords += [f"{identifier(k)}={s.put(v)}" for k, v in constants.items()]
        if step.operation.backward_signature.main_grads:
            offered = [(key, self.segment.index[slot]) for key, slot in step.grads]
            keywords.append(f"main_grads={f'buffers.offer({s.put(offered)})' if self.variant.adds else '{}'}")
        run = step.operation.bwd
        if lets_go and not apart and (gone or self.segment.replays or self.variant.late is None):
            run = functools.partial(_parted, run, step.needed - _X)
        called = self.segment.context.called(step, run)
        if self.checked:
            passed = None if self.variant.needed is not None else self.segment.checked
            called = functools.partial(_checked_backward, self.segment.context, passed, step, called)
        bwd = s.put(called)
        if apart:
            given = ", ".join([*positional, *keywords])
            s.add(f"_, grads = {bwd}({given}, needs={s.put(step.needed - _X)})")
            s.add(*[f"{s.put(_let_go)}({r}, {s.put(others)})" for r, others in gone])
            s.add(f"d = {bwd}({given}, needs={s.put(_X)})[0]")
        else:
            s.add(f"d, grads = {bwd}({', '.join([*positional, *keywords])})")
        self._grads(step)
        self._let_go(*dict.fromkeys(own))  # after all that can fail: a fallback may have to read them
        self.steps.append(step)
        self.known = "x" in step.needs[0]

    def _let_go(self, *records: str) -> None:
        """Writes the release of the tensors that were read last, and of these records."""
        alone = [one for one in self.last if ":" not in one]
        self.s.add(*[f"{one} = [None] * len({one})" for one in self.last if ":" in one])
        if names := [*alone, *records, *["f"] * bool(records)]:
            self.s.add(f"{' = '.join(names)} = None")
        self.last.clear()

    def _lets_go(self, step: Step) -> bool:
        """Whether its `bwd` may run in two calls, so that tensors read by the first one are freed before the second."""
        needed, again = step.needed, self.segment.replays or self.variant.late != ()
        plain = not self.variant.adds and step.recipe is None
        return again and plain and step.operation.separable and "x" in needed and len(needed) > 1

    def _made_for_others(self, record: Record) -> tuple[str, ...]:
        """The recomputed fields of a record that the gradient of x does not read."""
        again = [f.name for i, f in self.fields.get(record.position, ()) if i in self.made_of]
        return tuple([name for name in again if name not in record.cls.kept(_X)])

    def _grads(self, step: Step) -> None:
        s, has = self.s, self.has
        for key, slot in step.grads:
            index, value = self.segment.index[slot], f"grads[{s.put(key)}]"
            if self.variant.adds or (self.checked and step.operation.backward_signature.main_grads):
                value = f"{s.put(functools.partial(_left, step, key))}(buffers, {value})"
                value = f"plus(p{index}, {value})" if index in self.sums else value
            elif index in self.sums:
                value = f"p{index} + {value}"
            s.add(f"p{index} = {value}")
            self.sums[index] = f"p{index}"
        for _, channel in step.incoming:
            has.pop(channel, None)
        for key, channel in step.channel_grads:
            value, name = f"grads[{s.put(key)}]", _local(self.g, "g", channel)
            s.add(f"{name} = " + (f"{name} + {value}" if channel in has else value))
            has[channel] = name

    def _record(self, record: Record, layout: Layout) -> str:
        """Writes the code that rebuilds a record from saved tensors; returns its variable."""
        s, saves, name = self.s, self.saves, f"r{self.made}"
        self.made += 1
        if record.position in self.segment.divided:
            s.add(f"{name} = {s.put(fit_record)}(records[{record.position}], {s.put(layout)})")
            return name
        lines = [f"{name} = {s.put(record.cls.__new__)}({s.put(record.cls)})"]
        fields = self.fields.get(record.position)
        if fields is None:
            s.add(*lines)
            return name
        lines.append(f"f = {name}.__dict__")
        again, first = list[str](), len(saves.data) + len(saves.several)
        for i, f in enumerate(saves.data):
            if saves.records[f.record][1].position == record.position:
                lines.append(f"f['{f.name}'] = data[{i}]")
        for i, f in fields:
            at = i - len(saves.tensors)
            if self.variant.late is None:
                held = [f"tensors[{i}]"]
            elif at >= 0:
                held = [f"tensors[{f'b{at - 1}' if at else self.places[-1]}:b{at}]"]
            else:
                held = [f"tensors[{n}]" for n in range(self.places[i], self.places[i + 1])]
            self.last += held
            value = held[0] if held else ""
            if i in self.made_of:
                given = ", ".join([f"data[{first + [*self.made_of].index(i)}]", *held])
                again.append(f"'{f.name}': {s.put(Recompute)}({given})")
            elif self.variant.late is None:
                lines.append(f"{s.put(put_field)}(f, '{f.name}', {value})")
            elif at >= 0:
                lines.append(f"f['{f.name}'] = (*{value},)")
            elif layout != "any":
                lines.append(f"f['{f.name}'] = None if {value} is None else {_fitted(s, value, layout)}")
            else:
                lines.append(f"f['{f.name}'] = {value}")
        s.add(*lines, *[f"f['_late'] = {{{', '.join(again)}}}"] * bool(again))
        several = bool(fields) and fields[-1][0] >= len(saves.tensors)
        if layout != "any" and (self.variant.late is None or again or several):
            s.add(f"{s.put(fit_record)}({name}, {s.put(layout)})")
        return name


def backward_code(segment: Segment, failed: Callable[..., Any], variant: BackwardVariant, checked: bool) -> Any:
    """`backward(segment, kept, tensors, buffers, records, d, *gradients of outputs)`.

    `kept` is the node's other data, `tensors` are the saved tensors in the order of `segment.saves`, and `records`
    those of a failed joint fusion, by position.
    """
    return _Backward(segment, variant, checked).write(failed)


def joint_record(segment: Segment, variant: BackwardVariant, step: Step) -> Callable[[Any, Sequence[Any]], Saved]:
    """A function of the node's data and the saved tensors that returns the record of a joint fusion."""
    return _Backward(segment, variant, False).joint_record(step)


def _checked_backward(
    context: Context, passed: set[Any] | None, step: Step, run: Callable[..., Any], d: Any, /, *saved: Any, **given: Any
) -> Any:
    """Runs a backward; checks its gradients until the check of its step has `passed`, or always if that is `None`."""
    out = run(d, *saved, **given)
    known = passed is not None and (step.key, True) in passed
    checks = not torch.compiler.is_compiling() and not known
    if checks and check_backward(context, step, d, out, given) and passed is not None:
        passed.add((step.key, True))
    return out


def _parted(
    run: Callable[..., Any], first: frozenset[str], /, *given: Any, needs: Any, **named: Any
) -> tuple[Any, Any]:
    """Runs a `bwd` for parameter gradients, frees the tensors that only they read, and runs it again for dx."""
    _, grads = run(*given, needs=first, **named)
    for record in (*given, *named.values()):
        if isinstance(record, Saved):
            _let_go(record, [name for name in record.fields if name not in record.kept(_X)])
    return run(*given, needs=_X, **named)[0], grads


def _let_go(record: Saved, names: Sequence[str]) -> None:
    fields = record.__dict__
    for name in names:
        fields.pop(name, None)
        fields.get("_late", {}).pop(name, None)


_X = frozenset({"x"})


def _left(step: Step, key: str, buffers: MainGrads | None, g: Any) -> Tensor | None:
    """A gradient that still has to be added to the buffer of its parameter, or `None`."""
    if g is not accumulated:
        return g
    if buffers is None or key not in buffers.taken():
        message = f"bwd returned sf.accumulated for {key!r}, which it did not pop from main_grads"
        raise PluginError(message, code="SF303", **step.located)
    return None


def fit_record(record: Saved, layout: Layout) -> Saved:
    """A record with its tensors in the layout that a pass accepts."""
    fields = record.__dict__
    if layout == "any":
        return record
    for name in (fields.keys() | fields.get("_late", {}).keys()) & set(record.fields):
        value = getattr(record, name)
        if isinstance(value, Tensor):
            fields[name] = fit(value, layout)
        elif isinstance(value, tuple):
            several = cast(tuple[Any, ...], value)
            fields[name] = tuple(fit(v, layout) if isinstance(v, Tensor) else v for v in several)
    return record


def _recast(s: Source, name: str, dtype: torch.dtype) -> str:
    wanted = s.put(dtype)
    return f"if {name}.dtype is not {wanted}: {name} = {name}.to({wanted})"


def _fitted(s: Source, value: str, layout: Layout) -> str:
    if layout == "any":
        return value
    return f"{value}.contiguous()" if layout == "contig" else f"fit({value}, {s.put(layout)})"


def _seed(index: Drawn) -> str:
    if isinstance(index, tuple):
        return f"({''.join(f'{_seed(i)}, ' for i in index)})"
    return "None" if index is None else f"seeds[{index}]"
