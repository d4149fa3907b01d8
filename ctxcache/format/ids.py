"""Which ids sessions and models have."""

import re

# No slash: ids of blocks have one, and a resource name is `sessions/` and the id.
SESSION_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._:-]{0,127}")
MODEL_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,127}")
