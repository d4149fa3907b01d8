"""Every knob of `ctxcache serve`, in one table."""

from ctxcache.settings.knobs.fleet import FLEET
from ctxcache.settings.knobs.knob import Knob, KnobKind, Section
from ctxcache.settings.knobs.limits import LIFECYCLE, LIMITS
from ctxcache.settings.knobs.listening import LISTENING
from ctxcache.settings.knobs.placement import PLACEMENT
from ctxcache.settings.knobs.places import PLACES, TIERS

SECTIONS = (PLACES, LISTENING, FLEET, TIERS, PLACEMENT, LIMITS, LIFECYCLE)
KNOBS = {knob.name: knob for section in SECTIONS for knob in section.knobs}

__all__ = ["KNOBS", "SECTIONS", "Knob", "KnobKind", "Section"]
