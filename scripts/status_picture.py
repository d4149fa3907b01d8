#!/usr/bin/env python3
"""Take docs/status_page.png.

The status page of a server under load, whose minutes pass in a fifth of a second.

`status_picture.py DIRECTORY` writes light.png, dark.png and phone.png there; docs/status_page.png is the
light one.
"""

import asyncio
import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ctxcache  # noqa: E402
from ctxcache.client import CallerModel, Client, QueuedJob  # noqa: E402
from ctxcache.core.placement.shares import Share  # noqa: E402
from ctxcache.errors import CacheError  # noqa: E402
from ctxcache.format.model import ModelSpec  # noqa: E402
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec  # noqa: E402
from ctxcache.identity import (  # noqa: E402
    ArenaGrant,
    Token,
    digest_of,
    new_secret,
)
from ctxcache.observe import moment  # noqa: E402
from ctxcache.server.server import Server  # noqa: E402
from ctxcache.settings.config import Settings  # noqa: E402

MIB = 1 << 20
ROW_BYTES, LAYERS = 1024, 4
TENANTS = ("chat", "coding", "batch")
LOAD_S = 15.0
LOOKS = {
    "light": (1280, 1480, ""),
    "dark": (1280, 1480, "--blink-settings=preferredColorScheme=0"),
    "phone": (500, 1400, ""),
}
STREAMS = [Stream(layer, StateKind.HIDDEN) for layer in range(LAYERS)]
MODEL = ModelSpec(
    model_id="llama-3.1-8b",
    architecture="Llama",
    revision="",
    weights_digest="w",
    tokenizer_digest="t",
    dtype=DType.FLOAT16,
    layer_count=LAYERS,
    hidden_size=ROW_BYTES // 2,
    kv_head_count=1,
    head_size=64,
    rope="",
    norm="",
    is_relocatable=True,
    streams=tuple(StreamSpec(stream, ROW_BYTES, DType.FLOAT16) for stream in STREAMS),
)


def main() -> None:
    """Load a server and take the pictures."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    moment.INTERVAL_S = LOAD_S / 50
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_run(Path(directory), out))


async def _run(directory: Path, out: Path) -> None:
    secrets = {tenant: new_secret() for tenant in TENANTS}
    hashes = directory / "hashes"
    lines = [
        Token(tenant, digest_of(secret), ArenaGrant(tenant)).line() for tenant, secret in secrets.items()
    ]
    hashes.touch(0o600)
    hashes.write_text("\n".join(lines) + "\n")
    settings = Settings(
        data_directory=directory / "data",
        listen="127.0.0.1:0",
        unix_socket="",
        arena_size_bytes=64 * MIB,
        ssd_size_bytes=256 * MIB,
        arena_huge_pages="off",
        token_hashes=hashes,
        status_names="on",
        prefill_tokens_per_s=5000,
        engine_cents_per_hour=400,
        tail_age_s=5,
        tenant_shares={"chat": Share(0.4, 1), "batch": Share(0.1, 0.5)},
    )
    server = await Server.start(settings)
    with contextlib.ExitStack() as stack:
        clients = {}
        for tenant, secret in secrets.items():
            token = directory / tenant
            token.touch(0o600)
            token.write_text(secret)
            client = stack.enter_context(
                await asyncio.to_thread(ctxcache.connect, server.addresses[0], token_file=token)
            )
            clients[tenant] = client
        ended = threading.Event()
        loads = [
            asyncio.create_task(asyncio.to_thread(_load, client, tenant, ended))
            for tenant, client in clients.items()
        ]
        await asyncio.sleep(LOAD_S)
        queues = [stack.enter_context(clients["chat"].hints.engine_queue(f"vllm-{i}")) for i in range(3)]
        for i, queue in enumerate(queues):
            for j in range(7 * (i + 1)):
                queue.put(QueuedJob(f"job-{j}", f"sessions/chat-{j:04}", position=j))
        for name, (width, height, option) in LOOKS.items():
            await asyncio.to_thread(
                _picture, server.metrics_address, out / f"{name}.png", width, height, option
            )
        ended.set()
        await asyncio.gather(*loads)
    await server.stop()


def _load(client: Client, tenant: str, ended: threading.Event) -> None:
    rng = random.Random(tenant)  # noqa: S311  # a load, not a secret
    client.models.register(MODEL)
    ids: list[str] = []
    while not ended.is_set():
        is_return = len(ids) > 8 and rng.random() < 0.9
        with contextlib.suppress(CacheError):
            if is_return:
                weights = [1 / (len(ids) - i) ** 1.4 for i in range(len(ids))]
                (session_id,) = rng.choices(ids, weights)
                with client.sessions.open(f"sessions/{session_id}", CallerModel(MODEL)).read() as read:
                    read.array(STREAMS[0])
                session = client.sessions.get(f"sessions/{session_id}")
            else:
                session_id = f"{tenant}-{len(ids):04}"
                ids.append(session_id)
                session = client.sessions.create(CallerModel(MODEL), id=session_id, layout=STREAMS).info
            count = rng.choice((64, 128, 320, 768))
            rows = {Stream(-1, StateKind.TOKENS): np.zeros((count, 4), np.uint8)}
            client.sessions.open(session, CallerModel(MODEL)).append(
                rows | {s: np.zeros((count, ROW_BYTES), np.uint8) for s in STREAMS},
            )
        if rng.random() < 0.1:
            with contextlib.suppress(CacheError):
                client.sessions.get(f"sessions/{tenant}-elsewhere")
        ended.wait(rng.choice((0.002, 0.01, 0.03)))


def _picture(address: str, out: Path, width: int, height: int, option: str) -> None:
    chromium = shutil.which("chromium") or sys.exit("chromium is not installed")
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--screenshot={out}",
        f"--window-size={width},{height}",
        *([option] if option else []),
        f"http://{address}/",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)  # noqa: S603


if __name__ == "__main__":
    main()
