"""Every key of a run, with its unit in its name and a sentence on what it does. Frozen; unknown keys are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from dapo.types import CORRECT


def _none(value: Any) -> Any:
    """TOML has no null: the word "none" unsets an optional key."""
    return None if isinstance(value, str) and value.lower() == "none" else value


OptionalFloat = Annotated[float | None, BeforeValidator(_none)]
OptionalInt = Annotated[int | None, BeforeValidator(_none)]
OptionalStr = Annotated[str | None, BeforeValidator(_none)]


class Section(BaseModel):
    """Base of all sections: no unknown keys, no changes after loading, no silent conversions (1 is not true)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class LoraConfig(Section):
    """Train a low-rank adapter instead of all weights (needs the extra `lora`)."""

    rank: int = Field(0, ge=0, description="Rank of the adapter; 0 trains all weights.")
    alpha: float = Field(32.0, gt=0, description="Scale of the adapter: alpha/rank multiplies its output.")
    target_modules: tuple[str, ...] = Field(
        (), description='Layers that get one, by the end of their names: ["q_proj", "v_proj"]; empty: all but the head.'
    )
    rank_stabilized: bool = Field(
        False, description="rsLoRA: the scale is alpha/√rank, so that a larger rank does not learn less per step."
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the adapter's inputs set to 0, in updates only: sampling, old log-probs and reference "
        "have none. So above 0 the ratio is not 1 at the first update, and old log-probs take a pass of their own.",
    )
    quantization: Literal["none", "int8", "nf4"] = Field(
        "none",
        description="QLoRA: the frozen matrices under the adapter in 8 bits (int8) or 4 (nf4), for sampling and "
        "training alike; none: in model.dtype.",
    )


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = Field(description='Hugging Face folder or hub name; "bundled" is the toy model that ships with dapo.')
    revision: OptionalStr = Field(None, description="Commit of the hub model; none: the newest.")
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = Field(
        "auto",
        description="Type of the module's parameters; auto is bfloat16 on CUDA and float32 on a CPU. float16 (CUDA) "
        "has a dynamic loss scale.",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="Where to run; auto prefers CUDA.")
    gpu_memory_gib: OptionalFloat = Field(
        None,
        gt=1,
        description="Of a GPU that is shared, or to try a smaller one: the most that a rank takes; none: all of it.",
    )
    kernels: Literal["fused", "plain"] = Field(
        "fused",
        description="fused: own kernels for norms, feed-forward, rotary positions and logits (CUDA: Triton, CPU: C). "
        "plain: none.",
    )
    lora: LoraConfig = LoraConfig()


class EvalSetConfig(Section):
    """One evaluation set of a table: `[data.eval]`, `NAME = {…}`."""

    path: OptionalStr = Field(None, description="What one would write as data.train; none: the name itself.")
    template: OptionalStr = Field(None, description="Its own prompt template; none: data.template.")
    system_prompt: OptionalStr = Field(
        None, description="System message before its questions, by the chat template; a row's own wins. none: none."
    )
    verifier: OptionalStr = Field(None, description="Judges its responses; none: rewards.verifier.")
    environment: OptionalStr = Field(None, description="Answers its turns; none: data.environment.")


class SourceConfig(EvalSetConfig):
    """One source of a mixture: `[data.train]`, `NAME = {…}`. NAME is letters, digits, - and _."""

    weight: float = Field(
        1.0, gt=0, description="Its share of the prompts submitted is weight / sum of the weights; above 0."
    )


def _shape(value: Any) -> str:
    return TABLE if isinstance(value, dict) else PLAIN


PLAIN, TABLE = "plain", "table"  # pydantic has them in the place of an error
Sources = Annotated[dict[str, SourceConfig], Field(min_length=1), Tag(TABLE)]
EvalSets = Annotated[dict[str, EvalSetConfig], Field(min_length=1), Tag(TABLE)]


