"""What `verify` checks of a finished output; one module for each kind of check."""
