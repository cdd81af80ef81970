"""Random models as source code, made of forms that people write: known ones, near misses, and side effects."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
_NAMES: dict[str, Any] = {"torch": torch, "F": F, "math": math, "checkpoint": checkpoint}


class Writer:
    """Draws one model; each step computes a value [B, S, 8] from earlier ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def of(self, *options: str) -> str:
        """One of several texts."""
        return self.random.choice(options)

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def layer(self) -> str:
        """A `Linear` from 8 to 8."""
        return self.of("m.a", "m.b", "m.c", "m.d", "m.frozen", "m.tied")


Step = Callable[[Writer, str, str, str], list[str]]
"""Lines that compute the last-named value from two others."""

STEPS: dict[str, tuple[Step, float]] = {}


def step(weight: float) -> Callable[[Step], Step]:
    def declare(function: Step) -> Step:
        STEPS[function.__name__] = function, weight
        return function

    return declare


@step(5)
def linear(w: Writer, x: str, y: str, out: str) -> list[str]:
    layer, other = w.layer(), w.layer()
    return [
        f"{out} = "
        + w.of(
            *[f"{layer}({x})"] * 6,
            f"F.linear({x}, {layer}.weight)",
            f"F.linear({x}, {layer}.weight, {other}.bias)",
            f"F.linear({x}, {layer}.weight, m.w)",
            f"F.linear({x}, {layer}.weight, m.w[:1])",
            f"{x} @ {layer}.weight.{w.of('T', 't()', 'mT', 'transpose(0, 1)')}",
            f"{x} @ {layer}.weight",
            f"torch.matmul({x}, {layer}.weight) + m.w",
            f"torch.addmm(m.w, {x}.reshape(-1, 8), {layer}.weight).view({x}.shape)",
            f"torch.addmm({layer}.bias, {x}.reshape(-1, 8), {layer}.weight.t(), beta=0.5).view({x}.shape)",
            f"torch.einsum('bsi,oi->bso', {x}, {layer}.weight)",
            f"torch.bmm({x}, {layer}.weight.expand({x}.shape[0], 8, 8))",
            f"torch.baddbmm({y}, {x}, {layer}.weight.expand({x}.shape[0], 8, 8))",
            f"F.linear({x}, {layer}.weight * m.w)",
            f"F.linear({x}, {layer}.weight.detach(), {layer}.bias)",
            f"F.linear({x}.detach(), {layer}.weight, {layer}.bias)",
            f"F.linear({x}, {layer}.weight, {layer}.bias.detach())",
            f"F.linear({x}, m.up.weight[:8], m.up.bias[8:])",
            f"F.linear({x}, m.up.weight.view(2, 8, 8)[1])",
            f"{layer}({x}.flatten(0, 1)).view({x}.shape)",
            f"{layer}({x}.unsqueeze(0)).squeeze(0)",
            f"{layer}({x}.transpose(0, 1)).transpose(0, 1)",
            f"m.normed({x})",
            f"m.hooked({x})",
            f"m.down(m.up({x}))",
            f"m.qkv({x})[..., {w.of(':8', '8:16', '16:')}]",
            f"F.linear({x}, m.matrix)",
        )
    ]


@step(4)
def activation(w: Writer, x: str, y: str, out: str) -> list[str]:
    return [
        f"{out} = "
        + w.of(
            f"F.gelu({x})",
            f"F.gelu({x}, approximate='tanh')",
            f"F.silu({x})",
            f"F.relu({x})",
            f"{x}.relu()",
            f"torch.tanh({x})",
            f"{x}.sigmoid()",
            f"{x} * torch.sigmoid(1.702 * {x})",
            f"F.relu({x}).square()",
            f"torch.relu({x}).pow(2)",
            f"0.5 * {x} * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * ({x} + 0.044715 * torch.pow({x}, 3.0))))",
            f"0.5 * {x} * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * ({y} + 0.044715 * torch.pow({x}, 3.0))))",
            f"F.leaky_relu({x})",
            f"F.softplus({x})",
            f"F.elu({x})",
            f"F.mish({x})",
            f"{x} * torch.sigmoid({x})",
            f"m.gelu({x})",
            f"m.relu_({x} * 1)",
            f"F.relu({w.layer()}({x}), inplace=True)",
            f"F.silu({w.layer()}({x}), inplace=True)",
            f"torch.softmax({x}, -1)",
            f"{x}.sin()",
            f"{x}.abs().clamp(max=2)",
        )
    ]


