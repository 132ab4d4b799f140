"""The time of a training step under FSDP2 on many GPUs, from the time that its blocks take on a few.

FSDP2 gathers the weights of block i + 1 while block i computes, forward and backward, and reduces the gradients of a
block while the next one computes. So with a gather of g seconds, a reduction of s, and blocks of f and b = 2 f seconds

    forward  = g + (L - 1) max(f, g) + f
    backward = g + (L - 1) max(b, g + s) + b + s
    step     = forward + backward + root + rest + optimizer / shards

The root (embedding and head) is gathered before the first block and reduced after the last: nothing hides it. `rest` is
the head's computation, which no mode speeds up. Copies in and out of the buffers of FSDP2 count as computation, and
NCCL's use of multiprocessors is left out.

Where not the link is slow but each collective alone, as with few channels of NCCL, a gather and a reduction run side by
side: max(g, s) takes the place of g + s.

A collective of B bytes over n GPUs takes B (n - 1) / (n rate) + latency seconds, as NCCL's ring does. The latencies of
a hop are those of NCCL's own model (src/graph/tuning.cc, ring, simple protocol). In a hierarchy (HSDP) n GPUs share the
weights. Their gradients are also summed over all groups of n: an all-reduce of B / n bytes by trees, in which each GPU
uses its own network card.
"""

import math
from dataclasses import dataclass, replace

NODE = 8  # GPUs of a node
HOP, NETWORK_HOP = 3.4e-6, 14e-6  # seconds, in a node and between nodes
NVLINK = 450e9  # bytes a second and direction of an H200 (NVIDIA's data sheet)


@dataclass(frozen=True)
class Links:
    """Bytes a second that a ring brings each GPU: inside a node, and where it crosses nodes.

    `shared`: whether a gather and a reduction that run at the same time divide the rate. Otherwise each has all of it.
    """

    node: float
    network: float = math.inf
    shared: bool = True

    def gather(self, size: float, world: int) -> float:
        """Seconds of an all-gather to `size` bytes, or of a reduce-scatter from them."""
        nodes = -(-world // NODE)
        rate = self.node if nodes == 1 else min(self.node, self.network)
        latency = (nodes - 1) * NETWORK_HOP + (world - nodes) * HOP
        return size * (world - 1) / world / rate + latency

    def reduce(self, size: float, groups: int) -> float:
        """Seconds of an all-reduce of `size` bytes a GPU over so many groups, each GPU on its own network card."""
        rate = self.network / NODE
        return 2 * size * (groups - 1) / groups / rate + 2 * math.ceil(math.log2(groups)) * NETWORK_HOP


@dataclass(frozen=True)
class Training:
    """One mode's step: seconds of its parts on one GPU, and the bytes of its collectives.

    Attributes:
        layers: the number of blocks.
        block: seconds of one block, forward and backward.
        rest: seconds of the head and the loss.
        optimizer: seconds of the optimizer for all parameters.
        gathered, reduced: bytes of a block's weights and of its gradients.
        root_gathered, root_reduced: those of embedding and head.
        gradient: bytes of one gradient among these; groups of GPUs sum theirs in FP32.
    """

    layers: int
    block: float
    rest: float
    optimizer: float
    gathered: float
    reduced: float
    root_gathered: float
    root_reduced: float
    gradient: float = 4.0

    def step(self, links: Links, world: int, shards: int | None = None) -> float:
        """Seconds of a step on `world` GPUs, of which each `shards` (all, if None) share the weights."""
        shards = shards or world
        groups = world // shards

        def reduction(size: float) -> float:
            across = links.reduce(size * 4 / self.gradient / shards, groups) if groups > 1 else 0.0
            return links.gather(size, shards) + across

        g, s = links.gather(self.gathered, shards), reduction(self.reduced)
        f, b = self.block / 3, self.block * 2 / 3
        forward = g + (self.layers - 1) * max(f, g) + f
        both = g + s if links.shared else max(g, s)
        backward = g + (self.layers - 1) * max(b, both) + b + s
        root = links.gather(self.root_gathered, shards) + reduction(self.root_reduced)
        return forward + backward + root + self.rest + self.optimizer / shards

    def sending(self, gradient: float) -> "Training":
        """The same step with so many bytes a gradient in its reductions."""
        share = gradient / self.gradient
        return replace(self, reduced=self.reduced * share, root_reduced=self.root_reduced * share, gradient=gradient)

    def hidden(self, links: Links, shards: int) -> float:
        """Seconds of the collectives that can run beside the computation: those of all blocks but one."""
        return (self.layers - 1) * (2 * links.gather(self.gathered, shards) + links.gather(self.reduced, shards))
