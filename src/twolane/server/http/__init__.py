"""HTTP itself: connections, limits on requests, routes and errors."""
