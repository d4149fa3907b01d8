"""The demo: a real small model, real text, and what the cache saves on them.

Both switches are read when a library is loaded, so they are set before any submodule can import
torch or transformers.
"""

import os

# Nothing here asks a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Threads that spin while they wait for each other stop a machine that has other things to do: with
# one busy process on two cores, 32 tokens took 3 s with this and 41 s without.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
