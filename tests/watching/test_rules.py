"""Each rule over samples that are made up: silent on clean ones, and right about one number that is changed."""

import numpy as np
import pytest
from watch_examples import watched_layers

from octavo.watching.rules import RULES, LossRule, SampleRules, StallRule, judge_rate
from octavo.watching.storage import FULL_SHARE, LAYER, OPERAND, UNQUANTIZED

LAYERS, X, W, DY = 3, 0, 1, 2


def clean(draw, step):
    """Records as those of a layer in `delayed`: amax within a factor of 2, a scale that fits, no gate and up."""
    operands, layers = np.zeros((LAYERS, 3), OPERAND), np.zeros(LAYERS, LAYER)
    operands["step"] = layers["step"] = step
    operands["layer"], operands["operand"] = np.arange(LAYERS)[:, None], np.arange(3)
    layers["layer"], layers["alignment"] = np.arange(LAYERS), np.nan
    operands["amax"] = 10 * 2 ** draw.uniform(-0.5, 0.5, (LAYERS, 3))
    operands["scale"] = operands["smallest_scale"] = 20 / 448
    operands["gap"] = np.log2(20 / operands["amax"])
    operands["kurtosis"] = 10 ** draw.uniform(0.5, 1.2, (LAYERS, 3))
    operands["flushed"], operands["sqnr"] = draw.uniform(0, 0.01, (LAYERS, 3)), 28
    operands["binades"][..., 0] = FULL_SHARE // 2  # half of the elements are zero
    return operands, layers


@pytest.fixture
def samples():
    draw, steps = np.random.default_rng(0), iter(range(1, 1000))
    return lambda count: [clean(draw, next(steps)) for _ in range(count)]


@pytest.fixture
def rules(samples):
    made = SampleRules(watched_layers(LAYERS))
    assert [event for sample in samples(20) for event in check(made, sample)] == []
    return made


def check(rules, sample):
    operands, layers = sample
    return rules.check(operands.ravel(), layers)


def found_in(rules, samples, change, values):
    """The rule, the layer and the operand of each event in samples whose operands `change` has given a value."""
    found = []
    for value in values:
        [sample] = samples(1)
        change(sample[0], value)
        found.append([(event.rule, event.layer, event.operand) for event in check(rules, sample)])
    return found


# rule, operand, field, a value within the limit, one above it, and the number that the event has
OPERAND_FAULTS = [
    ("non_finite", X, "nonfinite", 0.0, 1e-6, 1e-6),
    ("underflow", DY, "flushed", 0.099, 0.101, 0.202),  # of the half that is not zero
    ("underflow", DY, "shift_lost", 0.49, 0.51, 0.51),
    ("scale_gap", W, "gap", -2.9, -3.5, 3.5),
    ("scale_gap", DY, "gap", 8.8, 9.0, 9 / 17.81),
    ("dead_scale", W, "scale", 1e-30, 0.0, 1.0),
    ("dead_scale", X, "scale", 1e30, np.nan, 1.0),
]


@pytest.mark.parametrize(("rule", "operand", "field", "within", "above", "value"), OPERAND_FAULTS)
def test_a_number_above_its_limit_is_found_once_and_again_when_it_returns(
    rules, samples, rule, operand, field, within, above, value
):
    found = []
    for change in (within, above, above, within, above):
        [sample] = samples(1)
        sample[0][field][1, operand] = change
        found.append(check(rules, sample))
    assert [len(events) for events in found] == [0, 1, 0, 0, 1]
    event = found[1][0]
    assert (event.rule, event.layer, event.operand) == (rule, "blocks.1.up", ("x", "w", "dy")[operand])
    assert (event.step, event.action) == (22, None)
    assert event.value > event.limit
    assert event.value == pytest.approx(value, rel=1e-3)


def test_saturation_is_found_where_the_largest_elements_lose_much(rules, samples):
    def change(operands, numbers):
        operands["saturated"][2, X], operands["gap"][2, X] = numbers

    found = found_in(rules, samples, change, ((0.5, -0.4), (0.049, -0.6), (0.051, -0.6)))
    assert found == [[], [], [("saturation_spike", "blocks.2.up", "x")]]


@pytest.mark.parametrize(
    ("rule", "field", "operand", "before", "limit"),
    [
        ("amax_jump", "amax", X, 20, 8),
        ("amax_jump", "amax", DY, 100, 64),
        ("kurtosis_growth", "kurtosis", W, 30, 8),
        ("kurtosis_growth", "kurtosis", X, 3, 10 / 3 * 8),  # which counts as 10
    ],
)
def test_a_number_far_above_the_last_samples_is_found(rules, samples, rule, field, operand, before, limit):
    def change(operands, number):
        operands[field][2, operand] = number

    numbers = [before] * 16 + [0.99 * limit * before, 1.01 * limit * 0.99 * limit * before]
    found = found_in(rules, samples, change, numbers)
    assert found == [*[[]] * 17, [(rule, "blocks.2.up", ("x", "w", "dy")[operand])]]


def test_four_bits_may_lose_what_eight_bits_may_not(rules, samples):
    rules.layers[0].formats["x"] = "e2m1"  # of all layers: it rounds a fifth of normal numbers to zero
    assert found_in(rules, samples, lambda operands, share: operands["flushed"][:, X].fill(share), [0.15]) == [[]]


def make_zero(records, zero=True):
    if zero:
        records["amax"], records["binades"], records["flushed"] = 0, 0, 0


