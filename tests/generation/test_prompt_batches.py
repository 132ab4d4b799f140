"""Prompts of a batch: padding on the left, masks, and the prefix that they share."""

import pytest
import torch

from octavo.generation.prompts import first_tokens, pad_prompts, read_prompts, shared_prefix

CPU = torch.device("cpu")


def test_shorter_prompts_are_padded_on_the_left():
    prompts = pad_prompts([[5, 6, 7], [8], [9, 1]], CPU)
    assert prompts.ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 9, 1]]
    assert prompts.padding == (0, 2, 1)
    assert prompts.shortest == 1
    first = first_tokens(prompts)
    assert (first.dtype, first.tolist()) == (torch.int32, [0, 2, 1])


def test_a_mask_says_where_prompts_begin():
    ids = torch.arange(8).view(2, 4)
    assert read_prompts(ids, None, CPU).padding == (0, 0)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    assert read_prompts(ids, mask, CPU).padding == (0, 2)
    assert read_prompts(ids, mask.bool(), CPU).padding == (0, 2)


@pytest.mark.parametrize(
    "mask",
    [[[1, 1, 1, 1], [1, 1, 0, 0]], [[1, 1, 1, 1], [0, 1, 0, 1]], [[1, 1, 1, 1], [0, 0, 0, 0]], [[1, 1, 1, 1]]],
    ids=["right", "hole", "nothing", "shape"],
)
def test_other_masks_are_refused(mask):
    with pytest.raises(ValueError, match=r"padding on the left only, .* tokenizer.padding_side = 'left'"):
        read_prompts(torch.arange(8).view(2, 4), torch.tensor(mask), CPU)


@pytest.mark.parametrize(("prompts", "message"), [([], "got none"), ([[1], []], "prompt 2 of 2 is empty")])
def test_a_prompt_is_required(prompts, message):
    with pytest.raises(ValueError, match=message):
        pad_prompts(prompts, CPU)


def test_ids_of_length_zero_are_refused():
    with pytest.raises(ValueError, match="at least one token"):
        read_prompts(torch.empty(2, 0, dtype=torch.int64), None, CPU)


@pytest.mark.parametrize("mask", [None, torch.ones(0, 3)])
def test_no_prompts_are_refused(mask):
    with pytest.raises(ValueError, match=r"at least one prompt is required, got input_ids of shape \[0, 3\]"):
        read_prompts(torch.empty(0, 3, dtype=torch.int64), mask, CPU)


@pytest.mark.parametrize(
    ("prompts", "prefix"),
    [
        ([[1, 2, 3, 4], [1, 2, 9]], 2),
        ([[1, 2, 3], [1, 2, 3]], 2),  # each prompt needs a token of its own
        ([[1, 2, 3, 4, 5], [1, 2, 3]], 2),
        ([[1, 2], [3, 2]], 0),
        ([[4], [4]], 0),
        ([[0, 1, 2], [1, 2]], 0),  # padding is no token
    ],
)
def test_the_prefix_that_all_prompts_share(prompts, prefix):
    assert shared_prefix(pad_prompts(prompts, CPU)) == prefix
