"""Is it the same model: what identifies a model, and when that is asked again.

```
   engine made                                 each turn                          rows saved
   ────┬─────────────────────────────────────────┬──────────────────────────────────┬──────►
   proof      do rows give back the cache?       unchanged                          weights
   executed   digests: weights, settings           weights: are sampled values       the sample
   spec       the fingerprint of both              equal?                            again
   probe      what do 16 tokens become?            snapshot: are all objects
                                                   the same?
                                                   else: both digests again
```

Where answers differ: a model without a proof is not served (UnsupportedArchitecture), the store refuses
another fingerprint (ModelFingerprintMismatch), the caller another probe (MODEL_PROBE_MISMATCH), and a turn a
model that was changed (ModelChanged). A worker beside an engine asks once, of what lies in a directory:
`spec.check_same`.
"""
