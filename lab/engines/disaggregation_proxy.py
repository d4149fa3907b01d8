#!/usr/bin/env python3
"""One address for prefill here, decode there: each request goes to a prefill engine, then to a decode engine.

    python -m lab.engines.disaggregation_proxy --prefill 127.0.0.1:8100 --decode 127.0.0.1:8200 --port 8000

Several engines of a kind take turns. Answers are passed on as they come. Worst case: a prefill engine that is
gone, or refuses, costs its part: the decode engine computes the prompt. Python's own modules are enough.
"""

import argparse
import http.client
import itertools
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PASSED_ON = ("Authorization", "X-Session-ID", "X-Request-Id")
CALL_S = 600.0


class Proxy(ThreadingHTTPServer):
    """Serves at `port` of this host; `prefill` and `decode` are addresses, `host:port`."""

    request_queue_size = 1024

    def __init__(self, port: int, prefill: list[str], decode: list[str]) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.prefill, self.decode = itertools.cycle(prefill), itertools.cycle(decode)


class Handler(BaseHTTPRequestHandler):
    """One request after another of one caller."""

    server: Proxy

    def do_POST(self) -> None:
        """Have the prompt computed, then the answer."""
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body["kv_transfer_params"] = (body.get("kv_transfer_params") or {}) | self._prefilled(body)
        response = self._ask(next(self.server.decode), body)
        self.send_response(response.status)
        self.send_header("Content-Type", response.headers["Content-Type"])
        self.end_headers()
        while part := response.read1():
            self.wfile.write(part)

    def _prefilled(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the prefill engine says of the prompt that it has computed; nothing where it fails."""
        prompt = body | {"stream": False, "max_tokens": 1, "n": 1}
        if "max_completion_tokens" in body:
            prompt["max_completion_tokens"] = 1
        for key in ("stream_options", "min_tokens"):
            prompt.pop(key, None)
        said = body.get("kv_transfer_params") or {}
        prompt["kv_transfer_params"] = said | {"do_remote_decode": True, "do_remote_prefill": False}
        try:
            answer = json.loads(self._ask(next(self.server.prefill), prompt).read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.log_error("no prefill: %r", error)
            return {}
        return answer.get("kv_transfer_params") or {}

    def _ask(self, address: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        headers |= {name: self.headers[name] for name in PASSED_ON if name in self.headers}
        connection = http.client.HTTPConnection(address, timeout=CALL_S)
        connection.request("POST", self.path, json.dumps(body).encode(), headers)
        return connection.getresponse()


def main() -> None:
    """Serve until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="HOST:PORT")
    parser.add_argument("--decode", nargs="+", required=True, metavar="HOST:PORT")
    asked = parser.parse_args()
    Proxy(asked.port, asked.prefill, asked.decode).serve_forever()


if __name__ == "__main__":
    main()
