"""Save and restore a run: everything the next step depends on, by one rank or by all."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dapo.checkpoints.load import Checkpoint
from dapo.checkpoints.save import ADAPTER, STATE_JSON, in_order, name_of, save_checkpoint
from dapo.checkpoints.sharded import Background, RankPart, has_slices, read_slices
from dapo.checkpoints.state import fits
from dapo.config.load import flatten
from dapo.config.sources import train_in_words
from dapo.distributed.balance import balanced
from dapo.distributed.shards import whole_weights
from dapo.errors import CheckpointError, DiskError
from dapo.files import LONG_WRITE, read_lines
from dapo.learner.critic import HeldOutFit
from dapo.learner.optimizer import Optimizer
from dapo.models.critic import save_critic
from dapo.models.load import adapter_tensors, checkpoint_tensors, save_adapter, save_all_but_weights, save_policy
from dapo.report.learning import comparable, score_key
from dapo.report.load import is_evaluation
from dapo.trainer.run import Run
from dapo.waiting.registry import waiting


def save_run(run: Run) -> None:
    """Write the state at this step boundary: a resumed run continues as if it had never stopped.

    Any number of ranks can resume from it. Every rank of a sharded run writes its part in the background; otherwise the
    first rank writes everything before training continues.
    """
    name = name_of(run.step, run.value_steps if run.is_pretraining else None)
    is_resumable = run.config.checkpoint.resumable
    if run.saved == name or not (is_resumable or run.step):
        return
    state, tensors = state_of(run)
    if not is_resumable:
        state, tensors = model_only_state(state), {}
    if run.learner.is_sharded and run.config.checkpoint.format == "auto":
        save_sharded(run, name, state, tensors)
    else:
        save_whole(run, name, state, tensors)
    run.saved = name


def best_checkpoint(run: Run) -> str | None:
    """With `checkpoint.keep_best` the name of the one after the best evaluation so far: every rank has the same."""
    if not run.config.checkpoint.keep_best:
        return None
    step: int | None = run.world.from_first(best_step(run) if run.world.is_first else None)
    return None if step is None else name_of(step)


def best_step(run: Run) -> int | None:
    """Of the first set's evaluations of the same problems, sampled as in the last one; the first of equal ones.

    Only of steps that have a checkpoint, or can have one now: else nothing would be as good as one that is gone.
    """
    there = {run.saved, name_of(run.step), *(path.name for path in in_order(run.folder / "checkpoints"))}
    lines = filter(is_evaluation, read_lines(run.folder / "eval.jsonl"))
    same = comparable(lines, read_lines(run.folder / "eval_problems.jsonl"), run.eval_sets[0].name)
    kept = [line for line in same if name_of(int(line["step"])) in there]
    best = max(kept, key=lambda line: float(line[score_key(line)]), default=None)
    return None if best is None else int(best["step"])


def state_of(run: Run) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What the next step depends on, without model and optimizer."""
    sampling, tensors = run.sampling_state()
    state = {
        "config": flatten(run.config.model_dump(mode="json")),
        "updates": run.learner.updates,
        "bad_updates": run.learner.bad_updates,
        "bad_critic_updates": 0 if run.learner.critic is None else run.learner.critic.bad_updates,
        "tokens_per_microbatch": run.learner.tokens_per_microbatch,
        "recomputes_all": run.learner.recomputes_all,
        "value_steps": run.value_steps,
        "held_out_fits": [asdict(fit) for fit in run.held_out_fits],
        "data": run.problems.checksum,
        "sampling": sampling,
    }
    return state, tensors


