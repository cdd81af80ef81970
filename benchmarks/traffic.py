"""Counts the bytes that each kernel moves, in Triton's interpreter, against the minimum for its results.

The minimum: each input read once, each result written once. Moved bytes are split into those from memory, rows of
parameters that every program reads again (from cache), and partial sums over rows. Writes `results/traffic.json`,
from which docs/dev/kernels.md is drawn.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script has only its own folder in its path

import torch
from torch import Tensor

from seqfuse.kernels import attention, decode, norm, pointwise, rope
from seqfuse.kernels.activations import ACTIVATIONS
from tools.traffic import counted, fewest

ROWS, COLUMNS, WIDE = 24, 1040, 20_480
SCRATCH = ("partials", "sums", "biases", "gains", "deltas")  # written by one kernel and read by the next
BF16 = torch.bfloat16


class Case(NamedTuple):
    """A call of a kernel; `run` returns its results."""

    kernel: str
    what: str
    shape: tuple[int, int]
    inputs: list[Tensor]
    run: Callable[[], Any]
    least: int | None = None  # the minimum bytes, if not those of inputs and results
    tiles: int | None = None  # by a formula, the bytes to be moved if data is read once per tile

    def row(self) -> dict[str, Any]:
        """The counts of the case, for the file."""
        with counted() as traffic:
            results = self.run()
        arguments = [entry for launch in traffic.launches for entry in launch.arguments.items()]
        scratch, own = ([m for name, m in arguments if (name in SCRATCH) == of] for of in (True, False))
        cached = sum(m.loaded - m.loaded_once for m in own if len(m.shape) < 2)
        return {
            "kernel": self.kernel, "what": self.what, "shape": self.shape, "launches": len(traffic.launches),
            "fewest": self.least or fewest(*self.inputs, *(t for t in results if t is not None)),
            "moved": sum(m.total for m in own) - cached, "cached": cached, "partials": sum(m.total for m in scratch),
            "outside": sum(launch.outside for launch in traffic.launches),
            "written_twice": sum(m.stored - m.stored_once for _, m in arguments),
        }  # fmt: skip


def cases() -> Iterator[Case]:
    """Calls of every memory-bound kernel."""
    for every in (pointwise_cases, norm_cases, heads_cases, attention_cases, decode_cases):
        yield from every()


def drawn(*shape: int) -> Tensor:
    """Any values, since counts depend only on shapes."""
    return torch.ones(shape, dtype=BF16)


def pointwise_cases() -> Iterator[Case]:
    """Chains of values and of gradients."""
    k = pointwise
    gelu, silu = k.act(ACTIVATIONS["gelu"]), ACTIVATIONS["silu"]
    dgelu, sums, drop = k.dact(ACTIVATIONS["gelu"]), k.column_sum(), k.dropout(0.1)
    x, other, packed = drawn(ROWS, COLUMNS), drawn(ROWS, COLUMNS), drawn(ROWS, 2 * COLUMNS)
    row, row2, seed = drawn(COLUMNS), drawn(2 * COLUMNS), torch.tensor(1)
    chains: tuple[Any, ...] = (
        ("gelu", x, (gelu,), ()),
        ("bias, gelu", x, (k.bias(), gelu), (row,)),
        ("bias, gelu, pre-activation", x, (k.bias(), k.store(), gelu), (row,)),
        ("swiglu", packed, (k.gated(silu),), ()),
        ("bias, swiglu, [gate; up]", packed, (k.bias(), k.store(), k.gated(silu)), (row2,)),
        ("scale, add", x, (k.scale(0.5), k.add()), (other,)),
        ("dropout, add", x, (drop, k.add()), (seed, other)),
        ("bias, dropout, add", x, (k.bias(), drop, k.add()), (row, seed, other)),
        ("d gelu", x, (dgelu,), (other,)),
        ("d gelu, d bias", x, (dgelu, sums), (other,)),
        ("d gelu, d bias, gelu again", x, (k.emit(ACTIVATIONS["gelu"]), dgelu, sums), (other, other)),
        ("d dropout, d gelu, d bias", x, (drop, dgelu, sums), (seed, other)),
        ("d swiglu, d bias", x, (k.dgated(silu), sums), (packed,)),
        ("d dropout, d bias", x, (drop, sums), (seed,)),
        ("add, d dropout, d bias", x, (k.add(), k.store(), drop, sums), (other, seed)),
        ("d bias alone", x, (sums,), ()),
    )
    for what, source, steps, operands in chains:
        run = functools.partial(k.pointwise, source, k.Chain(*steps), operands, result="alone" not in what)
        yield Case("pointwise", what, (ROWS, COLUMNS), [source, *operands], run)


def norm_cases() -> Iterator[Case]:
    """Both norms in both directions, with and without prologues and epilogues, and rows too wide for registers."""
    gelu, seed = ACTIVATIONS["gelu"], torch.tensor(1)
    for rows, N in ((ROWS, COLUMNS), (3, WIDE)):
        x, dy, other = (drawn(rows, N) for _ in range(3))
        weight, bias, branch = (drawn(N) for _ in range(3))
        before: dict[str, Any] = {"pre_bias": branch, "seed": seed, "p": 0.1, "residual": other}
        after: dict[str, Any] = {"dstream": other, "seed": seed, "p": 0.1, "dbranch": True, "dpre_bias": BF16}
        for kernel, centered in (("layernorm", True), ("rmsnorm", False)):
            parameters = (weight, bias if centered else None)
            read = (dy, x, torch.zeros(rows) if centered else None, torch.ones(rows), weight)
            forward = functools.partial(norm.norm_fwd, x, *parameters, 1e-5, centered=centered)
            sums = dict.fromkeys(("dweight", "dbias") if centered else ("dweight",), BF16)
            back = functools.partial(norm.norm_bwd, *read)
            every: tuple[Any, ...] = (
                ("forward", (x, *parameters), forward),
                ("forward, gelu", (x, *parameters), functools.partial(forward, act=gelu)),
                ("bias, dropout, add, forward", (x, *parameters, branch, seed, other),
                 functools.partial(forward, **before)),
                ("backward", read, functools.partial(back, **sums)),
                ("backward, dx alone", read, back),
                ("backward, d gelu", (*read, parameters[1]), functools.partial(back, parameters[1], act=gelu, **sums)),
                ("backward, add", (*read, other), functools.partial(back, dstream=other, **sums)),
                ("backward, add, d dropout, d bias", (*read, other, seed), functools.partial(back, **sums, **after)),
            )  # fmt: skip
            for what, inputs, run in every:
                yield Case(kernel, what, (rows, N), [t for t in inputs if t is not None], run)


def heads_cases() -> Iterator[Case]:
    """The operations between a GEMM and attention, on packed heads."""
    heads, kv_heads, size = 4, 2, 64
    width, known = (heads + 2 * kv_heads) * size, heads + kv_heads
    x, dy, bias, positions = drawn(ROWS, width), drawn(ROWS, width), drawn(width), torch.arange(ROWS)
    gains, rstd = [drawn(size), drawn(size)], torch.ones(ROWS, known)
    turn = rope.Rotation("half", size)
    angles = rope.frequencies_of(turn, x.device)
    weights: dict[str, Any] = dict(zip(("q_weight", "k_weight"), gains, strict=True))
    normed, sums = {"bias": bias, "norm_eps": 1e-6, **weights}, dict.fromkeys(("dbias", "dq_weight", "dk_weight"), BF16)
    both: tuple[Any, ...] = (
        ("rotation", rope.rope_fwd, [x], {}),
        ("rotation, positions", rope.rope_fwd, [x, positions], {"positions": positions}),
        ("bias, norm, rotation", rope.rope_fwd, [x, bias, *gains], normed),
        ("bias, norm, rotation, x + bias", rope.rope_fwd, [x, bias, *gains], {"store": True, **normed}),
        ("d rotation", rope.rope_bwd, [dy], {}),
        ("d rotation, d bias", rope.rope_bwd, [dy], {"dbias": BF16}),
        ("d rotation, d norm, d bias, d gains", rope.rope_bwd, [dy, x[:, : known * size], rstd, *gains],
         {"x": x, "rstd": rstd, **weights, **sums}),
    )  # fmt: skip
    for what, function, inputs, named in both:
        run = functools.partial(function, inputs[0], heads, kv_heads, turn, **named)
        yield Case("rope", what, (ROWS, width), [*inputs, angles], run)


def attention_cases() -> Iterator[Case]:
    """Attention of 2 heads with one key head, both passes, in tiles of sm_90: each reads the keys it attends to."""
    k = attention

    def run(function: Callable[..., Any], *args: Any, **limits: Any) -> Any:
        with mock.patch.object(k, "architecture", return_value="sm_90"):
            return function(*args, **limits) or out

    S, H, D, element = 320, 2, 64, 2
    q, y, dy = drawn(1, H, S, D), drawn(1, S, H, D), drawn(1, S, H, D)
    key, value, lse = drawn(1, 1, S, D), drawn(1, 1, S, D), torch.zeros(1, H, S)
    out = (drawn(1, H, S, D), drawn(1, 1, S, D), drawn(1, 1, S, D))
    fwd, dq, dkv = (k.score_tile(name, D, q.dtype, "sm_90") for name in ("fwd", "dq", "dkv"))
    for limits in ({}, {"causal": True}, {"causal": True, "window": 64}):
        named = ", ".join(("", *(name if how is True else f"{name} {how}" for name, how in limits.items())))
        of_rows = functools.partial(_read, S, causal=limits.get("causal", False), window=limits.get("window", S))
        of_keys = functools.partial(of_rows, turned=True)
        rows, shape = H * S * D * element, (S, H * D)
        tiles = 2 * rows + lse.nbytes + 2 * H * of_rows(fwd.m, fwd.n) * D * element
        forward = functools.partial(run, k.attention_fwd, q, key, value, **limits)
        yield Case("attention", f"forward{named}", shape, [q, key, value], forward, tiles=tiles)
        tiles = 4 * rows + lse.nbytes + 2 * H * of_rows(dq.m, dq.n) * D * element
        tiles += 4 * key.nbytes + H * of_keys(dkv.n, dkv.m) * (2 * D * element + lse.element_size())
        given = [dy, q, key, value, y, lse]
        backward = functools.partial(run, k.attention_bwd, *given, out, **limits)
        yield Case("attention", f"backward{named}", shape, given, backward, tiles=tiles)


def _read(length: int, block: int, other: int, *, causal: bool, window: int, turned: bool = False) -> int:
    """Keys (rows, if `turned`) that all blocks of rows (keys) read together, in whole blocks."""
    total = 0
    for start in range(0, length, block):
        end = min(start + block, length)
        first = start if causal and turned else max(0, start - window + 1)
        last = end if causal and not turned else min(length, end + window - 1)
        total += min(length, -(-last // other) * other) - first // other * other
    return total


def decode_cases() -> Iterator[Case]:
    """A decoding step: the new token, and attention over caches of two lengths, with 4 heads that share a key head."""
    B, H, D, most = 2, 4, 64, 512
    lengths, q = torch.tensor([300, 77]), drawn(B, H, D)
    x, turn = drawn(B, (H + 2) * D), rope.Rotation("half", D)
    angles = rope.frequencies_of(turn, x.device)
    for kind, name in ((torch.bfloat16, ""), (torch.int8, ", int8")):
        keys, values = (torch.ones(B, 1, most, D, dtype=kind) for _ in range(2))
        scales = [torch.ones(B, 1, most) for _ in range(2 * (kind is torch.int8))]
        caches: dict[str, Any] = {"k": keys, "v": values, "lengths": lengths}
        caches |= dict(zip(("k_scale", "v_scale"), scales, strict=False))
        row = 2 * (D * keys.element_size() + 4 * len(scales) // 2)  # bytes of a token in both caches
        read, written = 2 * q.nbytes + lengths.nbytes + int(lengths.sum()) * row, lengths.nbytes + B * row
        for what, function, given, least in (
            ("attention", decode.decode_attention, (q,), read),
            ("write", rope.rope_write, (x, H, 1, None), x.nbytes + q.nbytes + written),
            ("rotation, write", rope.rope_write, (x, H, 1, turn), x.nbytes + q.nbytes + angles.nbytes + written),
        ):
            run = functools.partial(function, *given, **caches)
            yield Case("decode", f"{what}{name}", (most, H * D), [], lambda run=run: (run(),), least=least)


def main() -> None:
    from record import write

    rows = [case.row() for case in cases()]
    for row in rows:
        more = row["moved"] / row["fewest"] - 1
        print(f"{row['kernel']:<10} {row['what']:<34} {row['fewest']:>10,} {more:>8.2%}  {row['cached']:>9,}")
    write("traffic", {"traffic": rows})


if __name__ == "__main__":
    main()
