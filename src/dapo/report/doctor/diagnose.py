"""The checks of the doctor: each finding has a name, its numbers and steps, and a remedy.

All thresholds are in `findings.Thresholds`; docs/doctor.md gives the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from dapo.report.doctor import critic as critic_findings
from dapo.report.doctor import episodes as episode_findings
from dapo.report.doctor import parts as part_findings
from dapo.report.doctor import policy as policy_findings
from dapo.report.doctor import responses as response_findings
from dapo.report.doctor import run as run_findings
from dapo.report.doctor import sources as source_findings
from dapo.report.doctor.findings import NOTE, SEVERE, WARNING, Disk, Finding, Thresholds, Visit
from dapo.report.evidence import too_few_steps
from dapo.report.load import RunRecord

Check = Callable[[Visit], Iterator[Finding]]

# Findings of one level are reported in this order.
# A level or a trend needs enough steps (report/evidence.py): two more steps may undo what three show.
BY_STEPS: tuple[Check, ...] = (
    policy_findings.entropy,
    policy_findings.clipping,
    response_findings.length,
    response_findings.acceptance,
    source_findings.idle_sources,
    response_findings.reward_hacking,
    part_findings.parts,
    critic_findings.critic,
    policy_findings.engine_gap,
    policy_findings.dead_gradients,
    response_findings.verdicts,
    episode_findings.episodes,
    run_findings.evaluations,
    run_findings.step_time,
    run_findings.checkpoints,
)
# Facts, reported whatever the number of steps.
AT_ONCE: tuple[Check, ...] = (
    policy_findings.skipped_updates,
    run_findings.faults,
    run_findings.disk,
    run_findings.stopped,
)


def examine(
    run: RunRecord,
    summaries: Sequence[tuple[int, dict[str, Any]]] = (),
    *,
    disk: Disk | None = None,
) -> list[Finding]:
    """All findings, the most severe first."""
    visit = Visit(run, summaries, disk, Thresholds())
    checks = AT_ONCE if insufficient_evidence(run) else (*BY_STEPS, *AT_ONCE)
    found = [finding for check in checks for finding in check(visit)]
    order = {SEVERE: 0, WARNING: 1, NOTE: 2}
    return sorted(found, key=lambda finding: order[finding.level])


def insufficient_evidence(run: RunRecord) -> str:
    """Why most findings are not reported yet; empty where the run has enough steps."""
    return too_few_steps(len(run.metrics))


def verdict(findings: Sequence[Finding], run: RunRecord) -> str:
    """One line: no issues found, what is wrong, or that it is too early to tell."""
    if not run.metrics:
        return "No step has finished yet: nothing to diagnose."
    wrong = [finding.title for finding in findings if finding.level != NOTE]
    if wrong:
        return "; ".join(wrong) + "."
    if reason := insufficient_evidence(run):
        return f"Not enough steps to diagnose: {reason}. No errors so far."
    return "No issues found."


def to_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]
