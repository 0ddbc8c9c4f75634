# How TRL's users change rows, prompts and rewards in code. Read with ast, never imported.
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, get_soft_overlong_punishment

raise SystemExit("this file must not run")

SYSTEM_PROMPT = "Think first, then answer inside <answer> tags."


def get_questions(split="train"):
    data = load_dataset("openai/gsm8k", "main")[split]
    data = data.filter(lambda row: len(row["question"]) < 900)
    return data.map(
        lambda row: {
            "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": row["question"]}]
        }
    ).shuffle(seed=7)


def format_reward(completions, **_):
    return [0.5 for _ in completions]


overlong = get_soft_overlong_punishment(max_completion_len=512, soft_punish_cache=128)
rewards = [accuracy_reward, format_reward, overlong]
args = GRPOConfig(
    output_dir="out",
    logging_steps=1,
    num_generations=8,
    max_steps=100,
    max_completion_length=512,
    repetition_penalty=1.1,
    reward_weights=[1.0, 0.5, 1.0],
)
trainer = GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", rewards, args=args, train_dataset=get_questions())
trainer.train()
