"""One training step as the papers write it: slow, padded, in float64, every response on its own.

Nothing here is shared with `dapo.trainer` or `dapo.algorithms`: no packing, no micro-batches, no shared prompts, no
pass that does two things at once. Settings come as a plain dictionary from key to value. Equation numbers are those of
the DAPO paper (arXiv:2503.14476) unless another paper is named.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dapo.types import Group, StopReason, Verdict
from policy_losses import FORMULAS, Response, ratio_of

Keys = dict[str, Any]
Gradients = dict[str, Tensor]


@dataclass
class Row:
    """A response o_i to the question of group `group`."""

    group: int
    problem: str
    prompt: list[int]
    text: list[int]  # everything after the prompt; of an episode what the environment said too
    tokens: list[int]  # those of the text that the model drew, T of them
    places: list[int]  # [T] where in the text they stand
    logp_engine: Tensor  # [T]
    stop: StopReason
    value: float  # what the verifier gave
    is_correct: bool
    parts: dict[str, float] = field(default_factory=dict)  # beside the verifier's own; what is added, by name
    reward: float = 0.0
    is_in_loss: bool = True
    logp_old: Tensor = field(default_factory=lambda: torch.empty(0))  # [T], as all below
    logp_ref: Tensor = field(default_factory=lambda: torch.empty(0))
    advantage: Tensor = field(default_factory=lambda: torch.empty(0))
    value_old: Tensor = field(default_factory=lambda: torch.empty(0))
    target: Tensor = field(default_factory=lambda: torch.empty(0))  # R̂ of the critic
    outcome: Tensor = field(default_factory=lambda: torch.empty(0))  # the return with λ = 1


@dataclass
class Step:
    """What one step did, update by update."""

    rows: list[Row]
    metrics: dict[str, float]
    policy_gradients: list[Gradients]  # before clipping
    critic_gradients: list[Gradients]


class Critic(nn.Module):
    """V(s_t): a transformer without its output head, and a linear layer to one number."""

    def __init__(self, backbone: Any, value_head: nn.Linear) -> None:
        super().__init__()
        self.backbone, self.value_head = backbone, value_head


class ReferenceTrainer:
    """Policy, optional critic and optional reference policy: library models with their own attention."""

    def __init__(self, keys: Keys, policy: Any, reference: Any, critic: Critic | None) -> None:
        self.keys, self.policy, self.reference, self.critic = keys, policy, reference, critic
        self.has_fitted_head = False
        self.policy_adam = adam(policy, keys)
        self.critic_adam = adam(critic, keys) if critic is not None else None

    def step(self, groups: Sequence[Group], number: int) -> Step:
        """Training step `number` = 1, 2, … on these groups."""
        keys, rows = self.keys, rows_of(groups, self.keys)
        if keys["algorithm.advantage"] == "group":
            group_advantages(rows, keys)
        elif keys["algorithm.advantage"] == "none":
            for row in rows:
                row.advantage = torch.zeros(len(row.tokens))
        self.score(rows)
        if self.critic is not None:
            gae_advantages(rows, keys)
        metrics = self.learn_from_teacher(rows)
        share, policy_steps, critic_steps = share_of_rate(keys, number), [], []
        lr, critic_lr = share * keys["train.lr"], share * critic_rate(keys)
        for epoch in range(keys["train.epochs_per_step"]):
            for chosen in minibatches(len(groups), keys, number, epoch):
                update = [row for row in rows if row.group in chosen and row.is_in_loss]
                if not update:
                    continue
                if self.critic is not None:
                    critic_steps.append(self.update_critic(update, critic_lr))
                policy_steps.append(self.update_policy(update, lr))
        done = Step(rows, metrics | {"lr": lr, "updates": len(policy_steps)}, [], [])
        for losses, gradients in policy_steps:
            done.policy_gradients.append(gradients)
            add(done.metrics, losses, "policy/", len(policy_steps))
        for losses, gradients in critic_steps:
            done.critic_gradients.append(gradients)
            add(done.metrics, losses, "critic/", len(critic_steps))
        if self.critic is not None:
            done.metrics["critic/explained_variance"] = explained_variance([row for row in rows if row.is_in_loss])
        return done

    def learn_from_teacher(self, rows: list[Row]) -> dict[str, float]:
        """On-policy distillation (arXiv:2306.13649): each token's own share of the reverse KL, as a reward of its own.

        Returns the KL to the reference over all tokens that were drawn, where it is no term of the loss.
        """
        place, beta = self.keys["algorithm.kl.place"], self.keys["algorithm.kl.coefficient"]
        if not beta or place == "loss":
            return {}
        if place == "advantage":
            for row in rows:
                row.advantage = row.advantage - beta * (row.logp_old - row.logp_ref)
        student = torch.cat(log_probs(self.policy, rows, self.keys["sampling.temperature"])).detach()
        return {"policy/kl_ref": float((student - torch.cat([row.logp_ref for row in rows])).mean())}

    def pretrain(self, groups: Sequence[Group], number: int) -> tuple[float, float | None]:
        """VAPO's value pretraining, step `number`: Monte-Carlo returns of the fixed policy, nothing filtered.

        Returns the variance of what came out that the critic explained before, of problems that it had never seen; and
        the mean loss of its updates, where it had any.
        """
        keys = self.keys | {"shaping.overlong_filter": False, "algorithm.gae.lam_critic": 1.0}
        keys |= {"algorithm.kl.coefficient": 0.0, "algorithm.gae.whiten": False}
        rows = rows_of(groups, keys)
        self.score(rows)
        gae_advantages(rows, keys)
        usable = [row for row in rows if row.is_in_loss]
        new = [row for row in usable if groups[row.group].visit == 0]
        explained = explained_variance(new) if new else 0.0
        if usable and not self.has_fitted_head:
            self.has_fitted_head = True
            self.fit_head(usable)
            self.score(rows)
        in_step = keys["sampling.prompts_per_step"] * keys["sampling.responses_per_prompt"]
        N = math.ceil(keys["algorithm.critic.pretrain_responses"] / in_step)
        W = min(keys["train.warmup_steps"], math.ceil(N / 4))
        lr = critic_rate(keys) * min(1, number / max(1, W))
        losses = []
        for epoch in range(keys["algorithm.critic.pretrain_epochs"]):
            for chosen in minibatches(len(groups), keys, -number, epoch):
                update = [row for row in rows if row.group in chosen and row.is_in_loss]
                if update:
                    losses.append(self.update_critic(update, lr)[0]["loss"])
        return explained, sum(losses) / len(losses) if losses else None

    @torch.no_grad()
    def fit_head(self, rows: list[Row]) -> None:
        """The linear regression of what came out on the critic's features, its penalty chosen over four folds."""
        assert self.critic is not None
        hidden = hidden_of(self.critic.backbone, rows)
        X = torch.cat([torch.cat([x, torch.ones(len(x), 1)], dim=1) for x in hidden])
        y = torch.cat([row.outcome for row in rows])
        folds = [blake2b(row.problem.encode(), digest_size=1).digest()[0] % 4 for row in rows]
        fold = torch.cat([torch.full((len(row.tokens),), f) for row, f in zip(rows, folds, strict=True)])
        strengths = [10.0**k * float((X**2).sum(dim=0).mean()) for k in range(1, -7, -1)]

        def miss(s: float) -> float:
            return sum(float(((y - X @ ridge(X[fold != f], y[fold != f], s))[fold == f] ** 2).sum()) for f in range(4))

        w = ridge(X, y, min([math.inf, *strengths], key=miss))
        self.critic.value_head.weight.copy_(w[None, :-1])
        self.critic.value_head.bias.copy_(w[-1:])

    @torch.no_grad()
    def score(self, rows: list[Row]) -> None:
        """π_old, π_ref and V before anything has moved."""
        temperature = self.keys["sampling.temperature"]
        for row, logp in zip(rows, log_probs(self.policy, rows, temperature), strict=True):
            row.logp_old = row.logp_engine if self.keys["algorithm.old_logp"] == "bypass" else logp
        if self.keys["algorithm.kl.coefficient"]:
            for row, logp in zip(rows, log_probs(self.reference, rows, temperature), strict=True):
                row.logp_ref = logp
        if self.critic is not None:
            for row, value in zip(rows, values(self.critic, rows), strict=True):
                row.value_old = value

    def update_policy(self, rows: list[Row], lr: float) -> tuple[dict[str, float], Gradients]:
        keys = self.keys
        logps = log_probs(self.policy, rows, keys["sampling.temperature"])
        surrogate = mean([policy_loss(row, logp, keys) for row, logp in zip(rows, logps, strict=True)], rows, keys)
        loss, said = surrogate, {"loss": surrogate.item()}
        if keys["algorithm.kl.coefficient"] and keys["algorithm.kl.place"] == "loss":  # eq. 4
            d = [kl(logp, row.logp_ref, keys["algorithm.kl.kind"]) for row, logp in zip(rows, logps, strict=True)]
            said["kl_ref"] = mean(d, rows, keys).item()
            loss = loss + keys["algorithm.kl.coefficient"] * mean(d, rows, keys)
        if keys["algorithm.entropy_coefficient"]:
            H = [
                -(torch.exp(x) * x).sum(dim=-1) for x in log_softmaxes(self.policy, rows, keys["sampling.temperature"])
            ]
            loss = loss - keys["algorithm.entropy_coefficient"] * mean(H, rows, keys)
        if keys["algorithm.positive_nll"]:  # VAPO eq. 9–10
            right = [logp for row, logp in zip(rows, logps, strict=True) if row.is_correct]
            nll = -torch.cat(right).mean() if right else torch.zeros(())
            said["positive_nll"] = nll.item()
            loss = loss + keys["algorithm.positive_nll"] * nll
        gradients, norm = descend(self.policy, self.policy_adam, loss, lr, keys)
        return said | {"grad_norm": norm}, gradients

    def update_critic(self, rows: list[Row], lr: float) -> tuple[dict[str, float], Gradients]:
        assert self.critic is not None
        clip, losses = self.keys["algorithm.critic.value_clip"], []
        for row, v in zip(rows, values(self.critic, rows), strict=True):
            error = (v - row.target) ** 2
            if clip is not None:
                near = torch.minimum(torch.maximum(v, row.value_old - clip), row.value_old + clip)
                error = torch.maximum(error, (near - row.target) ** 2)
            losses.append(error / 2)
        loss = mean(losses, rows, self.keys)
        gradients, norm = descend(self.critic, self.critic_adam, loss, lr, self.keys)
        return {"loss": loss.item(), "grad_norm": norm}, gradients


