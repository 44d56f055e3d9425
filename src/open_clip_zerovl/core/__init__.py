"""The ground floor: errors, flags, files, random streams, memory, processes, and the lines of open_clip."""
