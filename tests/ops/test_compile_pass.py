"""The pass of torch.compile: the calls that it replaces, the calls that it leaves alone, equal results."""

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch.distributed import _functional_collectives as functional

import tilescale_net as tsn
from tests import ranks
from tilescale_net.ops.compile_pass import FuseCollectives


@ranks.on(timeout=250)
def test_layers():
    group, n = dist.group.WORLD, tsn.size()
    fuse = FuseCollectives()

    left = []  # in a graph that the pass has seen: GEMMs and collectives

    def passed(module, inputs):
        fuse(module.graph)
        module.graph.lint()
        module.recompile()
        names = [str(node.target) for node in module.graph.nodes]
        left[:] = [name for name in names if "c10d" in name or name in ("aten.mm.default", "aten.addmm.default")]
        return module

    def compiled(layer, *inputs):
        fuse.replaced.clear()
        torch._dynamo.reset()
        with torch.no_grad():
            found = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=passed))(*inputs)
            torch.testing.assert_close(found, layer(*inputs), rtol=2e-2, atol=0.5)
        return list(fuse.replaced)

    torch.manual_seed(tsn.rank())
    x, up, down = (torch.randn(shape).bfloat16() for shape in ((16, 64), (64, 32), (32, 64)))

    def sequence_parallel(x, up, down):
        hidden = torch.relu(functional.all_gather_tensor(x, 0, group) @ up)
        return functional.reduce_scatter_tensor(hidden @ down, "sum", 0, group)

    def tensor_parallel(x, up, down):
        return functional.all_reduce(torch.relu(x @ up) @ down, "sum", group)

    for rows in (x, x.view(4, 4, 64)):  # as torch.nn.Linear and its like take them
        assert compiled(sequence_parallel, rows, up, down) == ["all_gather_matmul", "matmul_reduce_scatter"]
        assert left == [], "what was replaced is computed too"
        assert compiled(tensor_parallel, rows, up, down) == ["matmul_all_reduce"]
        assert left == ["aten.mm.default"]

    def rows_are_read_again(x, up):
        rows = functional.all_gather_tensor(x, 0, group)
        return rows @ up, rows.sum()

    def not_a_sum(x, up):
        return functional.all_reduce(x @ up, "max", group)

    for layer in (rows_are_read_again, not_a_sum):
        assert compiled(layer, x, up) == []
    odd = torch.randn(64, 30).bfloat16()  # rows of 60 bytes, which no fused kernel takes
    assert compiled(lambda x, w: functional.all_reduce(x @ w, "sum", group), x, odd) == []
    alone = [dist.new_group([rank]) for rank in range(n)][tsn.rank()]  # of torch's, not of this package
    assert compiled(lambda x, w: functional.all_reduce(x @ w, "sum", alone), x, up) == []
