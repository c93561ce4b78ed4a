"""Places beyond this machine, behind the door of `files.storage`: object stores and the Hugging Face hub."""
