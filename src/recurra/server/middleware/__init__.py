"""What every request passes, outermost first: access, auth, draining, body limit."""
