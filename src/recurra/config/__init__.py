"""Settings, frozen and resolved once. Read by the faces and the engine only."""
