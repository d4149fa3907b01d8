"""The lab: measurements and shows of the product.

`ctxcache bench`, `ctxcache demo`, `python -m lab.placement`, and `python -m lab.studies.NAME`.
"""

import os

# Before torch is loaded: lanes and engine each have threads of their own, and those that wait must not keep
# the cores from those that work. On two cores single products took up to a hundred times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
