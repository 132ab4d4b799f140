"""Reinforcement learning with one FP8 from the optimizer's step to the sampled token: GRPO on sums of two numbers.

A small Llama learns from right sums until it gets most digits. Then GRPO (Shao et al. 2024, DeepSeekMath,
arXiv:2402.03300) takes over: it samples eight answers to each sum, and makes answers likelier that have more right
digits than the other seven. Three arms differ in the precision of the model that learns and of the one that samples:

    bf16        both in BF16, by transformers' own `generate`
    fp8         both in FP8: `octavo.convert` trains, `octavo.load` samples, and `octavo.rl.push` writes the bytes that
                the next step multiplies into the model that samples
    mismatch    BF16 learns and FP8 samples, as with most trainers and engines today

    python examples/grpo.py                        # all arms, three seeds: some 15 minutes on two cores
    python examples/grpo.py --arms fp8 --seeds 1
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from octavo.packing import pack
from octavo.rl import push

ARMS = ("bf16", "fp8", "mismatch")
PLUS, EQUALS, VOCABULARY = 10, 11, 16
PROMPT, ANSWER = 6, 3  # tokens: "12+34=" and "640", the sum's last digit first
ENOUGH = 0.7  # of the digits right before GRPO begins, where each is the likeliest
SUMS, GROUP = 32, 8  # of a step of GRPO: sums, and answers to each


def config() -> LlamaConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(
        **sizes, vocab_size=VOCABULARY, max_position_embeddings=32, tie_word_embeddings=False, pad_token_id=15
    )


def sums(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random sums: prompts, int64 [count, PROMPT], and their answers [count, ANSWER]."""
    a, b = torch.randint(0, 100, (2, count, 1), generator=generator)
    sign, tens = torch.ones_like(a), torch.tensor([10, 1])
    prompts = torch.cat([a // tens % 10, sign * PLUS, b // tens % 10, sign * EQUALS], 1)
    return prompts, (a + b) // torch.tensor([1, 10, 100]) % 10


class MasterWeights:
    """AdamW on float32 copies of a BF16 model's weights: steps smaller than BF16's spacing add up."""

    def __init__(self, model: torch.nn.Module, rate: float) -> None:
        self.weights = list(model.parameters())
        self.masters = [w.detach().float() for w in self.weights]
        self.adamw = torch.optim.AdamW(self.masters, rate, weight_decay=0.0)

    @torch.no_grad()
    def step(self) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adamw.step()
        for master, weight in zip(self.masters, self.weights, strict=True):
            weight.copy_(master)


def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    """Of every token at each place of the answers: float32 [B, ANSWER, VOCABULARY]."""
    logits: Tensor = model(ids).logits[:, PROMPT - 1 : -1]
    return torch.log_softmax(logits.float(), -1)


def learn_from_answers(model: Any, generator: torch.Generator) -> None:
    """Supervised steps until the model gets `ENOUGH` of the digits: the start of all arms."""
    optimizer, right = MasterWeights(model, 1e-3), 0.0
    while right < ENOUGH:
        prompts, answers = sums(128, generator)
        found = log_probabilities(model, torch.cat([prompts, answers], 1))
        loss: Any = F.nll_loss(found.flatten(0, 1), answers.flatten())
        loss.backward()
        optimizer.step()
        right = float((found.argmax(-1) == answers).float().mean())


def engine(model: Any, folder: Path) -> Any:
    """A model that generates from FP8 weights, in memory of its own."""
    model.save_pretrained(folder / "bf16")
    pack(folder / "bf16", folder / "fp8", scheme="channel")
    return octavo.load(folder / "fp8")


@dataclass
class Arm:
    """What an arm measured at each step: the share of right digits and of right sums, the Kullback-Leibler divergence
    of a token between the model that samples and the one that learns, tokens per second and seconds of a push."""

    reward: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    push_seconds: list[float] = field(default_factory=list)

    def last(self, name: str, steps: int = 20) -> float:
        values: list[float] = getattr(self, name)[-steps:]
        return sum(values) / max(1, len(values))


def run(arm: str, seed: int, steps: int, folder: Path) -> Arm:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model: Any = LlamaForCausalLM(config()).bfloat16()
    learn_from_answers(model, generator)
    sampler = model if arm == "bf16" else engine(model, folder)
    if arm == "fp8":
        octavo.convert(model, "rowwise_forward")
    optimizer, measured = MasterWeights(model, 2e-4), Arm()
    for step in range(1, steps + 1):
        begin = time.perf_counter()
        if sampler is not model:
            push(model, sampler)
            measured.push_seconds.append(time.perf_counter() - begin)
        prompts, answers = (each.repeat_interleave(GROUP, 0) for each in sums(SUMS, generator))
        begin = time.perf_counter()
        ids = sampler.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0,
            max_new_tokens=ANSWER, min_new_tokens=ANSWER,
        )  # fmt: skip
        measured.tokens_per_second.append(ids[:, PROMPT:].numel() / (time.perf_counter() - begin))
        right = ids[:, PROMPT:] == answers
        rewards = right.float().mean(1).view(SUMS, GROUP)
        better = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)

        found = log_probabilities(model, ids)
        chosen = found.gather(2, ids[:, PROMPT:, None]).squeeze(2)
        ratio = (chosen - chosen.detach()).exp()  # 1: each answer is used once, so nothing is clipped
        loss: Any = -(better.view(-1, 1) * ratio).mean()
        loss.backward()
        with torch.no_grad():  # of the weights that sampled, before they change
            sampled = log_probabilities(sampler, ids)
            measured.kl.append(float((sampled.exp() * (sampled - found)).sum(-1).mean()))
        optimizer.step()
        measured.reward.append(float(rewards.mean()))
        measured.right.append(float(right.all(1).float().mean()))
        if step % 50 == 0:
            print(
                f"{arm:8}  seed {seed}  step {step:4}  digits {measured.last('reward'):.3f}  "
                f"sums {measured.last('right'):.3f}  KL {measured.last('kl'):.1e}",
                flush=True,
            )
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="steps of GRPO")
    parser.add_argument("--out", type=Path, help="a JSON file for what each step measured")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more only wait for each other in a model this small
    found: dict[str, list[Arm]] = {}
    for seed in range(options.seeds):
        for arm in options.arms:
            with tempfile.TemporaryDirectory() as folder:
                measured = run(arm, seed, options.steps, Path(folder))
            found.setdefault(arm, []).append(measured)
    print("\narm        digits, each seed          KL of a token   tokens/s   seconds of a push")
    for arm, runs in found.items():
        rewards = "  ".join(f"{each.last('reward'):.3f}" for each in runs)
        kl, speed, seconds = (
            sum(each.last(name) for each in runs) / len(runs) for name in ("kl", "tokens_per_second", "push_seconds")
        )
        print(f"{arm:8}   {rewards:24}   {kl:13.1e}   {speed:8.0f}   {seconds:17.3f}")
    if options.out:
        options.out.write_text(json.dumps({arm: [vars(each) for each in runs] for arm, runs in found.items()}))


if __name__ == "__main__":
    main()
