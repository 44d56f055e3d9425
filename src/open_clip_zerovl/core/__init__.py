"""The ground floor: errors, files, random streams, memory, processes, lazy imports."""
