"""The gain of gathering in FP8 as the network gets slower: whole training steps over links of several bandwidths.

The links are those between the GPUs of one host. A group of NCCL that may use few channels is slower; over sockets it
is slower still. Each bandwidth is measured by an all-gather of 256 MB. All modes stay in memory and take turns; the
collectives of FSDP2 move to the group of the moment.

    torchrun --nproc-per-node 2 -m bench.gpu.network [--layers 8] [--channels 1,2,4,8,16]
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo \
        torchrun --nproc-per-node 2 -m bench.gpu.network --channels 1,2,4
"""

import os
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from bench import record
from bench.gpu import llama
from bench.gpu.fsdp import MODES, Runner
from bench.gpu.harness import DEVICE, interleaved, medians, parser_of, sized
from bench.gpu.modes import BASE, OURS, TORCHAO, WIDE
from bench.gpu.ranks import Network, bandwidth, say, setting_of, slowest, start, write
from octavo.models.llama import LlamaConfig

TRANSPORT = "socket" if os.environ.get("NCCL_NET") == "Socket" else "direct"


def main() -> None:
    parser = parser_of(__doc__, layers=8, rounds=4)
    parser.add_argument("--channels", default=sized("1,2,4,8,16", "1,2"), help="that NCCL may use, a link each")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    start()
    modes = [BASE, WIDE, OURS, *([TORCHAO] if record.installed("torchao") else [])]
    config = replace(llama.CONFIG, layers=sized(options.layers, 2))
    run(modes, config, llama.TOKENS, [int(each) for each in options.channels.split(",")], options.rounds)
    distributed.destroy_process_group()


def run(modes: list[str], config: LlamaConfig, tokens: int, channels: list[int], rounds: int) -> None:
    """Time `modes` over a link of each number of channels, the fastest first, and write the result after each."""
    network = Network()
    runners = {name: Runner(name, config, tokens, network) for name in modes}
    for runner in runners.values():
        runner.step()  # compiles
    setting: dict[str, Any] = {**setting_of(config, tokens), "transport": TRANSPORT}
    setting["bf16_gradients"] = [name for name in modes if MODES[name].communicate is not None]
    setting |= {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    links: list[dict[str, Any]] = []
    for count in sorted(channels, reverse=True):
        links.append(link(count, runners, network, rounds))
        write(f"gpu_network_{TRANSPORT}", {"setting": setting, "links": links})


def link(channels: int, runners: dict[str, Runner], network: Network, rounds: int) -> dict[str, Any]:
    """The bandwidth of a group with so many channels, and the times of the modes on it."""
    network.group = group(channels)
    rate = bandwidth(network.group)
    steps = {name: runner.step for name, runner in runners.items()}
    times = {name: slowest(each) for name, each in interleaved(steps, rounds=rounds, repeat=2, warmup=1).items()}
    say(f"{channels} channels, {rate / 1e9:.2f} GB/s:", medians(times))
    return {"channels": channels, "bytes_per_second": rate, "rounds": times}


def group(channels: int) -> distributed.ProcessGroup:
    """A group of all ranks whose NCCL uses at most so many channels."""
    if DEVICE == "cpu":
        return distributed.new_group()  # type: ignore[no-any-return]
    options = distributed.ProcessGroupNCCL.Options()
    options.config.max_ctas = channels
    return distributed.new_group(pg_options=options)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
