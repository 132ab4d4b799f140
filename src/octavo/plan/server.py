"""A model as it is served: its packing scheme, its GPUs, and the texts that are generated at once."""

from dataclasses import dataclass
from functools import cached_property

from octavo.artifact.packed.scheme import CHANNEL, INT8, Scheme
from octavo.generation.prompt_attention import ATTENTIONS
from octavo.kv_cache.fp8_prompts import SHORTEST
from octavo.plan.architecture import Architecture, Layer
from octavo.plan.attention import fp8_limit
from octavo.plan.hardware import Gpu
from octavo.plan.schemes import BF16, SchemeSpeeds, find_speeds, refusal

CACHE_BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Server:
    """A model as it is served.

    Attributes:
        scheme: of the packed linear layers of the blocks; None for a model in BF16.
        gpus: that share each layer (tensor parallel).
        batch: sequences that are generated at once.
        context: tokens of each, prompt and new ones.
        cache: dtype of keys and values, bf16 or fp8.
        attention: of prompts, bf16 or fp8.
    """

    model: Architecture
    scheme: Scheme | None
    gpu: Gpu
    gpus: int
    batch: int
    context: int
    cache: str
    attention: str

    @cached_property
    def speeds(self) -> SchemeSpeeds:
        return find_speeds(self.scheme, self.gpu)

    @cached_property
    def expert_speeds(self) -> SchemeSpeeds | None:
        """Of the experts, if the model has any: all have one shape, or its transpose."""
        layers = (layer for block in self.model.blocks for layer in block.layers if layer.copies > 1)
        experts = next(layers, None)
        return None if experts is None else find_speeds(self.scheme, self.gpu, experts)

    def speed(self, layer: Layer, tokens: int) -> float:
        """The speed of a layer as a multiple of that in BF16, for so many tokens, routed ones counted once."""
        if layer.group == "router":
            return 1.0
        return (self.speeds if layer.copies == 1 or self.expert_speeds is None else self.expert_speeds).at(tokens)

    @property
    def unmeasured(self) -> list[str]:
        """The parts of the speeds that were not measured for this scheme."""
        tokens = {"prompts": self.prompt_tokens, "new tokens": self.batch}
        found = [name for name, count in tokens.items() if not self.speeds.is_measured(count)]
        experts = self.expert_speeds is not None and not all(map(self.expert_speeds.is_measured, tokens.values()))
        return [*found, "experts"] if experts else found

    @property
    def is_cast_fused(self) -> bool:
        """Whether norms and activations write the inputs of GEMMs in eight bits."""
        return self.scheme in (CHANNEL, INT8) and self.speeds.gemm not in ("weight-only", "dequantized")

    @property
    def scheme_name(self) -> str:
        return BF16 if self.scheme is None else self.scheme.name

    @property
    def attention_limit(self) -> str:
        """Why prompts do not attend in FP8, if they are to; "" if they do."""
        if self.context < SHORTEST:
            return f"prompts of {self.context:,} tokens are shorter than {SHORTEST:,}"
        return fp8_limit(self.model, self.gpu)

    @property
    def is_fp8_attention(self) -> bool:
        return self.attention == "fp8" and not self.attention_limit

    @property
    def prompt_tokens(self) -> int:
        return self.batch * self.context

    @property
    def cache_bytes(self) -> float:
        """Bytes of the keys and values of one token on one GPU."""
        return cache_bytes(self.model, self.cache) / self.gpus


def cache_bytes(model: Architecture, cache: str) -> float:
    """Bytes of the keys and values of one token."""
    return sum(block.count * block.attention.cache_features for block in model.blocks) * float(CACHE_BYTES[cache])


def check_server(server: Server) -> None:
    """Raise a ValueError for what cannot be served: see `octavo.plan.serving.plan_serving`."""
    model, gpus, batch, context = server.model, server.gpus, server.batch, server.context
    if not model.vocabulary:
        raise ValueError(f"--serve is for language models, and {model.name} has no vocabulary: leave it out")
    for option, value, known in (("kv-cache", server.cache, CACHE_BYTES), ("attention", server.attention, ATTENTIONS)):
        if value not in known:
            raise ValueError(f"--{option} must be one of {', '.join(known)}; got {value!r}")
    if min(gpus, batch, context) < 1:
        raise ValueError(f"--gpus, --batch and --context must be at least 1; got {gpus}, {batch} and {context}")
    if context > model.context:
        raise ValueError(f"--context must be at most the {model.context} tokens of {model.name}; got {context}")
    heads = model.blocks[0].attention.heads
    if heads % gpus:
        raise ValueError(f"--gpus must divide the {heads} heads of {model.name}; got {gpus}")
    if reason := refusal(model, server.scheme, server.gpu):
        raise ValueError(reason)
