"""Heads that models cut from one GEMM by a 5D view, scale and normalize, as vision transformers do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqfuse import ops
from seqfuse.testing import seeded_randn

from .comparing import Replayed, assert_same, assert_same_recorded
from .residual import Adapted
from .spellings import operations

S = F.scaled_dot_product_attention
HEADS, SIZE = 3, 4  # as many heads as parts, so that a confusion of them shows
X = seeded_randn((2, 5, 12), 0).double()
Three = tuple[Tensor, Tensor, Tensor]


class ViT(nn.Module):
    """The attention of timm, with parts that tests replace."""

    def __init__(
        self,
        parts: Callable[[Tensor], Three] = lambda t: t.permute(2, 0, 3, 1, 4).unbind(0),  # pyright: ignore
        view: tuple[int, int] = (3, HEADS),
        norm: Callable[[], nn.Module] = nn.Identity,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor] = S,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.qkv, self.proj = nn.Linear(12, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, 12)
        self.q_norm, self.k_norm = norm(), norm()
        for p in (*self.q_norm.parameters(), *self.k_norm.parameters()):
            nn.init.uniform_(p, 0.5, 1.5)
        self.parts, self.view, self.attend = parts, view, attend

    def forward(self, x: Tensor) -> Tensor:
        B, N, _ = x.shape
        q, k, v = self.parts(self.qkv(x).reshape(B, N, *self.view, SIZE))
        y = self.attend(self.q_norm(q), self.k_norm(k), v)
        return self.proj(y.transpose(1, 2).reshape(B, N, HEADS * SIZE))


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attn = (q * SIZE**-0.5) @ k.transpose(-2, -1)
    return F.dropout(attn.softmax(dim=-1), 0.0) @ v


def turned(t: Three) -> Three:
    return t[0].transpose(1, 2), t[1].transpose(1, 2), t[2].transpose(1, 2)


SPELLINGS = {
    "timm": ViT(),
    "timm without its fused attention": ViT(attend=by_hand),
    "by index": ViT(lambda t: ((p := t.permute(2, 0, 3, 1, 4))[0], p[1], p[2])),
    "by index from the end": ViT(lambda t: ((p := t.permute((2, 0, 3, 1, 4)))[-3], p[-2], p[-1])),
    "rows before heads": ViT(lambda t: turned(t.unbind(2))),  # pyright: ignore
    "rows before heads, by index": ViT(lambda t: turned((t[:, :, 0], t[:, :, 1], t[:, :, 2]))),
    "rows before heads, permuted": ViT(lambda t: turned(t.permute(2, 0, 1, 3, 4).unbind())),  # pyright: ignore
    "head by head": ViT(lambda t: t.permute(3, 0, 2, 1, 4).unbind(0), (HEADS, 3)),  # pyright: ignore
    "head by head, rows before heads": ViT(lambda t: turned(t.unbind(3)), (HEADS, 3)),  # pyright: ignore
    "head by head, by index": ViT(lambda t: turned((t[..., 0, :], t[..., 1, :], t[..., 2, :])), (HEADS, 3)),
    "both scaled": ViT(attend=lambda q, k, v: ((q * 0.7) @ (k / 2.0).transpose(-2, -1)).softmax(dim=-1) @ v),
    "scaled before torch's attention": ViT(attend=lambda q, k, v: S(q * 0.5, k, v, scale=1.0)),
}
NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(SIZE),
    "LayerNorm without a bias": lambda: nn.LayerNorm(SIZE, 1e-2, bias=False),
    "LayerNorm without weights": lambda: nn.LayerNorm(SIZE, elementwise_affine=False),
    "RMSNorm": lambda: nn.RMSNorm(SIZE, 1e-2),
    "RMSNorm without an eps": lambda: nn.RMSNorm(SIZE),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_heads_of_one_gemm_in_a_view_are_attention_and_keep_their_numbers(name: str):
    replayed = assert_same_recorded(SPELLINGS[name].double(), X)
    found = operations(replayed)
    assert [found[0], *found[-2:]] == ["Linear", "Attention", "Linear"]
    assert len(found) == (6 if name.startswith("head by head") else 3)
    assert not replayed.graphs[0].left
    assert not replayed.graphs[0].beside


@pytest.mark.parametrize("name", ["timm", "timm without its fused attention", "rows before heads, by index"])
def test_heads_of_one_gemm_are_attention_as_dynamo_captures_them(name: str):
    conversion = assert_same(SPELLINGS[name].double(), X)
    found = [op for region in conversion.graphs[0].regions for op in region.model]
    assert [type(op) for op in found] == [ops.Linear, ops.Attention, ops.Linear]


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_queries_and_keys_that_are_modules_of_torch_are_one_operation(name: str):
    replayed = assert_same_recorded(ViT(norm=NORMS[name]).double(), X)
    assert operations(replayed) == ["Linear", "QKNorm", "Attention", "Linear"]


def test_attention_runs_in_a_chain_where_a_model_picks_kernels_of_torch_for_it():
    def picked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return S(q, k, v)

    conversion = assert_same(ViT(attend=picked).double(), X)
    assert [type(op) for region in conversion.graphs[0].regions for op in region.model] == [
        ops.Linear, ops.Attention, ops.Linear,
    ]  # fmt: skip


ANGLES = torch.linspace(0, 3, 20, dtype=torch.float64).view(1, 1, 5, 4)


def rotated(t: Tensor) -> Tensor:
    return t * ANGLES.cos() + torch.cat((-t[..., 2:], t[..., :2]), -1) * ANGLES.sin()


@pytest.mark.parametrize("last", [1, SIZE])
@pytest.mark.parametrize("before", [True, False], ids=["before RoPE", "behind RoPE"])
def test_factors_of_heads_are_beside_their_norms(last: int, before: bool):
    class Gained(ViT):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.Parameter(seeded_randn((2, HEADS, 1, last), 3) + 2)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.parts(self.qkv(x).reshape(2, 5, 3, HEADS, SIZE))
            q, k = F.normalize(q, dim=-1) * 2.0, F.normalize(k, dim=-1)
            q, k = (rotated(t * g) if before else rotated(t) * g for t, g in zip((q, k), self.gains, strict=True))
            return self.proj(S(q, k, v).transpose(1, 2).flatten(2))

    found = operations(assert_same_recorded(Gained().double(), X))
    assert ("Attention" in found) is (before or last == 1)


def test_a_norm_of_heads_without_an_eps_has_that_of_float32_in_16_bits():
    """Heads so small that an eps in bfloat16 would dominate the norm."""
    model, x = ViT(norm=NORMS["RMSNorm without an eps"]).bfloat16(), X.bfloat16() / 64
    nn.init.zeros_(model.qkv.bias)
    model.qkv.weight.data[2 * HEADS * SIZE :] *= 64
    replayed = Replayed(model, x)
    assert "QKNorm" in operations(replayed)
    torch.testing.assert_close(replayed(x), model(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("norm", [nn.Identity, NORMS["RMSNorm"]], ids=["plain", "with norms"])
def test_heads_of_one_gemm_with_an_adapter_are_attention(norm: Callable[[], nn.Module]):
    model = ViT(norm=norm)
    model.qkv = Adapted(model.qkv)
    replayed = assert_same_recorded(model.double(), X)
    assert "Attention" in operations(replayed)
    assert not replayed.graphs[0].left


def test_a_scale_that_a_norm_takes_in_is_no_scale_of_attention():
    class Scaled(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input * 3.0)

    replayed = assert_same_recorded(ViT(norm=lambda: Scaled(SIZE, 0.5)).double(), X)
    assert not any(isinstance(op, ops.Attention) for graph in replayed.graphs for r in graph.regions for op in r.model)


def test_queries_that_are_scaled_and_returned_are_what_they_were():
    assert_same_recorded(Returning(lambda k: (k * 0.5,) * 2).double(), X)


class Returning(ViT):
    """Returns a tensor from which queries are computed."""

    def __init__(self, made: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v = self.parts(self.qkv(x).reshape(2, 5, 3, HEADS, SIZE))
        (left, q), (_, k) = self.made(q), self.made(k)
        return self.proj(S(q, k, v).transpose(1, 2).flatten(2)), left


@pytest.mark.parametrize("which", [0, 1], ids=["its root", "before a cast"])
def test_a_value_within_a_norm_of_queries_may_leave_the_model(which: int):
    def made(t: Tensor) -> tuple[Tensor, Tensor]:
        root = torch.rsqrt(t.double().pow(2).mean(-1, keepdim=True) + 1e-3)
        y = t.double() * root
        return (root, y)[which], y.float()

    assert "CrossAttention" in operations(assert_same_recorded(Returning(made), X.float(), bound=1e-4))


NEARLY = {
    "values first": ViT(lambda t: t.permute(2, 0, 3, 1, 4).flip(0).unbind(0)),  # pyright: ignore
    "values for keys": ViT(lambda t: ((p := t.permute(2, 0, 3, 1, 4))[0], p[2], p[1])),
    "parts from rows": ViT(lambda t: turned(t.reshape(2, 3, 5, HEADS, SIZE).unbind(1))),  # pyright: ignore
    "values scaled": ViT(attend=lambda q, k, v: S(q, k, v * 0.5)),
    "another norm for keys": ViT(attend=lambda q, k, v: S(F.layer_norm(q, (4,)), F.layer_norm(k, (4,), eps=0.1), v)),
    "queries normalized alone": ViT(attend=lambda q, k, v: S(F.rms_norm(q, (4,)), k, v)),
}


@pytest.mark.parametrize("name", NEARLY)
def test_heads_that_are_nearly_those_of_one_gemm_keep_their_numbers(name: str):
    replayed = assert_same_recorded(NEARLY[name].double(), X)
    assert "Attention" not in operations(replayed)


class Folded(nn.Module):
    """Attention by hand with heads folded into the batch, and RoPE before it, as in ESM-2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.cos, self.sin = nn.Buffer(torch.randn(1, 5, 4)), nn.Buffer(torch.randn(1, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.reshape(2, -1, 3, 4).transpose(1, 2).reshape(6, -1, 4) for t in self.qkv(x).chunk(3, -1))
        q, k = (t * self.cos + torch.cat((-t[..., 2:], t[..., :2]), -1) * self.sin for t in (q * 0.5, k))
        y = (q @ k.transpose(1, 2)).softmax(-1) @ v
        return self.out(y.view(2, 3, -1, 4).transpose(1, 2).reshape(2, -1, 12))


def test_heads_folded_into_the_batch_leave_what_is_before_them_as_it_was():
    conversion = assert_same(Folded().double(), seeded_randn((2, 5, 12), 0).double())
    found = [type(op).__name__ for region in conversion.graphs[0].regions for op in region.model]
    assert "Attention" in str(found)
    assert "Multiply" not in found
