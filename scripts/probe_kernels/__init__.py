"""The kernels of `device_probes.py`, each the smallest that has one doubtful form."""
