"""Makes safetensors files, valid and broken, and judges the project's reader of them by the safetensors library."""
