"""What everything stands on: errors, files, random streams, memory, processes, lazy imports."""
