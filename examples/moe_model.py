"""A small model like DeepSeek's, trained with tensor, expert and data parallelism; its losses are those on torch's collectives.

Two ranks share the heads of a batch's attention (tensor parallel): a rank has half of the rows between layers, and gathers
all of them inside of one. Experts are spread over all ranks (expert parallel), and each two ranks have a batch of their
own (data parallel). All communication is that of one object: `Ours` calls this package's operators, `Torch` those of
torch.distributed.

    GPUS=4 bash launch.sh examples/moe_model.py
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import tilescale_net as tsn
from tilescale_net import ops
from tilescale_net.kernels.moe import Tuning

VOCABULARY, HIDDEN, HEADS, LATENT, INNER, EXPERTS, TOP_K, LAYERS = 64, 64, 4, 32, 32, 8, 2, 2
TENSOR_PARALLEL, SEQUENCE, STEPS = 2, 32, 4  # tokens of a batch, which is one sequence
ROWS = SEQUENCE // TENSOR_PARALLEL  # of a rank


class Ours:
    """Communication by operators of this package."""

    def __init__(self, tp, dp) -> None:
        self.tp, self.dp, ranks = tp, dp, tsn.size()
        rows = 128 if tsn.device().type == "cuda" else 32  # of a tile of the experts' GEMMs
        capacity = EXPERTS // ranks * -(-ranks * ROWS // rows) * rows
        self.layer = ops.moe_layer(
            EXPERTS, ROWS, HIDDEN, TOP_K, torch.bfloat16, tile_rows=rows, alignment=rows, capacity=capacity,
            tuning=Tuning(once_per_node=False),  # tiles do not count rows that cross the network once per node
        )  # fmt: skip
        # The simulator has nothing to overlap, and fewer kernels to compile.
        self.fused = None if tsn.device().type == "cuda" else False

    def gathered(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.all_gather_matmul(x, w, self.tp, fused=self.fused)

    def scattered(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.matmul_reduce_scatter(x, w, self.tp, fused=self.fused)

    def experts(self, x, chosen, weights, up, down, shared) -> torch.Tensor:
        return ops.moe_experts(self.layer, x, chosen, weights, up, down, shared=shared, fused=self.fused)

    def total(self, x: torch.Tensor, group=None) -> torch.Tensor:
        return ops.all_reduce(x, group)


class Gather(torch.autograd.Function):
    """Rows of all ranks of a group, one after the other; gradients are summed."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group) -> torch.Tensor:
        ctx.group, ctx.rows = group, len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _own_rows(grad, ctx.group, ctx.rows), None


