"""How far the log-probabilities of an engine are from those of the model in training, and where that comes from.

    p[t,V]   one forward pass of the trained model           q[t,V]   the engine, which decodes token by token
    KL = mean over t of sum_v p (log p - log q)              in nats a token

Each source is measured alone, by runs that differ in nothing else. The order is that of a forward pass:

    weights       trained  |  trained with the numbers of the served weights
    attention     trained  |  trained with the attention of the served model
    head          trained  |  the served head on the trained model's hidden states
    activations   trained with the served weights  |  one pass of the served model, with trained attention and head
    sampling      one pass of the served model  |  decoding from its cache
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.comparison import layer_errors, with_parameters
from octavo.evaluation.metrics import divergences, log_probabilities
from octavo.hf.meta_model import is_language_model
from octavo.inference.engine import open_engine
from octavo.inference.packed_experts import PackedGroupedLinear
from octavo.inference.packed_linear import PackedLinear
from octavo.inference.session import Prompts, read_prompts
from octavo.nn.linear import RecipeLayer
from octavo.ops import quantize, quantize_matrices
from octavo.rl.pushing import Place, adapters_of, is_scale, places, recipe_of, transformers_model, whole
from octavo.util import Table
from octavo.watching.storage import Event


class DriftError(RuntimeError):
    """The engine is further from the model in training than was allowed."""


@dataclass(frozen=True)
class Parity:
    """The difference of the log-probabilities of a batch; printed, it is a table of its sources.

    Attributes:
        mean: of |log p - log q| of the tokens.
        kl: of p from q, in nats a token.
        worst: row and position of the token whose log-probability differs most, log p, and log q.
        tokens: how many were compared.
        sources: name, KL that it makes alone, and what differs.
        first: the first layer whose output differs in one forward pass; the first block, if its layers do not differ
            when they run one by one; "" if none does.
    """

    mean: float
    kl: float
    worst: tuple[int, int, float, float]
    tokens: int
    sources: tuple[tuple[str, float, str], ...]
    first: str

    def event(self, step: int, *, kl: float) -> Event | None:
        """The finding for `write_event` of a watch if the KL is above `kl` nats a token, or not a number."""
        message = f"the KL of training and sampling is {self.kl:.3g} nats a token, above {kl:.3g}"
        return None if self.kl <= kl else Event(step, "rollout_drift", None, None, self.kl, kl, message)

    def check(self, *, kl: float) -> None:
        """Raise a DriftError, with the table, where `event` finds something."""
        if (found := self.event(0, kl=kl)) is not None:
            raise DriftError(f"{found.message}\n{self}")

    def __repr__(self) -> str:
        rows = [(name, f"{alone:.2e}", detail) for name, alone, detail in self.sources]
        row, position, p, q = self.worst
        said = (
            f"KL {self.kl:.2e} nats a token, |log p - log q| {self.mean:.2e} over {self.tokens} tokens\n"
            f"worst: row {row}, position {position}, log p {p:.4f}, log q {q:.4f}\n"
            f"the first layer that differs: {self.first or 'none'}"
        )
        return f"{Table('sources', ('source', 'KL alone', 'what differs'), rows, ('KL alone',))}\n{said}"


@torch.no_grad()
def parity(trained: nn.Module, served: nn.Module, batch: Any) -> Parity:
    """Compare the log-probabilities of tokens: those of training, and those that the engine samples by.

    Both models run in the mode and the autocast that they are in, and stay as they are.

    Args:
        trained: of transformers, converted or not, not sharded.
        served: of `octavo.load`, of the same class.
        batch: token ids int64 [B, T]; or a mapping with `input_ids` and `attention_mask`, with padding on the left. A
            token is compared if all rows have one before it.

    Raises:
        ValueError: a model is sharded, or no causal language model; the weights do not fit; or no token is left to
            compare.

    Example:
        >>> octavo.rl.parity(model, served, batch).check(kl=0.01)
    """
    ids, mask = (batch["input_ids"], batch.get("attention_mask")) if hasattr(batch, "keys") else (batch, None)
    runs = _Runs(trained, served, read_prompts(ids, mask, ids.device), mask)
    if other := [type(model).__name__ for model in runs.models if not is_language_model(model)]:
        raise ValueError(f"parity takes two causal language models (Llama, Qwen, GPT-2, ...), got a {other[0]}")
    if any(hasattr(p, "full_tensor") for p in trained.parameters()):
        raise ValueError("parity takes a model that is not sharded: gather it on one device")
    if runs.start >= ids.shape[1]:
        raise ValueError(
            f"parity takes two tokens of each row at least, got {ids.shape[1]}, {runs.start - 1} of them padding: give "
            "longer texts"
        )
    (p, hidden), q = runs.forward(runs.models[0]), runs.decoded()
    log_p, log_q = (log_probabilities(logits, runs.targets) for logits in (p, q))
    difference = (log_p - log_q).abs()
    row, position = divmod(int(difference.argmax()), difference.shape[1])
    worst = row, position + runs.start, float(log_p[row, position]), float(log_q[row, position])
    first = ""
    for choose, said in ((with_parameters, ""), (_blocks, ", as a whole")):
        errors = layer_errors(*runs.models, lambda m: m(input_ids=ids, attention_mask=mask, use_cache=False), choose)
        first = first or next((name + said for name, error in errors if error.noise), "")
    sources = tuple(runs.sources(p, hidden, q))
    return Parity(float(difference.mean()), _kl(p, q), worst, difference.numel(), sources, first)


class _Runs:
    """The forward passes that are compared. Logits [B, n, V] are those that predict the `targets` [B, n]."""

    def __init__(self, trained: nn.Module, served: Any, prompts: Prompts, mask: Tensor | None) -> None:
        self.trained, self.served, self.prompts, self.mask = trained, served, prompts, mask
        self.models = transformers_model(trained, "parity"), transformers_model(served, "parity")
        self.start = max(prompts.padding) + 1
        self.targets = prompts.ids[:, self.start :]

    def forward(self, model: Any, attention: str = "") -> tuple[Tensor, Tensor]:
        """Logits and the input of the head, of one pass with an attention of transformers, by default the model's."""
        seen, before = list[Tensor](), model.config._attn_implementation
        hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            model.set_attn_implementation(attention or before)
            logits = model(input_ids=self.prompts.ids, attention_mask=self.mask, use_cache=False).logits
        finally:
            hook.remove()
            model.set_attn_implementation(before)
        return logits[:, self.start - 1 : -1], seen[0][:, self.start - 1 : -1]

    def decoded(self) -> Tensor:
        """The logits of the engine, which is given each token in place of the one that it would draw."""
        engine, ids, seen = getattr(self.served, "octavo_engine", None), self.prompts.ids, list[Tensor]()
        if engine is None:
            return self.forward(self.models[1])[0]

        def choose(text: Tensor, logits: Tensor) -> Tensor:
            seen.append(logits.clone())
            return ids[:, text.shape[1]]

        if not engine.asked:  # transformers' own cache serves what ours does not, as in `generate`
            other = open_engine(engine.model, context=engine.context, tokens=ids.shape[1])
            engine = other if other.own_cache else engine
        prompts = Prompts(ids[:, : self.start], self.prompts.padding)
        for _ in engine.run(prompts, self.targets.shape[1], choose, None, watched=False):
            pass
        return torch.stack(seen, 1)

    def sources(self, p: Tensor, hidden: Tensor, q: Tensor) -> Iterator[tuple[str, float, str]]:
        """Name, KL alone and what differs, of each source. `hidden` [B, n, K] is the input of the head that gave p."""
        trained, served = self.models
        ours, theirs = (model.config._attn_implementation for model in self.models)
        heads: list[Any] = [model.get_output_embeddings() for model in self.models]
        other, detail = _other_weights(self.trained, self.served, heads[1])
        with_weights = p
        if other:
            adapters: Any = getattr(self.trained, "disable_adapter", nullcontext)
            with adapters(), ExitStack() as undo:
                for parameter, numbers in other.items():  # in memory of their own
                    undo.callback(setattr, parameter, "data", parameter.data)
                    parameter.data = numbers
                with_weights = self.forward(trained)[0]
        yield "weights", _kl(p, with_weights), detail
        by_theirs = self.forward(trained, theirs)[0] if ours != theirs else p
        yield "attention", _kl(p, by_theirs), f"{ours} in training, {theirs} in the served model"
        kinds = [f"by {head.scheme.name}" if isinstance(head, PackedLinear) else "in high precision" for head in heads]
        kl = _kl(p, heads[1](hidden.to(served.dtype)))
        yield "head", kl, f"{kinds[0]} in training, {kinds[1]} in the served model"
        found = heads[0](self.forward(served, ours)[1].to(hidden.dtype))
        yield "activations", _kl(with_weights, found), "casts of inputs, and the order and dtypes of sums"
        yield "sampling", _kl(self.forward(served, theirs)[0], q), "a cache and one token a step, for one pass"


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name. Where the layers of one are watched, each runs by itself, and may not differ."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return {f"{name}.{i}": block for name, blocks in lists for i, block in blocks.named_children()}