# Rewards


def rows_of(groups: Sequence[Group], keys: Keys) -> list[Row]:
    """Eq. 7 and 13, the controls, and who enters the loss (section 3.4)."""
    rows = []
    for g, group in enumerate(groups):
        judged = verdicts(group, keys)
        for completion, (value, is_correct, parts) in zip(group.completions, judged, strict=True):
            text = completion.tokens.tolist()
            places = [t for t in range(len(text)) if completion.own is None or completion.own[t]]
            row = Row(
                g,
                group.problem.id,
                list(group.prompt_tokens),
                text,
                [text[t] for t in places],
                places,
                torch.tensor([float(completion.logp[t]) for t in places], dtype=torch.float64),
                completion.stop_reason,
                value,
                is_correct,
            )
            row.parts["correct"] = row.value + overlong_penalty(len(row.text), keys)
            for name in keys["rewards.parts"]:
                if name != "correct":
                    row.parts[name] = parts[name] if name in parts else worst(name, [p for _, _, p in judged], keys)
            row.reward = math.fsum(weight(name, keys) * part for name, part in row.parts.items())
            is_filtered = keys["shaping.overlong_filter"] and row.stop is StopReason.LENGTH
            row.is_in_loss = not is_filtered and row.stop is not StopReason.ABORTED and len(row.tokens) > 0
            rows.append(row)
    return rows


