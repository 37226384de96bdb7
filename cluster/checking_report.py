"""What a check found, in tables for people and in JSON."""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
from rich.table import Table

from cluster.checking import Report
from cluster.checking_answers import PLACES
from cluster.checking_identity import Finding, IdentityVerdict
from cluster.checking_law import LEAST_DRAWS, MAX_TESTS, LawTest, LawVerdict, PlaceTest

Decode = Callable[[int], str]

SHOWN = 20  # differences, and tests that failed, in a table; all are in the JSON
PLACES_CAPTION = (
    f"tokens: behind prefixes that at least {LEAST_DRAWS} samples share (not tested: there are none; take more "
    "--samples); worst TV: total variation over its bound, of the worst prefix; finds TV: a law that is off by so much "
    "behind one prefix is found with 97 %"
)
PASSED, VIOLATED, NOT_SHOWN, SKIPPED = "passed", "VIOLATED", "NOT SHOWN", "skipped"


def verdict_line(report: Report) -> str:
    """Return the last line: passed, or what is wrong."""
    if report.passed:
        return "passed: speculation changes nothing"
    wrong = [name for name, is_wrong in (
        ("greedy identity", not report.greedy.passed),
        ("seeded identity", report.seeded is not None and not report.seeded.passed),
        ("the sampled law", not report.law.passed),
    ) if is_wrong]  # fmt: skip
    if wrong:
        return f"VIOLATED: {', '.join(wrong)}"
    return f"NOT SHOWN: {'; '.join(report.missing)}"


def as_json(report: Report) -> bytes:
    """Return the whole report as indented JSON; what is infinite becomes null."""
    told = {"passed": report.passed, "verdict": verdict_line(report), **_plain(report)}
    return msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n"


def _plain(report: Report) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(report)
    for part in ("greedy", "seeded", "law"):
        verdict = getattr(report, part)
        if verdict is not None:
            told[part]["passed"] = verdict.passed
    return told


def tables(report: Report, decode: Decode) -> list[Table]:
    """Return what to print of *report*; *decode* gives the text of a token id."""
    found = [_summary(report), _places(report.law)]
    findings = [*report.greedy.findings, *(report.seeded.findings if report.seeded else ())]
    if findings:
        found.append(_differences(findings, decode))
    if not report.law.passed:
        found.append(_failed_laws(report.law, decode))
    return found


def _summary(report: Report) -> Table:
    table = Table("check", "result", "found", title=f"Does speculation change anything? ({_setting(report)})")
    ran = f"on: {_counts(report.with_speculation)}; off: {_counts(report.without)}"
    table.add_row("speculation ran", NOT_SHOWN if report.missing else PASSED, "; ".join((ran, *report.missing)))
    table.add_row("greedy identity", _result(report.greedy.passed), _identity(report.greedy, report))
    if report.seeded is None:
        table.add_row("seeded identity", SKIPPED, f"rule {report.rule} promises the law of sampled tokens, not that "
                      "they are the same with speculation and without")
    else:
        table.add_row("seeded identity", _result(report.seeded.passed), _identity(report.seeded, report))
    table.add_row("sampled law", _result(report.law.passed), _law(report))
    return table


def _setting(report: Report) -> str:
    gap = report.allowance.gap
    ties = f"a tie: a gap below {gap:g}" if gap else "batch_invariant, no ties"
    return f"rule {report.rule}, {report.dtype}, {ties}"


def _result(passed: bool) -> str:
    return PASSED if passed else VIOLATED


def _counts(counts: Any) -> str:
    if not counts.proposed:
        return "no guesses"
    return f"{counts.proposed:,} guesses, {counts.accepted:,} accepted, {counts.rejected:,} rejected"


def _identity(verdict: IdentityVerdict, report: Report) -> str:
    text = f"{verdict.identical} of {verdict.sequences} sequences of {report.setting.max_tokens} tokens are identical"
    if verdict.ties:
        limit = "any number" if verdict.most_ties is None else f"at most {verdict.most_ties}"
        text += f"; {verdict.ties} differ by a floating-point tie ({limit} allowed)"
    if verdict.violations:
        text += f"; {verdict.violations} differ WITHOUT a tie. {verdict.why}"
    return text