@step(5)
def total(w: Writer, x: str, y: str, out: str) -> list[str]:
    return [
        f"{out} = "
        + w.of(
            *[f"{x} + {y}"] * 5,
            f"torch.add({x}, {y})",
            f"{x}.add({y}, alpha=2)",
            f"{x} + 0.5 * {y}",
            f"{x} + {x}",
            f"{y} - {x}",
            f"{x} + m.w",
            f"{x} + {y}[:, :1]",
            f"{x} + m.table[:, :{x}.shape[1]]",
            f"{x} + 1",
            f"{x} + {w.layer()}({y})",
            f"sum([{x}, {y}, {x}])",
            f"torch.stack([{x}, {y}]).sum(0)",
            f"torch.lerp({x}, {y}, 0.3)",
            f"torch.addcmul({x}, {y}, m.w)",
        )
    ]


_RMS = "{g} * ({x} * torch.rsqrt({x}.pow(2).mean({d}, keepdim=True) + {e}))"


@step(4)
def norm(w: Writer, x: str, y: str, out: str) -> list[str]:
    made = w.of(
        *[f"m.ln({x})", f"m.rn({x})", _RMS] * 3,
        f"F.layer_norm({x}, (8,))",
        f"F.layer_norm({x}, (8,), m.w)",
        f"F.layer_norm({x}, {x}.shape[1:])",
        f"F.layer_norm({x}, (8,), None, m.w, 0.1)",
        f"F.layer_norm({x}, (8,), m.a.weight[0], m.b.bias)",
        f"F.rms_norm({x}, (8,), m.w, 0.1)",
        f"F.rms_norm({x}, (8,), eps=None)",
        f"m.w * {x} / torch.sqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-6)",
        f"{y} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-6)",
        f"{x} * torch.rsqrt(({x} * {x}).mean(-1, keepdim=True) + 1e-6) * m.w",
        f"{x} * torch.rsqrt({x}.square().mean(dim=-1, keepdim=True) + 1e-6)",
        f"({x} - {x}.mean(-1, keepdim=True)) * torch.rsqrt({x}.var(-1, keepdim=True, unbiased=False) + 1e-5)",
        f"F.normalize({x}, dim=-1)",
        f"F.group_norm({x}.transpose(1, 2), 2, m.w, m.a.bias).transpose(1, 2)",
        f"m.bn({x}.transpose(1, 2)).transpose(1, 2)",
        f"m.ln({x}.transpose(1, 2).contiguous().transpose(1, 2))",
    )
    gain = w.of(
        "m.w", "m.w", "(1 + m.w)", "(1.0 + m.w)", "m.w[:1]", "1.0", "2", f"{y}[0, 0]", "m.w.detach()", "m.table"
    )
    if gain == "m.table":
        gain = f"m.table[:, :{x}.shape[1]]"
    given = {
        "g": gain,
        "x": x,
        "d": w.of("-1", "-1", "-1", "2", "1", "(-1,)"),
        "e": w.of("1e-6", "0.5", "1e-6", "m.eps"),
    }
    return [f"{out} = " + (made.format(**given) if made is _RMS else made)]


@step(4)
def gated(w: Writer, x: str, y: str, out: str) -> list[str]:
    act = w.of("F.silu", "F.silu", "F.gelu", "torch.sigmoid", "F.relu", "torch.tanh")
    a, b = w.layer(), w.layer()
    gate, up = w.random.choice([
        (f"{a}({x})", f"{b}({x})"),
        (f"{a}({x})", f"{b}({x})"),
        (f"{a}({x})", f"{b}({y})"),
        ("h.chunk(2, -1)[0]", "h.chunk(2, -1)[1]"),
        ("h.chunk(2, -1)[1]", "h.chunk(2, -1)[0]"),
        ("h[..., :8]", "h[..., 8:]"),
        ("h[..., 8:]", "h[..., :8]"),
        ("h[..., ::2]", "h[..., 1::2]"),
        ("h.split(8, dim=-1)[0]", "h.split([8, 8], -1)[1]"),
        ("h.unflatten(-1, (2, 8)).unbind(-2)[0]", "h.unflatten(-1, (2, 8)).unbind(-2)[1]"),
        ("h.view(*h.shape[:-1], 8, 2)[..., 0]", "h.view(*h.shape[:-1], 8, 2)[..., 1]"),
        (x, y),
        (f"{a}({x}).detach()", f"{b}({x})"),
        (f"{a}({x})", f"{b}({x}).detach()"),
        (f"{a}({x})", x),
    ])  # fmt: skip
    lines = [f"h = m.up({x})", f"g, u = {gate}, {up}"]
    if w.chance(0.2):
        return [*lines, f"g = {act}(g)", f"{out} = " + w.of("g * u + g", "u * g", "m.c(g * u)", "g * u * u")]
    if w.chance(0.1):
        return [f"h = m.up({x})", f"{out} = F.glu(h)"]
    return [
        *lines,
        f"{out} = " + w.of(f"{act}(g) * u", f"u * {act}(g)", f"torch.mul({act}(g), u)", f"m.c({act}(g) * u)"),
    ]


