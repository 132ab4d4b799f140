"""The class of a module that `fully_shard` has changed, before or after a conversion."""

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

from octavo.nn.mixed_class import mix_classes
from octavo.nn.module_class import class_name, is_fsdp_module, is_of_library
from octavo.train.processes import group_of_one


class Block(nn.Sequential):
    __module__ = "timm.models.vision_transformer"


class Ours(nn.Module):
    pass


def shard(module):
    fully_shard(module)


def convert(module):
    module.__class__ = mix_classes(Ours, type(module))


@pytest.mark.parametrize(
    "changes",
    [[], [shard], [convert], [convert, shard], [shard, convert]],
    ids=lambda c: "-".join(f.__name__ for f in c),
)
def test_the_own_class_of_a_block(changes):
    block = Block(nn.Linear(4, 4))
    with group_of_one():
        for change in changes:
            change(block)
    assert class_name(block) == "Block"
    assert is_of_library(block, "timm", "Block")
    assert not is_of_library(block, "tim", "Block")
    assert is_fsdp_module(block) == (shard in changes)
