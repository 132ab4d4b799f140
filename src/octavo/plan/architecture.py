"""The layers of a model, as far as its memory and time depend on them.

An `Architecture` is a sequence of equal blocks between an embedding and a head. A block is an attention and linear
layers. Layers with the same `group` read the same input, and run as one GEMM where they are fused:

    qkv   the projections to queries, keys and values       o      the projection of the attention's output
    up    the layers before the activation                  down   the layer after it
    other layers, such as routers and low-rank projections, have groups of their own
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """Equal linear layers of K inputs and N outputs.

    Attributes:
        copies: how many the model has (experts).
        active: how many of them a token runs through. 0: the layer runs once a sequence, not once a token.
    """

    group: str
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    active: int = 1

    @property
    def weights(self) -> int:
        return self.copies * self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        return self.weights + (self.copies * self.outputs if self.bias else 0)


@dataclass(frozen=True)
class Attention:
    """The sizes of an attention: all heads of H query heads, and of the key and value heads that they share.

    Attributes:
        queries, keys, values: features of a token, over all heads.
        cached: features that a token leaves in the KV cache, where these are not its keys and values (DeepSeek's MLA).
    """

    heads: int
    queries: int
    keys: int
    values: int
    output: int
    causal: bool = True
    cached: int | None = None

    @property
    def cache_features(self) -> int:
        return self.keys + self.values if self.cached is None else self.cached


@dataclass(frozen=True)
class Block:
    """`count` equal blocks. `others` counts the parameters of norms and biases that are no linear layer."""

    count: int
    layers: tuple[Layer, ...]
    attention: Attention
    gated: bool
    others: int

    @property
    def weights(self) -> int:
        """Parameters of the linear layers' matrices in one block."""
        return sum(layer.weights for layer in self.layers)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers) + self.others

    def group(self, name: str) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.group == name)

    @property
    def groups(self) -> list[tuple[Layer, ...]]:
        """The layers that read the same input, in order. Experts are apart from a shared MLP."""
        kinds = dict.fromkeys((layer.group, layer.copies) for layer in self.layers)
        return [tuple(each for each in self.layers if (each.group, each.copies) == kind) for kind in kinds]

    @property
    def has_experts(self) -> bool:
        return any(layer.copies > 1 for layer in self.layers)

    @property
    def activated(self) -> int:
        """Features that the activation reads for a token: gate and up both."""
        return sum(layer.outputs * layer.active for layer in self.group("up"))

    @property
    def hidden(self) -> int:
        """Features inside the MLP that a token activates: the inputs of the layer after the activation."""
        return sum(layer.inputs * layer.active for layer in self.group("down"))


@dataclass(frozen=True)
class Architecture:
    """A model.

    Attributes:
        kind: the model_type of its config.json.
        width: features of the residual stream.
        context: tokens of a sequence: the longest for a language model, the only length for an image model.
        vocabulary: rows of the embedding and of the head; 0 for a model without logits over a vocabulary.
        head: parameters of the output layer that are not shared with the embedding.
        embeddings: parameters of all embeddings.
        others: parameters outside the blocks that are neither.
        fused: whether Octavo quantizes inside its norms and activations (`rowwise`).
    """

    name: str
    kind: str
    width: int
    context: int
    vocabulary: int
    blocks: tuple[Block, ...]
    head: int
    embeddings: int
    others: int
    tied: bool = False
    layer_norm: bool = False
    fused: bool = False

    @property
    def rotary(self) -> bool:
        """Whether positions turn the queries and keys; models with LayerNorm add them to the embedding."""
        return not self.layer_norm

    @property
    def has_experts(self) -> bool:
        return any(block.has_experts for block in self.blocks)

    @property
    def parameters(self) -> int:
        return self.block_parameters + self.outside

    @property
    def block_parameters(self) -> int:
        return sum(block.count * block.parameters for block in self.blocks)

    @property
    def outside(self) -> int:
        """Parameters outside the blocks."""
        return self.head + self.embeddings + self.others

    @property
    def block_weights(self) -> int:
        """Elements of the blocks' matrices: what a recipe quantizes."""
        return sum(block.count * block.weights for block in self.blocks)

    @property
    def depth(self) -> int:
        return sum(block.count for block in self.blocks)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token is multiplied with: of experts those that it runs through, and the head."""
        inside = sum(
            block.count * layer.inputs * layer.outputs * layer.active for block in self.blocks for layer in block.layers
        )
        return inside + self.width * self.vocabulary
