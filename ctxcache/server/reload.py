"""Reload: settings are read again while the server runs, and some of them change.

A reload is all or nothing: settings that cannot be read, or contradict each other, change nothing. Worst
case: a changed setting that needs a restart, which is named each time until then.
"""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ctxcache.cache import Cache
from ctxcache.core.ledger.session import Expiration
from ctxcache.errors import InvalidConfiguration
from ctxcache.settings.config import Settings, limits_of, queue_limits_of, watermarks_of
from ctxcache.settings.knobs import KNOBS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Names of settings with another value: those that hold it now, and those that wait for a restart."""

    changed: tuple[str, ...]
    pending: tuple[str, ...]


class Reloading:
    """The settings of a running server. Owned by the event loop."""

    def __init__(self, settings: Settings, cache: Cache, read: Callable[[], Settings]) -> None:
        """`read` reads the settings as at the start."""
        self.settings = settings
        self._cache = cache
        self._read = read

    def shown(self) -> Iterator[tuple[str, str, bool]]:
        """Each setting's name, value as JSON, and whether it changes while the server runs."""
        values = json.loads(self.settings.model_dump_json())
        return ((name, json.dumps(values[name]), knob.can_reload) for name, knob in KNOBS.items())

    def run(self) -> Reloaded:
        """Read the settings and change them. Raises InvalidConfiguration; then nothing has changed."""
        read = self._read()
        differing = [name for name in KNOBS if getattr(read, name) != getattr(self.settings, name)]
        changed = tuple(name for name in differing if KNOBS[name].can_reload)
        pending = tuple(name for name in differing if not KNOBS[name].can_reload)
        update = {name: getattr(read, name) for name in changed}
        # Settings that agree in the file may contradict those that wait for a restart.
        settings = Settings.model_validate({name: getattr(self.settings, name) for name in KNOBS} | update)
        self._apply(settings)
        self.settings = settings
        log.info("settings_reloaded changed=%s pending=%s", ",".join(changed), ",".join(pending))
        return Reloaded(changed, pending)

    def _apply(self, settings: Settings) -> None:
        cache = self._cache
        # The step that can refuse comes first: until here nothing has changed.
        try:
            cache.ledger.usage.shares.become(settings.tenant_shares)
        except ValueError as error:
            raise InvalidConfiguration(source="tenant_shares", problem=str(error)) from error
        cache.sessions.default_expiration = Expiration(int(settings.default_ttl_s * 10**9))
        cache.ledger.watermarks = watermarks_of(settings)
        cache.state.limits = limits_of(settings, are_divided=cache.state.limits.are_divided)
        cache.queues.limits = queue_limits_of(settings, are_divided=cache.queues.limits.are_divided)
        logging.getLogger().setLevel(settings.log_level.upper())
        # Sessions may be due by now.
        cache.state.is_pressed.set()
