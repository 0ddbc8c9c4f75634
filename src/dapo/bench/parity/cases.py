"""What `dapo bench parity` compares on recorded rollouts: TRL's keys, and where the two differ by definition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

PROMPTS, RESPONSES, STEPS, LONGEST = 4, 4, 2, 24
ROWS = PROMPTS * RESPONSES
# Over the shipped config: a tiny model in float32, and steps so large that ratios leave the clip.
TINY: dict[str, Any] = {
    "num_generations": RESPONSES, "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1,
    "max_completion_length": LONGEST, "learning_rate": 3e-3, "lr_scheduler_type": "constant",
    "max_grad_norm": 1e6, "mask_truncated_completions": False, "num_iterations": 2, "bf16": False, "use_cpu": True,
}  # fmt: skip
Known = Literal["", "rows", "tokens", "other"]


@dataclass(frozen=True, slots=True)
class Case:
    """Keys of TRL over the shipped config.

    `differs` says where the definitions part: by a factor that is known ("rows", "tokens"), and then the rest must
    agree, or in another way ("other"), and then the results must differ, or the sentence is out of date.
    """

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    differs: Known = ""
    why: str = ""

    @property
    def updates_per_step(self) -> int:
        """Without the iterations over them."""
        return int(self.keys.get("steps_per_generation", 1))

    @property
    def settings(self) -> dict[str, Any]:
        keys = TINY | self.keys
        return keys | {"max_steps": STEPS * self.updates_per_step * keys["num_iterations"]}


LINEAR = {"lr_scheduler_type": "linear"}
ONCE = {"num_iterations": 1}
BETA = {"beta": 0.1, "use_bias_correction_kl": False, "learning_rate": 3e-4}
TWO_REWARDS = {"reward_weights": [1.0, -0.5]}
GDPO = {"multi_objective_aggregation": "normalize_then_sum"}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.05}
MASKED = {"mask_truncated_completions": True}
MICRO = {"per_device_train_batch_size": ROWS // 4, "gradient_accumulation_steps": 4}
TWICE = ONCE | {"per_device_train_batch_size": ROWS // 2, "steps_per_generation": 2}
ALL_ROWS = "TRL divides by all rows, we by those that are in the loss"
OUR_ROWS = "TRL splits rows at random, we whole groups; here it gets our mini-batches"
BIAS = "TRL's default multiplies k3 by the ratio; we do not"
WHOLE = "TRL's micro-batches each divide by their own tokens, ours by the update's"
CASES = (
    *(Case(loss, {"loss_type": loss}) for loss in ("dapo", "grpo", "bnpo", "dr_grpo")),
    Case("one clip", {"epsilon_high": None}),
    Case("delta", {"delta": 1.3}),
    Case("scale_rewards none", {"scale_rewards": "none"}),
    Case("two rewards", TWO_REWARDS),
    Case("normalize_then_sum", GDPO),
    Case("normalize_then_sum, two rewards", TWO_REWARDS | GDPO),
    Case("scale_rewards batch", {"scale_rewards": "batch"}),
    Case("cispo", {"loss_type": "cispo", "epsilon_high": 1.2}),
    *(Case(f"sequence level, {loss}", SEQUENCE | {"loss_type": loss}) for loss in ("grpo", "dapo")),
    Case("entropy", {"entropy_coef": 0.1}),
    Case("beta", BETA),
    Case("beta, grpo", BETA | {"loss_type": "grpo"}),
    Case("beta, far away", BETA | {"learning_rate": 3e-3}, "other", "we clamp k3 of a token to 10, TRL does not"),
    Case("beta, bias corrected", BETA | {"use_bias_correction_kl": True}, "other", BIAS),
    Case("temperature", {"temperature": 0.7}),
    Case("masked, dapo", MASKED),
    Case("masked, bnpo", MASKED | {"loss_type": "bnpo"}),
    Case("masked, grpo", MASKED | {"loss_type": "grpo"}, "rows", ALL_ROWS),
    Case("masked, dr_grpo", MASKED | {"loss_type": "dr_grpo"}, "rows", ALL_ROWS),
    *(Case(f"micro-batches, {loss}", MICRO | {"loss_type": loss}) for loss in ("dapo", "grpo", "dr_grpo")),
    Case("micro-batches, bnpo", MICRO | {"loss_type": "bnpo"}, "other", WHOLE),
    *(Case(f"two updates, {loss}", TWICE | {"loss_type": loss}, why=OUR_ROWS) for loss in ("grpo", "dr_grpo", "bnpo")),
    Case("two updates, dapo", TWICE, "tokens", f"{OUR_ROWS}, and divides by the tokens of an average update"),
    Case("optimizer", ONCE | LINEAR | {"max_grad_norm": 0.05, "weight_decay": 0.1, "adam_beta2": 0.95}),
    Case("warm-up", ONCE | LINEAR | {"warmup_steps": 2}, "other", "TRL's first update has a rate of 0, ours of lr/W"),
)  # fmt: skip