def _kl(p: Tensor, q: Tensor) -> float:
    rows = [[row.double().log_softmax(-1) for row in pair] for pair in zip(p, q, strict=True)]
    return float(torch.stack([divergences(a, b).mean() for a, b in rows]).mean())


def _numbers(place: Place) -> Tensor:
    """The numbers of a weight as they are multiplied: those that its bytes stand for, or itself."""
    module = place.module
    if isinstance(module, PackedLinear) and place.tensor is module.weight:
        return module.packed_weight().dequantize()
    if isinstance(module, PackedGroupedLinear):
        return module.dequantize(torch.float32)
    recipe, w = recipe_of(place), whole(place, merged=True)
    cast = None if recipe is None or adapters_of(place.adapters) else recipe.repeatable_w
    if cast is None:
        return w.float()
    return (quantize if w.ndim == 2 else quantize_matrices)(w, cast).dequantize()


def _other_weights(trained: nn.Module, served: nn.Module, head: nn.Module) -> tuple[dict[nn.Parameter, Tensor], str]:
    """The numbers of served weights that are not those of training, by the trained parameters, and what to say. A
    packed head is a source of its own."""
    sources, other, worst, count = places(trained), dict[nn.Parameter, Tensor](), (0.0, ""), 0
    for name, held in places(served).items():
        if is_scale(name, held) or (held.module is head and isinstance(head, PackedLinear)):
            continue
        plain = name.removesuffix(".weight") if isinstance(held.module, PackedGroupedLinear) else name
        source = sources.get(plain)
        if source is None or source.tensor.shape != held.tensor.shape:
            raise ValueError(f"parity: the trained model has no {plain} of {list(held.tensor.shape)}: load its folder")
        ours, theirs = _numbers(source), _numbers(held).to(source.tensor.device)
        wrong = int((ours != theirs).sum())
        if isinstance(source.tensor, nn.Parameter) and (wrong or adapters_of(source.adapters)):
            dtype = torch.float32 if isinstance(source.module, RecipeLayer) else source.tensor.dtype
            other[source.tensor] = theirs.to(dtype)
        if wrong:
            size = float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-30))
            size = size if math.isfinite(size) else math.inf
            count, worst = count + 1, max(worst, (size, f"{plain}, {wrong} of {ours.numel()} numbers"))
    return other, f"{count} tensors differ, most {worst[1]}" if count else "none: the same numbers"
