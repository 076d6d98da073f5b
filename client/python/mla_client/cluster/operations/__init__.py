"""Work of operators on a fleet: announcing servers, drains, shared quotas, and their command."""
