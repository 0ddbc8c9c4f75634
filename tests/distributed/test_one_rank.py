"""One rank with cluster.shard = full: it really is FSDP2, and computes what the plain path computes."""

from pathlib import Path

import pytest
import torch
from launch import environment
from ranks import do, one_process
from test_torchrun import UNEVEN, furthest, lines, weights, written
from torch.distributed.tensor import DTensor

from cuda_attention import stand_in
from dapo.distributed.shards import Sharding, local, refresh
from dapo.distributed.world import one_rank
from dapo.learner import update
from dapo.learner.activations import checkpoint_layers
from dapo.learner.learner import layers_of
from dapo.learner.step import Step
from dapo.models.fused_layers import fuse_layers
from dapo.models.kernels.build import library
from dapo.models.packing import pack
from dapo.models.policy import Policy
from tiny_models import tiny_policy

pytestmark = pytest.mark.distributed


def test_one_sharded_rank_computes_what_the_plain_path_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    plan = {"overrides": [*UNEVEN, "train.steps=2", "cluster.shard=full"]}
    one_process(tmp_path, [{**plan, "name": "plain", "overrides": plan["overrides"][:-1]}])
    kinds: list[set[type]] = []
    update_once = update.update_once

    def look_and_update(step: Step, *arguments: object, **named: object) -> None:
        kinds.append({type(weight.data) for weight in step.learner.optimizer.parameters.values()})
        update_once(step, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(update, "update_once", look_and_update)
    with one_rank("cpu") as world:
        do(world, tmp_path, name="sharded", **plan)
    assert kinds == [{DTensor}] * 4
    assert written(tmp_path / "sharded") == written(tmp_path / "plain")
    assert furthest(weights(tmp_path / "sharded"), weights(tmp_path / "plain")) < 1e-9


def test_a_sharded_critics_head_is_fitted_as_a_whole_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The pass that fits it gathers the head: the next one must not run with that."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    keys = ["preset=vapo", "algorithm.critic.pretrain_responses=16", "algorithm.critic.lr=1e-2", "train.steps=1"]
    one_process(tmp_path, [{"name": "plain", "overrides": keys}])
    with one_rank("cpu") as world:
        do(world, tmp_path, name="sharded", overrides=[*keys, "cluster.shard=full"])
    whole = [pytest.approx(line, rel=1e-9) for line in lines(tmp_path / "plain", "value.jsonl")]
    assert lines(tmp_path / "sharded", "value.jsonl") == whole
    assert furthest(weights(tmp_path / "sharded"), weights(tmp_path / "plain")) < 1e-9


def test_what_a_forward_pass_gathered_does_not_hide_newer_weights():
    """A step may score rows and train on none: no backward pass then lets go of the gathered weights."""
    policy = tiny_policy("llama")
    with one_rank("cpu") as world, torch.no_grad():
        sharded = Sharding(world, "cpu", torch.float32).copy_of(policy, layers_of, shared=[policy.tokenizer])
        masters = [local(weight.detach()) for weight in sharded.parameters()]
        sharded(pack([[5, 6]], [[7, 8, 9]], "cpu"), temperature=1.0)
        for master in masters:
            master.add_(1.0)
        before = [weight.clone() for weight in policy.parameters()]
        refresh(policy, sharded)
    for weight, old in zip(policy.parameters(), before, strict=True):
        torch.testing.assert_close(weight, old + 1)


@pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize("keeps_attention", [True, False])
def test_sharded_layers_as_one_operation_learn_the_same(keeps_attention: bool, monkeypatch: pytest.MonkeyPatch):
    """Between its pass and its gradients a layer's gathered weights are gone: they come back where they were."""
    stand_in(monkeypatch)
    policy = tiny_policy("qwen2", torch.float32)
    fuse_layers(policy.backbone)
    packed = pack([[5, 6], [7]], [[7, 8, 9], list(range(3, 24))], "cpu")

    def learned(module: Policy) -> list[torch.Tensor]:
        (module(packed, temperature=1.0)[0] * torch.linspace(-1, 1, 24)).sum().backward()
        return [local(weight.grad) for weight in module.parameters()]

    expected = learned(policy)
    policy.zero_grad()
    with one_rank("cpu") as world:
        sharding = Sharding(world, "cpu", torch.float32)
        sharding.is_alone = False  # so that layers are let go of after their pass, as with several ranks
        sharded = sharding.copy_of(policy, layers_of, shared=[policy.tokenizer])
        checkpoint_layers(sharded, 1, keeps_attention=keeps_attention)
        gradients = learned(sharded)
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted)
