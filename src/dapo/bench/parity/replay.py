"""The same recorded rollouts through TRL's GRPOTrainer and through our update: every loss and every gradient."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.bench.parity.cases import CASES, LONGEST, PROMPTS, RESPONSES, ROWS, STEPS, Case
from dapo.bench.step_plan import CHARACTERS, tokenizer
from dapo.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    Named = dict[str, Tensor]

    from dapo.config.schema import Config
    from dapo.learner.learner import Learner
    from dapo.learner.moments import Moments
    from dapo.models.policy import Policy
    from dapo.types import Completion, Group, Judgement

LOSS, GRADIENT = 1e-5, 1e-4  # of the case's largest loss; of the gradient's norm
MOVE = 1e-3  # of the largest move, for 99 weights of 100: AdamW moves by the sign where a gradient is rounding noise
NO_TRL = "Name an interpreter that has TRL; `make test-peers` makes one in .venv/peers/bin/python."
PAD, EOS = 0, 1
WORDS = ["<pad>", "<eos>", "<unk>", *CHARACTERS]


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update: its loss, its gradient as the optimizer gets it, and how far it moved the weights."""

    loss: float
    gradient: Named
    weights: Named  # after it


@dataclass(frozen=True, slots=True)
class Gap:
    """How far apart the sides are in a case."""

    case: Case
    loss: float
    gradient: float
    move: float | None  # a factor leaves AdamW's moves as they are, but not quite
    updates: int
    clipped: float  # share of the tokens whose ratio left the clip, in our updates

    @property
    def is_equal(self) -> bool:
        return self.loss <= LOSS and self.gradient <= GRADIENT and (self.move or 0.0) <= MOVE

    @property
    def is_as_told(self) -> bool:
        return self.is_equal != (self.case.differs == "other")


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the peer has done, in a folder a case, and the rollouts that it did it with."""

    steps: list[list[Group]]
    cases: dict[Path, Case]
    versions: str


def replay(folder: Path, shipped: dict[str, Any], peer_python: str, peer_minutes: float) -> Replayed:
    """Record rollouts, and put them through the peer in every case."""
    from transformers.utils import logging

    from dapo.bench.parity import trl_side as trl_parity
    from dapo.bench.peer_process import run_peer

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    steps = record(folder)
    cases = {folder / f"case-{number}": case for number, case in enumerate(CASES)}
    for place, case in cases.items():
        write_case(place, case, shipped)
    plan = {"threads": 1, "cases": [place.name for place in cases]}
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    reason, _ = run_peer(peer_python, Path(trl_parity.__file__), folder, threads=1, minutes=peer_minutes)
    versions = folder / "versions.json"
    if not versions.exists():
        raise ConfigError(f"--peer-python {peer_python}: TRL did not run: {reason}.", remedy=NO_TRL)
    return Replayed(steps, cases, json.loads(versions.read_text(encoding="utf-8")))


# ------------------------------------------------------------------ what is recorded


def record(folder: Path) -> list[list[Group]]:
    """A reference model, a policy with other weights, and what the policy wrote, into files that both sides read."""
    import torch
    from safetensors.torch import save_file

    from dapo.models.load import load_policy

    save_models(folder)
    policy = load_policy(str(folder / "policy"), dtype=torch.float32, device="cpu", is_fused=False)
    save_file(dict(policy.base.state_dict()), folder / "policy.safetensors")
    steps = [groups_of(policy, step) for step in range(STEPS)]
    ends = [c.tokens[-1] for groups in steps for group in groups for c in group.completions if c.is_truncated]
    assert PAD not in ends, "TRL takes a response truncated after a padding token for a finished one"
    told = [[told_of(group) for group in groups] for groups in steps]
    (folder / "rollouts.json").write_text(json.dumps(told), encoding="utf-8")
    return steps


def save_models(folder: Path) -> None:
    """The policy is near the reference, as a policy in training is: we clamp k3 of a token to 10, TRL does not."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=PAD, bos_token_id=None, eos_token_id=EOS,
        initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    for name in ("reference", "policy"):
        model.save_pretrained(folder / name)
        tokenizer(WORDS, "<eos>").save_pretrained(folder / name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))