def weight(name: str, keys: Keys) -> float:
    return float(keys["rewards.parts"].get(name, {"weight": 1.0})["weight"])


def worst(name: str, group: list[dict[str, float]], keys: Keys) -> float:
    """What stands for a part that could not be measured: the least that it adds to any response of the group."""
    known = sorted((parts[name] for parts in group if name in parts), key=lambda part: weight(name, keys) * part)
    return known[0] if known else 0.0


def verdicts(group: Group, keys: Keys) -> list[tuple[float, bool, dict[str, float]]]:
    pairs = [(one.value, one.verdict is Verdict.CORRECT, dict(one.parts)) for one in group.judgements]
    if keys["rewards.control"] == "negated":
        return [(-value, not right, {name: -part for name, part in parts.items()}) for value, right, parts in pairs]
    if keys["rewards.control"] == "shuffled":
        name = f"control/{keys['train.seed']}/{group.problem.id}/{group.visit}"
        return [pairs[i] for i in shuffled(len(pairs), name)]
    return pairs


def overlong_penalty(length: int, keys: Keys) -> float:
    """Eq. 13 times its weight."""
    weight, buffer, limit = (
        keys[name]
        for name in ("shaping.overlong_penalty", "shaping.overlong_buffer_tokens", "limits.max_response_tokens")
    )
    if not weight or length <= limit - buffer:
        return 0.0
    return weight * (((limit - buffer) - length) / buffer if length <= limit else -1.0)


