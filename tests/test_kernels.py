"The kernels of `writes` and `token_logps`, run by Triton's interpreter on a CPU. It knows no bfloat16; a GPU does, in the notebooks."
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

SCRIPT = """
import torch
from grpo_colab import writes
from grpo_colab.writes import Write, Writes

writes._takes = lambda w: True
g = torch.Generator().manual_seed(0)
for dtype, off in ((torch.float32, 1e-5), (torch.float16, 2**-11)):
    def make(*shape, dtype=dtype): return torch.randn(*shape, generator=g).to(dtype)
    big = make(96, 512)
    many = [Write(big[8:40], make(32, 512)), Write(big[40:70, :8], make(30, 8)), Write(make(33), make(33)),
            Write(make(40, 24, dtype=torch.float32), make(40, 24)), Write(make(3, 5, 8), make(3, 5, 8)),
            Write(make(16, 24), make(16, 24), scale=.5)]
    for rank, rows, columns in ((16, 64, 512), (3, 33, 300), (40, 70, 257)):
        many.append(Write(make(rows, columns), make(rows, columns), make(rank, columns, dtype=torch.float32),
                          make(rows, rank, dtype=torch.float32), 2.))
    for w in many: w.dest.fill_(float("nan"))
    outside = big[70:].clone()
    fused = Writes(many)
    assert fused.launches and not fused.rest and not fused.copies
    fused.run()
    assert torch.equal(big[70:].isnan(), outside.isnan()) and torch.equal(big[70:], outside)
    for w in many:
        right = w.source.double() * w.scale
        if w.a is not None: right = w.source.double() + w.scale * w.b.to(dtype).double() @ w.a.to(dtype).double()
        torch.testing.assert_close(w.dest.double(), right, rtol=off, atol=4 * off * (w.a is not None))
    assert [fused.differ(64, seed) for seed in range(3)] == [[]] * 3
    for place, damage in ((6, lambda d: d.copy_(many[6].source)), (0, lambda d: d.zero_()), (2, lambda d: d.fill_(float("nan"))),
                          (5, lambda d: d.mul_(2)), (7, lambda d: d.add_(d - many[7].source))):
        damage(many[place].dest)
        assert fused.differ() == [place], (dtype, place, fused.differ())
        fused.run()
    print(dtype, len(fused.launches), "launches")
"""


HEAD = """
import torch
from grpo_colab import token_logps as t

torch.manual_seed(0)
n, columns = 9, 9999
for dtype, off in ((torch.float32, 1e-5), (torch.float16, 2**-10)):
    for scale, cap in ((1., None), (.5, 30.)):
        wide = torch.full((n, columns + 5), 7., dtype=dtype)
        tile = wide[:, :columns].copy_(torch.randn(n, columns) * 4)
        labels, found = torch.randint(columns, (n,)), torch.empty(2, n)
        z = tile.double().requires_grad_()  # by PyTorch, in float64
        capped = cap * torch.tanh(z * scale / cap) if cap else z * scale
        logp = (capped / .7).log_softmax(-1)
        right = logp.gather(1, labels[:, None])[:, 0]
        right.sum().backward()
        t._kernel[(n,)](tile, tile.stride(0), labels, *found, columns, scale, cap or 1., 1 / .7, CAPPED=cap is not None,
                        BLOCK=4096, num_warps=8)
        torch.testing.assert_close(found[0].double(), right.detach(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[1].double(), -(logp.exp() * logp).sum(-1).detach(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(tile.double(), z.grad, rtol=off, atol=off)
        assert (wide[:, columns:] == 7).all()
        print("right", dtype, scale, cap)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("script, word, times", [(SCRIPT, "launches", 2), (HEAD, "right", 4)], ids=["writes", "token_logps"])
def test_kernels_in_the_interpreter(script, word, times):
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(word) == times, done.stdout
