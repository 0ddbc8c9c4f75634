"""What is wrong with a run, by name: each finding cites its numbers and steps, and says what to do.

The thresholds stand in one place, `findings.Thresholds`; docs/doctor.md says why they are what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from dapo.report import critic_findings, policy_findings, response_findings, run_findings
from dapo.report.findings import NOTE, SEVERE, WARNING, Disk, Finding, Thresholds, Visit
from dapo.report.load import RunRecord

# Each fires or stays silent. Findings of one level are told in this order.
CHECKS: tuple[Callable[[Visit], Iterator[Finding]], ...] = (
    policy_findings.entropy,
    policy_findings.clipping,
    response_findings.length,
    response_findings.acceptance,
    response_findings.reward_hacking,
    critic_findings.critic,
    policy_findings.engine_gap,
    policy_findings.gradients,
    response_findings.verdicts,
    run_findings.faults,
    run_findings.evaluations,
    run_findings.step_time,
    run_findings.checkpoints,
    run_findings.disk,
    run_findings.stopped,
)


def examine(
    run: RunRecord,
    summaries: Sequence[tuple[int, dict[str, Any]]] = (),
    *,
    disk: Disk | None = None,
) -> list[Finding]:
    """Everything the doctor sees, the worst first."""
    visit = Visit(run, summaries, disk, Thresholds())
    found = [finding for check in CHECKS for finding in check(visit)]
    order = {SEVERE: 0, WARNING: 1, NOTE: 2}
    return sorted(found, key=lambda finding: order[finding.level])


def verdict(findings: Sequence[Finding], run: RunRecord) -> str:
    """One line: a clean bill, or what is wrong."""
    if not run.metrics:
        return "No step has ended yet: nothing to examine."
    wrong = [finding for finding in findings if finding.level != NOTE]
    if not wrong:
        return "Clean bill: nothing found that needs attention."
    return "; ".join(finding.title for finding in wrong) + "."


def to_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]
