"""A recording of a server's calls, as `ctxcache trace record` writes it."""

CALLS = """\
{"format":"ctxcache-recording","version":1,"store":{"dram_bytes":1048576,"ssd_bytes":4194304,"placement_policy":"lru"}}
{"layout":0,"token_bytes":36,"segment_bytes":12288,"segment_tokens":64,"streams":[[32,1]]}
{"at_ms":1,"call":"open","session":"0a","tenant":"0b","session_tokens":0,"layout":0,"ttl_ms":60000}
{"at_ms":2,"call":"append","session":"0a","tenant":"0b","session_tokens":64,"layout":0,"tokens":64}
{"at_ms":3,"call":"read","session":"0a","tenant":"0b","session_tokens":64,"layout":0,"tokens":64,"dram_tokens":64,"lease":1}
"""
"""A recording that was cut off."""
