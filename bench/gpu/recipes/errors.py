"""The SQNR of y, dx and dw of each recipe, on the operands of a trained model.

A Llama is trained in BF16, as in `bench.gpu.recipes.losses`. Two passes on further batches give the x, w and dy of each
linear layer. Each layer then runs alone with each recipe, on the first pass and on the second: delayed scaling takes
its scales from the first, and the second is measured, against the same products in float64.
"""

import copy
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from bench.gpu.gpt_trainer import Data, restart, trainer_of
from bench.gpu.recipes.variants import BASE, CONTROL, recipe_of
from bench.gpu.timing import decibels
from octavo.train.config import Config
from octavo.train.evaluation import next_token_loss
from octavo.train.loop import Trainer

Pass = dict[str, tuple[Tensor, Tensor]]  # the x [T, K] and the dy [T, N] of each layer


def measure(names: Sequence[str], config: Config, data: Data) -> dict[str, Any]:
    """For each recipe and each of y, dx and dw: the SQNR of the median layer and of the worst, in dB."""
    trainer, _ = trainer_of(BASE, config.change(compile=False), data)
    restart(trainer, data, 0)
    for _ in range(config.steps):
        trainer.step()
    layers = linears(trainer.model)
    passes = [operands(trainer, layers, config.steps + i) for i in range(2)]
    found = {}
    for name in names:
        if name == CONTROL:
            continue
        rows = {layer: sqnrs(linear, [each[layer] for each in passes], name) for layer, linear in layers.items()}
        found[name] = {gemm: summary({layer: row[gemm] for layer, row in rows.items()}) for gemm in ("y", "dx", "dw")}
        print(name, {gemm: f"{found[name][gemm]['median']:.1f} dB" for gemm in found[name]}, flush=True)
    return {"steps": config.steps, "layers": len(layers), "tokens": config.batch * config.context, "recipes": found}


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers but the head."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}


def operands(trainer: Trainer, layers: dict[str, nn.Linear], batch: int) -> Pass:
    """x and dy of each layer in a forward and backward pass on a training batch."""
    inputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            inputs[name] = args[0].detach().flatten(0, -2)
            y.register_hook(lambda dy: gradients.__setitem__(name, dy.flatten(0, -2)))  # type: ignore[no-untyped-call]

        return keep

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    trainer.model.train()
    loss = next_token_loss(
        trainer.model, trainer.data.training.at(batch), trainer.state.device, trainer.config.precision
    )
    torch.autograd.backward(loss)
    trainer.model.zero_grad()
    for handle in handles:
        handle.remove()
    return {name: (inputs[name], gradients[name]) for name in layers}


def sqnrs(linear: nn.Linear, passes: Sequence[tuple[Tensor, Tensor]], name: str) -> dict[str, float]:
    """The SQNR of y, dx and dw of a layer with a recipe, in dB, on the last of the passes."""
    layer = nn.Linear(linear.in_features, linear.out_features, bias=False, device=linear.weight.device)
    layer.weight = nn.Parameter(linear.weight.detach().clone())
    model = nn.Sequential(layer)
    octavo.convert(model, recipe_of(name))
    found: dict[str, Tensor] = {}
    for x, dy in passes:
        x_leaf = copy.copy(x).requires_grad_()
        layer.weight.grad = None
        with torch.autocast(x.device.type, torch.bfloat16):
            y = model(x_leaf)
        y.backward(dy)
        octavo.update_scales(model)
        assert x_leaf.grad is not None
        assert layer.weight.grad is not None
        found = {"y": y.detach(), "dx": x_leaf.grad, "dw": layer.weight.grad}
    x64, dy64, w64 = (t.double() for t in (*passes[-1], layer.weight.detach()))
    exact = {"y": x64 @ w64.t(), "dx": dy64 @ w64, "dw": dy64.t() @ x64}
    return {gemm: decibels(exact[gemm], found[gemm]) for gemm in exact}


def summary(by_layer: dict[str, float]) -> dict[str, Any]:
    worst = min(by_layer, key=by_layer.__getitem__)
    return {"median": statistics.median(by_layer.values()), "worst": by_layer[worst], "worst_layer": worst}
