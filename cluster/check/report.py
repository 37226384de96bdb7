"""The report of a check, as tables and as JSON."""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
from rich.table import Table

from cluster.check.answers import PLACES, DraftCounts
from cluster.check.distribution import LEAST_DRAWS, MAX_TESTS, DistributionTest, DistributionVerdict, PlaceTest
from cluster.check.identity import Allowance, Finding, IdentityVerdict

Decode = Callable[[int], str]

SHOWN = 20
"""Differences, and failed tests, that are printed; the JSON holds all."""
PLACES_CAPTION = (
    f"tokens: those after prefixes that at least {LEAST_DRAWS} samples share (-: there is none; take more --samples); "
    "worst: total variation over its bound, of the worst prefix; finds: the total variation after one prefix that is "
    "found with a probability of 97 %"
)
PASSED, VIOLATED, NOT_SHOWN, SKIPPED = "passed", "VIOLATED", "NOT SHOWN", "skipped"


class Setting(msgspec.Struct, frozen=True):
    """The size of a check: `samples` answers of `sampled_tokens` tokens after each of `sampled_prompts` prompts."""

    prompts: int
    max_tokens: int
    sampled_prompts: int = msgspec.field(name="law_prompts")
    samples: int
    sampled_tokens: int = msgspec.field(name="law_tokens")
    temperature: float
    seed: int


class Report(msgspec.Struct, frozen=True):
    """The result of a check.

    Attributes:
        dtype: of the target's logits.
        rule: `rejection_sample_method`.
        batch_invariant: whether ties are disallowed because the engine promises the same bits.
        allowance: what counts as a tie.
        setting: the size of the check.
        with_speculation, without: draft tokens of the two engines.
        missing: outcomes that did not occur, without which the check proves little.
        greedy, seeded: identity; `seeded` is None for rules that do not promise it.
        distribution: of the tokens sampled with speculation.
    """

    dtype: str
    rule: str
    batch_invariant: bool
    allowance: Allowance
    setting: Setting
    with_speculation: DraftCounts
    without: DraftCounts
    missing: tuple[str, ...]
    greedy: IdentityVerdict
    seeded: IdentityVerdict | None
    distribution: DistributionVerdict = msgspec.field(name="law")

    @property
    def passed(self) -> bool:
        """Whether speculation ran and changed nothing."""
        identical = self.greedy.passed and (self.seeded is None or self.seeded.passed)
        return identical and self.distribution.passed and not self.missing


def verdict_line(report: Report) -> str:
    """Return the last line of the output: passed, or what is wrong."""
    if report.passed:
        return f"passed: speculation changes nothing{_but_ties(report)}"
    wrong = [
        name
        for name, is_wrong in (
            ("greedy identity", not report.greedy.passed),
            ("seeded identity", report.seeded is not None and not report.seeded.passed),
            ("the sampled distribution", not report.distribution.passed),
        )
        if is_wrong
    ]
    if wrong:
        return f"VIOLATED: {', '.join(wrong)}"
    return f"NOT SHOWN: {'; '.join(report.missing)}"


def _but_ties(report: Report) -> str:
    """Return what is to be added to "nothing", and the options with which ties are rare or excluded."""
    parts = [part for part in (report.greedy, report.seeded) if part is not None]
    ties, sequences = sum(part.ties for part in parts), sum(part.sequences for part in parts)
    if not ties:
        return ""
    rare = "" if report.dtype == "float32" else "--dtype float32 makes them rare, "
    return (
        f" but ties: {ties} of {sequences} answers differ after two tokens that are equally good within the rounding "
        f"of {report.dtype}; {rare}--batch-invariant excludes them"
    )


def as_json(report: Report) -> bytes:
    """Return the whole report as indented JSON; infinite values become null."""
    content = {"passed": report.passed, "verdict": verdict_line(report), **_plain(report)}
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def _plain(report: Report) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.to_builtins(report)
    for part, verdict in (("greedy", report.greedy), ("seeded", report.seeded), ("law", report.distribution)):
        if verdict is not None:
            content[part]["passed"] = verdict.passed
    return content


def tables(report: Report) -> list[Table]:
    """Return the two tables to print of *report*."""
    return [_summary(report), _places(report.distribution)]


def lines(report: Report, decode: Decode) -> list[str]:
    """Return a line for each difference and each failed test, the worst first; *decode* returns the text of a token."""
    findings = [*report.greedy.findings, *(report.seeded.findings if report.seeded else ())]
    ordered = sorted(findings, key=lambda finding: finding.is_tie)
    wrong = sorted((test for test in report.distribution.tests if not test.passed), key=lambda test: test.p_value)
    differing = [_difference(finding, decode) for finding in ordered[:SHOWN]] + _more(len(ordered), "differences")
    failed = [_failed_test(test, decode) for test in wrong[:SHOWN]]
    return differing + failed + _more(len(wrong), "prefixes with a wrong distribution")


def _more(count: int, what: str) -> list[str]:
    return [f"... and {count - SHOWN} more {what}; --json lists all"] if count > SHOWN else []


