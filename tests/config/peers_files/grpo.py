# How TRL's users write it: a config, a trainer beside it. Read with ast, never imported.
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, get_soft_overlong_punishment

raise SystemExit("this file must not run")

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
train = load_dataset("openai/gsm8k", "main", split="train")
args = GRPOConfig(
    output_dir="out",
    learning_rate=2e-6,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    steps_per_generation=8,
    num_generations=8,
    num_iterations=2,
    max_steps=320,
    warmup_steps=16,
    max_prompt_length=512,
    max_completion_length=1024,
    epsilon=0.2,
    epsilon_high=0.28,
    beta=0.04,
    loss_type="grpo",
    mask_truncated_completions=True,
    top_p=0.95,
    bf16=True,
    lr_scheduler_type="cosine",
    eval_steps=40,
    save_steps=80,
    report_to=["wandb"],
    use_vllm=True,
    vllm_gpu_memory_utilization=0.3,
)
trainer = GRPOTrainer(
    model=MODEL,
    args=args,
    train_dataset=train,
    reward_funcs=[accuracy_reward, get_soft_overlong_punishment(max_completion_len=1024, soft_punish_cache=256)],
    peft_config=LoraConfig(r=32, lora_alpha=64),
)
