"""The loss scale of float16: updates are the same bits under any, overflow skips and halves, a resume keeps it."""

from pathlib import Path

import pytest
import torch
from test_update import groups, learner_of, learner_with_critic
from toy import recipe

from dapo.config.schema import Config
from dapo.distributed.world import ALONE
from dapo.errors import ConfigError, EngineError, TrainingError
from dapo.learner.batch import make_batch
from dapo.learner.learner import Learner, make_learner
from dapo.learner.loss_scale import FIRST, LEAST, MOST, RISES_AFTER, LossScale, scale_for
from dapo.learner.update import update_policy
from dapo.models.critic import Critic
from dapo.models.device import choose_dtype
from tiny_models import tiny_policy


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return recipe(tmp_path_factory.mktemp("scale"), "preset=ppo", "train.epochs_per_step=1").config


def test_the_scale_halves_down_to_one_and_then_something_else_is_wrong():
    scale, seen = LossScale(good=7), []
    while scale.lower():
        seen.append(scale.value)
        assert scale.good == 0
    assert seen == [FIRST / 2**k for k in range(1, 17)]
    assert scale.value == LEAST == 1


@pytest.mark.parametrize("start", [FIRST, MOST / 2, MOST])
def test_border_the_scale_doubles_after_so_many_good_updates_in_a_row(start: float):
    scale = LossScale(start)
    for _ in range(RISES_AFTER - 1):
        scale.count()
    assert (scale.value, scale.good) == (start, RISES_AFTER - 1)
    scale.count()
    assert (scale.value, scale.good) == (min(2 * start, MOST), 0)
    scale.count()
    scale.lower()
    assert scale.good == 0  # in a row


def test_a_saved_scale_is_the_same_and_an_impossible_one_is_refused():
    saved, restored = LossScale(2.0**9, 123), LossScale()
    restored.load(saved.tensors())
    assert restored == saved
    restored.load({})  # a checkpoint without one
    assert restored == saved
    for value, good in ((3.0, 0), (0.5, 0), (2 * MOST, 0), (float("nan"), 0), (2.0, -1), (2.0, RISES_AFTER)):
        with pytest.raises(ValueError, match="loss scale"):
            restored.load(LossScale(value, good).tensors())
    assert restored == saved


def test_only_float16_has_a_scale():
    assert scale_for(torch.float16) == LossScale()
    assert [scale_for(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)] == [None] * 3


def test_policy_and_critic_each_have_a_scale_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An overflow of one of them says nothing about the other."""
    monkeypatch.setattr("dapo.learner.learner.load_critic", lambda *_, **__: Critic(tiny_policy().backbone))
    config = recipe(tmp_path, "preset=ppo").config
    learner = make_learner(config, tiny_policy(), "", None, torch.float16, "cpu", ALONE)
    assert learner.critic is not None
    scales = learner.optimizer.loss_scale, learner.critic.optimizer.loss_scale
    assert scales == (LossScale(), LossScale())
    assert scales[0] is not scales[1]


def scaled(learner: Learner, value: float | None) -> Learner:
    """Policy and critic with a loss scale, as float16 gives them."""
    assert learner.critic is not None
    for optimizer in (learner.optimizer, learner.critic.optimizer):
        optimizer.loss_scale = None if value is None else LossScale(value)
    return learner


def state(learner: Learner) -> list[torch.Tensor]:
    """Weights and moments of policy and critic, copied."""
    assert learner.critic is not None
    both = (learner.optimizer, learner.critic.optimizer)
    kept = [tensor for one in both for tensor in (*one.parameters.values(), *one.moments.tensors().values())]
    return [tensor.detach().clone() for tensor in kept]


def train(learner: Learner, config: Config, step: int) -> dict[str, float]:
    made = update_policy(learner, make_batch(groups(4), config, torch.float64), config, step=step)
    return {name: value for name, value in made.items() if not name.startswith(("timing.", "update/"))}


@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e9])  # clipped, and not
def test_a_power_of_two_gives_the_same_updates_bit_for_bit(config: Config, max_grad_norm: float):
    seen = []
    for value in (None, 2.0**11):
        learner = scaled(learner_with_critic(), value)
        assert learner.critic is not None
        for optimizer in (learner.optimizer, learner.critic.optimizer):
            optimizer.max_grad_norm = max_grad_norm
        seen.append(([train(learner, config, step) for step in (1, 2)], state(learner)))
    assert seen[0][0] == seen[1][0]  # the gradient's norm is that of the loss itself
    assert all(torch.equal(a, b) for a, b in zip(seen[0][1], seen[1][1], strict=True))


def overflow(learner: Learner, above: float) -> None:
    """A gradient that float16 has no number for while the policy's scale is above this."""
    scale = learner.optimizer.loss_scale
    assert scale is not None
    parameter = next(iter(learner.optimizer.parameters.values()))
    parameter.register_hook(lambda gradient: gradient * (float("inf") if scale.value > above else 1))


