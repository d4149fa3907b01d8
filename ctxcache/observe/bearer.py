"""The token that a scraper shows, in a file that is read again when it changes.

A browser shows it as the password of any user. Worst case: a file that cannot be used, which is refused at
the start; later what was read before goes on, and the log says so.
"""

import base64
import binascii
import hashlib
import hmac
import logging
from pathlib import Path

from ctxcache.errors import InvalidConfiguration
from ctxcache.runtime.files import check_secret, is_shortage, secret_refusal, stamp

log = logging.getLogger(__name__)

CHALLENGE = 'Bearer realm="metrics", Basic realm="metrics"'
LIMIT_BYTES = 4096
_SHORTEST = 16
"""Characters: fewer are guessed."""


class Bearer:
    """A token as it is in its file now."""

    def __init__(self, path: Path, *, source: str) -> None:
        """Read it; `source` is the setting's name. Raises InvalidConfiguration."""
        self._path, self._source = path, source
        self._seen = stamp(path)
        self._digest = self._read()

    def allows(self, authorization: str) -> bool:
        """Whether an Authorization header shows the token.

        Compared in constant time, by hashes of one length.
        """
        self._refresh()
        scheme, _, shown = authorization.strip().partition(" ")
        if scheme.lower() == "basic":
            shown = _password(shown)
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(_digest_of(shown.strip()), self._digest)

    def _refresh(self) -> None:
        found = stamp(self._path)
        if found == self._seen:
            return
        # Noted before it is read: a file that is refused is not read again before it changes.
        self._seen = found
        try:
            self._digest = self._read()
        except InvalidConfiguration as error:
            if is_shortage(error):
                self._seen = ()
            log.error("metrics_token_refused error=%s", error)  # noqa: TRY400  the sentence says all

    def _read(self) -> bytes:
        try:
            check_secret(self._path, secret_refusal(self._source, self._path))
            with self._path.open("rb") as file:
                text = file.read(LIMIT_BYTES + 1).decode(errors="replace").strip()
        except OSError as error:
            problem = f"{self._path}: {error.strerror}"
            raise InvalidConfiguration(source=self._source, problem=problem) from error
        if not _SHORTEST <= len(text) <= LIMIT_BYTES or not text.isascii() or len(text.split()) != 1:
            problem = f"{self._path}: it is not one word of {_SHORTEST} to {LIMIT_BYTES} characters"
            raise InvalidConfiguration(source=self._source, problem=problem)
        return _digest_of(text)


def _digest_of(text: str) -> bytes:
    return hashlib.sha256(text.encode("latin-1", "replace")).digest()


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials.strip(), validate=True).decode("latin-1").partition(":")[2]
    except binascii.Error:
        return ""
