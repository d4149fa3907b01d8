"""llama.cpp's server with conversations that the store keeps: one process, the same API.

    client ──► proxy ──► llama.cpp's own server
                 │ before: slot's file ◄── blocks ◄── store
                 │ after:  slot's file ──► blocks ──► store, by a thread
                 └ ahead:  the next prompt, where it differs, while nobody asks for anything

A request that names a session gets a slot of its own while it runs. The slot's state is a file that llama.cpp
reads and writes. Needs xllamacpp, and no torch. Worst case: a prompt is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpu_worker.planning.ahead import SHARE


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """Settings of the server. Their module imports neither llama.cpp nor the store's client."""

    model: Path
    host: str = "127.0.0.1"
    port: int = 8080
    slot_count: int = 4
    context_tokens: int = 0
    """Tokens of context of all slots together; 0 takes the model's own length in each slot."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Fields of xllamacpp's `CommonParams`, perhaps with dots, by name."""
    store: str = "127.0.0.1:7420"
    store_token_file: Path | None = None
    store_ca: Path | None = None
    store_certificate: Path | None = None
    store_key: Path | None = None
    store_server_name: str | None = None
    store_timeout_s: float = 1.0
    ttl_s: float | None = None
    """How long a conversation is kept after its last access; by default as long as there is room."""
    durability: str = "disk"
    ahead: float = SHARE
    """The most of the time that passes ahead take, 0 for none."""
    directory: Path | None = None
    """Where slots' files lie for a moment; by default the system's directory for such."""
