"""The rules by which hosts agree who continues a session: heads, tenure and claims."""
