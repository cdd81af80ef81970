"""A model in stages, compared with the model in one process."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import seqfuse as sf
from seqfuse import ops
from seqfuse.parallel import pipeline
from tests import processes
from tests.parallel.sharded import in_the_first

STEPS = 3
DTYPE = torch.float64  # of models and batches; InBFloat16 changes it


def block(dim: int = 6, dropout: float = 0.0) -> ops.Residual:
    return ops.Residual(
        ops.LayerNorm(dim), ops.Linear(dim, 10), ops.Tanh(), ops.Dropout(dropout), ops.Linear(10, dim, bias=False)
    )


def model_of(dropout: float = 0.0) -> sf.Sequential:
    """Two skip connections across boundaries: a residual, and a fork that is read far behind."""
    torch.manual_seed(1)
    model = sf.Sequential(
        ops.Linear(4, 6), ops.Fork("skip"), block(dropout=dropout), block(dropout=dropout), ops.Add("skip"),
        ops.RMSNorm(6), ops.Linear(6, 3),
    )  # fmt: skip
    return model.to(DTYPE)


def batch(step: int, rows: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64).to(DTYPE)
    return x, torch.randn(rows, 3, generator=generator, dtype=torch.float64).to(DTYPE)


def mesh(dims: tuple[int, ...] | None = None, names: tuple[str, ...] = ("pp",)) -> Any:
    return init_device_mesh("cpu", dims or (dist.get_world_size(),), mesh_dim_names=names)


def own(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if not p.is_meta}


def same_as_alone(staged: sf.Sequential, alone: sf.Sequential, **how: Any) -> None:
    """Loss, gradients and parameters of some steps, bit for bit those of one process, on the ranks that have them."""

    def trained(model: sf.Sequential) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            x, target = batch(step, rows=5 + step)
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            yield loss.detach()

    def by_one_process() -> tuple[list[tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]], dict[str, Any]]:
        found = []
        for loss in trained(alone):
            parameters = {name: p.detach().clone() for name, p in alone.named_parameters()}
            grads = {name: p.grad.clone() for name, p in alone.named_parameters() if p.grad is not None}
            found.append((loss, parameters, grads))
        return found, alone.state_dict()

    by_one, state = in_the_first(by_one_process)
    for here, (there, expected, grads) in zip(trained(staged), by_one, strict=True):
        assert here.shape == there.shape
        assert here.dtype == there.dtype
        if not here.is_meta:
            assert torch.equal(here, there)
        for name, p in own(staged).items():
            assert p.grad is not None, name
            assert p.grad.abs().max() > 0, name
            torch.testing.assert_close(p.grad, grads[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
            assert torch.equal(p, expected[name]), name
        assert all(p.grad is None for p in staged.parameters() if p.is_meta)
    alone.load_state_dict(state)


def losses_of(staged: sf.Sequential, alone: sf.Sequential, loss: Any = lambda y: y.square().sum()) -> None:
    """Backward of the loss of one batch in both."""
    for model in (staged, alone):
        loss(model(batch(0)[0])).backward()


def bitwise(got: Tensor, expected: Tensor, name: str) -> None:
    assert torch.equal(got, expected), name


def same_gradients(staged: sf.Sequential, alone: sf.Sequential, of: Any = None, same: Any = bitwise) -> None:
    """On the ranks that have them."""
    expected = dict(alone.named_parameters())
    for name, p in own(staged).items():
        wanted = expected[name].grad
        assert (p.grad is None) == (wanted is None), (of, name)
        if wanted is not None:
            same(p.grad, wanted, f"{of}: {name}")


def staged_of(alone: sf.Sequential, stages: Any = ("2.1", "3.4"), **how: Any) -> sf.Sequential:
    return pipeline(copy.deepcopy(alone), mesh(), stages=stages, **how)


def assert_near(got: Tensor, expected: Tensor, name: str, **float64: float) -> None:
    """In 16 bits parts of a sum are rounded before they are added; the float64 run shows whether the parts are
    right."""
    half = {"rtol": 0.0, "atol": 16 * torch.finfo(DTYPE).eps * expected.abs().max().item()}
    how = float64 if DTYPE is torch.float64 else half
    torch.testing.assert_close(got, expected, msg=lambda m: f"{name}: {m}", **how)


class InBFloat16:
    """The same in bfloat16."""

    def __init__(self, work: Any) -> None:
        self.work, self.__name__ = work, f"{work.__name__}_in_bfloat16"

    def __call__(self) -> None:
        global DTYPE
        before, DTYPE = DTYPE, torch.bfloat16
        try:
            self.work()
        finally:
            DTYPE = before


def with_bfloat16(works: list[Any], but: Iterable[Any] = ()) -> list[Any]:
    """These, and all `but` some, or by default one in three of those, in bfloat16 too."""
    both = [work for work in works if work not in but]
    return [*works, *map(InBFloat16, both if processes.FULL else both[::3])]