class DataConfig(Section):
    """Problems to train and evaluate on, and how they become prompts."""

    train: Annotated[Annotated[str, Tag(PLAIN)] | Sources, Discriminator(_shape)] = Field(
        description="File, hub name, known name (gsm8k, …), gym:TASK or pkg.mod:function; or a table of sources."
    )
    eval: Annotated[Annotated[tuple[str, ...], Tag(PLAIN)] | EvalSets, Discriminator(_shape)] = Field(
        (), description="Evaluation sets, named like data.train; or a table of them."
    )
    fields: dict[str, str] = Field({}, description='Columns of an unknown schema: {question = "…", answer = "…"}.')
    template: str = Field(
        "dapo", description="How a question becomes a prompt: dapo, boxed, answer-tags, gsm8k, few-shot or raw."
    )
    chat_template: bool = Field(True, description="Wrap the prompt with the tokenizer's chat template.")
    environment: OptionalStr = Field(
        None,
        description="Answers the model's turns: python, calculator, guess, wordle, second-try, or pkg.mod:Class; "
        "none: a response is one turn.",
    )


class LimitsConfig(Section):
    """Lengths. Prompts over the limit are dropped and counted, never truncated; responses over it are truncated."""

    max_prompt_tokens: int = Field(2048, ge=1, le=10**8, description="Longest prompt that is used.")
    max_response_tokens: int = Field(
        ge=2, le=10**8, description="L_max of eq. 13: longest response, its end token included."
    )
    max_turns: int = Field(
        8, ge=1, le=10_000, description="With an environment: turns of the model, after which an episode is truncated."
    )


class RewardPart(Section):
    """One named part of the reward, beside the verifier's own."""

    weight: float = Field(description="Weight in the sum; below 0 it is a penalty. A weight of 0 is refused.")
    function: OptionalStr = Field(
        None, description="pkg.mod:function, called as a verifier's; its value is the part's reward."
    )
    verifier: OptionalStr = Field(None, description="A verifier by name, ±1; neither: the verifier returns it (Score).")


class RewardsConfig(Section):
    """How a response gets its verdict and reward."""

    verifier: str = Field(
        "math",
        description="math, dapo-published, exact, choice, code, gym, judge:FILE.toml, command:…, or pkg.mod:function.",
    )
    parts: dict[str, RewardPart] = Field(
        {},
        description='Further parts of the reward: {format = {function = "pkg.mod:function", weight = 0.2}}; "correct" '
        "is the verifier's own, weight 1 unless given.",
    )
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        "sum_then_normalize",
        description="Weighted parts are summed, and the sum is normalized within the group; or (GDPO) each part is "
        "normalized within the group, and their weighted sum over the step's responses.",
    )
    cpu_seconds: OptionalFloat = Field(
        None,
        gt=0,
        le=86_400,
        description="CPU seconds per response, child processes included; none: the verifier's own limit.",
    )
    memory_mb: OptionalInt = Field(
        None, ge=256, le=4 * 2**20, description="Memory per verifier process; none: the verifier's own limit."
    )
    workers: int = Field(2, ge=1, le=4_096, description="Verifier processes.")
    control: Literal["none", "shuffled", "negated"] = Field(
        "none",
        description="Control experiment: verdicts shuffled within each group, or rewards negated. Must not learn.",
    )
    truncated_may_be_correct: bool = Field(
        False, description="Verify truncated responses too, as the released script does; else they are never correct."
    )

    @property
    def weights(self) -> dict[str, float]:
        """Of the parts in the order they are added, the verifier's own first."""
        given = {name: part.weight for name, part in self.parts.items()}
        return {CORRECT: 1.0} | given


class ShapingConfig(Section):
    """How the length of a response changes its reward and the loss (DAPO section 3.4)."""

    overlong_filter: bool = Field(
        False, description="Mask truncated responses in the loss; they stay in the group's mean and std."
    )
    overlong_penalty: float = Field(
        0.0, ge=0, description="Weight of the soft overlong penalty (eq. 13); 1 is the paper's, 0 is off."
    )
    overlong_buffer_tokens: OptionalInt = Field(
        None, ge=1, description="L_cache of eq. 13: the penalty grows over this many tokens before the limit."
    )