@step(5)
def attention(w: Writer, x: str, y: str, out: str) -> list[str]:
    count = w.random.choice([2, 2, 4, 1])
    size = WIDTH // count
    q, k, v = (w.layer() for _ in range(3))
    source = w.of(
        "packed", "packed", "three", "three", "three", "cross", "values", "turned", "grouped", "few", "cached"
    )
    grouped = ""
    if source == "packed":
        lines = [f"q, k, v = m.qkv({x}).{w.of('chunk(3, -1)', 'split(8, -1)', 'split(8, dim=2)')}"]
    elif source == "turned":
        lines = [f"v, q, k = m.qkv({x}).chunk(3, -1)"]
    elif source == "three":
        lines = [f"q, k, v = {q}({x}), {k}({x}), {v}({x})"]
    elif source == "cross":
        lines = [f"q, k, v = {q}({x}), {k}({y}), {v}({y})"]
    elif source == "values":
        lines = [f"q, k, v = {q}({x}), {k}({x}), {v}({y})"]
    elif source == "few":
        lines = [f"q, k, v = {q}({x}), {k}({x})[:, :3], {v}({x})[:, :3]"]
    elif source == "cached":
        lines = [f"q, k, v = {q}({x}), torch.cat(({y}, {k}({x})), 1), torch.cat(({y}, {v}({x})), 1)"]
    else:
        count, size = 4, 2
        lines = [f"q, k, v = {q}({x}), *(F.linear({x}, t.weight[:4]) for t in ({k}, {v}))"]
        grouped = w.of(
            "repeat_interleave(2, 1)", "repeat_interleave(2, dim=1)", "repeat(1, 2, 1, 1)",
            "unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(T)", "unsqueeze(1).expand(-1, 2, -1, -1, -1).reshape(T)",
        )  # fmt: skip
    split = w.of(
        *[f"t.unflatten(-1, (-1, {size})).transpose(1, 2)"] * 3,
        f"t.reshape({x}.shape[0], t.shape[1], -1, {size}).transpose(1, 2)",
        f"t.reshape(t.shape[0], t.shape[1], -1, {size}).permute(0, 2, 1, 3)",
    )
    lines += [f"q, k, v = ({split} for t in (q, k, v))"]
    if w.chance(0.3):
        eps = w.of("1e-6", "1e-6", "0.3")
        gains = w.random.choice([(f"m.w[:{size}]", f"m.w[-{size}:]"), ("1.0", "1.0"), (f"m.w[:{size}]", "1.0")])
        lines += [
            f"q = {gains[0]} * (q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6))",
            f"k = {gains[1]} * (k * torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + {eps}))",
        ]
    if size > 1 and w.chance(0.4):
        half = f"torch.cat((-{{0}}[..., {size // 2}:], {{0}}[..., :{size // 2}]), -1)"
        lines += [
            f"a = torch.arange(q.shape[2], dtype={x}.dtype)[:, None]",
            f"a = a / 10.0 ** torch.arange({size // 2}, dtype={x}.dtype)",
            f"a = torch.cat((a, a), -1){w.of('[None].unsqueeze(1)', '[None].unsqueeze(1)', '[None, None]', '')}",
            f"cos, sin = a.cos(){w.of('', '', ' * 1.1')}, a.sin()",
            f"q = q * cos + {half.format('q')} * sin",
        ]
        if source not in ("few", "cached"):
            lines += w.random.choice(
                [[f"k = k * cos + {half.format('k')} * sin"]] * 4 + [[], [f"k = k * sin + {half.format('k')} * cos"]]
            )
    if grouped:
        lines += [f"T = ({x}.shape[0], 4, -1, 2)", f"k, v = k.{grouped}, v.{grouped}"]
    mask = w.of(
        "None", "None", "None", "L.tril()", "L.tril().bool()", "L.tril(-1).bool()", "L.cumsum(-1) / 5",
        "m.a.weight[:1, :1] * L", f"({y}.mean((-1, -2)) + 2)[:, None, None, None] * L",
        "L[None, None].expand(q.shape[0], 1, -1, -1).tril().bool()",
    )  # fmt: skip
    lines += [f"L = torch.ones(q.shape[2], k.shape[2], dtype={x}.dtype)", f"mask = {mask}"]
    scale = w.of("None", "None", "0.3", "1.0")
    if w.chance(0.5):
        causal = w.of("False", "False", "mask is None and q.shape[2] == k.shape[2]")
        lines += [f"z = F.scaled_dot_product_attention(q, k, v, mask, 0.0, {causal}, scale={scale})"]
    else:
        lines += [
            w.of(
                "s = q @ k.transpose(-1, -2)",
                "s = torch.matmul(q, k.transpose(2, 3))",
                "s = q @ k.mT",
                "s = torch.einsum('bhqd,bhkd->bhqk', q, k)",
            )
        ]
        lines += [w.of(f"s = s * {size**-0.5}", f"s = s / math.sqrt({size})", "s = s", "q = q * 2.0")]
        if w.chance(0.2):
            lines += ["s = torch.tanh(s / 3) * 3"]
        masked = w.of(
            "s + mask",
            "s + mask",
            "s.masked_fill(mask == 0, -1e9)",
            "torch.where(mask > 0, s, -1e9)",
            "s.masked_fill(~mask.bool(), float('-inf'))",
        )
        if mask != "None":
            lines += [f"s = {masked}"]
        lines += [
            w.of(
                *["p = torch.softmax(s, -1)"] * 3,
                "p = F.softmax(s, dim=-1, dtype=torch.float64)",
                "p = s.softmax(-1)",
                "p = torch.softmax(s, -2)",
            )
        ]
        lines += w.random.choice(
            [
                [],
                [],
                [],
                ["p = p * 0.5"],
                ["p = F.dropout(p, 0.0)"],
                ["p = F.dropout(p, 0.4, training=False)"],
                ["m.seen = p.detach()"],
            ]
        )
        lines += ["z = p @ v"]
    return [
        *lines,
        f"z = z.{w.of('transpose(1, 2)', 'transpose(1, 2)', 'permute(0, 2, 1, 3)')}",
        f"{out} = " + w.of(
            f"z.reshape({x}.shape)", "z.flatten(2)", f"z.contiguous().view({x}.shape)", "m.d(z.flatten(2))",
            f"m.d(z.reshape({x}.shape)) + {x}", f"z.transpose(1, 2).reshape({x}.shape)",
            "(z.detach() + q.transpose(1, 2)).flatten(2)",
        ),
    ]  # fmt: skip


