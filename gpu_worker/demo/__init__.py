"""The demo: a real small model, real text, and what the cache saves on them.

Nothing here asks a model hub: the switch is set before any submodule can import transformers.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
