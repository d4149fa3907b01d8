"""The machine, as a process uses it: time, memory, threads, files of facts, logs and spans."""
