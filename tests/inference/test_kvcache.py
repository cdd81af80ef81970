"""A model with a KV cache, compared with the same model without one."""

from __future__ import annotations

import functools
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import seqfuse as sf
from seqfuse import ops
from seqfuse.inference import KVCache
from seqfuse.inference.generate import GraphedStep
from seqfuse.nn import TransformerStack
from seqfuse.testing import assert_bitwise_equal
from tests.watching import Calls, name_of

GPT: dict[str, Any] = {"activation": functools.partial(ops.GeLU, "tanh")}
LLAMA: dict[str, Any] = {
    "kv_heads": 2, "activation": ops.SwiGLU, "norm": ops.RMSNorm, "bias": False, "qk_norm": True,
    "rotary": functools.partial(ops.RotaryEmbedding, style="half"),
}  # fmt: skip
FORMS = {"GPT": GPT, "Llama": LLAMA, "window": {**LLAMA, "window": 5}, "softcap": {**GPT, "softcap": 4.0}}


def model_of(form: str, layers: int = 2, **changed: Any) -> sf.Sequential:
    torch.manual_seed(0)
    learned = [] if "rotary" in FORMS[form] else [ops.PositionEmbedding(96, 32)]
    model = sf.Sequential(
        ops.Embedding(41, 32), *learned, TransformerStack(layers, 32, 4, causal=True, **{**FORMS[form], **changed}),
        ops.Linear(32, 41, bias=False),
    )  # fmt: skip
    return model.eval()