class SamplingConfig(Section):
    """How the groups of one training step are sampled."""

    prompts_per_step: int = Field(ge=1, le=10**6, description="Groups that one step trains on.")
    responses_per_prompt: int = Field(
        ge=1, le=10**6, description="G, completions per problem. Group advantages need at least 2."
    )
    temperature: float = Field(1.0, gt=0, le=100, description="Sampling temperature; training log-probs use it too.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Training needs 1.0: a truncated distribution biases the policy ratio."
    )
    top_k: int = Field(
        0, ge=0, description="Training needs 0 (all tokens): a truncated distribution biases the policy ratio."
    )
    dynamic: bool = Field(
        False, description="Dynamic sampling (eq. 11): train on groups with 0 < correct < G only, refill until full."
    )
    refill: bool = Field(
        True,
        description="With dynamic: try more prompts until the step is full. false: groups that are not mixed leave a "
        "step of prompts_per_step prompts, and nothing takes their place (ScaleRL).",
    )
    schedule: Literal["stream", "rounds"] = Field(
        "stream",
        description="stream verifies and refills as responses finish; rounds waits for whole generation batches.",
    )
    generation_multiple: int = Field(
        1, ge=1, description="With rounds: prompts per generation batch, in multiples of prompts_per_step."
    )
    max_prompts_tried_per_step: OptionalInt = Field(
        None,
        ge=1,
        description="Prompts that dynamic sampling may try per step; none: 10 x prompts_per_step. Then: fill_policy.",
    )
    fill_policy: Literal["train_partial", "error", "relax", "skip"] = Field(
        "train_partial",
        description="Too few mixed groups: train_partial uses fewer, relax old ones, skip none, error stops.",
    )
    carry_over: bool = Field(
        False, description="Keep surplus mixed groups for the next step. Not the paper's algorithm."
    )
    partial_rollouts: bool = Field(
        False, description="Continue unfinished responses after an update. Not the paper's algorithm."
    )
    finish_overtaken: bool = Field(
        False,
        description="With partial_rollouts: a step finishes groups that earlier steps left unfinished if they would be "
        "too old in the next one. Without it long groups are lost to short ones.",
    )
    predictive: bool = Field(
        False,
        description="Prefer problems likely to give a mixed group, by posterior pass rate. Not the paper's algorithm.",
    )
    posteriors: OptionalStr = Field(
        None, description="With predictive or retire_above: a file of `dapo data probe --out` with initial pass rates."
    )
    retire_above: OptionalFloat = Field(
        None,
        gt=0,
        lt=1,
        description="Retire problems whose posterior pass rate over their last visits is at least this (ScaleRL: 0.9); "
        "none: off. Not the paper's algorithm.",
    )
    max_staleness_updates: OptionalInt = Field(
        None, ge=1, description="Maximum age of a trained token, in updates; for carry_over and partial_rollouts."
    )


class ClipConfig(Section):
    """Bounds of the policy ratio (eq. 10)."""

    low: OptionalFloat = Field(
        description="ε_low: the ratio is clipped at 1 − low; with loss = cispo, none: unbounded."
    )
    high: float = Field(gt=0, description="ε_high: the ratio is clipped at 1 + high. Equal to low, it is PPO's clip.")
    dual: OptionalFloat = Field(
        None, gt=1, description="c: bounds the loss at c·|Â| where Â < 0; none is the paper, the recipe has 10."
    )


