"""vLLM with a context store: a conversation that comes back finds its K and V in the store.

vLLM makes two connectors: one beside its scheduler, which looks sessions up, and one in each worker, which
moves rows. A request names its session by `session_id` (a field of the OpenAI request, or the header
`X-Session-ID`), or by `session_id` in its `kv_transfer_params`. A request without one gets a session of its
own. A new session begins with what other sessions have of its prompt.

```
  scheduler                                   worker
  request arrives ──► look up, in a thread    step ──► restore the rows of new requests into their blocks
  asked for it    ──► None until it is done           ──► capture K before RoPE and V of what is computed
  step            ──► what to restore, to save        ──► threads commit them; what ended is told
```

Rows are the K and V before positions that `TransformersEngine` saves, so that a session goes on in either
engine. A store that is gone, slow or damaged costs a computed prompt, never a wrong token or a failed
request. Worst case: the look-up of a store that does not answer holds up its own request for
`timeout_s`.
"""
