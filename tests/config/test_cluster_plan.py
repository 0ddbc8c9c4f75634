"""The plan for a cluster: its cost model against what was measured and published, and how it must scale."""

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from command_line import Answer, dapo
from dapo.cli.explain.scaling_plot import draw
from dapo.config import load_recipe
from dapo.config.model_shapes import KNOWN
from dapo.planning.cluster import (
    MEAN_FRACTION,
    Layout,
    choose,
    layouts_of,
    rates_of,
    training_seconds,
)
from dapo.planning.scaling import largest_scale, simulate_sampling, step_time
from dapo.planning.virtual import TickCost

PUBLISHED = load_recipe("dapo-qwen2.5-32b").config
SHAPE = KNOWN["qwen/qwen2.5-32b"]
MEAN = MEAN_FRACTION * PUBLISHED.limits.max_response_tokens


def published_plan(gpus: int, card: str = "h100"):
    layouts = layouts_of(PUBLISHED, SHAPE, card=card, gpus=gpus, mean_tokens=MEAN)
    chosen = choose(layouts, PUBLISHED)
    assert chosen is not None
    return chosen, rates_of(PUBLISHED, SHAPE, chosen, card=card, gpus=gpus, mean_tokens=MEAN)


def test_the_published_run_spends_about_70_percent_of_its_time_in_rollouts():
    chosen, rates = published_plan(128)
    assert (chosen.shard, chosen.tensor_parallel) == ("full", 4)  # as the released script has it
    scale = largest_scale(PUBLISHED, 128 // 4)
    time = step_time(PUBLISHED, chosen, rates, gpus=128, mean_tokens=MEAN, scale=scale)
    assert time.rollout_fraction == pytest.approx(0.7, abs=0.1)
    assert time.hours(10) == pytest.approx(10 * time.step_s / 3600)
    assert time.gpu_hours(128, 10) == pytest.approx(128 * time.hours(10))


@pytest.mark.parametrize(("model", "tokens_per_s"), [("1.5b", 29_000), ("7b", 27_000)])
def test_a_vllm_step_takes_what_was_measured_on_an_h200(model: str, tokens_per_s: int):
    """Design: 1,024 responses, about 35 ms a step whatever the size of the model."""
    config = load_recipe("gsm8k-1.5b-24gb", ["rollout.engine=vllm", "limits.max_prompt_tokens=64"]).config
    layout = Layout("none", 1, {}, 1024)
    rates = rates_of(config, KNOWN[f"qwen/qwen2.5-{model}"], layout, card="h200", gpus=1, mean_tokens=128)
    step = rates.tick_base_s + 1024 * rates.tick_per_response_s
    assert 1024 / step == pytest.approx(tokens_per_s, rel=0.15)


def test_32b_fits_nowhere_unsharded_and_not_on_one_card():
    layouts = layouts_of(PUBLISHED, SHAPE, card="h100", gpus=128, mean_tokens=MEAN)
    assert not any(layout.fits for layout in layouts if layout.shard == "none")
    assert choose(layouts_of(PUBLISHED, SHAPE, card="h100", gpus=1, mean_tokens=MEAN), PUBLISHED) is None


def test_twice_the_cards_train_in_half_the_time_until_gathering_weights_takes_longer():
    _, rates = published_plan(128)
    tokens = 4e7
    one, two = (training_seconds(PUBLISHED, rates, gpus=n, trained_tokens=tokens) - rates.gather_s for n in (128, 256))
    assert one == pytest.approx(tokens / 128 / rates.train_tokens_per_s)
    assert two >= 16 * rates.passes_s * (1 - 1e-9)  # at least one micro-batch in each of 16 updates
    assert two == pytest.approx(max(one / 2, tokens / 256 / PUBLISHED.train.tokens_per_microbatch * rates.passes_s))


def test_an_update_gathers_the_weights_at_least_once_however_few_tokens_it_has():
    _, rates = published_plan(128)
    seconds = training_seconds(PUBLISHED, rates, gpus=128, trained_tokens=1.0)
    assert seconds == pytest.approx(16 * rates.passes_s + rates.gather_s)


@pytest.mark.parametrize(("shard", "parallel", "is_gathered"), [("none", 1, 0), ("full", 1, 1), ("none", 2, 1)])
def test_an_engine_gets_weights_from_others_where_they_are_sharded_here_or_there(
    shard: str, parallel: int, is_gathered: int
):
    rates = rates_of(PUBLISHED, SHAPE, Layout(shard, parallel, {}, 64), card="h100", gpus=8, mean_tokens=MEAN)
    assert rates.gather_s == pytest.approx(is_gathered * 2 * SHAPE.parameters / 40e9)


def test_our_engines_share_the_sequences_that_are_allowed():
    config = load_recipe("gsm8k-1.5b-24gb", ["rollout.max_concurrent_sequences=6"]).config
    shape = KNOWN["qwen/qwen2.5-1.5b"]
    for gpus, slots in ((1, 6), (2, 3), (4, 2)):
        alone = layouts_of(config, shape, card="h200", gpus=gpus, mean_tokens=64)[0]
        assert (alone.shard, alone.tensor_parallel, alone.slots) == ("none", 1, slots)


def test_simulated_responses_have_the_mean_length_that_was_asked_for():
    sets = ["sampling.prompts_per_step=64", "sampling.dynamic=false"]
    config = load_recipe("dapo-math-7b-8x80gb", sets).config
    cost, n = TickCost(4e-3, 3e-5), 64 * config.sampling.responses_per_prompt
    sampled = simulate_sampling(config, replicas=1, slots=n, cost=cost, mean_tokens=200, sigma=0.9, steps=1)
    assert sampled.generated_tokens / n == pytest.approx(200, rel=0.1)


def test_with_more_engines_a_step_is_sampled_sooner_and_more_of_them_wait():
    config = load_recipe("dapo-math-7b-8x80gb", ["sampling.prompts_per_step=64"]).config
    sampled = [
        simulate_sampling(config, replicas=n, slots=128, cost=TickCost(4e-3, 3e-5), mean_tokens=800, sigma=0.9, steps=2)
        for n in (1, 4, 16)
    ]
    seconds, idle = [f.seconds for f in sampled], [f.idle_fraction for f in sampled]
    assert seconds == sorted(seconds, reverse=True)
    assert idle == sorted(idle)
    assert seconds[0] / seconds[-1] < 16  # the longest response is as long as ever
    # Selection in order: what is trained on does not depend on how many there are.
    assert len({f.trained_tokens for f in sampled}) == 1


def explain(*arguments: str) -> Answer:
    return dapo("explain", *arguments)


def test_explain_shows_the_plan():
    answer = explain("dapo-math-7b-8x80gb", "--gpus", "8", "--gpu", "h100", "--json")
    plan = json.loads(answer.stdout)["cluster"]
    assert plan["gpus"] == 8
    chosen = plan["chosen"]
    assert chosen["step_s"] == pytest.approx(chosen["rollout_s"] + chosen["training_s"], abs=0.2)
    assert chosen["rollout_share"] == pytest.approx(chosen["rollout_s"] / chosen["step_s"], abs=0.01)
    assert 0 <= chosen["idle_share_of_rollout"] < 1
    assert chosen["hours"] == pytest.approx(chosen["gpu_hours"] / 8, abs=0.2)


def test_what_belongs_to_a_cluster_needs_one():
    answer = explain("quickstart", "--scaling")
    assert answer.returncode == 2
    assert "--gpus N --gpu" in answer.stderr


def test_the_scaling_table_is_drawn_as_it_is():
    rows = [
        {"gpus": n, "rollout_s": 1000 / n + 50, "training_s": 400 / n, "idle_share_of_rollout": i / 4,
         "gpu_seconds_per_step": 1400 + 50 * n}
        for i, n in enumerate((1, 2, 4, 8))
    ]  # fmt: skip
    svg = ElementTree.fromstring(draw(rows, "a < b"))
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b" in texts
    assert {"1", "2", "4", "8"} <= set(texts)
    lines = [
        [tuple(map(float, point.split(","))) for point in element.attrib["points"].split()]
        for element in svg.iter("{http://www.w3.org/2000/svg}polyline")
    ]
    rollouts, updates, even, idle = lines
    assert [x for x, _ in rollouts] == [x for x, _ in idle]  # cards stand where they stand in both halves
    assert all(a[1] < b[1] for a, b in pairwise(updates))  # less time is further down
    assert all(a[1] > b[1] for a, b in pairwise(idle))  # a larger share is further up
    assert even[0] == rollouts[0]
    assert all(b[1] >= a[1] for a, b in zip(rollouts, even, strict=False))  # what is ideal takes less


def test_a_plot_needs_what_it_draws(tmp_path: Path):
    answer = explain("quickstart", "--plot", str(tmp_path / "s.svg"))
    assert answer.returncode == 2
    assert "it plots the result of --scaling" in answer.stderr
