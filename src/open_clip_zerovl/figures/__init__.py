"""Charts and HTML pages: what all of them share."""
