"""torchtitan's dispatch and combine over tilescale_net.deep_ep, with gradients, against plain torch.

A program of tests/clients/test_clients.py, one process per rank; MODULES is the folder of the published modules.
"""

import importlib
import os

from tests.clients import stand_ins

stand_ins.torch_cuda()
import torch
import torch.distributed as dist

import tilescale_net.deep_ep

tilescale_net.deep_ep.install()
NAME = "torchtitan.distributed.deepep.deepep"
stand_ins.install_modules("torchtitan", os.environ["MODULES"], [NAME])
titan = importlib.import_module(NAME)
if not stand_ins.GPU:  # its operators are there for CUDA alone
    torch.library.impl(titan._lib, "dispatch", "CPU")(titan._dispatch_op_impl)
    torch.library.impl(titan._lib, "combine", "CPU")(titan._combine_op_impl)
if not dist.is_initialized():
    dist.init_process_group("gloo")
group = dist.new_group(list(range(stand_ins.SIZE)))
experts = stand_ins.Experts(hidden=256)
MOST = 32


def step(count: int, most: int, trains: bool) -> None:
    """A layer whose experts multiply by a number each; its gradients, if it trains."""
    x, weights, choices = experts.tokens(count, count)
    x, weights = x.requires_grad_(trains), weights.requires_grad_(trains)
    titan.get_buffer(group, hidden=experts.hidden, num_max_tokens_per_rank=MOST, num_topk=experts.top_k)
    with torch.set_grad_enabled(trains):
        options = dict(num_tokens_per_rank=most, cudagraphable=not trains)
        rows, counts, state = titan.dispatch_tokens(x, choices, weights, experts.of_rank, experts.number, **options)
        if not trains:  # rows behind those that arrived are anything
            rows = torch.nan_to_num(rows)
            scores = torch.nan_to_num(state.recv_scores.reshape(len(rows), -1).sum(1))
            state.recv_scores = torch.where(torch.arange(len(rows), device=rows.device) < counts.sum(), scores, 0.0)
        mine = experts.factor[experts.first : experts.first + experts.of_rank]
        factor = torch.repeat_interleave(mine, counts.long())
        factor = torch.nn.functional.pad(factor, (0, len(rows) - len(factor)))[:, None]
        out = titan.combine_tokens((rows * factor).to(torch.bfloat16), state)
        titan.sync_combine()
    experts.check(out, x, weights, choices, 2e-2)
    if not trains:
        return
    plain, plain_weights = x.detach().float().requires_grad_(), weights.detach().clone().requires_grad_()
    wanted = plain * (plain_weights * experts.factor[choices]).sum(1, keepdim=True)
    generator = torch.Generator().manual_seed(stand_ins.RANK)
    gradient = torch.randn(out.shape, generator=generator).to(out.device, torch.bfloat16)
    out.backward(gradient)
    wanted.backward(gradient.float())
    for ours, theirs in ((x, plain), (weights, plain_weights)):
        assert stand_ins.difference(ours.grad, theirs.grad) < 4e-2


def training() -> None:
    for count in (16, 9, MOST):
        step(count, count, True)


def lengths() -> None:
    """A number of tokens that changes in every step makes nothing anew."""
    step(4, 4, False)
    objects = titan._buffer._objects
    before = dict(objects._made), len(objects._worlds), objects.world.heap.live
    for count in range(5, 17):
        step(count, count, False)
    assert before == (objects._made, len(objects._worlds), objects.world.heap.live)


stand_ins.run({"training": training, "inference, expanded": lambda: step(16, MOST, False), "lengths": lengths})