@step(1)
def multihead(w: Writer, x: str, y: str, out: str) -> list[str]:
    qkv = w.of(f"{x}, {x}, {x}", f"{x}, {x}, {x}", f"{x}, {y}, {y}", f"{x}, {x}, {y}")
    key_mask = f"torch.arange({x}.shape[1])[None].expand({x}.shape[0], -1) > 1"
    causal = f"torch.ones({x}.shape[1], {x}.shape[1], dtype=torch.bool).triu(1)"
    options = w.of(
        "", "", ", need_weights=False", f", key_padding_mask={key_mask}", f", attn_mask={causal}, need_weights=False",
        f", attn_mask={causal}.to({x}.dtype), need_weights=False",
        f", attn_mask={causal}, is_causal=True, need_weights=False", ", average_attn_weights=False",
        f", attn_mask={causal}[None].expand(2 * {x}.shape[0], -1, -1), need_weights=False",
    )  # fmt: skip
    layer = w.of("m.mha", "m.mha", "m.mhb")
    made = f"{layer}({qkv}{options})"
    return [f"z, p = {made}", f"{out} = " + w.of("z", "z", f"z + {x}", "z if p is None else z + p.mean()")]


@step(2)
def factor(w: Writer, x: str, y: str, out: str) -> list[str]:
    return [
        f"{out} = "
        + w.of(
            f"{x} * 0.5", f"{x} / 3", f"2 * {x}", f"torch.div({x}, 0.3, rounding_mode='floor') * {x}", f"{x} * m.w",
            f"{x} * {y}", f"{x} * True", f"-{x}", f"{x} * 0", f"{x} / {x}.shape[-1]", f"{x} * torch.tensor(0.5)",
            f"{x} * m.eps", f"{x} * (len({x}) * 0.5)", f"1 / (2 + {x}.square())", f"{x} * m.gain",
        )
    ]  # fmt: skip