def test_an_overflow_skips_halves_and_changes_nothing_else(config: Config):
    learner = scaled(learner_with_critic(), FIRST)
    assert learner.critic is not None
    overflow(learner, FIRST / 4)
    learner.critic.optimizer.loss_scale = None
    learner.bad_updates = 1
    before = [tensor.detach().clone() for tensor in learner.optimizer.parameters.values()]
    made = update_policy(learner, make_batch(groups(4), config, torch.float64), config, step=1)
    assert (made["updates"], made["policy/skipped_updates"], made["update/scale_skips"]) == (0, 0, 2)
    assert made["update/loss_scale"] == FIRST / 4
    assert not {"policy/loss", "policy/grad_norm", "update/critic_loss_scale"} & made.keys()
    assert all(torch.equal(a, b) for a, b in zip(before, learner.optimizer.parameters.values(), strict=True))
    assert not learner.optimizer.moments.tensors()
    assert learner.bad_updates == 1  # neither counted nor forgiven
    made = update_policy(learner, make_batch(groups(4), config, torch.float64), config, step=2)
    assert (made["updates"], made["update/scale_skips"], made["update/loss_scale"]) == (2, 0, FIRST / 4)
    assert learner.bad_updates == 0


def test_a_search_that_ends_is_forgotten(config: Config):
    """Two skipped updates leave no trace in what comes after them."""
    searched, plain = scaled(learner_with_critic(), FIRST), scaled(learner_with_critic(), FIRST / 4)
    overflow(searched, FIRST / 4)
    train(searched, config, 1)
    searched.critic = learner_with_critic().critic  # the critic's own updates were not skipped
    assert searched.critic is not None
    searched.critic.optimizer.loss_scale = LossScale(FIRST / 4)
    assert train(searched, config, 2) | {"updates_total": 2} == train(plain, config, 2)
    assert all(torch.equal(a, b) for a, b in zip(state(searched), state(plain), strict=True))


def test_a_gradient_that_no_scale_helps_is_a_bad_update(config: Config):
    learner = scaled(learner_with_critic(), 2 * LEAST)
    batch = make_batch(groups(4), config, torch.float64)
    assert learner.critic is not None
    next(learner.critic.model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    made = update_policy(learner, batch, config, step=1)
    assert (made["policy/skipped_updates"], made["update/scale_skips"]) == (1, 1)
    assert (made["update/loss_scale"], made["update/critic_loss_scale"]) == (2, 1)
    assert (learner.bad_updates, learner.critic.bad_updates) == (0, 1)
    update_policy(learner, batch, config, step=2)
    with pytest.raises(TrainingError, match="4 updates in a row of the critic"):
        update_policy(learner, batch, config, step=3)


def test_gradients_below_float16_are_trained_on_with_a_scale_and_lost_without():
    exact, norms = learner_of(torch.float64).policy, {}
    for value in (None, FIRST):
        learner = learner_of(torch.float16)
        learner.policy.load_state_dict(exact.state_dict())
        learner.optimizer.loss_scale = None if value is None else LossScale(value)
        hidden = learner.policy.backbone.embed_tokens.weight[:7]
        learner.optimizer.scaled((hidden.float() * 1e-8).sum()).backward()  # half of float16's smallest is 3e-8
        norms[value] = learner.optimizer.step(0.0).gradient_norm
    assert norms[None] == 0
    assert norms[FIRST] == pytest.approx(1e-8 * hidden.numel() ** 0.5, rel=1e-3)


def test_float16_on_a_cpu_is_refused_with_reason_and_remedy(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model\.dtype = float16: is for GPUs") as error:
        recipe(tmp_path, "model.dtype=float16")
    assert "float32" in error.value.remedy
    with pytest.raises(EngineError, match=r"model\.dtype = float16: is for GPUs") as found:
        choose_dtype("float16", "cpu")  # model.device = auto found none
    assert "float32" in found.value.remedy
    assert choose_dtype("float16", "cuda") == torch.float16
