"""How many tokens drafts would save on recorded rollouts: python tools/draft_acceptance.py STEP.parquet ... > FILE.json

Of each recorded step some groups are taken, and every response is written once more as the engine would with drafting
(`dapo.rollout.draft`): all responses of a group begin together, and what is drawn is what was recorded. For `tail` all
responses of the step begin together, and drafting begins when few of them are left.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from dapo.rollout.draft import LONGEST_MATCH, Drafter, Drafting, Running, Tokens, guess, n_counting

N_TOKENS = (2, 4, 8)
SOURCES = ("own", "siblings", "both")
TAIL_ROWS = (1, 4, 8, 16)

Group = tuple[Tokens, list[Tokens]]  # the prompt, and the responses to it


def groups_of(path: Path) -> list[Group]:
    columns = ["problem_id", "visit", "prompt_tokens", "tokens"]
    groups: dict[tuple[str, int], Group] = {}
    for row in pq.read_table(path, columns=columns).to_pylist():  # type: ignore[no-untyped-call]
        prompt = np.array(row["prompt_tokens"], np.int32)
        group = groups.setdefault((row["problem_id"], row["visit"]), (prompt, []))
        group[1].append(np.array(row["tokens"], np.int32))
    return list(groups.values())


def acceptance(groups: Sequence[Group], n: int, source: str) -> dict[str, float]:
    """Tokens per pass, and the share of drafted tokens that is accepted, from the first token to the last."""
    passes = drafted = accepted = 0
    for prompt, responses in groups:
        around = prompt[-LONGEST_MATCH:]
        for i, response in enumerate(responses):
            whole, at = np.concatenate([prompt, response]), 0
            while at < len(response):
                own = whole[: len(prompt) + at]
                others = [np.append(around, one[: min(at, len(one)) - 1]) for j, one in enumerate(responses) if j != i]
                siblings = [] if source == "own" or at == 0 else others
                own = own[-LONGEST_MATCH:] if source == "siblings" else own
                draft = guess(own, siblings, min(n, len(response) - at - 1))
                drawn = response[at : at + len(draft) + 1].tolist()
                n_new = n_counting(draft, drawn, [False] * len(drawn))
                passes, drafted, accepted, at = passes + 1, drafted + len(draft), accepted + n_new - 1, at + n_new
    n_tokens = sum(len(response) for _, responses in groups for response in responses)
    return {"tokens_per_pass": n_tokens / passes, "accepted": accepted / max(drafted, 1), "drafted": drafted / passes}


def tail(groups: Sequence[Group], n: int, below: int) -> tuple[int, int]:
    """Passes of a whole step from when at most `below` responses run, without drafts and with them."""
    drafter = Drafter(Drafting(tokens=n, below_rows=below))
    rows = [(g, prompt, response) for g, (prompt, responses) in enumerate(groups) for response in responses]
    lengths = np.array([len(response) for *_, response in rows])
    begin = int(np.sort(lengths)[-below - 1]) if below < len(rows) else 0
    at = np.minimum(lengths, begin)

    def running(i: int) -> Running:
        g, prompt, response = rows[i]
        whole = np.concatenate([prompt, response[: at[i]]])
        return Running(g, i, whole, len(prompt), len(response) - int(at[i]) - 1)

    drafter.keep(map(running, np.flatnonzero(at == lengths).tolist()), range(len(groups)))
    passes = 0
    while len(left := np.flatnonzero(at < lengths).tolist()):
        passes += 1
        for i, draft in zip(left, drafter.drafts([running(i) for i in left]), strict=True):
            drawn = rows[i][2][at[i] : at[i] + len(draft) + 1].tolist()
            at[i] += n_counting(draft, drawn, [False] * len(drawn))
        drafter.keep((running(i) for i in left if at[i] == lengths[i]), range(len(groups)))
    return int(lengths.max()) - begin, passes


def measured(path: Path, n_groups: int) -> dict[str, object]:
    groups = groups_of(path)
    some = groups[:: max(1, len(groups) // n_groups)][:n_groups]
    lengths = [len(response) for _, responses in groups for response in responses]
    return {
        "groups": len(some),
        "responses": sum(len(responses) for _, responses in some),
        "mean_tokens": float(np.mean([len(response) for _, responses in some for response in responses])),
        "by_source": {source: {str(n): acceptance(some, n, source) for n in N_TOKENS} for source in SOURCES},
        "tail": {
            "responses": len(lengths),
            "longest": max(lengths),
            "passes": {
                str(below): {
                    "plain": tail(groups, 4, below)[0],
                    **{str(n): tail(groups, n, below)[1] for n in N_TOKENS},
                }
                for below in TAIL_ROWS
            },
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="+", metavar="NAME=STEP.parquet")
    parser.add_argument("--groups", type=int, default=24)
    given = parser.parse_args()
    found = {name: measured(Path(path), given.groups) for name, path in (one.split("=", 1) for one in given.steps)}
    print(json.dumps(found, indent=1))