def _law(report: Report) -> str:
    law, setting = report.law, report.setting
    text = (f"{setting.law_prompts} prompts x {setting.samples:,} seeds x {setting.law_tokens} tokens at temperature "
            f"{setting.temperature:g}; {len(law.tests)} prefixes tested by chi-square and total variation, false-alarm "
            f"rate {law.false_alarm:g} in all ({law.limit:g} for each of up to {MAX_TESTS} tests)")  # fmt: skip
    wrong = [test for test in law.tests if not test.passed]
    places = [PLACES[place.place] for place in law.places if not place.passed]
    if wrong:
        text += f"; the law is wrong behind {len(wrong)} prefixes"
    if places:
        text += f"; over all prefixes, it is wrong behind {', '.join(places)}"
    return text


def _places(law: LawVerdict) -> Table:
    table = Table("reached by", "prefixes", "tokens", "chi-square (freedom)", "p", "worst TV", "finds TV",
                  title="The sampled law, by how a position was reached", caption=PLACES_CAPTION)  # fmt: skip
    for place in law.places:
        table.add_row(*_place(place, [test for test in law.tests if test.place == place.place]))
    return table


def _place(place: PlaceTest, tests: Seq[LawTest]) -> list[str]:
    begin = [PLACES[place.place], str(place.groups), f"{place.tested:,}"]
    if not tests:
        return [*begin, "-", "not tested", "-", "-"]
    worst = max(test.tv / test.tv_bound for test in tests)
    finest = min(test.least_tv for test in tests)
    chi_square = f"{place.chi_square:.0f} ({place.freedom})"
    return [*begin, chi_square, f"{place.p_value:.2g}", f"{worst:.2f}", f"{finest:.2f}"]


def _differences(findings: Seq[Finding], decode: Decode) -> Table:
    ordered = sorted(findings, key=lambda finding: finding.is_tie)
    more = f", the first {SHOWN} of {len(findings)}" if len(findings) > SHOWN else ""
    table = Table("part", "prompt", "token no.", "with", "without", "comes from", "its p (rank)", "top-2 gap", "behind",
                  "verdict", title=f"Where answers part{more}")  # fmt: skip
    for finding in ordered[:SHOWN]:
        table.add_row(
            finding.part, str(finding.prompt + 1), str(finding.position + 1), _token(finding.with_token, decode),
            _token(finding.without_token, decode), finding.origin, f"{finding.probability:.2g} ({finding.rank})",
            f"{finding.gap:.2g}", "-" if math.isinf(finding.behind) else f"{finding.behind:.2g}",
            "tie" if finding.is_tie else VIOLATED,
        )  # fmt: skip
    return table


def _failed_laws(law: LawVerdict, decode: Decode) -> Table:
    failed = sorted((test for test in law.tests if not test.passed), key=lambda test: test.p_value)
    more = f", the first {SHOWN} of {len(failed)}" if len(failed) > SHOWN else ""
    table = Table("prompt", "behind", "reached by", "draws", "p", "TV / bound", "farthest off", "seen", "expected",
                  title=f"Prefixes whose next token has another law{more}")  # fmt: skip
    for test in failed[:SHOWN]:
        behind = "".join(decode(token) for token in test.prefix)
        table.add_row(
            str(test.prompt + 1), repr(behind), PLACES[test.place], f"{test.draws:,}",
            f"{min(test.p_value, test.rest_p_value):.2g}", f"{test.tv / test.tv_bound:.2f}",
            "all others" if test.token < 0 else _token(test.token, decode), str(test.seen), f"{test.expected:.1f}",
        )  # fmt: skip
    return table


def _token(token: int, decode: Decode) -> str:
    return "nothing" if token < 0 else f"{token} {decode(token)!r}"
