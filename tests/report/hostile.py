"""Tensor names that try to leave the place they are shown in."""

from __future__ import annotations

HOSTILE_NAMES = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>.weight",
    '"><svg onload="window.hacked = 3">',
    "layers.0.<b>bold</b>.<a href='https://example.invalid/'>link</a>.weight",
    "quotes.'\".\\.`.weight",
    "bidi.\u202etxt.thgiew\u202c.\u2066weight",
    "control.\x00\x07\x1b[31m\x7f.weight",
    "lines.\n\r\u2028\u2029.weight",
    "{{data}}.{{script}}.weight",
    "<!--",
    "%{y}.$x^2$.&lt;i&gt;.&amp;.weight",
    "__proto__",
    "constructor",
    "layers.99999999999999999999.weight",
    "long." + "x" * 3000,
)
