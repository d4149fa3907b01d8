"""The model of a session as its store describes it, for tests that know only a session's name."""

from ctxcache.client import CallerModel, Client


def stored_model(client: Client, session_name: str) -> CallerModel:
    """Raises SessionNotFound."""
    return CallerModel(client.models.get(client.sessions.get(session_name).model).spec)
