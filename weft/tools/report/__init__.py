"""HTML pages: plain dicts, and the templates that show them."""
