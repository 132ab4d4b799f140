"""Drawing tokens on a GPU, without a wait for it."""

import pytest
import torch
from gpu_memory import no_waits

from octavo.generation.sampling import Sampling, draw

pytestmark = pytest.mark.gpu
SAMPLING = Sampling(temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.2, seed=3)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randint(5000, (4, 30)), torch.randn(4, 5000) * 3


def test_draws_are_those_of_multinomial():
    scores = inputs()[1].cuda()
    for seed in range(20):
        random, theirs = (torch.Generator("cuda").manual_seed(seed) for _ in range(2))
        required = torch.multinomial(scores.softmax(-1), 1, generator=theirs)[:, 0]
        assert torch.equal(draw(scores, random), required)


@pytest.mark.parametrize("padding", [(), (0, 3, 7, 1)])
def test_a_choice_does_not_wait_and_is_that_of_a_cpu(padding):
    ids, logits = inputs()
    first = torch.tensor(padding)[:, None] if padding else None
    required = SAMPLING.process(ids, logits, first)
    choose = SAMPLING.chooser(SAMPLING.generator(torch.device("cuda")), padding)
    ids, logits, first = (None if x is None else x.cuda() for x in (ids, logits, first))
    with no_waits():
        tokens = choose(ids, logits)
        scores = SAMPLING.process(ids, logits, first)
    assert torch.equal(scores.isinf().cpu(), required.isinf())
    assert torch.allclose(scores.cpu(), required, atol=1e-5)
    assert scores.gather(1, tokens[:, None]).isfinite().all()
