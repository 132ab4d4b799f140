"""The order of the loop: a step is queued before the tokens that it starts from are read."""

import torch

from octavo.generation.loop import Stop, decode

PROMPTS = torch.tensor([[4], [0]])
LOGITS = torch.eye(5)[:2]  # two sequences, whose most likely tokens are 0 and 1


def run(room, stop=None, watched=True, steps=None):
    """Each sequence counts on from its last token, modulo 5."""
    calls = [] if steps is None else steps

    def choose(so_far, logits):
        assert so_far.shape[1] == len(calls) + 1
        return logits.argmax(1)

    def step(tokens):
        calls.append(tokens.tolist())
        return torch.eye(5)[(tokens + 1) % 5]

    found = list(decode(PROMPTS, room - 1, LOGITS, choose, step, stop, watched))
    return found[-1][0], [(ids.shape[1], tokens) for ids, tokens in found], calls


def test_every_token_but_the_last_starts_a_step():
    ids, found, calls = run(5)
    assert ids.tolist() == [[4, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert [n for n, _ in found] == [2, 3, 4, 5]
    assert [tokens.tolist() for _, tokens in found] == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert calls == [[0, 1], [1, 2], [2, 3]]


def test_a_step_is_queued_before_its_tokens_are_read():
    steps: list[list[int]] = []

    def step(tokens):
        steps.append(tokens.tolist())
        return torch.eye(5)[(tokens + 1) % 5]

    seen = []
    for ids, _ in decode(PROMPTS, 4, LOGITS, lambda _, logits: logits.argmax(1), step, None, True):
        seen.append((ids.shape[1], len(steps)))
    assert seen == [(2, 1), (3, 2), (4, 3), (5, 3)]


def test_sequences_end_one_by_one():
    stop = Stop(lambda ids: ids[:, -1] == 2, 9)
    ids, found, calls = run(8, stop)
    assert ids[:, :4].tolist() == [[4, 0, 1, 2], [0, 1, 2, 9]]
    assert [n for n, _ in found] == [2, 3, 4]
    assert len(calls) == 3  # the last of them is dropped


def test_nobody_reads():
    _, found, _ = run(5, watched=False)
    assert found == [(2, None), (3, None), (4, None), (5, None)]