def groups_of(policy: Policy, step: int) -> list[Group]:
    """Prompts of uneven length, responses that end or are truncated; the second group's rewards are equal."""
    from dapo.rollout.engine import NoiseKey, Request, SamplingParams
    from dapo.rollout.plain.engine import PlainEngine
    from dapo.types import Group, Problem

    questions = [f"{11 + 7 * step}+{'3' * (p + 1)}=" for p in range(PROMPTS)]
    prompts = [tuple(policy.tokenizer.encode(question)) for question in questions]
    engine = PlainEngine(policy, sampling=SamplingParams(temperature=1.0), max_concurrent=ROWS, max_tokens=2 * LONGEST)
    engine.submit(
        [
            Request(p * RESPONSES + i, prompts[p], NoiseKey(0, "train", f"{step}/{p}", 0, i), LONGEST, group=p)
            for p in range(PROMPTS)
            for i in range(RESPONSES)
        ]
    )
    written: dict[int, Completion] = {}
    while engine.n_in_flight or engine.n_waiting:
        written |= {request.id: completion for request, completion in engine.advance()}
    groups = []
    for p, (question, prompt) in enumerate(zip(questions, prompts, strict=True)):
        completions = tuple(written[p * RESPONSES + i] for i in range(RESPONSES))
        judged = tuple(judgement(completion, p) for completion in completions)
        groups.append(Group(Problem(f"{step}/{p}", question, ""), 0, prompt, completions, judged))
    return groups


def judgement(completion: Completion, group: int) -> Judgement:
    """±1 by whether it has few digits; the second group all alike, the third graded."""
    from dapo.types import Judgement, Verdict

    fraction = sum(map(str.isdigit, completion.text)) / len(completion.tokens)
    parts = {"length": len(completion.tokens) / LONGEST if group != 3 else 0.5}  # which is equal in the last group
    if group == 1:
        return Judgement(Verdict.WRONG, -1.0, parts=parts)
    if group == 2:
        return Judgement(Verdict.WRONG, fraction, graded=True, parts=parts)
    is_right = fraction < 0.2
    return Judgement(Verdict.CORRECT if is_right else Verdict.WRONG, 1.0 if is_right else -1.0, parts=parts)


def told_of(group: Group) -> dict[str, Any]:
    responses = [
        {"tokens": completion.tokens.tolist(), "logp": completion.logp.tolist(), "reward": judged.value, **judged.parts}
        for completion, judged in zip(group.completions, group.judgements, strict=True)
    ]
    return {"prompt": group.problem.question, "prompt_tokens": group.prompt_tokens, "responses": responses}


# ------------------------------------------------------------------ our side


