"""A run of 1,000 steps with rollouts of 512 x 16 every tenth step: the size the report must bear."""

import json
import random
import time
from pathlib import Path

from fake_runs import byte_level, evaluation, metrics, row, save_tokenizer, table_of, write_run

from dapo.report.rollouts.chunks import write_chunks

TEXT = "so the answer is then we add two numbers and check that this holds for all n = 3 + 4 wait no"
WORDS = TEXT.split(" ")


def write_big_run(
    folder: Path, *, steps: int = 1000, every: int = 10, problems: int = 512, G: int = 16, tokens: int = 100
) -> float:
    """Writes the run; returns the seconds that the scripts of one step took, which a run pays every `every` steps."""
    evaluations = [evaluation(step, 0.3 + 0.0003 * step) for step in range(0, steps + 1, 50)]
    write_run(folder, metrics(steps), evaluations=evaluations, every=every)
    pieces = save_tokenizer(folder, byte_level([TEXT], size=400))
    chosen = random.Random(0)
    rows = []
    for p in range(problems):
        for i in range(G):
            text = " ".join(chosen.choice(WORDS) for _ in range(tokens))
            verdict = "CORRECT" if chosen.random() < 0.4 else "WRONG"
            rows.append(
                row(
                    pieces,
                    text,
                    problem=f"problem-{p:04d}",
                    index=i,
                    verdict=verdict,
                    extracted=str(chosen.randint(0, 9)),
                )
            )
    table = table_of(rows)
    rollouts = folder / "rollouts"
    last = rollouts / f"step-{steps:06d}"
    start = time.perf_counter()
    write_chunks(table, last, pieces)
    seconds = time.perf_counter() - start
    index = (last / "index.js").read_text()
    for step in range(every, steps, every):
        other = rollouts / f"step-{step:06d}"
        other.mkdir()
        own = index.replace(last.name, other.name, 1).replace(f'"step": {steps}', f'"step": {step}', 1)
        assert json.loads(own[own.index(",") + 1 : -3])["step"] == step
        (other / "index.js").write_text(own)
        for piece in last.glob("[0-9]*.js"):  # the same bytes under another name: only the index is read by a report
            (other / piece.name).hardlink_to(piece)
    return seconds
