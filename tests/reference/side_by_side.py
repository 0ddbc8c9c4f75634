"""The trainer and the reference trainer on the same groups from the same weights, and where they differ."""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_trainer import Critic as ReferenceCritic
from reference_trainer import ReferenceTrainer, Step
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

from dapo.config import load_recipe
from dapo.config.schema import Config
from dapo.distributed.world import ALONE
from dapo.learner.batch import Batch, make_batch
from dapo.learner.learner import Learner, make_learner
from dapo.learner.update import update_policy
from dapo.models.critic import HEAD_FILE, Critic, save_critic
from dapo.models.device import choose_dtype
from dapo.models.load import load_pretrained, save_policy
from dapo.models.policy import Policy
from dapo.trainer.assemble import make_policy
from dapo.types import Completion, Group, Judgement, Problem, StopReason, Verdict
from tiny_models import EOS, VOCABULARY, tiny_policy

TOLERANCE = 1e-9
STEPS = (2, 3)  # of a run: the second comes after the first, with the optimizer's state that it left
LONGEST = 12  # tokens of a response
TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
# What a recipe says beside its preset, chosen so that ratios leave the clip and every loss has something to say.
RECIPE = """
[model]
path = "{folder}/reference"
dtype = "float64"
device = "cpu"
kernels = "plain"
[data]
train = "unused"
[limits]
max_prompt_tokens = 8
max_response_tokens = 12
[shaping]
overlong_buffer_tokens = 4
[sampling]
prompts_per_step = 4
responses_per_prompt = 4
[train]
steps = 5
lr = 2e-2
warmup_steps = 3
updates_per_step = 2
epochs_per_step = 2
[algorithm.critic]
path = "{folder}/critic"
"""


def make_models(folder: Path) -> Path:
    """Three sets of weights that differ: the policy's, the reference policy's and the critic's; and a recipe."""
    for seed, name in enumerate(("policy", "reference")):
        save_policy(tiny_policy(seed=seed, **TINY), folder / name)
    critic = Critic(tiny_policy(seed=2, **TINY).backbone)
    nn.init.normal_(critic.value_head.weight, std=0.3)
    nn.init.normal_(critic.value_head.bias, std=0.3)
    save_critic(critic, folder / "critic")
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
    return folder


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value and prefix + name != "rewards.parts":
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def settings(folder: Path, overrides: dict[str, Any]) -> Config:
    """The config as a run gets it; what was asked for must be what is there."""
    texts = [f"{key}={'none' if value is None else toml(value)}" for key, value in overrides.items()]
    config = load_recipe(str(folder / "recipe.toml"), texts).config
    keys = keys_of(config)
    asked = dict(flat(tomllib.loads((folder / "recipe.toml").read_text()))) | overrides
    for key, value in asked.items():
        assert keys[key] == value, f"{key}: {value} was asked for, the config has {keys[key]}"
    return config


def keys_of(config: Config) -> dict[str, Any]:
    """What the reference gets: every key of the schema and its value."""
    return dict(flat(config.model_dump()))


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {toml(inner)}' for name, inner in value.items() if inner is not None)}}}"
    return str(list(value)) if isinstance(value, tuple) else f'"{value}"' if isinstance(value, str) else str(value)


def episodes_of(step: int, P: int, G: int) -> list[Group]:
    """The same, as episodes: an environment has said some of the tokens, in the middle and at the end of a text."""
    random = np.random.default_rng(100 + step)

    def as_episode(completion: Completion) -> Completion:
        own = random.random(len(completion.tokens)) < 0.6
        own[:1] = True
        return replace(completion, own=own, logp=np.where(own, completion.logp, 0).astype(np.float32))

    return [
        replace(group, completions=tuple(as_episode(completion) for completion in group.completions))
        for group in groups_of(step, P, G)
    ]


