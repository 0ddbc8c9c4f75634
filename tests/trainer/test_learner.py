"""What learns: critic and reference come from the same commit of a hub model as the policy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy import HERE, recipe_file

from dapo.models.load import save_policy
from tiny_models import tiny_policy

OLD, NEW = "a" * 40, "b" * 40
SCRIPT = """
import sys, torch
from dapo.config import load_recipe
from dapo.trainer.assemble import make_policy
from dapo.distributed.world import ALONE
from dapo.learner.learner import make_learner

config = load_recipe(sys.argv[1], sys.argv[2:]).config
policy = make_policy(config, config.model.path, torch.float64, "cpu")
learner = make_learner(config, policy, config.model.path, None, torch.float64, "cpu", ALONE)
for other in (learner.critic.model.backbone, learner.reference.backbone):
    pairs = zip(policy.backbone.parameters(), other.parameters(), strict=True)
    print(all(torch.equal(mine, theirs) for mine, theirs in pairs))
"""


@pytest.mark.slow
def test_critic_and_reference_are_of_the_revision_that_is_named(tmp_path: Path):
    hub = tmp_path / "home" / "hub" / "models--somebody--tiny"
    for commit in (OLD, NEW):
        policy = tiny_policy("llama", dtype=torch.float64)
        if commit == OLD:
            with torch.no_grad():
                policy.backbone.embed_tokens.weight.mul_(2)
        save_policy(policy, hub / "snapshots" / commit)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(NEW)
    path, keys = recipe_file(tmp_path)
    keys = [*keys, "preset=ppo", "algorithm.kl.place=loss", "algorithm.kl.coefficient=0.01"]
    keys += ["model.path=somebody/tiny", f"model.revision={OLD}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), *keys], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]
