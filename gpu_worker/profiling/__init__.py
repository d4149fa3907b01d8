"""The profiler: measures what a machine and a model take for each stage, and keeps it in a file.

Measurements go into `gpu_worker.planning.profile`; nothing here decides. Measuring needs torch,
reading and writing profiles does not.
"""
