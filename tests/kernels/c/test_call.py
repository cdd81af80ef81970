"""Calls from Python to C: errors for wrong calls, and other threads run meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch

from seqfuse.kernels.c.call import CKernel, written


def _plus() -> CKernel:
    body = "for (I i = 0; i < n; i++) to[i] = from[i] * times + first;\n"
    return written(["const float *from", "float *to"], ["n", "first"], ["times"], body)


def test_arguments_arrive_in_their_order() -> None:
    x, y = torch.arange(5.0), torch.zeros(5)
    assert _plus().function()(x.data_ptr(), y.data_ptr(), 4, -3, 0.5, 1) is None
    assert y.tolist() == [-3.0, -2.5, -2.0, -1.5, 0.0]


@pytest.mark.parametrize("wrong", [(0, 0, 0, 0, 0.0), (0, 0, 0.5, 0, 0.0, 1), (None, 0, 0, 0, 0.0, 1)])
def test_a_wrong_call_raises_and_runs_nothing(wrong: tuple[float, ...]) -> None:
    with pytest.raises(TypeError):
        _plus().function()(*wrong)


def test_other_threads_run_while_a_kernel_does() -> None:
    body = "*began = 1;\nfor (I i = 0; i < most && !*flag; i++) usleep(1000);\n*seen = *flag;\n"
    pointers = ["volatile int64_t *began", "const volatile int64_t *flag", "int64_t *seen"]
    kernel = written(pointers, ["most"], [], body, before="#include <unistd.h>\n").function()
    began, flag, seen = (torch.zeros(1, dtype=torch.int64) for _ in range(3))
    thread = threading.Thread(target=kernel, args=(began.data_ptr(), flag.data_ptr(), seen.data_ptr(), 30_000, 1))
    thread.start()
    while thread.is_alive() and not began:
        pass
    flag.fill_(1)
    thread.join()
    assert seen.item() == 1
