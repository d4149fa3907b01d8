"""llama.cpp's server with conversations that the store keeps: one process, the same API.

    client ──► proxy ──► llama.cpp's own server
                 │ before: slot's file ◄── blocks ◄── store
                 └ after:  slot's file ──► blocks ──► store, by a thread

A request that names a session gets a slot of its own while it runs. The slot's state is a file that llama.cpp
reads and writes. Needs xllamacpp, and no torch. Worst case: a prompt is computed.
"""