def attending(layers: int) -> sf.Sequential:
    parts = (sf.Sequential(ops.Linear(32, 96), ops.Attention(4, causal=True)) for _ in range(layers))
    return sf.Sequential(ops.Embedding(41, 32), sf.Sequential(*parts)).eval()


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(41, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pieces", [(70,), (6, *64 * (1,)), (1, 5, 20, 1, 1, 33, 9), 20 * (1,)], ids=str)
def test_rows_fed_in_pieces_give_what_all_rows_give(form: str, pieces: tuple[int, ...]):
    model, x = model_of(form), tokens(2, sum(pieces))
    cache = KVCache(2, 96)
    found = torch.cat([cache.feed(model, part) for part in x.split(pieces, 1)], 1)
    with torch.no_grad():
        close(found, model(x))
    assert cache.lengths.tolist() == 2 * [sum(pieces)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", [(9, 4, 0), (1, 1, 1), (7, 9, 9)], ids=str)
def test_sequences_may_differ_in_length(form: str, first: tuple[int, ...]):
    model = model_of(form)
    rows = [tokens(1, n + 5, seed=n + 5)[0] for n in first]
    cache, width = KVCache(3, 40), max(first)
    prompt = torch.stack([torch.nn.functional.pad(row[:n], (0, width - n)) for row, n in zip(rows, first, strict=True)])
    before = cache.feed(model, prompt, torch.tensor(first))
    steps = [
        cache.feed(model, torch.stack([row[n + i] for row, n in zip(rows, first, strict=True)]).unsqueeze(1))
        for i in range(5)
    ]
    made = torch.cat(steps, 1)
    for b, (row, n) in enumerate(zip(rows, first, strict=True)):
        with torch.no_grad():
            whole = model(row.unsqueeze(0))[0]
        close(before[b, :n], whole[:n])
        close(made[b], whole[n:])
    assert cache.lengths.tolist() == [n + 5 for n in first]


@pytest.mark.parametrize("int8", [False, True])
def test_rows_that_are_not_taken_do_not_need_room(int8: bool):
    model, x = model_of("Llama"), tokens(2, 8)
    found, wide = KVCache(2, 6, int8=int8), KVCache(2, 20, int8=int8)
    for cache in (found, wide):
        cache.feed(model, x[:, :3])
    counts = torch.tensor([3, 0])  # of five rows: three fill the first sequence
    close(found.feed(model, x[:, 3:], counts)[0, :3], wide.feed(model, x[:, 3:], counts)[0, :3])
    full = torch.tensor([0, 1])
    close(found.feed(model, x[:, 3:5], full)[1, :1], wide.feed(model, x[:, 3:5], full)[1, :1])
    for mine, its in zip(found._layers, wide._layers, strict=True):
        for a, b in zip(mine.tensors(), its.tensors(), strict=True):
            close(a[0], b[0, :, :6])
            close(a[1, :, :4], b[1, :, :4])


def test_rows_that_are_not_taken_do_not_need_a_learned_position():
    model = sf.Sequential(ops.PositionEmbedding(4, 24), ops.Attention(2, causal=True)).eval()
    x = torch.randn(2, 4, 24)
    cache = KVCache(2, 9)
    cache.feed(model, x[:, :2])
    found = cache.feed(model, x[:, [2, 3, 0, 0]], torch.tensor([2, 0]))
    close(found[0, :2], model(x)[0, 2:].detach())
    cache.feed(model, x, torch.tensor([0, 2]))


def test_a_token_without_a_learned_position_is_refused_and_nothing_changes():
    attention = ops.Linear(32, 96), ops.Attention(4, causal=True)
    model = sf.Sequential(ops.Embedding(41, 32), ops.PositionEmbedding(6, 32), *attention)
    cache, x = KVCache(2, 20), tokens(2, 6)
    cache.feed(model, x[:, :5])
    with pytest.raises(sf.RangeError, match=r"PositionEmbedding.*: expects positions from 0 to 5, got 6"):
        cache.feed(model, x[:, :2])
    assert cache.lengths.tolist() == [5, 5]
    with torch.no_grad():
        close(cache.feed(model, x[:, 5:]), model(x)[:, 5:])


@pytest.mark.parametrize("int8", [False, True])
def test_a_cache_made_in_inference_mode_goes_on_outside_of_it(int8: bool):
    model, x = model_of("GPT"), tokens(1, 6)
    with torch.inference_mode():
        cache = KVCache(1, 8, int8=int8)
        cache.feed(model, x[:, :3])
        wide = cache.expand(2)
    for one in (cache, wide):
        one.feed(model, x[:, 3:4].expand(one.batch, 1))
        one.reorder(torch.zeros(one.batch, dtype=torch.int64))
        one.truncate(3)
        assert "at most 3 tokens" in repr(one)
        with torch.inference_mode():
            one.feed(model, x[:, 3:4].expand(one.batch, 1))


def test_copies_of_a_sequence_that_took_a_part_of_its_rows_see_no_others():
    model, x = model_of("GPT"), tokens(1, 6)
    cache = KVCache(1, 8)
    cache.feed(model, x[:, :5], torch.tensor([3]))
    wide = cache.expand(2)
    close(wide.feed(model, x[:, 3:4].expand(2, 1))[:, 0], model(x[:, :4])[:, 3].expand(2, -1).detach())


def test_sequences_cut_to_several_lengths_go_on_from_their_own():
    model, x = model_of("GPT"), tokens(2, 5)
    cache = KVCache(2, 8)
    cache.feed(model, x[:, :4])
    cache.truncate(torch.tensor([2, 4]))
    found = cache.feed(model, x[:, 4:])[:, 0]
    close(found[0], model(x[:1, [0, 1, 4]])[0, -1].detach())
    close(found[1], model(x[1:])[0, -1].detach())


def test_int8_rows_fed_together_see_the_keys_that_they_see_one_by_one():
    model, x = model_of("GPT"), tokens(2, 5)
    together, apart = (KVCache(2, 8, int8=True) for _ in range(2))
    close(together.feed(model, x), torch.cat([apart.feed(model, x[:, i : i + 1]) for i in range(5)], 1))


def test_keys_of_another_size_are_refused():
    model, cache = sf.Sequential(ops.Attention(2, causal=True)), KVCache(1, 8)
    cache.feed(model, torch.randn(1, 2, 48))
    with pytest.raises(sf.errors.StateError, match=r"2 key heads of 8 in torch\.float32, got 2 key heads of 16"):
        cache.feed(model, torch.randn(1, 1, 96))


def test_a_model_that_raises_leaves_no_keys_behind():
    class Broken(nn.Module):
        works = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.works:
                raise RuntimeError("broken")
            return x

    broken = Broken()
    attention = [ops.Linear(32, 96), ops.Attention(4, causal=True)]
    model = sf.Sequential(ops.Embedding(41, 32), *attention, broken, *attention).eval()
    cache, x = KVCache(2, 8), tokens(2, 4)
    with pytest.raises(RuntimeError, match="broken"):
        cache.feed(model, x)
    broken.works = True
    close(cache.feed(model, x), model(x).detach())


@pytest.mark.parametrize("int8", [False, True])
def test_what_a_model_that_raised_wrote_is_not_read(int8: bool):
    model, x, cache = model_of("GPT"), tokens(2, 4), KVCache(2, 16, int8=int8)
    cache.feed(model, x, torch.tensor([4, 1]))
    model[0].weight.data.fill_(torch.nan)
    hook = model[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.feed(model, tokens(2, 5))
    hook.remove()
    model.load_state_dict(model_of("GPT").state_dict())
    assert cache.feed(model, x[:, :1]).isfinite().all()


def test_no_sequence_writes_into_another():
    model = model_of("Llama")
    cache = KVCache(3, 20)
    cache.feed(model, tokens(3, 6), torch.tensor([6, 2, 4]))
    kept = [t.clone() for layer in cache._layers for t in layer.tensors()]
    cache.feed(model, tokens(3, 3, seed=2), torch.tensor([0, 3, 1]))
    for t, before in zip((t for layer in cache._layers for t in layer.tensors()), kept, strict=True):
        changed = (t != before).any(-1).any(1)
        assert changed.nonzero().tolist() == [[1, 2], [1, 3], [1, 4], [2, 4]]


def test_buffers_are_made_once_and_written_in_place():
    model, cache = model_of("Llama"), KVCache(2, 30)
    cache.feed(model, tokens(2, 4))
    places = [t.data_ptr() for layer in cache._layers for t in layer.tensors()]
    for i in range(6):
        cache.feed(model, tokens(2, 1, seed=i))
    assert [t.data_ptr() for layer in cache._layers for t in layer.tensors()] == places
    assert cache._layers[0].keys.shape == (2, 2, 30, 8)


def test_a_cache_that_is_full_refuses_and_nothing_changes():
    model, cache = model_of("Llama"), KVCache(2, 10)
    cache.feed(model, tokens(2, 8))
    kept = [t.clone() for layer in cache._layers for t in layer.tensors()]
    with pytest.raises(sf.errors.StateError, match=r"SF505.*of 8 tokens cannot take 3 more: the cache holds 10"):
        cache.feed(model, tokens(2, 3))
    assert_bitwise_equal([t for layer in cache._layers for t in layer.tensors()], kept)
    assert cache.lengths.tolist() == [8, 8]
    cache.feed(model, tokens(2, 2))
    with pytest.raises(sf.errors.StateError, match="cannot take 1 more"):
        cache.feed(model, tokens(2, 1))


@pytest.mark.parametrize("where", ["around", "inside"])
def test_a_compiled_model_which_meets_no_cache_is_refused_and_nothing_changes(where: str):
    torch.compiler.reset()
    model, cache, x = attending(1), KVCache(2, 10), tokens(2, 4)
    if where == "inside":
        model[1].compile(backend="eager")
    fed = torch.compile(model, backend="eager") if where == "around" else model
    for _ in range(2):  # compiled at the first call
        with pytest.raises(sf.errors.StateError, match=r"SF505.*no attention of the model met the cache"):
            cache.feed(fed, x)
    assert cache.lengths.tolist() == [0, 0]
    if where == "around":
        cache.feed(model, x)
        with pytest.raises(sf.errors.StateError, match="no attention of the model met the cache"):
            cache.feed(fed, x)
        assert cache.lengths.tolist() == [4, 4]


@pytest.mark.parametrize("how", ["replaced", pytest.param("in place", marks=pytest.mark.full)])
def test_a_model_of_which_a_part_is_compiled_is_refused_and_nothing_changes(how: str):
    torch.compiler.reset()  # a graph too many, so this one would run eagerly and meet the cache
    model, x = attending(2), tokens(2, 4)
    layers, plain = model[1], model[1][0]
    if how == "replaced":
        layers[0] = torch.compile(plain, backend="eager")
    else:
        plain.compile(backend="eager")
    cache = KVCache(2, 10)
    for _ in range(2):
        with pytest.raises(sf.errors.StateError, match=r"SF505.*only 1 of 2 parts with attention of the model met"):
            cache.feed(model, x)
        assert cache.lengths.tolist() == [0, 0]
        assert not cache._layers
    with torch.compiler.set_stance("force_eager"):
        cache.feed(model, x)
    with pytest.raises(sf.errors.StateError, match="the model attended 1 times, and 2 times before"):
        cache.feed(model, x)
    assert cache.lengths.tolist() == [4, 4]


def test_what_does_not_attend_needs_no_cache():
    class Table(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.unsqueeze(-1)

    cache, x = KVCache(2, 10), tokens(2, 4)
    for model in (Table(), Table().forward):
        assert torch.equal(cache.feed(model, x), x.unsqueeze(-1))


def test_what_padding_took_up_is_free_again():
    model, cache = model_of("Llama"), KVCache(2, 12)
    cache.feed(model, tokens(2, 10), torch.tensor([3, 4]))
    for i in range(8):
        cache.feed(model, tokens(2, 1, seed=i))
    assert cache.lengths.tolist() == [11, 12]
    with pytest.raises(sf.errors.StateError, match="a sequence of 12 tokens cannot take 1 more"):
        cache.feed(model, tokens(2, 1))


@pytest.mark.parametrize(("ragged", "int8"), [(False, False), (True, False), (False, True), (True, True)])
def test_reordered_sequences_go_on_from_their_new_pasts(ragged: bool, int8: bool):
    model, x = model_of("Llama"), tokens(3, 7)
    counts = torch.tensor([7, 3, 5]) if ragged else None
    cache, fed = KVCache(3, 20, int8=int8), KVCache(3, 20, int8=int8)
    cache.feed(model, x, counts)
    index, new = torch.tensor([2, 0, 0]), tokens(3, 1, seed=9)
    cache.reorder(index)
    found = cache.feed(model, new)[:, -1]
    fed.feed(model, x[index], None if counts is None else counts[index])
    close(found, fed.feed(model, new)[:, -1])
    for b, source in enumerate([] if int8 else index.tolist()):
        past = x[source, : 7 if counts is None else int(counts[source])]
        with torch.no_grad():
            close(found[b], model(torch.cat((past, new[b])).unsqueeze(0))[0, -1])


@pytest.mark.parametrize("int8", [False, True])
def test_a_compiled_step_reorders_in_one_graph_however_many_tokens_there_are(int8: bool):
    torch._dynamo.reset()
    model, x = model_of("Llama"), tokens(3, 7)
    cache, same = (KVCache(3, 20, int8=int8) for _ in range(2))
    counter = CompileCounter()
    compiled: Any = torch.compile(cache.reorder, fullgraph=True, backend=counter)
    for step, part in enumerate(x.split((3, 1, 1, 1, 1), 1)):
        assert_bitwise_equal(cache.feed(model, part), same.feed(model, part))
        index = torch.tensor([2, 0, step % 3])
        compiled(index)
        same.reorder(index)
    assert counter.frame_count == 1
    for wrong in (-1, 3):
        with pytest.raises(IndexError):
            compiled(torch.tensor([0, wrong, 1]))
    assert_bitwise_equal(cache.feed(model, x[:, :1]), same.feed(model, x[:, :1]))


def test_a_prefix_is_read_once_for_many():
    model, prefix, rest = model_of("GPT"), tokens(1, 6), tokens(3, 4, seed=3)
    one = KVCache(1, 20)
    one.feed(model, prefix)
    many = one.expand(3)
    found = many.feed(model, rest)
    with torch.no_grad():
        close(found, model(torch.cat((prefix.expand(3, -1), rest), 1))[:, 6:])
    assert one.lengths.tolist() == [6]
    many.truncate(6)
    close(many.feed(model, rest), found)
    with pytest.raises(sf.errors.InputError, match="only a cache of one sequence"):
        many.expand(2)


def test_int8_stays_near_and_takes_a_quarter_of_the_memory():
    model, x = model_of("Llama"), tokens(2, 40)
    exact, rough = KVCache(2, 64), KVCache(2, 64, int8=True)
    for part in x.split((25, *15 * (1,)), 1):
        y, near = exact.feed(model, part), rough.feed(model, part)
        assert (near - y).norm() < 0.03 * y.norm()
    assert not torch.equal(near, y)
    sizes = [sum(t.nbytes for layer in cache._layers for t in layer.tensors()) for cache in (exact, rough)]
    assert sizes[1] == sizes[0] * (1 + 4 / 8) / 4


def test_a_fused_and_an_unfused_model_read_the_same():
    model, x = model_of("GPT"), tokens(2, 30)
    found: list[Tensor] = []
    for fused in (True, False):
        cache = KVCache(2, 32)
        with sf.fusing(fused):
            found.append(torch.cat([cache.feed(model, part) for part in x.split((20, *10 * (1,)), 1)], 1))
    close(*found)


def test_weights_that_change_are_seen():
    model, x = model_of("GPT"), tokens(1, 9)
    cache = KVCache(1, 20)
    cache.feed(model, x)
    other = model_of("GPT")
    torch.manual_seed(7)
    other.load_state_dict({k: torch.randn_like(v) for k, v in other.state_dict().items()})
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        close(KVCache(1, 20).feed(model, x), other(x))


def test_nothing_is_left_behind_after_a_call():
    model, x = model_of("GPT"), tokens(1, 5)
    cache = KVCache(1, 20)
    cache.feed(model, x)
    with torch.no_grad():
        close(model(x), KVCache(1, 20).feed(model, x))
    with pytest.raises(sf.errors.InputError):
        cache.feed(sf.Sequential(*model, ops.Linear(3, 3)), x)
    assert cache.lengths.tolist() == [5]
    with torch.no_grad():
        close(model(x), KVCache(1, 20).feed(model, x))
    y = model(x)
    y.sum().backward()


def test_what_a_cache_cannot_hold_is_refused():
    model, x = model_of("GPT"), tokens(2, 5)
    with pytest.raises(ValueError, match="batch and max_length must be at least 1, got 0 and 5"):
        KVCache(0, 5)
    cache = KVCache(2, 20)
    with pytest.raises(sf.errors.InputError, match=r"the cache has 2 sequences, got x \(3, 5\)"):
        cache.feed(model, tokens(3, 5))
    with pytest.raises(sf.errors.InputError, match=r"expects integer counts \[2\], got torch.int64 \(1,\)"):
        cache.feed(model, x, torch.tensor([3]))
    for counts in ([5, 6], [-1, 5]):
        with pytest.raises(sf.errors.InputError, match=r"expects counts of 0 to 5, got \["):
            cache.feed(model, x, torch.tensor(counts))
    with pytest.raises(sf.errors.InputError, match=r"expects integer counts \[2\], got torch.float32 \(2,\)"):
        cache.feed(model, x, torch.tensor([1.0, 2.0]))
    assert cache.lengths.tolist() == [0, 0]
    with pytest.raises(ValueError, match="lengths must not be negative, got -1"):
        cache.truncate(-1)
    for index, got in (([0], r"int64 \(1,\)"), ([0.0, 1.0], r"float32 \(2,\)"), ([True, False], r"bool \(2,\)")):
        with pytest.raises(sf.InputError, match=rf"expects an int64 or int32 index \[2\], got torch.{got}"):
            cache.reorder(torch.tensor(index))
    for index in ([0, 2], [-1, 0]):
        with pytest.raises(sf.RangeError, match=r"SF107: the cache has 2 sequences, got the index \["):
            cache.reorder(torch.tensor(index))
    with pytest.raises(sf.errors.StateError, match="causal attention without a mask"):
        cache.feed(sf.Sequential(ops.Embedding(41, 24), ops.Attention(2)), x)
    cache = KVCache(2, 20)
    cache.feed(model, x)
    with pytest.raises(sf.errors.StateError, match="attended 1 times, and 2 times before"):
        cache.feed(sf.Sequential(ops.Embedding(41, 96), ops.Attention(4, causal=True)), x)
    with pytest.raises(sf.errors.StateError, match="attended 3 times, and 2 times before"):
        cache.feed(model_of("GPT", 3), x)
    for other, said in (
        (model_of("GPT", kv_heads=2), "got 2 key heads of 8 in torch.float32"),
        (model_of("GPT").double(), "got 4 key heads of 8 in torch.float64"),
    ):
        with pytest.raises(sf.errors.StateError, match=f"holds 4 key heads of 8 in torch.float32, {said}"):
            cache.feed(other, x)
    assert cache.lengths.tolist() == [5, 5]


@pytest.mark.parametrize("form", ["GPT", "window"])
def test_a_rehearsal_changes_nothing_and_reads_the_same(form: str):
    """Shapes of the whole buffer, as in a CUDA graph, give the results of shapes that follow the lengths."""
    model, x, new = model_of(form), tokens(2, 6), tokens(2, 1, seed=4)
    cache = KVCache(2, 9)
    cache.feed(model, x, torch.tensor([6, 3]))
    with cache.rehearsal():
        rehearsed = cache.feed(model, new)
    assert cache.lengths.tolist() == [6, 3]
    close(rehearsed, cache.feed(model, new))
    assert cache.lengths.tolist() == [7, 4]
    cache.reserve(2)
    with pytest.raises(sf.errors.StateError, match="a sequence of 7 tokens cannot take 3 more"):
        cache.reserve(3)


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


class HostReads(TorchDispatchMode):
    """Raises where an operation reads a number on the host, or returns a tensor of data-dependent size."""

    FORBIDDEN = (
        torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.is_nonzero, torch.ops.aten.nonzero,
        torch.ops.aten.masked_select, torch.ops.aten.unique_dim, torch.ops.aten._unique2,
        torch.ops.aten.repeat_interleave,
    )  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in self.FORBIDDEN, func
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_):
            assert all(index is None or index.dtype is not torch.bool for index in args[1]), func
        return func(*args, **(kwargs or {}))


def refuse(*given: Any) -> None:
    raise AssertionError("the host reads a tensor")


@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("ragged", [False, True], ids=["", "ragged"])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_reads_nothing_from_the_device(form: str, ragged: bool, int8: bool, monkeypatch: pytest.MonkeyPatch):
    model, new = model_of(form), tokens(3, 1)
    cache = KVCache(3, 20, int8=int8)
    cache.feed(model, tokens(3, 6), torch.tensor([6, 0, 3]) if ragged else None)
    cache.feed(model, new)
    with HostReads():
        cache.feed(model, new)
        with cache.rehearsal():
            cache.feed(model, new)
    for name in READS:
        monkeypatch.setattr(Tensor, name, refuse)
    y = cache.feed(model, new)
    cache.reserve(4)
    monkeypatch.undo()
    assert cache.lengths.tolist() == ([9, 3, 6] if ragged else [9, 9, 9])
    assert y.isfinite().all()


def test_what_a_step_must_not_do_is_noticed(monkeypatch: pytest.MonkeyPatch):
    lengths = torch.tensor([3, 4])
    for read in (lambda: lengths.max().item(), lambda: bool(lengths.all()), lambda: lengths[lengths > 3]):
        with pytest.raises(AssertionError), HostReads():
            read()
    monkeypatch.setattr(Tensor, "tolist", refuse)
    with pytest.raises(AssertionError, match="the host reads"):
        lengths.tolist()


def test_no_rows_change_nothing():
    model, x = model_of("Llama"), tokens(2, 5)
    cache = KVCache(2, 9)
    assert cache.feed(model, x[:, :0]).shape == (2, 0, 41)
    cache.feed(model, x)
    assert cache.feed(model, x[:, :0]).shape == (2, 0, 41)
    for _ in range(3):
        cache.feed(model, x, torch.tensor([0, 0]))
    assert cache.lengths.tolist() == [5, 5]
    with torch.no_grad():
        close(cache.feed(model, x[:, :1])[:, -1], model(torch.cat((x, x[:, :1]), 1))[:, -1])


@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
def test_a_bad_number_of_what_was_forgotten_does_no_harm(int8: bool):
    model, x = model_of("Llama"), tokens(2, 5)
    cache = KVCache(2, 9, int8=int8)
    cache.feed(model, x)
    for layer in cache._layers:
        for t in layer.tensors():
            t[:, :, :5] = 77 if t.dtype is torch.int8 else torch.nan
    cache.truncate(torch.tensor([0, 0]))
    y = cache.feed(model, x, torch.tensor([5, 2]))
    new = cache.feed(model, x[:, :1])
    clean = KVCache(2, 9, int8=int8)
    assert torch.equal(clean.feed(model, x, torch.tensor([5, 2]))[1, :2], y[1, :2])
    assert torch.equal(clean.feed(model, x[:, :1]), new)


@pytest.mark.parametrize(("counts", "most"), [((2, 6), 5), ((6, 6), 9)], ids=str)
def test_what_is_left_of_sequences_is_all_that_is_seen(counts: tuple[int, int], most: int):
    model, x, new = model_of("GPT"), tokens(2, 6), tokens(2, 1, seed=3)
    cache = KVCache(2, 20)
    cache.feed(model, x, torch.tensor(counts) if counts[0] < counts[1] else None)
    cache.truncate(most)
    found = cache.feed(model, new)[:, -1]
    for b, count in enumerate(counts):
        with torch.no_grad():
            close(found[b], model(torch.cat((x[b, : min(count, most)], new[b])).unsqueeze(0))[0, -1])


@pytest.mark.parametrize("most", [1, 2, 7, 31])
def test_a_cache_of_any_length_can_be_filled_to_its_end(most: int):
    model, x = model_of("Llama"), tokens(2, most)
    cache = KVCache(2, most)
    found = torch.cat([cache.feed(model, x[:, i : i + 1]) for i in range(most)], 1)
    with torch.no_grad():
        close(found, model(x))
    with pytest.raises(sf.errors.StateError, match=f"a sequence of {most} tokens cannot take 1 more"):
        cache.feed(model, x[:, :1])


def test_a_rehearsal_before_a_capture_puts_the_lengths_back_on_its_own_stream(monkeypatch: pytest.MonkeyPatch):
    """Put back on another stream, which does not wait, they would be incremented after that."""
    streams = ["main"]

    class Aside:
        def wait_stream(self, stream: object) -> None: ...

    class On:
        """Replaces `torch.cuda.stream` and `torch.cuda.graph`."""

        def __init__(self, of: object) -> None:
            self.stream = "aside" if isinstance(of, Aside) else "capture"

        def __enter__(self) -> None:
            streams.append(self.stream)

        def __exit__(self, *exception: object) -> None:
            streams.pop()

    for name, value in (("stream", On), ("graph", On), ("CUDAGraph", mock.MagicMock())):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "Stream", Aside)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "device", mock.MagicMock())
    monkeypatch.setattr(sys.modules[GraphedStep.__module__], "_on_gpu", lambda lengths: True)

    model, cache = model_of("GPT"), KVCache(2, 9)
    cache.feed(model, tokens(2, 3))

    def written(func: Any, args: Any, out: Any) -> tuple[str, str] | None:
        return (streams[-1], name_of(func)) if func._schema.is_mutable and args[0] is cache.lengths else None

    with Calls(written) as writes:
        GraphedStep(model, cache)
    assert writes.names == [*[("aside", "add_"), ("aside", "copy_")] * 3, ("capture", "add_"), ("main", "copy_")]
    assert cache.lengths.tolist() == [3, 3]


def test_the_repr_says_what_is_in_it():
    cache = KVCache(2, 20, int8=True)
    cache.feed(model_of("GPT"), tokens(2, 5))
    assert repr(cache) == "KVCache(2, 20, int8=True) of 2 layers, at most 5 tokens"
