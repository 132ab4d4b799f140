"""Layers of two ranks with a recipe that rotates: each rank rotates its own part, which cancels as the whole does."""

from dataclasses import replace

import torch
from metrics import sqnr
from ranks import run_ranks
from tensor_parallel_examples import mesh_of, two_layers, whole
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo.dist import ColumnParallel, RowParallel
from octavo.recipe import GEMMS, rowwise


def train(rank):
    """The SQNR of y, dx and the gradients in dB against the layers in float32: of one rank, and of two."""
    plain, one, two = two_layers(), two_layers(), two_layers()
    for model in (one, two):
        octavo.convert(model, replace(rowwise(), name="rotated", rotate=GEMMS))
    parallelize_module(two, mesh_of(2), {"0": ColumnParallel(), "2": RowParallel()})
    x, dy = (torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    found = []
    for model in (plain, one, two):
        x_own, dy_own = (t.chunk(2, dim=1)[rank] if model is two else t for t in (x, dy))
        x_own = x_own.clone().requires_grad_()
        y = model(x_own)
        y.backward(dy_own)
        by_rows = [t if model is two else t.chunk(2, dim=1)[rank] for t in (y.detach(), x_own.grad)]
        found.append([*by_rows, *(whole(p.grad) for p in model.parameters())])
    return [[sqnr(exact, actual) for exact, actual in zip(found[0], each, strict=True)] for each in found[1:]]


def test_rotated_layers_of_two_ranks():
    for one, two in run_ranks(2, train):
        assert all(b > min(a, 100) - 1 for a, b in zip(one, two, strict=True)), (one, two)
