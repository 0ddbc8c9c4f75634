"""Findings about the sources of a mixture."""

from __future__ import annotations

from collections.abc import Iterator

from dapo.report.doctor.findings import WARNING, Finding, Visit
from dapo.report.sources import sources_of


def idle_sources(v: Visit) -> Iterator[Finding]:
    """A source whose groups are all correct or all wrong: its prompts cost, and give no gradient.

    Judged over a number of its own prompts, not over steps: a small share is a few prompts a step. Not with a critic,
    which gives every response an advantage.
    """
    if v.run.key("algorithm", "advantage") == "gae":
        return
    for source in sources_of(v.run):
        kept, n_prompts, first_step = source.over_last("groups_kept", v.t.idle_source_prompts)
        if kept is None or n_prompts < v.t.idle_source_prompts or kept > v.t.idle_source_kept:
            continue
        accuracy = source.over_last("accuracy", v.t.idle_source_prompts)[0] or 0.0
        share = source.over_last("share_submitted", v.t.idle_source_prompts)[0] or 0.0
        is_solved = accuracy >= 0.5
        taught = max((kept for kept in source.series("groups_kept") if kept is not None), default=0.0)
        yield Finding(
            "idle-source",
            WARNING,
            f"Source {source.name} teaches nothing{' any more' if taught > v.t.idle_source_kept else ''}",
            f"{kept:.1%} of its last {n_prompts} prompts gave a mixed group (accuracy {accuracy:.2f}: "
            f"{'solved' if is_solved else 'too hard, or wrong verdicts'}); it takes {share:.0%} of the prompts.",
            f"In a new run from this model, lower data.train.{source.name}.weight or leave it out"
            + (
                "; or retire its solved problems (sampling.retire_above)."
                if is_solved
                else f"; or check its verifier ({source.verifier}) on some of its responses, and its template."
            ),
            (first_step, v.run.steps),
            (f"source/{source.name}/groups_kept", f"source/{source.name}/accuracy"),
        )
