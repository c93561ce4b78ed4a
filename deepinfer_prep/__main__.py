"""`python -m deepinfer_prep`."""

from deepinfer_prep.cli.main import main

main(prog_name="deepinfer-prep")
