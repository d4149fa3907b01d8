"""What a process asks of the machine: time, memory, threads, files of facts, logs and spans."""
