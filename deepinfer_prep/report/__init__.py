"""The page that shows a checkpoint or an output: `build_report` gives the figures, `render_page` the page."""

from __future__ import annotations

from deepinfer_prep.report.build import build_report
from deepinfer_prep.report.page import render_page

__all__ = ["build_report", "render_page"]