def test_an_operand_that_becomes_zero_is_found_at_once_by_one_rule(rules, samples):
    """It is all zero, or becomes so in eight bits: underflow and the gap of its scale do not repeat it."""

    def change(operands, flushed):
        make_zero(operands[0, DY : DY + 1])
        operands["flushed"][2, X], operands["gap"][2, X] = flushed, 40

    found = found_in(rules, samples, change, [0.5] * 3)
    assert sorted(found[0]) == [("dead_scale", "blocks.0.up", "dy"), ("dead_scale", "blocks.2.up", "x")]
    assert found[1:] == [[], []]


def test_a_batch_without_targets_is_no_fault_and_two_samples_without_are(rules, samples):
    zero = (True, False, True, True, True)
    found = found_in(rules, samples, lambda operands, value: make_zero(operands[:, DY], value), zero)
    assert found == [[], [], [], [("dead_scale", f"blocks.{i}.up", "dy") for i in range(LAYERS)], []]


def test_an_operand_that_is_zero_from_the_start_is_found_at_the_second_sample(samples):
    rules = SampleRules(watched_layers(LAYERS))
    found = found_in(rules, samples, lambda operands, _: make_zero(operands[0, DY : DY + 1]), range(3))
    assert found == [[], [("dead_scale", "blocks.0.up", "dy")], []]


def test_a_layer_is_found_by_its_gradient_and_by_the_alignment_of_its_weights(rules, samples):
    [sample] = samples(1)
    sample[1]["gradient_nonfinite"][0], sample[1]["alignment"] = 0.25, (np.nan, 0.69, 0.71)
    first, second = ((event.rule, event.layer, event.operand, event.value) for event in check(rules, sample))
    assert first == ("non_finite", "blocks.0.up", None, 0.25)
    assert second == ("swiglu_alignment", "blocks.2.up", None, pytest.approx(0.71))


def test_an_operand_in_high_precision_is_judged_by_its_finiteness_only(rules, samples):
    first, sample = samples(2)
    first[0]["kurtosis"][:, DY] = 1e6  # that of gradients has no limit
    assert check(rules, first) == []
    operands = sample[0]
    operands["flags"] = UNQUANTIZED
    operands["amax"], operands["kurtosis"], operands["scale"], operands["nonfinite"][1, X] = 1e9, 1e9, np.nan, 0.5
    assert [(event.rule, event.layer) for event in check(rules, sample)] == [("non_finite", "blocks.1.up")]


def test_a_layer_that_is_not_in_a_sample_has_no_fault(rules, samples):
    [(operands, layers)] = samples(1)
    assert rules.check(operands[:1].ravel(), layers[:0]) == []
    assert rules.check(operands[:0].ravel(), layers[:1]) == []
    assert rules.check(operands[:0].ravel(), layers[:0]) == []


def test_the_first_samples_are_not_compared_with_others(samples):
    rules = SampleRules(watched_layers(LAYERS))
    for amax in (1, 100, 10000):
        [sample] = samples(1)
        sample[0]["amax"], sample[0]["kurtosis"], sample[0]["saturated"] = amax, amax, 0.5
        assert check(rules, sample) == []


def test_every_rule_has_a_fault_here():
    tested = {"amax_jump", "kurtosis_growth", "saturation_spike", "swiglu_alignment", *(f[0] for f in OPERAND_FAULTS)}
    assert tested == {rule.name for rule in RULES}


def losses(count, seed=0):
    return 3 + 0.1 * np.random.default_rng(seed).standard_normal(count)


def spikes(values):
    rule = LossRule()
    return [event.step for step, loss in enumerate(values) if (event := rule.check(step, loss))]


def test_a_loss_spike_is_found_at_its_second_step_and_once():
    assert spikes([*losses(80), *(losses(20) + 2), *losses(20)]) == [81]
    assert spikes([*losses(80), *(losses(300) + 5)]) == [81]  # it does not become the usual loss
    assert spikes([*losses(80), *(losses(20) + 5), *losses(80), *(losses(9) + 5)]) == [81, 181]


def test_noise_a_fall_and_one_hard_batch_are_no_spike():
    assert spikes([value for seed in range(20) for value in losses(100, seed)]) == []
    assert spikes(10 * np.exp(-np.arange(300) / 50) + losses(300)) == []
    assert spikes([*losses(50), 20, *losses(50)]) == []
    assert spikes([*losses(50), np.nan, np.inf, *losses(50)]) == []
    assert spikes([*losses(10), *(losses(5) + 5)]) == []  # too few to compare with


def stalls(values, first=0):
    rule = StallRule(first)
    return [event.step for step, loss in enumerate(values, 1) if (event := rule.check(step, loss))]


def test_a_loss_that_does_not_fall_is_a_stall_at_the_second_look():
    rising = np.linspace(3, 3.1, 200)
    assert stalls(rising) == [141]  # the first looks are at 128 and at 141 steps
    assert stalls(rising, first=150) == [165]
    assert stalls([*rising, np.nan, np.inf]) == [141]
    assert stalls(rising[:140]) == []


@pytest.mark.parametrize("seed", range(10))
def test_a_loss_that_falls_ever_more_slowly_is_no_stall(seed):
    assert stalls(2 + 3 * np.arange(1, 5001) ** -0.2 + losses(5000, seed) - 3) == []


def test_a_rate_is_too_high_where_it_reaches_the_size_of_the_weights():
    assert judge_rate(7, 0.019, 0.02) is None
    assert judge_rate(7, 0.019, 0.0) is None  # there are no matrices
    event = judge_rate(7, 0.05, 0.02)
    assert (event.step, event.rule, event.layer, event.limit) == (7, "rate_too_high", None, 1.0)
    assert event.value == pytest.approx(2.5)