def _summary(report: Report) -> Table:
    table = Table("check", "result", "found", title=f"Does speculation change anything? ({_setting(report)})")
    ran = f"on: {_counts(report.with_speculation)}; off: {_counts(report.without)}"
    table.add_row("speculation ran", NOT_SHOWN if report.missing else PASSED, "; ".join((ran, *report.missing)))
    table.add_row("greedy identity", _result(report.greedy.passed), _identity(report.greedy, report))
    if report.seeded is None:
        table.add_row(
            "seeded identity",
            SKIPPED,
            f"rule {report.rule} promises the distribution of sampled tokens, not that "
            "they are the same with speculation and without",
        )
    else:
        table.add_row("seeded identity", _result(report.seeded.passed), _identity(report.seeded, report))
    table.add_row("sampled distribution", _result(report.distribution.passed), _distribution(report))
    return table


def _setting(report: Report) -> str:
    allowance = report.allowance
    ties = f"a tie: a gap below {allowance.gap:g}" if allowance.gap else "batch_invariant, no ties"
    if allowance.logit_gap:
        ties = f"a tie: a gap below {allowance.logit_gap:g} in logits"
    return f"rule {report.rule}, {report.dtype}, {ties}"


def _result(passed: bool) -> str:
    return PASSED if passed else VIOLATED


def _counts(counts: Any) -> str:
    if not counts.proposed:
        return "no draft tokens"
    return f"{counts.proposed:,} draft tokens, {counts.accepted:,} accepted, {counts.rejected:,} rejected"


def _identity(verdict: IdentityVerdict, report: Report) -> str:
    text = f"{verdict.identical} of {verdict.sequences} sequences of {report.setting.max_tokens} tokens are identical"
    if verdict.ties:
        limit = "any number" if verdict.most_ties is None else f"at most {verdict.most_ties}"
        text += f"; {verdict.ties} differ by a floating-point tie ({limit} allowed)"
    if verdict.violations:
        text += f"; {verdict.violations} differ WITHOUT a tie. {verdict.explanation}"
    return text


def _distribution(report: Report) -> str:
    verdict, setting = report.distribution, report.setting
    text = (
        f"{setting.sampled_prompts} prompts x {setting.samples:,} seeds x {setting.sampled_tokens} tokens at "
        f"temperature {setting.temperature:g}; {len(verdict.tests)} prefixes tested by chi-square and total variation, "
        f"false-alarm rate {verdict.false_alarm:g} in all ({verdict.limit:.2g} for each of up to {MAX_TESTS} tests)"
    )
    wrong = [test for test in verdict.tests if not test.passed]
    places = [PLACES[place.place] for place in verdict.places if not place.passed]
    if wrong:
        text += f"; the distribution is WRONG after {len(wrong)} prefixes"
    if places:
        text += f"; over all prefixes together the distribution is WRONG after: {', '.join(places)}"
    return text


def _places(verdict: DistributionVerdict) -> Table:
    table = Table("after", "prefixes", "tokens", "chi2 (df)", "p", "worst", "finds",
                  title="The sampled distribution, by what a position follows", caption=PLACES_CAPTION)  # fmt: skip
    for place in verdict.places:
        table.add_row(*_place(place, [test for test in verdict.tests if test.place == place.place]))
    return table


def _place(place: PlaceTest, tests: Seq[DistributionTest]) -> list[str]:
    begin = [PLACES[place.place], str(place.groups), f"{place.tested:,}"]
    if not tests:
        return [*begin, *["-"] * 4]
    worst = max(test.tv / test.tv_bound for test in tests)
    finest = min(test.least_tv for test in tests)
    chi_square = f"{place.chi_square:.0f} ({place.freedom})"
    return [*begin, chi_square, f"{place.p_value:.2g}", f"{worst:.2f}", f"{finest:.2f}"]


def _difference(finding: Finding, decode: Decode) -> str:
    shortfall = "" if math.isinf(finding.shortfall) else f", the worse token is {finding.shortfall:.2g} below"
    return (
        f"{finding.part}, prompt {finding.prompt + 1}, token {finding.position + 1}: "
        f"{_token(finding.with_token, decode)} with speculation ({finding.origin}; p {finding.probability:.2g}, rank "
        f"{finding.rank}), {_token(finding.without_token, decode)} without; top-2 gap {finding.gap:.2g}{shortfall}: "
        f"{'a tie' if finding.is_tie else 'NO TIE'}"
    )


def _failed_test(test: DistributionTest, decode: Decode) -> str:
    prefix = "".join(decode(token) for token in test.prefix)
    token = "the rest" if test.token < 0 else _token(test.token, decode)
    return (
        f"distribution, prompt {test.prompt + 1} + {prefix!r} (after: {PLACES[test.place]}): {token} came {test.seen} "
        f"times of {test.draws}, {test.expected:.1f} expected; p {min(test.p_value, test.rest_p_value):.2g}, TV "
        f"{test.tv:.3f} (bound {test.tv_bound:.3f}): WRONG"
    )


def _token(token: int, decode: Decode) -> str:
    return "nothing" if token < 0 else f"{token} {decode(token)!r}"
