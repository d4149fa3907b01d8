"""Who continues a session, where several hosts have stores: heads, and the steps of a host's copies."""
