"""Our algorithms beside verl's published functions on the same seeded inputs: values and gradients.

    python tools/verl_functions.py              # the verl that this interpreter has
    python tools/verl_functions.py CHECKOUT     # the folder of a verl checkout

Needs torch and what `import verl` needs; of ours only src/dapo/algorithms. Nothing of verl is copied or downloaded.
Exits with code 1 where a difference is larger than rounding, 2 where verl cannot be imported.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from dapo.algorithms.advantages import batch_centred, gae, group_advantage, leave_one_out, whiten
from dapo.algorithms.aggregate import constant_norm, sequence_mean, token_mean
from dapo.algorithms.losses import clipped_surrogate, importance_weight, kl_penalty, policy_loss, value_loss
from dapo.algorithms.parts import normalized_contributions

P, G, T = 6, 4, 24
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}  # of each number
CLIPS = [(0.2, 0.2), (0.2, 0.28), (0.1, 0.4), (0.0, 0.0), (0.5, 3.0)]
DUALS = [None, 3.0, 10.0]
MEANS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KINDS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "abs": "abs"}
Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Inputs:
    """Rows of uneven length, one of them empty; log-ratios of which many leave the clip and some the bound of 20."""

    mask: Tensor  # [B, T]
    logp: Tensor
    logp_old: Tensor
    logp_ref: Tensor
    advantage: Tensor
    reward: Tensor  # [B, T], at the last token
    value: Tensor
    value_old: Tensor
    target: Tensor

    @classmethod
    def drawn(cls, seed: int, dtype: torch.dtype) -> Inputs:
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float = 1.0) -> Tensor:
            return scale * torch.randn(P * G, T, generator=generator, dtype=torch.float64)

        lengths = torch.randint(1, T + 1, (P * G,), generator=generator)
        lengths[3], lengths[4] = 0, T
        mask = torch.arange(T) < lengths[:, None]
        logp_old = normal() - 3
        logp = logp_old + normal(0.5) + 30 * (normal() > 2.5)
        reward = torch.where(torch.arange(T) == lengths[:, None] - 1, normal(), 0.0)
        reward[G : 2 * G] = torch.where(reward[G : 2 * G] != 0, -1.0, 0.0)  # a group of equal rewards
        tensors = (logp, logp_old, logp_old + normal(0.5), normal(), reward, normal(), normal(), normal())
        return cls(mask, *(tensor.to(dtype) for tensor in tensors))


@dataclass(frozen=True)
class Row:
    name: str
    remark: str = ""
    known: float = 0.0  # how far a convention that is known takes the two apart


class Actor:
    """The part of verl's actor config that its loss reads."""

    def __init__(self, low: float, high: float, dual: float | None) -> None:
        self.clip_ratio = self.clip_ratio_low = low
        self.clip_ratio_high = high
        self.clip_ratio_c = 1e9 if dual is None else dual  # verl always has one
        self.global_batch_info: dict[str, Any] = {}

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def mean(loss: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Ours for verl's name; `loss` [N], the tokens that the mask keeps."""
    lengths = mask.sum(1)
    n_rows = int((lengths > 0).sum())
    row = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
    match mode:
        case "token-mean":
            return token_mean(loss, total_tokens=int(mask.sum()))
        case "seq-mean-token-mean":  # verl adds 1e-8 to a sequence's length
            return sequence_mean(loss, row, row_tokens=lengths.to(loss.dtype) + 1e-8, total_sequences=n_rows)
        case "seq-mean-token-sum":
            return constant_norm(loss, constant=n_rows)
        case _:
            return constant_norm(loss, constant=n_rows * mask.shape[1])


def with_gradient(loss: Loss, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    value = loss(x)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    return [value.detach(), gradient]


def pairs(verl: Any, inputs: Inputs) -> Iterator[tuple[Row, list[Tensor], list[Tensor]]]:
    """(what, ours, verl's), tensor by tensor."""
    x, mask = inputs, inputs.mask
    weights = mask.to(x.logp.dtype)
    for (low, high), dual, mode in product(CLIPS, DUALS, MEANS):

        def ours(logp: Tensor, low: float = low, high: float = high, dual: Any = dual, mode: str = mode) -> Tensor:
            loss = clipped_surrogate(
                logp[mask], x.logp_old[mask], x.advantage[mask], clip_low=low, clip_high=high, dual_clip=dual
            )
            return mean(loss, mask, mode)

        def theirs(logp: Tensor, low: float = low, high: float = high, dual: Any = dual, mode: str = mode) -> Tensor:
            loss: Tensor = verl.compute_policy_loss_vanilla(
                x.logp_old, logp, x.advantage, weights, mode, Actor(low, high, dual)
            )[0]
            return loss

        remark = "verl adds 1e-8 to a length; so does this comparison" if mode == "seq-mean-token-mean" else ""
        yield Row(f"policy loss, {mode}", remark), with_gradient(ours, x.logp), with_gradient(theirs, x.logp)

    def truncated(logp: Tensor) -> Tensor:
        loss = clipped_surrogate(logp[mask], x.logp_old[mask], x.advantage[mask], clip_low=0.2, clip_high=0.28)
        weight = importance_weight(x.logp_old[mask], x.logp_ref[mask], cap=2.0)
        return mean(loss * weight, mask, "token-mean")

    def their_truncated(logp: Tensor) -> Tensor:
        weight = torch.exp(x.logp_old - x.logp_ref).clamp(max=2.0)
        loss: Tensor = verl.compute_policy_loss_vanilla(
            x.logp_old, logp, x.advantage, weights, "token-mean", Actor(0.2, 0.28, None), weight
        )[0]
        return loss

    row = Row("policy loss, importance weights", "the weights are ours on both sides")
    yield row, with_gradient(truncated, x.logp), with_gradient(their_truncated, x.logp)
    yield from other_losses(verl, x, weights)
    yield from corrections(x, weights)
    yield from advantages(verl, x, weights)
    for kind, name in KINDS.items():
        yield (
            Row(f"KL, {kind}"),
            with_gradient(lambda logp, kind=kind: kl_penalty(logp[mask], x.logp_ref[mask], kind=kind), x.logp),
            with_gradient(lambda logp, name=name: verl.kl_penalty(logp, x.logp_ref, name)[mask], x.logp),
        )
    for clip, mode in product((0.2, 0.5, 1e9), MEANS):
        yield (
            Row("value loss"),
            with_gradient(
                lambda v, clip=clip, mode=mode: mean(
                    value_loss(v[mask], x.value_old[mask], x.target[mask], clip=clip), mask, mode
                ),
                x.value,
            ),
            with_gradient(
                lambda v, clip=clip, mode=mode: verl.compute_value_loss(v, x.target, x.value_old, weights, clip, mode)[
                    0
                ],
                x.value,
            ),
        )


def other_losses(verl: Any, x: Inputs, weights: Tensor) -> Iterator[tuple[Row, list[Tensor], list[Tensor]]]:
    """CISPO, GSPO (verl's is the form per token, one Â a response makes them one) and REINFORCE."""
    mask = x.mask
    lengths = [n for n in mask.sum(1).tolist() if n]
    one_each = x.advantage[:, :1].expand_as(x.advantage)
    verl.ActorConfig = Actor  # its losses ask for the type of their config
    near = x.logp_old + (x.logp - x.logp_old).clamp(-2, 2)  # verl bounds the log-ratio of a response at 10, we at ±20
    for name, low, high, mode in (
        *(("cispo", low, high, mode) for (low, high), mode in product([*CLIPS, (10.0, 4.0)], MEANS)),
        *(("gspo", low, high, "seq-mean-token-mean") for low, high in [(3e-4, 4e-4), (0.1, 0.4)]),
        *(("gspo-token", low, high, "seq-mean-token-mean") for low, high in [(3e-4, 4e-4), (0.1, 0.4)]),
        *(("reinforce", 0.2, 0.2, mode) for mode in MEANS),
    ):
        advantage = one_each if name == "gspo" else x.advantage

        def ours(
            logp: Tensor,
            name: str = name,
            low: float = low,
            high: float = high,
            mode: str = mode,
            a: Tensor = advantage,
        ) -> Tensor:
            clip_low = None if low >= 1 else low
            each = policy_loss(name, logp[mask], x.logp_old[mask], a[mask], lengths, clip_low=clip_low, clip_high=high)
            return mean(each, mask, mode)

        def theirs(
            logp: Tensor,
            name: str = name,
            low: float = low,
            high: float = high,
            mode: str = mode,
            a: Tensor = advantage,
        ) -> Tensor:
            functions = {"cispo": verl.compute_policy_loss_cispo, "reinforce": verl.compute_policy_loss_reinforce}
            function = functions.get(name, verl.compute_policy_loss_gspo)
            loss: Tensor = function(x.logp_old, logp, a, weights, mode, Actor(low, high, None))[0]
            return loss

        start = near if name.startswith("gspo") else x.logp
        remark = "verl's ε_low of 1 and more is our none" if name == "cispo" else ""
        yield Row(f"{name}, {mode}", remark), with_gradient(ours, start), with_gradient(theirs, start)


def corrections(x: Inputs, weights: Tensor) -> Iterator[tuple[Row, list[Tensor], list[Tensor]]]:
    """Truncated and masked importance weights, per token and per response."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    mask = x.mask
    lengths = [n for n in mask.sum(1).tolist() if n]
    for level, (floor, cap) in product(("token", "sequence"), ((None, 2.0), (None, 1.1), (0.5, 5.0))):
        kind: Any = "truncate" if floor is None else "mask"
        flat = (x.logp_old[mask], x.logp_ref[mask], lengths)
        ours = importance_weight(*flat, cap=cap, floor=floor, kind=kind, level=level)  # type: ignore[arg-type]
        bounds: Any = cap if floor is None else f"{floor}_{cap}"
        their, _ = compute_rollout_correction_weights(x.logp_old - x.logp_ref, weights, level, bounds)
        yield Row(f"importance weights, {kind}, {level}"), [ours], [their[mask]]


def advantages(verl: Any, x: Inputs, weights: Tensor) -> Iterator[tuple[Row, list[Tensor], list[Tensor]]]:
    index = torch.arange(P).repeat_interleave(G).numpy()
    score = x.reward.sum(1).view(P, G)
    for std in ("sample", "none"):
        ours = group_advantage(score, std=std, eps=1e-6).flatten()[:, None] * weights
        theirs, _ = verl.compute_grpo_outcome_advantage(x.reward.clone(), weights, index, 1e-6, std != "none")
        yield Row(f"group advantage, std {std}"), [ours], [theirs]
    yield gdpo(verl, x, weights, index)
    rloo = leave_one_out(score).flatten()[:, None] * weights
    for function in (verl.compute_rloo_outcome_advantage, verl.compute_rloo_vectorized_outcome_advantage):
        yield Row("leave-one-out"), [rloo], [function(x.reward.clone(), weights, index)[0]]
    known = 4e-8 / int(x.mask.sum())
    whitened = "verl adds 1e-8 to the number of tokens: 1e-10 and less"
    plus = [group_advantage(score, std="none"), batch_centred(score)]
    baseline, batch = (whiten((y.flatten()[:, None] * weights).flatten(), x.mask.flatten()) for y in plus)
    their_baseline, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(x.reward.clone(), weights, index)
    yield Row("REINFORCE++, baseline", whitened, known), [baseline], [their_baseline.flatten()]
    gamma_1 = type("Config", (), {"gamma": 1.0})()
    their_batch, _ = verl.compute_reinforce_plus_plus_outcome_advantage(x.reward.clone(), weights, gamma_1)
    yield Row("REINFORCE++", whitened, known), [batch], [their_batch.flatten()]
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (1.0, 0.0)):
        advantage, ret = gae(x.reward, x.value, x.mask, gamma=gamma, lam=lam)
        whitened = whiten(advantage.flatten(), x.mask.flatten()).view_as(advantage)
        their_advantage, their_ret = verl.compute_gae_advantage_return(x.reward, x.value, weights, gamma, lam)
        yield Row("GAE, returns"), [ret[x.mask]], [their_ret[x.mask]]
        known = 4e-8 / int(x.mask.sum())
        row = Row("GAE, whitened advantages", "verl adds 1e-8 to the number of tokens: 1e-10 and less", known)
        yield row, [whitened[x.mask]], [their_advantage[x.mask]]


def gdpo(verl: Any, x: Inputs, mask: Tensor, index: Any) -> tuple[Row, list[Tensor], list[Tensor]]:
    """Two parts, each normalized in its group; verl whitens their sum over tokens, so that we do here as well."""
    parts = {"first": (8 * x.value[:, 0]).round() / 8, "second": (x.value[:, 1] > 0).to(x.value.dtype)}
    shares = [1.0, 0.5]
    theirs, _ = verl.compute_gdpo_outcome_advantage(
        x.reward, mask, index, 1e-6,
        config={"gdpo_reward_keys": list(parts), "gdpo_reward_weights": shares},
        non_tensor_batch={name: part.numpy() for name, part in parts.items()},
        batch={"prompts": mask[:, :1], "attention_mask": torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1).long()},
    )  # fmt: skip
    reward = torch.stack(list(parts.values())).view(2, P, G)
    added = normalized_contributions(reward, torch.tensor(shares, dtype=reward.dtype), std="sample", eps=1e-6)
    token = added.sum(dim=0).flatten()[:, None].expand(P * G, T)
    ours = whiten(token.flatten(), x.mask.flatten()).view(P * G, T)
    row = Row("GDPO, two parts, over tokens", "verl computes it in float32, and whitens over tokens", 1e-6)
    return row, [ours[x.mask]], [theirs[x.mask].to(ours.dtype)]


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, each of the number itself, or of 1 where that is smaller."""
    assert ours.shape == theirs.shape, f"{list(ours.shape)} and {list(theirs.shape)}"
    return float(((ours - theirs).abs() / theirs.abs().clamp(min=1.0)).max())


def compared(verl: Any, seeds: int) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for dtype in ROUNDING:
        for seed in range(seeds):
            for row, ours, theirs in pairs(verl, Inputs.drawn(seed, dtype)):
                found = rows.setdefault(row.name, {"values": 0, "remark": row.remark, "ok": True})
                gap = max(map(apart, ours, theirs))
                name = str(dtype).removeprefix("torch.")
                found[name] = max(gap, found.get(name, 0.0))
                found["values"] += sum(x.numel() for x in ours) if dtype == torch.float64 else 0
                found["ok"] &= gap <= max(ROUNDING[dtype], row.known)
    return rows


def load_verl(checkout: Path | None) -> Any:
    if checkout is not None:
        if not (checkout / "verl" / "trainer").is_dir():
            raise SystemExit2(f"{checkout}: no verl checkout: there is no folder verl/trainer in it.")
        sys.path.insert(0, str(checkout))
    try:
        from verl.trainer.ppo import core_algos
    except ImportError as error:
        raise SystemExit2(f"verl cannot be imported: {error}. Use an interpreter that has what verl needs.") from None
    return core_algos


class SystemExit2(SystemExit):
    def __init__(self, message: str) -> None:
        print(message, file=sys.stderr)
        super().__init__(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", nargs="?", type=Path, help="folder of a verl checkout; default: the installed verl")
    parser.add_argument("--seeds", type=int, default=3, help="inputs are drawn so often (3)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    verl = load_verl(options.checkout)
    version = (Path(verl.__file__).parents[2] / "version" / "version").read_text(encoding="utf-8").strip()
    rows = compared(verl, options.seeds)
    if options.json:
        print(json.dumps({"verl": version, "torch": torch.__version__, "rows": rows}))
    else:
        show(version, rows)
    raise SystemExit(0 if all(row["ok"] for row in rows.values()) else 1)


def show(version: str, rows: dict[str, dict[str, Any]]) -> None:
    print(f"verl {version}, torch {torch.__version__}; largest difference, relative above 1\n")
    print(f"{'function':36} {'values':>8}  {'float64':>8}  {'float32':>8}")
    for name, row in rows.items():
        verdict = "" if row["ok"] else "  WRONG"
        print(f"{name:36} {row['values']:8,}  {row['float64']:8.1e}  {row['float32']:8.1e}{verdict}  {row['remark']}")
    values, worst = sum(row["values"] for row in rows.values()), max(row["float64"] for row in rows.values())
    print(f"\n{values:,} values in float64, largest difference {worst:.1e}")


if __name__ == "__main__":
    main()