@step(2)
def view(w: Writer, x: str, y: str, out: str) -> list[str]:
    return [
        f"{out} = "
        + w.of(
            f"{x}.transpose(0, 1).contiguous().transpose(0, 1)", f"{x}.reshape(-1, 8).reshape({x}.shape)", f"{x}[:]",
            f"{x}.view(-1).view({x}.shape)", f"{x}.flip(1)", f"{x}.roll(1, -1)",
            f"torch.cat(({x}[:, 1:], {x}[:, :1]), 1)", f"torch.cat(({x}[..., 4:], {x}[..., :4]), -1)", f"{x}.clone()",
            f"F.dropout({x}, 0.3, False)", f"F.dropout({x}, 0.0)", f"m.drop({x})", f"{x}.expand({x}.shape)",
            f"torch.where({x} > 0, {x}, {y})", f"{x}.to({x}.dtype)", f"{x}[:, :1].expand({x}.shape)",
            f"torch.stack({x}.unbind(1), 1)", f"{x}.cumsum(1)", f"{x}.masked_fill({y} > 1, 0.0)",
            f"torch.cat({x}.split(3, -1), -1)", f"{x}.transpose(1, 2).reshape({x}.shape)",
            f"{x}[:, torch.arange({x}.shape[1])]",
            f"m.mix({x}[:, :4].transpose(1, 2)).transpose(1, 2).mean(1, keepdim=True) + {x}",
            f"{x}.narrow(-1, 0, 8)", f"{x}.unsqueeze(1).squeeze(1)", f"{x}.swapaxes(0, 1).swapaxes(0, 1)",
            f"({x}.transpose(0, 1) + m.a({x}.transpose(0, 1))).transpose(0, 1).view(-1, 8).view({x}.shape)",
        )
    ]  # fmt: skip


@step(2.5)
def change(w: Writer, x: str, y: str, out: str) -> list[str]:
    layer = w.layer()
    lines = [
        "z = "
        + w.of(
            f"{x}.clone()", f"{layer}({x})", f"{layer}({x})", f"F.dropout({x} * 1, 0.3, False)", f"{x} + {y}",
            f"({x} + 0).transpose(0, 1).contiguous().transpose(0, 1)", f"torch.cat([{x}])", f"F.gelu({x})",
            f"({x} + 0)[:]", f"m.ln({x})", f"m.up({x})[..., :8]", f"{x}.to({x}.dtype, copy=True)",
            f"F.silu({layer}({x})) * m.b({x})",
        )
    ]  # fmt: skip
    lines += w.random.choice(
        [
            [],
            [],
            ["o = z.clone()"],
            ["o = z * 1"],
            ["o = m.b(z)"],
            ["o = z.view(z.shape)"],
            ["o = z.detach()"],
            ["o = m.ln(z)"],
        ]
    )
    lines += [
        w.of(
            "z.add_(1)", f"z += {y}", f"z -= {y}", "z[:, 0] = 0", "z[..., 0] += 1", "z.flatten().mul_(2)" , "z *= 2",
            f"z.movedim(0, 1).add_({y}.movedim(0, 1))", f"z += m.c({y})", "z.clamp_(min=0)", "torch.relu_(z)",
            f"z.copy_({y})", "z.zero_()", "torch.add(z.detach(), 1, out=z.detach())", "z.data.mul_(1.5)",
            f"z.index_add_(1, torch.tensor([0]), {y}[:, :1])", "z.masked_fill_(z > 1, 0.5)", f"z.addcmul_({y}, m.w)",
        )
    ]  # fmt: skip
    return [*lines, f"{out} = " + ("z + o" if lines[1].startswith("o =") else w.of("z", "z", "m.d(z)", f"z + {x}"))]