def shuffled(n: int, name: str) -> list[int]:
    """0 … n−1 in the order of a hash: what a run's order hangs on, so that resuming or importing a run repeats it."""
    return sorted(range(n), key=lambda i: blake2b(f"{name}/{i}".encode(), digest_size=8).digest())


# Advantages


def group_advantages(rows: list[Row], keys: Keys) -> None:
    """Over all responses of a group, those that leave the loss included: eq. 9 of their rewards, or GDPO's.

    GDPO (arXiv:2601.05242): each part by itself as eq. 9 has it, weighted, summed; then the same over the whole step.
    """
    groups = [[row for row in rows if row.group == g] for g in sorted({row.group for row in rows})]
    if keys["rewards.aggregation"] == "normalize_then_sum":
        total = [0.0] * len(rows)
        for name in rows[0].parts:
            alone = [A for group in groups for A in normalized([row.parts[name] for row in group], keys)]
            total = [sum_ + weight(name, keys) * A for sum_, A in zip(total, alone, strict=True)]
        advantages = normalized(total, keys)
    else:
        advantages = [A for group in groups for A in less_baseline([row.reward for row in group], rows, keys)]
        advantages = divided(advantages, rows, keys)
    for row, A in zip((row for group in groups for row in group), advantages, strict=True):
        row.advantage = torch.tensor([A] * len(row.tokens), dtype=torch.float64)
    if keys["algorithm.group.std_over"] == "tokens":
        whiten(rows)


def less_baseline(rewards: list[float], rows: list[Row], keys: Keys) -> list[float]:
    """Of a group: eq. 9, RLOO (arXiv:2402.14740), or REINFORCE++ (arXiv:2501.03262)."""
    if (keys["algorithm.group.baseline"], keys["algorithm.group.std_over"]) == ("group", "group"):
        return normalized(rewards, keys)
    match keys["algorithm.group.baseline"]:
        case "group":
            return normalized(rewards, keys | {"algorithm.group.std": "none"})
        case "leave_one_out":
            return [R - (math.fsum(rewards) - R) / (len(rewards) - 1) for R in rewards]
    everybody = math.fsum(row.reward for row in rows) / len(rows)
    return [R - everybody for R in rewards]


def divided(advantages: list[float], rows: list[Row], keys: Keys) -> list[float]:
    """By the std over the step: of the advantages (ScaleRL, arXiv:2510.13786) or of the rewards (arXiv:2508.08221)."""
    over, std = keys["algorithm.group.std_over"], keys["algorithm.group.std"]
    if over in ("group", "tokens") or std == "none":
        return advantages
    of = torch.tensor(advantages if over == "batch" else [row.reward for row in rows], dtype=torch.float64)
    divisor = float(of.std(correction=int(std == "sample"))) + keys["algorithm.group.eps"]
    return [A / divisor for A in advantages]


def normalized(rewards: list[float], keys: Keys) -> list[float]:
    G, average = len(rewards), math.fsum(rewards) / len(rewards)
    squares = math.fsum((reward - average) ** 2 for reward in rewards)
    divisor = {
        "sample": math.sqrt(squares / (G - 1)) + keys["algorithm.group.eps"],
        "population": math.sqrt(squares / G) + keys["algorithm.group.eps"],
        "none": 1.0,
    }[keys["algorithm.group.std"]]
    return [0.0 if max(rewards) == min(rewards) else (reward - average) / divisor for reward in rewards]