def model_only_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state saved with a model that no run can resume from: what its card and its record need."""
    kept = {key: state[key] for key in ("updates", "bad_updates", "data")}
    return {**kept, "sampling": {"order": state["sampling"]["order"]}, "resumable": False}


def save_whole(run: Run, name: str, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    if run.config.checkpoint.resumable:
        for prefix, optimizer in optimizers_of(run).items():
            tensors |= {f"{prefix}{key}": tensor for key, tensor in optimizer.tensors().items()}
        for key, parameter in adapter_of(run).items():
            tensors[f"adapter.{key}"] = run.learner.optimizer.whole(key, parameter.detach())
    critic = None if run.learner.critic is None else whole_weights(run.learner.critic.model)

    def write_model(folder: Path) -> None:
        save_policy(run.learner.whole, folder)
        save_adapter(run.learner.whole, folder / ADAPTER, adapter_tensors(run.learner.whole))
        if run.learner.critic is not None:
            save_critic(run.learner.critic.model, folder / "critic", critic)

    root, keep, best = run.folder / "checkpoints", run.config.checkpoint.keep, best_checkpoint(run)
    failure = None
    if run.world.is_first:
        try:
            save_checkpoint(root, name, write_model=write_model, tensors=tensors, state=state, keep=keep, best=best)
        except DiskError as error:
            failure = [error.message, error.remedy]
    patience = 1.0 if run.world.is_first else LONG_WRITE  # it has written already
    with waiting("the first rank to write the checkpoint", patience=patience):
        failure = run.world.from_first(failure)  # all ranks end together, none waits for one that is gone
    if failure is not None:
        raise DiskError(failure[0], remedy=failure[1])


def save_sharded(run: Run, name: str, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Copy this rank's part to the host, and write it in the background."""
    slices: dict[str, torch.Tensor] = {}
    if run.config.checkpoint.resumable:
        for prefix, optimizer in optimizers_of(run).items():
            for key, tensor in optimizer.parts().items():
                (slices if tensor.dim() else tensors)[f"{prefix}{key}"] = tensor
        for key, parameter in adapter_of(run).items():
            slices[f"adapter.{key}"] = run.learner.optimizer.on_host(key, parameter.detach())
    weights = dict(checkpoint_tensors(run.learner.whole))
    own = balanced({key: tensor.nbytes for key, tensor in weights.items()}, run.world.size)[run.world.rank]
    critic = run.learner.critic
    critic_weights = None if critic is None else whole_weights(critic.model, is_kept=run.world.is_first)

    adapter = adapter_tensors(run.learner.whole) if run.world.is_first else {}

    def write_model(folder: Path) -> None:
        save_all_but_weights(run.learner.whole, folder)
        save_adapter(run.learner.whole, folder / ADAPTER, adapter)
        if critic is not None:
            save_critic(critic.model, folder / "critic", critic_weights)

    part = RankPart(
        slices=slices,
        weights={key: weights[key].to("cpu", copy=True).contiguous() for key in own},
        tensors={key: tensor.detach().cpu().clone() for key, tensor in tensors.items()},
        state=state,
        write_model=write_model,
    )
    if run.background is None:
        run.background = Background(run.world)
    keep, best = run.config.checkpoint.keep, best_checkpoint(run)
    run.background.save(run.folder / "checkpoints", name, part, keep=keep, best=best)


def finish_saving(run: Run) -> None:
    """Wait until the checkpoint in the background is on disk."""
    if run.background is not None:
        run.background.wait()


def optimizers_of(run: Run) -> dict[str, Optimizer]:
    """By what their tensors' names begin with in a checkpoint."""
    critic = run.learner.critic
    return {"optimizer.": run.learner.optimizer} | ({} if critic is None else {"critic_optimizer.": critic.optimizer})


def adapter_of(run: Run) -> dict[str, torch.nn.Parameter]:
    """Resuming needs the LoRA adapter itself; model/ holds the merged weights."""
    return run.learner.optimizer.parameters if run.config.model.lora.rank else {}


def restore_run(run: Run, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's state; the weights are already loaded from its model folder."""
    with fits(checkpoint.folder / STATE_JSON):
        load_state(run, checkpoint)


def load_state(run: Run, checkpoint: Checkpoint) -> None:
    state = checkpoint.state
    if state["data"] != run.problems.checksum:
        raise CheckpointError(
            f"{checkpoint.folder}: was trained on other problems than data.train = {train_in_words(run.config)} holds.",
            remedy="Restore the file, or start a new run.",
        )
    run.step, run.saved = checkpoint.step, checkpoint.folder.name
    run.value_steps = state.get("value_steps", run.pretrain_steps)  # older checkpoints are from after the stage
    run.held_out_fits = [HeldOutFit.restore(fit) for fit in state.get("held_out_fits", state.get("foretold", []))]
    run.learner.updates, run.learner.bad_updates = state["updates"], state["bad_updates"]
    if run.learner.critic is not None:
        run.learner.critic.bad_updates = state.get("bad_critic_updates", 0)  # older checkpoints had one count for both
    if state["config"].get("train.tokens_per_microbatch") == run.config.train.tokens_per_microbatch:
        run.learner.tokens_per_microbatch = state.get("tokens_per_microbatch")  # lowered when memory ran out
        run.learner.recomputes_all = state.get("recomputes_all", False)
    policy = run.learner.optimizer
    for name, tensor in with_prefix(checkpoint.tensors, "adapter.").items():
        policy.assign(name, policy.part_of(name, tensor))
    slices = read_slices(checkpoint.folder, partial(sharded_like, run)) if has_slices(checkpoint.folder) else {}
    for name, part in with_prefix(slices, "adapter.").items():
        policy.assign(name, part)
    for prefix, optimizer in optimizers_of(run).items():
        whole, parts = with_prefix(checkpoint.tensors, prefix), with_prefix(slices, prefix)
        optimizer.load_parts(parts | {key: optimizer.part_of_key(key, tensor) for key, tensor in whole.items()})
    run.publish()
    run.collector.journal.version = run.learner.updates
    run.restore_sampling(state["sampling"], checkpoint.tensors)


def sharded_like(run: Run, key: str) -> torch.Tensor | None:
    """The parameter whose state or adapter is stored under that name."""
    prefix = next((prefix for prefix in optimizers_of(run) if key.startswith(prefix)), None)
    if prefix is None:
        return run.learner.optimizer.parameters.get(key.removeprefix("adapter."))
    return optimizers_of(run)[prefix].parameters.get(key.removeprefix(prefix).partition(".")[2])


def with_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