class GroupConfig(Section):
    """The advantage of a response, its reward less a baseline: eq. 9, RLOO, REINFORCE++, ScaleRL."""

    baseline: Literal["group", "leave_one_out", "batch"] = Field(
        "group",
        description="What is subtracted: the group's mean (eq. 9), the mean of the group's other responses (RLOO), or "
        "the mean of the step's responses (REINFORCE++).",
    )
    std_over: Literal["group", "batch", "batch_rewards", "tokens"] = Field(
        "group",
        description="Over what the std is taken: rewards of the group (eq. 9), advantages of the step's responses "
        "(ScaleRL), their rewards (TRL's batch), or advantages of the step's loss tokens (REINFORCE++ in verl), which "
        "are whitened: the mean is subtracted too.",
    )
    std: Literal["sample", "population", "none"] = Field(
        "sample", description="Divide by the sample std (÷(G−1)), the population std, or none (Dr. GRPO)."
    )
    eps: float = Field(1e-6, ge=0, description="Added to the std, outside the root.")


class GaeConfig(Section):
    """The generalised advantage estimation of PPO and VAPO (eq. 2–3)."""

    gamma: float = Field(1.0, ge=0, le=1, description="γ, discount per token.")
    lam: float = Field(0.95, ge=0, le=1, description="λ of the policy's advantage.")
    lam_critic: OptionalFloat = Field(
        None, ge=0, le=1, description="λ of the critic's targets (VAPO's decoupled GAE: 1.0); none uses lam."
    )
    length_adaptive_alpha: OptionalFloat = Field(
        None, gt=0, description="α of λ = 1 − 1/max(α·length, floor) (VAPO: 0.05) in place of lam; none: off."
    )
    length_adaptive_floor: float = Field(
        1.0,
        ge=1,
        description="With length_adaptive_alpha: λ = 1 − 1/max(α·length, floor); the shortest horizon, in tokens.",
    )
    whiten: bool = Field(True, description="Whiten advantages over all tokens of the step.")


class CriticConfig(Section):
    """The value model of PPO and VAPO."""

    lr: OptionalFloat = Field(
        None,
        ge=0,
        le=10,
        description="Learning rate of the critic's own optimizer, with the policy's warm-up and decay; none: twice "
        "train.lr.",
    )
    value_clip: OptionalFloat = Field(None, gt=0, description="Clip of the value around its old value; none: no clip.")
    pretrain_responses: int = Field(
        0,
        ge=0,
        description="Value pretraining: at most this many responses; ends once the critic stops improving.",
    )
    pretrain_epochs: int = Field(
        4, ge=1, description="Passes over each step's responses in value pretraining; fewer overfit less."
    )
    path: OptionalStr = Field(
        None, description="A critic to start from (model/critic of a checkpoint): no pretraining; none: a new one."
    )


class CorrectionConfig(Section):
    """Importance correction for tokens sampled by older weights or by another engine's kernels: ρ = π_old/π_engine."""

    cap: OptionalFloat = Field(
        None,
        gt=0,
        description="C of truncated importance sampling, w = min(ρ, C); β of a mask; none: off. With rollout.engine = "
        "vllm it is 2 unless set.",
    )
    floor: OptionalFloat = Field(
        None, gt=0, description="α of a mask; of truncation, the smallest weight; none: no lower bound."
    )
    kind: Literal["truncate", "mask"] = Field(
        "truncate", description="Weights outside the bounds are truncated, or their tokens leave the loss (IcePop)."
    )
    level: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description="ρ of each token, or one for a response: the product of its tokens', or its |o|-th root.",
    )

    @property
    def weights(self) -> dict[str, Any]:
        """What `losses.importance_weight` takes."""
        return self.model_dump()


class KlConfig(Section):
    """KL penalty towards a reference policy, or towards a teacher (on-policy distillation). DAPO has none."""

    coefficient: float = Field(0.0, ge=0, description="β; 0 means no KL term and no reference model.")
    kind: Literal["k1", "k2", "k3", "abs"] = Field("k3", description="Estimator of the KL per token.")
    place: Literal["loss", "reward", "advantage"] = Field(
        "loss",
        description="Add it to the loss, subtract it from the reward, or from each token's advantage (distillation).",
    )
    path: OptionalStr = Field(
        None,
        description="The reference model, e.g. a teacher: folder or hub name with the policy's tokenizer; none: "
        "model.path.",
    )