def groups_of(step: int, P: int, G: int) -> list[Group]:
    """Responses of uneven length, right and wrong; truncated, given up and empty ones; two groups share a prompt.

    The second group is wrong throughout, the third is graded: its raw values lie between right and wrong.
    """
    random = np.random.default_rng(step)
    made = []
    for p in range(P):
        completions, judgements = [], []
        for i in range(G):
            length, stop = int(random.integers(1, LONGEST + 1)), StopReason.EOS
            if (p + i) % 4 == 3:
                length, stop = LONGEST, StopReason.LENGTH
            if (p, i) in ((0, 1), (3, 1)):
                length, stop = (0 if p else 5), StopReason.ABORTED
            tokens = random.integers(3, VOCABULARY, length).astype(np.int32)
            if stop is StopReason.EOS:
                tokens[-1] = EOS
            logp = random.normal(-3.5, 0.7, length).astype(np.float32)
            completions.append(Completion(tokens, logp, np.zeros(length, np.int32), stop, ""))
            is_right = stop is StopReason.EOS and p != 1 and bool((i + p // 2) % 2 == 0)
            verdict = Verdict.CORRECT if is_right else (Verdict.WRONG, Verdict.UNPARSEABLE, Verdict.CRASH)[i % 3]
            value = 1.0 if is_right else -1.0
            parts = {"tidy": float(i == p), "format": round(float(random.normal()), 2)}
            if (p + 2 * i) % 5 == 1 or p == 3:  # could not be measured; of the last group nowhere
                del parts["format"]
            raw = value / (i + 1) if p == 2 else value
            judgements.append(Judgement(verdict, raw, graded=p == 2, parts=parts))
        prompt = tuple(int(token) for token in np.random.default_rng(p % 2).integers(3, VOCABULARY, 2 + p % 2))
        made.append(Group(Problem(f"{step}-{p}", "", ""), p, prompt, tuple(completions), tuple(judgements)))
    return made


@dataclass
class Ours:
    """What the trainer did in one step."""

    batch: Batch
    metrics: dict[str, float]
    policy_gradients: list[dict[str, Tensor]]
    critic_gradients: list[dict[str, Tensor]]


def spy(optimizer: Any) -> list[dict[str, Tensor]]:
    """The gradient of every update from now on, as the optimizer gets it."""
    seen: list[dict[str, Tensor]] = []
    step = optimizer.step

    def seen_step(lr: float) -> Any:
        seen.append({name: master.grad.clone() for name, master in optimizer.masters.items()})
        return step(lr)

    optimizer.step = seen_step
    return seen


def our_learner(folder: Path, config: Config) -> Learner:
    start, dtype = str(folder / "policy"), choose_dtype(config.model.dtype, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        for module in ("load", "critic"):  # some hundred learners begin with the same three folders
            patch.setattr(f"dapo.models.{module}.load_pretrained", lambda *what, **how: deepcopy(read(*what, **how)))
        policy = make_policy(config, start, dtype, "cpu")
        return make_learner(config, policy, start, None, dtype, "cpu", ALONE)


read = cache(load_pretrained)


def train_ours(learner: Learner, config: Config, steps: Sequence[tuple[int, list[Group]]]) -> list[Ours]:
    done = []
    policy = spy(learner.optimizer)
    critic = spy(learner.critic.optimizer) if learner.critic is not None else []
    for number, groups in steps:
        batch = make_batch(groups, config, learner.policy.dtype)
        metrics = update_policy(learner, batch, config, step=number)
        done.append(Ours(batch, metrics, policy[:], critic[:]))
        policy.clear()
        critic.clear()
    return done


def reference_trainer(start: Path, keys: dict[str, Any]) -> ReferenceTrainer:
    """The library's own models, with its own attention, from the same folders; the policy's is `start`."""
    policy = library_model(AutoModelForCausalLM, start)
    reference = library_model(AutoModelForCausalLM, Path(keys["algorithm.kl.path"] or keys["model.path"]))
    critic = None
    if keys["algorithm.advantage"] == "gae":
        start = Path(keys["algorithm.critic.path"] or start)
        head = nn.Linear(policy.config.hidden_size, 1, dtype=torch.float64)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        if (start / HEAD_FILE).exists():
            head.load_state_dict(load_file(start / HEAD_FILE))
        critic = ReferenceCritic(library_model(AutoModel, start), head)
    return ReferenceTrainer(keys, policy, reference, critic)


def library_model(kind: Any, folder: Path) -> Any:
    return deepcopy(loaded(kind, folder))


@cache
def loaded(kind: Any, folder: Path) -> Any:
    return kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()


def weights_of(policy: nn.Module, critic: nn.Module | None) -> dict[str, Tensor]:
    """All weights, the policy's under the names that the library gives them."""
    prefix = "model." if isinstance(policy, Policy) else ""
    named = {f"policy {name.removeprefix(prefix)}": p for name, p in policy.named_parameters()}
    named |= {f"critic {name}": p for name, p in (critic.named_parameters() if critic is not None else ())}
    return {name: parameter.detach().clone() for name, parameter in named.items()}


def our_weights(learner: Learner) -> dict[str, Tensor]:
    return weights_of(learner.policy, learner.critic.model if learner.critic else None)


def run_both(
    folder: Path, config: Config, make_groups: Callable[[int, int, int], list[Group]] = groups_of
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Both trainers through `STEPS`: how far apart they are in each quantity, and our new weights."""
    keys = keys_of(config)
    P, G = keys["sampling.prompts_per_step"], keys["sampling.responses_per_prompt"]
    steps = [(number, make_groups(number, P, G)) for number in STEPS]
    learner, reference = our_learner(folder, config), reference_trainer(folder / "policy", keys)
    start = our_weights(learner)
    ours = train_ours(learner, config, steps)
    theirs = [reference.step(groups, number) for number, groups in steps]
    found, expected = our_weights(learner), weights_of(reference.policy, reference.critic)
    gaps: dict[str, float] = {}
    for one, other in zip(ours, theirs, strict=True):
        for name, gap in step_gaps(one, other).items():
            gaps[name] = max(gap, gaps.get(name, 0.0))
    return gaps | weight_gaps(start, found, expected), found


def weight_gaps(start: dict[str, Tensor], found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Of how far all weights have moved together.

    Not the largest of one: AdamW divides by √v + 1e-8, so that the last bit of a gradient that is almost 0 shows in the
    eighth digit of its weight, on some processors and not on others. Gradients are compared one by one.
    """
    gaps = {}
    for part in ("policy", "critic"):
        names = [name for name in start if name.startswith(part)]
        if names:
            moved = [torch.cat([(w[n] - start[n]).flatten() for n in names]) for w in (found, expected)]
            gaps[f"{part} weights"] = float((moved[0] - moved[1]).norm() / moved[1].norm().clamp(min=1e-12))
    return gaps


def step_gaps(ours: Ours, theirs: Step) -> dict[str, float]:
    gaps = {"rewards": apart(ours.batch.reward, torch.tensor([row.reward for row in theirs.rows], dtype=torch.float64))}
    gaps["rows in the loss"] = float(ours.batch.is_in_loss.tolist() != [row.is_in_loss for row in theirs.rows])
    gaps["advantages"] = apart(ours.batch.advantage.flat, torch.cat([row.advantage for row in theirs.rows]))
    gaps["π_old"] = apart(ours.batch.logp_old.flat, torch.cat([row.logp_old for row in theirs.rows]))
    for name, value in theirs.metrics.items():
        gaps[name] = abs(ours.metrics[name] - value) / max(1.0, abs(value))
    unknown = {"policy/kl_ref", "policy/positive_nll", "critic/loss"} & ours.metrics.keys() - theirs.metrics.keys()
    assert not unknown, f"{unknown}: terms of our loss that the reference does not have"
    for part in ("policy", "critic"):
        both = getattr(ours, f"{part}_gradients"), getattr(theirs, f"{part}_gradients")
        gaps[f"{part} updates"] = abs(len(both[0]) - len(both[1]))
        for one, other in zip(*both, strict=False):
            gap = apart(
                torch.cat([x.flatten() for x in one.values()]), torch.cat([x.flatten() for x in other.values()])
            )
            gaps[f"{part} gradients"] = max(gap, gaps.get(f"{part} gradients", 0.0))
    return gaps


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    assert ours.shape == theirs.shape, f"{list(ours.shape)} and {list(theirs.shape)}"
    if not theirs.numel():
        return 0.0
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))