class Scatter(torch.autograd.Function):
    """This rank's rows of the sum over a group."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group) -> torch.Tensor:
        ctx.group = group
        return _own_rows(x, group, len(x) // dist.get_world_size(group))

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return Gather.apply(grad, ctx.group), None


def _own_rows(x: torch.Tensor, group, rows: int) -> torch.Tensor:
    total = x.float()  # a copy: x is of 16 bits
    dist.all_reduce(total, group=group)
    first = dist.get_rank(group) * rows
    return total[first : first + rows].to(x.dtype)


class Torch:
    """The same by torch.distributed. Each rank applies its experts to the tokens of all ranks."""

    def __init__(self, everyone, tp, dp) -> None:
        self.everyone, self.tp, self.dp = everyone, tp, dp

    def gathered(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return Gather.apply(x, self.tp) @ w

    def scattered(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return Scatter.apply(x @ w, self.tp)

    def experts(self, x, chosen, weights, up, down, shared) -> torch.Tensor:
        activation, world, first = ops.SwiGLU(), self.everyone, dist.get_rank() * len(up)
        every, taken = Gather.apply(x, world), Gather.apply(weights.bfloat16(), world).float()
        choices, out = Gather.apply(chosen, world), torch.zeros(every.shape, device=x.device)
        for e in range(len(up)):
            weight = (taken * (choices == first + e)).sum(1, keepdim=True)
            out = out + weight * (activation(every @ up[e]) @ down[e])
        return Scatter.apply(out.bfloat16(), world) + activation(x @ shared[0]) @ shared[1]

    def total(self, x: torch.Tensor, group=None) -> torch.Tensor:
        dist.all_reduce(x, group=group or self.everyone)
        return x


class Model(torch.nn.Module):
    """This rank's part. Parameters are float32; what is multiplied is bfloat16.

    Attributes:
        replicated, sharded: parameters that all ranks have, and those that the ranks with this rank's heads have.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        generator, rank, ranks = torch.Generator().manual_seed(1), dist.get_rank(), dist.get_world_size()
        self.replicated: list[torch.nn.Parameter] = []
        self.sharded: list[torch.nn.Parameter] = []

        def weight(*shape: int, kind: list | None = None, own=slice(None)) -> torch.nn.Parameter:
            """The part `own` of a weight; all ranks draw the whole."""
            whole = torch.randn(shape, generator=generator) / shape[-2] ** 0.5
            parameter = torch.nn.Parameter(whole[own].to(device, copy=True))
            if kind is not None:
                kind.append(parameter)
            return parameter

        def part(size: int, index: int, of: int) -> slice:
            return slice(index * size // of, (index + 1) * size // of)

        heads, everyone = part(HIDDEN, rank % TENSOR_PARALLEL, TENSOR_PARALLEL), self.replicated
        local, all_rows = part(EXPERTS, rank, ranks), slice(None)
        self.embedding = weight(VOCABULARY, HIDDEN, kind=everyone)
        self.layers = torch.nn.ModuleList()
        for _ in range(LAYERS):
            self.layers.append(torch.nn.ParameterDict(dict(
                query=weight(HIDDEN, HIDDEN, kind=self.sharded, own=(all_rows, heads)),
                latent=weight(HIDDEN, LATENT, kind=everyone),
                key=weight(LATENT, HIDDEN, kind=self.sharded, own=(all_rows, heads)),
                value=weight(LATENT, HIDDEN, kind=self.sharded, own=(all_rows, heads)),
                out=weight(HIDDEN, HIDDEN, kind=self.sharded, own=heads),
                router=weight(HIDDEN, EXPERTS, kind=everyone),
                up=weight(EXPERTS, HIDDEN, 2 * INNER, own=local),
                down=weight(EXPERTS, INNER, HIDDEN, own=local),
                shared_up=weight(HIDDEN, 2 * INNER, kind=everyone),
                shared_down=weight(INNER, HIDDEN, kind=everyone),
            )))  # fmt: skip

    def forward(self, tokens: torch.Tensor, by) -> torch.Tensor:
        """Logits of this rank's tokens."""
        x = self.embedding[tokens]
        for w in self.layers:
            x = x + self.attention(F.rms_norm(x, (HIDDEN,)), w, by)
            x = x + self.experts(F.rms_norm(x, (HIDDEN,)), w, by)
        return F.rms_norm(x, (HIDDEN,)) @ self.embedding.t()

    def attention(self, x: torch.Tensor, w, by) -> torch.Tensor:
        """Keys and values are projected from a latent vector, as in multi-head latent attention (arXiv:2405.04434)."""
        x = x.bfloat16()
        latent = F.rms_norm((x @ w["latent"].bfloat16()).float(), (LATENT,)).bfloat16()
        query = by.gathered(x, w["query"].bfloat16())
        key, value = by.gathered(latent, torch.cat((w["key"], w["value"]), 1).bfloat16()).chunk(2, 1)
        heads = HEADS // TENSOR_PARALLEL
        query, key, value = (t.view(1, SEQUENCE, heads, -1).transpose(1, 2).float() for t in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out = out.transpose(1, 2).reshape(SEQUENCE, -1).bfloat16()
        return by.scattered(out, w["out"].bfloat16()).float()

    def experts(self, x: torch.Tensor, w, by) -> torch.Tensor:
        """The best of sigmoid scores, which sum to 1, and an expert that every token goes to (arXiv:2412.19437)."""
        scores, chosen = torch.sigmoid(x @ w["router"]).topk(TOP_K)
        weights = scores / scores.sum(1, keepdim=True)
        names = ("up", "down", "shared_up", "shared_down")
        up, down, *shared = (w[name].bfloat16() for name in names)
        return by.experts(x.bfloat16(), chosen, weights, up, down, tuple(shared)).float()


def add_up(parameters: list[torch.nn.Parameter], by, group=None) -> None:
    """Gradients of parameters that several ranks have, as one message."""
    flat = by.total(torch.cat([p.grad.flatten() for p in parameters]), group)
    for p, total in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad.copy_(total.view(p.shape))


def train(by, device: torch.device) -> list[float]:
    """Losses of all tokens of all ranks."""
    model, ranks, losses = Model(device), dist.get_world_size(), []
    optimiser, batches = torch.optim.AdamW(model.parameters(), lr=1e-3), ranks // TENSOR_PARALLEL
    starts = torch.randint(VOCABULARY, (batches, 1), generator=torch.Generator().manual_seed(2))
    sequences = (starts + 3 * torch.arange(SEQUENCE + 1)) % VOCABULARY
    pair, index = divmod(dist.get_rank(), TENSOR_PARALLEL)
    mine = sequences[pair, index * ROWS : (index + 1) * ROWS + 1].to(device)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(mine[:-1], by), mine[1:], reduction="sum") / (batches * SEQUENCE)
        loss.backward()
        add_up(model.replicated, by)
        if batches > 1:
            add_up(model.sharded, by, by.dp)
        losses.append(float(by.total(loss.detach().view(1))))
        optimiser.step()
        optimiser.zero_grad()
    return losses


def main() -> None:
    world = tsn.init()
    device, ranks = tsn.device(), tsn.size()
    if ranks % TENSOR_PARALLEL or EXPERTS % ranks:
        raise SystemExit(f"{ranks} ranks: they must be a multiple of {TENSOR_PARALLEL} that divides {EXPERTS}")
    backend = "nccl" if world.device_kind == "cuda" else "gloo"
    everyone = list(range(ranks))
    rows = [everyone[r : r + TENSOR_PARALLEL] for r in everyone[::TENSOR_PARALLEL]]
    columns = [everyone[index::TENSOR_PARALLEL] for index in range(TENSOR_PARALLEL)]
    groups = [[dist.new_group(group, backend=backend) for group in kind] for kind in (rows, columns, [everyone])]
    tp, dp = groups[0][tsn.rank() // TENSOR_PARALLEL], groups[1][tsn.rank() % TENSOR_PARALLEL]
    for group in (tp, dp):
        if dist.get_world_size(group) < ranks:
            tsn.init(group=group)
    ours, theirs = train(Ours(tp, dp), device), train(Torch(groups[2][0], tp, dp), device)
    for step, (found, wanted) in enumerate(zip(ours, theirs)):
        assert abs(found - wanted) < 0.01 * wanted, f"step {step}: loss {found}, on torch {wanted}"
    assert ours[-1] < ours[0], ours
    text = " ".join(f"{loss:.4f}" for loss in ours)
    print(f"rank {tsn.rank()}: losses {text}, as on torch.distributed ({' '.join(f'{loss:.4f}' for loss in theirs)})")
    tsn.finalize()


if __name__ == "__main__":
    main()