PolicyLossName = Literal["clip", "cispo", "gspo", "gspo-token", "reinforce"]


class AlgorithmConfig(Section):
    """Which advantage, clip, loss aggregation and extra losses. A preset is a choice of these."""

    advantage: Literal["group", "gae", "none"] = Field(
        description="group: eq. 9, no critic. gae: PPO and VAPO, with a critic. none: only positive_nll or a teacher."
    )
    loss: PolicyLossName = Field(
        "clip", description="Policy loss by name; clip is eq. 10 (PPO, GRPO, DAPO). docs/equations.md has them all."
    )
    loss_aggregation: Literal["token", "sequence", "prompt", "constant"] = Field(
        description="token: eq. 12. sequence: GRPO. prompt: eq. 8 literally. constant: Dr. GRPO."
    )
    loss_constant_tokens: OptionalInt = Field(
        None,
        ge=1,
        description="With loss_aggregation = constant: tokens per response to divide by; none: max_response_tokens.",
    )
    old_logp: Literal["recompute", "bypass"] = Field(
        "recompute", description="π_old: recomputed by the trainer, or the engine's own log-probs (bypass)."
    )
    entropy_coefficient: float = Field(
        0.0, ge=0, description="Weight of an entropy bonus: the loss less this times the policy's entropy; 0: none."
    )
    positive_nll: float = Field(0.0, ge=0, description="μ, weight of VAPO's imitation of correct responses (0.1).")
    clip: ClipConfig
    group: GroupConfig = GroupConfig()
    gae: GaeConfig = GaeConfig()
    critic: CriticConfig = CriticConfig()
    kl: KlConfig = KlConfig()
    correction: CorrectionConfig = CorrectionConfig()