@step(2)
def mode(w: Writer, x: str, y: str, out: str) -> list[str]:
    a, b = w.layer(), w.layer()
    return w.random.choice([
        ["with torch.no_grad():", f"    {out} = {a}({x}) + 0"],
        ["with torch.no_grad():", f"    k = {a}({x})", f"{out} = F.silu(k) * {b}({x})"],
        ["with torch.no_grad():", f"    k = F.gelu({a}({x}))", f"    k = m.ln({b}(k) + {x})", f"{out} = {b}({x}) + k"],
        ["with torch.enable_grad():", f"    {out} = F.gelu({a}({x}))"],
        ["with torch.set_grad_enabled(m.training):", f"    {out} = F.gelu({a}({x})) + {y}"],
        [f"{out} = {x}.detach()"],
        [f"{out} = {a}({x}.detach()) + {y}"],
        [f"k = {a}({x})", f"{out} = {x} + (k.round() - k).detach() + k"],
        [f"k = {a}({x}).detach()", f"{out} = {x} + {b}(k)"],
        [f"k = m.ln({a}({x}))", f"{out} = {x} + k.detach()"],
        [f"k = F.gelu({a}({x}))", f"{out} = {b}(k) + {b}(k.detach())"],
        [
            "with torch.no_grad():", f"    m.running.mul_(0.9).add_({x}.mean((0, 1)), alpha=0.1)",
            f"{out} = {a}({x} + m.running)",
        ],
        ["m.count += 1", f"{out} = {x} * m.count"],
        [f"m.running.copy_({a}({x}).detach().mean((0, 1)))", f"{out} = {x} + m.running"],
        [f"m.last = {a}({x}).detach()", f"{out} = {x} + m.last"],
        ["with torch.inference_mode():", f"    k = F.gelu({a}({x}))", f"{out} = {b}({x}) + k.clone()"],
        [f"k = {a}({x})", "k.register_hook(lambda g: g * 2)", f"{out} = F.gelu(k)"],
    ])  # fmt: skip


@step(1.5)
def control(w: Writer, x: str, y: str, out: str) -> list[str]:
    a, b = w.layer(), w.layer()
    return w.random.choice([
        [f"if {x}.shape[1] > 3:", f"    {out} = {a}({x})", "else:", f"    {out} = {b}({x})"],
        ["if m.training:", f"    {out} = {a}(F.gelu({x}))", "else:", f"    {out} = {b}({x})"],
        [f"{out} = {x}", "for layer in (m.a, m.b, m.a):", f"    {out} = {out} + layer(m.ln({out}))"],
        [f"{out} = {x}", f"for _ in range({x}.shape[1] - 2):", f"    {out} = torch.tanh({a}({out}))"],
        [f"{out} = checkpoint(lambda t: {b}(F.gelu({a}(t))) + t, {x}, use_reentrant=False)"],
        [f"{out} = checkpoint(lambda t: m.ln({a}(t) + {y}), {x}, use_reentrant={w.of('True', 'False')})"],
        [f"{out} = m.block(m.block({x}))"],
        [f"{out} = Cube.apply({a}({x}))"],
        [f"{out} = torch.cat([{a}({x}[:, :2]), {b}({x}[:, 2:])], 1)"],
        [f"{out} = torch.stack([layer({x}[:, 0]) for layer in (m.a, m.b)], 1).mean(1, keepdim=True) + {x}"],
        [f"unread = {b}(F.gelu({a}({x})))", f"{out} = {x} + 0"],
        [f"unread = m.ln({a}({x})).detach()", f"{out} = {x} + unread.sum()"],
        [f"{out} = m.conv({x}.transpose(1, 2)).transpose(1, 2)"],
        [f"{out} = m.embed({x}.detach().abs().long().clamp(max=4)[..., 0]) + {x}"],
        [f"{out} = torch.func.vmap(lambda t: {b}(F.gelu({a}(t))))({x})"],
        ["torch._dynamo.graph_break()", f"{out} = {b}(F.gelu({a}({x})))"],
        [f"{out} = {x} * (1 if float({x}.detach().sum()) > 0 else 2)"],
        [f"{out} = ({a} if {x}.requires_grad else {b})({x})"],
    ])  # fmt: skip


