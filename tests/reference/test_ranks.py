"""Several ranks do in a step what one does: they split its rows, sum gradients and share what each has found out."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ALL_TERMS, KL_IN_REWARD, PPO
from side_by_side import STEPS, TOLERANCE, groups_of, make_models, our_learner, our_weights, settings
from thread_world import on_ranks
from torch.testing import assert_close

from dapo.config.schema import Config
from dapo.distributed.world import ALONE, World
from dapo.learner.batch import make_batch
from dapo.learner.learner import Learner
from dapo.learner.loss_scale import LossScale
from dapo.learner.update import update_policy
from dapo.trainer.records import new_record

TAUGHT = PPO | {"algorithm.kl.coefficient": 0.2, "algorithm.kl.kind": "k1", "algorithm.kl.place": "advantage"}
LITTLE = {"train.tokens_per_microbatch": 24}  # so that ranks in step have unequal numbers of passes


def trained(learner: Learner, config: Config, world: World, *, lockstep: bool = False) -> dict[str, Any]:
    """Everything that a rank knows after two steps. `lockstep`: in passes that all ranks make, as when sharded."""
    assert learner.critic is not None
    learner.gathered = copy.deepcopy(learner.policy).requires_grad_(False) if lockstep else None
    learner.world = learner.optimizer.world = learner.critic.optimizer.world = world
    for step in STEPS:
        batch = make_batch(groups_of(step, 4, 4), config, torch.float64)
        record = new_record(batch)
        metrics = update_policy(learner, batch, config, step=step, record=record)
    tokens = (batch.logp_old, batch.entropy, batch.logp_trainer, batch.advantage, record.ratio, record.clip)
    return {
        "weights": our_weights(learner),
        "tokens": [ragged.flat for ragged in tokens],
        "metrics": {name: value for name, value in metrics.items() if not name.startswith("timing.")},
        "counts": (learner.updates, learner.bad_updates),
    }


@pytest.mark.parametrize(
    ("base", "lockstep"),
    [(ALL_TERMS, True), (KL_IN_REWARD, False), (TAUGHT, True)],
    ids=["all terms", "kl in the reward", "a teacher beside a critic"],
)
def test_two_ranks_do_what_one_does(tmp_path: Path, base: dict[str, Any], lockstep: bool):
    folder = make_models(tmp_path)
    config = settings(folder, base | LITTLE)
    learners = [our_learner(folder, config) for _ in range(3)]  # the library cannot load two at a time
    alone = trained(learners[2], config, ALONE)
    assert float(alone["tokens"][-1].abs().sum()) > 0  # something is clipped
    for rank in on_ranks(2, lambda world: trained(learners[world.rank], config, world, lockstep=lockstep)):
        assert rank["counts"] == alone["counts"]
        assert_close(rank["metrics"], alone["metrics"], rtol=TOLERANCE, atol=TOLERANCE)
        assert_close(rank["weights"], alone["weights"], rtol=TOLERANCE, atol=TOLERANCE)
        assert_close(rank["tokens"], alone["tokens"], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def test_ranks_agree_on_a_skip_for_the_loss_scale(tmp_path: Path):
    """One rank's gradient overflows until the scale has halved twice: both skip, halve and then train as one does."""
    folder = make_models(tmp_path)
    config = settings(folder, ALL_TERMS | LITTLE)
    learners = [our_learner(folder, config) for _ in range(3)]

    def overflowing(learner: Learner, world: World, *, is_broken: bool) -> tuple[dict[str, Any], LossScale]:
        scale = learner.optimizer.loss_scale = LossScale()
        parameter = next(iter(learner.optimizer.parameters.values()))
        parameter.register_hook(lambda gradient: gradient * (float("inf") if is_broken and scale.value > 2**14 else 1))
        return trained(learner, config, world), scale

    alone, scale = overflowing(learners[2], ALONE, is_broken=True)
    assert (scale.value, alone["counts"][1]) == (2**14, 0)
    for rank, own in on_ranks(2, lambda world: overflowing(learners[world.rank], world, is_broken=world.rank == 1)):
        assert own == scale
        assert rank["counts"] == alone["counts"]
        assert_close(rank["weights"], alone["weights"], rtol=TOLERANCE, atol=TOLERANCE)