def write_case(folder: Path, case: Case, shipped: dict[str, Any]) -> None:
    import yaml

    settings = shipped | case.settings | {"model_name_or_path": str(folder.parent / "reference")}
    folder.mkdir()
    (folder / "trl.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    if case.updates_per_step > 1:
        config = imported(folder)
        rows = [[row for rows in our_update_rows(config, step=1 + step) for row in rows] for step in range(STEPS)]
        (folder / "update_rows.json").write_text(json.dumps(rows), encoding="utf-8")


def imported(folder: Path) -> Config:
    """The case's config as `dapo import-config` makes it."""
    import yaml

    from dapo.peers.translate import check, translate
    from dapo.trainer.api import with_overrides

    resolved = check(translate(folder / "trl.yaml"), folder.name)
    weights = yaml.safe_load((folder / "trl.yaml").read_text(encoding="utf-8")).get("reward_weights", [])
    # Which function is which is not in the file: the first is the verifier, the second what it records as a part.
    parts = [f"rewards.parts={{length = {{function = 'recorded:length', weight = {w}}}}}" for w in weights[1:]]
    return with_overrides(resolved, ["model.device=cpu", "model.dtype=float32", *parts]).config


def our_updates(
    folder: Path, config: Config, steps: list[list[Group]], theirs: list[Update]
) -> tuple[list[Update], float]:
    """The updates that training runs, on the recorded groups; and the share of tokens that the clip held."""
    import torch

    from dapo.distributed.world import ALONE
    from dapo.learner.batch import make_batch
    from dapo.learner.learner import make_learner
    from dapo.learner.update import update_policy
    from dapo.trainer.assemble import make_policy

    start = str(folder.parent / "policy")
    policy = make_policy(config, start, torch.float32, "cpu")
    learner = make_learner(config, policy, start, None, torch.float32, "cpu", ALONE)
    clipped = []
    with watched(learner, theirs) as updates:
        for number, groups in enumerate(steps, start=1):
            batch = make_batch(groups, config, policy.dtype)
            metrics = update_policy(learner, batch, config, step=number)
            clipped.append(metrics["clip/low"] + metrics["clip/high"] + metrics["clip/dual"])
    return updates, sum(clipped) / len(clipped)


class WatchedMoments:
    """Notes each update's gradient on its way to the real moments, its loss, and the weights that come of it.

    The next update then starts from the peer's weights: AdamW makes a whole move of a gradient that is rounding noise,
    and what is compared after it would be how noise spreads.
    """

    def __init__(self, moments: Moments, losses: list[float], theirs: list[Update]) -> None:
        self.moments, self.losses, self.theirs = moments, losses, theirs
        self.updates: list[Update] = []

    def update(self, masters: Mapping[str, Tensor], lr: float) -> None:
        named = {name.removeprefix("model."): master for name, master in masters.items()}
        gradient = {name: master.grad.clone() for name, master in named.items() if master.grad is not None}
        self.moments.update(masters, lr)
        weights = {name: master.detach().clone() for name, master in named.items()}
        for name, master in named.items():
            master.copy_(self.theirs[len(self.updates)].weights[name])
        self.updates.append(Update(sum(self.losses), gradient, weights))
        self.losses.clear()


@contextmanager
def watched(learner: Learner, theirs: list[Update]) -> Iterator[list[Update]]:
    from dapo.learner import update as module

    losses: list[float] = []
    loss_of = module.microbatch_loss

    def noted(*parts: Any, **more: Any) -> Tensor:
        loss = loss_of(*parts, **more)
        losses.append(float(loss.detach()))
        return loss

    moments: Any = WatchedMoments(learner.optimizer.moments, losses, theirs)
    learner.optimizer.moments, module.microbatch_loss = moments, noted
    try:
        yield moments.updates
    finally:
        module.microbatch_loss = loss_of


# ------------------------------------------------------------------ side by side


def their_updates(folder: Path) -> list[Update]:
    from safetensors.torch import load_file

    parts: dict[tuple[int, str], Named] = {}
    for path, tensor in load_file(folder / "trl.safetensors").items():
        number, part, name = path.split("/", 2)
        parts.setdefault((int(number), part), {})[name] = tensor
    return [
        Update(float(parts[number, "loss"][""]), parts[number, "gradient"], parts[number, "weights"])
        for number in range(len(parts) // 3)
    ]


def compare(folder: Path, case: Case, steps: list[list[Group]]) -> Gap:
    """Both sides' updates one by one; where a factor between them is known, after it."""
    config = imported(folder)
    theirs = their_updates(folder)
    ours, clipped = our_updates(folder, config, steps, theirs)
    assert len(ours) == len(theirs), f"{case.name}: {len(ours)} updates of ours, {len(theirs)} of TRL"
    factors = [
        factor for number, groups in enumerate(steps, 1) for factor in known_factors(case, config, number, groups)
    ]
    largest = max(abs(update.loss) for update in theirs)
    before = [policy_weights(folder), *(update.weights for update in theirs)]
    moves = [(a.weights, b.weights, start) for a, b, start in zip(ours, theirs, before, strict=False)]
    triples = list(zip(ours, theirs, factors, strict=True))
    return Gap(
        case,
        loss=max(abs(a.loss * f - b.loss) for a, b, f in triples) / largest,
        gradient=max(apart(a.gradient, b.gradient, f) for a, b, f in triples),
        move=max(moved_apart(*three) for three in moves) if case.differs not in ("rows", "tokens") else None,
        updates=len(ours),
        clipped=clipped,
    )


def policy_weights(folder: Path) -> Named:
    from safetensors.torch import load_file

    return load_file(folder.parent / "policy.safetensors")


def known_factors(case: Case, config: Config, step: int, groups: list[Group]) -> list[float]:
    """Theirs / ours in each update of a step, where the definitions differ by a factor; 1 where they do not."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.tokens) for completion in completions]
    ours = our_update_rows(config, step=step)
    match case.differs:
        case "rows":
            factors = [1 - sum(completion.is_truncated for completion in completions) / len(completions)]
        case "tokens":
            factors = [len(ours) * sum(lengths[row] for row in rows) / sum(lengths) for rows in ours]
        case _:
            factors = [1.0] * len(ours)
    return factors * config.train.epochs_per_step


def our_update_rows(config: Config, *, step: int) -> list[list[int]]:
    """The rows of each update of a step, as we train on them in its first epoch."""
    from dapo.learner.batch import split_into_minibatches

    minibatches = split_into_minibatches(
        PROMPTS, config.train.updates_per_step, seed=config.train.seed, step=step, epoch=0
    )
    return [[group * RESPONSES + i for group in groups for i in range(RESPONSES)] for groups in minibatches]


def apart(ours: Named, theirs: Named, factor: float) -> float:
    """The norm of the difference, of the norm of theirs; all weights together."""
    assert ours.keys() == theirs.keys(), f"gradients of {sorted(ours.keys() ^ theirs.keys())} on one side only"
    one, other = joined(ours, theirs), joined(theirs, theirs)
    return float((one * factor - other).norm() / other.norm())


def moved_apart(ours: Named, theirs: Named, start: Named) -> float:
    """The largest difference of 99 weights of 100, of the largest move; 0 where nobody moves."""
    begin = joined(start, theirs)
    one, other = joined(ours, theirs) - begin, joined(theirs, theirs) - begin
    difference, largest = float((one - other).abs().quantile(0.99)), float(other.abs().max())
    return difference / largest if largest else float(difference > 0)


def joined(named: Named, order: Named) -> Tensor:
    import torch

    return torch.cat([named[name].flatten().double() for name in order])