@step(0.7)
def cast(w: Writer, x: str, y: str, out: str) -> list[str]:
    """Through float32, for which the comparison is told to be less strict."""
    normed = "k * torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + 1e-6)"
    return w.random.choice([
        [f"{out} = F.gelu({x}.float()).to({x}.dtype)"],
        [f"k = {x}.float()", f"{out} = m.w * ({normed}).to({x}.dtype)"],
        [f"k = {x}.float()", f"{out} = (m.w.float() * ({normed})).type_as({x})"],
        [f"{out} = {w.layer()}({x}.to(torch.float32).to({x}.dtype)) + {y}"],
        [f"{out} = F.linear({x}.float(), m.a.weight.float(), m.a.bias.float()).to({x}.dtype) + {y}"],
        [f"{out} = F.layer_norm({x}.float(), (8,), m.w.float(), m.a.bias.float()).to({x}.dtype)"],
        [f"{out} = torch.softmax({x}, -1, dtype=torch.float32).to({x}.dtype)"],
        [f"{out} = m.single({x}.float()).double()"],
        [f"{out} = m.single({x}.float()) + {x}"],
        [f"{out} = {w.layer()}({x}) + {y}.float()"],
        [f"{out} = {y}.float() * {w.layer()}({x})"],
        [f"k = m.single({x}.float())", f"{out} = (F.gelu(k) + {y}.float()).to({x}.dtype)"],
    ])  # fmt: skip


class Cube(torch.autograd.Function):
    """An autograd function with its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return F.gelu(dy) * x


_NAMES["Cube"] = Cube


@dataclasses.dataclass
class Drawn:
    """Source of a model's `forward(m, x)`: steps of lines, each of which computes a value, and the returned values."""

    names: list[str]
    sources: list[str]
    steps: list[list[str]]
    outputs: list[str]

    @property
    def exact(self) -> bool:
        """Whether nothing is computed in a narrower dtype."""
        return not any("float()" in line or "float32" in line for lines in self.steps for line in lines)

    @property
    def source(self) -> str:
        body = [line for lines in self.steps for line in lines]
        return "\n".join(
            ["def forward(m, v0):", *(f"    {line}" for line in body), f"    return {', '.join(self.outputs)},"]
        )


def drawn(seed: int) -> Drawn:
    """A model of two to nine steps."""
    w, names = Writer(seed), list(STEPS)
    count = w.random.randint(2, 9)
    found = Drawn([], [], [], [])
    for k in range(count):
        name = w.random.choices(names, [weight for _, weight in STEPS.values()])[0]
        x = f"v{k if w.chance(0.7) else w.random.randint(0, k)}"
        y = f"v{w.random.randint(0, k)}"
        found.names.append(name)
        found.sources.append(x)
        found.steps.append(STEPS[name][0](w, x, y, f"v{k + 1}"))
    outputs = {count, *(w.random.randint(1, count) for _ in range(w.random.choice([0, 0, 0, 1, 2])))}
    found.outputs = [f"v{k}" for k in sorted(outputs)]
    return found


class Model(nn.Module):
    """The layers that drawn sources call."""

    def __init__(self, source: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.c, self.d, self.frozen, self.tied, self.normed, self.hooked = (
            nn.Linear(8, 8) for _ in range(8)
        )
        self.up, self.down, self.qkv, self.mix = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 24), nn.Linear(4, 4)
        self.ln, self.rn, self.bn = nn.LayerNorm(8), nn.RMSNorm(8), nn.BatchNorm1d(8)
        self.mha, self.mhb = (
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.MultiheadAttention(8, 2, bias=False, batch_first=True),
        )
        self.conv, self.embed = nn.Conv1d(8, 8, 3, padding=1), nn.Embedding(5, 8)
        self.gelu, self.relu_, self.drop = nn.GELU(), nn.ReLU(inplace=True), nn.Dropout(0.0)
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.w, self.gain = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.tensor(1.5))
        self.table = nn.Parameter(torch.randn(1, 6, 8))
        self.register_buffer("running", torch.ones(8))
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("matrix", torch.randn(8, 8))
        self.eps, self.last, self.seen = 1e-5, None, None
        self.frozen.requires_grad_(False)
        self.tied.weight = self.a.weight
        nn.utils.parametrizations.weight_norm(self.normed)
        self.hooked.register_forward_hook(lambda module, args, y: y * 2)
        self.double()
        self.single = nn.Linear(8, 8)
        space: dict[str, Any] = dict(_NAMES)
        exec(source, space)
        self._forward = space["forward"]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._forward(self, x)