def gae_advantages(rows: list[Row], keys: Keys) -> None:
    """Eq. 2–3; with VAPO's decoupled λ for the targets and its λ of the response's length for the policy."""
    gamma, lam = keys["algorithm.gae.gamma"], keys["algorithm.gae.lam"]
    alpha, lam_critic = keys["algorithm.gae.length_adaptive_alpha"], keys["algorithm.gae.lam_critic"]
    for row in rows:
        length = len(row.tokens)
        if not length:
            row.advantage = row.target = row.outcome = torch.empty(0)
            continue
        reward = torch.zeros(length, dtype=torch.float64)
        reward[-1] = row.reward
        if keys["algorithm.kl.coefficient"] and keys["algorithm.kl.place"] == "reward":
            reward -= keys["algorithm.kl.coefficient"] * kl(row.logp_old, row.logp_ref, keys["algorithm.kl.kind"])
        policy_lam = lam if alpha is None else 1 - 1 / max(alpha * length, keys["algorithm.gae.length_adaptive_floor"])
        row.advantage = gae(reward, row.value_old, gamma, policy_lam)
        row.target = gae(reward, row.value_old, gamma, lam if lam_critic is None else lam_critic) + row.value_old
        row.outcome = gae(reward, row.value_old, gamma, 1.0) + row.value_old
    if keys["algorithm.gae.whiten"]:
        whiten(rows)


def whiten(rows: list[Row]) -> None:
    kept = torch.cat([row.advantage for row in rows if row.is_in_loss] or [torch.empty(0)])
    for row in rows:  # what leaves the loss has no say in it, and no advantage either
        row.advantage = (row.advantage - kept.mean()) / torch.sqrt(kept.var() + 1e-8) * row.is_in_loss


def gae(reward: Tensor, value: Tensor, gamma: float, lam: float) -> Tensor:
    """Â_t = δ_t + γλ Â_{t+1},  δ_t = R_t + γ V(s_{t+1}) − V(s_t), with nothing after the last token."""
    R, V, advantage = reward.tolist(), [*value.tolist(), 0.0], [0.0] * (len(reward) + 1)
    for t in reversed(range(len(R))):
        advantage[t] = R[t] + gamma * V[t + 1] - V[t] + gamma * lam * advantage[t + 1]
    return torch.tensor(advantage[:-1], dtype=torch.float64)


def explained_variance(rows: list[Row]) -> float:
    if not rows:
        return 0.0
    outcome, value = (torch.cat([getattr(row, name) for row in rows]) for name in ("outcome", "value_old"))
    return float(1 - (outcome - value).var() / outcome.var()) if outcome.unique().numel() > 1 else 0.0


# Losses


def policy_loss(row: Row, logp: Tensor, keys: Keys) -> Tensor:
    """[T] The paper's loss, and the importance weight on top."""
    bounds = (keys[f"algorithm.clip.{name}"] for name in ("low", "high", "dual"))
    loss = FORMULAS[keys["algorithm.loss"]](Response(logp, row.logp_old, row.advantage, *bounds))
    if keys["algorithm.correction.cap"] is not None:
        loss = loss * importance_weights(row, keys)
    return loss


def importance_weights(row: Row, keys: Keys) -> Tensor:
    """[T] Truncated, or masked as in IcePop (arXiv:2510.18855); of a token, of the response, of its geometric mean."""
    cap, floor, kind, level = (keys[f"algorithm.correction.{name}"] for name in ("cap", "floor", "kind", "level"))
    of, T = (row.logp_old, row.logp_engine), len(row.tokens)
    rho = {
        "token": lambda: ratio_of(*of),
        "sequence": lambda: ratio_of(of[0].sum(), of[1].sum()).repeat(T),
        "geometric": lambda: ratio_of(of[0].mean(), of[1].mean()).repeat(T),
    }[level]()
    low = 0.0 if floor is None else floor
    if kind == "mask":
        return torch.tensor([w if low <= w <= cap else 0.0 for w in rho.tolist()], dtype=torch.float64)
    return torch.tensor([min(max(w, low), cap) for w in rho.tolist()], dtype=torch.float64)


def kl(logp: Tensor, logp_ref: Tensor, kind: str) -> Tensor:
    d = logp - logp_ref
    estimators: dict[str, Callable[[], Tensor]] = {
        "k1": lambda: d,
        "abs": lambda: d.abs(),
        "k2": lambda: d * d / 2,
        "k3": lambda: (torch.exp((-d).clamp(-20, 20)) - (-d).clamp(-20, 20) - 1).clamp(-10, 10),
    }
    return estimators[kind]()


