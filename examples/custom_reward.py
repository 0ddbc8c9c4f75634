"""Your own problems and your own reward, from Python.

    python examples/custom_reward.py                      # the model that ships with dapo, on a CPU
    python examples/custom_reward.py --model MODEL_FOLDER --out runs/mine

The reward likes short responses: it is graded, so a group is mixed as soon as two of its rewards differ. It is
called in worker processes, which import this file by name: hence the last two lines.
"""

import argparse
from collections.abc import Mapping

import dapo


def shorter_is_better(response: str, answer: str, meta: Mapping[str, object]) -> dapo.Score:  # noqa: ARG001
    """1 for an empty response, 0 for one of `meta["longest"]` words or more. `answer` is not needed here."""
    longest = int(str(meta["longest"]))
    return dapo.Score(max(0.0, 1.0 - len(response.split()) / longest))


def problems() -> list[dapo.Problem]:
    """Any questions will do; `meta` travels with the problem to the reward."""
    return [
        dapo.Problem(f"sum-{a}-{b}", f"{a} + {b} = ?", str(a + b), meta={"longest": 40})
        for a in range(2, 10)
        for b in range(2, 6)
    ]


class PrintReward(dapo.Observer):
    """A callback; every method of dapo.Observer may be overridden."""

    def on_step(self, metrics: Mapping[str, float]) -> None:
        print(
            f"step {metrics['step']:.0f}: mean reward {metrics['reward/raw']:.3f}, {metrics['length/mean']:.1f} tokens"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on your own problems with your own reward.")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--out", default="runs/custom-reward")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    result = dapo.train(
        "quickstart",
        out=arguments.out,
        overrides=[
            f"model.path={arguments.model}",
            f"train.steps={arguments.steps}",
            "sampling.prompts_per_step=8",
            "limits.max_response_tokens=48",
            "shaping.overlong_buffer_tokens=12",
            "eval.every_steps=0",
            "data.eval=[]",
        ],
        problems=problems,
        reward=shorter_is_better,
        callbacks=[PrintReward()],
    )
    print(f"The trained model: {result.model}")


if __name__ == "__main__":
    main()
