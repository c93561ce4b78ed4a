"""The compiler's environment: what fp8 bytes mean to it, set up before the first graph is compiled."""

from __future__ import annotations

import logging
import os

from deepinfer_prep.runtime import cc_flags, neuron, settings

log = logging.getLogger(__name__)

_CAST = "UNSAFE_FP8FNCAST"
_FLAGS = "NEURON_CC_FLAGS"
_TRUTHY = ("1", "true", "yes", "on")


def configure_compiler() -> None:
    """Let the compiler take e4m3fn bytes as e4m3, which is right for halved weights. Call it before compiling.

    Sets `UNSAFE_FP8FNCAST=1` unless it is set, and adds `--experimental-unsafe-fp8e4m3fn-as-fp8e4m3` inside
    the one `--internal-hlo2tensorizer-options=` value of `NEURON_CC_FLAGS`, keeping the user's other options.
    A second call changes nothing. Where several options have to share that value it needs quotes, which
    only launchers with shell quoting understand: that is logged as a warning.

    Does nothing on chips that read e4m3fn themselves (trn3), nor with `DEEPINFER_NEURON_FP8_MAX=448`.

    Raises:
        PrepError: `NEURON_CC_FLAGS` holds a quote that is not closed, or `DEEPINFER_NEURON_FP8_MAX` no
            usable number.
    """
    _report_placeholders()
    if settings.leaves_e4m3fn():
        return
    if not neuron.computes_in_e4m3():
        _report_stray_option()
        return
    if not os.environ.get(_CAST):
        os.environ[_CAST] = "1"
    elif os.environ[_CAST].strip().lower() not in _TRUTHY:
        log.warning("%s is %r: NKI kernels will refuse e4m3fn tensors. Set it to 1.", _CAST, os.environ[_CAST])
    merged = cc_flags.add_fp8_option(os.environ.get(_FLAGS, ""))
    os.environ[_FLAGS] = merged.text
    for note in merged.notes:
        log.warning("%s", note)


def describe() -> str:
    """One line for logs: the fp8 range in force, the chip, both compiler variables and AWS's packages."""
    kept = "e4m3fn left alone" if settings.leaves_e4m3fn() else "halved weights, doubled scales"
    parts = [
        f"fp8 range {settings.fp8_max():g} ({kept})",
        f"chip {neuron.chip() or 'unknown'}",
        f"{_CAST}={os.environ.get(_CAST, '')}",
        f"{_FLAGS}={os.environ.get(_FLAGS, '')!r}",
        *(str(package) for package in neuron.packages()),
    ]
    return "; ".join(parts)


def _report_placeholders() -> None:
    for package in neuron.packages():
        if package.state == "placeholder":
            log.warning("%s. %s", package.problem, neuron.remedy(package))


def _report_stray_option() -> None:
    if cc_flags.holds_fp8_option(os.environ.get(_FLAGS, "")):
        log.warning(
            "%s holds %s, but %s reads e4m3fn itself and the option makes its compiler mix two fp8 types "
            "(NCC_EOCP001). Remove it.",
            _FLAGS,
            cc_flags.FP8_OPTION,
            neuron.chip(),
        )
