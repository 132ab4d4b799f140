"""A mixture of experts: a Llama in which each token runs through `top_k` of the MLPs of a block.

    p = softmax(gate(x));  the top_k largest p are the token's experts, p normalized over them their weights
    mlp(x) = sum over these e of weight[e] * expert_e(x) + sigmoid(shared_expert_gate(x)) * shared_expert(x)

Source: Mixtral (arXiv:2401.04088), and with a shared expert Qwen2-MoE (arXiv:2407.10671). Names and mathematics are
those of `MixtralForCausalLM` and `Qwen2MoeForCausalLM` in transformers, so a state_dict travels both ways unchanged.

Without a penalty a router may send all tokens to few experts. So each block adds E * sum over e of f[e] * mean(p[e])
to the loss, where f[e] is the share of the slots that expert e gets. It is 1 if both are even (Switch Transformer,
arXiv:2101.03961, section 2.2).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.llama import Block, Llama, LlamaConfig
from octavo.nn import Experts, SwiGLU
from octavo.nn.linear_function import shaped


@dataclass(frozen=True)
class MixtureConfig(LlamaConfig):
    """Sizes of a mixture; `mlp_width` is that of one expert. Raises a ValueError if they do not fit together.

    Args:
        experts: in each block.
        top_k: the experts that a token runs through.
        shared_width: of the MLP that every token runs through; 0 for none.
        balance: the factor of the loss that spreads tokens over experts.
    """

    experts: int = 8
    top_k: int = 2
    shared_width: int = 0
    balance: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"top_k must be at least 1 and at most the number of experts, got top_k={self.top_k} of "
                f"{self.experts} experts"
            )
        if self.shared_width < 0 or self.balance < 0:
            raise ValueError(f"shared_width and balance must be 0 or more, got {self.shared_width} and {self.balance}")

    def to_hf(self) -> dict[str, Any]:
        common = {
            "num_experts_per_tok": self.top_k,
            "router_aux_loss_coef": self.balance,
            "output_router_logits": False,
            "sliding_window": None,
        }
        if not self.shared_width:
            names = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
            return super().to_hf() | names | common | {"num_local_experts": self.experts, "router_jitter_noise": 0.0}
        names = {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
        sizes = {
            "num_experts": self.experts,
            "moe_intermediate_size": self.mlp_width,
            "shared_expert_intermediate_size": self.shared_width,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        return super().to_hf() | names | common | sizes


class MixtureMLP(nn.Module):
    """The MLP of a block: a router, its experts, and the shared expert if there is one."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.top_k, self.factor = config.top_k, config.balance
        self.balance: Tensor | None = None  # of a forward pass in training, until its block takes it
        self.gate = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config.experts, config.width, config.mlp_width)
        self.shared_expert = SwiGLU(config.width, config.shared_width) if config.shared_width else None
        self.shared_expert_gate = nn.Linear(config.width, 1, bias=False) if config.shared_width else None

    def forward(self, x: Tensor, norm: nn.Module, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The output for norm(x + residual), and x + residual, each [B, T, width]; as `SwiGLU` with a norm."""
        total = x + residual
        n = norm(total)
        tokens = n.flatten(0, 1)
        p = F.softmax(self.gate(tokens).float(), -1)  # [B * T, E]
        weight, index = torch.topk(p, self.top_k, -1)
        y = shaped(self.experts(tokens, index, weight / weight.sum(-1, keepdim=True)), n.shape)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            y = y + torch.sigmoid(self.shared_expert_gate(n)) * self.shared_expert(n)
        self.balance = None
        if self.training and self.factor:
            experts, slots = p.shape[1], index.numel()
            counts = torch.zeros(experts, device=p.device).scatter_add_(0, index.flatten(), p.new_ones(slots))
            self.balance = self.factor * experts * (counts / slots) @ p.mean(0)
        return y, total


class MixtureBlock(Block):
    """A block of a Llama with a mixture in place of the MLP. It also returns its balance loss."""

    def make_mlp(self, config: Any) -> Any:
        return MixtureMLP(config)

    def forward(self, *args: Any) -> Any:
        x, delta = super().forward(*args)
        balance, self.mlp.balance = self.mlp.balance, None  # compiled code must not find a tensor of an earlier pass
        return x, delta, balance


class Mixture(Llama):
    """The language model, see `Decoder.forward`."""

    block = MixtureBlock
    config: MixtureConfig

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        self.balances: list[Tensor] = []  # of the blocks, from a forward pass in training until `take_balance`

    def run_block(self, block: nn.Module, *args: Any) -> tuple[Tensor, Tensor]:
        x, delta, balance = super().run_block(block, *args)
        if balance is not None:
            self.balances.append(balance)
        return x, delta

    def take_balance(self) -> Tensor | None:
        """The mean of the blocks' balance losses since the last call, 0-dim; None in evaluation."""
        found, self.balances = self.balances, []
        return torch.stack(found).mean() if found else None
