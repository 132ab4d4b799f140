"""Tensor parallelism on two GPUs and NCCL: the kernels, Inductor's code, and GEMMs that overlap with exchanges."""

import pytest
import torch
import torch.distributed as dist
from metrics import distance
from ranks import run_ranks, use_gpus
from saved_checkpoints import whole
from tensor_parallel_examples import distance_of_all
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo.distributed import ColumnParallel, RowParallel, tensor_parallel
from octavo.distributed.ranks import Ranks, Shards, quantize_shards
from octavo.models import Llama, LlamaConfig
from octavo.ops import quantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

CONFIG = LlamaConfig(vocabulary=512, layers=1, width=256, heads=4, kv_heads=2, mlp_width=512, context=256)


def layers(rank):
    """Whether bytes, scales and the output of a column-parallel layer are equal, and how far other results are."""
    use_gpus(rank)
    mesh, made = init_device_mesh("cuda", (2,)), []
    for _ in range(3):
        torch.manual_seed(0)
        made.append(nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).cuda().bfloat16())
        octavo.convert(made[-1])
    one, *cut = made
    for model, asynchronous in zip(cut, (False, True), strict=True):
        styles = {"sequence": True, "asynchronous": asynchronous}
        parallelize_module(model, mesh, {"0": ColumnParallel(**styles), "2": RowParallel(**styles)})
    w = torch.randn(256, 512, device="cuda").bfloat16()
    dist.broadcast(w, 0)
    w[7] = 0
    cast = octavo.recipe.ROW_W
    parts = w.chunk(2)[rank], w.chunk(2, dim=1)[rank].contiguous()
    shards = [Shards([p], cast, cut_rows=i == 1) for i, p in enumerate(parts)]
    column, row = quantize_shards(shards, Ranks.of(mesh, sequence=True))
    q = quantize(w, cast)
    expected = [(q.data.chunk(2)[rank], q.scale.chunk(2)[rank]), (q.data.chunk(2, dim=1)[rank], q.scale)]
    equal = [
        torch.equal(found.data.view(torch.uint8), data.contiguous().view(torch.uint8))
        and torch.equal(found.scale, scale)
        for found, (data, scale) in zip((column, row), expected, strict=True)
    ]
    x = torch.randn(2, 256, 512, device="cuda").bfloat16()
    dist.broadcast(x, 0)
    x.requires_grad_()
    y = one(x)
    y.square().sum().backward()
    found = []
    for model in cut:
        own = x.detach().chunk(2, dim=1)[rank].clone().requires_grad_()
        equal.append(torch.equal(model[0](own), one[0](x).chunk(2, dim=2)[rank]))
        y_own = model(own)
        y_own.square().sum().backward()
        pairs = [(y_own, y.chunk(2, dim=1)[rank]), (own.grad, x.grad.chunk(2, dim=1)[rank])]
        pairs += [(whole(p.grad), one.get_parameter(name).grad) for name, p in model.named_parameters()]
        found.append([distance(a.float(), b.float()) for a, b in pairs])
    return equal, found


def test_layers_of_two_gpus():
    for equal, found in run_ranks(2, layers):
        assert equal[:3] == [True, True, True]  # asynchronous GEMMs have other shapes, and may add in another order
        # y is a sum of two BF16 numbers, off by some 2^-8. E4M3's steps are 2^-4 apart: a number that crosses one makes
        # that sqrt(2^-8 * 2^-4) = 2^-6 in the bytes of dy, and sqrt(2^-6 * 2^-4) = 2^-5 in those of the layer before.
        assert max(map(max, found)) < 0.04, found


def train(model: Llama, tokens: Tensor) -> dict[str, Tensor]:
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(tokens)
        logits.float().square().mean().backward()
    return {"logits": whole(logits).float(), **{name: whole(p.grad) for name, p in model.named_parameters()}}


def models(rank):
    """The differences of a compiled and of an asynchronous model from an eager one, and of that from one GPU."""
    use_gpus(rank)
    mesh, results = init_device_mesh("cuda", (2,)), []
    tokens = torch.arange(512, device="cuda").view(2, 256)
    for cut, compiled, asynchronous in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)):
        torch.manual_seed(0)
        model = Llama(CONFIG).cuda()
        octavo.convert(model)
        if cut:
            tensor_parallel(model, mesh, asynchronous=bool(asynchronous))
        if compiled:
            for layer in model.model.layers:
                layer.compile(fullgraph=True, dynamic=False)
        results.append(train(model, tokens))
    one, eager, *others = results
    return distance_of_all(eager, one), *(distance_of_all(other, eager) for other in others)


def test_a_model_of_two_gpus():
    here, there = run_ranks(2, models)
    assert here == there
    assert max(here) < 0.02, here
