"""Writes docs/gym.md: the tasks of reasoning-gym.   python tools/gym_page.py > docs/gym.md   (with the extra gym)"""

from dapo.data.gym.source import tasks
from dapo.rewards.gym.names import VERSION

HEAD = f"""# Tasks of reasoning-gym

The {{n}} tasks of reasoning-gym {VERSION}, by name: `data.train = "gym:NAME"` ([how](data.md#procedural-tasks)).
`dapo data gym` lists them with their parameters, `dapo data check gym:NAME` shows three problems.
*Scored* by `text`: exact match with the reference; `rule`: the task's own scorer; `expression`: our exact parser
of arithmetic. Made by `python tools/gym_page.py`.

| task | kind | a right answer | scored |
|---|---|---|---|"""


def shown(answer: str) -> str:
    """On one line of a table."""
    flat = answer.replace("\n", " ⏎ ").replace("|", "\\|").replace("`", "'")
    return f"`{flat if len(flat) <= 48 else flat[:47] + '…'}`" if flat else "any that fits"


def main() -> None:
    found = tasks()
    print(HEAD.format(n=len(found)))
    for one in found:
        print(f"| `{one['task']}` | {one['kind']} | {shown(one['answer'])} | {one['scored']} |")


if __name__ == "__main__":
    main()
