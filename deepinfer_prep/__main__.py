"""`python -m deepinfer_prep`."""

from deepinfer_prep.cli import main

main(prog_name="deepinfer-prep")
