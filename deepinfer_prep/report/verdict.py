"""The verdict: one sentence that is right for every kind of checkpoint and output."""

from __future__ import annotations

from deepinfer_prep.report.codes import CodeFigures
from deepinfer_prep.report.figures import Verdict
from deepinfer_prep.report.subject import Subject


def judge(subject: Subject, total: CodeFigures | None, refusals: tuple[str, ...], bad_codes: int) -> Verdict:
    """Judge a checkpoint or an output.

    Args:
        subject: what headers and manifest say.
        total: the codes of all fp8 weights; None where they were not read.
        refusals: what stops a conversion, or where an output is not what its manifest says.
        bad_codes: codes of an output that the hardware would misread.
    """
    if subject.manifest is not None:
        return _judge_output(total, refusals, bad_codes, subject.manifest.tool_version)
    if refusals:
        reasons = "1 reason" if len(refusals) == 1 else f"{len(refusals):,} reasons"
        return Verdict("refused", f"This checkpoint cannot be converted as it is, for {reasons} listed below.")
    if not any(weight.element == "e4m3" for weight in subject.weights):
        return Verdict("nothing to do", _nothing_to_do(subject))
    return Verdict("ready", f"This checkpoint can be converted. {_what_it_gains(total)}")


def _judge_output(total: CodeFigures | None, problems: tuple[str, ...], bad_codes: int, version: str) -> Verdict:
    if bad_codes:
        return Verdict(
            "damaged",
            f"This output is damaged: {bad_codes:,} of its fp8 codes lie above 240, where Trainium2 reads infinity or "
            "NaN. Convert the checkpoint again.",
        )
    if problems:
        places = "1 place" if len(problems) == 1 else f"{len(problems):,} places"
        return Verdict(
            "damaged", f"This output is not what its manifest says, in {places} listed below. Convert it again."
        )
    if total is None:
        return Verdict(
            "finished",
            f"This is a finished output of deepinfer-prep {version}: files and headers are what its manifest says. "
            "Its fp8 data was not read.",
        )
    if not total.codes:
        return Verdict("finished", f"This is a finished output of deepinfer-prep {version}; it holds no halved weight.")
    mended = total.brought_into_range or 0
    return Verdict(
        "finished",
        f"This is a finished output of deepinfer-prep {version}: none of its {total.codes:,} fp8 codes lies above 240; "
        f"{mended:,} of them ({_share(mended, total.codes)}) did before the conversion.",
    )


def _nothing_to_do(subject: Subject) -> str:
    if subject.unscaled:
        return (
            "Nothing in this checkpoint needs halving: its fp8 tensors have no scale and are copied as they are, with "
            "everything else."
        )
    if subject.weights:
        return (
            "Nothing in this checkpoint needs halving: its quantized weights are fp4, which the hardware reads as they "
            "are."
        )
    return (
        "Nothing in this checkpoint needs converting: no weight in it is fp8 (e4m3) with a scale; convert would only "
        "copy it."
    )


def _what_it_gains(total: CodeFigures | None) -> str:
    if total is None:
        return "Headers alone were read: how many codes Trainium2 would misread takes a report without --headers-only."
    if not total.codes:
        return "Its fp8 weights are empty."
    misread, rounded = total.above_240, total.rounded or 0
    first = (
        f"Unconverted, Trainium2 would misread {misread:,} of its {total.codes:,} fp8 codes "
        f"({_share(misread, total.codes)})"
        if misread
        else f"None of its {total.codes:,} fp8 codes lies above 240, but the compiler rejects the type as it is"
    )
    second = (
        f"halving rounds {rounded:,} ({_share(rounded, total.codes)}) by half a step of the smallest magnitudes"
        if rounded
        else "halving changes no value"
    )
    nan = f" {total.nan:,} codes are NaN and stay so." if total.nan else ""
    return f"{first}; {second}.{nan}"


def _share(count: int, of: int) -> str:
    """A share in percent with two significant digits."""
    percent = 100 * count / of if of else 0.0
    return f"{percent:.2g} %" if percent < 99.5 else f"{percent:.4g} %"