def mean(losses: list[Tensor], rows: list[Row], keys: Keys) -> Tensor:
    """Of the losses of an update's responses, one tensor each."""
    match keys["algorithm.loss_aggregation"]:
        case "token":  # eq. 12
            return torch.cat(losses).mean()
        case "sequence":  # eq. 5
            return torch.stack([loss.mean() for loss in losses]).mean()
        case "prompt":  # eq. 8
            groups = sorted({row.group for row in rows})
            of = {g: torch.cat([x for x, row in zip(losses, rows, strict=True) if row.group == g]) for g in groups}
            return torch.stack([of[g].mean() for g in groups]).mean()
        case "constant":  # Dr. GRPO, arXiv:2503.20783
            length = keys["algorithm.loss_constant_tokens"] or keys["limits.max_response_tokens"]
            return torch.cat(losses).sum() / (len(rows) * length)
    raise ValueError(keys["algorithm.loss_aggregation"])


# Models


def hidden_of(backbone: Any, rows: list[Row]) -> list[Tensor]:
    """For each row [T, H]: the state before each of its tokens, o_<t and the prompt read."""
    texts = [torch.tensor(row.prompt + row.text) for row in rows]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    is_there = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    hidden = backbone(input_ids=ids, attention_mask=is_there, use_cache=False).last_hidden_state
    return [x[[len(row.prompt) + t - 1 for t in row.places]] for x, row in zip(hidden, rows, strict=True)]


def log_probs(model: Any, rows: list[Row], temperature: float) -> list[Tensor]:
    """For each row [T]: log π(o_t | q, o_<t) at the temperature it was drawn with."""
    everything = log_softmaxes(model, rows, temperature)
    return [x[range(len(row.tokens)), row.tokens] for row, x in zip(rows, everything, strict=True)]


def log_softmaxes(model: Any, rows: list[Row], temperature: float) -> list[Tensor]:
    """For each row [T, V]: log π of every token of the vocabulary."""
    return [torch.log_softmax(model.lm_head(x) / temperature, dim=-1) for x in hidden_of(model.model, rows)]


def values(critic: Critic, rows: list[Row]) -> list[Tensor]:
    return [critic.value_head(hidden)[:, 0] for hidden in hidden_of(critic.backbone, rows)]


# Updates


def adam(module: nn.Module, keys: Keys) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        module.parameters(), lr=0.0, betas=keys["train.betas"], weight_decay=keys["train.weight_decay"], eps=1e-8
    )


def descend(module: nn.Module, optimizer: Any, loss: Tensor, lr: float, keys: Keys) -> tuple[Gradients, float]:
    """One optimizer step; returns the gradient before clipping, and its norm."""
    optimizer.zero_grad()
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    norm = nn.utils.clip_grad_norm_(module.parameters(), keys["train.max_grad_norm"])
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return gradients, float(norm)


def share_of_rate(keys: Keys, k: int) -> float:
    """Step k of N: k/W of the rate up to step W, all of it there (without warm-up in step 1), 0 after step N."""
    W, N = keys["train.warmup_steps"], keys["train.steps"]
    if k < W:
        return k / W
    top = max(1, W)
    done = (k - top) / (N + 1 - top)
    return {"none": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[keys["train.lr_decay"]]


def critic_rate(keys: Keys) -> float:
    lr = keys["algorithm.critic.lr"]
    return 2 * keys["train.lr"] if lr is None else lr


def ridge(X: Tensor, y: Tensor, strength: float) -> Tensor:
    """Least squares of a longer system: a line √s for every feature but the constant, which is to come out 0."""
    H = X.shape[1]
    if math.isinf(strength):
        return torch.cat([torch.zeros(H - 1, dtype=X.dtype), y.mean()[None]])
    longer = torch.cat([X, math.sqrt(strength) * torch.eye(H, dtype=X.dtype)[:-1]])
    return torch.linalg.lstsq(longer, torch.cat([y, torch.zeros(H - 1, dtype=X.dtype)])[:, None]).solution[:, 0]


def minibatches(n_groups: int, keys: Keys, number: int, epoch: int) -> list[set[int]]:
    """Groups shuffled by seed, step and epoch, cut into mini-batches of nearly equal size."""
    order = shuffled(n_groups, f"minibatch/{keys['train.seed']}/{number}/{epoch}")
    n = min(n_groups, keys["train.updates_per_step"])
    borders = [i * n_groups // n for i in range(n)] + [n_groups]
    return [set(order[a:b]) for a, b in pairwise(borders)]


def add(metrics: dict[str, float], losses: dict[str, float], prefix: str, n: int) -> None:
    for name, value in losses.items():
        metrics[prefix + name] = metrics.get(prefix + name, 0.0) + value / n
