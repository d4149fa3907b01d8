"""Every knob of `ctxcache serve`, in one table."""

from ctxcache.knobs.knob import Kind, Knob, Section
from ctxcache.knobs.lifecycle import LIFECYCLE
from ctxcache.knobs.limits import LIMITS
from ctxcache.knobs.listening import LISTENING
from ctxcache.knobs.placement import PLACEMENT
from ctxcache.knobs.places import PLACES
from ctxcache.knobs.tiers import TIERS

SECTIONS = (PLACES, LISTENING, TIERS, PLACEMENT, LIMITS, LIFECYCLE)
KNOBS = {knob.name: knob for section in SECTIONS for knob in section.knobs}

__all__ = ["KNOBS", "SECTIONS", "Kind", "Knob", "Section"]