class TrainConfig(Section):
    """Steps, updates and the optimizer. A step is one rollout batch and all its updates; schedules count steps."""

    steps: int = Field(ge=0, le=10**9, description="Training steps; resampled prompts do not count as steps.")
    max_generated_tokens: OptionalInt = Field(
        None, ge=1, description="Stop after the step that reaches this many generated tokens; none: no limit."
    )
    max_minutes: OptionalFloat = Field(
        None,
        gt=0,
        description="Stop after the step that reaches this training time, evaluation and checkpoints not "
        "counted; none: no limit.",
    )
    lr: float = Field(ge=0, le=10, description="Learning rate of the policy after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="W: step k runs at lr·min(1, k/W), k = 1, 2, …; never at lr 0.")
    lr_decay: Literal["none", "linear", "cosine"] = Field(
        "none", description="After warm-up: constant, as in the papers, or falling towards 0 at train.steps."
    )
    updates_per_step: int = Field(
        1, ge=1, le=10**6, description="Mini-batches (optimizer updates) that a step's groups are split into."
    )
    epochs_per_step: int = Field(1, ge=1, le=10**4, description="μ of Algorithm 1: passes over the step's groups.")
    tokens_per_microbatch: int = Field(16384, ge=1, le=10**9, description="Token budget of one forward-backward pass.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's moment decays.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient clipping: maximum norm of an update's gradient.")
    gradient_checkpointing: bool | Literal["auto"] = Field(
        False,
        description="Recompute activations in the backward pass: less memory; auto: in as few layers as needed.",
    )
    moments: Literal["float32", "int8", "host"] = Field(
        "float32",
        description="AdamW's moments: float32, int8 (2 bytes per weight instead of 8), or host memory (exact, slow).",
    )
    max_bad_updates: int = Field(
        3, ge=0, description="Consecutive updates that may be skipped for non-finite gradients before the run stops."
    )
    max_wait_s: float = Field(
        1200.0,
        ge=1,
        le=30 * 86_400,
        description="Seconds a run waits for one verdict, answer, file or rank; then it stops and says for what.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of data order, sampling noise and mini-batch order.")


class VllmConfig(Section):
    """Settings of the vLLM engine only."""

    gpu_memory_utilization: float = Field(
        0.4,
        gt=0,
        le=1,
        description="Share of GPU memory for vLLM, weights and KV cache; on a CPU, of main memory.",
    )


class RolloutConfig(Section):
    """The inference engine that generates the responses."""

    engine: Literal["local", "plain", "vllm"] = Field(
        "local", description="local shares the trainer's weights; plain is its slow reference; or vllm."
    )
    max_concurrent_sequences: int = Field(
        256, ge=1, le=10**7, description="Maximum concurrent sequences, over all ranks together."
    )
    kv_cache_gib: OptionalFloat = Field(
        None,
        gt=0,
        description="With local: KV cache per rank; none: enough for all sequences, at most 0.4 of free memory.",
    )
    draft_tokens: int = Field(
        0,
        ge=0,
        le=64,
        description="With local or plain: tokens guessed per response and checked in one pass; 0: none. Try 4.",
    )
    draft_below_rows: int = Field(
        8, ge=1, le=4096, description="Draft while at most so many responses run on a rank: the tail of a step."
    )
    exact: bool = Field(
        False,
        description="With local on CUDA in 16 bits: batch-invariant kernels, so that log-probs of engine and trainer "
        "are equal to the last bit; slower.",
    )
    quantization: Literal["none", "fp8"] = Field(
        "none",
        description="With local: matrix products of rollouts and evaluations in FP8 (e4m3) where that is faster, for "
        "models of 7B and more; keeps a second copy of the layers. Set algorithm.correction.cap = 2.0 with it.",
    )
    on_fault: Literal["continue", "stop"] = Field(
        "continue", description="When a response has non-finite logits: drop it and continue, or stop the run."
    )
    tensor_parallel: int = Field(1, ge=1, description="With vllm: GPUs that share one copy of the model.")
    vllm: VllmConfig = VllmConfig()


class EvalConfig(Section):
    """Evaluation inside a run; it has its own sampling settings."""

    every_steps: int = Field(0, ge=0, description="Evaluate every n steps, and before the first; 0: never.")
    k: int = Field(32, ge=1, le=10**6, description="Responses per problem: avg@k, pass@k, maj@k.")
    temperature: float = Field(1.0, ge=0, le=100, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(0.7, gt=0, le=1, description="Nucleus sampling in evaluation; the papers use 0.7.")
    top_k: int = Field(0, ge=0, description="Sample from the k most likely tokens; 0: all.")


class CheckpointConfig(Section):
    """What is needed to resume after a crash."""

    every_steps: int = Field(
        10,
        ge=0,
        description="Save a checkpoint every n steps, and always before the first, at the end and on a signal.",
    )
    keep: int = Field(2, ge=1, description="Number of checkpoints kept on disk, the newest ones.")
    keep_best: bool = Field(
        False,
        description="Also keep a checkpoint of the best evaluation so far. Of several sets the first counts.",
    )
    resumable: bool = Field(
        True,
        description="false keeps the model alone, a quarter of the disk, and none before the first step; no run can "
        "resume from it.",
    )
    format: Literal["auto", "whole"] = Field(
        "auto",
        description="auto: each rank of a sharded run writes its shards. whole: the first rank gathers and writes all.",
    )


class RecordsConfig(Section):
    """Recorded responses, for the report's rollout browser."""

    every_steps: int = Field(
        10,
        ge=0,
        description="Write the responses of every n-th step to parquet, and of the first and last step; 0: never.",
    )


class TrackingConfig(Section):
    """Experiment trackers, in addition to the run's own files. A tracker that fails is logged and dropped."""

    to: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"], ...] = Field(
        (),
        description='Also log metrics to any of ["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]; empty: none.',
    )
    project: str = Field(
        "dapo", min_length=1, description="Project for wandb, trackio and swanlab; experiment for mlflow."
    )


class ClusterConfig(Section):
    """Training on more than one process."""

    backend: Literal["none", "torchrun", "ray"] = Field("none", description="What starts and places the processes.")
    gpus: int = Field(
        1, ge=1, le=10**6, description="Total number of GPUs (or, on CPUs, processes); 1: as many as torchrun started."
    )
    ranks_per_gpu: int = Field(
        1, ge=1, le=64, description="More than 1: ranks share a card, by gloo through the host; slow, to try a layout."
    )
    shard: Literal["auto", "full", "none"] = Field(
        "auto",
        description="full: FSDP2. none: every rank holds all weights. auto: none if they take less than half a GPU.",
    )
    timeout_s: int = Field(
        1800, ge=1, le=30 * 86_400, description="Seconds a rank waits for another before the run ends."
    )


class Config(Section):
    """A whole run."""

    preset: str = Field("dapo", description="Algorithm preset the recipe starts from.")
    model: ModelConfig
    data: DataConfig
    limits: LimitsConfig
    rewards: RewardsConfig = RewardsConfig()
    shaping: ShapingConfig = ShapingConfig()
    sampling: SamplingConfig
    algorithm: AlgorithmConfig
    train: TrainConfig
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    records: RecordsConfig = RecordsConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def responses_per_step(self) -> int:
        return self.sampling.prompts_per_step * self.sampling.responses_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of a full step, all epochs."""
        return self.train.updates_per_step * self.train.epochs_per_step

    @property
    def max_prompts_tried_per_step(self) -> int:
        if not (self.sampling.dynamic and self.sampling.refill):
            return self.sampling.prompts_per_step
        return self.sampling.max_prompts_tried_per_step or 10 * self.sampling.prompts_per_step

    @property
    def critic_lr(self) -> float:
        """The critic's learning rate after warm-up."""
        return 2 * self.train.lr if self.algorithm.critic.lr is None else self.algorithm.critic.lr

    @property
    def has_critic(self) -> bool:
        return self.algorithm.advantage == "gae"

    @property
    def base_quantization(self) -> Literal["int8", "nf4"] | None:
        """QLoRA: what the frozen matrices under an adapter are kept in, where that is not model.dtype."""
        lora = self.model.lora
        return lora.quantization if lora.rank and lora.quantization != "none" else None

    @property
    def has_dropout(self) -> bool:
        return self.model.lora.rank > 0 and self.model.lora.dropout > 0

    @property
    def has_reference(self) -> bool:
        return self.algorithm.kl.coefficient > 0

    @property
    def has_teacher(self) -> bool:
        """Whether the KL to the reference enters every token's advantage: on-policy distillation."""
        return self.has_reference and self.algorithm.kl.place == "advantage"

    @property
    def keeps_posteriors(self) -> bool:
        """Whether problems are selected by their past pass rates."""
        return self.sampling.predictive or self.sampling.retire_above is not None

    @property
    def is_paper_algorithm(self) -> bool:
        """False where a switch of `dapo-fast` or a control experiment is on; such a run is labelled everywhere."""
        fast = self.sampling.carry_over or self.sampling.partial_rollouts or self.keeps_posteriors
        return not fast and self.rewards.control == "none"


# What a preset may set: the algorithm, and nothing that depends on model, data or machine.
PRESET_KEYS = (
    "algorithm.",
    "shaping.overlong_filter",
    "shaping.overlong_penalty",
    "sampling.dynamic",
    "sampling.refill",
    "sampling.schedule",
    "sampling.carry_over",
    "sampling.partial_rollouts",
    "sampling.finish_overtaken",
    "sampling.predictive",
    "sampling.retire_above",
    "sampling.max_staleness_updates",
    "sampling.generation_multiple",
    "sampling.fill_policy",
    "rewards.truncated_may_be_correct",
    "train.warmup_steps",
    "train.epochs_per_step",
    "train.weight_decay",
)
