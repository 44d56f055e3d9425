"""Records of training runs, charts, tables, and the one builder of HTML pages."""
