"""Tests of remote places."""

import os

os.environ.setdefault("S3_UPLOAD_PART_MIN_SIZE", "1")  # Read when moto is imported: tests send small parts.
